"""The words between a member and its link: what was told, seen and heard, what is to be done.

Every action says who answers.  A connection has a number; what is left of an earlier one changes nothing.
"""

from __future__ import annotations

from typing import TypeAlias

from aelastic.core.record import Record
from aelastic.rdzv.board import Reign
from aelastic.rdzv.protocol.messages import CoordinatorMessage, Downward, NodeMessage, Upward

# Events.


class Told(Record):
    """The supervisor tells the coordinator something."""

    message: NodeMessage


class Seen(Record):
    """Answers `Look` and `Claim`: what the board says now."""

    reign: Reign | None


class NotOurs(Record):
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


class Heard(Record):
    conn: int
    message: Downward


class Broken(Record):
    """A connection is no more."""

    conn: int
    reason: str


class ChairLost(Record):
    """We coordinate no longer."""


class DeadlinePassed(Record): ...


Event: TypeAlias = (
    Told | Seen | NotOurs | BoardFailed | Connected | ConnectFailed | Heard | Broken | ChairLost | DeadlinePassed
)


# Actions.


class Look(Record):
    """Read the board.  Answered by `Seen` or `BoardFailed`."""


class Claim(Record):
    """Claim the reign from whom we have seen, with an epoch above.  Answered as `Look`, or by `NotOurs`."""

    seen: Reign | None
    above: int


class TakeChair(Record):
    """The reign is ours: coordinate.  Not answered; `ChairLost` when it is another's."""

    reign: Reign
    is_heir: bool  # the coordinator before us is gone


class Connect(Record):
    """Connect to the coordinator; what connection there is is closed.  Answered by `Connected` or `ConnectFailed`."""

    conn: int
    reign: Reign


class Disconnect(Record):
    """Not answered."""


class Tell(Record):
    """Send a message on the connection.  Not answered."""

    message: Upward


class Deliver(Record):
    """Hand a message to the supervisor.  Not answered."""

    message: CoordinatorMessage


class GiveUp(Record):
    """End with an error."""

    reason: str
    is_refused: bool  # the job does not want us; else nobody could be reached


Action: TypeAlias = Look | Claim | TakeChair | Connect | Disconnect | Tell | Deliver | GiveUp
