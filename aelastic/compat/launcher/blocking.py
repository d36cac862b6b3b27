"""Runs a `Supervisor` synchronously for `elastic_launch`: its loop, the program's signals, and a health check.

The run has a loop of its own, in a thread of its own.  When `run` returns, nothing of the run is left and signal
handlers are what they were.
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
# A running loop answers at once; a health check does not wait longer for one that hangs.
_ANSWER_TIMEOUT_S = 1.0


class BlockingRun:
    """One run of a supervisor, for a program that blocks until it has ended.

    Args:
        signals: the signals that stop the job, handled if the caller is the main thread.
        make_loop: makes the event loop that the job runs on.
    """

    def __init__(
        self, supervisor: Supervisor, signals: Sequence[int], make_loop: Callable[[], asyncio.AbstractEventLoop]
    ) -> None:
        self._supervisor = supervisor
        self._signals = signals
        self._make_loop = make_loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._received: list[int] = []  # signals not yet passed on to the supervisor
        self.stopped_by: int | None = None  # the first of them
        self._is_interrupted = False
        self._seen_alive = _now()

    def run(self) -> RunResult:
        """Returns when the job has ended; a `KeyboardInterrupt` is also raised only then."""
        if threading.current_thread() is threading.main_thread():
            with self._handling_signals():
                return self._run_in_thread()
        return self._run_in_thread()

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
        """Runs the job's loop in a thread of its own.

        Needed if a loop runs in the calling thread, and in the main thread, where the program's signal handlers run: an
        exception that they raise would surface in the middle of the job's loop (asyncio), or be lost in it (uvloop).
        In any thread, the frames of the caller, and what they hold, would be held by those of the loop until the next
        collection: cancelled tasks of anyio are cycles.
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
                    with suppress(BlockingIOError):  # full, so the reader wakes anyway
                        writer.send(_ENDED)

            thread = threading.Thread(target=body, name="aelastic launch")
            thread.start()
            with _woken_by_signals(writer) as outer:
                interruption = self._wait_for(has_ended, reader, outer)
            thread.join()
        if interruption is not None:
            raise interruption
        if errors:
            raise errors.pop()  # a list that holds it would be in its traceback: a cycle
        return results[0]

    def _wait_for(self, has_ended: threading.Event, reader: socket.socket, outer: int) -> BaseException | None:
        """Waits for the job's end.  An exception of a signal handler stops the job; it is returned after the end."""
        interruption = None
        poll = select.poll()  # select(2) takes no descriptor from 1024 up, and a program may have many files open
        poll.register(reader, select.POLLIN)
        while not has_ended.is_set():
            try:
                poll.poll()
                theirs = bytes(number for number in reader.recv(4096) if number and number not in self._signals)
                if theirs and outer >= 0:  # the loop that called us may have handlers for them
                    with suppress(OSError):
                        os.write(outer, theirs)
            except BaseException as error:  # noqa: BLE001  a signal handler of the program may raise anything
                interruption, self._is_interrupted = error, True
                self._call(self._pass_on)
        return interruption

    def stop(self, signum: int) -> None:
        """Asks the job to end, from any thread."""
        self._received.append(signum)
        self._call(self._pass_on)

    # Signals.

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        # A signal ignored at the start (nohup, a shell's background job) stays ignored; `None` is a handler of C code.
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
        self._received.append(signum)
        self._call(self._pass_on)

    def _pass_on(self) -> None:
        if self._is_interrupted and self._task is not None:
            self._task.cancel()
        while self._received:
            self._supervisor.stop(self._received.pop(0))

    def _call(self, function: Callable[[], Any]) -> None:
        """Calls a function in the loop, from any thread; before and after the loop's life there is nothing to call."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # closed at this moment
                loop.call_soon_threadsafe(function)

    # Signs of life.

    def last_seen_alive(self) -> int:
        """When the loop last answered, in seconds of the wall clock; before and after the job, the current time."""
        loop, has_answered = self._loop, threading.Event()
        if loop is None:
            return _now()

        def answer() -> None:
            self._seen_alive = _now()
            has_answered.set()

        self._call(answer)
        has_answered.wait(_ANSWER_TIMEOUT_S)
        return self._seen_alive


@contextmanager
def _woken_by_signals(writer: socket.socket) -> Iterator[int]:
    """Wakes the main thread, which runs Python's signal handlers, even if another thread received the signal.

    Yields the wake-up descriptor that was set before, -1 for none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield -1
        return
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield before
    finally:
        signal.set_wakeup_fd(before)


def _now() -> int:
    return int(datetime.now(UTC).timestamp())
