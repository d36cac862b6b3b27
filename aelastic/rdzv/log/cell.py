"""The endpoint's cell: one key, changed only by compare-and-set.

Each function returns the cell that a leader writes to replace the one that it read.  The write fails if another leader
has written in between.
"""

from __future__ import annotations

from aelastic.base.record import Record
from aelastic.rdzv.log.entries import Accepted, Entry, EntryRef, log_of


class Cell(Record):
    """What an endpoint remembers.  An endpoint that has lost its memory has none.

    Args:
        incarnation: a random word, chosen by the agent that found the endpoint empty.
        log: the log that the incarnation belongs to; `None` until a log is founded in it.
        term, leader: those of the leader that has the endpoint's vote.
        renewals: a count that rises while that leader has a quorum.
        committed, accepted: as in `Node`, but always whole.
    """

    incarnation: str
    log: str | None
    term: int
    leader: str
    renewals: int = 0
    committed: Entry | None = None
    accepted: Accepted | None = None


def may_lock(
    cell: Cell | None, leader: str, term: int, *, is_leader_gone: bool = True, has_quorum_without: bool = False
) -> bool:
    """The endpoint votes for a higher term, or again for the same leader, but not against a leader that works.

    Args:
        is_leader_gone: the leader in the cell has ended, said `Goodbye`, or renewed nothing for a lease.
        has_quorum_without: the candidate does not need the endpoint's vote.
    """
    if cell is None or (cell.leader, cell.term) == (leader, term):
        return True
    return term > cell.term and (is_leader_gone or has_quorum_without)


def lock(cell: Cell | None, leader: str, term: int, log: str | None, new_incarnation: str) -> Cell:
    """Returns the cell with the endpoint's vote for this term.

    Args:
        log: the leader's log; `None` for an agent that knows of none.
        new_incarnation: a random word, for an endpoint whose memory is empty.
    """
    if cell is None:
        return Cell(new_incarnation, log, term, leader)
    return cell.replace(term=term, leader=leader)


def begin_again(cell: Cell, log: str | None, new_incarnation: str) -> Cell:
    """Returns a new cell for an endpoint whose memory of another log ends (`leader.must_begin_again`)."""
    return Cell(new_incarnation, log, cell.term, cell.leader)


def write(cell: Cell, committed: EntryRef | None, accepted: Accepted | None) -> Cell:
    """Phase 2 at the endpoint, which also renews its vote."""
    known = committed if isinstance(committed, Entry) else cell.committed
    log = log_of(known) or (log_of(accepted.entry) if accepted else cell.log)
    return cell.replace(log=log, renewals=cell.renewals + 1, committed=known, accepted=accepted)
