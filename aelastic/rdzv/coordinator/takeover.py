"""Reconnecting nodes: what each has missed, and recovery of a round that an earlier coordinator started.

A `Takeover` is of a round that is older than the coordinator.  Each node that reconnects says which seat (group rank)
it has; the takeover is complete once each seat is taken, or known to be empty: its node was given up, had finished and
left, or is the agent of the previous coordinator, which is known to be gone.  A round that has lost no node goes on
untouched.

An heir may be lost before it has gathered the round.  The board has its seat, so the next heir does not wait for that.
The coordinator that began the round is gone then, or it is back, and finds the next heir when the others do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aelastic.decisions.cause import Cause, CauseKind
from aelastic.rdzv.protocol.messages import Ended, Past, Seats, Standing


def credible(past: Past) -> Past:
    """A node's account as an honest agent would give it: one that has failed says how, one that runs has not."""
    has_workers = past.standing in {Standing.BUSY, Standing.FINISHED}
    if past.standing is Standing.FAILED and past.failure is None:
        past = past.replace(standing=Standing.STOPPING)
    return past.replace(failure=None) if past.failure is not None and (has_workers or not past.round) else past


def has_seat(past: Past, max_nodes: int) -> bool:
    """Whether a node's account of its round can be true: a peer that is hostile, or has a bug, may say anything."""
    return 0 <= past.group_rank < past.group_world_size <= max_nodes


@dataclass(slots=True)
class Takeover:
    """Seats of one inherited round.

    Args:
        round: its number.
        size: how many nodes took part.
        gone_rank: the seat of the node whose coordinator began the round; known to be gone, or presumed; -1: it is not.
        heir_rank: the seat of the previous coordinator's node, if that took over this round before; it is known to be
            gone; -1: there was none.
    """

    round: int
    size: int
    gone_rank: int
    heir_rank: int = -1
    seats: dict[int, str] = field(default_factory=dict[int, str])  # group rank to node
    given_up: set[int] = field(default_factory=set[int])
    departed: set[int] = field(default_factory=set[int])  # finished and left: not missed
    _seats_of: dict[str, set[int]] = field(default_factory=dict[str, set[int]])  # node to group ranks
    _settled: set[int] = field(default_factory=set[int])  # group ranks that are taken, given up or departed
    lost_at: float = 0.0  # when the first of its nodes lost the previous coordinator; the seats that are missing, too
    is_charged: bool = False  # the previous coordinator has said that a failure has ended the round
    ended: Cause | None = None  # what the previous coordinator has said that has ended the round for free
    has_spares: bool = False  # nodes waited for a place in the round, and will reconnect too
    is_over: bool = False  # a node has heard that the round is over

    @classmethod
    def of(cls, past: Past, seat_before: tuple[int, int] | None, now: float) -> Takeover:
        """The round that a node tells of; `seat_before`: as `Coordinator` has it."""
        gone_rank = -1 if seat_before is None else past.coordinator_rank
        heir_rank = seat_before[1] if seat_before and seat_before[0] == past.fence else -1
        return cls(past.round, past.group_world_size, gone_rank, heir_rank, lost_at=now)

    def take_seat(self, node_id: str, past: Past, now: float) -> bool:
        """A node of the round has reconnected; gives whether the seat it speaks of is its own."""
        rank = past.group_rank
        if self.seats.get(rank, node_id) != node_id or not 0 <= rank < self.size == past.group_world_size:
            return False
        self.seats[rank] = node_id
        self._seats_of.setdefault(node_id, set()).add(rank)
        self.given_up.discard(rank)
        self.departed.update(past.departed)
        self._settled.update(past.departed, (rank,))
        self.lost_at = min(self.lost_at, now - past.alone_s)
        self.ended = self.ended or past.ended
        self.is_charged |= past.is_charged
        self.has_spares |= past.has_spares
        self.is_over |= past.standing in {Standing.READY, Standing.STOPPING}
        return True

    def on_ready(self, node_id: str) -> None:
        """A node that has a seat has no workers any more, so the round is over."""
        self.is_over |= node_id in self._seats_of

    def give_up(self, node_id: str, *, was_finished: bool) -> None:
        """A node that had reconnected is gone again."""
        for rank in self._seats_of.pop(node_id, ()):
            del self.seats[rank]
            (self.departed if was_finished else self.given_up).add(rank)

    @property
    def is_complete(self) -> bool:
        """True once every group rank has reconnected, left or been given up."""
        gone = sum(rank not in self._settled for rank in {self.gone_rank, self.heir_rank} if 0 <= rank < self.size)
        return len(self._settled) + gone >= self.size

    @property
    def is_presumed(self) -> bool:
        """Whether the seat of the coordinator that began the round may yet be taken: an heir has followed it since."""
        return (
            self.heir_rank not in {-1, self.gone_rank} and self.gone_rank >= 0 and self.gone_rank not in self._settled
        )

    @property
    def coming(self) -> tuple[str, ...]:
        """Names of nodes that may yet take their seats, as `by_rank` has them."""
        gone = self._settled | {self.gone_rank, self.heir_rank}
        return tuple(name for rank, name in enumerate(self.by_rank) if rank not in gone)

    @property
    def by_rank(self) -> list[str]:
        """The round's nodes by group rank; a seat that nothing has taken has a name that no node has."""
        return [self.seats.get(rank, f"missing {rank}") for rank in range(self.size)]

    @property
    def missing(self) -> list[int]:
        """Group ranks that are neither back nor done."""
        return [rank for rank in range(self.size) if rank not in self.seats and rank not in self.departed]

    @property
    def loss(self) -> Cause | None:
        """What has become of the seats that are missing; `None` if none is."""
        missing = self.missing
        if not missing:
            return None
        is_leaders = missing in ([self.gone_rank], [self.heir_rank])
        return Cause(CauseKind.LEADER_LOST if is_leaders else CauseKind.NODES_MISSING, ranks=tuple(missing))

    @property
    def end(self) -> Cause | None:
        """What has ended the round for free; `None` if it continues."""
        if self.ended is not None or not self.is_over:
            return self.ended
        return Cause(CauseKind.ENDED_EARLIER, round=self.round)

    def validate(self) -> None:
        assert not self.seats.keys() & self.given_up, "a seat that is taken is not given up"
        assert all(0 <= rank < self.size for rank in self.seats), "seats are those of the round"
        assert self._settled == self.seats.keys() | self.given_up | self.departed, "what is settled is known of a seat"
        holders = {(node_id, rank) for node_id, ranks in self._seats_of.items() for rank in ranks}
        assert holders == {(node_id, rank) for rank, node_id in self.seats.items()}, "a node has the seats that it took"


@dataclass(slots=True)
class Proposed:
    """The verdict that a coordinator before this one has proposed, if one has, and of which round."""

    seats: Seats | None = None

    def hear(self, seats: Seats | None) -> None:
        """What a node knows; the newest counts."""
        if seats is not None and seats.closing is not None and seats.replaces(self.seats):
            self.seats = seats

    def of(self, fence: int) -> Ended | None:
        """The verdict, if it is of the round with this fence."""
        seats = self.seats
        return None if seats is None or seats.closing is None or seats.fence != fence else seats.closing.verdict
