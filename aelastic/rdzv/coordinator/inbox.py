"""Connections, and what nodes have said on them that the coordinator has not heard: that waits for a certain leader.

What one node says is heard in the order it was said, with how long ago that was.  What it said **before it
reconnected** is outdated: its registration says where it stands now.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum, auto

from aelastic.rdzv.coordinator.coordinator_events import Broken, Event, Lost, Registered
from aelastic.rdzv.protocol import messages as m

_AGEING = (Broken, Lost, Registered, m.Failed, m.Left)


class Stage(StrEnum):
    OPEN = auto()  # it has not said Hello
    RIVAL = auto()  # the agent that has its node rank is asked whether it lives
    GREETED = auto()  # it waits until our epoch is above every one that it knows
    WELCOMED = auto()  # it speaks for its node
    LEFT = auto()  # its node has left: that the connection closes is no loss
    HUNG_UP = auto()  # it has another coordinator, or seeks one: nothing is said on it, or heard


@dataclass(slots=True)
class Connection:
    peer: str
    way: str  # our address, as the peer reached it
    heard_at: float  # or we woke up
    said_at: float  # its last message
    stage: Stage = Stage.OPEN
    node_id: str = ""
    preferred_rank: int | None = None

    @property
    def is_session(self) -> bool:
        return self.stage is Stage.WELCOMED or self.stage is Stage.LEFT


@dataclass(slots=True)
class Probed:
    """An agent that is asked whether it lives; those that came with its node rank wait for the answer."""

    until: float
    hellos: list[tuple[int, m.Hello]] = field(default_factory=list[tuple[int, m.Hello]])


@dataclass(slots=True)
class Inbox:
    """Events of nodes for the coordinator core."""

    # Node, event, and when it came in.
    _queue: deque[tuple[str, Event, float]] = field(default_factory=deque[tuple[str, Event, float]])
    # Of those in the queue, by node, the registration of its present connection.
    _registrations: dict[str, Registered] = field(default_factory=dict[str, Registered])
    _counts: Counter[str] = field(default_factory=Counter[str])  # of events in the queue, by node

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def is_registering(self, node_id: str) -> bool:
        """Whether the coordinator has not heard of a node's present connection."""
        return node_id in self._registrations

    def add(self, node_id: str, event: Event, now: float) -> None:
        """Adds what a node said, or what became of it.

        A registration takes what its node said before out of the queue, but for a `Left`.  The story behind it: the
        board is slow, and node A is silent, is lost, and comes back ready, all before the board has answered.  Then a
        round begins that A is told of, A is lost to it, and last comes A's message that it is ready, which it was
        before it was told.  And while a board stays away, the queue would grow with each connection.
        """
        if isinstance(event, Registered):
            self._drop_outdated(node_id)
            self._registrations[node_id] = event
        self._counts[node_id] += 1
        self._queue.append((node_id, event, now))

    def _drop_outdated(self, node_id: str) -> None:
        if not self._counts[node_id]:  # the usual case: thousands of nodes register at once after a take-over
            return
        kept = [each for each in self._queue if each[0] != node_id or isinstance(each[1], m.Left)]
        self._counts[node_id] -= len(self._queue) - len(kept)
        self._queue = deque(kept)

    def pop(self, now: float) -> Event | None:
        """What is to be heard next."""
        if not self._queue:
            return None
        node_id, event, since = self._queue.popleft()
        self._counts[node_id] -= 1
        if isinstance(event, Registered):
            del self._registrations[node_id]
        return event.replace(age_s=event.age_s + now - since) if isinstance(event, _AGEING) else event

    def validate(self) -> None:
        assert +self._counts == Counter(node_id for node_id, _, _ in self._queue), "the counts are the queue's"
        registrations = [event for _, event, _ in self._queue if isinstance(event, Registered)]
        assert len(registrations) == len(self._registrations), "a node has one registration in the queue at most"
