"""Phases, events and actions of the coordinator core.

Nodes report their status (`messages.Status`).  Decisions are `messages.LeaderMessage`.
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import TypeAlias

from aelastic.base.machine import DeadlinePassed as DeadlinePassed  # noqa: PLC0414  also an event of this core
from aelastic.base.record import Record
from aelastic.rdzv.decisions.cause import CauseKind
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r


class Phase(StrEnum):
    FORMING = auto()  # the last round is over, and nodes gather for the next
    RUNNING = auto()  # a round runs
    GATHERING = auto()  # nodes of a round that is older than this leader report
    CLOSED = auto()  # there is a verdict


class Reported(Record):
    """A node has sent its status.

    Args:
        node: the node, with the addresses that its connection shows.
        status: its state.
        is_new: this is the first status on this connection.
        failed_s: how long before this the node had failed, if it reported that on an earlier connection, unhandled so
            far.
        age_s: how long ago the status came.
        back_s: how long the node had been connected by then; only with the first status.
        silent_s: how long it had been silent before, on the connection that this one replaces.
    """

    node: m.Node
    status: m.Status
    is_new: bool = False
    failed_s: float | None = None
    age_s: float = 0.0
    back_s: float = 0.0
    silent_s: float = 0.0


class Broken(Record):
    """A node's connection broke.  `Reported` follows within the grace, or else `Lost`."""

    node_id: str
    age_s: float = 0.0
    silent_s: float = 0.0  # before that


class Lost(Record):
    """A node went away without a message: its connection closed for good, or its lease ran out."""

    node_id: str
    reason: str
    age_s: float = 0.0  # since its last message, or since its connection broke


class CutOff(Record):
    """Others may continue without the connected nodes, or have done so: the leader lost the endpoint, or was frozen."""

    kind: CauseKind = CauseKind.ENDPOINT_SILENT


Event: TypeAlias = Reported | r.Query | Broken | Lost | CutOff | DeadlinePassed


class Send(Record):
    """Deliver a message to one node.  Messages for a node arrive in order; `Lost` reports a node that is gone."""

    node_id: str
    message: m.LeaderMessage
