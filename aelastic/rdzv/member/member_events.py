"""The phases of a member, its events, and its actions.

Every action says which event answers it.  A connection has a number; events of an earlier connection change nothing.
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import TypeAlias

from aelastic.core.machine import DeadlinePassed as DeadlinePassed  # noqa: PLC0414  an event of this core, too
from aelastic.core.record import Record
from aelastic.rdzv.leader_record import LeaderRecord
from aelastic.rdzv.protocol.messages import CoordinatorMessage, Downward, NodeMessage, Upward


class Phase(StrEnum):
    IDLE = auto()  # the supervisor is not ready yet
    READING = auto()  # the board was asked for the leader
    CAMPAIGNING = auto()  # the board was asked to make this node the leader
    PAUSING = auto()  # until the board is read again
    CONNECTING = auto()  # to the leader
    GREETING = auto()  # connected; `Hello` is not answered yet
    MEMBER = auto()  # the coordinator has welcomed this node
    OVER = auto()  # this node has left, or the job has ended


# Events.


class Submitted(Record):
    """The supervisor has a message for the coordinator."""

    message: NodeMessage


class BoardRead(Record):
    """Answers `ReadBoard` and `Campaign`: the leader record as the board has it now; `None`: there is none."""

    record: LeaderRecord | None


class NotEligible(Record):
    """Answers `Campaign`: on this board another agent is to lead, which has not started yet."""


class BoardFailed(Record):
    """Answers `ReadBoard` and `Campaign`: the board did not answer."""

    reason: str


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
    """The connection broke, or was closed."""

    conn: int
    reason: str
    is_reset: bool = False  # it broke: by the other end, or by something in between; else the other end has closed it
    is_garbage: bool = False  # it was closed here: what came in is no message, or makes no sense


class LeadershipLost(Record):
    """The coordinator in this agent has ended: another agent leads, or none."""


OfBoard: TypeAlias = BoardRead | NotEligible | BoardFailed
OfConnection: TypeAlias = Connected | ConnectFailed | Received | ConnectionLost
Event: TypeAlias = Submitted | OfBoard | OfConnection | LeadershipLost | DeadlinePassed


# Actions.


class ReadBoard(Record):
    """Read the leader record.  Answered by `BoardRead` or `BoardFailed`, in the order of the questions."""


class Campaign(Record):
    """Become the leader in place of the one that was seen, with a higher epoch.

    Answered by `BoardRead`, `BoardFailed` or `NotEligible`, in the order of the questions.
    """

    seen: LeaderRecord | None
    above: int


class Lead(Record):
    """This node was elected: start the coordinator.  Not answered; `LeadershipLost` when it has ended."""

    record: LeaderRecord
    is_heir: bool  # the coordinator before is gone
    seat_before: tuple[int, int] = (0, -1)  # of its node, when it was elected: fence of the round, and group rank


class Connect(Record):
    """Close the connection, if any, and connect to the coordinator.  Answered by `Connected` or `ConnectFailed`."""

    conn: int
    record: LeaderRecord


class Disconnect(Record):
    """Close the connection, or stop to connect.  Not answered."""


class Send(Record):
    """Send a message on the connection.  Not answered."""

    message: Upward


class Deliver(Record):
    """Hand a message to the supervisor.  Not answered."""

    message: CoordinatorMessage


class GiveUp(Record):
    """End the rendezvous with an error.  Not answered."""

    reason: str
    is_refused: bool  # the job does not take this node; else no coordinator could be reached


Action: TypeAlias = ReadBoard | Campaign | Lead | Connect | Disconnect | Send | Deliver | GiveUp
