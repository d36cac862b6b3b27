"""An election without an endpoint: the nodes of a round choose a coordinator among themselves, by majority.

Where one endpoint is all there is, its host may be gone together with the coordinator.  The nodes of a round know each
other (`Seats`).  A node that has lost the coordinator, and to which the endpoint is silent, asks the others for their
votes.  With more than half of all nodes of the round it is elected, and they follow it.

- **A vote** is for one candidate in one epoch.  A node gives it only if it has lost the coordinator and the endpoint
  itself, and if the candidate knows of a round as new as this node does.  So of each epoch there is one coordinator.
- **Epochs** of elections are a hundred apart: an endpoint that comes back with what it knew counts on from there, and
  stays below.  What it says is not believed for a lease after an election's coordinator was lost, which may live.
- **Rounds** are guarded by the coordinators, old and new (`electorate.py`): none begins one while nodes that it has
  not heard of could have elected another.  So nothing depends on an old coordinator that knows it is old.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from aelastic.core.machine import Machine, Story
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.survivors import election_events as ev
from aelastic.rdzv.survivors.election_events import Action, Event, Phase

# From one election to the next, at least.
EPOCHS_APART = 100
# The endpoint is asked half a lease after the coordinator was heard last; both are silent when a lease is over.
SILENT_LEASES = 0.4
# Nodes ask one after the other, by rank: mostly the first one is elected before the second one asks.
STAGGER_S = 0.05
ASK_AGAIN_S = 0.3
# A coordinator that was elected takes its time to start; then another is elected.
CHOSEN_S = 2.0


@dataclass(slots=True)
class Election(Machine[Event, Action]):
    """One node's part in elections.

    Args:
        node_id: of this agent.
        lease_s: seconds of silence after which a coordinator is lost.
    """

    node_id: str
    lease_s: float

    phase: Phase = Phase.FOLLOWING
    seats: m.Seats | None = None  # what this node votes by
    record: LeaderRecord | None = None  # of the coordinator that this node follows, or that was elected
    newest: int = 0  # epoch that this node has followed, voted in, or heard of
    deadline: float | None = None
    lost: ev.Lost | None = None
    silent: ev.BoardSilent | None = None  # the first question that the endpoint has not answered
    granted: set[str] = field(default_factory=set[str])
    _asked_epoch: int = 0  # in which this node has asked for votes, and has voted for no other
    _elected_epoch: int = 0  # of the last coordinator that was elected, and that this node followed or voted for
    _elected_until: float = 0.0  # so long it is believed to live
    _story: Story = field(default_factory=Story, compare=False)

    def validate(self) -> None:
        assert (self.lost is None) == (self.phase is Phase.FOLLOWING), "a node without a coordinator has lost it"
        assert self.phase is not Phase.CHOSEN or self.record is not None, "an election has a result"
        assert self.phase is Phase.FOLLOWING or self.seats is not None, "a node that knows no other elects none"
        assert self.record is None or self.record.epoch <= self.newest, "the newest epoch is known"

    def _dispatch(self, event: Event, now: float) -> list[Action]:  # noqa: C901, PLR0912  one case for each event
        match event:
            case ev.Followed(leader, epoch):
                self._follow(leader.replace(epoch=epoch, verdict="", seats=None))
                return []
            case ev.Seated():
                if event.seats.replaces(self.seats):
                    self.seats = event.seats
                return []  # it votes by the newest that it has heard of
            case ev.Lost():
                return self._on_lost(event, now)
            case ev.BoardSaid():
                self.silent = None
                return []  # a node that is due to ask waits longer
            case ev.BoardSilent():
                if self.silent is None or (event.is_refused and not self.silent.is_refused):
                    self.silent = event
                if self.phase is Phase.ALONE:
                    self._wait_for_turn(now)
                return []  # noted
            case ev.Asked():
                return self._on_asked(event, now)
            case ev.Answered():
                return self._on_answered(event, now)
            case ev.DeadlinePassed() if self.deadline is None or now < self.deadline:
                return []  # disarmed or moved while the event was on its way
            case ev.DeadlinePassed() if self.phase is Phase.FOLLOWING:
                raise self._impossible(event)
            case ev.DeadlinePassed():
                return self._ask(now)
            case _:
                assert_never(event)

    # What the shell asks, which speaks to the endpoint for the member.

    @property
    def has_vote(self) -> bool:
        seats = self.seats
        return seats is not None and not seats.needs_endpoint and any(s.node_id == self.node_id for s in seats.seats)

    @property
    def chosen(self) -> LeaderRecord | None:
        """The coordinator that was elected, while this node has not been welcomed by it."""
        return self.record if self.phase is Phase.CHOSEN else None

    def is_stale(self, record: LeaderRecord | None, now: float) -> bool:
        """Whether the endpoint says what it knew before an election, whose coordinator may live."""
        epoch = 0 if record is None else record.epoch
        return epoch < self._elected_epoch and now < self._elected_until

    # The coordinator.

    def _follow(self, record: LeaderRecord) -> None:
        self.phase, self.record, self.lost, self.deadline = Phase.FOLLOWING, record, None, None
        self.silent, self._asked_epoch = None, 0
        self.newest = max(self.newest, record.epoch)

    def _on_lost(self, event: ev.Lost, now: float) -> list[Action]:
        match self.phase:
            case Phase.FOLLOWING if self.has_vote:
                if self.record is not None and self._is_after_an_election(self.record):
                    self._elected_epoch, self._elected_until = self.record.epoch, event.since + self.lease_s
                self.phase, self.record, self.lost = Phase.ALONE, None, event
            case Phase.ALONE:
                assert self.lost is not None
                self.lost = self.lost.replace(is_dead=event.is_dead or self.lost.is_dead)
            case Phase.FOLLOWING | Phase.ASKING | Phase.CHOSEN:
                return []  # it has no part in the round, or this is known well enough
            case _:
                assert_never(self.phase)
        self._wait_for_turn(now)
        return []

    @property
    def _may_vote_at(self) -> float | None:
        """From when on the coordinator and the endpoint are lost to this node; `None`: nothing is known of that."""
        if self.lost is None or self.silent is None:
            return None
        lost_at = self.lost.since + (0 if self.lost.is_dead else self.lease_s)
        silent_at = self.silent.since + (0 if self.silent.is_refused else self.lease_s * SILENT_LEASES)
        return max(lost_at, silent_at)

    def _wait_for_turn(self, now: float) -> None:
        may_at = self._may_vote_at
        self.deadline = None if may_at is None else max(may_at, now) + self._rank * STAGGER_S

    @property
    def _rank(self) -> int:
        assert self.seats is not None
        return next(rank for rank, seat in enumerate(self.seats.seats) if seat.node_id == self.node_id)

    # Votes.

    def _on_asked(self, event: ev.Asked, now: float) -> list[Action]:
        vote = event.vote
        reason = self._objection(vote, now)
        if reason:
            leader = self.record if self.phase is Phase.FOLLOWING else None
            may_ask = self.seats is not None and vote.secret == self.seats.secret  # else it may be anything
            # Where there was no election the endpoint says which that is.
            is_told = leader is not None and may_ask and self._is_after_an_election(leader)
            told = _told(leader) if leader is not None and is_told else None
            return [ev.Answer(event.conn, m.Voted(False, self.newest, reason, told))]
        self._choose(_heard(vote.leader), now)
        return [ev.Answer(event.conn, m.Voted(True, self.newest))]

    def _objection(self, vote: m.Vote, now: float) -> str:
        seats, may_at = self.seats, self._may_vote_at
        if seats is None:
            return "this node has no part in a round"
        if vote.secret != seats.secret:
            return "the secret is not that of this node's round: is another job's agent, or another version's, asking?"
        if vote.fence < seats.fence:
            return f"this node knows of a newer round ({seats.round})"
        match self.phase:
            case Phase.FOLLOWING:
                return "this node has a leader"
            case Phase.ALONE | Phase.ASKING | Phase.CHOSEN:
                if may_at is None or now < may_at:
                    return "this node has not lost the leader and the endpoint for long enough"
                if vote.leader.epoch <= self.newest and self.record != _heard(vote.leader):
                    return f"this node knows of epoch {self.newest}"
                return ""
            case _:
                assert_never(self.phase)

    def _on_answered(self, event: ev.Answered, now: float) -> list[Action]:
        voted = event.voted
        match self.phase:
            case Phase.ASKING if voted.is_granted and event.epoch == self.newest:
                self.granted.add(event.node_id)
                return self._count(now)
            case Phase.ASKING if voted.leader is not None:
                self._choose(_heard(voted.leader), now)  # it was elected meanwhile
                return []
            case Phase.ALONE | Phase.ASKING | Phase.CHOSEN | Phase.FOLLOWING:
                if voted.epoch >= self._asked_epoch:
                    self._asked_epoch = 0  # that epoch may be another's
                self.newest = max(self.newest, voted.epoch)
                return []
            case _:
                assert_never(self.phase)

    def _ask(self, now: float) -> list[Action]:
        may_at = self._may_vote_at
        if may_at is None or now < may_at:  # the endpoint has answered since
            self.phase, self.record = Phase.ALONE, None
            self._wait_for_turn(now)
            return []
        assert self.seats is not None and self.lost is not None
        self.phase, self.record = Phase.ASKING, None
        if self._asked_epoch != self.newest:  # it is no node's but this one's
            self.newest = -(-self.newest // EPOCHS_APART) * EPOCHS_APART + EPOCHS_APART
            self._asked_epoch, self.granted = self.newest, {self.node_id}
        self.deadline = now + ASK_AGAIN_S + self._rank * STAGGER_S
        vote = m.Vote(self.seats.fence, self.seats.secret, _told(self._own(self.newest)))
        others = [seat for seat in self.seats.seats if seat.node_id != self.node_id]
        return [*(ev.Ask(seat, vote) for seat in others), *self._count(now)]

    def _count(self, now: float) -> list[Action]:
        assert self.seats is not None
        if len(self.granted) >= self.seats.majority:
            self._choose(self._own(self.newest), now)
        return []

    def _own(self, epoch: int) -> LeaderRecord:
        assert self.lost is not None
        return LeaderRecord(epoch, self.lost.candidate, is_by_nodes=True)

    def _is_after_an_election(self, record: LeaderRecord) -> bool:
        """Whether the endpoint may come back with less than that coordinator's epoch."""
        return record.is_by_nodes or 0 < self._elected_epoch <= record.epoch

    def _choose(self, record: LeaderRecord, now: float) -> None:
        self.phase, self.record = Phase.CHOSEN, record
        self.newest = max(self.newest, record.epoch)
        self._elected_epoch, self._elected_until = record.epoch, now + self.lease_s
        self.deadline = now + CHOSEN_S + self._rank * STAGGER_S


def _told(record: LeaderRecord) -> m.Elected:
    leader = record.candidate
    return m.Elected(record.epoch, leader.node_id, leader.addresses, leader.port, leader.token)


def _heard(leader: m.Elected) -> LeaderRecord:
    candidate = Candidate(leader.node_id, leader.addresses, leader.port, leader.token)
    return LeaderRecord(leader.epoch, candidate, is_by_nodes=True)
