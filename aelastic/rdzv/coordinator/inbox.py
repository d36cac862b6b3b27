"""Connections, and what nodes have said on them that the coordinator has not heard: that waits for a certain leader.

What one node says is heard in the order it was said, with how long ago that was.  What it said **before it
reconnected** is outdated: its registration says where it stands now.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
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

    def locate(self, node: m.Node) -> m.Node:
        """A node with the addresses that its connection shows, and the rank it was admitted with."""
        return node.replace(
            master_addr=node.master_addr or self.peer,
            preferred_rank=self.preferred_rank,
            way_address=self.way,
            peer_address=self.peer,
        )


@dataclass(slots=True)
class Probed:
    """An agent that is asked whether it lives; those that came with its node rank wait for the answer."""

    until: float
    hellos: list[tuple[int, m.Hello]] = field(default_factory=list[tuple[int, m.Hello]])


@dataclass(slots=True)
class Inbox:
    """Events of nodes for the coordinator core."""

    # Node, event, and when it came in; by number, in this order.
    _queue: OrderedDict[int, tuple[str, Event, float]] = field(
        default_factory=OrderedDict[int, tuple[str, Event, float]]
    )
    _numbers_of: dict[str, list[int]] = field(default_factory=dict[str, list[int]])  # of a node's events in the queue
    _number: int = 0  # the last
    # Of those in the queue, by node, the registration of its present connection.
    _registrations: dict[str, Registered] = field(default_factory=dict[str, Registered])

    @property
    def is_empty(self) -> bool:
        return not self._queue

    @property
    def registrations(self) -> Mapping[str, Registered]:
        """Of nodes whose present connection the coordinator has not heard of, by node."""
        return self._registrations

    def is_registering(self, node_id: str) -> bool:
        """Whether the coordinator has not heard of a node's present connection."""
        return node_id in self._registrations

    def add(self, node_id: str, event: Event, now: float) -> None:
        """Adds what a node said, or what became of it.

        A registration takes what its node said before out of the queue, unless that still holds.  The story behind it:
        the board is slow, and node A is silent, is lost, and comes back ready, all before the board has answered.  Then
        a round begins that A is told of, A is lost to it, and last comes A's message that it is ready, which it was
        before it was told.  And while a board stays away, the queue would grow with each connection.
        """
        if isinstance(event, Registered):
            for number in self._numbers_of.get(node_id, ())[:]:
                if not _still_holds(self._queue[number][1], event.past):
                    self._drop(number)
            self._registrations[node_id] = event
        self._number += 1
        self._queue[self._number] = node_id, event, now
        self._numbers_of.setdefault(node_id, []).append(self._number)

    def pop(self, now: float) -> Event | None:
        """What is to be heard next."""
        if not self._queue:
            return None
        node_id, event, since = self._drop(next(iter(self._queue)))
        if isinstance(event, Registered):
            del self._registrations[node_id]
        return event.replace(age_s=event.age_s + now - since) if isinstance(event, _AGEING) else event

    def _drop(self, number: int) -> tuple[str, Event, float]:
        dropped = self._queue.pop(number)
        numbers = self._numbers_of[dropped[0]]
        numbers.remove(number)
        if not numbers:
            del self._numbers_of[dropped[0]]
        return dropped

    def validate(self) -> None:
        numbers_of: dict[str, list[int]] = {}
        for number, (node_id, _, _) in self._queue.items():
            numbers_of.setdefault(node_id, []).append(number)
        assert numbers_of == self._numbers_of, "each event is found by its node"
        registrations = [event for _, event, _ in self._queue.values() if isinstance(event, Registered)]
        assert len(registrations) == len(self._registrations), "a node has one registration in the queue at most"


def _still_holds(said: Event, past: m.Past) -> bool:
    """Whether a node's message counts although the node has connected again.

    A failure does, if it is the one that the node repeats: it came before the connection broke, and not after it.
    """
    if isinstance(said, m.Failed):
        return said.round == past.round and said.failure == past.failure
    return isinstance(said, m.Left)
