"""Post-mortem of a worker: reads its return value, or builds its `ProcessFailure`.

Nothing here decides what follows from it.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import anyio
import anyio.to_thread

from aelastic.failures.failure import ProcessFailure
from aelastic.failures.oom import OomWatch
from aelastic.group.backend import WorkerExit, WorkerStart
from aelastic.group.events import Worker
from aelastic.hangs.watch import Found
from aelastic.logs.run_logs import RunLogs

# A worker that hangs may do so with the file system of its logs: it is stopped all the same.
_LIVING_TIMEOUT_S = 1.0


class Postmortem:
    """Reads what the workers of one run left.

    Args:
        logs: what they wrote.
        is_local: they are processes of this machine; else the back end gives what they returned.
    """

    def __init__(self, logs: RunLogs, *, is_local: bool) -> None:
        self._logs = logs
        self._is_local = is_local
        self._oom = OomWatch()

    async def return_value(self, start: WorkerStart, exit_: WorkerExit) -> Any:
        """What a function returned.

        Raises:
            Exception: whatever unpickling raises.
        """
        if isinstance(start.entrypoint, str) or not self._is_local:
            return exit_.return_value
        from aelastic.workers.functions import read_return_value  # pickle is not for every start

        assert start.return_file is not None
        return await read_return_value(start.return_file)

    async def failure(self, start: WorkerStart, worker: Worker, exitcode: int, note: str) -> ProcessFailure:
        """Why a worker failed.

        Args:
            start: how it was started.
            worker: which it is.
            exitcode: its own; 0 counts as 1.
            note: what is known better than from the code.
        """
        # Reads its error file and its stderr: in a thread, since disks may hang.
        return await anyio.to_thread.run_sync(self._explain, start, worker, exitcode, note)

    async def of_living(self, start: WorkerStart, worker: Worker, found: Found, stack: str = "") -> ProcessFailure:
        """The failure of a worker that is to be stopped for what it does, or does not do.

        Args:
            start: how it was started.
            worker: which it is.
            found: what for.
            stack: where it is, for the report.
        """
        assert found.signum is not None
        signum = found.signum

        def explain(error_file: str, stderr_tail: str) -> ProcessFailure:
            return ProcessFailure(
                worker.local_rank,
                _pid_of(worker),
                -signum,
                error_file,
                rank=worker.global_rank,
                world_size=worker.world_size,
                log_file=self._log_file(start),
                host=socket.gethostname(),
                stderr_tail=stderr_tail,
                oom=self._oom.explain(0),  # it is alive: what the kernel killed may be what it waits for
                unhealthy=found.reason,
                stack=stack,
                is_final=found.by == "stuck",
            )

        with anyio.move_on_after(_LIVING_TIMEOUT_S):
            return await anyio.to_thread.run_sync(
                lambda: explain(str(start.error_file), self._logs.tail(start.local_rank)), abandon_on_cancel=True
            )
        return explain(os.devnull, "")

    def _explain(self, start: WorkerStart, worker: Worker, exitcode: int, note: str) -> ProcessFailure:
        return ProcessFailure(
            worker.local_rank,
            _pid_of(worker),
            exitcode or 1,
            str(start.error_file),
            rank=worker.global_rank,
            world_size=worker.world_size,
            log_file=self._log_file(start),
            host=socket.gethostname(),
            stderr_tail=self._logs.tail(start.local_rank),
            oom=self._oom.explain(exitcode),
            note=note or self._logs.trouble(),
        )

    def _log_file(self, start: WorkerStart) -> str:
        """The file of its stderr, if that outlives the run."""
        return str(start.stderr) if start.stderr is not None and self._logs.kept is not None else ""


def _pid_of(worker: Worker) -> int:
    return worker.id if isinstance(worker.id, int) else -1


def prepare_for_failure() -> None:
    """Loads what only a failure needs while the workers start, so that a restart need not wait for it."""
    from aelastic.failures import exit_reason as causes  # noqa: F401
