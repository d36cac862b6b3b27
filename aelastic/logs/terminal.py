"""A terminal that several write to, with a status line below what they have written.

All writers take turns, and each first takes the status line away: the workers' output (`sinks.py`) through
`Terminal.writing`, what this process prints through a `TerminalStream` in the place of `sys.stdout` and `sys.stderr`.
A user may stop a terminal (Ctrl-S).  Then all writers wait, but for the status line.

Not rich's `Live`: it redirects what its own process prints, and knows nothing of bytes that are written to the
descriptor.
"""

from __future__ import annotations

import io
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

# Control sequences, of ECMA-48 and the VT100.  Behind the status line, the cursor goes back to where the output of
# others has left it.  So what is there from the cursor on is ours, and can be erased without knowing what it is.
_ERASE_BELOW = b"\x1b[J"
# A row that is too long, for a terminal that has just become narrower, is cut off there and does not wrap.
_BEGIN, _END = b"\x1b7\x1b[?7l\x1b[0m", b"\x1b[J\x1b[?7h\x1b8"
_NEXT_ROW, _DOWN, _UP = b"\x1b[K\r\n", b"\x1bD", b"\x1b[%dA"
# At the end, a terminal that takes nothing is waited for this long; then the status line stays there.
ERASE_TIMEOUT_S = 1.0


class Terminal:
    """A terminal and the turns of its writers.  Safe in any thread.

    The status line comes below whole lines only: a progress bar that is not ended is not disturbed.  What the workers
    write and what this process writes never share a line.

    Args:
        fd: the terminal.
        stays: the status line stays below what others write, once it is shown; else it comes back when they are quiet.
    """

    def __init__(self, fd: int, *, stays: bool = False) -> None:
        self.written = 0  # how often others have written
        self.is_shown = False  # the status line
        self.is_line_open = False  # a line of others is not ended
        self.stays = stays
        self._line_of: object = None  # the writer whose line that is
        self._frame = b""  # what was drawn last
        self._fd = fd
        self._is_over = False
        self._rest = b""  # of the status line, where the terminal has not taken all of it
        self._told: Callable[[], None] | None = None
        # Two locks, so that it is one writer's turn after the other's, even in a flood.
        self._queue, self._turn = threading.Lock(), threading.Lock()
        self._writer = 0  # the thread whose turn it is

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows; 80 and 24 where the terminal does not know."""
        try:
            columns, rows = os.get_terminal_size(self._fd)
        except OSError:
            columns = rows = 0
        return columns or 80, rows or 24

    @property
    def is_ours(self) -> bool:
        """True if we are in the foreground there; else a shell's prompt would be drawn over."""
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False

    def _is_free(self) -> bool:
        return not (self._is_over or self.is_line_open)

    def tell_of_write(self, told: Callable[[], None]) -> None:
        """Calls this when others have written next, once, in their thread."""
        self._told = told

    @contextmanager
    def writing(self, piece: bytes, writer: object = None) -> Iterator[bytes]:
        """A turn, for others than the status line.

        Args:
            piece: what is to be written.
            writer: the workers, or this process: each begins a new line where the other has not ended its own.

        Yields:
            What is to be written in the piece's place: it takes the status line away first, and may draw it again.
        """
        me = threading.get_ident()
        if self._writer == me or not piece:  # a finalizer, say, prints amid a write
            yield piece
            return
        with self._queue:
            self._turn.acquire()
        self._writer = me
        if self.is_line_open and writer != self._line_of and not piece.startswith((b"\n", b"\r\n")):
            piece = b"\n" + piece
        again = self._frame if self.stays and self._is_whole and piece.endswith(b"\n") else b""
        try:
            yield self._erasure() + piece + again
        finally:
            self.is_shown = bool(again)
            self.is_line_open, self._line_of = not piece.endswith(b"\n"), writer
            self.written += 1
            told, self._told = self._told, None
            self._writer = 0
            self._turn.release()
        if told is not None:
            told()

    @property
    def _is_whole(self) -> bool:
        """The status line is shown, and the terminal has taken all of it."""
        return self.is_shown and not self._rest and self._is_free() and self.is_ours

    def _erasure(self) -> bytes:
        if not self.is_shown:
            return b""
        rest, self._rest, self.is_shown = self._rest, b"", False
        return rest + _ERASE_BELOW

    def draw(self, rows: Callable[[], list[bytes]]) -> bool:
        """Shows the status line in place of the one before, unless others write or the terminal takes nothing.

        Args:
            rows: makes it; one row or several, none wider than the terminal.
        """
        if not self._is_free():
            return False
        first, *others = rows()
        with self._turn_within(0.0) as is_turn:
            if not (is_turn and self._is_free() and self._has_room(0.0)):
                return False
            # Rows for all of it first: if the terminal scrolls, the place that the cursor goes back to scrolls with it.
            room = _DOWN * len(others) + _UP % len(others) if others else b""
            self._frame = room + _BEGIN + _NEXT_ROW.join([first, *others]) + _END
            shown = self._rest + self._frame
            with suppress(OSError):  # the next writer gets the error, too
                count = os.write(self._fd, shown)
                self._rest, self.is_shown = shown[count:], True
            return self.is_shown

    def end(self) -> None:
        """Takes the status line away, and shows none any more."""
        self._is_over = True
        with self._turn_within(ERASE_TIMEOUT_S) as is_turn:
            if is_turn and self.is_shown and self._has_room(ERASE_TIMEOUT_S):
                with suppress(OSError):
                    os.write(self._fd, self._erasure())

    @contextmanager
    def _turn_within(self, timeout_s: float) -> Iterator[bool]:
        """A turn, if there is one within that time."""
        if not self._turn.acquire(timeout=timeout_s):
            yield False
            return
        self._writer = threading.get_ident()
        try:
            yield True
        finally:
            self._writer = 0
            self._turn.release()

    def _has_room(self, timeout_s: float) -> bool:
        """True if the terminal takes something within that time: not while it is stopped (`n_tty_poll` of Linux)."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return any(found & select.POLLOUT for _, found in poll.poll(timeout_s * 1000))


class TerminalStream(io.TextIOWrapper):
    """Stream in the place of `sys.stdout` or `sys.stderr`, which writes to the same place in the terminal's turns."""

    def __init__(self, stream: io.TextIOWrapper, terminal: Terminal) -> None:
        # Closing it closes nothing: a program that has kept the stream may write to it later, too.
        file = open(stream.fileno(), "wb", closefd=False)  # noqa: SIM115
        super().__init__(file, encoding=stream.encoding, errors=stream.errors, write_through=True)
        self.terminal = terminal

    def write(self, text: str, /) -> int:
        with self.terminal.writing(text.encode(self.encoding, self.errors or "strict"), "this process") as whole:
            self.buffer.write(whole)
            self.buffer.flush()
        return len(text)


def is_of_session(fd: int) -> bool:
    """True for the terminal of our session, of which there is one at most, under whatever name."""
    try:
        return os.tcgetpgrp(fd) >= 0
    except OSError:
        return False
