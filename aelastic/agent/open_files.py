"""How many files an agent opens, and whether it may."""

from __future__ import annotations

import math
import resource

from aelastic.errors import InputError
from aelastic.spec import WorkerSpec

# Files of the agent itself, as counted: streams, loop, signals, clean-up process, store, inotify, health, rendezvous
# (26), plus those that a start, an end or a look at the process table opens for a moment.
FILES_OF_AGENT = 36
FILES_AT_FIRST = 20  # how many of these are open before the first worker
# With several nodes: each of three ports is held, and listens at its advertised address and on loopback.
FILES_OF_PORTS = 10
FILES_OF_FORK_SERVER = 6
# For each worker: the descriptor that reports its exit; and its two streams, for the console.
FILES_PER_EXIT = 1
FILES_PER_OUTPUT = 2


def check_open_files(spec: WorkerSpec) -> None:
    """Rejects a job for which this process may not open enough files.

    Raises:
        InputError: the limit is too low.
    """
    limit, needed = open_files_max(), files_needed(spec)
    remedy = f"and may open {limit}: raise the limit (ulimit -n)"
    if limit is None:
        return
    if needed > limit:
        raise InputError(
            f"local_world_size is {spec.local_world_size}: its agent opens up to {needed} files, {remedy}, "
            "or start fewer workers",
            topic="too-few-open-files",
        )
    nodes = 0 if spec.rdzv is None else spec.rdzv.min_nodes
    if needed + nodes > limit:
        raise InputError(
            f"an agent that leads {nodes} nodes opens up to {needed + nodes} files, {remedy}",
            topic="too-few-open-files",
        )


def files_needed(spec: WorkerSpec) -> int:
    """Returns the number of descriptors of an agent with all its workers, without the connections of a leader."""
    each, shown = FILES_PER_EXIT, FILES_PER_OUTPUT
    if not isinstance(spec.entrypoint, str):
        each += 2  # those that `multiprocessing` keeps for a child
    if spec.preload:
        each += 2  # that of the parked process, and for a moment that of the starting one
    if spec.watches_output:
        shown += 2  # searched files are open once more
    for texts in (spec.duplicate_stdout_filters, spec.duplicate_stderr_filters):
        shown += 2 if texts else 0  # the one that is read, and the one that is written
    # The remaining output of an ended generation is shown while the next one starts.
    may_restart = spec.max_restarts > 0 or spec.restart_policy is not None or spec.rdzv is not None
    each += 2 * shown if may_restart else shown
    of_agent = FILES_OF_AGENT + (FILES_OF_PORTS if spec.rdzv is not None else 0)
    return of_agent + (FILES_OF_FORK_SERVER if spec.preload else 0) + each * spec.local_world_size


def files_for_connections(spec: WorkerSpec) -> float:
    """Returns how many descriptors a leader's connections may use: the others are for workers, also after a failure."""
    limit = open_files_max()
    return math.inf if limit is None else max(limit - files_needed(spec), 0) + FILES_AT_FIRST + FILES_OF_PORTS


def open_files_max() -> int | None:
    """Returns how many files this process may have open; `None` for no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit
