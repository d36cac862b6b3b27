"""The boards: a leader record on a TCPStore, on etcd, or in this process.

`c10d` and `static` use torch's TCPStore (`tcp_store`, `endpoints`), and so does `quorum`, of several endpoints; what it
has in common with `c10d` is `key_board`.  `etcd` chooses between `etcd_v3` and `etcd_v2`, which share `etcd_http` and
`etcd_settings`, and `etcd_v3_calls` is etcd's v3 API.  `encoding` turns records into bytes.
"""

__all__ = [
    "c10d",
    "endpoints",
    "etcd",
    "etcd_http",
    "etcd_settings",
    "etcd_v2",
    "etcd_v3",
    "etcd_v3_calls",
    "quorum",
    "static",
    "tcp_store",
]
