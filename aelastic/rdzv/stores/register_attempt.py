"""One try of an operation on a quorum's register: the cells seen, locked and written."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from aelastic.base.record import Record
from aelastic.rdzv.stores.register_cells import Ballot, StoreCell, Vote

NO_BALLOT = Ballot(0, "")


class Basis(Record):
    """The basis of a try.

    Args:
        vote: the newest vote, or `None`.
        voters: the stores that count.
        needed: how many of them must be locked.
        is_first: there is no majority of members: all stores begin new incarnations, except those that a try for a
            first vote has locked.
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
        size: the number of stores.
        began: when its step began.
        asked_at: when stores were last asked in this step.
        empty_before: the stores in which the look just before this one found no vote.
    """

    size: int
    began: float = 0.0
    asked_at: float = 0.0
    empty_before: frozenset[int] = frozenset()
    seen: dict[int, StoreCell | None] = field(default_factory=dict)
    locked: dict[int, StoreCell] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    missing: dict[int, str] = field(default_factory=dict)  # stores that are out of this try, and why
    back: set[int] = field(default_factory=set)  # stores that answered too late for this try
    basis: Basis = NO_BASIS
    ballot: Ballot = NO_BALLOT  # none before the second step
    text: bytes = b""  # the text to write
    vote: Vote | None = None  # none before the third step
    patient_until: float | None = None  # set once a majority has answered in this step

    @property
    def majority(self) -> int:
        return self.size // 2 + 1

    @property
    def answers(self) -> AbstractSet[int]:
        """The stores that have answered this step successfully."""
        return self.written if self.vote else self.locked.keys() if self.ballot is not NO_BALLOT else self.seen.keys()

    def leave_out(self, store: int, why: str) -> None:
        """Continues the try without a store."""
        self.missing[store] = why

    def is_settled(self, store: int) -> bool:
        """Returns whether a store has answered in this step, or is left out."""
        return store in self.answers or store in self.missing

    @property
    def are_all_settled(self) -> bool:
        return len(self.answers | self.missing.keys()) == self.size

    @property
    def needed(self) -> int:
        """How many of the voters must answer in this step."""
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
        """Returns the basis of a write, from the cells that were seen; `None` if they are too few.

        Args:
            name: the client's.
            is_known: the client has seen or sent a vote, now or before.
        """
        votes = {cell.vote.ballot: cell.vote for cell in self.seen.values() if cell and cell.vote}
        newest = [vote for _, vote in sorted(votes.items(), reverse=True)]
        seen = frozenset(self.seen)
        is_all = len(seen) == self.size
        # An older vote may never have held: then the incarnations that it names for its members are worthless.  But of
        # two first votes, the newer may be of stores that have forgotten it.
        for vote in newest if is_all else newest[:1]:
            voters = frozenset(
                store for store, cell in self.seen.items() if cell and cell.incarnation == vote.members[store]
            )
            if len(voters) >= self.majority:
                return Basis(vote, voters, self.majority)
        if is_all:
            return Basis(newest[0] if newest else None, seen, self.size, is_first=True)
        if len(seen) >= self.majority and not is_known and not self.may_have_begun(name):
            return Basis(None, seen, self.majority, is_first=True)
        return None

    def may_have_begun(self, name: str) -> bool:
        """Returns whether a first vote may hold unseen: one store has its lock, and an empty one may have had the vote.

        A client that has not sent a vote knows that its own locks were not followed by one.
        """
        are_locked = [cell is not None for cell in self.seen.values() if cell is None or cell.promised.name != name]
        return len(self.seen) >= self.majority and any(are_locked) and not all(are_locked)

    def holds(self, basis: Basis) -> bool:
        """Returns whether a majority was seen with the basis, and every store that answered is a member."""
        if basis.is_first:
            return basis.vote is None and len(basis.voters & self.empty_before) >= self.majority
        with_it = [store for store in basis.voters if (cell := self.seen[store]) and cell.vote == basis.vote]
        return len(with_it) >= self.majority and len(basis.voters) == len(self.seen)

    def unfinished(self, name: str) -> Ballot | None:
        """Returns the newest try that was seen if it is another client's, and its vote is not in a majority.

        Args:
            name: this client's.
        """
        cells = [cell for cell in self.seen.values() if cell is not None]
        newest = max((cell.promised for cell in cells), default=NO_BALLOT)
        written = [cell for cell in cells if cell.vote is not None and cell.vote.ballot == newest]
        return newest if newest.name not in {"", name} and len(written) < self.majority else None

    def lock_of(self, store: int) -> StoreCell:
        """Returns the locked form of a cell that was seen."""
        cell, basis = self.seen[store], self.basis
        # A store that was locked for a first vote has forgotten nothing since, and keeps its incarnation: the try that
        # locked it may have written its vote in another store by now, and that vote names this incarnation.
        if cell is not None and store in basis.voters and (not basis.is_first or basis.vote is None):
            return cell.replace(promised=self.ballot)
        # A new incarnation.  The basis written to this store does not count, but shows its existence.
        return StoreCell(self.ballot, self.ballot, cell.vote if cell and basis.is_first else basis.vote)

    def next_vote(self) -> Vote:
        """Returns the vote of this try: a locked store is a member, any other store stays as it was."""
        before = self.basis.vote.members if self.basis.vote and not self.basis.is_first else (None,) * self.size
        incarnations = [
            self.locked[store].incarnation if store in self.locked else before[store] for store in range(self.size)
        ]
        return Vote(self.ballot, tuple(incarnations), self.text)
