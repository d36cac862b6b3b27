"""How workers ended: what they left is read, and becomes a return value or a failure.

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
from aelastic.logs.run_logs import RunLogs
from aelastic.rdzv.protocol.messages import FailureReport

# Characters of a failure that other nodes are told; the node where it happened keeps all of it.
_MESSAGE_MAX = 8 << 10
_TRACEBACK_MAX = 32 << 10
_STACK_MAX = 8 << 10
# A worker that hangs may do so with the file system of its logs: it is stopped all the same.
_LIVING_TIMEOUT_S = 1.0


class Autopsy:
    """Of the workers of one run.

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
        from aelastic.workers.functions import read_return_value  # pickle is not for everybody's start

        assert start.return_file is not None
        return await read_return_value(start.return_file)

    async def failure(self, start: WorkerStart, worker_id: Any, exitcode: int, note: str) -> ProcessFailure:
        """Why a worker failed.

        Args:
            start: how it was started.
            worker_id: its pid, or what the back end calls it.
            exitcode: its own; 0 counts as 1.
            note: what is known better than from the code.
        """
        # Reads its error file and its stderr: in a thread, since disks may hang.
        return await anyio.to_thread.run_sync(self._explain, start, worker_id, exitcode, note)

    async def of_living(
        self, start: WorkerStart, worker_id: Any, signum: int, reason: str, stack: str = ""
    ) -> ProcessFailure:
        """The failure of a worker that is to be stopped for what it does, or does not do.

        Args:
            start: how it was started.
            worker_id: its pid, or what the back end calls it.
            signum: what it is to be stopped with.
            reason: what for.
            stack: where it stands, for the report.
        """

        def explain(error_file: str, stderr_tail: str) -> ProcessFailure:
            return ProcessFailure(
                local_rank=start.local_rank,
                pid=worker_id if isinstance(worker_id, int) else -1,
                exitcode=-signum,
                error_file=error_file,
                stderr_tail=stderr_tail,
                oom=self._oom.explain(0),  # it lives: if anybody was killed, then somebody it may be waiting for
                unhealthy=reason,
                stack=stack,
            )

        with anyio.move_on_after(_LIVING_TIMEOUT_S):
            return await anyio.to_thread.run_sync(
                lambda: explain(str(start.error_file), self._logs.tail(start.local_rank)), abandon_on_cancel=True
            )
        return explain(os.devnull, "")

    def _explain(self, start: WorkerStart, worker_id: Any, exitcode: int, note: str) -> ProcessFailure:
        return ProcessFailure(
            local_rank=start.local_rank,
            pid=worker_id if isinstance(worker_id, int) else -1,
            exitcode=exitcode or 1,
            error_file=str(start.error_file),
            stderr_tail=self._logs.tail(start.local_rank),
            oom=self._oom.explain(exitcode),
            note=note or self._logs.trouble(),
        )


def report_of(rank: int, failure: ProcessFailure, *, is_final: bool = False) -> FailureReport:
    """A failure as other nodes are told it.

    Args:
        is_final: no restart may follow.
    """
    return FailureReport(
        host=failure.host or socket.gethostname(),
        rank=rank,
        local_rank=failure.local_rank,
        pid=failure.pid,
        exitcode=failure.exitcode,
        message=failure.message[:_MESSAGE_MAX],
        traceback=failure.traceback[-_TRACEBACK_MAX:],
        timestamp_s=failure.timestamp,
        is_final=is_final,
        stack=failure.stack[:_STACK_MAX],  # the beginning is where it stood
    )


def failure_of(report: FailureReport) -> ProcessFailure:
    """The failure of another node's worker, as that node told it."""
    return ProcessFailure.from_elsewhere(
        report.local_rank,
        report.pid,
        report.exitcode,
        host=report.host,
        message=report.message,
        traceback=report.traceback,
        timestamp=report.timestamp_s,
        stack=report.stack,
    )


def prepare_for_failure() -> None:
    """Loads what only a failure needs while the workers start, so that a restart need not wait for it."""
    from aelastic.failures import exit_reason as causes  # noqa: F401
