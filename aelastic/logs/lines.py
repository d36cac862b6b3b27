"""Splits one worker's output for the console: lines with prefixes, progress bars, filtered lines.

`PrefixedLines` and `FilteredLines` receive a worker's output, in chunks as they come.  `takes` returns how much of a
chunk may be shown already: whole lines, and the text after the last of them if the worker draws a progress bar (it has
a carriage return) or has written a very long line.  Bytes that are not taken are offered again; the file is the buffer.
`feed` returns the bytes that were taken as the console should show them: every byte, and the prefix where text begins
after a newline or a carriage return.  The result does not depend on how the output is chunked.

If another worker's text must be shown while a line is open, that line is ended first (`interrupt`).  The newline that
the worker writes for it later is then left out; if more text comes instead, it continues below, with its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

# An unfinished line is held back up to this length; a longer one is shown as it comes.
LINE_BYTES_MAX = 1 << 24
# Placeholder in a prefix for the id of a process that has not been started yet.
PID = b"\0pid\0"


class Splitter(Protocol):
    """The interface of `PrefixedLines`, `FilteredLines` and `OutputSearch` for followers and sinks."""

    @property
    def is_open(self) -> bool:
        """True if a line has been shown in part."""

    def takes(self, chunk: bytes, held: int, *, more: bool) -> int:
        """Returns how many bytes of a chunk may be shown now, after those held back before; 0: none of either.

        Args:
            held: bytes before the chunk that have not been taken yet; there is no newline in them.
            more: the rest of the chunk's last line can be read at once.
        """

    def feed(self, data: bytes) -> bytes: ...

    def end(self) -> bytes:
        """Returns what is shown once no more output follows."""

    def interrupt(self) -> None:
        """Notes that the open line has been ended, because another worker's text comes next."""


class Line(Enum):
    """How much of the current line has been shown.  A bar is a line with a carriage return in it."""

    NEW = auto()  # nothing
    TEXT = auto()  # text, without a carriage return
    BLANK_BAR = auto()  # carriage returns only: even the newline still needs the prefix
    RETURNED = auto()  # text, then a carriage return: the next text overwrites it, and needs the prefix
    FRAME = auto()  # text after a carriage return
    INTERRUPTED = auto()  # ended by `interrupt`: a newline that follows has been shown already
    INTERRUPTED_BAR = auto()  # the same for a bar

    @property
    def is_open(self) -> bool:
        return self in (Line.TEXT, Line.BLANK_BAR, Line.RETURNED, Line.FRAME)

    @property
    def is_bar(self) -> bool:
        return self in (Line.BLANK_BAR, Line.RETURNED, Line.FRAME, Line.INTERRUPTED_BAR)

    @property
    def is_interrupted(self) -> bool:
        return self in (Line.INTERRUPTED, Line.INTERRUPTED_BAR)

    @property
    def needs_prefix(self) -> bool:
        """True if text must begin with the prefix."""
        return self is not Line.TEXT and self is not Line.FRAME

    @property
    def has_text(self) -> bool:
        """False if even an empty line must begin with the prefix."""
        return self in (Line.TEXT, Line.RETURNED, Line.FRAME)

    def after_text(self) -> Line:
        return Line.FRAME if self.is_bar else Line.TEXT

    def after_return(self) -> Line:
        return Line.RETURNED if self.has_text else Line.BLANK_BAR


class PrefixedLines:
    """The output as it is, with a prefix at the beginning of each line.

    Args:
        prefix: `None` for a stream that is shown as if the worker wrote to the console itself: nothing is held back.
    """

    def __init__(self, prefix: bytes | None) -> None:
        self._passes = prefix is None
        self._prefix = prefix or b""
        self._after_newline = b"\n" + self._prefix
        self._line = Line.NEW
        self._holds_return = False  # the last byte was a carriage return, which may belong to a newline

    def name_process(self, pid: bytes) -> None:
        """Completes the prefix, before any output is fed."""
        self._prefix = self._prefix.replace(PID, pid)
        self._after_newline = b"\n" + self._prefix

    @property
    def is_open(self) -> bool:
        return self._line.is_open

    @property
    def _is_bar(self) -> bool:
        return self._line.is_bar or (self._holds_return and not self._line.is_interrupted)

    def takes(self, chunk: bytes, held: int, *, more: bool) -> int:
        newline = chunk.rfind(b"\n") + 1
        if newline and more:
            return newline
        is_bar = chunk.find(b"\r", newline) >= 0 or (self._is_bar and not newline)
        is_long = held + len(chunk) > LINE_BYTES_MAX and not newline
        passes = self._passes and not more
        return len(chunk) if passes or is_bar or is_long else newline

    def feed(self, data: bytes) -> bytes:
        if not data:
            return b""
        if self._passes:
            was_interrupted = self._line.is_interrupted
            self._line = Line.NEW if data.endswith(b"\n") else Line.TEXT
            return without_newline(data) if was_interrupted else data
        if self._line.is_interrupted or self._holds_return or _has_frames(data):
            return self._feed_slowly(data)
        prefix = self._prefix if self._line.needs_prefix else b""
        shown = prefix + data.replace(b"\n", self._after_newline)  # gigabytes a second
        if data.endswith(b"\n"):
            self._line = Line.NEW
            return shown[: len(shown) - len(self._prefix)]
        self._line = Line.TEXT if b"\n" in data else self._line.after_text()
        return shown

    def _feed_slowly(self, data: bytes) -> bytes:
        """`feed` for a bar, a held carriage return, or an interrupted line."""
        if self._holds_return:
            data, self._holds_return = b"\r" + data, False
        if self._line.is_interrupted:
            if data == b"\r":
                self._holds_return = True
                return b""
            rest = without_newline(data)
            if len(rest) < len(data):
                data, self._line = rest, Line.NEW
        if data.endswith(b"\r"):
            data, self._holds_return = data[:-1], True
        *lines, last = data.split(b"\n")
        shown: list[bytes] = []
        for line in lines:
            ending = b"\r\n" if line.endswith(b"\r") else b"\n"
            self._show(line[: len(line) + 1 - len(ending)], shown)
            shown += [b"" if self._line.has_text else self._prefix, ending]
            self._line = Line.NEW
        self._show(last, shown)
        return b"".join(shown)

    def _show(self, text: bytes, shown: list[bytes]) -> None:
        """Adds a part of a line, without its ending."""
        for number, frame in enumerate(text.split(b"\r")):
            if number:
                shown.append(b"\r")
                self._line = self._line.after_return()
            if frame:
                shown += [self._prefix if self._line.needs_prefix else b"", frame]
                self._line = self._line.after_text()

    def end(self) -> bytes:
        held = b"\r" if self._holds_return else b""
        if self._passes or not (self.is_open or (held and not self._line.is_interrupted)):
            return b""
        ending = (b"" if self._line.has_text else self._prefix) + held + b"\n"
        self._line, self._holds_return = Line.NEW, False
        return ending

    def interrupt(self) -> None:
        self._line = Line.INTERRUPTED_BAR if self._is_bar else Line.INTERRUPTED


def _has_frames(data: bytes) -> bool:
    """Returns true if a carriage return is not, or may not be, part of a line's ending."""
    return b"\r" in data and (data.endswith(b"\r") or data.count(b"\r") > data.count(b"\r\n"))


def without_newline(data: bytes) -> bytes:
    """Returns the data without a newline at its beginning."""
    return data[1:] if data.startswith(b"\n") else data.removeprefix(b"\r\n")


class FilteredLines:
    """The whole lines of the output that contain one of the given texts (torch: `--duplicate-stdout-filters`)."""

    is_open = False

    def __init__(self, prefix: bytes, texts: Sequence[str]) -> None:
        self._prefix = prefix
        self._texts = [text.encode() for text in texts]
        self._partial = b""  # the beginning of a line too long for one chunk

    def name_process(self, pid: bytes) -> None:
        """Completes the prefix, before any output is fed."""
        self._prefix = self._prefix.replace(PID, pid)

    def takes(self, chunk: bytes, held: int, *, more: bool) -> int:  # noqa: ARG002  whole lines only
        newline = chunk.rfind(b"\n") + 1
        return newline or (len(chunk) if held + len(chunk) > LINE_BYTES_MAX else 0)

    def feed(self, data: bytes) -> bytes:
        whole, newline, rest = (self._partial + data).rpartition(b"\n")
        self._partial = rest
        shown = self._chosen(whole + newline)
        if len(rest) > LINE_BYTES_MAX:
            shown += self.end()
        return shown

    def _chosen(self, lines: bytes) -> bytes:
        if not any(text in lines for text in self._texts):
            return b""  # the usual case, at the speed of a search
        chosen = [line for line in lines.split(b"\n")[:-1] if any(text in line + b"\n" for text in self._texts)]
        return b"".join(self._prefix + line + b"\n" for line in chosen)

    def end(self) -> bytes:
        rest, self._partial = self._partial, b""
        return self._chosen(rest + b"\n") if rest else b""

    def interrupt(self) -> None:
        """Does nothing: all lines are whole."""
