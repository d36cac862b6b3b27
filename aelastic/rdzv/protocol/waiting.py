"""What a node waits for, for its log and its status line."""

from __future__ import annotations

from enum import StrEnum

from aelastic.core.record import Record


class WaitKind(StrEnum):
    """What a node waits for."""

    NODES = "nodes"  # of the round that forms
    OTHERS = "others"  # its own workers have finished
    NEWCOMER = "newcomer"  # it takes part soon
    SPARE = "spare"  # until a place is free
    GIVEN_UP = "given up"  # nothing: it goes on without nodes that do not stop their workers
    LEADER = "leader"
    ENDPOINT = "endpoint"  # the text names those that are missing


class Waiting(Record):
    """What is waited for, every few seconds, for the log."""

    text: str
    missing: str = ""  # what matters most where there is little room: who is missing
    kind: WaitKind = WaitKind.NODES

    @property
    def full(self) -> str:
        return f"{self.text}; {self.missing}" if self.missing else self.text
