"""Stores: a cell with compare-and-set on one TCPStore, on several, on etcd, or in node 0.

`store.py` is the interface.  `c10d` and `static` use torch's TCPStore (`tcp_store`, `endpoints`), and so does `quorum`,
on several endpoints.  `etcd` is `etcd_v3` or `etcd_v2`, which share `etcd_http` and `etcd_settings`.
"""

__all__ = [
    "c10d",
    "endpoints",
    "etcd",
    "etcd_http",
    "etcd_settings",
    "etcd_v2",
    "etcd_v3",
    "quorum",
    "static",
    "store",
    "tcp_store",
]
