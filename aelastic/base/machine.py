"""The base of a core: one entrance for events, a trace of the last ones, and invariants that tests check.

A core is synchronous and pure.  Only `handle(event, now)` changes it.  Every pair of phase and event is decided: the
core acts, ignores the event for a reason, or raises `InvalidTransition` and stays as it was.  `validate` asserts what
is true between two events.  Tests switch it on (`check_invariants`), so a job does not pay for it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar, Generic, TypeVar

from aelastic.base.errors import InternalError
from aelastic.base.record import Record

# How many events a bug report shows.
TRACE_EVENTS_MAX = 64
TRACE_EVENT_CHARS_MAX = 400  # of each event

EventT = TypeVar("EventT")
ActionT = TypeVar("ActionT")

# The shells that own an environment switch the checks on with this variable, for the agents in aelastic's own tests.
CHECK_VARIABLE = "AELASTIC_CHECK_INVARIANTS"

_is_checking = False


def check_invariants(is_on: bool = True) -> None:
    """Makes every core of this process check its invariants after each event, from now on."""
    global _is_checking  # noqa: PLW0603  a switch of the process, as `python -X dev` is
    _is_checking = is_on


class DeadlinePassed(Record):
    """The deadline of the core has come; this is the one event that all cores share."""


class InvalidTransition(InternalError):
    """A bug in the agent: a core received an event that is impossible in its phase.  The core is unchanged."""

    def __init__(self, phase: Any, event: Any, trace: tuple[str, ...]) -> None:
        self.phase, self.event = phase, event
        super().__init__(f"{event!r} in phase {phase}", trace=trace)


class Trace:
    """The last events of a core, kept as they are, and turned into text on request."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: deque[tuple[float, Any, Any, Any]] = deque(maxlen=TRACE_EVENTS_MAX)

    def add(self, now: float, before: Any, event: Any, after: Any) -> None:
        self._entries.append((now, before, event, after))

    def lines(self) -> tuple[str, ...]:
        entries = self._entries
        return tuple(f"{now:.3f} {before} --{_shortened(event)}--> {after}" for now, before, event, after in entries)


def _shortened(event: Any) -> str:
    """Returns an event as a line of a trace; one with a traceback has thousands of characters."""
    text = repr(event)
    return text if len(text) <= TRACE_EVENT_CHARS_MAX else f"{text[:TRACE_EVENT_CHARS_MAX]}…"


class Machine(Generic[EventT, ActionT]):
    """A core with phases.  Subclasses have `phase` and `_trace` among their fields."""

    __slots__: ClassVar[tuple[str, ...]] = ()
    phase: Any
    _trace: Trace

    @property
    def trace(self) -> tuple[str, ...]:
        """The last events, oldest first."""
        return self._trace.lines()

    def handle(self, event: EventT, now: float) -> list[ActionT]:
        """Handles one event; returns the actions to carry out, in order.

        Raises:
            InvalidTransition: the event is impossible in this phase.
        """
        before = self.phase
        try:
            actions = self._dispatch(event, now)
            self._trace.add(now, before, event, self.phase)
            if _is_checking:
                self.validate()
        except AssertionError as error:  # a traceback shows its notes, and so does a bug report
            lines = f"{type(self).__name__} at {now:.3f}, event {_shortened(event)}, after:", *self.trace
            error.add_note("\n  ".join(lines))
            raise
        return actions

    def validate(self) -> None:
        """Asserts the invariants of the core."""

    def _dispatch(self, event: EventT, now: float) -> list[ActionT]:
        raise NotImplementedError

    def _impossible(self, event: EventT) -> InvalidTransition:
        return InvalidTransition(self.phase, event, self.trace)
