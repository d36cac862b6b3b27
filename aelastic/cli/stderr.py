"""The agent's stderr: log lines, reports and the status line, written in turn by one thread.

A console that stops reading blocks that thread, and never the agent.  Where the host refuses the thread, what is put is
written at once: it matters more.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue

# As long as the workers' output waits for the console (`logs`).
STALL_TIMEOUT_S = 30.0
LOG_FORMAT = "aelastic: %(levelname).1s %(message)s"


class StderrWriter(logging.Handler):
    """The queue of what is to be written, and the thread that writes it, started with the first line at the latest."""

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
        """Starts the thread, unless it runs; false where the host refuses it."""
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
        """Waits until everything is written; false if the console took nothing for `STALL_TIMEOUT_S`."""
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
    writer.setFormatter(logging.Formatter(LOG_FORMAT))
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
    writer.setFormatter(logging.Formatter(LOG_FORMAT))
    writer.setLevel(logging.WARNING)
    ours.addHandler(writer)
    try:
        yield
    finally:
        ours.removeHandler(writer)
        writer.finish()
