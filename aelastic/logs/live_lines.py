"""Splits one worker's output for a terminal with live rows: whole lines above, open lines below.

A complete line goes above the live rows, and stays there.  Open lines are `rows`, redrawn below: a progress bar is one
row that changes, and goes above with its last state when its newline comes.  Several rows are open if a worker draws
below its own bar and comes back (`ESC [ A`, as tqdm does for nested bars).  A row is final when the worker writes below
it without coming back.

A row shows the text behind its last carriage return, and that is what goes above: text before it is left out.  A line
too long for a row is shown as it comes.
`terminal` uses this module to cut texts to a row's width.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence

from aelastic.logs.lines import LINE_BYTES_MAX, PID, without_newline

# A longer row is shown as it comes, above.
ROW_BYTES_MAX = 1 << 15
# How many open rows a worker may have; with more, the first is treated as final.
ROWS_MAX = 16
_TOKENS = re.compile(rb"(\n|\r|\x1b\[\d{0,4}A)")
# The beginning of a control sequence whose end has not arrived yet.
_TORN = re.compile(rb"\x1b(?:\[\d{0,4})?\Z")
# Control sequences of ECMA-48, including operating system commands (titles, links).
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?|[\x00-\x1f\x7f-\x9f]"
)


class Row:
    """An open line."""

    def __init__(self, text: bytes = b"") -> None:
        self.text = text
        self.is_bar = False  # a carriage return has come
        self._is_returned = False  # it came last: the next text replaces this one

    @property
    def is_blank(self) -> bool:
        return not _plain(self.text).strip()

    def add(self, text: bytes) -> None:
        self.text = text if self._is_returned else self.text + text
        self._is_returned = False

    def rewind(self) -> None:
        """Moves to the first column, where the next text begins."""
        self.is_bar = self._is_returned = True


class LiveLines:
    """The output of one stream of one worker (`Splitter`).

    Args:
        prefix: at the beginning of each line; `None` for a stream that is shown as if the worker wrote it itself.
        place: the position of its rows among those of others; also a key.
        label: the beginning of its rows, if there is no prefix.
        holds_text: an incomplete line is a row; otherwise it is shown as it comes, as if the worker wrote it itself.
    """

    def __init__(self, prefix: bytes | None, place: tuple[int, int], label: bytes, *, holds_text: bool) -> None:
        self.place = place
        self._passes = prefix is None
        self._prefix = prefix or b""
        self._label = label
        self._holds_text = holds_text or prefix is not None
        self._rows: list[Row] = []
        self._at = 0  # the row with the worker's cursor
        self._is_fresh = False  # a newline moved the cursor there, and nothing has been written since
        self._comes_back = False  # the worker has moved its cursor up
        self._torn = b""
        self._raw: bytes | None = None  # the beginning of a line that is already shown; empty if it is long
        self._is_interrupted = False  # that line was ended, because others wrote

    @property
    def is_open(self) -> bool:
        return self._raw is not None and not self._is_interrupted

    @property
    def rows(self) -> Sequence[str]:
        """The rows to draw below."""
        label = (self._prefix or self._label).decode(errors="replace")
        return [label + row.text.decode(errors="replace") for row in self._rows if not row.is_blank]

    def name_process(self, pid: bytes) -> None:
        """Completes the prefix, once the worker has been started."""
        self._prefix = self._prefix.replace(PID, pid)

    def takes(self, chunk: bytes, held: int, *, more: bool) -> int:
        newline = chunk.rfind(b"\n") + 1
        if more and newline:
            return newline
        is_within = more and held + len(chunk) <= LINE_BYTES_MAX and b"\r" not in chunk and self._is_plain
        return 0 if is_within else len(chunk)  # the rest of a long line can be read at once

    @property
    def _is_plain(self) -> bool:
        return not self._rows or (len(self._rows) == 1 and not self._rows[0].is_bar)

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
        if self._is_interrupted:  # its newline is already shown; other text continues below
            data, self._raw, self._is_interrupted = without_newline(data), None, False
        shown: list[bytes] = []
        lines, newline, tail = data.rpartition(b"\n")
        if newline:
            head = self._rows[0].text if self._rows else b""
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
        """Turns a line that is already shown into a row, because a carriage return comes."""
        if self._raw is None:
            return
        if self._raw and not self._is_interrupted:
            shown.append(b"\r\x1b[K")
        elif not self._is_interrupted:
            shown.append(b"\n")
        self._rows, self._at = [Row(b"" if self._is_interrupted else self._raw)], 0
        self._raw, self._is_interrupted = None, False

    def _let_out(self, shown: list[bytes]) -> None:
        """Shows a row that is too long, or text that should not be held, as it is."""
        if not self._rows:
            return
        row = self._rows[-1]
        is_long = len(row.text) > ROW_BYTES_MAX
        is_passed = not self._holds_text and len(self._rows) == 1 and not row.is_bar and row.text != b""
        if is_long or is_passed:
            self._commit(len(self._rows) - 1, shown)
            shown.append(self._prefix + row.text)
            self._raw = b"" if is_long else row.text
            self._rows, self._at = [], 0

    # Emulates the worker's terminal.

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
        """Shows the first rows, which are final, above."""
        shown += [self._prefix + row.text + b"\n" for row in self._rows[:count]]
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
            is_ended = True  # by the newline before it
        if self._rows:
            has_last = self._passes and not is_ended  # as the worker left it: its newline is missing
            self._commit(len(self._rows) - has_last, shown)
            if has_last:
                shown.append(self._rows[0].text)
                self._rows, self._raw = [], b""
        elif not self._passes and self.is_open:
            shown.append(b"\n")
            self._raw = None
        self._at = 0
        return b"".join(shown)

    def interrupt(self) -> None:
        self._is_interrupted = True


def _only_ends_lines(data: bytes) -> bool:
    """Returns whether each carriage return is part of a line's ending."""
    return not data.endswith(b"\r") and data.count(b"\r") == data.count(b"\r\n")


# The text of a row.


def width_of(text: bytes) -> int:
    """Returns how many columns a text covers."""
    plain = _plain(text)
    return len(plain) if plain.isascii() else sum(map(_width, plain))


def _plain(text: bytes) -> str:
    return _CONTROL.sub("", text.decode(errors="replace"))


def _width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in {"Mn", "Me", "Cf"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut_to(text: str, columns: int) -> bytes:
    """Returns as much of a text as fits into a row, without its colours and other control sequences."""
    plain = _CONTROL.sub("", text.replace("\t", " "))
    if plain.isascii():
        return plain[:columns].encode()
    ends = itertools.accumulate(map(_width, plain))
    fitting = itertools.takewhile(lambda end: end <= columns, ends)
    return plain[: sum(1 for _ in fitting)].encode(errors="replace")
