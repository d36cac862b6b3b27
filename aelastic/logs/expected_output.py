"""Matches worker output against `--expect-output`: lines, or frames of a progress bar, that match a pattern.

An `ExpectedOutputMatcher` is fed what the worker writes, as the console is (`lines.Splitter`), and shows nothing of it.
The watch asks at intervals; between two questions one match is enough, and what follows it is passed over.  So a worker
that writes what is expected costs next to nothing, however much it writes.
"""

from __future__ import annotations

import re

# A longer line is searched in pieces of about this size: a pattern should not have to go through megabytes of one line.
LINE_BYTES_MAX = 1 << 14


class ExpectedOutputMatcher:
    """The search for a pattern in one stream of one worker.

    Args:
        pattern: a regular expression, searched for in each line as text.
    """

    is_open = False

    def __init__(self, pattern: str) -> None:
        self._find = re.compile(pattern).search
        # One thread feeds, another asks: each of these is written by one of the two.
        self._found = 0  # by `feed`: once between two questions
        self._asked: int | None = 0  # by `ask`: what had been found; `None`: `stop` was called
        self._found_tails = 0  # by `ask`
        self._found_tail = b""  # by `ask`: the one that was counted last
        self._tail = b""  # by `feed`: of a line that is not complete yet
        self._lines = 0  # by `feed`: how often one became complete
        self._found_tail_at = 0  # by `ask`: which line that tail is of
        self._is_amid = False  # by `feed`: the line's beginning was passed over

    def ask(self) -> int:
        """How many questions, this one included, found a new match."""
        tail, line = self._tail, self._lines
        is_new = (tail, line) != (self._found_tail, self._found_tail_at)  # a bar that stands still matches once
        if self._asked == self._found and tail and is_new and self._find(tail.decode(errors="replace")):
            self._found_tail, self._found_tail_at = tail, line
            self._found_tails += 1
        found = self._found
        if self._asked is not None:
            self._asked = found
        return found + self._found_tails

    def stop(self) -> None:
        """Ends the search: no more questions follow."""
        self._asked = None

    def takes(self, chunk: bytes, held: int, *, more: bool) -> int:  # noqa: ARG002  all of it, as it comes
        return len(chunk)

    def feed(self, data: bytes) -> bytes:
        if data and self._found != self._asked:
            self._tail, self._is_amid = b"", not data.endswith((b"\n", b"\r"))
            self._lines += 1
        elif data:
            self._search(data.replace(b"\r", b"\n"))
        return b""

    def _search(self, data: bytes) -> None:
        if self._is_amid:
            _, newline, data = data.partition(b"\n")
            self._is_amid = not newline
        lines, newline, self._tail = (self._tail + data).rpartition(b"\n")
        is_found = False
        if newline:
            self._lines += 1
            # All of them decoded at once, and nothing of Python between two lines: hundreds of megabytes a second.
            is_found = any(map(self._find, lines.decode(errors="replace").split("\n")))
        if len(self._tail) > LINE_BYTES_MAX:
            is_found |= self._find(self._tail.decode(errors="replace")) is not None
            self._tail = b""
        self._found += is_found

    def end(self) -> bytes:
        return b""

    def interrupt(self) -> None:
        """Nothing to end: nothing is shown."""
