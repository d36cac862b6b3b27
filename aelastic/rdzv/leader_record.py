"""The leader record: which agent leads a job, in which term.

It is what the text in a store says (`record_text.py`), and what the nodes of a round elect without one.
"""

from __future__ import annotations

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
        epoch: number of the leader's term.  Increases with every election of this run id, as long as the store exists.
        candidate: the leader.
        renewals: increases while the leader is alive; `None`: no store counts them, since nodes elected it without one.
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
        """Returns the record with one more renewal, if a store counts them."""
        return self if self.renewals is None else self.replace(renewals=self.renewals + 1)

    def is_same_term(self, other: LeaderRecord | None) -> bool:
        """Whether both records belong to the same term of the same leader, whatever their renewals and verdict."""
        return other is not None and (self.epoch, self.candidate) == (other.epoch, other.candidate)

    def seat_before(self, before: LeaderRecord | None) -> tuple[int, int]:
        """Returns the previous leader's fence and group rank; 0 and -1 if there was none, or the same node led."""
        if before is None or before.candidate.node_id == self.candidate.node_id:
            return 0, -1
        return before.candidate.fence, before.candidate.group_rank
