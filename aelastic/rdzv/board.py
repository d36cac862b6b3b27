"""The board: where the agents of a job find their coordinator, and elect one.

A board is a strongly consistent store outside the agents that says one thing about a run id: who
coordinates it, and in which reign.  It holds nothing else, and decides nothing.  Each back end
implements the five operations here on something real (`boards/`); `member.py` says when to use which.

An operation takes one round trip or a few and never waits for something to happen.  It may be cancelled at
any moment, in which case it has taken effect or not; it raises `RendezvousConnectionError` where the store cannot be
asked now (whoever asks tries again) and `RendezvousStateError` or `InputError` where trying again is of no use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from aelastic.core.record import Record


class Candidate(Record):
    """An agent that wants to coordinate, as it writes itself on the board."""

    node_id: str
    addresses: tuple[str, ...]  # where it listens: hosts, to be tried in this order
    port: int
    token: str  # a member shows it to prove that it has read the board


class LeaderRecord(Record):
    """The current leadership of a run id: coordinator, epoch, renewals, verdict."""

    # One term of a coordinator.  Rises with every election of this run id, as long as the board lives.
    epoch: int
    candidate: Candidate
    # While it rises the coordinator lives.  `None`: the board itself forgets a dead coordinator.
    renewals: int | None = None
    # How the job ended, as `codec.to_text` writes it; empty while the job runs.
    verdict: str = ""

    def renewed(self) -> LeaderRecord:
        """With one renewal more, where they are counted."""
        return self if self.renewals is None else self.replace(renewals=self.renewals + 1)

    def is_same_term(self, other: LeaderRecord | None) -> bool:
        """True if both are of one term of one coordinator, whatever the renewals and the verdict."""
        return other is not None and (self.epoch, self.candidate) == (other.epoch, other.candidate)


class Board(ABC):
    """One run id on one board, as one agent uses it.  One operation at a time."""

    @abstractmethod
    async def open(self) -> None:
        """Reaches the store, or serves it where that is this agent's part.

        Asked again after a `read` or a `claim` that failed; the other operations reach a lost store by themselves.

        Raises:
            RendezvousConnectionError: nobody answers; it may come up yet.
            RendezvousStateError: what answers is no such store.
            InputError: it is one, but of another job; or it wants other credentials.
        """

    @abstractmethod
    async def read(self) -> LeaderRecord | None:
        """Who coordinates; `None` where nobody does."""

    @abstractmethod
    async def campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        """Makes `claim` the coordinator, unless somebody else came first.

        Args:
            claim: who wants to coordinate.
            seen: what the last `read` gave: if the board says anything else by now, nothing is changed.
            above: the new epoch is above this one, and above every earlier one of this board.

        Returns:
            Who coordinates now, us or another; `None` where it is not for this agent to do so.
        """

    @abstractmethod
    async def renew(self, record: LeaderRecord) -> LeaderRecord | None:
        """Renews our leadership, a few times in each lease.

        Args:
            record: ours, as the last operation gave it.

        Returns:
            Our record as the board has it now; `None` if another agent leads.  On a board that certainly does not exist
            any more (its port refuses) no agent can be elected, so we go on, and count this renewal ourselves.
        """

    @abstractmethod
    async def publish(self, record: LeaderRecord, verdict: str) -> bool:
        """Writes how the job ended into our reign, for those who will not hear it from us.

        Returns:
            Whether the reign was still ours.
        """

    @abstractmethod
    async def resign(self, record: LeaderRecord) -> None:
        """Ends our reign at once, so that nobody need wait for its lease."""

    @abstractmethod
    async def aclose(self) -> None:
        """Gives everything back.  Of a store that this agent serves, the store."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What people call it: back end and endpoint, as in `c10d at node0:29400`."""

    @property
    @abstractmethod
    def own_address(self) -> str:
        """Our end of the way to the store: an address under which others may reach us; empty where unknown."""

    @property
    @abstractmethod
    def endpoint_host(self) -> str:
        """The host that the store is at, as the user wrote it, if that is this machine; else empty."""
