"""How one worker's output is cut for the console: lines with prefixes, progress bars, filtered lines.

`Lines` and `Filtered` are told what a worker has written, in chunks as they come.  `takes` answers how much of it may
be shown already: whole lines, and what follows the last of them where the worker draws a progress bar (a carriage
return in it) or has written more than anybody waits for.  What is not taken is asked about again; the file is the
buffer.  `feed` gives what has been taken as the console is to show it: every byte, and the prefix where text begins
after a newline or a carriage return.  However the output is chunked, what `feed` gives is the same.

Where somebody else has to write while a line is open, that line is ended first (`interrupt`).  The newline that the
worker writes for it later has been shown by then; if more text comes instead, it goes on below, with its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# An unfinished line is waited for up to this length; what is longer is shown as it comes.
LINE_BYTES_MAX = 1 << 24


class Cut(Protocol):
    """What the follower of a file and the console ask of `Lines` and `Filtered`."""

    @property
    def is_open(self) -> bool:
        """Whether a line has been shown in part."""

    def takes(self, chunk: bytes, held: int, *, more: bool) -> int:
        """How many bytes of a chunk may be shown now, together with those held back before; 0: none of either.

        Args:
            held: bytes before the chunk that have not been taken yet; there is no newline in them.
            more: the rest of the chunk's last line can be had at once.
        """

    def feed(self, data: bytes) -> bytes: ...

    def end(self) -> bytes:
        """What is shown when nothing follows any more."""

    def interrupt(self) -> None:
        """The open line has been ended, for somebody else writes now."""


class Lines:
    """The output as it is; each line begins with the prefix, if there is one.

    Args:
        prefix: `None` for a stream that is shown as if the worker had written it itself: nothing is held back.
    """

    def __init__(self, prefix: bytes | None) -> None:
        self._passes = prefix is None
        self._prefix = prefix or b""
        self._after_newline = b"\n" + self._prefix
        self.is_open = False
        self._is_bar = False  # there is a carriage return in the open line
        self._is_due = True  # the prefix, before text
        self._is_new = True  # nothing of this line has been shown: the prefix is due even where no text comes
        self._holds_return = False  # a carriage return: does a newline follow?
        self._is_ended = False  # by `interrupt`: a newline that follows has been shown already

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
            return self._pass(data)
        if self._is_ended or self._holds_return or _has_frames(data):
            return self._feed_slowly(data)
        shown = (self._prefix if self._is_due else b"") + data.replace(b"\n", self._after_newline)  # gigabytes a second
        if data.endswith(b"\n"):
            self._begin_line()
            return shown[: len(shown) - len(self._prefix)]
        self.is_open, self._is_due, self._is_new = True, False, False
        self._is_bar &= b"\n" not in data
        return shown

    def _pass(self, data: bytes) -> bytes:
        self.is_open = not data.endswith(b"\n")
        if self._is_ended:
            self._is_ended = False
            return _without_newline(data)
        return data

    def _feed_slowly(self, data: bytes) -> bytes:
        """`feed` where there is a bar, or there was one."""
        if self._holds_return:
            data, self._holds_return = b"\r" + data, False
        if self._is_ended:
            self._is_ended = False
            if data == b"\r":
                self._is_ended = self._holds_return = True
                return b""
            data = _without_newline(data)
        if data.endswith(b"\r"):
            data, self._holds_return = data[:-1], True
        *lines, last = data.split(b"\n")
        shown: list[bytes] = []
        for line in lines:
            ending = b"\r\n" if line.endswith(b"\r") else b"\n"
            self._show(line[: len(line) + 1 - len(ending)], shown)
            shown += [self._prefix if self._is_new else b"", ending]
            self._begin_line()
        self._show(last, shown)
        self._is_bar |= self._holds_return
        return b"".join(shown)

    def _show(self, text: bytes, shown: list[bytes]) -> None:
        """A part of a line, without its ending."""
        for number, frame in enumerate(text.split(b"\r")):
            if number:
                shown.append(b"\r")
                self.is_open = self._is_bar = self._is_due = True
            if frame:
                shown += [self._prefix if self._is_due else b"", frame]
                self.is_open, self._is_due, self._is_new = True, False, False

    def _begin_line(self) -> None:
        self.is_open, self._is_bar, self._is_due, self._is_new = False, False, True, True

    def end(self) -> bytes:
        held = b"\r" if self._holds_return else b""
        if self._passes or not (self.is_open or (held and not self._is_ended)):
            return b""
        ending = (self._prefix if self._is_new else b"") + held + b"\n"
        self._begin_line()
        return ending

    def interrupt(self) -> None:
        is_bar = self._is_bar
        self._begin_line()
        self._is_bar, self._is_ended = is_bar, True


def _has_frames(data: bytes) -> bool:
    """Whether some carriage return is not, or may not be, the end of a line."""
    return b"\r" in data and (data.endswith(b"\r") or data.count(b"\r") > data.count(b"\r\n"))


def _without_newline(data: bytes) -> bytes:
    """The data without a newline at its beginning."""
    return data[1:] if data.startswith(b"\n") else data.removeprefix(b"\r\n")


class Filtered:
    """Of the output, the lines with one of some texts in them (torch: `--duplicate-stdout-filters`), whole only."""

    is_open = False

    def __init__(self, prefix: bytes, texts: Sequence[str]) -> None:
        self._prefix = prefix
        self._texts = [text.encode() for text in texts]
        self._partial = b""  # of a line too long for one chunk

    def takes(self, chunk: bytes, held: int, *, more: bool) -> int:  # noqa: ARG002  nobody waits for the rest here
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
        """Lines are whole: there is nothing to end."""
