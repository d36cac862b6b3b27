"""What a node has missed that reconnects to a coordinator that has rounds of its own."""

from __future__ import annotations

from enum import StrEnum, auto

from aelastic.rdzv.coordinator.roster import Roster
from aelastic.rdzv.protocol.messages import Past, Standing


class Return(StrEnum):
    WAITS = auto()  # it has no workers, and wants the next round
    MISSED_ASSIGNMENT = auto()  # it has no workers yet, but it has a place in the round that runs
    NOT_MISSED = auto()  # it was lost when its work was done, so the round went on
    MISSED_END = auto()  # it has workers of the last round, which is over
    STRAY = auto()  # it has workers of a round that went on without it
    # Of the round that runs:
    RUNS = auto()  # its workers run
    RESTARTED = auto()  # it has stopped its workers, and not because it was told to
    FAILED = auto()  # a worker has failed
    FINISHED = auto()  # its workers have succeeded


def how_it_returns(node_id: str, past: Past, roster: Roster, round_: int, *, is_running: bool) -> Return:
    """Where a node stands, by its own account and by the roster.

    Args:
        node_id: the node.
        past: its account.
        roster: the coordinator's.
        round_: the last round; `is_running`: whether that goes on.
    """
    is_participant, member = node_id in roster.participants, roster.members.get(node_id)
    if past.standing is Standing.READY:
        has_assignment = roster.participants.get(node_id) is not None and past.round < round_
        return Return.MISSED_ASSIGNMENT if has_assignment and is_running else Return.WAITS
    if past.round != round_ or not is_participant:
        return Return.STRAY
    if member is None and past.standing is Standing.FINISHED and is_running:
        return Return.NOT_MISSED
    if member is None or member.is_stray:
        return Return.STRAY
    return _OF_STANDING[past.standing] if is_running else Return.MISSED_END


_OF_STANDING = {
    Standing.BUSY: Return.RUNS,
    Standing.STOPPING: Return.RESTARTED,
    Standing.FAILED: Return.FAILED,
    Standing.FINISHED: Return.FINISHED,
}


def credible(past: Past) -> Past:
    """A node's account as an honest agent would give it: a failure comes with its report, and nothing else does."""
    if (past.standing is Standing.FAILED) == (past.failure is not None):
        return past
    standing = Standing.STOPPING if past.standing is Standing.FAILED else past.standing
    return past.replace(standing=standing, failure=None)
