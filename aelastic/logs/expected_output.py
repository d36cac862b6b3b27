"""Searches worker output, by line or progress-bar frame, for the patterns of `--expect-output` and `--progress`.

An `OutputSearch` is fed a worker's output like the console (`lines.Splitter`), but shows nothing and passes everything
to its matchers, which are polled at intervals.  For expected output one match per poll is enough, and the output after
it is skipped; for progress the last match counts, and lines are searched backwards.  So a worker whose output matches
costs next to nothing, however much it writes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

# A longer line is searched in pieces of about this size, so that no pattern runs over megabytes of one line.
LINE_BYTES_MAX = 1 << 14


# A step counter has at most this many digits: it must fit into a float and 64 bits.
DIGITS_MAX = 15


class Matcher(Protocol):
    """A search in one stream of one worker."""

    def feed(self, data: bytes) -> None: ...


class OutputSearch:
    """A splitter that shows nothing, and passes the worker's output to its matchers."""

    is_open = False

    def __init__(self, matchers: Sequence[Matcher]) -> None:
        self._matchers = matchers

    def takes(self, chunk: bytes, held: int, *, more: bool) -> int:  # noqa: ARG002  all of it, as it comes
        return len(chunk)

    def feed(self, data: bytes) -> bytes:
        for matcher in self._matchers:
            matcher.feed(data)
        return b""

    def end(self) -> bytes:
        return b""

    def interrupt(self) -> None:
        """Does nothing: no line is shown that could be ended."""


class Step(NamedTuple):
    """How far a worker is, according to its output."""

    step: int
    total: int | None


class ProgressMatcher:
    """The search for the newest step in one stream of one worker.

    One thread feeds it; another may read `step`, which changes nothing.

    Args:
        pattern: a regular expression whose first group is the step, and whose second, if there is one, the last step.
    """

    def __init__(self, pattern: str) -> None:
        self._find = re.compile(pattern).search
        self._tail = b""  # of a line that is not complete yet
        self._last: Step | None = None  # in complete lines
        self.begins_again = False  # a step was below the one before

    def feed(self, data: bytes) -> None:
        lines, newline, tail = (self._tail + data.replace(b"\r", b"\n")).rpartition(b"\n")
        if len(tail) > LINE_BYTES_MAX:
            lines, tail = lines + newline + tail, b""
        self._tail = tail
        found = map(self._step_in, reversed(lines.decode(errors="replace").split("\n")))
        if (last := next((step for step in found if step is not None), None)) is not None:
            self.begins_again |= self._last is not None and last.step < self._last.step
            self._last = last

    @property
    def step(self) -> Step | None:
        """The newest step; a step in an incomplete line counts if more text follows its numbers.

        If a buffer was full after `step 12`, it may continue with `50`, seconds or hours later; or never, if the worker
        has died.
        """
        text = self._tail.decode(errors="replace")
        match = self._find(text)
        if match is None:
            return self._last
        are_whole = all(0 <= match.end(group) < len(text) for group in range(1, match.re.groups + 1))
        return (_step_of(match) if are_whole else None) or self._last

    @property
    def last_step(self) -> Step | None:
        """The newest step of a worker that has ended by itself: an incomplete last line counts.

        It does not count if its step is below the previous one: `os._exit` loses the rest of a number in its buffer.
        """
        found = self._step_in(self._tail.decode(errors="replace"))
        if found is None or (self._last is not None and found.step < self._last.step):
            return self._last
        return found

    def _step_in(self, line: str) -> Step | None:
        match = self._find(line)
        return None if match is None else _step_of(match)


def _step_of(match: re.Match[str]) -> Step | None:
    step, total, *_ = (*map(_whole, match.groups()), None)
    return None if step is None else Step(step, total or None)


def _whole(text: str | None) -> int | None:
    """Parses a whole number, with or without separators; returns `None` if the text is not one."""
    digits = "" if text is None else text.strip().replace(",", "").replace("_", "")
    return int(digits) if digits.isdecimal() and len(digits) <= DIGITS_MAX else None


class ExpectedOutputMatcher:
    """The search for a pattern in one stream of one worker.

    Args:
        pattern: a regular expression, searched for in each line as text.
    """

    def __init__(self, pattern: str) -> None:
        self._find = re.compile(pattern).search
        # One thread feeds, another asks: each of these is written by only one of the two.
        self._found = 0  # by `feed`: at most once between two calls of `ask`
        self._asked: int | None = 0  # by `ask`: `_found` at that time; `None`: `stop` was called
        self._found_tails = 0  # by `ask`
        self._found_tail = b""  # by `ask`: the tail that was counted last
        self._tail = b""  # by `feed`: the beginning of an incomplete line
        self._lines = 0  # by `feed`: how often one became complete
        self._found_tail_at = 0  # by `ask`: the line of that tail
        self._is_amid = False  # by `feed`: the line's beginning was skipped

    def ask(self) -> int:
        """Returns how many calls, including this one, found a new match."""
        tail, line = self._tail, self._lines
        is_new = (tail, line) != (self._found_tail, self._found_tail_at)  # a bar that does not change matches once
        if self._asked == self._found and tail and is_new and self._find(tail.decode(errors="replace")):
            self._found_tail, self._found_tail_at = tail, line
            self._found_tails += 1
        found = self._found
        if self._asked is not None:
            self._asked = found
        return found + self._found_tails

    def stop(self) -> None:
        """Ends the search: `ask` is not called again."""
        self._asked = None

    def feed(self, data: bytes) -> None:
        if data and self._found != self._asked:
            self._tail, self._is_amid = b"", not data.endswith((b"\n", b"\r"))
            self._lines += 1
        elif data:
            self._search(data.replace(b"\r", b"\n"))

    def _search(self, data: bytes) -> None:
        if self._is_amid:
            _, newline, data = data.partition(b"\n")
            self._is_amid = not newline
        lines, newline, self._tail = (self._tail + data).rpartition(b"\n")
        is_found = False
        if newline:
            self._lines += 1
            # Decoding all lines at once, without Python code between lines, makes hundreds of megabytes a second.
            is_found = any(map(self._find, lines.decode(errors="replace").split("\n")))
        if len(self._tail) > LINE_BYTES_MAX:
            is_found |= self._find(self._tail.decode(errors="replace")) is not None
            self._tail = b""
        self._found += is_found
