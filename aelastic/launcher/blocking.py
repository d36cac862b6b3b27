"""A supervisor for programs that wait: its loop, the program's signals, and a sign of life.

The run has a loop of its own, in a thread of its own where the calling one can't be taken: beside a loop that runs
already, and in the main thread, where the program's signal handlers run.  When `run` returns, nothing of it is left and
signal handlers are what they were.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import FrameType
from typing import Any

from aelastic.result import RunResult
from aelastic.supervisor import Supervisor

# Written when a job has ended; Python writes the numbers of signals, from 1.
_ENDED = b"\0"
# A loop that turns answers at once; a health check is not kept waiting for one that does not.
_ANSWER_TIMEOUT_S = 1.0


class BlockingRun:
    """One run of a supervisor, called from a program that waits for it.

    Args:
        signals: what stops the job, where it is called from the main thread.
        make_loop: what the job runs on.
    """

    def __init__(
        self, supervisor: Supervisor, signals: Sequence[int], make_loop: Callable[[], asyncio.AbstractEventLoop]
    ) -> None:
        self._supervisor = supervisor
        self._signals = signals
        self._make_loop = make_loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._asked: list[int] = []  # signals that the supervisor has not been told of
        self.stopped_by: int | None = None  # the first of them
        self._is_interrupted = False
        self._seen_alive = _now()

    def run(self) -> RunResult:
        """Returns when the job is over; a `KeyboardInterrupt` waits for that, too."""
        if threading.current_thread() is threading.main_thread():
            with self._handling_signals():
                return self._run_in_thread()
        return self._run_in_thread() if _is_loop_running() else self._run_on_loop()

    def _run_on_loop(self) -> RunResult:
        with asyncio.Runner(loop_factory=self._make_loop) as runner:
            return runner.run(self._main())

    async def _main(self) -> RunResult:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            self._pass_on()
            return await self._supervisor.run()
        finally:
            self._loop = None

    def _run_in_thread(self) -> RunResult:
        """Gives our loop a thread of its own.

        Beside a loop that runs in this one; and in the main thread, where signal handlers of the program around us run:
        what they raise would come out in the middle of our loop (asyncio), or be swallowed by it (uvloop).
        """
        results: list[RunResult] = []
        errors: list[BaseException] = []
        has_ended = threading.Event()
        reader, writer = socket.socketpair()
        with reader, writer:
            reader.setblocking(False)
            writer.setblocking(False)

            def body() -> None:
                try:
                    results.append(self._run_on_loop())
                except BaseException as error:  # noqa: BLE001  raised again, in the caller's thread
                    errors.append(error)
                finally:
                    has_ended.set()
                    with suppress(BlockingIOError):  # it is full: then it wakes all the same
                        writer.send(_ENDED)

            thread = threading.Thread(target=body, name="aelastic launch")
            thread.start()
            with _woken_by_signals(writer) as outer:
                interruption = self._wait_for(has_ended, reader, outer)
            thread.join()
        if interruption is not None:
            raise interruption
        if errors:
            raise errors[0]
        return results[0]

    def _wait_for(self, has_ended: threading.Event, reader: socket.socket, outer: int) -> BaseException | None:
        """Waits for the job's end; what a signal handler raises meanwhile stops the job first, and is given then."""
        interruption = None
        while not has_ended.is_set():
            try:
                select.select([reader], [], [])
                theirs = bytes(number for number in reader.recv(4096) if number and number not in self._signals)
                if theirs and outer >= 0:  # a loop that waits for us has handlers, too
                    with suppress(OSError):
                        os.write(outer, theirs)
            except BaseException as error:  # noqa: BLE001  a user's signal handler may raise anything
                interruption, self._is_interrupted = error, True
                self._call(self._pass_on)
        return interruption

    # Signals.

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        # Who ignores a signal for us (nohup, a shell's background job) wants it ignored; `None` is a handler of C code.
        before = {signum: signal.getsignal(signum) for signum in self._signals}
        handled = [signum for signum in before if before[signum] not in (signal.SIG_IGN, None)]
        try:
            for signum in handled:
                signal.signal(signum, self._on_signal)
            yield
        finally:
            for signum in handled:
                signal.signal(signum, before[signum])

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or signum
        self._asked.append(signum)
        self._call(self._pass_on)

    def _pass_on(self) -> None:
        if self._is_interrupted and self._task is not None:
            self._task.cancel()
        while self._asked:
            self._supervisor.stop(self._asked.pop(0))

    def _call(self, function: Callable[[], Any]) -> None:
        """Has the loop call it, from any thread.  Before there is one `_main` looks itself; later nobody has to."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # it was closed this moment
                loop.call_soon_threadsafe(function)

    # Signs of life.

    def last_seen_alive(self) -> int:
        """When the loop was last seen turning, in seconds of the wall clock; before and after the job that is now."""
        loop, has_turned = self._loop, threading.Event()
        if loop is None:
            return _now()

        def turn() -> None:
            self._seen_alive = _now()
            has_turned.set()

        self._call(turn)
        has_turned.wait(_ANSWER_TIMEOUT_S)
        return self._seen_alive


@contextmanager
def _woken_by_signals(writer: socket.socket) -> Iterator[int]:
    """The main thread, which runs Python's signal handlers, is woken also where another thread caught the signal.

    Gives the descriptor that was told of signals before, -1 for none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield -1
        return
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield before
    finally:
        signal.set_wakeup_fd(before)


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _now() -> int:
    return int(datetime.now(UTC).timestamp())
