"""The file timer: a FIFO on which workers set timers, and the response when one expires.

torch's `FileTimerClient` works with it unchanged, if `TORCHELASTIC_ENABLE_FILE_TIMER=1` is set for the agent; workers
find its path in `TORCHELASTIC_TIMER_FILE`.  `timer_rules.py` decides; this module handles the FIFO and the clocks, and
finds out which process belongs to which worker.


The FIFO is read on the loop, when something is written or a timer expires, and at no other time.  The agent also keeps
it open for writing, so it never ends, and it exists as long as the run: restarts do not change it.  Unlike torch's
agent, ours survives an expired timer: the worker that the timer belongs to fails.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, assert_never

import anyio
import anyio.lowlevel

from aelastic.agent.watches.watch import Found, Report, Watch
from aelastic.base.host import proc_table
from aelastic.base.loop import clock
from aelastic.diagnose.hangs import timer_rules as rules
from aelastic.errors import InputError
from aelastic.workers.backend import WorkerStart

_log = logging.getLogger(__name__)

# The path of the FIFO: the user's choice in the agent's environment, the one in use in the workers'.
TIMER_FILE_VARIABLE = "TORCHELASTIC_TIMER_FILE"
# A client that finds the FIFO full gets an exception in the middle of a training step.  This is the maximum for an
# unprivileged user (pipe(7), /proc/sys/fs/pipe-max-size): half a second at 20,000 lines/s.
FIFO_BYTES = 1 << 20
# How much to read at once: about 600 lines, for which the core needs 2 ms.
CHUNK_BYTES = 1 << 16
# No client waits for an answer: the lines of this period are read together, unless a timer expires first.
# Meanwhile 20,000 lines/s fill an eighth of the FIFO.
COALESCE_S = 0.05
# The period if the FIFO could not be enlarged: they would fill it in 30 ms.
COALESCE_SMALL_S = 0.01
# Generations between a process and the worker that it descends from.  More than any tree of data loaders has.
DEPTH_MAX = 64
# Scopes are quoted in reports and on the status line; a line of the FIFO can contain 4,000 characters.
SCOPE_CHARS = 200


class FileTimerServer(Watch):
    """The file timers of one run (torch: `FileTimerServer`).

    Args:
        env: the agent's environment; may contain the path of the FIFO.
        scratch: the folder of the FIFO otherwise.
        report: receives expired timers as findings.
    """

    def __init__(self, env: Mapping[str, str], scratch: Path, report: Report) -> None:
        self._given = env.get(TIMER_FILE_VARIABLE, "")
        self._path = self._given or str(scratch / "timers")
        self._report = report
        self._fd: int | None = None
        self._coalesce_s = COALESCE_S
        self._timers = rules.Timers()
        self._workers: dict[int, int] = {}  # pid to local rank, of this generation

    @property
    def env(self) -> Mapping[str, str]:
        return {TIMER_FILE_VARIABLE: self._path}

    def open(self) -> None:
        """Creates the FIFO.

        Raises:
            InputError: something else is at its path, or it cannot be created there.
        """
        try:
            self._make()
            # For reading and writing, so that there is always a writer, and never an end (fifo(7)).
            self._fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise self._refusal(f"cannot be made ({error.strerror})", "a path in a writable folder") from None
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, FIFO_BYTES)
        except OSError:
            self._coalesce_s = COALESCE_SMALL_S  # this user has no pages left for pipes

    def _make(self) -> None:
        try:
            os.mkfifo(self._path, 0o600)
        except FileExistsError:
            if not stat.S_ISFIFO(os.lstat(self._path).st_mode):
                raise self._refusal("exists and is not a FIFO", "another path, or remove what is there") from None
            if _is_read(self._path):
                raise self._refusal("is in use by another process", "another path for each agent of a host") from None
            os.unlink(self._path)  # left by an agent that was killed
            os.mkfifo(self._path, 0o600)
        os.chmod(self._path, 0o600)  # whatever the umask

    def _refusal(self, what: str, use: str) -> InputError:
        if self._given:
            return InputError(f"{TIMER_FILE_VARIABLE}={self._path!r} {what}: use {use}")
        return InputError(f"the FIFO for timers, {self._path}, {what}: set TMPDIR, or {TIMER_FILE_VARIABLE}, to {use}")

    def started(self, generation: int, starts: Sequence[WorkerStart], ids: Mapping[int, Any]) -> None:
        del starts
        self._workers = {pid: local_rank for local_rank, pid in ids.items() if isinstance(pid, int)}
        self._handle(rules.Started(generation, self._workers))

    def ended(self, generation: int, local_rank: int) -> None:
        self._handle(rules.Ended(generation, local_rank))

    async def run(self) -> None:
        assert self._fd is not None  # `open` came first
        while True:
            with anyio.CancelScope(deadline=self._deadline()):
                await anyio.wait_readable(self._fd)
            is_more = self._read()
            now, deadline = time.monotonic(), self._timers.deadline
            if deadline is not None and deadline <= now:
                await self._read_all()  # a timer may have been cleared just before it expired
                self._handle(rules.DeadlinePassed(), now)
            if is_more:
                await anyio.lowlevel.checkpoint()
            else:
                await anyio.sleep_until(min(clock.now() + self._coalesce_s, self._deadline()))

    def _deadline(self) -> float:
        """Returns when to wake up, by the loop's clock.

        A loop may read the time only once per iteration (uvloop does), so it may be behind the clock of the timers.
        Then we wake up early, and wait again.
        """
        deadline = self._timers.deadline
        return math.inf if deadline is None else clock.now() + deadline - time.monotonic()

    def _read(self) -> bool:
        """Reads available data, up to a chunk; returns whether there may be more."""
        assert self._fd is not None
        try:
            data = os.read(self._fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._handle(rules.DataReceived(data, time.time()))  # noqa: TID251  the clients' times are of this clock
        return len(data) == CHUNK_BYTES

    async def _read_all(self) -> None:
        """Reads everything that was written so far."""
        for _ in range(FIFO_BYTES // CHUNK_BYTES):
            if not self._read():
                return
            await anyio.lowlevel.checkpoint()

    def _handle(self, event: rules.Event, now: float | None = None) -> None:
        for action in self._timers.handle(event, time.monotonic() if now is None else now):
            self._carry_out(action)

    def _carry_out(self, action: rules.Action) -> None:
        match action:
            case rules.FindOwner(generation, pid):
                local_rank, is_gone = self._owner_of(pid)
                self._handle(rules.Belongs(generation, pid, local_rank, is_gone))
            case rules.Expired(generation, _, pid, scope, set_for_s, late_s, signum):
                local_rank, is_gone = self._owner_of(pid)  # again: the pid may be another process's by now
                if local_rank is not None and not is_gone:
                    whose = "" if pid in self._workers else f" (of its process {pid})"
                    how = f"set for {_short(set_for_s)} s, expired {_short(late_s)} s ago"
                    reason = f"timer {scope[:SCOPE_CHARS]!r}{whose}, {how}"
                    self._report(Found(generation, local_rank, "timer", reason, signum))
            case rules.Complain(kind, quote):
                _log.warning(
                    "ignoring a timer request, as it %s (further ones of this kind are not logged): %s", kind, quote
                )
            case _:
                assert_never(action)

    def _owner_of(self, pid: int) -> tuple[int | None, bool]:
        """Returns the worker that a process is, or descends from; and whether the process has ended."""
        entry = proc_table.process(pid)
        is_gone = entry is None or entry.state in "ZX"
        for _ in range(DEPTH_MAX):
            if entry is None:
                break
            # A worker leads a session: a process that lost its parent is still in it.
            for number in (entry.pid, entry.session):
                if number in self._workers:
                    return self._workers[number], is_gone
            entry = proc_table.process(entry.parent)
        return None, is_gone

    def close(self) -> None:
        if self._fd is None:
            return
        try:
            if os.path.samestat(os.lstat(self._path), os.fstat(self._fd)):
                os.unlink(self._path)
        except OSError:
            pass  # it is gone already
        os.close(self._fd)
        self._fd = None


def _is_read(path: str) -> bool:
    """Whether a process has the FIFO open for reading."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return False
        raise
    return True


def _short(seconds: float) -> str:
    """Three digits are enough."""
    return f"{float(f'{seconds:.3g}'):g}"
