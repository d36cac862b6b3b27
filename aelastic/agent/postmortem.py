"""Post-mortem of a worker: reads its return value, or builds its `ProcessFailure`.

Others decide what follows.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from aelastic.base.host.oom import OomWatch
from aelastic.base.loop.threads import in_thread, run_sync
from aelastic.base.record import Record
from aelastic.diagnose.failures.failure import (
    NOT_AVAILABLE,
    Json,
    ProcessFailure,
    parse_record,
    printable,
    read_error_file,
)
from aelastic.logs.run_logs import RunLogs
from aelastic.workers.backend import WorkerExit, WorkerStart
from aelastic.workers.states import Worker

if TYPE_CHECKING:
    from aelastic.agent.error_rules import ErrorRules
    from aelastic.agent.watches.watch import Found

# A worker may fail, or hang, together with the file system of its logs: after this time, what is known is reported.
_READ_TIMEOUT_S = 1.0
# Workers mostly fail together; with a thread for each, a large host would need a hundred.
_READS_AT_ONCE = 4
# An interpreter that imported torch ends within this time after it has printed its exception: 0.3 s, and 7 s where
# eight of them share two busy cores.
_FRESH_S = 15.0
# A value may have gigabytes; a disk that has not delivered it after this time never will.
_RETURN_VALUE_TIMEOUT_S = 300.0


class Postmortem:
    """Reads what the workers of one run left.

    Args:
        logs: their output.
        is_local: they are processes of this machine; otherwise the back end supplies their return values.
        error_rules: the rules that each failure is matched with before others receive it.
    """

    def __init__(self, logs: RunLogs, *, is_local: bool, error_rules: ErrorRules | None = None) -> None:
        self._logs = logs
        self._is_local = is_local
        self._error_rules = error_rules
        self._oom = OomWatch()
        self._readers = anyio.CapacityLimiter(_READS_AT_ONCE)

    def prepare(self) -> None:
        """Starts the process that the first failure needs."""
        if self._error_rules is not None:
            self._error_rules.prepare()

    async def return_value(self, start: WorkerStart, exit_: WorkerExit) -> Any:
        """Returns the return value of a function.

        Raises:
            Exception: whatever unpickling raises; `TimeoutError` if the disk does not answer.
        """
        if isinstance(start.entrypoint, str) or not self._is_local:
            return exit_.return_value
        from aelastic.workers.functions import read_return_value  # most starts do not need pickle

        assert start.return_file is not None
        with anyio.move_on_after(_RETURN_VALUE_TIMEOUT_S):
            return await read_return_value(start.return_file)
        raise TimeoutError(f"no answer from the disk within {_RETURN_VALUE_TIMEOUT_S:g} s")

    async def failure(self, start: WorkerStart, worker: Worker, exitcode: int, note: str) -> ProcessFailure:
        """Returns why a worker failed, as far as that is known within a second, or two if rules match errors.

        Args:
            start: how it was started.
            worker: the worker.
            exitcode: its exit code; 0 is treated as 1.
            note: an explanation that replaces that of the exit code.
        """
        oom = self._oom.explain(exitcode)
        left = await self._read(start, exitcode)
        if left is _UNREAD and not note:
            from aelastic.diagnose.failures.exit_reason import describe_exit

            place = (start.stderr or start.error_file).parent
            note = f"{describe_exit(exitcode)}; its output is not known: no answer from the disk that holds {place}"
        explain = partial(self._failure, start, worker, exitcode or 1, left, oom=oom, note=note or left.trouble)
        failure = await run_sync(explain, abandon_on_cancel=True)  # parsing takes some milliseconds
        return await self._compared_with_rules(failure)

    async def raised(
        self, start: WorkerStart, worker: Worker, exitcode: int, known: Collection[ProcessFailure]
    ) -> ProcessFailure | None:
        """Returns the exception that a worker raised by itself, although it was asked to end, or `None`.

        If several workers fail together, most of them are still ending with their own exception when they are stopped.

        Args:
            start: how it was started.
            worker: the worker.
            exitcode: its exit code.
            known: the failures that it was stopped for.
        """
        if exitcode == 0:
            return None
        left = await self._read(start, exitcode)

        def explain() -> ProcessFailure | None:
            from aelastic.diagnose.failures.exit_reason import last_exception, may_be_uncaught

            failure = self._failure(start, worker, exitcode, left)
            if parse_record(left.error_file_data)[0]:
                return failure
            cause = last_exception(left.stderr_tail)
            # A worker that our signal ended may have printed, and handled, another exception long before.
            is_same = cause is not None and printable(cause.headline) in {each.message for each in known}
            is_own = may_be_uncaught(exitcode) or (
                exitcode < 0 and cause is not None and cause.is_from_top and (left.is_fresh or is_same)
            )
            return failure.replace(message=cause.headline, traceback=cause.traceback) if cause and is_own else None

        return await run_sync(explain, abandon_on_cancel=True)

    async def of_living(self, start: WorkerStart, worker: Worker, found: Found, stack: str = "") -> ProcessFailure:
        """Returns the failure of a live worker that a watch wants stopped.

        Args:
            start: how it was started.
            worker: the worker.
            found: the finding of the watch.
            stack: its stack, for the report.
        """
        assert found.signum is not None
        oom = self._oom.explain(0)  # it is alive: the process that the kernel killed may be the one that it waits for
        left, is_final = await self._read(start, -found.signum), found.by == "stuck"
        known = {"oom": oom, "unhealthy": found.reason, "stack": stack, "is_final": is_final, "found_by": found.by}
        explain = partial(self._failure, start, worker, -found.signum, left, **known)
        return await self._compared_with_rules(await run_sync(explain, abandon_on_cancel=True))

    async def _compared_with_rules(self, failure: ProcessFailure) -> ProcessFailure:
        return failure if self._error_rules is None else await self._error_rules.matched_by(failure)

    async def _read(self, start: WorkerStart, exitcode: int) -> _Left:
        """Reads the files that a worker has left."""

        def read() -> _Left:
            from aelastic.diagnose.failures.exit_reason import may_be_uncaught

            data = read_error_file(str(start.error_file))
            is_kept = self._logs.scratch not in start.error_file.parents  # otherwise it is removed with the run
            has_file = is_kept and (data is not None or start.error_file.is_file())
            tail = self._logs.tail(start.local_rank, is_searched=data is None and may_be_uncaught(exitcode))
            is_fresh = _is_fresh(start.stderr)
            path = str(start.error_file) if has_file else NOT_AVAILABLE
            return _Left(path, data or {}, tail, self._logs.trouble(), is_fresh)

        try:
            return await in_thread(read, within_s=_READ_TIMEOUT_S, limiter=self._readers)
        except TimeoutError:
            return _UNREAD

    def _failure(self, start: WorkerStart, worker: Worker, exitcode: int, left: _Left, **known: Any) -> ProcessFailure:
        # A folder that is kept may contain only the event log.
        is_kept = start.stderr is not None and self._logs.kept in start.stderr.parents
        return ProcessFailure(
            worker.local_rank,
            worker.id if isinstance(worker.id, int) else -1,
            exitcode,
            left.error_file,
            error_file_data=left.error_file_data,
            rank=worker.global_rank,
            world_size=worker.world_size,
            log_file=str(start.stderr) if is_kept else "",
            host=socket.gethostname(),
            stderr_tail=left.stderr_tail,
            **known,
        )


class _Left(Record):
    """What a worker left in files; empty if they cannot be read."""

    error_file: str = NOT_AVAILABLE
    error_file_data: Json = {}  # noqa: RUF012  never changed
    stderr_tail: str = ""
    trouble: str = ""  # of the disks that it wrote to
    is_fresh: bool = False  # it wrote to stderr a moment ago


_UNREAD = _Left()  # the disk does not answer


def _is_fresh(stderr: Path | None) -> bool:
    try:
        return stderr is not None and abs(datetime.now(UTC).timestamp() - stderr.stat().st_mtime) < _FRESH_S
    except OSError:
        return False
