"""Events and actions of the leader core: what happened to connections and the cell, and what to do.

The docstring of an action names its answer.  Connections have numbers that are never used twice.  One question to the
endpoint is open at a time.
"""

from __future__ import annotations

from typing import TypeAlias

from aelastic.base.machine import DeadlinePassed as DeadlinePassed  # noqa: PLC0414  also an event of this core
from aelastic.base.record import Record
from aelastic.rdzv.leader.job_state import Participant
from aelastic.rdzv.log.node import Close, Node
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.messages import Downward, Upward
from aelastic.rdzv.stores.cell_events import CellAnswered as CellAnswered  # noqa: PLC0414
from aelastic.rdzv.stores.cell_events import CellFailed as CellFailed  # noqa: PLC0414  also an event of this core

# Events.


class Opened(Record):
    """A connection came in, from `peer`, which reached this agent at `way`."""

    conn: int
    peer: str
    way: str


class Received(Record):
    """A message from an agent came in.

    Args:
        has_next: another event is handled next.  The leader decides after that one.
    """

    conn: int
    message: Upward
    has_next: bool = False


class Garbled(Record):
    """Data on a connection is not a message of the protocol.  Nothing more comes from that connection."""

    conn: int
    reason: str
    is_other_protocol: bool


class Closed(Record):
    """A connection ended, after everything on it was received."""

    conn: int
    close: Close


class Flushed(Record):
    """A plan that was sent is in the kernel's hands."""

    conn: int
    serial: int


class Campaigned(Record):
    """Another agent seeks this node's vote, or asks who leads.  Answered by `Answer` or `PassOn`."""

    conn: int
    campaign: m.Campaign


class Declined(Record):
    """A node does not vote for this agent.

    Args:
        term: the highest term that it knows of.
        leader: the token of the leader that it follows; empty if it follows none.
        is_own: that leader itself has answered.
    """

    term: int
    leader: str = ""
    is_own: bool = False


class Resigned(Record):
    """This agent leaves."""


OfConnection: TypeAlias = Opened | Received | Garbled | Closed | Flushed
OfCell: TypeAlias = CellAnswered | CellFailed
Event: TypeAlias = OfConnection | OfCell | Campaigned | Declined | Resigned | DeadlinePassed

# Actions.


class SendTo(Record):
    """Send a message on a connection.  Answered by `Flushed` if it has a serial."""

    conn: int
    message: Downward
    serial: int = 0


class Drop(Record):
    """Close a connection once everything is sent.  Not answered.

    Args:
        in_order: the last message was a goodbye.  Otherwise the other end must see a reset, because this process lives.
    """

    conn: int
    in_order: bool = False


class AskVotes(Record):
    """Ask voters for their votes.  Answered by their connections, and by `Declined`."""

    participants: tuple[Participant, ...]
    campaign: m.Campaign


class Answer(Record):
    """Decline a campaign.  Not answered."""

    conn: int
    declined: m.Declined


class PassOn(Record):
    """Let this agent's member answer a campaign: the agent no longer leads.  Not answered."""

    conn: int
    campaign: m.Campaign


class ReadCell(Record):
    """Read the cell.  Answered by `CellAnswered` or `CellFailed`."""


class WriteCell(Record):
    """Replace the cell if it is as last read or written.  Answered by `CellAnswered` or `CellFailed`."""

    stored: m.StoredCell


class StepDown(Record):
    """This agent no longer leads, and nothing follows.  Not answered.

    Args:
        node: what it keeps of the log.
        stand_back_s: how long it does not campaign.
        alive: the token of a leader that has answered; empty if none has.
        lacks_quorum: it failed to get the votes of a quorum, or lost them.
        stored: the cell, if it names another leader.
    """

    reason: str
    node: Node
    stand_back_s: float = 0.0
    alive: str = ""
    lacks_quorum: bool = False
    stored: m.StoredCell | None = None


Action: TypeAlias = SendTo | Drop | AskVotes | Answer | PassOn | ReadCell | WriteCell | StepDown
