"""The boards: a leader record on a TCPStore, on etcd, or in this process.

`c10d` and `static` use torch's TCPStore (`tcp_store`, `endpoints`), and so does `quorum`, of several endpoints; what
they have in common is `key_board`.  `etcd` speaks through a client, of etcd's API `etcd_v3` or `etcd_v2`, which
share `etcd_http` and `etcd_settings`.  `encoding` turns records into bytes, and
`writing` proves them.
"""

__all__ = [
    "c10d",
    "encoding",
    "endpoints",
    "etcd",
    "etcd_http",
    "etcd_settings",
    "etcd_v2",
    "etcd_v3",
    "quorum",
    "static",
    "tcp_store",
    "writing",
]
