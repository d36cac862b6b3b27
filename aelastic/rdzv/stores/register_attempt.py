"""One try of an operation on a quorum's register: what was seen, what is locked, what is written."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from aelastic.core.record import Record
from aelastic.rdzv.stores.register_cells import Ballot, Cell, Vote

NO_BALLOT = Ballot(0, "")


class Basis(Record):
    """What a try builds on.

    Args:
        vote: the newest; `None`: there is none.
        voters: the stores that count.
        needed: so many of them are to be locked.
        is_first: there is no majority of members: all stores begin new lives, but for those that a try for a first vote
            has locked.
    """

    vote: Vote | None
    voters: frozenset[int]
    needed: int
    is_first: bool = False

    @property
    def text(self) -> bytes:
        return self.vote.text if self.vote else b""


NO_BASIS = Basis(None, frozenset(), 0)


@dataclass(slots=True)
class Attempt:
    """A try.

    Args:
        size: how many stores there are.
        began: when its step began.
        asked_at: when stores were last asked in this step.
        empty_before: the stores in which the look just before this one has found no vote.
    """

    size: int
    began: float = 0.0
    asked_at: float = 0.0
    empty_before: frozenset[int] = frozenset()
    seen: dict[int, Cell | None] = field(default_factory=dict)
    locked: dict[int, Cell] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    missing: dict[int, str] = field(default_factory=dict)  # stores that are out of this try, and why
    back: set[int] = field(default_factory=set)  # those of them that answered when it was too late for this try
    basis: Basis = NO_BASIS
    ballot: Ballot = NO_BALLOT  # none before the second step
    text: bytes = b""  # to be written
    vote: Vote | None = None  # none before the third step
    patient_until: float | None = None  # a majority has answered in this step

    @property
    def majority(self) -> int:
        return self.size // 2 + 1

    @property
    def answers(self) -> AbstractSet[int]:
        """The stores that have done what this step asked for."""
        return self.written if self.vote else self.locked.keys() if self.ballot is not NO_BALLOT else self.seen.keys()

    def leave_out(self, store: int, why: str) -> None:
        """The try goes on without that store."""
        self.missing[store] = why

    def has_heard_of(self, store: int) -> bool:
        """Whether it has answered in this step, or is out."""
        return store in self.answers or store in self.missing

    @property
    def is_heard_of_all(self) -> bool:
        return len(self.answers | self.missing.keys()) == self.size

    @property
    def needed(self) -> int:
        """So many of the voters are to answer in this step."""
        return self.majority if self.vote else self.basis.needed

    @property
    def has_majority(self) -> bool:
        return len(self.answers & self.basis.voters) >= self.needed

    @property
    def is_hopeless(self) -> bool:
        return len(self.basis.voters - self.missing.keys()) < self.needed

    def begin_step(self, now: float) -> None:
        for store in range(self.size):
            if store not in self.answers:
                self.missing.setdefault(store, "")
        self.began, self.asked_at, self.patient_until = now, now, None

    def find_basis(self, name: str, *, is_known: bool) -> Basis | None:
        """What was seen as the basis of a write; `None`: it is not enough.

        Args:
            name: of the client.
            is_known: it has seen or sent a vote, now or before.
        """
        votes = {cell.vote.ballot: cell.vote for cell in self.seen.values() if cell and cell.vote}
        newest = [vote for _, vote in sorted(votes.items(), reverse=True)]
        seen = frozenset(self.seen)
        is_all = len(seen) == self.size
        # An older vote may never have held: then its own word for the lives of its members is worth nothing.  But of
        # two first votes the newer may be of stores that have forgotten it.
        for vote in newest if is_all else newest[:1]:
            voters = frozenset(store for store, cell in self.seen.items() if cell and cell.life == vote.members[store])
            if len(voters) >= self.majority:
                return Basis(vote, voters, self.majority)
        if is_all:
            return Basis(newest[0] if newest else None, seen, self.size, is_first=True)
        if len(seen) >= self.majority and not is_known and not self.may_have_begun(name):
            return Basis(None, seen, self.majority, is_first=True)
        return None

    def may_have_begun(self, name: str) -> bool:
        """Whether a first vote may hold though none was seen: a store has its lock, and an empty one may have had it.

        A client that has sent no vote knows that there is none of its own locks.
        """
        are_locked = [cell is not None for cell in self.seen.values() if cell is None or cell.promised.name != name]
        return len(self.seen) >= self.majority and any(are_locked) and not all(are_locked)

    def holds(self, basis: Basis) -> bool:
        """Whether a majority is seen to have the basis, and no store that answers is to be taken in."""
        if basis.is_first:
            return basis.vote is None and len(basis.voters & self.empty_before) >= self.majority
        with_it = [store for store in basis.voters if (cell := self.seen[store]) and cell.vote == basis.vote]
        return len(with_it) >= self.majority and len(basis.voters) == len(self.seen)

    def unfinished(self, name: str) -> Ballot | None:
        """Returns the newest try that was seen if it is another client's, and its vote is not in a majority.

        Args:
            name: of this client.
        """
        cells = [cell for cell in self.seen.values() if cell is not None]
        newest = max((cell.promised for cell in cells), default=NO_BALLOT)
        written = [cell for cell in cells if cell.vote is not None and cell.vote.ballot == newest]
        return newest if newest.name not in {"", name} and len(written) < self.majority else None

    def lock_of(self, store: int) -> Cell:
        """A cell that was seen, as it is to be locked."""
        cell, basis = self.seen[store], self.basis
        # A store that was locked for a first vote has forgotten nothing since, and keeps its life: the try that locked
        # it may have written its vote in another store by now, and that vote names this life.
        if cell is not None and store in basis.voters and (not basis.is_first or basis.vote is None):
            return cell.replace(promised=self.ballot)
        # A new life.  What the store is told of the basis counts for nothing, but it shows that there is one.
        return Cell(self.ballot, self.ballot, cell.vote if cell and basis.is_first else basis.vote)

    def next_vote(self) -> Vote:
        """The vote of this try: a store that is locked is a member, any other stays what it was."""
        before = self.basis.vote.members if self.basis.vote and not self.basis.is_first else (None,) * self.size
        lives = [self.locked[store].life if store in self.locked else before[store] for store in range(self.size)]
        return Vote(self.ballot, tuple(lives), self.text)
