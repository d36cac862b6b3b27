"""A new leader gathers the nodes of the round that the log names.

Each of them reports its state.  Those that have ended are known to be gone; the leader waits for the others for a
grace.  A round that has lost no node continues untouched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from aelastic.rdzv.decisions.cause import Cause, CauseKind
from aelastic.rdzv.protocol.messages import NodePhase, Past


def credible(past: Past) -> Past:
    """Returns a node's report made consistent: a failed node has a failure, and a running or finished one has none."""
    has_workers = past.phase in {NodePhase.BUSY, NodePhase.FINISHED}
    if past.phase is NodePhase.FAILED and past.failure is None:
        past = past.replace(phase=NodePhase.STOPPING)
    return past.replace(failure=None) if past.failure is not None and (has_workers or not past.round) else past


@dataclass(slots=True)
class Gathering:
    """The nodes of one round, and which of them have reported.

    Args:
        nodes: by group rank.
        departed: group ranks that had finished and left, and so are not missed.
        leader_rank: the group rank of the node of the leader that began the round; -1 if it had none.
        leader_host: the host of that node.
    """

    round: int
    nodes: Sequence[str]
    departed: set[int]
    leader_rank: int
    leader_host: str = ""
    lost_at: float = 0.0  # when the first of its nodes lost the previous leader; missing nodes are lost since then
    here: set[str] = field(default_factory=set[str])
    gone: set[str] = field(default_factory=set[str])
    is_charged: bool = False  # the previous leader has announced that a failure ended the round
    ended: Cause | None = None  # what it has announced as the free cause of the round's end
    has_spares: bool = False  # nodes waited for a place in the round, and will also report
    is_over: bool = False  # a node knows that the round is over
    _awaited: set[str] = field(init=False)  # nodes that may still report

    def __post_init__(self) -> None:
        self._awaited = {node_id for rank, node_id in enumerate(self.nodes) if rank not in self.departed}

    def on_reported(self, node_id: str, past: Past, now: float) -> None:
        """A node of the round reports its state."""
        self.here.add(node_id)
        self.gone.discard(node_id)
        self._awaited.discard(node_id)
        self.lost_at = min(self.lost_at, now - past.alone_s)
        self.ended = self.ended or past.ended
        self.is_charged |= past.is_charged
        self.has_spares |= past.has_spares
        self.is_over |= past.phase in {NodePhase.READY, NodePhase.STOPPING}

    def on_gone(self, node_ids: Iterable[str]) -> None:
        """Nodes of the round have ended, or were lost."""
        for node_id in node_ids:
            self.here.discard(node_id)
            self.gone.add(node_id)
            self._awaited.discard(node_id)

    def on_departed(self, rank: int) -> None:
        """A node had finished and has left, so it is not missed."""
        self.departed.add(rank)
        self._awaited.discard(self.nodes[rank])

    @property
    def are_all_known(self) -> bool:
        """Whether each node has reported, or is known to be gone."""
        return not self._awaited

    @property
    def awaited(self) -> list[str]:
        """The nodes that may still report, by rank."""
        return [node_id for node_id in self.nodes if node_id in self._awaited]

    @property
    def missing(self) -> list[int]:
        """The group ranks that have not reported."""
        expected = ((rank, node_id) for rank, node_id in enumerate(self.nodes) if rank not in self.departed)
        return [rank for rank, node_id in expected if node_id not in self.here]

    @property
    def loss(self) -> Cause | None:
        """What happened to the missing nodes; `None` if none is missing."""
        missing = self.missing
        if not missing:
            return None
        is_leaders = missing == [self.leader_rank]
        return Cause(CauseKind.LEADER_LOST if is_leaders else CauseKind.NODES_MISSING, ranks=tuple(missing))

    @property
    def end(self) -> Cause | None:
        """What ended the round for free; `None` if it continues."""
        if self.ended is not None or not self.is_over:
            return self.ended
        return Cause(CauseKind.ENDED_EARLIER, round=self.round)

    def validate(self) -> None:
        assert not self.here & self.gone, "a node that reports is not gone"
        assert self.here | self.gone <= set(self.nodes), "only nodes of the round are gathered"
