"""The words between the chair and its server: what happened to connections and the board, what is to be done.

Every action says who answers.  Connections have numbers, never used twice; decisions are `messages.py`.
"""

from __future__ import annotations

from typing import TypeAlias

from aelastic.core.record import Record
from aelastic.rdzv.board import LeaderRecord
from aelastic.rdzv.protocol.messages import Downward, Upward

# Events.


class Opened(Record):
    """A connection came in, from `peer`, which reached us at `way`."""

    conn: int
    peer: str
    way: str


class Received(Record):
    conn: int
    message: Upward


class Garbled(Record):
    """A connection brought what is none of our words.  Nothing more comes from it."""

    conn: int
    reason: str
    is_other_protocol: bool


class Closed(Record):
    conn: int


class Kept(Record):
    """Answers `Keep`: our record as the board has it now; `None`: another agent leads."""

    record: LeaderRecord | None


class KeepFailed(Record):
    """Answers `Keep`: the board can't be asked now."""

    reason: str


class Reclaimed(Record):
    """Answers `Reclaim`; `None`: the reign is another's, or the board can't be asked."""

    epoch: int | None


class Published(Record):
    """Answers `Publish`."""

    is_ours: bool


class Resigned(Record):
    """Our agent leaves, and the board has been told."""


class DeadlinePassed(Record): ...


Event: TypeAlias = (
    Opened | Received | Garbled | Closed | Kept | KeepFailed | Reclaimed | Published | Resigned | DeadlinePassed
)

# Actions.


class Say(Record):
    """Send a message on a connection.  Not answered."""

    conn: int
    message: Downward


class Drop(Record):
    """Close a connection once all that was said is sent.  Not answered."""

    conn: int


class Keep(Record):
    """Renew the reign on the board.  Answered by `Kept` or `KeepFailed`."""


class Reclaim(Record):
    """Claim our own reign anew, with an epoch above this one.  Answered by `Reclaimed`."""

    above: int


class Publish(Record):
    """Write the verdict on the board.  Answered by `Published`, unless the board can't be asked."""

    verdict: str


class Vacate(Record):
    """The reign is another's: this chair is no more.  Not answered."""

    reason: str


Action: TypeAlias = Say | Drop | Keep | Reclaim | Publish | Vacate
