"""Phases, events and actions of the coordinator core: what nodes do, and what they hear.

What nodes say is their status (`messages.Status`).  Decisions are `messages.CoordinatorMessage`.
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import TypeAlias

from aelastic.core.machine import DeadlinePassed as DeadlinePassed  # noqa: PLC0414  an event of this core, too
from aelastic.core.record import Record
from aelastic.decisions.cause import CauseKind
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r


class Phase(StrEnum):
    FORMING = auto()  # the last round is over, nodes gather for the next
    RUNNING = auto()  # a round runs
    GATHERING = auto()  # nodes of a round that is older than this leader report
    CLOSED = auto()  # there is a verdict


class Reported(Record):
    """A node has sent its status.

    Args:
        node: as its connection shows it.
        status: where it stands.
        is_new: it is the first on this connection.
        failed_s: so long before this the node had failed, as it had told on an earlier connection, which was not heard.
        age_s: since it came.
        back_s: before that, for so long the node had been connected; with the first status only.
        silent_s: before it was connected, on the connection that this one replaces.
    """

    node: m.Node
    status: m.Status
    is_new: bool = False
    failed_s: float | None = None
    age_s: float = 0.0
    back_s: float = 0.0
    silent_s: float = 0.0


class Broken(Record):
    """A node's connection broke: within the grace follows `Reported`, or else `Lost`."""

    node_id: str
    age_s: float = 0.0
    silent_s: float = 0.0  # before that


class Lost(Record):
    """A node went away without a message: its connection closed for good, or its lease ran out."""

    node_id: str
    reason: str
    age_s: float = 0.0  # since it was heard last, or before it is `Broken`


class CutOff(Record):
    """Others may go on without the nodes that are connected: the endpoint is silent, or this agent hears no other."""

    kind: CauseKind = CauseKind.ENDPOINT_SILENT


Event: TypeAlias = Reported | r.Enquiry | Broken | Lost | CutOff | DeadlinePassed


class Send(Record):
    """Deliver a message to one node.  In order per node; a node that is gone is reported by `Lost`."""

    node_id: str
    message: m.CoordinatorMessage
