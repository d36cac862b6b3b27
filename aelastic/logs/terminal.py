"""A terminal with several writers, and live rows below their output.

All writers take turns, and each first erases the live rows, and redraws them afterwards.  The workers' output
(`pump.py`) goes through `Terminal.writing`; the output of this process goes through a `TerminalStream`, which replaces
`sys.stdout` and `sys.stderr`.  Live rows are the workers' open lines (`live_lines.py`), then the state of the run.  A
user may stop a terminal (Ctrl-S): then all writers wait, except for the state of the run.

The rows are below the cursor, and no part of the terminal is reserved for them: whatever ends this process, the
terminal is as it was, except for the text of the rows.  rich's `Live` would not do: it redirects the output of its own
process, and ignores bytes that are written to the descriptor.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

# Control sequences of ECMA-48 and the VT100.  After the live rows, the cursor returns to where the output of others
# left it.  So everything from the cursor on is ours, and can be erased whatever it is.
_ERASE_BELOW = b"\x1b[J"
# A row that is too long because the terminal has just become narrower is cut off and does not wrap.
_BEGIN, _END = b"\x1b7\x1b[?7l\x1b[0m", b"\x1b[J\x1b[?7h\x1b8"
_NEXT_ROW, _DOWN, _UP = b"\x1b[K\r\n", b"\x1bD", b"\x1b[%dA"
# At the end, how long to wait for a terminal that accepts nothing; after that the rows stay.
ERASE_TIMEOUT_S = 1.0
# At least half of a terminal is for the output above.
LIVE_SHARE = 2
# The width of a longer open line is not computed.
_OPEN_BYTES_MAX = 1 << 12


class Terminal:
    """A terminal and the turns of its writers.  Safe in any thread.

    What the workers write and what this process writes never share a line: each begins a new one.

    Args:
        fd: the terminal, or another file with several writers.
        is_live: rows are drawn there.
    """

    def __init__(self, fd: int, *, is_live: bool = True) -> None:
        self.is_live = is_live
        self.is_shown = False  # the live rows
        self.is_line_open = False  # a line of another writer has not ended
        self.has_changed = False  # rows that workers hold have changed since they were drawn
        self._line_of: object = None  # the writer of that line
        self._line = b""  # its text
        self._held: dict[tuple[int, int], Sequence[str]] = {}  # rows that workers hold open, by place
        self._state: Sequence[bytes] = ()  # rows below them
        self._fd = fd
        self._is_over = False
        self._is_suspended = False
        self._rest = b""  # the part of the live rows that the terminal has not accepted yet
        self._on_change: Callable[[], None] | None = None
        # Two locks, so that writers alternate even in a flood.
        self._queue, self._turn = threading.Lock(), threading.Lock()
        self._writer = 0  # the thread whose turn it is

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows; 80 and 24 if the terminal does not know."""
        try:
            columns, rows = os.get_terminal_size(self._fd)
        except OSError:
            columns = rows = 0
        return columns or 80, rows or 24

    @property
    def is_ours(self) -> bool:
        """True if we are in the terminal's foreground; otherwise we would draw over a shell's prompt."""
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False

    def is_at(self, fd: int) -> bool:
        """Returns true if a descriptor also leads there: a session has at most one terminal, whatever its name."""
        return (self.is_live and os.tcgetpgrp(fd) >= 0) or os.path.sameopenfile(fd, self._fd)

    @property
    def is_in_the_way(self) -> bool:
        """True if no row can be drawn below an open line, because it is unknown where that line ends."""
        if not self.is_line_open:
            return False
        try:
            is_plain = len(self._line) < _OPEN_BYTES_MAX and self._line.decode().isprintable()
        except UnicodeDecodeError:
            is_plain = False
        from aelastic.logs.live_lines import width_of  # not for a start in a pipe

        # After a full row the cursor waits before it wraps, and not every terminal saves that state.
        return not is_plain or width_of(self._line) % self.size[0] == 0

    def _is_free(self) -> bool:
        return not (self._is_over or self._is_suspended or self.is_in_the_way)

    def call_on_change(self, callback: Callable[[], None]) -> None:
        """Calls this once, in another thread, when there is something to draw."""
        self._on_change = callback

    def hold(self, place: tuple[int, int], rows: Sequence[str]) -> None:
        """Sets the rows that a worker holds open now, at a place among those of others."""
        if rows == self._held.get(place, ()):
            return
        held = {**self._held, place: rows} if rows else {at: self._held[at] for at in self._held if at != place}
        self._held = dict(sorted(held.items()))
        self.has_changed = True
        self._notify()

    def _notify(self) -> None:
        callback, self._on_change = self._on_change, None
        if callback is not None:
            callback()

    @contextmanager
    def writing(self, piece: bytes, writer: object = None) -> Iterator[bytes]:
        """Takes a turn to write something other than the live rows.

        Args:
            piece: the bytes to write.
            writer: the workers, or this process: each begins a new line if the other has not ended its own.

        Yields:
            The bytes to write instead of the piece: they erase the live rows first, and may redraw them.
        """
        me = threading.get_ident()
        if self._writer == me or not piece:  # a finalizer, for example, prints during a write
            yield piece
            return
        with self._queue:
            self._turn.acquire()
        self._writer = me
        if self.is_line_open and writer != self._line_of and not piece.startswith((b"\n", b"\r\n")):
            piece = b"\n" + piece
        erasure = self._erasure()
        self._follow(piece, writer)
        again = self._frame() if erasure and not self._rest and self._is_free() and self.is_ours else b""
        try:
            yield erasure + piece + again
        finally:
            self.is_shown = bool(again)
            self._writer = 0
            self._turn.release()
        if not again:
            self._notify()

    def _follow(self, piece: bytes, writer: object) -> None:
        """Tracks where the cursor is after a piece."""
        _, newline, last = piece.rpartition(b"\n")
        self._line = last if newline or not self.is_line_open else self._line[:_OPEN_BYTES_MAX] + last
        self.is_line_open, self._line_of = not piece.endswith(b"\n"), writer

    def _erasure(self) -> bytes:
        if not self.is_shown:
            return b""
        rest, self._rest, self.is_shown = self._rest, b"", False
        # If no line is open, text before the cursor is the user's input, such as ^C.
        return rest + (b"" if self.is_line_open else b"\r") + _ERASE_BELOW

    def _frame(self) -> bytes:
        """Returns the bytes that draw the rows and leave the cursor where it is."""
        from aelastic.logs.live_lines import cut_to  # as above

        columns, rows = self.size
        self.has_changed = False
        held = [row for rows_of in self._held.values() for row in rows_of]
        most = max(1, rows // LIVE_SHARE - len(self._state))
        if len(held) > most:
            held = [*held[: most - 1], f"and {len(held) - most + 1} more"]
        shown = [*(cut_to(row, columns - 1) for row in held), *self._state]
        if not shown:
            return b""
        # Make room for all rows first: if the terminal scrolls, the place that the cursor returns to scrolls as well.
        below = len(shown) if self.is_line_open else len(shown) - 1
        room = _DOWN * below + _UP % below if below else b""
        return room + _BEGIN + (b"\r\n" if self.is_line_open else b"") + _NEXT_ROW.join(shown) + _END

    def draw(self, state: Callable[[], Sequence[bytes]] | None = None) -> bool:
        """Draws the live rows as they are now, unless others write or the terminal accepts nothing.

        Args:
            state: makes the last rows, none wider than the terminal; `None`: these are as before.
        """
        if not self._is_free():
            return False
        if state is not None:
            self._state = state()
        with self._turn_within(0.0) as is_turn:
            if not (is_turn and self._is_free() and self._has_room(0.0)):
                return False
            frame = self._frame()
            if not frame:
                return False
            shown = self._rest + frame
            with suppress(OSError):  # the next writer also gets the error
                count = os.write(self._fd, shown)
                self._rest, self.is_shown = shown[count:], True
            return self.is_shown

    def end(self) -> None:
        """Erases the live rows, and draws none any more."""
        self._is_over = True
        self._hide()

    def suspend(self) -> None:
        """Erases the live rows until `resume`."""
        self._is_suspended = True
        self._hide()

    def resume(self) -> None:
        self._is_suspended = False

    def _hide(self) -> None:
        with self._turn_within(ERASE_TIMEOUT_S) as is_turn:
            if is_turn and self.is_shown and self._has_room(ERASE_TIMEOUT_S):
                with suppress(OSError):
                    os.write(self._fd, self._erasure())

    @contextmanager
    def _turn_within(self, timeout_s: float) -> Iterator[bool]:
        """Takes a turn; yields false if there is none within that time."""
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
        """Returns true if the terminal accepts data within that time; not while stopped (`n_tty_poll` of Linux)."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return any(found & select.POLLOUT for _, found in poll.poll(timeout_s * 1000))


class TerminalStream(io.TextIOWrapper):
    """A stream that replaces `sys.stdout` or `sys.stderr`, and writes to the same file in the terminal's turns."""

    def __init__(self, stream: io.TextIOWrapper, terminal: Terminal) -> None:
        # Closing this does not close the descriptor: a program that has kept the stream may still write to it later.
        file = open(stream.fileno(), "wb", closefd=False)  # noqa: SIM115
        super().__init__(file, encoding=stream.encoding, errors=stream.errors, write_through=True)
        self.terminal = terminal

    def write(self, text: str, /) -> int:
        with self.terminal.writing(text.encode(self.encoding, self.errors or "strict"), "this process") as whole:
            self.buffer.write(whole)
            self.buffer.flush()
        return len(text)


@contextmanager
def streams_in_turns(terminal: Terminal, do: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Makes this process write to the terminal in turns, by replacing `sys.stdout` and `sys.stderr`.

    Args:
        do: runs a function after this process has written everything that is still pending.
    """
    before = out, err = sys.stdout, sys.stderr
    for stream in (out, err):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    sys.stderr = _in_turns(err, terminal)
    sys.stdout = sys.stderr if out is err else _in_turns(out, terminal)
    ours = sys.stdout, sys.stderr

    def end() -> None:
        terminal.end()
        if (sys.stdout, sys.stderr) == ours:  # otherwise the program has replaced them
            sys.stdout, sys.stderr = before

    try:
        yield
    finally:
        do(end)


def _in_turns(stream: Any, terminal: Terminal) -> Any:
    """Returns the stream, or its replacement if it leads to the same file as the terminal, whatever its name."""
    try:
        is_there = isinstance(stream, io.TextIOWrapper) and terminal.is_at(stream.fileno())
    except (OSError, ValueError):
        is_there = False
    return TerminalStream(stream, terminal) if is_there else stream
