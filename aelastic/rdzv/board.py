"""The board: where the agents of a job find their coordinator, and elect one.

A board is a strongly consistent store outside the agents that holds one value for a run id: the leader record, which
names its coordinator.  It holds nothing else, and decides nothing.  Each back end implements the five operations here
on a real store (`boards/`); `member.py` says when to use which.

An operation takes one round trip or a few and never waits for something to happen.  It may be cancelled at
any moment, in which case it has taken effect or not; it raises `RendezvousConnectionError` where the store cannot be
reached now (the caller tries again) and `RendezvousStateError` or `InputError` where trying again is of no use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from aelastic.core.record import Record
from aelastic.rdzv.protocol.messages import Seats


class Candidate(Record):
    """An agent that wants to coordinate, as it writes itself on the board."""

    node_id: str
    addresses: tuple[str, ...]  # where it listens: hosts, to be tried in this order
    port: int
    token: str  # a member shows it to prove that it has read the board
    fence: int = 0  # of the last round that its node took part in; 0: none yet
    group_rank: int = -1  # in that round
    made_ms: int = 0  # when it was made, by this host's wall clock: what a board that is empty counts from

    def epoch_after(self, above: int, known: int) -> int:
        """The epoch of this candidate's term: above all that its agent and the board know of; 0: of none.

        Where nothing is known of the job, it may have had another life, of which the store has forgotten all, or gone
        with it.  `AELASTIC_ROUND` is to rise over all of them, so the count begins at the wall clock.
        """
        return max(above, known or self.made_ms) + 1


class LeaderRecord(Record):
    """The current leadership of a run id: coordinator, epoch, renewals, verdict."""

    # One term of a coordinator.  Rises with every election of this run id, as long as the board lives.
    epoch: int
    candidate: Candidate
    # While it rises the coordinator lives.  `None`: the board itself forgets a dead coordinator.
    renewals: int | None = None
    # How the job ended, as `codec.to_text` writes it; empty while the job runs.
    verdict: str = ""
    # Elected by the nodes of a round, without the endpoint; with `renewals`, that knows of it since.
    is_by_nodes: bool = False
    # The last round whose nodes may live, where these elect: whoever leads next accounts for them before it begins one.
    seats: Seats | None = None

    @property
    def is_elected(self) -> bool:
        """Whether nodes of a round have elected this leader, and no endpoint knows of it yet."""
        return self.is_by_nodes and self.renewals is None

    @property
    def is_first(self) -> bool:
        """Whether board and agent knew nothing of the job when this term began."""
        return not self.candidate.fence and self.epoch == self.candidate.made_ms + 1

    def renewed(self) -> LeaderRecord:
        """With one renewal more, where they are counted."""
        return self if self.renewals is None else self.replace(renewals=self.renewals + 1)

    def is_same_term(self, other: LeaderRecord | None) -> bool:
        """True if both are of one term of one coordinator, whatever the renewals and the verdict."""
        return other is not None and (self.epoch, self.candidate) == (other.epoch, other.candidate)

    def seat_before(self, before: LeaderRecord | None) -> tuple[int, int]:
        """The seat of the node that led before, when elected: fence and group rank; none if it is the same node."""
        if before is None or before.candidate.node_id == self.candidate.node_id:
            return 0, -1
        return before.candidate.fence, before.candidate.group_rank


class Board(ABC):
    """One run id on one board, as one agent uses it.  One operation at a time."""

    async def run(self) -> None:  # noqa: B027  most boards need nothing
        """Does what the board needs beside its operations, which wait for it; until it is cancelled, or at once."""

    @abstractmethod
    async def open(self) -> None:
        """Reaches the store, or serves it where that is this agent's part.

        Called again after a `read` or a `campaign` that failed; the other operations reach a lost store by themselves.

        Raises:
            RendezvousConnectionError: there is no answer; the store may come up yet.
            RendezvousStateError: what answers is no such store.
            InputError: it is one, but of another job; or it refused the credentials.
        """

    @abstractmethod
    async def read(self) -> LeaderRecord | None:
        """The leader record; `None` if no agent leads."""

    @abstractmethod
    async def campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        """Makes `candidate` the coordinator, unless another agent came first.

        Args:
            candidate: this agent.
            seen: what the last `read` gave: if the board says anything else by now, nothing is changed.
            above: the new epoch is above this one, and above every earlier one of this board.

        Returns:
            The leader record now, this agent's or another's; `None` where this agent may not lead.
        """

    @abstractmethod
    async def renew(self, record: LeaderRecord) -> LeaderRecord | None:
        """Renews our leadership, a few times in each lease.

        Args:
            record: ours, as the last operation gave it, with the round that the board is to know from now on.

        Returns:
            Our record as the board has it now; `None` if another agent leads.  If the nodes of a round have elected us,
            and another agent leads that knew nothing of the job (`is_first`): its record.  On a board that certainly
            does not exist any more (its process has ended) no agent can be elected, so we go on, and count this
            renewal ourselves.
        """

    @abstractmethod
    async def publish(self, record: LeaderRecord, verdict: str) -> bool:
        """Writes how the job ended into our record, for nodes that will not hear it from this coordinator.

        Returns:
            Whether this agent was still the leader.
        """

    @abstractmethod
    async def resign(self, record: LeaderRecord) -> None:
        """Gives up the leadership, so that no node need wait for its lease to end; the record's round stays known."""

    @abstractmethod
    async def aclose(self) -> None:
        """Releases everything, also the store if this agent serves it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Back end and endpoint, as messages name them: `c10d at node0:29400`."""

    @property
    @abstractmethod
    def own_address(self) -> str:
        """This agent's address on its connection to the store; other nodes may reach it there; empty if unknown."""

    @property
    @abstractmethod
    def endpoint_host(self) -> str:
        """The host that the store is at, as the user wrote it, if that is this machine; else empty."""
