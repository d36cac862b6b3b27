"""The first cause of a round's end: what is charged, what is named, and when that is known.

The rules are the same for a leader that saw the round end and for one that has just taken it over:

1. The end of a round has one **first cause**.  What follows from it costs nothing more.
2. **A node that is lost or leaves is a cause**, and so is a connection between agents that breaks.  Such a cause is
   free.  A failure within `GRACE_S` before or after it is a victim's: workers fail 20 to 50 ms after a peer is gone,
   and their agents' reports may come first.  A node is lost from its last message on, because a network that
   loses packets may report its end long after its peers have failed.
3. A failure that a node reports before it leaves is not a victim of its own leaving.
4. Anything else that ends a round for free (newcomers, a worker group that restarted on its own) is its cause unless a
   failure came before.
5. Otherwise **the first failure is charged**, and named.  Failures are ordered by when their agents noticed them.  One
   that reports a lost peer comes after others, and a worker that was killed comes before those that raised.

Times are on the leader's clock: nodes report how old their facts are.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from aelastic.base.record import Record
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.rdzv.decisions.cause import PENDING, Cause, CauseKind
from aelastic.rdzv.leader.coordinator_events import Lost
from aelastic.rdzv.ledger import Reached, most_of
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.restart_policy import cause_of

# A connection usually breaks because its agent ended; if a switch has cut it, the agent reconnects at once.
GRACE_S = 0.3
# How much later than a failure its cause may be reported: agents on busy machines are late by this much.
NAMING_S = 0.03
# An agent notices at once that a worker was killed, but one that raised only after its interpreter has ended.
KILLED_LEAD_S = 0.1

# Stands for all nodes that do not report to a new leader, among the nodes that are lost.
MISSING = ""


class Weight(IntEnum):
    """What a failure reveals about its origin."""

    OWN = 0  # a signal, or the agent's own finding: the worker did not die because of a peer
    PLAIN = 1
    ECHO = 2  # its message reports a lost peer

    @classmethod
    def of(cls, failure: ProcessFailure) -> Weight:
        if failure.exitcode == -signal.SIGKILL or failure.is_final or failure.oom or failure.note:
            return cls.OWN
        if failure.names_lost_peer:
            return cls.ECHO
        return cls.OWN if failure.is_signal and failure.exitcode != -signal.SIGABRT else cls.PLAIN


# Offset added to the time of a failure, by its weight, when causes are ordered.
_DELAY_S = {Weight.OWN: -KILLED_LEAD_S, Weight.PLAIN: 0.0, Weight.ECHO: GRACE_S}
# How long naming a failure waits for an earlier one.
_NAMING_S = {Weight.OWN: 0.0, Weight.PLAIN: NAMING_S, Weight.ECHO: GRACE_S}


class Report(Record):
    """A node's first failure of the round."""

    node_id: str
    failure: ProcessFailure
    at: float  # when its agent noticed it
    weight: Weight

    @property
    def place(self) -> float:
        """Its position in the order of failures."""
        return self.at + _DELAY_S[self.weight]


class Loss(Record):
    """A node of the round that is gone, or whose connection broke."""

    node_id: str
    at: float  # when its last message came
    seen_at: float  # when its connection broke, or it was given up
    what: Cause  # pending while the node may come back
    has_left: bool = False  # the node reported that it leaves
    ends_round: bool = True  # false: its workers had finished, or it has come back

    @property
    def cause(self) -> Cause:
        return self.what.replace(is_loss=self.ends_round and not self.has_left)

    def explains(self, report: Report) -> bool:
        """Returns whether a failure is a victim of this loss."""
        if self.has_left and self.node_id == report.node_id:
            return False
        return self.at <= report.at + GRACE_S and (self.ends_round or report.at <= self.seen_at + GRACE_S)


@dataclass(slots=True)
class RoundEnd:
    """What is known about the end of one round.

    Args:
        size: the number of nodes that take part in it.
        restart_count: that of the round.
    """

    size: int = 0
    restart_count: int = 0
    first: Report | None = None  # of the failures
    failed_or_gone: set[str] = field(default_factory=set[str])  # nodes that have failed or gone
    failed: set[str] = field(default_factory=set[str])  # nodes that have reported a failure
    losses: dict[str, Loss] = field(default_factory=dict[str, Loss])  # by node
    broken: set[str] = field(default_factory=set[str])  # nodes that may come back
    free: tuple[float, Cause] | None = None  # what else has ended it, and when
    hosts: set[str] = field(default_factory=set[str])  # of its nodes
    unfit: set[str] = field(default_factory=set[str])  # those of them that came out of it unfit
    reached: dict[str, Reached] = field(default_factory=dict[str, Reached])  # by nodes that have reported it
    unnotified: list[str] = field(default_factory=list[str])  # nodes that must be notified that it is over
    notified_cause: Cause | None = None  # the cause that nodes were given
    _ending: Loss | None = None  # the first loss that ends the round
    _explaining: Loss | None = None  # the first loss that explains the first failure

    # What happens.

    def on_failed(self, node_id: str, failure: ProcessFailure, at: float, reached: Reached | None = None) -> None:
        """A node reports its failure, or repeats the report when it reconnects.

        The first report dates it best: the longer ago it was, the more the two clocks have drifted apart.
        """
        self.on_reached(node_id, reached)
        if node_id in self.failed:
            return
        report = Report(node_id, failure, at, Weight.of(failure))
        self.failed_or_gone.add(node_id)
        self.failed.add(node_id)
        if self.first is None or report.place < self.first.place:
            self.first = report
            self._ending, self._explaining = self._weighed()

    def on_broken(self, node_id: str, at: float, seen_at: float) -> None:
        """A node's connection broke; the node may come back within the grace."""
        if self._stays(self.losses.get(node_id)):
            return
        self._note(Loss(node_id, at, seen_at, PENDING, ends_round=False))
        self.broken.add(node_id)

    def on_back(self, node: m.Node, at: float, seen_at: float) -> None:
        """A node has connected again: unless it was given up, nothing was lost, but its connection broke."""
        known = self.losses.get(node.node_id)
        if known is not None and node.node_id in self.broken:
            at, seen_at = known.at, known.seen_at
        elif self._stays(known):
            return
        self.broken.discard(node.node_id)
        what = Cause(CauseKind.CONNECTION_BROKE, (node.host,))
        self._note(Loss(node.node_id, at, seen_at, what, ends_round=False))

    def on_gathered(self, node: m.Node, past: m.Past, now: float) -> None:
        """A node of the round has found the new leader."""
        node_id = node.node_id
        self.hosts.add(node.host)
        loss = self.losses.pop(node_id, None)
        self.broken.discard(node_id)
        if loss is not None and (loss is self._ending or loss is self._explaining):
            self._ending, self._explaining = self._weighed()
        self.on_past(node_id, past, now)

    def on_past(self, node_id: str, past: m.Past, now: float, *, failed_at: float | None = None) -> None:
        """Notes a node's report of its part in the round: since its last message, if it was lost meanwhile.

        Args:
            node_id: the node.
            past: its part.
            now: when it reported that.
            failed_at: when it failed, if it reported that before it was lost.
        """
        loss = self.losses.get(node_id)
        self.on_reached(node_id, past.reached)
        if past.is_charged:
            self._date_missing(now - max(0.0, past.alone_s))
        if past.failure is not None:
            at = now - max(0.0, past.failure_age_s)
            at = at if loss is None else max(at, loss.at)
            self.on_failed(node_id, past.failure, at if failed_at is None else failed_at)
        elif past.ended is not None and loss is not None:  # without contact, it stopped its workers on its own
            self.failed_or_gone.add(node_id)
            self._note(loss.replace(at=min(loss.at, now - max(0.0, past.alone_s)), ends_round=True))

    def on_gone(self, node: m.Node, event: m.Left | Lost, now: float, *, ends_round: bool) -> None:
        """A node of the round was lost, or has left; `ends_round`: its workers had not finished."""
        has_left, at = isinstance(event, m.Left), now - max(0.0, event.age_s)
        what = Cause(CauseKind.NODE_LEFT if has_left else CauseKind.NODE_LOST, (node.host,), detail=event.reason)
        known = self.losses.get(node.node_id)
        if known is not None and (self._stays(known) or node.node_id in self.broken):
            at, has_left = known.at, known.has_left  # it came back, and goes once more
        self.broken.discard(node.node_id)
        self.failed_or_gone.add(node.node_id)
        self._note(Loss(node.node_id, at, now, what, has_left, ends_round))

    def _stays(self, known: Loss | None) -> bool:
        """Returns whether the loss of a node counts, whatever happens to that node later."""
        return known is not None and (known.ends_round or (self.first is not None and known.explains(self.first)))

    def on_missing(self, what: Cause, at: float) -> None:
        """Nodes of the round do not report to a new leader: since then, or `-inf` if nobody knows."""
        self.hosts |= {*what.hosts}
        self._note(Loss(MISSING, at, at, what))

    def _date_missing(self, alone_since: float) -> None:
        """A node that knows that its failure is charged lost its leader then, so no node was missing before.

        It may report that after the others were given up, and be the only one that knows it.
        """
        missing = self.losses.get(MISSING)
        if missing is None:
            return
        is_dated = missing.at != -inf
        self._note(missing.replace(at=min(missing.at, alone_since) if is_dated else alone_since))

    def on_free(self, cause: Cause, at: float) -> None:
        """Something else ends the round, and costs nothing."""
        if self.free is None or at < self.free[0]:
            self.free = at, cause

    # What nodes receive.

    def note_notified(self, cause: Cause) -> None:
        self.notified_cause = cause

    def await_notification(self, unnotified: list[str]) -> None:
        """These nodes must be notified that the round is over."""
        self.unnotified = unnotified

    def take_unnotified(self) -> list[str]:
        unnotified, self.unnotified = self.unnotified, []
        return unnotified

    def on_reached(self, node_id: str, reached: Reached | None) -> None:
        """Notes how far a node of the round was; its last report counts."""
        if reached is not None:
            self.reached[node_id] = reached

    @property
    def progress(self) -> tuple[Reached, bool]:
        """Returns how far the round was, and whether all of its nodes have reported that."""
        return most_of(*self.reached.values()), len(self.reached) >= self.size

    # What follows.

    def _note(self, loss: Loss) -> None:
        """A loss is new, or more is known of it."""
        before, self.losses[loss.node_id] = self.losses.get(loss.node_id), loss
        if before is not None and (before is self._ending or before is self._explaining):
            self._ending, self._explaining = self._weighed()  # of a thousand losses, few come before all others
            return
        if loss.ends_round and (self._ending is None or _age(loss) < _age(self._ending)):
            self._ending = loss
        is_explaining = self.first is not None and loss.explains(self.first)
        if is_explaining and (self._explaining is None or _order(loss) < _order(self._explaining)):
            self._explaining = loss

    def _weighed(self) -> tuple[Loss | None, Loss | None]:
        """Returns the first loss that ends the round, and the first one that explains the first failure."""
        first, losses = self.first, self.losses.values()
        ending = min((each for each in losses if each.ends_round), key=_age, default=None)
        explaining = (each for each in losses if first is not None and each.explains(first))
        return ending, min(explaining, key=_order, default=None)

    @property
    def cause(self) -> Cause | None:
        """The first cause, as far as it is known; `None` if nothing has ended the round."""
        first, free = self.first, self.free
        if self._explaining is not None:
            return self._explaining.cause
        if first is not None and (free is None or first.at < free[0]):
            return cause_of(first.failure)
        if self._ending is not None and (free is None or self._ending.at <= free[0]):
            return self._ending.cause
        return None if free is None else free[1]

    @property
    def failure(self) -> ProcessFailure | None:
        """The first failure, if it is the first cause."""
        cause = self.cause
        return self.first.failure if self.first is not None and cause is not None and cause.is_failure else None

    @property
    def is_charge_withdrawn(self) -> bool:
        """Whether nodes have read that a failure is charged, but a loss has turned out to be its cause."""
        if self.notified_cause is None or not self.notified_cause.is_failure or (cause := self.cause) is None:
            return False
        return cause.is_known and not cause.is_failure

    def known_at(self, *, is_final: bool) -> float | None:
        """Returns when the cause is certain enough to be sent; `None`: not before a node is lost or back.

        Args:
            is_final: if the first failure is the cause, the job is over.
        """
        first, cause = self.first, self.cause
        if first is None or cause is None or self.size == 1:
            return 0.0  # nothing to weigh
        if not cause.is_failure:
            return 0.0 if cause.is_known else None
        if is_final:
            return first.at + GRACE_S
        if len(self.failed_or_gone) >= self.size:
            return 0.0
        return first.at + _NAMING_S[first.weight]

    def validate(self) -> None:
        assert self.broken <= self.losses.keys(), "a broken connection is a loss until its node is back"
        assert self.notified_cause is None or not self.unnotified, "all nodes are notified at once, of the same cause"
        assert (self._ending, self._explaining) == self._weighed(), "the losses that come first are known"


def _age(loss: Loss) -> tuple[float, str]:
    return loss.at, loss.node_id


def _order(loss: Loss) -> tuple[bool, float, str]:
    return not loss.what.is_known, loss.at, loss.node_id
