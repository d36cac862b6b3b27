"""What a node waits for; shown in its log and its status line."""

from __future__ import annotations

from enum import StrEnum

from aelastic.base.record import Record


class WaitKind(StrEnum):
    """What a node waits for."""

    NODES = "nodes"  # of the round that forms
    OTHERS = "others"  # its own workers have finished
    NEWCOMER = "newcomer"  # it takes part soon
    SPARE = "spare"  # until a place is free
    GIVEN_UP = "given up"  # nothing: it continues without nodes that do not stop their workers
    LEADER = "leader"
    ENDPOINT = "endpoint"  # the text names those that are missing


class Waiting(Record):
    """What the node waits for, logged every few seconds."""

    text: str
    missing: str = ""  # who is missing, which matters most if there is little room
    kind: WaitKind = WaitKind.NODES

    @property
    def full(self) -> str:
        return f"{self.text}; {self.missing}" if self.missing else self.text
