"""The verdict's way: it is on the board before any node hears it.

So a coordinator that dies while it tells the verdict leaves no node without: the others read it on the board.  A board
that has not taken it after a second delays the verdict further while other nodes may go on without this agent:

- Where most nodes of a round elect: while so many of them are missing here; and for a lease, if this agent is not
  certain that it leads.
- Else until each node that may live has been heard after that second: it may have another coordinator by now, and this
  agent is to go on with it.  A node that stays silent is awaited for a lease and a second after it was lost.

The board is asked again until it has answered, for nodes that come later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import assert_never

from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.coordinator.coordinator_events import Send
from aelastic.rdzv.coordinator.sessions import Sessions
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import to_text
from aelastic.rdzv.survivors.absent import awaited_s

# A board that has not answered by then may be out of this agent's reach; what is waited for is looked at as often.
PUBLISH_TIMEOUT_S = 1.0
# A board that is away is asked again so often.
PUBLISH_AGAIN_S = 0.5


class Stage(StrEnum):
    UNDECIDED = auto()  # there is no verdict
    PUBLISHING = auto()  # the board is to take it first
    RELEASED = auto()  # nodes may hear it


@dataclass(slots=True)
class VerdictGate:
    """Holds the verdict until the board has it."""

    stage: Stage = Stage.UNDECIDED
    _asked_at: float = 0.0  # when the board was to be asked first, or this agent woke up since
    _text: str = ""  # for the board
    _look_at: float | None = None  # when to look again whether to wait for the board any longer
    _again_at: float | None = None  # when to ask the board again
    _held: list[Send] = field(default_factory=list[Send])

    @property
    def deadline(self) -> float | None:
        return min((each for each in (self._look_at, self._again_at) if each is not None), default=None)

    def is_due(self, now: float) -> bool:
        """Whether to wait for the board any longer is to be looked at."""
        return self._look_at is not None and now >= self._look_at

    @property
    def is_asked(self) -> bool:
        """Whether the board was asked to take the verdict."""
        return self.stage is not Stage.UNDECIDED

    @property
    def is_released(self) -> bool:
        return self.stage is Stage.RELEASED

    def hold(self, send: Send, verdict: m.Ended, now: float, *, is_blocked: bool) -> list[ev.Action]:
        """Keeps one node's copy of the verdict back."""
        self._held.append(send)
        if self.stage is Stage.PUBLISHING:
            return []
        self.stage = Stage.PUBLISHING
        self._look_at, self._asked_at = now + PUBLISH_TIMEOUT_S, now
        self._text = to_text(_shortened(verdict))
        self._again_at = now
        return self.publish_again(now, is_blocked=is_blocked)

    def on_woken(self, now: float) -> None:
        """This process was stopped: what was heard meanwhile may be old."""
        self._asked_at = now

    def on_failed(self, now: float) -> None:
        """The board cannot be asked now."""
        self._again_at = now + PUBLISH_AGAIN_S

    def publish_again(self, now: float, *, is_blocked: bool) -> list[ev.Action]:
        """Asks the board again, if it is time, and no other coordinator may have been elected without the board."""
        if self._again_at is None or now < self._again_at:
            return []
        if is_blocked:
            self.on_failed(now)
            return []
        self._again_at = None
        return [ev.Publish(self._text)]

    def on_deadline_passed(self, now: float, sessions: Sessions, *, is_leader: bool) -> list[Send]:
        """The board does not answer: waits on while nodes may go on that would not hear the verdict."""
        if not self._may_go_on(now, sessions, is_leader=is_leader):
            return self.release()
        self._look_at = now + PUBLISH_TIMEOUT_S
        return []

    def _may_go_on(self, now: float, sessions: Sessions, *, is_leader: bool) -> bool:
        """Whether nodes may go on with another coordinator."""
        lease_s = sessions.terms.lease_s
        if sessions.missing:
            return True
        if sessions.electorate.can_elect:
            return not is_leader and now < self._asked_at + lease_s
        late_at = self._asked_at + PUBLISH_TIMEOUT_S  # of what was heard before, the cut may have come after
        last = late_at + awaited_s(lease_s)  # however often nodes are lost and back meanwhile
        return now < last and not sessions.has_heard_all(late_at, now)

    def release(self) -> list[Send]:
        """The board has the verdict, or is waited for no longer; gives what was held back."""
        match self.stage:
            case Stage.PUBLISHING:
                held, self._held = self._held, []
                self.stage, self._look_at = Stage.RELEASED, None
                return held
            case Stage.RELEASED:
                return []  # the board's answer came late
            case Stage.UNDECIDED:
                raise AssertionError("there is no verdict")
            case _:
                assert_never(self.stage)

    def validate(self) -> None:
        is_publishing = self.stage is Stage.PUBLISHING
        assert (self._look_at is not None) == bool(self._held) == is_publishing, (
            "a verdict is held while the board is asked"
        )


def _shortened(verdict: m.Ended) -> m.Ended:
    """A verdict that fits on every board: these are for small things, and JSON in JSON may take 14 bytes a letter."""
    cause = verdict.cause
    if cause is not None:
        cause = cause.replace(message=cause.message[:1024], traceback=cause.traceback[-2048:])
    return m.Ended(verdict.outcome, verdict.reason[:1024], cause)
