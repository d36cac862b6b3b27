"""What nodes have said and the coordinator has not heard: it waits while leadership is not certain.

What one node says is heard in the order it was said.

- A **failure** waits while a connection is in its grace: workers whose peers are on a node that dies fail within
  milliseconds, and the loss of a node costs no restart.  Whatever its node says after it waits with it.
- What a node said **before it reconnected** is outdated: its registration says where it stands now.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from aelastic.rdzv.coordinator.coordinator_events import Event, Registered
from aelastic.rdzv.protocol import messages as m


@dataclass(slots=True)
class Inbox:
    """Events of nodes for the coordinator core."""

    _queue: deque[tuple[str, Event]] = field(default_factory=deque[tuple[str, Event]])
    # By node, until it is known which nodes are lost, or until a time; the oldest first.
    _suspended: dict[str, tuple[float, list[Event]]] = field(default_factory=dict[str, tuple[float, list[Event]]])
    # Of those in the queue, by node, the registration of its present connection.
    _registrations: dict[str, Registered] = field(default_factory=dict[str, Registered])

    @property
    def deadline(self) -> float | None:
        """When what is suspended is to be heard."""
        return next((until for until, _ in self._suspended.values()), None)

    def is_registering(self, node_id: str) -> bool:
        """Whether the coordinator has not heard of a node's present connection."""
        return node_id in self._registrations

    def add(self, node_id: str, event: Event, *, suspend_until: float | None = None) -> None:
        """Adds what a node said, or that it was lost.

        Args:
            node_id: the node.
            event: what it said.
            suspend_until: a failure waits until then; `None`: all connections are well.
        """
        if isinstance(event, Registered):
            self._registrations[node_id] = event
            self._queue.extend((node_id, each) for each in self._suspended.pop(node_id, (0.0, []))[1])
        elif node_id in self._suspended:
            self._suspended[node_id][1].append(event)
            return
        elif isinstance(event, m.Failed) and suspend_until is not None:
            self._suspended[node_id] = suspend_until, [event]
            return
        self._queue.append((node_id, event))

    def release(self, now: float, *, is_loss_awaited: bool) -> None:
        """Lets what was suspended be heard: all of it if no loss is awaited, else what has waited long enough."""
        while self._suspended:
            node_id, (until, events) = next(iter(self._suspended.items()))
            if is_loss_awaited and until > now:
                return
            del self._suspended[node_id]
            self._queue.extend((node_id, event) for event in events)

    def pop(self) -> Event | None:
        """What is to be heard next."""
        while self._queue:
            node_id, event = self._queue.popleft()
            if not self._is_outdated(node_id, event):
                return event
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
        times = [until for until, _ in self._suspended.values()]
        assert times == sorted(times), "what was suspended first is heard first"
        queued = {id(event) for _, event in self._queue}
        assert all(id(each) in queued for each in self._registrations.values()), "a registration is heard"
