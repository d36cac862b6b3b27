"""The words between a member and its link: what was told, seen and heard, what is to be done.

Every action says who answers.  A connection has a number; what is left of an earlier one changes nothing.
"""

from __future__ import annotations

from typing import TypeAlias

from aelastic.core.record import Record
from aelastic.rdzv.board import LeaderRecord
from aelastic.rdzv.protocol.messages import CoordinatorMessage, Downward, NodeMessage, Upward

# Events.


class Submitted(Record):
    """The supervisor tells the coordinator something."""

    message: NodeMessage


class BoardRead(Record):
    """Answers `Look` and `Claim`: what the board says now."""

    record: LeaderRecord | None


class NotEligible(Record):
    """Answers `Claim`: this board gives the reign to another agent, which has yet to come."""


class BoardFailed(Record):
    """Answers `Look` and `Claim`: the board can't be asked now."""

    reason: str


class Connected(Record):
    """Answers `Connect`."""

    conn: int


class ConnectFailed(Record):
    """Answers `Connect`."""

    conn: int
    is_refused: bool  # somebody is at that address, and nobody at that port
    reason: str


class Received(Record):
    conn: int
    message: Downward


class ConnectionLost(Record):
    """A connection is no more."""

    conn: int
    reason: str


class LeadershipLost(Record):
    """We coordinate no longer."""


class DeadlinePassed(Record): ...


Event: TypeAlias = (
    Submitted
    | BoardRead
    | NotEligible
    | BoardFailed
    | Connected
    | ConnectFailed
    | Received
    | ConnectionLost
    | LeadershipLost
    | DeadlinePassed
)


# Actions.


class ReadBoard(Record):
    """Read the board.  Answered by `Seen` or `BoardFailed`."""


class Campaign(Record):
    """Claim the reign from whom we have seen, with an epoch above.  Answered as `Look`, or by `NotOurs`."""

    seen: LeaderRecord | None
    above: int


class Lead(Record):
    """The reign is ours: coordinate.  Not answered; `ChairLost` when it is another's."""

    record: LeaderRecord
    is_heir: bool  # the coordinator before us is gone


class Connect(Record):
    """Connect to the coordinator; what connection there is is closed.  Answered by `Connected` or `ConnectFailed`."""

    conn: int
    record: LeaderRecord


class Disconnect(Record):
    """Not answered."""


class Send(Record):
    """Send a message on the connection.  Not answered."""

    message: Upward


class Deliver(Record):
    """Hand a message to the supervisor.  Not answered."""

    message: CoordinatorMessage


class GiveUp(Record):
    """End with an error."""

    reason: str
    is_refused: bool  # the job does not want us; else nobody could be reached


Action: TypeAlias = ReadBoard | Campaign | Lead | Connect | Disconnect | Send | Deliver | GiveUp
