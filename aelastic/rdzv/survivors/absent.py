"""Nodes that a coordinator has lost and that may live: it is no proof of an agent's end that nothing is heard of it.

While the job runs, a coordinator that has lost all others at once may be the one that is cut off.  When the job is
over, its agent stays until they are back and have heard so, for about a lease: a board that is served by agents goes
with them.  A process that has ended closes its connection in order, and is not waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# After a lease in which a lost agent may come back: for its next look at the board, and to connect.
RETURN_S = 1.0


def awaited_s(lease_s: float) -> float:
    """For how long a node is awaited that falls silent now: a lease until it is lost, and then until it may be back."""
    return 2 * lease_s + RETURN_S


@dataclass(slots=True)
class Absent:
    """Nodes that were lost without proof of their agents' end.

    Args:
        lease_s: the silence after which an agent is lost.
    """

    lease_s: float
    _lost_at: dict[str, float] = field(default_factory=dict[str, float])
    _unheard: set[str] = field(default_factory=set[str])  # those that may not hear this agent either

    def on_lost(self, node_id: str, now: float, *, is_unheard: bool) -> None:
        self._forget_those_before(now)
        self._lost_at[node_id] = now
        if is_unheard:
            self._unheard.add(node_id)
        else:
            self._unheard.discard(node_id)

    def on_back(self, node_id: str) -> None:
        """It is connected, or another agent has its place."""
        self._lost_at.pop(node_id, None)
        self._unheard.discard(node_id)

    def count_unheard(self, own_node_id: str, now: float) -> int:
        """How many other nodes may not hear this agent, of those that were lost within a lease."""
        since = now - self.lease_s
        return sum(i != own_node_id and self._lost_at[i] >= since for i in self._unheard)

    def on_over(self, now: float) -> None:
        """The job is over: those that were lost long ago are not waited for."""
        self._forget_those_before(now)

    def _forget_those_before(self, now: float) -> None:
        for node_id in [i for i in self._lost_at if self._until(i) <= now]:
            self.on_back(node_id)

    @property
    def node_ids(self) -> list[str]:
        return list(self._lost_at)

    @property
    def until(self) -> float:
        """Until when one of them may come back."""
        return max(map(self._until, self._lost_at), default=0.0)

    def validate(self) -> None:
        assert self._unheard <= self._lost_at.keys(), "a node that may not hear this agent is lost"

    def _until(self, node_id: str) -> float:
        return self._lost_at[node_id] + self.lease_s + RETURN_S
