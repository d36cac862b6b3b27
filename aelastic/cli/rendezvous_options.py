"""Resolves rendezvous back end, endpoint and run id from the options, as torchrun 2.15 does.

`rendezvous_fields` gives the fields of a `WorkerSpec`: `rdzv` for nodes that have to find each other, `master_addr` and
`master_port` if the user decides them, and the run id.  An option without effect is logged, one that cannot work is
refused; no back end is contacted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aelastic.cli.parser import Settings
from aelastic.errors import InputError

# No other node can find a c10d rendezvous at one of these: torchrun's users write them for a single node.
PRIVATE_ENDPOINTS = frozenset({"", "localhost:0", "127.0.0.1:0", "[::1]:0"})


def rendezvous_fields(chosen: Settings, environ: Mapping[str, str]) -> dict[str, Any]:
    """Back end, address, port and run id.

    - `--standalone`: a single node, whatever else is given.
    - `static` under a scheduler: what it says of nodes and ranks, where the command line does not.
    - One node, `static`: its workers meet at the port or endpoint given, else at a free port.
    - One node, `c10d`, no endpoint or a private one: a single node, with its run id.
    - Anything else is a rendezvous.

    Raises:
        InputError: what was asked for cannot be.
    """
    backend = chosen["rdzv_backend"]
    fewest, most = chosen["nnodes"]
    if chosen["standalone"]:
        if fewest > 1:
            raise InputError(f"--standalone is for a single node: leave out --standalone, or {chosen.source('nnodes')}")
        chosen.log_ignored("it needs --master-port and no --standalone", "master_addr", "master_port")
        chosen.log_ignored("--standalone takes precedence", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "node_rank")
        return _single_node(chosen, run_id=None)
    if backend == "static" and environ.get("SLURM_NODEID"):
        from aelastic.cli.several_nodes import nodes_of_scheduler

        fewest, most = nodes_of_scheduler(chosen, environ) or (fewest, most)
    if backend == "static" and most == 1:
        return _static_node(chosen)
    if backend == "c10d" and most == 1 and chosen["rdzv_endpoint"] in PRIVATE_ENDPOINTS:
        chosen.log_ignored("only --rdzv-backend static uses it", "master_addr", "master_port")
        return _single_node(chosen, run_id=chosen["rdzv_id"] or None)
    from aelastic.cli.several_nodes import fields_of_nodes  # one node does not pay for it

    return fields_of_nodes(chosen, environ, fewest, most)


# One node.


def _single_node(chosen: Settings, run_id: str | None) -> dict[str, Any]:
    """Workers meet at a free port; as torchrun's do, at `localhost` unless the node has another address."""
    chosen.log_ignored("a single node has no other nodes to wait for", "rdzv_conf")
    return {"master_addr": chosen["local_addr"] or "localhost", "master_port": None, "run_id": run_id}


def _static_node(chosen: Settings) -> dict[str, Any]:
    is_single_node = not chosen["rdzv_endpoint"] and chosen["master_port"] is None
    if chosen["node_rank"] != 0 and not is_single_node:
        raise InputError(f"{chosen.source('node_rank')}: a single node has rank 0: use --nnodes for more nodes")
    if chosen["rdzv_endpoint"]:
        from aelastic.rdzv.settings import split_endpoint

        host, port = split_endpoint(chosen["rdzv_endpoint"])
        chosen.log_ignored("--rdzv-endpoint takes precedence", "master_addr", "master_port")
    elif chosen["master_port"] is not None:
        host, port = chosen["master_addr"], chosen["master_port"]
    else:
        chosen.log_ignored("it needs --master-port and no --standalone", "master_addr")
        chosen.log_ignored("a single node has rank 0", "node_rank")
        return _single_node(chosen, run_id=None if chosen.by_dest["rdzv_id"].is_default else chosen["rdzv_id"] or None)
    of_several = "rdzv_conf", "local_addr", "secret_file", "bind_all", "drain_wait", "admit", "no_remote_verbs"
    chosen.log_ignored("a single node has no other nodes to wait for", *of_several)
    return {"master_addr": host, "master_port": port, "run_id": chosen["rdzv_id"] or None}
