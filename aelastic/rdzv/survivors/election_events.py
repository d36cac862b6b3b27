"""The phases of an election, its events, and its actions."""

from __future__ import annotations

from enum import StrEnum, auto
from typing import TypeAlias

from aelastic.core.machine import DeadlinePassed as DeadlinePassed  # noqa: PLC0414  an event of this core, too
from aelastic.core.record import Record
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.protocol.messages import Seat, Seats, Vote, Voted


class Phase(StrEnum):
    FOLLOWING = auto()  # a coordinator is there, or this node knows no other node
    ALONE = auto()  # the coordinator is lost
    ASKING = auto()  # the nodes of the round are asked for their votes
    CHOSEN = auto()  # a coordinator is elected, as far as this node knows


# Events.


class Followed(Record):
    """A coordinator has welcomed this node."""

    leader: LeaderRecord
    epoch: int


class Seated(Record):
    """The coordinator has said which nodes take part in the round."""

    seats: Seats


class Lost(Record):
    """The coordinator is lost, or more is known of its loss."""

    since: float  # it was heard last, or its connection broke
    is_dead: bool  # its process has ended
    candidate: Candidate  # this agent, if it has to take over


class BoardSaid(Record):
    """The endpoint has answered."""


class BoardSilent(Record):
    """The endpoint was asked, and has not answered."""

    since: float  # it was asked
    is_refused: bool  # no process listens there


class Asked(Record):
    """A node of the round wants this node's vote.  Answered by `Answer`."""

    conn: int
    vote: Vote


class Answered(Record):
    """Answers `Ask`."""

    node_id: str
    epoch: int  # that was asked for
    voted: Voted


Event: TypeAlias = Followed | Seated | Lost | BoardSaid | BoardSilent | Asked | Answered | DeadlinePassed


# Actions.


class Ask(Record):
    """Ask a node for its vote.  Answered by `Answered`, or not."""

    seat: Seat
    vote: Vote


class Answer(Record):
    """Answer a node that has asked for a vote.  Not answered."""

    conn: int
    voted: Voted


Action: TypeAlias = Ask | Answer
