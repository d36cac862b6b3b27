"""The work of a core to handle one event: how many steps Python takes, and how much memory they hold at most.

Steps are lines; each turn of a loop on one line is a step.  Work inside C shows in other ways: a copy in the memory that
it takes, and a search for a `Name` in the steps of its comparisons.
"""

from __future__ import annotations

import sys
import tracemalloc
from statistics import median_low
from types import FrameType
from typing import Any, NamedTuple

from aelastic.base import machine


class Name(str):
    """A text that is hashed and compared in Python, so that its comparisons are counted."""

    __slots__ = ()

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True


class Act(NamedTuple):
    """An event and the core that handles it."""

    core: Any
    event: Any
    now: float


class Visits(NamedTuple):
    steps: int
    held_bytes: int


def visits(act: Act) -> Visits:
    """Handles an event and reads the next deadline, as a shell does."""
    steps = 0

    def count(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal steps
        steps += what == "line"
        return count

    before, was_checking = sys.gettrace(), machine._is_checking
    machine.check_invariants(False)
    tracemalloc.start(1)
    try:
        held_bytes, _ = tracemalloc.get_traced_memory()
        sys.settrace(count)
        try:
            act.core.handle(act.event, act.now)
            _ = act.core.deadline if hasattr(act.core, "deadline") else None
        finally:
            sys.settrace(before)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        machine.check_invariants(was_checking)
    return Visits(steps, peak_bytes - held_bytes)


def median(of: list[Visits]) -> Visits:
    """The median of several, because now and then a table grows."""
    return Visits(median_low(each.steps for each in of), median_low(each.held_bytes for each in of))
