"""What a job requires of this machine: its program, torch for the workers' store, and files enough that may be open.

Whoever starts a job asks before anything is started for it, so that it is refused then, not in the midst of it.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from typing import Any

from aelastic.errors import InputError
from aelastic.spec import WorkerSpec

# Of the agent itself, as counted: streams, loop, signals, clean-up process, store, inotify, health, rendezvous (26).
# And what a start, an end or a look at the process table opens for a moment.
FILES_OF_AGENT = 36
FILES_AT_FIRST = 20  # of these, before the first worker
# With several nodes: each of three ports is held, and listens where others are told to come and on loopback.
FILES_OF_PORTS = 10
FILES_OF_FORK_SERVER = 6
# Of each worker: what reports its exit; and its two streams as they are shown.
FILES_PER_EXIT = 1
FILES_PER_OUTPUT = 2


def check_program(entrypoint: str | Callable[..., Any], env: Mapping[str, str]) -> None:
    """Refuses a program that is not on this machine.

    Args:
        entrypoint: the workers'.
        env: that they start from.

    Raises:
        InputError: no such program, or it cannot be executed.
    """
    # As `subprocess` looks for it: in the PATH of the child (`os.get_exec_path`).
    if not isinstance(entrypoint, str) or shutil.which(entrypoint, path=env.get("PATH", os.defpath)) is not None:
        return
    if os.path.dirname(entrypoint):
        there = os.path.exists(entrypoint)
        problem = "cannot be executed: check its permissions" if there else "does not exist: check the path"
        raise InputError(f"entrypoint {entrypoint} {problem}")
    if entrypoint.endswith(".py"):
        raise InputError(
            f"entrypoint {entrypoint} is not a program in PATH: for a script use entrypoint=sys.executable, "
            f"args=({entrypoint!r}, ...)"
        )
    raise InputError(f"entrypoint {entrypoint} is not a program in PATH: check its name, or give its path")


def check_torch() -> None:
    """Refuses to serve the workers' store without torch.  It is looked for, not imported.

    Raises:
        InputError: this Python has no torch.
    """
    if "torch" not in sys.modules and PathFinder.find_spec("torch") is None:
        raise InputError(
            f"torch is not installed for {sys.executable}: pip install torch "
            "(or, for workers that need no store, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)"
        )


def check_open_files(spec: WorkerSpec) -> None:
    """Refuses a job for which this process may not open files enough.

    Raises:
        InputError: the limit is too low.
    """
    limit, needed = open_files_max(), files_needed(spec)
    remedy = f"and may have {limit}: raise the limit (ulimit -n)"
    if limit is None:
        return
    if needed > limit:
        raise InputError(
            f"local_world_size is {spec.local_world_size}: its agent has up to {needed} files open, {remedy}, "
            "or start fewer workers"
        )
    nodes = 0 if spec.rdzv is None else spec.rdzv.min_nodes
    if needed + nodes > limit:
        raise InputError(f"an agent that coordinates {nodes} nodes has up to {needed + nodes} files open, {remedy}")


def files_needed(spec: WorkerSpec) -> int:
    """Descriptors of an agent with all its workers; the connections of a coordinator come on top."""
    each, shown = FILES_PER_EXIT, FILES_PER_OUTPUT
    if not isinstance(spec.entrypoint, str):
        each += 2  # what `multiprocessing` keeps of a child
    if spec.preload:
        each += 2  # the one that is parked, and a moment's of the one that starts
    if spec.watches_output:
        shown += 2  # what is searched is open once more
    for texts in (spec.duplicate_stdout_filters, spec.duplicate_stderr_filters):
        shown += 2 if texts else 0  # what is read, and what is written
    # The rest of an ended generation's output is shown while the next one starts.
    may_restart = spec.max_restarts > 0 or spec.restart_policy is not None or spec.rdzv is not None
    each += 2 * shown if may_restart else shown
    of_agent = FILES_OF_AGENT + (FILES_OF_PORTS if spec.rdzv is not None else 0)
    return of_agent + (FILES_OF_FORK_SERVER if spec.preload else 0) + each * spec.local_world_size


def files_for_connections(spec: WorkerSpec) -> float:
    """The descriptors that a coordinator's connections may take: the others are for workers, also after a failure."""
    limit = open_files_max()
    return math.inf if limit is None else max(limit - files_needed(spec), 0) + FILES_AT_FIRST + FILES_OF_PORTS


def open_files_max() -> int | None:
    """How many files this process may have open; `None` for no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit
