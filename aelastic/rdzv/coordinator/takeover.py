"""Members of a round that a coordinator has inherited from the one before it.

The round is older than the coordinator.  Each node that reconnects says which seat (group rank) it has; the takeover
is complete once each seat is taken, or known to be empty: its node was given up, had finished and left, or is the agent
of the previous coordinator, which is known to be gone.  A round that has lost no node goes on untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aelastic.failures.failure import ProcessFailure
from aelastic.rdzv.coordinator.roster import Member
from aelastic.rdzv.protocol.messages import Past, Standing


def has_seat(past: Past, max_nodes: int) -> bool:
    """Whether a node's account of its round can be true: a peer that is hostile, or has a bug, may say anything."""
    return 0 <= past.group_rank < past.group_world_size <= max_nodes


@dataclass(slots=True)
class Takeover:
    """Seats of one inherited round.

    Args:
        round: its number.
        size: how many nodes took part.
        gone_rank: the seat of the previous coordinator's own node, which is known to be gone; -1: none is.
    """

    round: int
    size: int
    gone_rank: int
    seats: dict[int, str] = field(default_factory=dict[int, str])  # group rank to node
    given_up: set[int] = field(default_factory=set[int])
    departed: set[int] = field(default_factory=set[int])  # finished and left: not missed
    restart_counts: dict[str, int] = field(default_factory=dict[str, int])  # node to the count it has heard of
    has_spares: bool = False  # nodes waited for a place in the round, and will reconnect too
    is_over: bool = False  # a node has heard that the round is over

    def take_seat(self, node_id: str, past: Past) -> bool:
        """A node of the round has reconnected; gives whether the seat it speaks of is its own."""
        rank = past.group_rank
        if self.seats.get(rank, node_id) != node_id or not 0 <= rank < self.size:
            return False
        self.seats[rank] = node_id
        self.given_up.discard(rank)
        self.departed.update(past.departed)
        self.restart_counts[node_id] = past.restart_count
        self.has_spares |= past.has_spares
        self.is_over |= past.standing in {Standing.READY, Standing.STOPPING}
        return True

    def on_ready(self, node_id: str) -> None:
        """A node that has a seat has no workers any more, so the round is over."""
        self.is_over |= node_id in self.restart_counts and node_id in self.seats.values()

    def give_up(self, node_id: str, *, was_finished: bool) -> None:
        """A node that had reconnected is gone again."""
        for rank in [rank for rank, holder in self.seats.items() if holder == node_id]:
            del self.seats[rank]
            (self.departed if was_finished else self.given_up).add(rank)

    @property
    def is_complete(self) -> bool:
        """True once every group rank has reconnected, left or been given up.

        Asked for each node that reconnects: nothing but what has departed is counted anew.
        """
        gone = self.gone_rank
        is_gone_missing = gone >= 0 and not (gone in self.seats or gone in self.given_up or gone in self.departed)
        departed = sum(rank not in self.seats and rank not in self.given_up for rank in self.departed)
        return len(self.seats) + len(self.given_up) + departed + is_gone_missing >= self.size

    @property
    def by_rank(self) -> list[str]:
        """The round's nodes by group rank; a seat that nothing has taken has a name that no node has."""
        return [self.seats.get(rank, f"missing {rank}") for rank in range(self.size)]

    @property
    def missing(self) -> list[int]:
        """Group ranks that are neither back nor done."""
        return [rank for rank in range(self.size) if rank not in self.seats and rank not in self.departed]

    def outcome(self, failed: Sequence[Member], restart_count: int) -> ProcessFailure | str:
        """What becomes of the round, once the takeover is over.

        Args:
            failed: nodes of the round whose workers have failed.
            restart_count: the highest that any node has heard of.

        Returns:
            A failure that no coordinator has answered; why the round has ended; or empty: it goes on untouched.
        """
        for member in failed:
            if (
                self.restart_counts[member.node.node_id] == restart_count
            ):  # else the previous coordinator has counted it
                assert member.failure is not None
                return member.failure
        missing = self.missing
        if missing == [self.gone_rank]:
            return f"the previous coordinator's node is gone (group rank {missing[0]})"
        if missing:
            return f"group rank {', '.join(map(str, missing))} did not reconnect to the new coordinator"
        return f"round {self.round} had ended when the coordinator was lost" if self.is_over or failed else ""

    def validate(self) -> None:
        assert not self.seats.keys() & self.given_up, "a seat that is taken is not given up"
        assert all(0 <= rank < self.size for rank in self.seats), "seats are those of the round"
