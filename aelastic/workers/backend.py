"""Interface of the back end that runs the workers for the agent: start, wait, stop.

Implement it to extend the agent (torch: `SimpleElasticAgent` and its abstract
`_start_workers`, `_monitor_workers`, `_stop_workers`, `_shutdown`).  `procs.LocalWorkers` runs workers
as processes of this machine; another implementation may run them anywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aelastic.base.record import Record


class WorkerStart(Record):
    """Everything a back end needs to start one worker."""

    local_rank: int  # from 0
    entrypoint: str | Callable[..., Any]  # a program, or a function
    args: tuple[Any, ...]  # its arguments, with `${local_rank}` replaced
    env: Mapping[str, str]  # its complete environment
    stdout: Path | None  # file for its stdout; None: the agent's stream
    stderr: Path | None  # the same for stderr
    error_file: Path  # where it records an exception
    cpus: frozenset[int] | None = None  # the CPUs it may run on; None: those of the agent
    wrap: tuple[str, ...] = ()  # a program that starts the worker, and that program's first arguments
    return_file: Path | None = None  # holds a function's return value until the agent has read it

    @property
    def output_files(self) -> tuple[Path, ...]:
        """The files that the worker writes its output to, without duplicates."""
        return tuple(dict.fromkeys(path for path in (self.stdout, self.stderr) if path is not None))


class WorkerExit(Record):
    """How one worker ended.

    Args:
        exitcode: its exit code; negative for a signal, as in `subprocess`.
        return_value: the return value of a function.
        note: what the exit code does not tell, such as "could not be started".
        by_guard: the guard killed the worker because the agent was frozen.
    """

    exitcode: int
    return_value: Any = None
    note: str = ""
    by_guard: bool = False


class WorkerBackend(ABC):
    """Starts and stops the workers of one node, one generation after the other.

    Derive from it to run workers elsewhere (torch: `SimpleElasticAgent`).  The supervisor never overlaps two
    generations.  If a method raises, the agent has failed, not a worker.
    """

    async def run(self) -> None:  # noqa: B027  nothing to watch is a fair answer
        """Runs for the whole run, for anything besides the workers that needs watching.  Cancelled at its end."""

    @abstractmethod
    async def start(self, starts: Sequence[WorkerStart]) -> Mapping[int, Any]:
        """Starts all workers, and returns their ids by local rank: pids here, any name elsewhere.

        If a worker cannot be started, report it as started and let `wait` return at once, with a note.  The call is
        cancelled if the agent is asked to stop; then end the workers started so far and let the cancellation through.
        The supervisor waits `shutdown_timeout_s` for that; workers that start later get SIGKILL.
        """

    async def replace(self, start: WorkerStart) -> Any:
        """Starts a worker that replaces a cleared one, beside the others, and returns its id.

        Called for recovery in place only, which requires processes of this machine.
        """
        raise NotImplementedError

    def is_warm(self, local_rank: int) -> bool:  # noqa: ARG002
        """Whether a started worker had its modules already imported (`--preload`)."""
        return False

    @abstractmethod
    async def wait(self, local_rank: int) -> WorkerExit:
        """Waits until the worker has ended.  Called once per worker and generation."""

    async def clear(self, local_rank: int) -> None:  # noqa: B027  nothing to clear is a fair answer
        """Waits until nothing the worker left behind is alive.  Called once, after `wait`."""

    @abstractmethod
    def stop(self, local_rank: int, signum: int) -> bool:
        """Sends a signal to a worker, without waiting; SIGKILL must end it and everything that belongs to it.

        Returns whether the worker was still running.  If not, it ended by itself and is not a victim.
        """

    def describe(self, local_rank: int) -> str:
        """Returns a description of a worker that does not end, for the report."""
        return f"local rank {local_rank}"

    async def aclose(self) -> None:  # noqa: B027  nothing to give back is a fair answer
        """Releases everything that outlives a generation.  Called once, when no worker is left."""
