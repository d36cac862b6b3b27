"""Patterns of worker output that a spec asks for: what has to come again and again, and what says how far it is."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from aelastic.core.fits import are_ranks, are_texts, is_real
from aelastic.core.record import Record

# Workers are looked at once a second at most.
HANG_TIMEOUT_MIN_S = 1.0


class ExpectedOutput(Record):
    """What workers have to write, again and again, on either of their streams.

    Args:
        pattern: a regular expression that some line, or frame of a progress bar, has a match of.
        within_s: seconds from a worker's start to the first of these, and from each to the next.
        ranks: global ranks of the workers that it is expected of, each by itself; `None` is all.
    """

    pattern: str
    within_s: float
    ranks: frozenset[int] | None = None

    def concerns(self, env: Mapping[str, str]) -> bool:
        """Whether it is expected of a worker with that environment."""
        return self.ranks is None or int(env["RANK"]) in self.ranks


def is_expected(expected: Any) -> bool:
    """Whether it is output to expect, with a text, seconds, and ranks."""
    is_one = isinstance(expected, ExpectedOutput) and are_texts([expected.pattern]) and is_real(expected.within_s)
    return is_one and (expected.ranks is None or are_ranks(expected.ranks))


def expected_problem(expected: ExpectedOutput) -> str:
    """What is wrong with output that is to be expected."""
    if expected.ranks is not None and not expected.ranks:
        return "ranks is empty: name some, or use None for all"
    return pattern_problem(expected.pattern) or silence_problem(expected.within_s)


def silence_problem(timeout_s: float) -> str:
    """What is wrong with a time after which a silent worker counts as hung."""
    is_seen = HANG_TIMEOUT_MIN_S <= timeout_s < math.inf
    return "" if is_seen else "use 1 second or more, as workers are looked at once a second at most"


def pattern_problem(pattern: str) -> str:
    """What keeps the text from being a pattern of output."""
    if not pattern:
        return "the pattern is empty: every line has it"
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"the pattern {pattern!r} is no regular expression ({error})"
    return ""


def progress_problem(pattern: str) -> str:
    """What keeps the text from being a pattern of progress."""
    if problem := pattern_problem(pattern):
        return problem
    if not re.compile(pattern).groups:
        return f"the pattern {pattern!r} has no group: put the step's digits in ( ), as in 'step (\\d+)/(\\d+)'"
    return ""
