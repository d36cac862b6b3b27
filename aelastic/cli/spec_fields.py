"""The fields of a `WorkerSpec` that more than one option decides.

`arguments` adds these to the fields that one option decides alone.

- `rendezvous_fields`: back end, address and run id, as torchrun 2.15 resolves them.  No back end is contacted.
- `output_fields`: where output goes.  A class of a package (`--logs-specs`) is loaded and called here, as torchrun
  does; if it imports torch, the agent does.
- `hang_fields`: when a worker hangs.
- `check_effects`: options that can be read but have no effect: an unknown key, ranks of no worker, an option after
  the script.

An option without effect is logged if the job can run anyway, and refused if nothing sensible remains.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from aelastic.cli.parser import Settings
from aelastic.diagnose.hangs.options import Steps
from aelastic.errors import InputError
from aelastic.settings import Std, Streams, streams_of

_log = logging.getLogger(__name__)

# No other node can find a c10d rendezvous at one of these: torchrun's users write them for a single node.
PRIVATE_ENDPOINTS = frozenset({"", "localhost:0", "127.0.0.1:0", "[::1]:0"})
# The entry point group in which packages list `LogsSpecs` classes, for torchrun and for us.
_LOGS_SPECS = "torchrun.logs_specs"
# torch lists its own class under this name; we use ours instead.
_DEFAULT = "default"
# Our options that few scripts have themselves.
_OF_THE_AGENT = (
    "nproc_per_node", "nnodes", "node_rank", "standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf",
    "max_restarts", "local_ranks_filter",
)  # fmt: skip


# Where nodes, and workers, meet.


def rendezvous_fields(chosen: Settings, environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns back end, address, port and run id.

    - `--standalone`: a single node, whatever else is given; it keeps its run id, which torchrun drops.
    - `static` under a scheduler: the scheduler's nodes and ranks, unless the command line sets them.
    - One node, `static`: its workers meet at the port or endpoint given, else at a free port.
    - One node, `c10d`, no endpoint or a private one: a single node, with its run id.
    - Anything else is a rendezvous.

    Raises:
        InputError: the options contradict each other, or cannot work.
    """
    backend = chosen["rdzv_backend"]
    fewest, most = chosen["nnodes"]
    if chosen["standalone"]:
        if fewest > 1:
            raise InputError(f"--standalone is for a single node: leave out --standalone, or {chosen.source('nnodes')}")
        chosen.log_ignored("it needs --master-port and no --standalone", "master_addr", "master_port")
        chosen.log_ignored("--standalone takes precedence", "rdzv_backend", "rdzv_endpoint", "node_rank")
        return _single_node(chosen, run_id=_given_id(chosen))
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


def _given_id(chosen: Settings) -> str | None:
    """Returns the user's run id, if any."""
    return None if chosen.by_dest["rdzv_id"].is_default else chosen["rdzv_id"] or None


def _single_node(chosen: Settings, run_id: str | None) -> dict[str, Any]:
    """Returns the fields of a single node: workers meet at a free port of `localhost`, or of `--local-addr`."""
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
        return _single_node(chosen, run_id=_given_id(chosen))
    of_several = "rdzv_conf", "local_addr", "secret_file", "bind_all", "drain_wait", "admit", "no_remote_requests"
    chosen.log_ignored("a single node has no other nodes to wait for", *of_several)
    return {"master_addr": host, "master_port": port, "run_id": chosen["rdzv_id"] or None}


# Output.


def output_fields(chosen: Settings) -> dict[str, Any]:
    """Returns folder, prefix and a package's class; the other log options are fields unchanged.

    Raises:
        InputError: the folder cannot be written, or the class of `--logs-specs` is missing or raises.
    """
    if chosen["log_dir"] not in {"", None, os.devnull}:  # /dev/null keeps nothing
        _check_can_write(Path(chosen["log_dir"]), chosen.source("log_dir"))
    return {
        "log_dir": Path(chosen["log_dir"]) if chosen["log_dir"] else None,
        "log_line_prefix_template": chosen["log_line_prefix_template"] or None,
        "logs_specs": logs_specs_of(chosen),
    }


def _check_can_write(folder: Path, source: str) -> None:
    """Makes and removes a folder in the nearest existing one: permission bits are not enough (root, read-only)."""
    try:
        nearest = folder.absolute()
        while not os.path.lexists(nearest):
            nearest = nearest.parent
        probe = nearest / f".aelastic-probe-{os.urandom(8).hex()}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise InputError(f"{source}: cannot write there ({error.strerror}): choose another folder") from None


def ui_of(chosen: Settings) -> Any:
    """Returns what a terminal shows while the job runs.

    Raises:
        InputError: a package that this needs is not installed.
    """
    if chosen["ui"] == "view":
        from importlib.util import find_spec

        if find_spec("rich") is None:
            raise InputError(f"{chosen.source('ui')}: rich is not installed: pip install rich, or use line")
    return chosen["ui"]


def logs_specs_of(chosen: Settings) -> Any:
    """Returns an object of the class that a package lists under the given name; `None` for our own.

    Raises:
        InputError: the class is missing, or raises.
    """
    name = chosen["logs_specs"]
    if name in {None, _DEFAULT}:
        return None
    from importlib.metadata import entry_points

    source = chosen.source("logs_specs")
    listed = entry_points(group=_LOGS_SPECS)
    if name not in listed.names:
        known = ", ".join(sorted({_DEFAULT, *listed.names}))
        raise InputError(
            f"{source}: no installed package has it (entry point group {_LOGS_SPECS}): use one of {known}, "
            "or install the package"
        )
    try:
        logs_specs_class = listed[name].load()
        return logs_specs_class(
            log_dir=chosen["log_dir"],
            redirects=_as_torchs(chosen["redirects"]),
            tee=_as_torchs(chosen["tee"]),
            local_ranks_filter=None if chosen["local_ranks_filter"] is None else set(chosen["local_ranks_filter"]),
        )
    except Exception as error:  # the package's own code may raise anything
        raise InputError(f"{source}: {type(error).__name__}: {error}") from error


def _as_torchs(streams: Streams) -> Any:
    """Returns the choice as torch's own type, because a class derived from torch's compares by type."""
    torchs = getattr(sys.modules.get("torch.distributed.elastic.multiprocessing"), "Std", Std)
    if isinstance(streams, Std):
        return torchs(int(streams))
    return {local_rank: torchs(int(choice)) for local_rank, choice in streams.items()}


# Hangs.


def hang_fields(chosen: Settings) -> dict[str, Any]:
    """Returns the fields of hang detection; refuses its options if they would have no effect."""
    timeout, expected, ranks = chosen["hang_timeout"], chosen["expect_output"], chosen.by_dest["expect_output_ranks"]
    is_timed = timeout is not None
    for dest, is_used in (("hang_signals", is_timed), ("hang_action", is_timed or expected is not None)):
        if not is_used and not chosen.by_dest[dest].is_default:
            raise InputError(f"{chosen.source(dest)}: no effect without hang detection: add --hang-timeout")
    steps = timeout.times if isinstance(timeout, Steps) else None
    if steps is not None and chosen["progress"] is None and chosen["recovery"] != "in-place":
        raise InputError(f"{chosen.source('hang_timeout')}: no step is known without --progress: add it")
    if expected is None and not ranks.is_default:
        raise InputError(f"{ranks.source}: no effect without --expect-output: add it")
    if expected is not None:
        expected = expected.replace(ranks=ranks.value)
    timeout_s = timeout if steps is None else None
    return {"hang_timeout_s": timeout_s, "hang_timeout_steps": steps, "expect_output": expected}


# Options without effect.


def check_effects(chosen: Settings, local_world_size: int) -> None:
    """Looks for options about things that this job does not have.

    Raises:
        InputError: the job would show, or watch, nothing.
    """
    _check_rdzv_keys(chosen)
    _check_arguments(chosen)
    _check_meeting_point(chosen)
    there = range(local_world_size)
    is_single_node = chosen["standalone"] or chosen["nnodes"][1] == 1
    # Other nodes may have more workers than this one.
    log = _log.warning if is_single_node else _log.info
    has_files = _any_of(chosen["tee"], there) or _any_of(chosen["redirects"], there)
    _check_ranks(chosen, "local_ranks_filter", there, log, is_needed=is_single_node and not has_files)
    for dest in ("tee", "redirects"):
        if isinstance(chosen[dest], Mapping):
            missing = [rank for rank in chosen[dest] if rank not in there]
            _log_missing(chosen.source(dest), missing, "local rank", there, log)
    world = there if is_single_node else range(chosen["nnodes"][1] * local_world_size)
    _check_ranks(chosen, "expect_output_ranks", world, log, is_needed=is_single_node)
    for stream, dest in ((Std.OUT, "duplicate_stdout_filters"), (Std.ERR, "duplicate_stderr_filters")):
        in_files = _any_of(chosen["tee"], there, stream) or _any_of(chosen["redirects"], there, stream)
        if chosen[dest] and not in_files and chosen["logs_specs"] is None:
            name = "stdout" if stream is Std.OUT else "stderr"
            _log.warning("%s: no effect, %s does not go to files: add --tee %d", chosen.source(dest), name, stream)


def _any_of(streams: Std | Mapping[int, Std], ranks: Iterable[int], of: Std = Std.ALL) -> bool:
    return any(streams_of(streams, rank) & of for rank in ranks)


def _check_ranks(chosen: Settings, dest: str, there: range, log: Callable[..., None], *, is_needed: bool) -> None:
    """Logs ranks that do not exist; raises if one is needed and none exists."""
    if not chosen[dest]:
        return
    source, missing = chosen.source(dest), sorted(set(chosen[dest]) - set(there))
    what = "rank" if dest == "expect_output_ranks" else "local rank"
    if is_needed and len(missing) == len(chosen[dest]):
        raise InputError(f"{source}: no worker has {_listed(what, missing)}: {_known(there)}")
    _log_missing(source, missing, what, there, log)


def _log_missing(source: str, missing: list[int], what: str, there: range, log: Callable[..., None]) -> None:
    if missing:
        log("%s: no worker here has %s: %s", source, _listed(what, missing), _known(there))


def _listed(what: str, ranks: list[int]) -> str:
    return f"{what}{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _known(there: range) -> str:
    return "the only rank is 0" if len(there) == 1 else f"ranks are 0 to {len(there) - 1}"


def _check_rdzv_keys(chosen: Settings) -> None:
    if not chosen["rdzv_conf"]:
        return
    from aelastic.rdzv.settings import BACKENDS, KEYS, is_used, repeated_keys

    for key in repeated_keys(chosen.by_dest["rdzv_conf"].text or ""):  # torchrun silently takes the last
        _log.warning("--rdzv-conf: key %s is given several values, and the last one is used", key)
    backend = chosen["rdzv_backend"]
    if backend not in BACKENDS:
        return  # its handler may read any key
    # A single node waits for no others, so no key has an effect.
    is_alone = chosen["standalone"] or (backend == "static" and chosen["nnodes"][1] == 1)
    for key in chosen["rdzv_conf"]:
        if key not in KEYS:
            _log.warning("--rdzv-conf: unknown key %s is ignored%s", key, did_you_mean(key, KEYS))
        elif not is_alone and not is_used(key, backend):
            _log.warning(
                "--rdzv-conf: key %s has no effect with %s: it is for %s", key, backend, ", ".join(KEYS[key].backends)
            )


def _check_arguments(chosen: Settings) -> None:
    """Looks for our own options among the script's arguments, which follow the script."""
    for arg in chosen.script_args:
        name = arg.partition("=")[0].replace("_", "-")
        dest = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and dest in _OF_THE_AGENT and chosen.by_dest[dest].is_default:
            _log.warning(
                "%s was passed to %s, not to aelastic: put aelastic's options before the script", name, chosen.script
            )


def _check_meeting_point(chosen: Settings) -> None:
    """Warns if the endpoint of a job with several nodes is a loopback address."""
    is_static = chosen["rdzv_backend"] == "static" and chosen["nnodes"][1] > 1 and not chosen["rdzv_endpoint"]
    if is_static and chosen.by_dest["master_addr"].is_default:
        here = chosen["master_addr"]
        _log.warning("the nodes meet at %s, which is this machine: use --master-addr with node rank 0's address", here)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a question for the end of a message; empty if no known word is similar."""
    from difflib import get_close_matches  # only a misspelled command line pays for it

    close = get_close_matches(word, sorted(known), n=1)
    return f": did you mean {close[0]}?" if close else ""
