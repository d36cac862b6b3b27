"""The seats of a round that is older than its coordinator: who has come back, and whom to wait for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Recovery:
    """The round that was on when this coordinator came.

    Args:
        size: how many nodes took part.
        gone_rank: the seat of the coordinator before us, who is known to be gone; -1: nobody is.
    """

    size: int
    gone_rank: int
    seats: dict[int, str] = field(default_factory=dict[int, str])  # group rank to node
    given_up: set[int] = field(default_factory=set[int])
    departed: set[int] = field(default_factory=set[int])  # finished and gone: nobody misses them
    counts: dict[str, int] = field(default_factory=dict[str, int])  # node to the restart count it has heard of
    has_spares: bool = False  # others waited for a place, and will come back too
    is_over: bool = False  # somebody was told already that the round is over

    @property
    def is_complete(self) -> bool:
        """Whether nobody is awaited any more.  Asked for each node that comes: nothing here is counted anew."""
        gone = self.gone_rank
        is_gone_missing = gone >= 0 and not (gone in self.seats or gone in self.given_up or gone in self.departed)
        departed = sum(rank not in self.seats and rank not in self.given_up for rank in self.departed)
        return len(self.seats) + len(self.given_up) + departed + is_gone_missing >= self.size

    @property
    def missing(self) -> list[int]:
        """Group ranks that are neither back nor done."""
        return [rank for rank in range(self.size) if rank not in self.seats and rank not in self.departed]

    def give_up(self, node_id: str, *, was_finished: bool) -> None:
        """A node that had come back is gone again."""
        for rank in [rank for rank, holder in self.seats.items() if holder == node_id]:
            del self.seats[rank]
            (self.departed if was_finished else self.given_up).add(rank)
