"""How one worker's output is split for a terminal with live rows: whole lines above, what is still open below.

A line goes above the live rows when it is complete, and stays there.  What is open is given as `rows`, to be drawn
below, again and again: a progress bar is one row that changes, and goes above with its last state when its newline
comes.  Several rows are open where a worker draws below its own bar and comes back (`ESC [ A`, as tqdm does for nested
bars).  A row is final when the worker writes below it without coming back.

Nothing but what a carriage return has overwritten is left out.  A line too long for a row is shown as it comes.  How
wide a text is, and what of it fits into a row, `terminal` asks here.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from aelastic.logs.lines import LINE_BYTES_MAX, PID, without_newline

# A longer row is shown as it comes, above.
ROW_BYTES_MAX = 1 << 15
# A worker's open rows; with more, the first is taken as final.
ROWS_MAX = 16
_TOKENS = re.compile(rb"(\n|\r|\x1b\[\d{0,4}A)")
# The beginning of a control sequence whose end has not come yet.
_TORN = re.compile(rb"\x1b(?:\[\d{0,4})?\Z")
# Control sequences of ECMA-48, those of the operating system command kind (titles, links) among them; and colours.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?|[\x00-\x1f\x7f-\x9f]"
)
_COLOUR = re.compile(r"\x1b\[[\d;:]*m")
_ERASES = (b"\x1b[K", b"\x1b[0K", b"\x1b[2K", b"\x1b[J")
# Wider than any other text.
_ALL = 1 << 30


class Row:
    """An open line: its text, and earlier texts that stick out behind it, as a carriage return leaves them."""

    def __init__(self, text: bytes = b"") -> None:
        self._frames = [text]
        self.is_bar = False  # text has been overwritten, or begins behind a carriage return

    @property
    def is_text(self) -> bool:
        """No carriage return has come."""
        return len(self._frames) == 1 and not self.is_bar

    @property
    def is_blank(self) -> bool:
        return not any(frame.strip() for frame in self._frames)

    def __len__(self) -> int:
        return len(self._frames[-1])

    def add(self, text: bytes) -> None:
        self.is_bar |= len(self._frames) > 1
        self._frames[-1] += text

    def rewind(self) -> None:
        """The next text begins at the first column."""
        self._drop_covered()
        if self._frames[-1]:
            self._frames.append(b"")
        elif len(self._frames) == 1:
            self.is_bar = True

    def _drop_covered(self) -> None:
        frames = self._frames
        while len(frames) > 1 and width_of(frames[-1]) >= width_of(frames[-2]):
            del frames[-2]
        if len(frames) == 1 and self.is_bar and not frames[0].strip(b" "):
            frames[0] = b""  # an erased bar

    def line(self, prefix: bytes) -> bytes:
        """What a terminal is sent for it to look like this; without its newline."""
        self._drop_covered()
        return b"\r".join(prefix + frame if frame or not at else b"" for at, frame in enumerate(self._frames))

    def text(self) -> str:
        """What is seen of it."""
        self._drop_covered()
        return overlaid([frame.decode(errors="replace") for frame in self._frames])


class LiveLines:
    """The output of one stream of one worker (`Splitter`).

    Args:
        prefix: at the beginning of each line; `None` for a stream that is shown as if the worker wrote it itself.
        place: where its rows stand among those of others; a key, too.
        label: what its rows begin with, if there is no prefix.
        holds_text: a line that is not complete is a row; else it is shown as it comes, as the worker's own.
    """

    def __init__(self, prefix: bytes | None, place: tuple[int, int], label: bytes, *, holds_text: bool) -> None:
        self.place = place
        self._passes = prefix is None
        self._prefix = prefix or b""
        self._label = label
        self._holds_text = holds_text or prefix is not None
        self._rows: list[Row] = []
        self._at = 0  # the row with the worker's cursor
        self._is_fresh = False  # the cursor came there by a newline, and nothing was written since
        self._comes_back = False  # the worker has moved its cursor up
        self._torn = b""
        self._raw: bytes | None = None  # the beginning of a line that is shown already; empty if it is long
        self._is_interrupted = False  # that line was ended, since others wrote

    @property
    def is_open(self) -> bool:
        return self._raw is not None and not self._is_interrupted

    @property
    def rows(self) -> Sequence[str]:
        """What is to be drawn below."""
        label = (self._prefix or self._label).decode(errors="replace")
        return [label + row.text() for row in self._rows if not row.is_blank]

    def name_process(self, pid: bytes) -> None:
        """Completes the prefix: the worker has been started."""
        self._prefix = self._prefix.replace(PID, pid)

    def takes(self, chunk: bytes, held: int, *, more: bool) -> int:
        newline = chunk.rfind(b"\n") + 1
        if more and newline:
            return newline
        is_within = more and held + len(chunk) <= LINE_BYTES_MAX and b"\r" not in chunk and self._is_plain
        return 0 if is_within else len(chunk)  # the rest of a long line can be had at once

    @property
    def _is_plain(self) -> bool:
        return not self._rows or (len(self._rows) == 1 and self._rows[0].is_text)

    def feed(self, data: bytes) -> bytes:
        if not data:
            return b""
        if self._is_plain and not self._torn and (b"\r" not in data or _only_ends_lines(data)):
            return self._feed_text(data)
        shown: list[bytes] = []
        self._unshow(shown)
        data, self._torn = self._torn + data, b""
        if torn := _TORN.search(data):
            data, self._torn = data[: torn.start()], torn[0]
        for token in _TOKENS.split(data):
            if token == b"\n":
                self._newline(shown)
            elif token == b"\r":
                self._rewind(shown)
            elif token.startswith(b"\x1b[") and token.endswith(b"A") and _TOKENS.fullmatch(token):
                self._at = max(0, self._at - int(token[2:-1] or 1))
                self._is_fresh, self._comes_back = False, True
            elif token:
                self._add(token, shown)
        if not self._comes_back and self._at and self._rows[self._at].is_blank and self._at == len(self._rows) - 1:
            self._commit(self._at, shown)
        self._let_out(shown)
        return b"".join(shown)

    def _feed_text(self, data: bytes) -> bytes:
        """`feed` for lines of text, at the speed of a copy."""
        if self._is_interrupted:  # its newline is there already; other text goes on below
            data, self._raw, self._is_interrupted = without_newline(data), None, False
        shown: list[bytes] = []
        lines, newline, tail = data.rpartition(b"\n")
        if newline:
            head = self._rows[0].line(b"") if self._rows else b""
            shown.append(b"" if self._raw is not None else self._prefix)
            shown += [head, lines.replace(b"\n", b"\n" + self._prefix) if self._prefix else lines, b"\n"]
            self._rows, self._at, self._raw = [], 0, None
        if tail:
            if self._raw is not None:
                shown.append(tail)
                self._raw = self._raw + tail if self._raw and len(self._raw) < ROW_BYTES_MAX else b""
            elif self._rows:
                self._rows[0].add(tail)
            else:
                self._rows = [Row(tail)]
            self._let_out(shown)
        return b"".join(shown)

    def _unshow(self, shown: list[bytes]) -> None:
        """A line that is shown already becomes a row: a carriage return comes."""
        if self._raw is None:
            return
        if self._raw and not self._is_interrupted:
            shown.append(b"\r\x1b[K")
        elif not self._is_interrupted:
            shown.append(b"\n")
        self._rows, self._at = [Row(b"" if self._is_interrupted else self._raw)], 0
        self._raw, self._is_interrupted = None, False

    def _let_out(self, shown: list[bytes]) -> None:
        """A row that is too long, or text that is not to be held, is shown as it is."""
        if not self._rows:
            return
        row = self._rows[-1]
        is_passed = not self._holds_text and len(self._rows) == 1 and row.is_text and len(row) > 0
        if len(row) > ROW_BYTES_MAX or is_passed:
            self._commit(len(self._rows) - 1, shown)
            shown.append(row.line(self._prefix))
            self._raw = b"" if len(row) > ROW_BYTES_MAX else row.line(b"")
            self._rows, self._at = [], 0

    # What the worker's terminal would do.

    def _row(self) -> Row:
        if not self._rows:
            self._rows, self._at = [Row()], 0
        return self._rows[self._at]

    def _newline(self, shown: list[bytes]) -> None:
        row = self._row()
        self._at += 1
        self._is_fresh = True
        if self._at < len(self._rows):
            self._rows[self._at].rewind()
        elif len(self._rows) == 1 and not row.is_bar:
            self._commit(1, shown)
        else:
            self._rows.append(Row())
            if len(self._rows) > ROWS_MAX:
                self._commit(1, shown)

    def _rewind(self, shown: list[bytes]) -> None:
        if not self._is_fresh:
            self._commit(self._at, shown)
        self._is_fresh = False
        self._row().rewind()

    def _add(self, text: bytes, shown: list[bytes]) -> None:
        if self._is_fresh:
            self._commit(self._at, shown)
        self._is_fresh = False
        self._row().add(text)

    def _commit(self, count: int, shown: list[bytes]) -> None:
        """The first rows are final."""
        shown += [row.line(self._prefix) + b"\n" for row in self._rows[:count]]
        if count:
            self._comes_back = False
        del self._rows[:count]
        self._at = max(0, self._at - count)

    def end(self) -> bytes:
        shown: list[bytes] = []
        if self._torn:
            self._add(self._torn, shown)
            self._torn = b""
        is_ended = False
        while self._rows and self._rows[-1].is_blank and (len(self._rows) > 1 or self._rows[-1].is_bar):
            del self._rows[-1]
            is_ended = True  # by the newline that led there
        if self._rows:
            has_last = self._passes and not is_ended  # as the worker left it: its newline is missing
            self._commit(len(self._rows) - has_last, shown)
            if has_last:
                shown.append(self._rows[0].line(b""))
                self._rows, self._raw = [], b""
        elif not self._passes and self.is_open:
            shown.append(b"\n")
            self._raw = None
        self._at = 0
        return b"".join(shown)

    def interrupt(self) -> None:
        self._is_interrupted = True


def _only_ends_lines(data: bytes) -> bool:
    """Each carriage return is part of a line's ending."""
    return not data.endswith(b"\r") and data.count(b"\r") == data.count(b"\r\n")


# The text of a row.


def width_of(text: bytes) -> int:
    """The columns that a text covers."""
    if text.isascii() and b"\x1b" not in text:
        return len(text)
    if any(erases in text for erases in _ERASES):
        return _ALL
    return _columns(_CONTROL.sub("", text.decode(errors="replace")))


def _columns(plain: str) -> int:
    return len(plain) if plain.isascii() else sum(map(_width, plain))


def _width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in {"Mn", "Me", "Cf"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def overlaid(texts: Sequence[str]) -> str:
    """What is seen where each text was written over the one before."""
    *below, seen = texts
    for text in reversed(below):
        plain = _CONTROL.sub("", text)
        if not seen:
            seen = text
        elif (covered := _columns(_CONTROL.sub("", seen))) < len(plain):
            seen += plain[covered:]
    return seen


def cut_to(text: str, columns: int) -> bytes:
    """As much of a text as fits into a row, with its colours, and without any other control sequence."""
    kept: list[str] = []
    left = columns
    has_colour = False
    at = 0
    for control in _CONTROL.finditer(text):
        left -= _take(text[at : control.start()], left, kept)
        at = control.end()
        if _COLOUR.fullmatch(control[0]):
            kept.append(control[0])
            has_colour = True
        elif control[0] == "\t":
            left -= _take(" ", left, kept)
    _take(text[at:], left, kept)
    return ("".join(kept) + "\x1b[0m" * has_colour).encode(errors="replace")


def _take(plain: str, most: int, kept: list[str]) -> int:
    """Keeps the beginning that fits, and gives its width."""
    taken = 0
    if plain.isascii():
        kept.append(plain[:most])
        return min(most, len(plain))
    for character in plain:
        if taken + _width(character) > most:
            break
        kept.append(character)
        taken += _width(character)
    return taken
