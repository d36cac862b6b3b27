"""This process while a job runs: its stderr, written in turn by one thread, and its signals.

Log lines, reports and the status line go to a `StderrWriter`.  A console that stops reading blocks its thread, never
the agent.  If the host refuses the thread, lines are written at once, since they matter more.

Signals are those that stop the job or have an action of their own, and those of a terminal (resize, Ctrl-Z).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from aelastic.cli.manual.topics import HelpfulFormatter

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from aelastic.cli.arguments import Invocation
    from aelastic.cli.options import OnSignal
    from aelastic.observe.ui.status_line import StatusLine
    from aelastic.supervisor import Supervisor

Handlers: TypeAlias = Mapping[int, Callable[[], None]]

# As long as the workers' output waits for the console (see `logs`).
STALL_TIMEOUT_S = 30.0
LOG_FORMAT = "aelastic: %(levelname).1s %(message)s"
# Signals from the terminal's keyboard are obeyed at any time.
OF_KEYBOARD = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP})


class StderrWriter(logging.Handler):
    """A queue of lines, and the thread that writes them, which starts with the first line at the latest."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: SimpleQueue[str | Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.put(self.format(record))

    def put(self, item: str | Callable[[], None]) -> None:
        """Writes a text and a newline, or calls a function that writes, after everything that was put before."""
        if self.start():
            self._queue.put(item)
        else:
            _show(item)

    def start(self) -> bool:
        """Starts the thread, unless it runs; returns false if the host refuses it."""
        if self._thread is None:
            thread = threading.Thread(target=self._write, name="stderr", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # workers may have started threads up to the limit
                return False
            self._thread = thread
        return True

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            _show(item)

    def finish(self) -> bool:
        """Waits until everything is written; returns false if the console is stalled after `STALL_TIMEOUT_S`."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(STALL_TIMEOUT_S)
        is_written, self._thread = not self._thread.is_alive(), None
        return is_written


def _show(item: str | Callable[[], None]) -> None:
    with suppress(AttributeError, OSError, ValueError):  # stderr is closed, or a pipe without a reader
        if callable(item):
            item()
        else:  # in one call, so that no other writer comes between a line and its end
            print(f"{item}\n", end="", file=sys.stderr, flush=True)


def configure_logging(writer: StderrWriter, level: str) -> None:
    """Sends log records of `aelastic` from a level up to stderr; the root logger and other loggers stay as they are."""
    number = logging.getLevelNamesMapping().get(level.strip().upper())
    writer.setFormatter(HelpfulFormatter(LOG_FORMAT))
    ours = logging.getLogger("aelastic")
    ours.handlers[:] = [writer]
    ours.propagate = False
    ours.setLevel(logging.WARNING if number is None else number)
    if level and number is None:
        ours.warning("LOGLEVEL=%s is not a level; using WARNING", level)


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Shows warnings of `aelastic` on stderr, as the command does, in a program that has configured no logging.

    torch's launcher has handlers of its own, so programs that call it expect to read of a restart.
    """
    ours = logging.getLogger("aelastic")
    given = (*ours.handlers, *logging.getLogger().handlers)
    if not all(isinstance(each, logging.NullHandler) for each in given):
        yield
        return
    writer = StderrWriter()
    writer.setFormatter(HelpfulFormatter(LOG_FORMAT))
    writer.setLevel(logging.WARNING)
    ours.addHandler(writer)
    try:
        yield
    finally:
        ours.removeHandler(writer)
        writer.finish()


# Signals.


def handlers_of(invocation: Invocation, supervisor: Supervisor, stop: Callable[[int], None]) -> Handlers:
    """Returns each signal's action: a signal with its own action (`--on-signal`) does not stop the job."""
    handlers: dict[int, Callable[[], None]] = {signum: partial(stop, signum) for signum in invocation.signals}
    return {**handlers, **{on.signum: partial(_act, supervisor, on) for on in invocation.on_signal}}


def _act(supervisor: Supervisor, on: OnSignal) -> None:
    if on.drain_s is None:
        supervisor.send_signal(on.signum)
    else:
        supervisor.drain(on.drain_s, f"by {on.signum.name}")


@contextmanager
def handle_signals(loop: AbstractEventLoop, handlers: Handlers, *, is_last: bool) -> Iterator[None]:
    """Makes the loop call the handler of each signal.

    A signal that was ignored at the start (nohup, a shell's background job) stays ignored.  A signal that C code
    handles is left to it in a program that outlives the job; a command that ends with the job takes it over.

    Args:
        is_last: this process ends with the job; a signal that comes then, such as the SIGTERM after a `preStop`, is too
            late to change how it ends.
    """
    before = {signum: signal.getsignal(signum) for signum in handlers}
    # `None` is a handler of C code, set before Python started, that Python cannot put back.
    left_alone = {signal.SIG_IGN} if is_last else {signal.SIG_IGN, None}
    handled = [signum for signum in before if before[signum] not in left_alone]
    for signum in handled:
        loop.add_signal_handler(signum, handlers[signum])
    try:
        yield
    finally:
        for signum in handled:
            loop.remove_signal_handler(signum)  # it has its default handler now
            if is_last and signum not in OF_KEYBOARD:
                signal.signal(signum, signal.SIG_IGN)
            elif before[signum] is not None:
                signal.signal(signum, before[signum])


def terminal_handlers(loop: AbstractEventLoop, line: StatusLine) -> Handlers:
    """Redraws when the terminal's size changes, and erases the rows while a shell has the terminal.

    Signals that are ignored, or have another handler, are left out.
    """

    def suspend() -> None:
        line.suspend()
        # The default now: the kernel stops us, or knows why not (setpgid(2)).
        loop.remove_signal_handler(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTSTP)
        loop.add_signal_handler(signal.SIGTSTP, suspend)  # continued
        line.resume()

    wanted = {signal.SIGWINCH: line.redraw, signal.SIGTSTP: suspend}
    return {signum: wanted[signum] for signum in wanted if signal.getsignal(signum) is signal.SIG_DFL}
