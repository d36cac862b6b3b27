"""Stores: a cell with compare-and-set on one TCPStore, on several, on etcd, or in node 0.

`endpoint_cell` is the cell as one agent reads and writes it, `cell_events` are the answers, and `store` is the
interface of the stores that keep it.  `c10d` and `static` use torch's TCPStore (`tcp_store`, `endpoints`).  `etcd` is
`etcd_v3` or `etcd_v2`, which share `etcd_http` and `etcd_settings`.

`quorum` keeps the cell on several endpoints and works while a majority of them answers: `register` is its core,
`register_attempt` one attempt of it, `register_events` its events and actions, `register_cells` the content of each
store.
"""

__all__ = [
    "c10d",
    "cell_events",
    "endpoint_cell",
    "endpoints",
    "etcd",
    "etcd_http",
    "etcd_settings",
    "etcd_v2",
    "etcd_v3",
    "quorum",
    "register",
    "register_cells",
    "register_events",
    "static",
    "store",
    "tcp_store",
]
