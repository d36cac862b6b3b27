"""Interface of what runs the workers for the agent: start, wait, stop.

This is the place to extend the agent (torch: `SimpleElasticAgent` and its abstract
`_start_workers`, `_monitor_workers`, `_stop_workers`, `_shutdown`).  `procs.LocalWorkers` runs them
as processes of this machine; another implementation may run them anywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aelastic.core.record import Record


class WorkerStart(Record):
    """One worker to be started, complete: nothing else is looked up."""

    local_rank: int
    entrypoint: str | Callable[..., Any]
    args: tuple[Any, ...]
    env: Mapping[str, str]
    stdout: Path | None  # None: the agent's own stream
    stderr: Path | None
    error_file: Path
    cpus: frozenset[int] | None = None  # the CPUs it may run on; None: as the agent
    wrap: tuple[str, ...] = ()  # a program that starts it, and that program's arguments before it
    return_file: Path | None = None  # where a function's return value is kept until the agent has read it

    @property
    def output_files(self) -> tuple[Path, ...]:
        """The files that it writes its output to, each once."""
        return tuple(dict.fromkeys(path for path in (self.stdout, self.stderr) if path is not None))


class WorkerExit(Record):
    """How one worker ended.

    `exitcode` is negative for a signal, as in `subprocess`; `note` says what the code cannot (the
    program could not be started, say).  `by_guard`: the agent was frozen, and its guard has killed the worker.
    """

    exitcode: int
    return_value: Any = None
    note: str = ""
    by_guard: bool = False


class WorkerBackend(ABC):
    """Runs one generation of workers after the other; the supervisor never overlaps two.

    Whatever a method raises is a failure of the agent, not of a worker.
    """

    async def run(self) -> None:  # noqa: B027  nothing to watch is a fair answer
        """Watches what has to be watched besides the workers, during the whole run.  Cancelled at its end."""

    @abstractmethod
    async def start(self, starts: Sequence[WorkerStart]) -> Mapping[int, Any]:
        """Starts every worker; gives local rank to worker id (a pid here; any name elsewhere).

        A worker that cannot be started counts as started and ends at once, with a note.  Cancelled, because the agent
        is asked to stop meanwhile, it ends what it has started and lets the cancellation through.  A start that is not
        cancelled within `shutdown_timeout_s` is left behind: what it starts then gets SIGKILL.
        """

    def is_warm(self, local_rank: int) -> bool:  # noqa: ARG002
        """Whether a worker that was started had modules imported already (`--preload`)."""
        return False

    @abstractmethod
    async def wait(self, local_rank: int) -> WorkerExit:
        """Returns when the worker has ended.  Called once per worker and generation."""

    async def clear(self, local_rank: int) -> None:  # noqa: B027  nothing to clear is a fair answer
        """Returns when nothing the worker left behind is alive.  Called once, after `wait`."""

    @abstractmethod
    def stop(self, local_rank: int, signum: int) -> bool:
        """Asks a worker to end with a signal; SIGKILL ends it and all that belongs to it.  Does not wait.

        Gives whether the worker was still running: one that had ended by itself is no victim of ours.
        """

    def describe(self, local_rank: int) -> str:
        """What can be told about a worker that does not end, for the report."""
        return f"local rank {local_rank}"

    async def aclose(self) -> None:  # noqa: B027  nothing to give back is a fair answer
        """Gives back whatever outlives a generation.  Called once, when no worker is left."""
