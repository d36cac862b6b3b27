"""When a round that forms begins, and when the job gives up waiting for nodes.

- The **first** round begins at `max_nodes` at once, at `min_nodes` when the last call is over.
- A **later** round begins when each node of the last one that still lives is ready again.  It waits for no other node,
  but takes in those that wait already.
- Below `min_nodes` a round waits for the join timeout, then the job ends.
- A coordinator that is **new** waits a little longer, twice.  Before its first round: the round that runs may be known
  to nodes that have not reconnected yet.  After a takeover: spares find the new coordinator at the same time as the
  nodes of the round do, and a place that a spare comes too late for costs a second interruption.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto

from aelastic.core.record import Record
from aelastic.rdzv.settings import JOIN_TIMEOUT_S, LAST_CALL_TIMEOUT_S, LEASE_S, SETTLE_TIME_S, RendezvousSettings

# When the coordinator is lost, nodes that run and nodes that wait find the next one at the same time.
SPARES_TIMEOUT_S = 1.0


class RoundRules(Record):
    """How many nodes a round takes, and how long it waits for them."""

    min_nodes: int
    max_nodes: int
    last_call_timeout_s: float = LAST_CALL_TIMEOUT_S
    join_timeout_s: float = JOIN_TIMEOUT_S
    settle_time_s: float = SETTLE_TIME_S  # between the first newcomer of a running round and its interruption
    takeover_timeout_s: float = LEASE_S  # for nodes of a round that is older than its coordinator

    @classmethod
    def of(cls, settings: RendezvousSettings) -> RoundRules:
        return cls(
            settings.min_nodes,
            settings.max_nodes,
            settings.last_call_timeout_s,
            settings.join_timeout_s,
            settings.settle_time_s,
            settings.lease_s,
        )


class Step(StrEnum):
    WAIT = auto()  # until `deadline`, or until a node changes
    BEGIN = auto()
    TIME_OUT = auto()


@dataclass(slots=True)
class Forming:
    """Timers of the round that forms.  All are points in time; `None`: not armed."""

    rules: RoundRules
    deadline: float | None = None
    since: float | None = None
    join_by: float | None = None
    last_call_until: float | None = None
    older_round_until: float | None = None  # until then a round that is older than this coordinator may show itself
    spares_until: float | None = None  # until then spares of a round that was taken over may reconnect

    def step(self, *, ready: int, stopping: int, is_first: bool, now: float) -> Step:
        """What the round does now, with so many nodes that are ready and that stop their workers.  O(1)."""
        rules = self.rules
        if self.since is None:
            self.since = now
        if stopping:
            return self._wait(None)  # their agents bound that
        if self.join_by is None:
            self.join_by = now + rules.join_timeout_s
        if ready < rules.min_nodes:
            self.last_call_until = None
            return Step.TIME_OUT if now >= self.join_by else self._wait(self.join_by)
        if is_first and self.older_round_until is not None and now < self.older_round_until:
            # The story behind it: a spare becomes the coordinator, and the other spares are faster than nodes that run.
            return self._wait(self.older_round_until)
        if self.spares_until is not None and ready < rules.max_nodes and now < self.spares_until:
            return self._wait(self.spares_until)
        if is_first and ready < rules.max_nodes:
            if self.last_call_until is None:
                self.last_call_until = now + rules.last_call_timeout_s
            if now < self.last_call_until:
                return self._wait(self.last_call_until)
        return Step.BEGIN

    def _wait(self, deadline: float | None) -> Step:
        self.deadline = deadline
        return Step.WAIT

    def restart(self, now: float) -> None:
        """A round was interrupted: the next one forms from now on."""
        self.since = now

    def await_older_round(self, now: float) -> None:
        """Another coordinator has welcomed a node: a round of that one may yet show itself."""
        if self.older_round_until is None:
            self.older_round_until = now + self.rules.takeover_timeout_s

    def forget_calls(self) -> None:
        """An older round has shown itself: what was waited for is of no interest any more."""
        self.join_by = self.last_call_until = None

    def await_spares(self, now: float) -> None:
        """The coordinator was lost while nodes waited for a place: the next round leaves them time to reconnect."""
        self.spares_until = now + SPARES_TIMEOUT_S

    def end(self) -> None:
        """The round has begun, or the job is over."""
        self.since = self.join_by = self.last_call_until = self.spares_until = None

    def waited_s(self, now: float) -> float:
        return 0.0 if self.since is None else now - self.since
