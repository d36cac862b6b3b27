"""Reads the rendezvous options of a job with several nodes: where they meet, and which of them this one is.

No back end is contacted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from aelastic.cli.parser import Settings
from aelastic.errors import InputError
from aelastic.rdzv.protocol.secret_file import default_path
from aelastic.rdzv.settings import BACKENDS, RendezvousSettings, split_endpoint, split_endpoints

_log = logging.getLogger(__name__)

# `torch:NAME` is the handler that torchrun's agents use under that name, for a job with such agents: torch's own, and
# ours for `etcd-v3`, so each back end has one.
TORCH_PREFIX = "torch:"
# The entry point group in which packages list rendezvous handlers with torch's interface, for torchrun and for us.
_HANDLERS = "torchrun.handlers"

# torchrun's default port for several nodes.
_MASTER_PORT = 29500
# Schedulers that number the nodes of a job: an indexed job of Kubernetes, Slurm.
_NODE_RANK_VARIABLES = ("JOB_COMPLETION_INDEX", "SLURM_NODEID")
# Slurm's number of nodes in an srun step; the second is also set for a batch script, which runs on one node.
_NODES_VARIABLES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
# What to read when a scheduler's variable is wrong, by how its name begins.
_PAGES = {"SLURM": "docs/how-to/slurm.md", "JOB": "docs/how-to/kubernetes.md"}
# Options that decide together how the nodes meet.
_TOGETHER = ("rdzv_backend", "rdzv_endpoint", "master_addr", "master_port", "rdzv_conf", "secret_file", "nnodes")


def fields_of_nodes(chosen: Settings, environ: Mapping[str, str], fewest: int, most: int) -> dict[str, Any]:
    """Returns the fields of a `WorkerSpec` for a job with several nodes.

    Raises:
        InputError: the options contradict each other, or cannot work.
    """
    backend = chosen["rdzv_backend"]
    check_backend(backend, chosen.source("rdzv_backend"))
    if not chosen["rdzv_id"]:
        raise InputError(f"{chosen.source('rdzv_id')}: use a run id that is not empty, the same on every node")
    is_static = backend.removeprefix(TORCH_PREFIX) == "static"
    config = dict(chosen["rdzv_conf"])
    if is_static and config.pop("rank", None) is not None:  # torchrun also uses the option
        _log.info("ignoring rank in %s: use --node-rank", chosen.source("rdzv_conf"))
    if is_static:
        endpoint = static_endpoint(chosen)
    else:
        chosen.log_ignored("only --rdzv-backend static uses it", "master_addr", "master_port")
        endpoint = str(chosen["rdzv_endpoint"])
    is_at_master = is_static and not chosen["rdzv_endpoint"]
    # The user's, else the credential of a service; one in the settings of the rendezvous is found there.
    is_given = chosen["secret_file"] or "secret_file" in config or backend.startswith(TORCH_PREFIX)
    node_rank = _node_rank(chosen, environ, most if is_static else None)
    try:
        settings = RendezvousSettings(
            **{
                **chosen.fields_of(RendezvousSettings),
                "endpoint": endpoint,
                "min_nodes": fewest,
                "max_nodes": most,
                "node_rank": node_rank,
                "config": config,
                "secret_file": (chosen["secret_file"] or None) if is_given else default_path(environ),
                "remote_requests": not chosen["no_remote_requests"],
                "endpoint_from": chosen.by_dest["master_addr" if is_at_master else "rdzv_endpoint"].variable,
            }
        )
        if backend in BACKENDS and backend.startswith("etcd"):
            from aelastic.rdzv.stores.etcd_settings import etcd_settings

            etcd_settings(settings)  # refuses what cannot work before anything is started
    except InputError as error:
        # One of them is wrong: name those that are set by variables, which a user does not see, and the page.
        variables = chosen.variables(*_TOGETHER)
        named = f" (set by variables: {', '.join(variables)})" if variables else ""
        raise InputError(f"{error}{named}", topic=error.topic or "a-rendezvous-setting-is-not-accepted") from None
    # If there are several endpoints, none is the master's: workers meet at the node of rank 0, as with c10d.
    is_at_endpoint = is_static and not settings.has_several_endpoints
    host, port = split_endpoint(settings.endpoint) if is_at_endpoint else (None, None)
    return {"rdzv": settings, "master_addr": host, "master_port": port, "run_id": chosen["rdzv_id"]}


def static_endpoint(chosen: Settings) -> str:
    """Returns where the nodes of a static rendezvous meet."""
    if chosen["rdzv_endpoint"]:
        chosen.log_ignored("--rdzv-endpoint takes precedence", "master_addr", "master_port")
        return str(chosen["rdzv_endpoint"])
    host = chosen["master_addr"]
    port = _MASTER_PORT if chosen["master_port"] is None else chosen["master_port"]
    endpoint = _endpoint_of(host, port)
    if chosen.by_dest["master_addr"].is_default:
        _log.info("rendezvous at %s; use --master-addr for another address", endpoint)
    return endpoint


def _endpoint_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def nodes_of_scheduler(chosen: Settings, environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns Slurm's number of nodes for a job that names its master but not `--nnodes`, or `None`.

    A batch script that runs a job on its own node also has `SLURM_NNODES`: a master that no other node can reach means
    that, unless srun has set its own variable.

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


def _node_rank(chosen: Settings, environ: Mapping[str, str], nodes: int | None) -> int | None:
    """The user's --node-rank, else the scheduler's number of this node where the back end takes it.

    Args:
        nodes: of a static job, which cannot do with another rank than theirs; `None`: it is a preference.

    Raises:
        InputError: it is none of the ranks; by a wrong preference, a node would take another's place.
    """
    backend, is_named = chosen["rdzv_backend"], not chosen.by_dest["node_rank"].is_default
    takes = backend in BACKENDS if nodes is None else backend == "static"
    variable = next((name for name in _NODE_RANK_VARIABLES if environ.get(name)), None)
    why = "" if nodes is None else f"the node ranks of {nodes} nodes are 0 to {nodes - 1}"
    if is_named or variable is None or not takes:
        if nodes is None:
            return int(chosen["node_rank"]) if is_named else None
        if chosen["node_rank"] >= nodes:
            raise InputError(f"{chosen.source('node_rank')}: {why}")
        return int(chosen["node_rank"])
    rank = _count_in(variable, environ, "--node-rank")
    if nodes is not None and rank >= nodes:
        raise _wrong(variable, rank, why, "--node-rank")
    what = "preferred node rank" if nodes is None else "node rank"
    _log.info("%s=%d is the %s; use --node-rank for another", variable, rank, what)
    return rank


def _count_in(variable: str, environ: Mapping[str, str], option: str) -> int:
    text = environ[variable]
    if not (text.isascii() and text.isdecimal()):
        raise _wrong(variable, text, "it should hold a whole number, which the scheduler sets", option)
    return int(text)


def _wrong(variable: str, value: object, why: str, option: str) -> InputError:
    page = _PAGES[variable.partition("_")[0]]
    return InputError(
        f"{variable}={value}: {why}: use {option}, or see {page}", topic="a-variable-of-the-scheduler-does-not-fit"
    )


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
