"""The verdict's way: no node hears it before it counts, whatever becomes of this coordinator.

- Where nodes **elect**, most of them know it first (`Closing`), as many as a round needs: a coordinator after this one
  hears of it from one of them, and says the same.  The board's answer proves nothing to nodes that are cut off from it.
- Then it is on the **board**, for nodes that come later.  A coordinator that dies while it tells the verdict leaves no
  node without.

A coordinator that has too few nodes for that says nothing: it has the workers of its side stopped after a second, and
waits for the others, which may go on; it hears from them how the job goes on, or after `join_timeout` says that it does
not know.  A board that has not taken the verdict after a second delays it further where no nodes elect:

- until each node that may live has been heard after that second: it may have another coordinator by now, and this
  agent is to go on with it.  A node that stays silent is awaited for a lease and a second after it was lost.

The board is asked again until it has answered, for nodes that come later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto

from aelastic.decisions.cause import Cause, CauseKind
from aelastic.decisions.decision import Decision, DecisionKind, next_round
from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.coordinator.connections import Connections
from aelastic.rdzv.coordinator.coordinator import Coordinator
from aelastic.rdzv.coordinator.coordinator_events import Send
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import to_text
from aelastic.rdzv.survivors.absent import awaited_s

# A board that has not answered by then may be out of this agent's reach; what is waited for is looked at as often.
PUBLISH_TIMEOUT_S = 1.0
# A board that is away is asked again so often.
PUBLISH_AGAIN_S = 0.5
# Of a text in a verdict, on the board.
DETAIL_MAX = 1024


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
    _is_awaited: bool = False  # too few nodes know it
    _give_up_at: float = 0.0  # the others have not been heard of by then
    _has_stopped: bool = False  # nodes were told to stop their workers, since it is not known how the job ends

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

    def hold(self, send: Send, now: float, sessions: Connections, core: Coordinator) -> list[ev.Action]:
        """Keeps one node's copy of the verdict back."""
        self._held.append(send)
        if self.stage is Stage.PUBLISHING:
            return []
        assert isinstance(send.message, m.Ended), "it is the verdict"
        self.stage, verdict = Stage.PUBLISHING, _shortened(send.message)
        self._look_at, self._asked_at = now + PUBLISH_TIMEOUT_S, now
        self._give_up_at = now + core.rules.join_timeout_s
        self._text = to_text(verdict)
        self._again_at = now
        seats = sessions.electorate.close(m.Closing(sessions.epoch, verdict))
        told = [] if seats is None else [*sessions.say_all(seats), *sessions.say_all(m.Probe())]
        return told + self.publish_again(now, sessions, core)

    def on_heard(self, now: float, sessions: Connections, core: Coordinator) -> list[ev.Action]:
        """A node may know the verdict now."""
        is_on_board = sessions.electorate.is_on_board
        if not self._is_awaited or self._again_at is None or uninformed(sessions, is_on_board=is_on_board):
            return []
        self._again_at = now
        return self.publish_again(now, sessions, core)

    def on_woken(self, now: float) -> None:
        """This process was stopped: what was heard meanwhile may be old."""
        self._asked_at = now

    def on_failed(self, now: float) -> None:
        """The board cannot be asked now."""
        self._again_at = now + PUBLISH_AGAIN_S

    def publish_again(self, now: float, sessions: Connections, core: Coordinator) -> list[ev.Action]:
        """Asks the board again, if it is time, and no other coordinator could go on without having heard."""
        if self._again_at is None or now < self._again_at:
            return []
        self._is_awaited = bool(uninformed(sessions, is_on_board=sessions.electorate.is_on_board))
        if self._is_awaited:
            self.on_failed(now)
            if now >= self._asked_at + PUBLISH_TIMEOUT_S:
                self._stop_workers(core, sessions, now)
            return []
        self._again_at = None
        return [ev.Publish(self._text)]

    def on_deadline_passed(self, now: float, sessions: Connections) -> list[Send]:
        """The board does not answer: waits on while nodes may go on that would not hear the verdict."""
        if not self._may_go_on(now, sessions):
            return self.release()
        if self._is_awaited and now >= self._give_up_at:
            unknown = unknown_outcome(uninformed(sessions, is_on_board=False))
            self._held, self._again_at = [send.replace(message=unknown) for send in self._held], None
            return self.release()
        self._look_at = now + PUBLISH_TIMEOUT_S
        return []

    def _stop_workers(self, core: Coordinator, sessions: Connections, now: float) -> None:
        """Nodes of this side stop their workers, once: it does not know how the job goes on."""
        if self._has_stopped or core.verdict is None or core.verdict.outcome is m.Outcome.SUCCEEDED:
            return
        self._has_stopped = True
        cause = unknown_outcome(uninformed(sessions, is_on_board=False)).decision.cause
        stop = m.Interrupted(core.round, next_round(cause), core.forming.next_count)
        sessions.decide_for_all(stop, now)

    def _may_go_on(self, now: float, sessions: Connections) -> bool:
        """Whether nodes may go on with another coordinator."""
        lease_s = sessions.terms.lease_s
        if uninformed(sessions, is_on_board=False):
            return True
        if sessions.electorate.can_elect:
            return False
        late_at = self._asked_at + PUBLISH_TIMEOUT_S  # of what was heard before, the cut may have come after
        last = late_at + awaited_s(lease_s)  # however often nodes are lost and back meanwhile
        return now < last and not sessions.has_heard_all(late_at, now)

    def release(self) -> list[Send]:
        """The board has the verdict, or is waited for no longer; gives what was held back."""
        assert self.stage is not Stage.UNDECIDED, "there is a verdict"
        held, self._held = self._held, []  # nothing, where the board's answer came late
        self.stage, self._look_at = Stage.RELEASED, None
        return held

    def validate(self) -> None:
        is_publishing = self.stage is Stage.PUBLISHING
        assert (self._look_at is not None) == bool(self._held) == is_publishing, (
            "a verdict is held while the board is asked"
        )


def uninformed(sessions: Connections, *, is_on_board: bool) -> list[m.Seat]:
    """Nodes that could go on with another coordinator, and hear of no verdict from any of them."""
    return sessions.electorate.missing(sessions.electorate.knows_verdict, is_on_board=is_on_board)


def _shortened(verdict: m.Ended) -> m.Ended:
    """A verdict that fits on every board: these are for small things, and JSON in JSON may take 14 bytes a letter."""
    cause = verdict.cause
    if cause is not None:
        cause = cause.replace(message=cause.message[:1024], traceback=cause.traceback[-2048:])
    decision = verdict.decision
    detail, error = decision.cause.detail[:DETAIL_MAX], decision.error[:DETAIL_MAX]
    cut = decision.cause.replace(detail=detail)
    decision = decision.replace(cause=cut, error=error, rule=decision.rule[:DETAIL_MAX])
    return m.Ended(verdict.outcome, decision, cause)


def unknown_outcome(seats: Sequence[m.Seat], within_s: float = 0.0) -> m.Ended:
    """How agents end that do not know how the job ends: nodes that they cannot reach may run on."""
    hosts = [seat.host for seat in seats]
    cause = Cause.of_hosts(CauseKind.OUTCOME_UNKNOWN, hosts, within_s=within_s)
    return m.Ended(m.Outcome.TIMED_OUT, Decision(DecisionKind.OUTCOME_UNKNOWN, cause))
