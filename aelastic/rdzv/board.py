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
    """An agent that wants to lead the job, as stored on the board."""

    node_id: str  # of the agent
    addresses: tuple[str, ...]  # hosts where it listens, in the order in which others try them
    port: int  # where it listens
    token: str  # members present it to prove that they have read the board
    fence: int = 0  # of the last round that its node took part in; 0: none yet
    group_rank: int = -1  # in that round
    made_ms: int = 0  # when it was created, in ms since the epoch: an empty board starts counting here

    def epoch_after(self, above: int, known: int) -> int:
        """Returns the epoch of this candidate's term: higher than all epochs that the agent and the board know.

        If neither knows the job (`above` and `known` are 0), an earlier start of the job may have used a store that is
        gone.  `AELASTIC_ROUND` must still increase, so the epoch starts at the wall clock, in ms.

        Args:
            above: the highest epoch that the agent knows.
            known: the highest epoch that the board knows.
        """
        return max(above, known or self.made_ms) + 1


class LeaderRecord(Record):
    """The current leadership of a run id.

    Args:
        epoch: number of the leader's term.  Increases with every election of this run id, as long as the board exists.
        candidate: the leader.
        renewals: increases while the leader is alive; `None`: the board itself forgets a dead leader.
        verdict: how the job ended, as `codec.to_text` writes it; empty while it runs.
        is_by_nodes: the nodes of a round elected this leader without the endpoint.
        seats: the last round whose nodes may still be alive, if nodes elect leaders.  The next leader accounts for them
            before it begins a round.
    """

    epoch: int
    candidate: Candidate
    renewals: int | None = None
    verdict: str = ""
    is_by_nodes: bool = False
    seats: Seats | None = None

    @property
    def is_elected(self) -> bool:
        """Whether nodes of a round elected this leader and no endpoint knows of it yet."""
        return self.is_by_nodes and self.renewals is None

    @property
    def is_first(self) -> bool:
        """Whether neither board nor agent knew the job when this term began."""
        return not self.candidate.fence and self.epoch == self.candidate.made_ms + 1

    def renewed(self) -> LeaderRecord:
        """Returns the record with one more renewal, if renewals are counted."""
        return self if self.renewals is None else self.replace(renewals=self.renewals + 1)

    def is_same_term(self, other: LeaderRecord | None) -> bool:
        """Whether both records belong to the same term of the same leader, whatever their renewals and verdict."""
        return other is not None and (self.epoch, self.candidate) == (other.epoch, other.candidate)

    def seat_before(self, before: LeaderRecord | None) -> tuple[int, int]:
        """Returns the previous leader's fence and group rank; 0 and -1 if there was none, or the same node led."""
        if before is None or before.candidate.node_id == self.candidate.node_id:
            return 0, -1
        return before.candidate.fence, before.candidate.group_rank


class Board(ABC):
    """One run id on one board, as one agent uses it.  At most one operation runs at a time."""

    async def run(self) -> None:  # noqa: B027  most boards need nothing
        """Does background work of the board; operations wait for it.  Runs until cancelled, or returns at once."""

    @abstractmethod
    async def open(self) -> None:
        """Connects to the store, or serves it if that is this agent's task.

        Called again after a failed `read` or `campaign`; the other operations reconnect by themselves.

        Raises:
            RendezvousConnectionError: the store does not answer, but may start later.
            RendezvousStateError: something else than such a store answers.
            InputError: the store belongs to another job, or refused the credentials.
        """

    @abstractmethod
    async def read(self) -> LeaderRecord | None:
        """Returns the leader record, or `None` if no agent leads."""

    @abstractmethod
    async def campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        """Makes `candidate` the leader, unless another agent came first.

        Args:
            candidate: this agent.
            seen: the result of the last `read`.  If the board has changed since, nothing is written.
            above: the new epoch must be higher than this one, and than every earlier one of this board.

        Returns:
            The current leader record, of this agent or another; `None` if this agent may not lead.
        """

    @abstractmethod
    async def renew(self, record: LeaderRecord) -> LeaderRecord | None:
        """Renews this agent's leadership.  Called a few times per lease.

        Args:
            record: this agent's record, from the last operation, with the round that the board should know from now on.

        Returns:
            This agent's record as it is on the board now; `None` if another agent leads.  If the nodes of a round
            elected this agent, and another agent leads that did not know the job (`is_first`), that agent's record.  If
            the board certainly no longer exists because its process has ended, no agent can be elected: then the
            record, with the renewal counted here.
        """

    @abstractmethod
    async def publish(self, record: LeaderRecord, verdict: str) -> bool:
        """Writes the verdict into this agent's record, for nodes that will not get it from this leader.

        Returns:
            Whether this agent was still the leader.
        """

    @abstractmethod
    async def resign(self, record: LeaderRecord) -> None:
        """Gives up the leadership, so that no node waits for the lease to end; the board keeps the round."""

    @abstractmethod
    async def aclose(self) -> None:
        """Releases everything, including the store if this agent serves it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Back end and endpoint, for messages: `c10d at node0:29400`."""

    @property
    @abstractmethod
    def own_address(self) -> str:
        """This agent's address on its connection to the store, which other nodes may use; empty if unknown."""

    @property
    @abstractmethod
    def endpoint_host(self) -> str:
        """The host of the store, as the user wrote it, if it is this machine; otherwise empty."""
