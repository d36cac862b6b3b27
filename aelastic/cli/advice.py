"""Options that can be read, and have no effect: an unknown key, ranks that no worker has, an option after the script.

`check_effects` warns where the job can run all the same, and refuses where nothing sensible is left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from aelastic.cli.parser import Settings
from aelastic.errors import InputError
from aelastic.settings import Std, streams_of

_log = logging.getLogger(__name__)

# Options that few scripts have themselves.
_OF_THE_AGENT = (
    "nproc_per_node", "nnodes", "node_rank", "standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf",
    "max_restarts", "local_ranks_filter",
)  # fmt: skip


def check_effects(chosen: Settings, local_world_size: int) -> None:
    """Looks for options that name what this job does not have.

    Raises:
        InputError: the job would show, or watch, nothing.
    """
    _check_rdzv_keys(chosen)
    _check_arguments(chosen)
    _check_meeting_point(chosen)
    there = range(local_world_size)
    is_single_node = chosen["standalone"] or chosen["nnodes"][1] == 1
    # Elsewhere a node may have more workers than this one.
    log = _log.warning if is_single_node else _log.info
    has_files = _any_of(chosen["tee"], there) or _any_of(chosen["redirects"], there)
    _check_ranks(chosen, "local_ranks_filter", there, log, is_needed=is_single_node and not has_files)
    for dest in ("tee", "redirects"):
        if isinstance(chosen[dest], Mapping):
            missing = [rank for rank in chosen[dest] if rank not in there]
            _tell_of(chosen.source(dest), missing, "local rank", there, log)
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
    """Tells of ranks that are not there; refuses where none is, and one is needed."""
    if not chosen[dest]:
        return
    source, missing = chosen.source(dest), sorted(set(chosen[dest]) - set(there))
    what = "rank" if dest == "expect_output_ranks" else "local rank"
    if is_needed and len(missing) == len(chosen[dest]):
        raise InputError(f"{source}: no worker has {_listed(what, missing)}: {_known(there)}")
    _tell_of(source, missing, what, there, log)


def _tell_of(source: str, missing: list[int], what: str, there: range, log: Callable[..., None]) -> None:
    if missing:
        log("%s: no worker here has %s: %s", source, _listed(what, missing), _known(there))


def _listed(what: str, ranks: list[int]) -> str:
    return f"{what}{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _known(there: range) -> str:
    return "the only rank is 0" if len(there) == 1 else f"ranks are 0 to {len(there) - 1}"


def _check_rdzv_keys(chosen: Settings) -> None:
    if not chosen["rdzv_conf"]:
        return
    from aelastic.rdzv.settings import BACKENDS, KEYS, is_used

    backend = chosen["rdzv_backend"]
    if backend not in BACKENDS:
        return  # its handler may read any
    # Such a node has no others to wait for, so that no key has an effect.
    is_alone = chosen["standalone"] or (backend == "static" and chosen["nnodes"][1] == 1)
    for key in chosen["rdzv_conf"]:
        if key not in KEYS:
            _log.warning("--rdzv-conf: unknown key %s is ignored%s", key, did_you_mean(key, KEYS))
        elif not is_alone and not is_used(key, backend):
            _log.warning("--rdzv-conf: key %s has no effect with %s: it is for %s", key, backend, ", ".join(KEYS[key]))


def _check_arguments(chosen: Settings) -> None:
    """Looks for our own options among the script's arguments: they begin behind the script."""
    for arg in chosen.script_args:
        name = arg.partition("=")[0].replace("_", "-")
        dest = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and dest in _OF_THE_AGENT and chosen.by_dest[dest].is_default:
            _log.warning("%s goes to %s: an option of aelastic comes before the script", name, chosen.script)


def _check_meeting_point(chosen: Settings) -> None:
    """Warns if the endpoint of a job with several nodes is a loopback address."""
    is_static = chosen["rdzv_backend"] == "static" and chosen["nnodes"][1] > 1 and not chosen["rdzv_endpoint"]
    if is_static and chosen.by_dest["master_addr"].is_default:
        here = chosen["master_addr"]
        _log.warning("the nodes meet at %s, which is this machine: use --master-addr with node rank 0's address", here)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question at the end of a message; empty if nothing is close."""
    from difflib import get_close_matches  # only a misspelled command line pays for it

    close = get_close_matches(word, sorted(known), n=1)
    return f": did you mean {close[0]}?" if close else ""
