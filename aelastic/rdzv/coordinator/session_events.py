"""Events and actions of the leader core: what happened to connections and on the board, and what is to be done.

Every action says what answers it.  Connections have numbers, never used twice.  Operations on the board take effect in
the order of their actions, those of this agent's member included, and are answered in that order.
"""

from __future__ import annotations

from typing import TypeAlias

from aelastic.core.machine import DeadlinePassed as DeadlinePassed  # noqa: PLC0414  an event of this core, too
from aelastic.core.record import Record
from aelastic.rdzv.leader_record import LeaderRecord
from aelastic.rdzv.protocol.messages import Downward, Seats, Upward

# Events.


class Opened(Record):
    """A connection came in, from `peer`, which reached this agent at `way`."""

    conn: int
    peer: str
    way: str


class Received(Record):
    """A message of an agent came in."""

    conn: int
    message: Upward


class Garbled(Record):
    """A connection brought what is no message of the protocol.  Nothing more comes from it."""

    conn: int
    reason: str
    is_other_protocol: bool


class Closed(Record):
    """A connection broke, or was closed."""

    conn: int
    is_reset: bool = False  # it broke; else the other end has closed it


class Renewed(Record):
    """Answers `Renew`: our record as the board has it now; `None`: another agent leads."""

    record: LeaderRecord | None
    is_assumed: bool = False  # it cannot be asked now, and this agent was elected by the nodes of the round
    rival_epoch: int = 0  # it was asked meanwhile: another agent leads there, which knew nothing of the job


class RenewFailed(Record):
    """Answers `Renew`: the board cannot be asked now."""

    reason: str


class Reclaimed(Record):
    """Answers `Reclaim`, as `Renewed` does; `None`: another agent leads, or the board cannot be asked."""

    record: LeaderRecord | None


class Published(Record):
    """Answers `Publish`."""

    is_ours: bool


class PublishFailed(Record):
    """Answers `Publish`: the board cannot be asked now."""


class Resigned(Record):
    """This agent leaves, and has told the board."""


OfConnection: TypeAlias = Opened | Received | Garbled | Closed
OfBoard: TypeAlias = Renewed | RenewFailed | Reclaimed | Published | PublishFailed
Event: TypeAlias = OfConnection | OfBoard | Resigned | DeadlinePassed

# Actions.


class Say(Record):
    """Send a message on a connection.  Not answered."""

    conn: int
    message: Downward


class Drop(Record):
    """Close a connection once all that was said is sent.  Not answered."""

    conn: int


class Renew(Record):
    """Renew our record on the board.  Answered by `Renewed` or `RenewFailed`."""

    seats: Seats | None = None  # the round that the board is to know


class Reclaim(Record):
    """Campaign with our own record, for an epoch above this one.  Answered by `Reclaimed`."""

    above: int
    stand_back_s: float = 0.0  # before that our record is given up for so long: another agent may be elected


class Publish(Record):
    """Write the verdict on the board.  Answered by `Published` or `PublishFailed`."""

    verdict: str


class StepDown(Record):
    """This agent is coordinator no longer; nothing follows.  Not answered."""

    reason: str


Action: TypeAlias = Say | Drop | Renew | Reclaim | Publish | StepDown
