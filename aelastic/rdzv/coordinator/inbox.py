"""What nodes have said and the coordinator has not heard: it waits while leadership is not certain.

What one node says is heard in the order it was said, with how long ago that was.  What it said **before it
reconnected** is outdated: its registration says where it stands now.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from aelastic.rdzv.coordinator.coordinator_events import Broken, Event, Lost, Registered
from aelastic.rdzv.protocol import messages as m

_AGEING = (Broken, Lost, Registered, m.Failed, m.Left)


@dataclass(slots=True)
class Inbox:
    """Events of nodes for the coordinator core."""

    # Node, event, and when it came in.
    _queue: deque[tuple[str, Event, float]] = field(default_factory=deque[tuple[str, Event, float]])
    # Of those in the queue, by node, the registration of its present connection.
    _registrations: dict[str, Registered] = field(default_factory=dict[str, Registered])

    def is_registering(self, node_id: str) -> bool:
        """Whether the coordinator has not heard of a node's present connection."""
        return node_id in self._registrations

    def add(self, node_id: str, event: Event, now: float) -> None:
        """Adds what a node said, or what became of it."""
        if isinstance(event, Registered):
            self._registrations[node_id] = event
        self._queue.append((node_id, event, now))

    def pop(self, now: float) -> Event | None:
        """What is to be heard next."""
        while self._queue:
            node_id, event, since = self._queue.popleft()
            if self._is_outdated(node_id, event):
                continue
            return event.replace(age_s=event.age_s + now - since) if isinstance(event, _AGEING) else event
        return None

    def _is_outdated(self, node_id: str, event: Event) -> bool:
        """Whether its node has been away since, and reconnected.

        The story behind it: the board is slow, and node A is silent, is lost, and comes back ready, all before the
        board has answered.  Then a round begins that A is told of, A is lost to it, and last comes A's message that it
        is ready, which it was before it was told.
        """
        if isinstance(event, m.Left):
            return False
        newest = self._registrations.get(node_id)
        if event is newest:
            del self._registrations[node_id]
        return newest is not None and event is not newest

    def validate(self) -> None:
        queued = {id(event) for _, event, _ in self._queue}
        assert all(id(each) in queued for each in self._registrations.values()), "a registration is heard"
