"""The phases of a member, its events, and its actions.

The docstring of an action names the event that answers it.  A connection has a number; events of an earlier one change
nothing.
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import TypeAlias

from aelastic.base.machine import DeadlinePassed as DeadlinePassed  # noqa: PLC0414  also an event of this core
from aelastic.base.record import Record
from aelastic.rdzv.log.node import Close, Node
from aelastic.rdzv.log.seen import Seen
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.messages import Downward, LeaderMessage, NodeMessage, Upward
from aelastic.rdzv.stores.cell_events import CellAnswered as CellAnswered  # noqa: PLC0414
from aelastic.rdzv.stores.cell_events import CellFailed as CellFailed  # noqa: PLC0414  also an event of this core

# How many leaders that ended or said goodbye are remembered: the last ones.
GONE_MAX = 16


class Phase(StrEnum):
    SEARCHING = auto()  # for a leader; nothing is done before the supervisor is ready
    CAMPAIGNING = auto()  # this agent is a candidate
    CONNECTING = auto()  # to an agent that leads, or wants to, until its plan shows that it does
    FOLLOWING = auto()  # a leader
    OVER = auto()  # this node has left, or the job has ended


# Events.


class Submitted(Record):
    """The supervisor has a message for the leader."""

    message: NodeMessage


class Campaigned(Record):
    """Another agent wants this node's vote, or asks who leads.  Answered by `Answer`."""

    conn: int
    campaign: m.Campaign


class Declined(Record):
    """Answers `AskWhoLeads`: a voter reports what it knows."""

    term: int
    leader: m.LeaderAt | None


class Leading(Record):
    """Answers `Campaign`: this agent leads."""

    at: m.LeaderAt
    term: int


class LeadershipLost(Record):
    """Answers `Campaign`, or comes later: this agent's leader core has ended, and returns the log."""

    node: Node
    token: str  # of the leadership that is over
    reason: str
    stand_back_s: float = 0.0  # how long this agent does not campaign
    alive: str = ""  # token of a leader that has answered
    lacks_quorum: bool = False  # it failed to get the votes of a quorum, or lost them
    stored: m.StoredCell | None = None  # the cell, if it names another leader


class Connected(Record):
    """Answers `Connect`."""

    conn: int


class ConnectFailed(Record):
    """Answers `Connect`."""

    conn: int
    is_refused: bool  # the host, or something in front of it, answered that no process listens at that port
    reason: str
    is_here: bool = False  # that host is this machine


class Received(Record):
    """A message from the leader came in."""

    conn: int
    message: Downward


class ConnectionLost(Record):
    """The connection ended, after everything on it was received."""

    conn: int
    reason: str
    close: Close = Close.ABORTED
    is_garbage: bool = False  # it was closed here: the data is not a message, or makes no sense


OfCell: TypeAlias = CellAnswered | CellFailed
OfVote: TypeAlias = Campaigned | Declined | Leading | LeadershipLost
OfConnection: TypeAlias = Connected | ConnectFailed | Received | ConnectionLost
Event: TypeAlias = Submitted | OfCell | OfVote | OfConnection | DeadlinePassed


# Actions.


class ReadCell(Record):
    """Read the endpoint's cell.  Answered by `CellAnswered` or `CellFailed`."""


class AskWhoLeads(Record):
    """Ask the voters that this node knows whom they follow.  Any of them may answer with `Declined`."""


class Campaign(Record):
    """Seek to lead.  Answered by `Leading`, or by `LeadershipLost`.

    Args:
        node: what this node keeps of the log; the leader core holds it until `LeadershipLost`.
        highest: the highest known term.
        has_listened: no leader sent anything for a lease, or there was no log.
        gone: tokens of leaders that have ended, or have said goodbye.
        seen: the cell, as last seen.
        silent: the token of the leader that was lost after a lease of silence.
        job_before: the log of a job that is over, which the cell may still hold, or "".
    """

    node: Node
    highest: int
    has_listened: bool
    gone: tuple[str, ...]
    seen: Seen
    job_before: str = ""
    silent: str = ""


class Answer(Record):
    """Answer another agent's campaign; `None`: this node connects to it.  Not answered."""

    conn: int
    declined: m.Declined | None


class Connect(Record):
    """Close the connection, if any, and connect to an agent.  Answered by `Connected` or `ConnectFailed`."""

    conn: int
    leader: m.LeaderAt


class Disconnect(Record):
    """Hang up, or stop connecting.  Not answered."""


class Send(Record):
    """Send a message on the connection.  Not answered."""

    message: Upward


class Deliver(Record):
    """Hand a message to the supervisor.  Not answered."""

    message: LeaderMessage


class GiveUp(Record):
    """End the rendezvous with an error.  Not answered."""

    reason: str
    is_refused: bool  # the job refuses this node; otherwise no leader could be reached
    lacks_quorum: bool = False  # this agent could not lead: it reached too few nodes that have a vote


OfSearch: TypeAlias = ReadCell | AskWhoLeads | Campaign | Answer
Action: TypeAlias = OfSearch | Connect | Disconnect | Send | Deliver | GiveUp
