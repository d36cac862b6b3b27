"""The agent's side of the guard: starts it, sends it sessions, and replaces it if it dies."""

from __future__ import annotations

import logging
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import anyio

from aelastic.base.host import proc_table, signals
from aelastic.base.host.children import start_program, wait_ended, waited_for
from aelastic.base.host.shortages import shortage_of
from aelastic.base.loop.threads import run_sync
from aelastic.workers import guard

_log = logging.getLogger(__name__)

# The guard needs milliseconds, unless a process survives SIGKILL; it reports that itself after 5 s.
GUARD_TIMEOUT_S = 8.0
# Something on this host kills it; continuing forever is useless.
GUARD_DEATHS_MAX = 10
# The host has refused to start it: there may be room later.
START_AGAIN_S = 1.0
# For the end of a guard that was killed because it took too long.
END_TIMEOUT_S = 0.05
# How many signs of life there are within the time after which an agent is frozen.
SIGNS = 6


class GuardProcess:
    """Starts the guard, sends it sessions, and replaces it if it dies.

    Args:
        mark: a string in the environment of every worker, and of no other process.
        scratch: a folder that the guard removes if the agent dies; `None` for none.
        silence_s: the guard kills the workers if this agent is frozen for this long; `None`: never.
    """

    def __init__(self, mark: str, scratch: Path | None, silence_s: float | None = None) -> None:
        self._mark, self._scratch, self._silence_s = mark, scratch, silence_s
        self._sessions: set[int] = set()
        self._popen: subprocess.Popen[bytes] | None = None
        self._control = -1
        self._has_warned = False  # the lack of a guard was logged
        self._signs = self._killed = -1  # eventfds, if this agent gives signs of life
        if silence_s is not None:
            self._signs, self._killed = os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ensure(self) -> None:
        """Starts the guard if none is alive; called before the first worker, and before every generation.

        Raises:
            OSError: the host refuses it.
        """
        if self._popen is not None and self._popen.poll() is None:
            return
        if self._popen is not None:
            _log.warning("the guard process died (exit code %s); starting another", self._popen.returncode)
            self._forget()
        theirs, ours = os.pipe()
        try:
            # Its input is ready before it runs, so it cleans up even after an agent that is killed at this moment.
            os.write(ours, b"".join(b"+%d\n" % session for session in sorted(self._sessions)))
            self._popen = self._start(theirs)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._control, self._has_warned = ours, False

    def _start(self, control: int) -> subprocess.Popen[bytes]:
        paths = [os.fsencode(path).hex() for path in (self._mark, str(self._scratch or ""))]
        silence_fds = [] if self._silence_s is None else [self._signs, self._killed]
        silence = [] if self._silence_s is None else [*map(str, silence_fds), str(self._silence_s)]
        return start_program(
            [proc_table.__file__, signals.__file__, guard.__file__],
            [guard.NAME, str(os.getpid()), *paths, str(control), *silence],
            stdout=subprocess.DEVNULL,
            pass_fds=(control, *silence_fds),
        )

    async def run(self) -> None:
        """Gives the guard signs of life, and replaces it if it dies.  Runs until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep, name="keep the guard")
            if self._silence_s is not None:
                tasks.start_soon(self._give_signs, self._silence_s / SIGNS, name="signs of life")

    async def _give_signs(self, interval_s: float) -> None:
        while True:
            os.eventfd_write(self._signs, 1)
            await anyio.sleep(interval_s)

    async def _keep(self) -> None:
        deaths = 0
        while deaths < GUARD_DEATHS_MAX:
            if self._popen is None:
                await anyio.sleep(START_AGAIN_S)
            else:
                await wait_ended(self._popen.pid)
                deaths += 1
            self._replace()
        _log.warning(
            "the guard process died %d times; if the agent is killed now, its workers may be left running",
            GUARD_DEATHS_MAX,
            extra={"topic": "the-guard-process-died"},
        )

    def _replace(self) -> None:
        try:
            self.ensure()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                reason = shortage_of(error) or error
                _log.warning(
                    "no guard process (%s); if the agent is killed now, its workers may be left running",
                    reason,
                    extra={"topic": "the-guard-process-died"},
                )

    def send(self, sign: str, session: int) -> None:
        (self._sessions.add if sign == "+" else self._sessions.discard)(session)
        if self._popen is None:
            return  # the next one receives all sessions
        try:
            os.write(self._control, f"{sign}{session}\n".encode())
        except BrokenPipeError:
            self._replace()

    def take_killed(self) -> bool:
        """Whether the guard has killed workers since the last call: then this agent was frozen."""
        if self._killed < 0:
            return False
        try:
            return os.eventfd_read(self._killed) > 0
        except BlockingIOError:
            return False

    async def aclose(self) -> None:
        """Makes the guard kill all that belongs to the agent, and waits until it is gone."""
        await self._end()
        for fd in (self._signs, self._killed):
            if fd >= 0:
                os.close(fd)
        self._signs = self._killed = -1

    async def _end(self) -> None:
        if (popen := self._popen) is not None:
            with suppress(BrokenPipeError):  # raised if it has died, and the pipe's reader with it
                os.write(self._control, b".\n")  # not only the end of the pipe: forked workers may hold it open
            with anyio.move_on_after(GUARD_TIMEOUT_S):
                await wait_ended(popen.pid)
            if popen.poll() == 0:  # it has done its work
                return self._forget()
            popen.kill()
        await run_sync(guard.sweep, self._sessions, os.fsencode(self._mark))
        if popen is not None:
            with anyio.move_on_after(END_TIMEOUT_S):
                await wait_ended(popen.pid)
            popen.poll()
            self._forget()
        return None

    def _forget(self) -> None:
        assert self._popen is not None
        waited_for.discard(self._popen.pid)
        if self._control >= 0:
            os.close(self._control)
        self._popen, self._control = None, -1
