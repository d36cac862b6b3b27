"""The phases of a member, its events, and its actions.

Every action says which event answers it.  A connection has a number; events of an earlier connection change nothing.
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import TypeAlias

from aelastic.core.machine import DeadlinePassed as DeadlinePassed  # noqa: PLC0414  an event of this core, too
from aelastic.core.record import Record
from aelastic.rdzv.log.node import Close, Node
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.messages import CoordinatorMessage, Downward, NodeMessage, Upward
from aelastic.rdzv.seen import Seen

# Leaders that have ended or said goodbye: the last ones are remembered.
GONE_MAX = 16


class Phase(StrEnum):
    SEARCHING = auto()  # for a leader; nothing is done before the supervisor is ready
    CAMPAIGNING = auto()  # this agent is a candidate
    CONNECTING = auto()  # to an agent that leads, or wants to, until its plan says that it does
    FOLLOWING = auto()  # a leader
    OVER = auto()  # this node has left, or the job has ended


# Events.


class Submitted(Record):
    """The supervisor has a message for the coordinator."""

    message: NodeMessage


class CellSaid(Record):
    """Answers `ReadCell`: what is in the cell now; `None`: nothing."""

    stored: m.StoredCell | None


class CellFailed(Record):
    """Answers `ReadCell`: the endpoint does not answer."""

    reason: str


class Campaigned(Record):
    """Another agent wants this node's vote, or asks who leads.  Answered by `Answer`."""

    conn: int
    campaign: m.Campaign


class Declined(Record):
    """Answers `AskWhoLeads`: a voter says what it knows."""

    term: int
    leader: m.LeaderAt | None


class Leading(Record):
    """Answers `Campaign`: this agent leads."""

    at: m.LeaderAt
    term: int


class LeadershipLost(Record):
    """Answers `Campaign`, or comes later: this agent's leader core has ended, and gives the log back."""

    node: Node
    token: str  # of the leadership that is over
    reason: str
    stand_back_s: float = 0.0  # for so long this agent does not campaign
    alive: str = ""  # token of a leader that has answered
    lacks_quorum: bool = False  # it has not won, or has lost, the votes of a quorum


class Connected(Record):
    """Answers `Connect`."""

    conn: int


class ConnectFailed(Record):
    """Answers `Connect`."""

    conn: int
    is_refused: bool  # that no process listens at that port is the answer: the host's, or of something before it
    reason: str
    is_here: bool = False  # that host is this machine


class Received(Record):
    """A message of the coordinator came in."""

    conn: int
    message: Downward


class ConnectionLost(Record):
    """The connection ended, after all that came on it was received."""

    conn: int
    reason: str
    close: Close = Close.ABORTED
    is_garbage: bool = False  # it was closed here: what came in is no message, or makes no sense


OfCell: TypeAlias = CellSaid | CellFailed
OfVote: TypeAlias = Campaigned | Declined | Leading | LeadershipLost
OfConnection: TypeAlias = Connected | ConnectFailed | Received | ConnectionLost
Event: TypeAlias = Submitted | OfCell | OfVote | OfConnection | DeadlinePassed


# Actions.


class ReadCell(Record):
    """Read the endpoint's cell.  Answered by `CellSaid` or `CellFailed`."""


class AskWhoLeads(Record):
    """Ask the voters that this node knows whom they follow.  Answered by `Declined`, by each or by none."""


class Campaign(Record):
    """Seek to lead.  Answered by `Leading`, or by `LeadershipLost`.

    Args:
        node: what this node keeps of the log, which is in the leader core's hands until `LeadershipLost`.
        highest: the highest term that is known.
        has_listened: no leader was heard for a lease, or there was no log.
        gone: tokens of leaders that have ended, or have said goodbye.
        seen: the cell, as it was seen last.
        silent: the token of the leader that was lost since it had said nothing for a lease.
        job_before: the log of a job that is over, which the cell may still have; "" if there is none.
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

    message: CoordinatorMessage


class GiveUp(Record):
    """End the rendezvous with an error.  Not answered."""

    reason: str
    is_refused: bool  # the job does not take this node; else no leader could be reached
    lacks_quorum: bool = False  # this agent could not lead: too few nodes that have a vote could be reached


OfSearch: TypeAlias = ReadCell | AskWhoLeads | Campaign | Answer
Action: TypeAlias = OfSearch | Connect | Disconnect | Send | Deliver | GiveUp
