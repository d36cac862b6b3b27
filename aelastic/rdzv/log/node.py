"""What a node keeps of the log, and what follows from what it reads as a follower.

A node follows one leader at a time.  Its status is its vote: a node that has sent one in a term accepts nothing of a
lower term from then on, at any position of the log.
"""

from __future__ import annotations

from enum import StrEnum, auto

from aelastic.base.record import Record
from aelastic.rdzv.log.entries import Accepted, Entry, EntryId, EntryRef, id_of, log_of, order, whole


class Close(StrEnum):
    """How a connection ended, as seen by the peer."""

    ORDERLY = auto()  # EOF at the end of a frame, without a message: the kernel closed it for a process that is gone
    HUNG_UP = auto()  # the follower sent `HungUp`
    GOODBYE = auto()  # the leader sent `Goodbye`
    ABORTED = auto()  # a reset, an EOF inside a frame, silence: proves nothing


class Status(Record):
    """What a node reports to its leader, whole, whenever it changes.

    Args:
        term: the term for which the status is a vote.
        committed, accepted, ended, failures: as in `Node`.
        replaces: nodes that are gone, as in `Node`, and those of `ended_followers`.
    """

    term: int
    committed: EntryRef | None
    accepted: Accepted | None = None
    ended: tuple[EndedLeader, ...] = ()
    replaces: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()


class Plan(Record):
    """What a leader sends a follower, whole, whenever it changes.

    Args:
        is_leading: its phase 1 is complete.
        committed, proposal: whole for a voter that may not have it, otherwise the id.
        accepted: what the leader itself accepted last; only for voters.
    """

    term: int
    is_leading: bool
    committed: EntryRef | None
    proposal: EntryRef | None = None
    accepted: Accepted | None = None


class EndedLeader(Record):
    """A leader whose end was read, and what it had accepted last."""

    name: str
    accepted: Accepted | None


class EndedFollower(Record):
    """A follower whose end was read, and its last status."""

    name: str
    status: Status


class Node(Record):
    """What a node keeps, only in memory.

    Args:
        term: the highest term in which it has followed or campaigned.
        voted_for: the one leader that it follows in `term`; itself if it has campaigned.
        leader: the leader that it follows now; "" while no connection is open.
        has_read_plan: whether it has read a plan on this connection.
        leader_accepted: what its leader had accepted, according to the last plan.
        committed: the newest entry that it knows to be committed; the id if it never saw the entry whole.
        accepted: the entry that it has accepted after that one.
        ended: leaders whose end it has read; only voters of `committed`.
        ended_followers: those whose end it has read while it led; only voters of `committed`.  It speaks for them, even
            after it has stopped leading.
        replaces: nodes that are gone: this agent has replaced them, or has read their end without a vote.
        failures: those of its workers.
    """

    name: str
    term: int = 0
    voted_for: str = ""
    leader: str = ""
    has_read_plan: bool = False
    leader_accepted: Accepted | None = None
    committed: EntryRef | None = None
    accepted: Accepted | None = None
    ended: tuple[EndedLeader, ...] = ()
    ended_followers: tuple[EndedFollower, ...] = ()
    replaces: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()


def status_of(node: Node) -> Status:
    """Returns what a node reports.  Followers whose end it has read while it led are gone for other leaders as well."""
    gone = {*node.replaces, *(each.name for each in node.ended_followers)}
    return Status(node.term, node.committed, node.accepted, node.ended, tuple(sorted(gone)), node.failures)


# Following.


def may_follow(node: Node, candidate: str, term: int) -> bool:
    """One vote in a term: a node follows a leader of a higher term, or again the one that it follows in this term.

    When it does so is a matter of time: after a lease of silence from its leader, or once it has read the leader's end
    or `Goodbye`.  Safety doesn't depend on that.
    """
    return term > node.term or (term == node.term and node.voted_for == candidate)


def farewells(leader: str, followers: tuple[str, ...]) -> dict[str, Close]:
    """Follow one leader: the messages that a node sends before it follows another leader, or campaigns.

    Args:
        leader: the leader that it follows now, if any.
        followers: those that are connected to it.
    """
    words = dict.fromkeys(followers, Close.GOODBYE)
    if leader:
        words[leader] = Close.HUNG_UP
    return words


def close_of_living_node() -> Close:
    """Close in one way: a living process that closes without a message aborts, so that the peer sees a reset."""
    return Close.ABORTED


def follow(node: Node, leader: str, term: int) -> Node:
    """Returns the node as a follower, after the `farewells`.  Its status on the new connection is its vote."""
    return node.replace(term=term, voted_for=leader, leader=leader, has_read_plan=False, leader_accepted=None)


def on_plan(node: Node, plan: Plan) -> Node:
    """Returns the node after a plan of its leader.  Its next status shows whether it accepted the proposal."""
    known = node.term, node.committed, None, node.leader_accepted
    if node.has_read_plan and known == (plan.term, plan.committed, plan.proposal, plan.accepted):
        return node
    if plan.term < node.term or is_of_other_log(node, plan):
        return node
    held, committed = whole_entries_of(node), node.committed
    is_by_id = isinstance(committed, EntryId) and committed == id_of(plan.committed)
    if order(plan.committed) > order(committed) or is_by_id or continues_without(node, plan):
        committed = whole(plan.committed, *held)
    node = node.replace(term=plan.term, has_read_plan=True, leader_accepted=plan.accepted, committed=committed)
    proposal = whole(plan.proposal, *held)
    if isinstance(proposal, Entry) and accepts(node, proposal):
        node = node.replace(accepted=Accepted(proposal, plan.term))
    return without_outdated(node)


def accepts(node: Node, proposal: Entry) -> bool:
    """Phase 2: a voter accepts what follows the entry that it knows to be committed, in the term of its leader."""
    return proposal.parent == id_of(node.committed)


def continues_without(node: Node, plan: Plan) -> bool:
    """Recovery: the leader has read this node's status, and continues without an entry that neither has whole."""
    is_earlier = plan.committed is not None and order(plan.committed) < order(node.committed)
    return is_earlier and plan.is_leading and isinstance(node.committed, EntryId)


def is_of_other_log(node: Node, plan: Plan) -> bool:
    log, ours = log_of(plan.committed) or log_of(plan.proposal), log_of(node.committed)
    return ours is not None and log is not None and ours != log


def must_join_anew(node: Node, plan: Plan) -> bool:
    """One log for each name: whether the leader leads another log than the one that the node has promised to keep.

    The node can't take back its promises.  So its agent forgets them and joins under a new name, as an agent that
    replaces it.
    """
    return plan.is_leading and is_of_other_log(node, plan)


# A leader's end.


def on_leader_closed(node: Node, close: Close) -> Node:
    """Returns the node after the connection to its leader ended and everything before that was read."""
    if leader_has_ended(close):
        node = _after_leaders_end(node)
    return without_outdated(node.replace(leader="", has_read_plan=False, leader_accepted=None))


def _after_leaders_end(node: Node) -> Node:
    """Returns the node as a witness: it speaks for the leader or, without a vote, knows that the leader is gone."""
    if not can_speak_for_leader(node):
        return node.replace(replaces=tuple(sorted({*node.replaces, node.leader})))
    ended = {each.name: each for each in node.ended}
    ended[node.leader] = EndedLeader(node.leader, node.leader_accepted)
    return node.replace(ended=tuple(ended[name] for name in sorted(ended)))


def leader_has_ended(close: Close) -> bool:
    """An end, read by a follower: only an orderly close without a message proves that the leader's process is gone."""
    return close is Close.ORDERLY


def can_speak_for_leader(node: Node) -> bool:
    """Rule 5b, "after at least one of its plans": a voter that has read one knows what its leader accepted."""
    return node.has_read_plan and votes_in(node.committed, node.name)


def must_report(before: Node, after: Node) -> bool:
    """Returns whether the leader must learn what a plan has changed; if not, the next connection's status will do."""
    may_vote = votes_in(after.committed, after.name) or before.accepted is not None or after.accepted is not None
    return may_vote and status_of(after) != status_of(before)


def votes_in(ref: EntryRef | None, name: str) -> bool:
    return isinstance(ref, Entry) and name in ref.voters


# What newer entries make obsolete.


def without_outdated(node: Node) -> Node:
    """Returns the node without outdated facts: an entry that can't be next, and nodes that no longer vote."""
    if node.committed is None:
        return node
    if node.accepted and node.accepted.entry.parent != id_of(node.committed):
        node = node.replace(accepted=None)
    if isinstance(node.committed, Entry) and (node.ended or node.ended_followers):
        ended = tuple(each for each in node.ended if each.name in node.committed.voters)
        followers = tuple(each for each in node.ended_followers if each.name in node.committed.voters)
        node = node.replace(ended=ended, ended_followers=followers)
    return node


def whole_entries_of(state: Node | Status) -> tuple[Entry, ...]:
    """Returns the entries that a node, or the sender of a status, has whole."""
    committed = (state.committed,) if isinstance(state.committed, Entry) else ()
    return (*committed, state.accepted.entry) if state.accepted else committed


def holds(status: Status, entry_id: EntryId | None) -> bool:
    return any(entry.id == entry_id for entry in whole_entries_of(status))
