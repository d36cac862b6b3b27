"""Nodes that a leader has lost but that may live: silence does not prove that an agent has ended.

While the job runs, a leader that has lost all other nodes at once may be the one that is cut off.  When the job is
over, its agent waits until those nodes are back and know how the job ended, because an endpoint that agents serve ends
with them: for a lease and a second after each was lost.  A process that has ended closes its connection in order, and
is not waited for.

A node that was lost long ago may still look for a leader, and read in the cell how the job ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

# Time after a lease in which a lost agent may come back: it must look at the cell again, and connect.
RETURN_S = 1.0
# Agents come and go all the time, so only the last few that were lost are remembered for longer.
LOOKING_MAX = 16


def awaited_s(lease_s: float) -> float:
    """Returns how long a node that falls silent now is awaited: a lease until it is lost, then until it may be back."""
    return 2 * lease_s + RETURN_S


@dataclass(slots=True)
class Absent:
    """Nodes that were lost without proof of their agents' end.

    Args:
        lease_s: the silence after which an agent is lost.
        looks_s: how long an agent looks for a leader before it gives up.
    """

    lease_s: float
    looks_s: float
    _lost_at: dict[str, float] = field(default_factory=dict[str, float])  # the one lost first comes first
    # Those lost within a lease that may not receive anything from this agent either.
    _unheard: dict[str, float] = field(default_factory=dict[str, float])
    _looking: dict[str, float] = field(default_factory=dict[str, float])  # those that may not have given up yet
    _unreachable: set[str] = field(
        default_factory=set[str]
    )  # those of them that may not receive anything from this agent

    def on_lost(self, node_id: str, now: float, *, is_unheard: bool) -> None:
        self.on_back(node_id)
        self._lost_at[node_id] = self._looking[node_id] = now
        if is_unheard:
            self._unheard[node_id] = now
            self._unreachable.add(node_id)
        if len(self._looking) > LOOKING_MAX:
            self._stop_looking(next(iter(self._looking)))
        self.on_time(now)

    def on_back(self, node_id: str) -> None:
        """The node is connected, or another agent has replaced it."""
        for lost_at in (self._lost_at, self._unheard, self._looking):
            lost_at.pop(node_id, None)
        self._unreachable.discard(node_id)

    def count_unheard(self, own_node_id: str) -> int:
        """Returns how many other nodes that were lost within a lease may not receive anything from this agent."""
        return len(self._unheard) - (own_node_id in self._unheard)

    def on_time(self, now: float) -> None:
        """Stops waiting for nodes that were lost long ago."""
        for node_id, _ in list(takewhile(lambda each: each[1] < now - self.lease_s, self._unheard.items())):
            del self._unheard[node_id]
        for node_id, _ in list(takewhile(lambda each: self._until(each[1]) <= now, self._lost_at.items())):
            del self._lost_at[node_id]
        looks_s = self.lease_s + self.looks_s  # it may be lost here before it loses the leader
        for node_id, _ in list(takewhile(lambda each: each[1] < now - looks_s, self._looking.items())):
            self._stop_looking(node_id)

    def _stop_looking(self, node_id: str) -> None:
        del self._looking[node_id]
        self._unreachable.discard(node_id)

    def has_silent_one(self, since: float) -> bool:
        """Returns whether a node that has been lost since then may live without receiving anything from this agent."""
        return any(self._looking[node_id] >= since for node_id in self._unreachable)

    @property
    def node_ids(self) -> list[str]:
        return list(self._lost_at)

    @property
    def may_look(self) -> bool:
        """Whether any of them, however long ago it was lost, may still look for a leader."""
        return bool(self._looking)

    @property
    def until(self) -> float:
        """The time until which one of them may come back."""
        last = next(reversed(self._lost_at.values()), None)
        return 0.0 if last is None else self._until(last)

    def validate(self) -> None:
        for lost_at in (self._lost_at, self._unheard, self._looking):
            times = list(lost_at.values())
            assert times == sorted(times), "nodes are in the order in which they were lost"
        assert self._unreachable <= self._looking.keys(), "a node that has given up needs no leader"
        assert self._unheard.items() <= self._lost_at.items(), "a node that may not receive from this agent is lost"

    def _until(self, lost_at: float) -> float:
        return lost_at + self.lease_s + RETURN_S
