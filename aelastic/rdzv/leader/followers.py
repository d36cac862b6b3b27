"""Nodes that vote, or may get a vote: their connections, the last plan sent to each, and when each last sent something.

A vote counts once the plan is in the kernel's hands: `was_last` tells whether that is the newest plan.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

RECEIVED_MIN = 16


@dataclass(slots=True)
class Followers:
    """The followers of one leader."""

    _name_of: dict[int, str] = field(default_factory=dict[int, str])  # by connection
    _serial: int = 0  # of the last plan
    _sent: dict[str, int] = field(default_factory=dict[str, int])  # to each node: the serial of its last plan
    _received_at: dict[str, float] = field(default_factory=dict[str, float])  # when the last message of each node came
    _received_limit: int = RECEIVED_MIN

    @property
    def conns(self) -> list[int]:
        return list(self._name_of)

    @property
    def names(self) -> Collection[str]:
        return self._name_of.values()

    def name_of(self, conn: int) -> str | None:
        return self._name_of.get(conn)

    def add(self, conn: int, name: str) -> None:
        """A node follows on this connection, and on no earlier one."""
        self._name_of = {each: its for each, its in self._name_of.items() if its != name}
        self._name_of[conn] = name

    def remove(self, conn: int) -> str | None:
        """Forgets a connection that has ended; returns the node's name if it was a follower's."""
        return self._name_of.pop(conn, None)

    def keep(self, names: Collection[str]) -> None:
        """Forgets all followers but these."""
        self._name_of = {conn: name for conn, name in self._name_of.items() if name in names}

    # Plans.

    def on_sent(self, conn: int) -> int:
        """Returns the serial number of a plan sent on a connection; 0 if it is not a follower's."""
        self._serial += 1
        name = self._name_of.get(conn)
        if name is None:
            return 0
        self._sent[name] = self._serial
        return self._serial

    def was_last(self, conn: int, serial: int) -> bool:
        """Returns whether this is the last plan that the follower was sent."""
        name = self._name_of.get(conn)
        return name is not None and self._sent.get(name) == serial

    # Contact.

    def on_received(self, name: str, now: float, lease_s: float) -> None:
        if len(self._received_at) >= self._received_limit:  # most may be of agents that are gone
            self._received_at = {each: at for each, at in self._received_at.items() if now - at < lease_s}
            self._received_limit = 2 * len(self._received_at) + RECEIVED_MIN
        self._received_at[name] = now

    def recent(self, names: Iterable[str], now: float, lease_s: float) -> frozenset[str]:
        """Returns those of these nodes that sent something within a lease."""
        return frozenset(name for name in names if now - self._received_at.get(name, -math.inf) < lease_s)
