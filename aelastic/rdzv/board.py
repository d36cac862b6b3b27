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


class Claim(Record):
    """What an agent writes on the board to become the coordinator."""

    node_id: str
    addresses: tuple[str, ...]  # where it listens: hosts, to be tried in this order
    port: int
    token: str  # who shows it has read the board


class Reign(Record):
    """What the board says: the coordinator of a run id."""

    # Rises with every reign of this run id, as long as the board lives.
    epoch: int
    claim: Claim
    # The `keep`s so far.  While it rises the coordinator lives.  `None`: the board itself forgets a dead coordinator.
    beat: int | None = None
    # How the job ended, as the wire has it; empty while it runs.
    verdict: str = ""


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
    async def read(self) -> Reign | None:
        """Who coordinates; `None` where nobody does."""

    @abstractmethod
    async def claim(self, claim: Claim, seen: Reign | None, above: int) -> Reign | None:
        """Makes `claim` the coordinator, unless somebody else came first.

        Args:
            claim: who wants to coordinate.
            seen: what the last `read` gave: if the board says anything else by now, nothing is changed.
            above: the new epoch is above this one, and above every earlier one of this board.

        Returns:
            Who coordinates now, us or another; `None` where it is not for this agent to do so.
        """

    @abstractmethod
    async def keep(self, reign: Reign) -> bool:
        """Renews our reign, a few times in each lease.

        Returns:
            Whether it is still ours.  A board that certainly does not exist any more (its port refuses) can
            be claimed by nobody, so it is.
        """

    @abstractmethod
    async def close(self, reign: Reign, verdict: str) -> bool:
        """Writes how the job ended into our reign, for those who will not hear it from us.

        Returns:
            Whether the reign was still ours.
        """

    @abstractmethod
    async def resign(self, reign: Reign) -> None:
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
