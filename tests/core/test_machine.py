"""The base class of cores: what it contributes to a bug report."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

import pytest

from aelastic.base.machine import TRACE_EVENT_CHARS_MAX, TRACE_EVENTS_MAX, Machine, Trace


@dataclass(slots=True)
class Counter(Machine[str, int]):
    """Counts letters; two at once are a bug."""

    phase: str = "counting"
    count: int = 0
    _trace: Trace = field(default_factory=Trace)

    def _dispatch(self, event: str, now: float) -> list[int]:
        assert event != "xx", "one at a time"
        self.count += len(event)
        return [self.count]

    def validate(self) -> None:
        assert self.count < 10_000, "it counts that far"


def test_an_assertion_in_a_core_brings_its_trace() -> None:
    core = Counter()
    core.handle("a", 1.0)
    with pytest.raises(AssertionError, match="one at a time") as caught:
        core.handle("xx", 2.0)
    text = "".join(traceback.format_exception(caught.value))
    assert "Counter at 2.000, event 'xx', after:\n  1.000 counting --'a'--> counting\n" in text


def test_an_invariant_that_does_not_hold_brings_the_trace_as_well() -> None:
    core = Counter(count=9_999)
    with pytest.raises(AssertionError, match="it counts that far") as caught:
        core.handle("a", 2.0)
    assert "--'a'-->" in caught.value.__notes__[0]


def test_a_trace_is_bounded() -> None:
    core = Counter(count=-1_000_000)
    for _ in range(100):
        core.handle("y" * 5_000, 1.0)
    assert len(core.trace) == TRACE_EVENTS_MAX
    assert max(map(len, core.trace)) < TRACE_EVENT_CHARS_MAX + 50
