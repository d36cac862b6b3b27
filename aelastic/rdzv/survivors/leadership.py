"""Leader lease: until when this agent may decide as coordinator.  Pure.

Leadership is certain until a lease after the board was asked, the last time it answered that it is ours.  Once that
is past, another agent may lead.  The story behind it: the coordinator's process is stopped, the others elect another
and go on; ours wakes up, sees that all connections are closed, and with `--nnodes 1:3` would start a second job of its
own on the same checkpoints.

Two things are taken for granted.  Monotonic clocks of all nodes run alike within ten percent.  Where one stands still
(a machine that is suspended with its clock), its agent wakes up certain, until its next renewal: so a round that has
lost nodes waits for one that was asked for after the loss (`forming.py`).  And the board answers in the order
it was asked (`session_events.py`): one question is open at a time, and a `Reclaim` makes the answer to a `Renew`
before it worthless.
"""

from __future__ import annotations

from dataclasses import dataclass

from aelastic.rdzv.leader_record import LeaderRecord

# The share of a lease that is trusted after the board has said that leadership is ours.  Members
# that watch the renewals count from later than we do; the rest is for clocks that differ.
TRUSTED_SHARE = 0.9
# For so long a coordinator that hears no other node stands back.  The others find it silent up to a third of a lease
# later than it finds them, and then look at the board four times a second (`contact.py`); the rest is for their clocks.
STAND_BACK_LEASES, STAND_BACK_S = 0.5, 0.5


@dataclass(slots=True)
class LeaderLease:
    """This agent's leadership, as far as it knows.

    Args:
        epoch: of the record.
        lease_s: seconds for which the board's answer holds.
        started: when the agent campaigned.
        renewals: of the record, as the board counts them.
    """

    epoch: int
    lease_s: float
    started: float
    renewals: int = 0
    certain_until: float = 0.0
    nodes_until: float = 0.0  # the same, as most nodes of the round have confirmed while the board was silent
    renew_at: float = 0.0
    asked_losses: int = 0  # nodes that rounds had lost when the board was asked last
    told_fence: int = 0  # of the round that the board was told with it
    _asked_at: float | None = None  # since when the board owes an answer

    def __post_init__(self) -> None:
        self.certain_until = self.started + self._trusted_s
        self.renew_at = self.started + self.lease_s / 3

    @property
    def _trusted_s(self) -> float:
        return self.lease_s * TRUSTED_SHARE

    @property
    def is_asked(self) -> bool:
        """Whether the board owes an answer."""
        return self._asked_at is not None

    def renew_by(self, at: float) -> None:
        """The board is asked then, if not before."""
        self.renew_at = min(self.renew_at, at)

    def is_certain(self, now: float) -> bool:
        return now <= max(self.certain_until, self.nodes_until)

    def is_by_nodes(self, now: float) -> bool:
        """Whether the board has been silent for so long that leadership is certain by the nodes' word, if at all."""
        return now > self.certain_until

    def on_confirmed_by_nodes(self, now: float) -> None:
        self.nodes_until = now + self._trusted_s

    def unconfirmed_s(self, now: float) -> float:
        """For how long the board has not said that leadership is ours."""
        return now - self.certain_until + self._trusted_s

    def renew(self, now: float, losses: int, fence: int = 0) -> bool:
        """A renewal is due, or there is news for it; gives whether to ask the board: not while it owes an answer.

        Args:
            now: the time.
            losses: nodes that rounds have lost so far.
            fence: of the round that the board is told.
        """
        if now >= self.renew_at:
            self.renew_at = now + self.lease_s / 3
        if self._asked_at is not None:
            return False
        self._asked_at, self.asked_losses, self.told_fence = now, losses, fence
        return True

    def is_behind(self, losses: int, confirmed: int, fence: int) -> bool:
        """Whether the board is to be asked at once: nodes were lost since it was, or a round has begun.

        Args:
            losses: nodes that rounds have lost so far; `confirmed`: of these, those that need no new answer.
            fence: of the last round.
        """
        return not self.is_asked and (losses > max(self.asked_losses, confirmed) or fence > self.told_fence)

    def on_renewed(self, record: LeaderRecord, now: float) -> int:
        """The board says that leadership is ours; gives how many nodes rounds had lost when it was asked.

        Renewals are taken as the board has them.  The story behind it: a renewal takes effect and its answer is lost,
        so the board has one more than we.  Did we count by ourselves, members would hear less than the board says from
        then on, and take a dead coordinator's last renewal for one made just now: each later fail-over would take a
        lease more.
        """
        assert self._asked_at is not None
        self.certain_until, self._asked_at = self._asked_at + self._trusted_s, None
        self.renew_at = min(self.renew_at, now + self.lease_s / 3)
        self.renewals = self.renewals + 1 if record.renewals is None else record.renewals
        return self.asked_losses

    def on_renew_failed(self) -> None:
        self._asked_at = None

    def reclaim(self, now: float) -> None:
        """The board is asked for a newer epoch, whatever else it has been asked."""
        self._asked_at = now

    def stand_back(self, now: float) -> float:
        """Leadership is given up, and asked for again if no other agent takes it; gives for how long."""
        seconds = self.lease_s * STAND_BACK_LEASES + STAND_BACK_S
        self.certain_until, self.nodes_until = min(self.certain_until, now), 0.0
        self.reclaim(now + seconds)
        return seconds

    def on_reclaimed(self, record: LeaderRecord) -> None:
        """Leadership is ours, in an epoch that may be the old one: then its age is not known."""
        assert self._asked_at is not None
        if record.epoch > self.epoch:
            self.certain_until = self._asked_at + self._trusted_s
        self.epoch, self.renewals, self._asked_at, self.asked_losses = record.epoch, record.renewals or 0, None, 0

    def validate(self) -> None:
        is_newest = self._asked_at is None or self.certain_until <= self._asked_at + self._trusted_s
        assert is_newest, "an answer is not trusted beyond the end that the open question would give"
