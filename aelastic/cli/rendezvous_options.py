"""Resolves rendezvous back end, endpoint and run id from the options, as torchrun 2.15 does.

`rendezvous_fields` gives the fields of a `WorkerSpec`: `rdzv` for nodes that have to find each other, `master_addr` and
`master_port` if the user decides them, and the run id.  An option without effect is logged, one that cannot work is
refused; no back end is contacted.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from aelastic.cli.parser import Settings
from aelastic.errors import InputError
from aelastic.rdzv.settings import BACKENDS, RendezvousSettings, split_endpoint, split_endpoints

_log = logging.getLogger(__name__)

# `torch:NAME` is the handler that torchrun's agents have under that name, for a job with some in it: torch's own, and
# ours for `etcd-v3`, so each back end has one.
TORCH_PREFIX = "torch:"
# The entry point group in which packages list rendezvous handlers of torch's kind, for torchrun and for us.
_HANDLERS = "torchrun.handlers"

# torchrun's default port for several nodes.
_MASTER_PORT = 29500
# No other node can find a c10d rendezvous at one of these: torchrun's users write them for a single node.
PRIVATE_ENDPOINTS = frozenset({"", "localhost:0", "127.0.0.1:0", "[::1]:0"})
# Schedulers that number the nodes of a job: an indexed job of Kubernetes, Slurm.
_NODE_RANK_VARIABLES = ("JOB_COMPLETION_INDEX", "SLURM_NODEID")
# Slurm's number of nodes of a step of srun; the second is set for a batch script, too, which one node runs.
_NODES_VARIABLES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
# What to read when a scheduler's variable is wrong, by how its name begins.
_PAGES = {"SLURM": "docs/how-to/slurm.md", "JOB": "docs/how-to/kubernetes.md"}
# The options that a refusal is about, by its first word of these.
_ENDPOINT = ("rdzv_endpoint", "master_addr", "master_port")
_SUBJECTS = {
    "endpoint": _ENDPOINT,
    "setting": ("rdzv_conf",),
    "password": ("rdzv_conf",),
    "nodes": ("nnodes", "rdzv_backend"),
}


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
        _log_ignored(chosen, "it needs --master-port and no --standalone", "master_addr", "master_port")
        _log_ignored(chosen, "--standalone takes precedence", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "node_rank")
        return _single_node(chosen, run_id=None)
    if backend == "static":
        fewest, most = _nodes_of_scheduler(chosen, environ) or (fewest, most)
    if backend == "static" and most == 1:
        return _static_node(chosen)
    if backend == "c10d" and most == 1 and chosen["rdzv_endpoint"] in PRIVATE_ENDPOINTS:
        _log_ignored(chosen, "only --rdzv-backend static uses it", "master_addr", "master_port")
        return _single_node(chosen, run_id=chosen["rdzv_id"] or None)
    return _rendezvous(chosen, environ, fewest, most)


def _log_ignored(chosen: Settings, because: str, *dests: str) -> None:
    for dest in dests:
        if not chosen.by_dest[dest].is_default:
            _log.info("ignoring %s: %s", chosen.source(dest), because)


# One node.


def _single_node(chosen: Settings, run_id: str | None) -> dict[str, Any]:
    """Workers meet at a free port; as torchrun's do, at `localhost` unless the node has another address."""
    _log_ignored(chosen, "a single node has no other nodes to wait for", "rdzv_conf")
    return {"master_addr": chosen["local_addr"] or "localhost", "master_port": None, "run_id": run_id}


def _static_node(chosen: Settings) -> dict[str, Any]:
    is_single_node = not chosen["rdzv_endpoint"] and chosen["master_port"] is None
    if chosen["node_rank"] != 0 and not is_single_node:
        raise InputError(f"{chosen.source('node_rank')}: a single node has rank 0: use --nnodes for more nodes")
    if chosen["rdzv_endpoint"]:
        host, port = split_endpoint(chosen["rdzv_endpoint"])
        _log_ignored(chosen, "--rdzv-endpoint takes precedence", "master_addr", "master_port")
    elif chosen["master_port"] is not None:
        host, port = chosen["master_addr"], chosen["master_port"]
    else:
        _log_ignored(chosen, "it needs --master-port and no --standalone", "master_addr")
        _log_ignored(chosen, "a single node without --master-port picks a random one", "rdzv_id")
        _log_ignored(chosen, "a single node has rank 0", "node_rank")
        return _single_node(chosen, run_id=None)
    _log_ignored(chosen, "a single node has no other nodes to wait for", "rdzv_conf", "local_addr")
    return {"master_addr": host, "master_port": port, "run_id": chosen["rdzv_id"] or None}


# Nodes that have to find each other.


def _rendezvous(chosen: Settings, environ: Mapping[str, str], fewest: int, most: int) -> dict[str, Any]:
    backend = chosen["rdzv_backend"]
    check_backend(backend, chosen.source("rdzv_backend"))
    if not chosen["rdzv_id"]:
        raise InputError(f"{chosen.source('rdzv_id')}: use a run id that is not empty, the same on every node")
    is_static = backend.removeprefix(TORCH_PREFIX) == "static"
    config = dict(chosen["rdzv_conf"])
    if is_static and config.pop("rank", None) is not None:  # torchrun, too, goes by the option
        _log.info("ignoring rank in %s: use --node-rank", chosen.source("rdzv_conf"))
    endpoint = static_endpoint(chosen) if is_static else _dynamic_endpoint(chosen)
    is_at_master = is_static and not chosen["rdzv_endpoint"]
    node_rank = _static_rank(chosen, environ, most) if is_static else _preferred_rank(chosen, environ)
    try:
        settings = RendezvousSettings(
            backend=backend,
            endpoint=endpoint,
            min_nodes=fewest,
            max_nodes=most,
            node_rank=node_rank,
            local_addr=chosen["local_addr"],
            config=config,
            endpoint_from=chosen.by_dest["master_addr" if is_at_master else "rdzv_endpoint"].variable,
        )
        if backend in BACKENDS and backend.startswith("etcd"):
            from aelastic.rdzv.boards.etcd_settings import etcd_settings

            etcd_settings(settings)  # refuses what cannot work before anything is started
    except InputError as error:
        raise _with_variables(chosen, str(error)) from None
    # Of several endpoints none is the master's: workers meet at the node of rank 0, as with c10d.
    is_at_endpoint = is_static and not settings.has_several_endpoints
    host, port = split_endpoint(settings.endpoint) if is_at_endpoint else (None, None)
    return {"rdzv": settings, "master_addr": host, "master_port": port, "run_id": chosen["rdzv_id"]}


def _with_variables(chosen: Settings, why: str) -> InputError:
    """A refusal of what several options say together; names the variables among them, and the page."""
    subject = re.search("|".join(_SUBJECTS), why)
    variables = chosen.variables(*_SUBJECTS[subject[0]]) if subject else []
    named = f"{' and '.join(variables)}: " if variables else ""
    return InputError(f"{named}{why} (see docs/reference/rendezvous.md)")


def static_endpoint(chosen: Settings) -> str:
    """Where the nodes of a static rendezvous meet."""
    if chosen["rdzv_endpoint"]:
        _log_ignored(chosen, "--rdzv-endpoint takes precedence", "master_addr", "master_port")
        return str(chosen["rdzv_endpoint"])
    host = chosen["master_addr"]
    port = _MASTER_PORT if chosen["master_port"] is None else chosen["master_port"]
    endpoint = _endpoint_of(host, port)
    if chosen.by_dest["master_addr"].is_default:
        _log.info("rendezvous at %s; use --master-addr for another address", endpoint)
    return endpoint


def _endpoint_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _dynamic_endpoint(chosen: Settings) -> str:
    _log_ignored(chosen, "only --rdzv-backend static uses it", "master_addr", "master_port")
    return str(chosen["rdzv_endpoint"])


def _nodes_of_scheduler(chosen: Settings, environ: Mapping[str, str]) -> tuple[int, int] | None:
    """The number of nodes that Slurm gives a job that names its master and not `--nnodes`; `None` if it gives none.

    A batch script that runs a job on its own node has `SLURM_NNODES`, too: a master that no other node can reach means
    that, unless srun says otherwise.

    Raises:
        InputError: the variable holds no number of nodes.
    """
    is_named = not (chosen.by_dest["master_addr"].is_default and chosen.by_dest["rdzv_endpoint"].is_default)
    variable = next((name for name in _NODES_VARIABLES if environ.get(name)), None)
    if not chosen.by_dest["nnodes"].is_default or not is_named or variable is None or not environ.get("SLURM_NODEID"):
        return None
    nodes = _count_in(variable, environ, "--nnodes")
    if nodes < 1:
        raise _wrong(variable, nodes, "at least 1 node is needed", "--nnodes")
    host, _ = split_endpoints(chosen["rdzv_endpoint"] or _endpoint_of(chosen["master_addr"], 0), 0)[0]
    if variable == _NODES_VARIABLES[-1] and nodes > 1 and (host in {"localhost", "::1"} or host.startswith("127.")):
        _log.info("a single node, although %s=%d: no other node can reach %s; use --nnodes", variable, nodes, host)
        return None
    _log.info("%s=%d is the number of nodes; use --nnodes for another", variable, nodes)
    return nodes, nodes


def _static_rank(chosen: Settings, environ: Mapping[str, str], nodes: int) -> int:
    """The user's --node-rank, else the scheduler's number of this node; a static job cannot do with a wrong one.

    Raises:
        InputError: it is none of the ranks.
    """
    why = f"the node ranks of {nodes} nodes are 0 to {nodes - 1}"
    variable = next((name for name in _NODE_RANK_VARIABLES if environ.get(name)), None)
    if not chosen.by_dest["node_rank"].is_default or variable is None or chosen["rdzv_backend"] != "static":
        if chosen["node_rank"] >= nodes:
            raise InputError(f"{chosen.source('node_rank')}: {why}")
        return int(chosen["node_rank"])
    rank = _count_in(variable, environ, "--node-rank")
    if rank >= nodes:
        raise _wrong(variable, rank, why, "--node-rank")
    _log.info("%s=%d is the node rank; use --node-rank for another", variable, rank)
    return rank


def _count_in(variable: str, environ: Mapping[str, str], option: str) -> int:
    text = environ[variable]
    if not (text.isascii() and text.isdecimal()):
        raise _wrong(variable, text, "it should hold a whole number, which the scheduler sets", option)
    return int(text)


def _wrong(variable: str, value: object, why: str, option: str) -> InputError:
    page = _PAGES[variable.partition("_")[0]]
    return InputError(f"{variable}={value}: {why}: use {option}, or see {page}")


def _preferred_rank(chosen: Settings, environ: Mapping[str, str]) -> int | None:
    """The user's --node-rank, else the scheduler's number of this node if the back end is ours.

    Raises:
        InputError: the scheduler's variable holds no rank; by a wrong one, a node would take another's place.
    """
    if not chosen.by_dest["node_rank"].is_default:
        return int(chosen["node_rank"])
    variable = next((name for name in _NODE_RANK_VARIABLES if environ.get(name)), None)
    if chosen["rdzv_backend"] not in BACKENDS or variable is None:
        return None
    rank = _count_in(variable, environ, "--node-rank")
    _log.info("%s=%d is the preferred node rank; use --node-rank for another", variable, rank)
    return rank


def check_backend(backend: str, source: str) -> None:
    """Refuses an unknown name, and suggests the one that was meant.

    Args:
        source: its name in messages.

    Raises:
        InputError: there is no such back end.
    """
    name = backend.removeprefix(TORCH_PREFIX)
    if name in BACKENDS:
        return
    from difflib import get_close_matches
    from importlib.metadata import entry_points

    if name in entry_points(group=_HANDLERS).names:
        return
    if close := get_close_matches(name.lower(), BACKENDS, n=1):
        raise InputError(f"{source}: no such back end: did you mean {backend.removesuffix(name)}{close[0]}?")
    raise InputError(
        f"{source}: no such back end: use {', '.join(BACKENDS)}, {TORCH_PREFIX}NAME, "
        f"or install the package that has it (entry point group {_HANDLERS})"
    )
