"""A candidate, and the leader that it becomes: phase 1, proposing, phase 2.

A leader is also a node; `Leader.node` is what it keeps as one.  The phases follow one another for each entry:
`establish` learns what may have been committed, `propose` is needed only if nothing may have been, and `commit` counts
the votes.  Phase 1 of the next entry takes no message: the statuses that a leader has are valid for all positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aelastic.base.record import Record
from aelastic.rdzv.log import votes as voting
from aelastic.rdzv.log.cell import Cell, write
from aelastic.rdzv.log.entries import (
    NO_PAYLOAD,
    Accepted,
    Configuration,
    Entry,
    EntryId,
    EntryRef,
    Payload,
    first_entry,
    id_of,
    is_verdict,
    log_of,
    next_entry,
    order,
    whole,
)
from aelastic.rdzv.log.node import (
    Close,
    EndedFollower,
    EndedLeader,
    Node,
    Plan,
    Status,
    holds,
    votes_in,
    whole_entries_of,
    without_outdated,
)
from aelastic.rdzv.log.votes import Mandate, Votes

# More terms than agents count to before the endpoint learns of one of them.
UNSEEN_TERMS = 1_000


class Follower(Record):
    """What a leader knows of a follower.

    Args:
        status: its last status.
        is_open: its connection is open.  The status from a closed connection is still a vote.
        has_plan: the current plan is in the kernel's hands.
        is_welcomed: some plan has been, on this connection, in this term or an earlier one.
    """

    status: Status
    is_open: bool = True
    has_plan: bool = False
    is_welcomed: bool = False


class View(Record):
    """The cell of an endpoint that voted for this leader, as last read or written.

    Args:
        has_proposal: it was written with the current proposal.
    """

    incarnation: str
    log: str | None
    committed: Entry | None
    accepted: Accepted | None
    has_proposal: bool = False


class Leader(Record):
    """A candidate or leader.

    Args:
        has_listened: it took its term from the wall clock, after a lease of listening.
        mandate: the ground on which phase 1 was completed; `NONE` before that.
        given_up: the newest entry of a log that can't continue, while this leader founds another one; or one that is
            lost, while it continues from the entry of the endpoint.
        followers: by name; those that have ended are in `node.ended_followers`.
        views: by endpoint; `None` for an endpoint that has not voted in this term.
    """

    node: Node
    views: tuple[View | None, ...]
    followers: Mapping[str, Follower]
    has_listened: bool = False
    mandate: Mandate = Mandate.NONE
    proposal: Entry | None = None
    given_up: EntryId | None = None

    def __hash__(self) -> int:
        rest = self.node, self.views, self.has_listened, self.mandate, self.proposal, self.given_up
        return hash((*rest, frozenset(self.followers.items())))


# Campaigning.


def next_term(highest: int) -> int:
    """Returns the term of a campaign: above every term that the candidate has seen."""
    return highest + 1


def term_from_clock(milliseconds: int, highest: int, more: int = 0) -> int:
    """Returns a term "from the wall clock", for recovery and founding: above terms that only ended nodes knew as well.

    Args:
        milliseconds: since 1970.  Terms start there and rise by a few a minute, so they stay behind the clock.  A clock
            may be wrong, so the term is also far above those that this candidate has seen.
        more: a random number below `UNSEEN_TERMS`, so that no two candidates whose clocks are behind found logs in the
            same term: `AELASTIC_ROUND` is made of it.
    """
    return max(milliseconds, highest + UNSEEN_TERMS + more)


def campaign(node: Node, term: int, endpoints: int, *, has_listened: bool = False) -> Leader:
    """Returns the node as a candidate, once the messages of `farewells` are sent."""
    node = node.replace(term=term, voted_for=node.name, leader="", has_read_plan=False, leader_accepted=None)
    return Leader(node, (None,) * endpoints, {}, has_listened)


def campaign_again(leader: Leader, term: int, *, has_listened: bool = False) -> Leader:
    """Returns the leader in a higher term.  Its followers stay, and answer the next plan with a vote for this term."""
    open_ones = {name: each for name, each in leader.followers.items() if each.is_open}
    node = step_down(leader).replace(term=term, voted_for=leader.node.name)
    return _changed(Leader(node, (None,) * len(leader.views), open_ones, has_listened))


def step_down(leader: Leader) -> Node:
    """Returns what remains of a leader that stops leading, once the messages of `farewells` are sent."""
    lost = lost_entry(leader)
    if lost is not None and leader.node.accepted is None:
        return leader.node.replace(committed=lost)  # nothing was proposed instead
    return leader.node


# What a leader reads.


def on_connected(leader: Leader, name: str, status: Status) -> Leader:
    """Returns the leader after the first status on a connection, which is a vote if it is of this term."""
    return _on_status(leader, name, Follower(status))


def on_status(leader: Leader, name: str, status: Status) -> Leader:
    """Returns the leader after another status on an open connection."""
    return _on_status(leader, name, leader.followers[name].replace(status=status))


def _on_status(leader: Leader, name: str, follower: Follower) -> Leader:
    leader = leader.replace(followers={**leader.followers, name: follower})
    return _after_reading_of(leader, follower.status.committed)


def on_follower_closed(leader: Leader, name: str, close: Close) -> Leader:
    """Returns the leader after a follower's connection ended and everything before that was read."""
    followers = dict(leader.followers)
    follower = followers.pop(name)
    if follower_has_ended(close):
        ended = (*leader.node.ended_followers, EndedFollower(name, follower.status))
        return leader.replace(node=leader.node.replace(ended_followers=ended), followers=followers)
    followers[name] = follower.replace(is_open=False)
    return leader.replace(followers=followers)


def follower_has_ended(close: Close) -> bool:
    """An end, read by a leader: only an orderly close without a message proves that the follower's process is gone."""
    return close is Close.ORDERLY


def on_locked(leader: Leader, endpoint: int, cell: Cell) -> Leader:
    """Returns the leader after the endpoint has voted for it."""
    view = View(cell.incarnation, cell.log, cell.committed, cell.accepted)
    return _after_reading_of(_with_view(leader, endpoint, view), cell.committed)


def _after_reading_of(leader: Leader, committed: EntryRef | None) -> Leader:
    if takes_over(leader, committed):
        return _at_phase_1(leader, committed)
    if isinstance(leader.node.committed, EntryId):
        return leader.replace(node=leader.node.replace(committed=_whole(leader, leader.node.committed)))
    return leader


def takes_over(leader: Leader, committed: EntryRef | None) -> bool:
    """Take over: a leader that reads of a newer committed entry, at any time, starts phase 1 again from there."""
    if is_of_other_log(leader, committed):
        return False
    return order(committed) > max(order(leader.node.committed), order(leader.given_up))


def _at_phase_1(leader: Leader, committed: EntryRef | None) -> Leader:
    """Returns the leader at the position after an entry, with all the votes it has and no proposal."""
    node = without_outdated(leader.node.replace(committed=_whole(leader, committed)))
    leader = leader.replace(node=node, mandate=Mandate.NONE, proposal=None, given_up=None)
    return _changed(leader)


def _changed(leader: Leader) -> Leader:
    """Returns the leader after its plan has changed: no follower and no endpoint has the new one yet."""
    followers = {
        name: each.replace(has_plan=False) if each.has_plan else each for name, each in leader.followers.items()
    }
    views = tuple(view and view.replace(has_proposal=False) for view in leader.views)
    return leader.replace(followers=followers, views=views)


def _whole(leader: Leader, ref: EntryRef | None) -> EntryRef | None:
    """Returns the entry with this id if the leader, a follower or an endpoint has it whole, otherwise the id."""
    if not isinstance(ref, EntryId):
        return ref
    statuses = [*(each.status for each in leader.followers.values()), *last_words(leader)]
    held = [entry for status in statuses for entry in whole_entries_of(status)]
    for view in leader.views:
        if view:
            held += [entry for entry in (view.committed, view.accepted and view.accepted.entry) if entry]
    return whole(ref, *whole_entries_of(leader.node), *held)


# Two logs.


def is_of_other_log(leader: Leader, ref: EntryRef | None) -> bool:
    ours, other = log_of(leader.node.committed), log_of(ref)
    return ours is not None and other is not None and ours != other


def must_give_up_log(leader: Leader, other: EntryRef | None, *, has_other_quorum: bool) -> bool:
    """Where two logs meet: the one with a quorum of its newest configuration continues, else the higher (term, number).

    Where the endpoint decides alone, the log whose leader renews the cell has the quorum.

    A leader that must give up its log stops leading, and its agent joins the other log under a new name.  A leader that
    continues takes a term above the other log's, so that its next proposal is newer than both.

    Args:
        other: the newest entry of the other log, as named in a status or a cell.
        has_other_quorum: its leader has been seen renewing the cell.
    """
    if not is_of_other_log(leader, other):
        return False
    committed = leader.node.committed
    decides_alone = isinstance(committed, Entry) and not committed.voters
    has_quorum = leader.mandate is Mandate.QUORUM and not (decides_alone and has_other_quorum)
    if has_quorum != has_other_quorum:
        return has_other_quorum
    return order(other) > order(leader.node.committed)


# Phase 1.


def establish(leader: Leader) -> Leader | None:
    """Phase 1: the leader that may make a proposal, or must repeat one; `None` if votes are missing.

    A founder may first give up the log that it knows of, still without a mandate.
    """
    if leader.mandate:
        return None
    newest = newest_committed(leader)
    if newest is not leader.node.committed:
        leader = _at_phase_1(leader, newest)
    committed = leader.node.committed
    if isinstance(committed, EntryId):  # nobody here has the entry whole
        if may_found_beside(leader, committed):
            return _given_up(leader, committed)
        older = last_whole(leader)
        if older is None or not may_recover_from(leader, older):
            return None
        leader, committed = _without_lost(leader, committed, older), older
    votes = phase_1_votes(leader)
    mandate = phase_1_mandate(leader, votes)
    if mandate is Mandate.NONE and isinstance(committed, Entry) and may_found(leader, committed, votes):
        return _given_up(leader, lost_entry(leader) or committed.id)
    if mandate is Mandate.NONE or is_verdict(committed):
        return None
    leader = leader.replace(mandate=mandate)
    pending = adopted(leader)
    if pending:
        leader = leader.replace(proposal=pending, node=_having_accepted(leader, pending))
    return _changed(leader)


def may_recover_from(leader: Leader, older: Entry) -> bool:
    """Recovery, if nobody who answers has the newest entry whole: the job may continue from that of the endpoint.

    Entries with new voters go to the endpoint first, so the voters of the lost entry are among those of the older one.
    Each of these must have answered or be gone: none of them can still commit anything.
    """
    has_voters = bool(older.voters)  # otherwise the endpoints know each entry
    return leader.has_listened and has_voters and voting.by_recovery(older.configuration, phase_1_votes(leader))


def _without_lost(leader: Leader, lost: EntryId, older: Entry) -> Leader:
    return leader.replace(node=leader.node.replace(committed=older, accepted=None), given_up=lost)


def lost_entry(leader: Leader) -> EntryId | None:
    """Returns the entry of its log that the leader continues without."""
    lost = leader.given_up
    return lost if lost is not None and lost.log == log_of(leader.node.committed) else None


def last_whole(leader: Leader) -> Entry | None:
    """Returns the last entry that this leader has whole: the newest one, or else that of the endpoint."""
    committed = leader.node.committed
    if not isinstance(committed, EntryId):
        return committed
    found = [view.committed for view in leader.views if view]
    return max((each for each in found if log_of(each) == committed.log), key=order, default=None)


def _given_up(leader: Leader, known: EntryId) -> Leader:
    """Returns the leader as founder of another log.  It may have to begin an incarnation first."""
    node = leader.node.replace(committed=None, accepted=None)
    leader = leader.replace(node=node, given_up=known)
    return establish(leader) or leader


def must_begin_again(leader: Leader, view: View) -> bool:
    """One log for each incarnation: whether a leader whose log continues or begins must end the endpoint's memory.

    Another log may rely on what the endpoint has accepted.  Overwriting that would make the endpoint forget under the
    same name.  A founder that finds the first entry of a log must adopt it instead.
    """
    ours = log_of(leader.node.committed)
    if ours is None:
        is_first = view.committed is None and view.accepted is not None and view.accepted.entry.parent is None
        is_given_up = order(view.committed) <= order(leader.given_up)
        return leader.has_listened and view.log is not None and is_given_up and not is_first
    return leader.mandate is Mandate.QUORUM and not is_of_log(leader, view)


def is_of_log(leader: Leader, view: View) -> bool:
    """Returns whether an endpoint's memory belongs to the leader's log: by the cell or the committed entry."""
    committed = leader.node.committed
    is_known = isinstance(committed, Entry) and view.incarnation in committed.incarnations
    return is_known or view.log == log_of(committed)


def own_views(leader: Leader) -> tuple[View | None, ...]:
    """Returns the endpoints that voted for this leader and whose incarnation may belong to its log."""
    return tuple(None if view and must_begin_again(leader, view) else view for view in leader.views)


def may_write(leader: Leader, endpoint: int) -> bool:
    """Returns whether the leader may write to an endpoint that it has locked: never into the memory of another log.

    It may not write either while it knows only the id of the committed entry: it could not tell what the endpoint must
    keep.
    """
    view, committed = own_views(leader)[endpoint], leader.node.committed
    if view is None or isinstance(committed, EntryId):
        return False
    return committed is None or is_of_log(leader, view)


def newest_committed(leader: Leader) -> EntryRef | None:
    """Phase 1 starts from the newest committed entry of all statuses and cells."""
    found = [leader.node.committed, *(each.status.committed for each in leader.followers.values())]
    found += [status.committed for status in last_words(leader)]
    found += [view.committed for view in leader.views if view]
    newest = max((each for each in found if not is_of_other_log(leader, each)), key=order)
    is_newer = order(newest) > max(order(leader.node.committed), order(leader.given_up))
    return _whole(leader, newest if is_newer else leader.node.committed)


def last_words(leader: Leader) -> tuple[Status, ...]:
    """Phase 1: the last statuses of followers that have ended also count."""
    return tuple(each.status for each in leader.node.ended_followers)


def configuration_of(leader: Leader) -> Configuration:
    """Returns who decides now: those that the last whole entry names or, before the first one, the endpoints."""
    if (entry := last_whole(leader)) is not None:
        return entry.configuration
    return Configuration((), tuple(view.incarnation if view else "" for view in own_views(leader)))


def phase_1_votes(leader: Leader) -> Votes:
    statuses = _answers(leader)
    answered = frozenset({*statuses, leader.node.name})
    return _votes(leader, answered, statuses.values(), leader.node.ended_followers, own_views(leader))


def phase_1_mandate(leader: Leader, votes: Votes) -> Mandate:
    """Phase 1 needs the votes of the configuration.  Recovery and founding also need a term from the wall clock."""
    mandate = voting.mandate(configuration_of(leader), votes)
    if leader.node.committed is None:
        mandate = min(mandate, Mandate.FOUNDING)
    if mandate in {Mandate.RECOVERY, Mandate.FOUNDING} and not leader.has_listened:
        return Mandate.NONE
    return mandate


def may_found(leader: Leader, known: Entry, votes: Votes) -> bool:
    """Founding: nothing begins while nodes of the known log may live and have not answered.

    The endpoints must have forgotten that log: a majority of them has another incarnation.  The founder must never have
    been a voter there, so that it breaks no promise.
    """
    views = [view for view in leader.views if view]
    new_ones = [view for view in views if view.incarnation not in known.incarnations]
    is_forgotten = leader.has_listened and 2 * len(new_ones) > len(leader.views)
    are_all_known = not voting.missing(known.configuration, votes.known | votes.replaced)
    return is_forgotten and are_all_known and leader.node.name not in known.voters


def may_found_beside(leader: Leader, known: EntryId) -> bool:
    """Founding, if nobody who answers ever had a vote: the endpoints have forgotten the log, and only its id is known.

    An endpoint has also forgotten it if a leader of that log began its incarnation, but has written no entry there.
    Nobody can tell which of its nodes may live, no more than an agent that knows of no log can: these are two jobs.
    """
    forgotten = [view for view in leader.views if view and has_forgotten(view, known)]
    return leader.has_listened and 2 * len(forgotten) > len(leader.views)


def has_forgotten(view: View, known: EntryId) -> bool:
    is_empty = view.committed is None and view.accepted is None
    return is_empty or view.log != known.log


def adopted(leader: Leader) -> Entry | None:
    """Adoption: the accepted entry of the highest term that follows the committed one: it may have been committed.

    After a recovery without a lost entry, only a newer one: an older one was not committed instead.
    """
    found = [view.accepted for view in own_views(leader) if view]
    if leader.node.committed is not None:  # only the endpoints agree on a founding
        answers = _answers(leader).values()
        found += [leader.node.accepted, *(status.accepted for status in (*answers, *last_words(leader)))]
        ended = [*leader.node.ended, *(each for status in answers for each in status.ended)]
        found += [each.accepted for each in ended]
    parent = id_of(leader.node.committed)
    fitting = [accepted for accepted in found if accepted and accepted.entry.parent == parent]
    if (lost := lost_entry(leader)) is not None:
        fitting = [accepted for accepted in fitting if order(accepted.entry) > order(lost)]
    return max(fitting, key=lambda accepted: accepted.term).entry if fitting else None


def _answers(leader: Leader) -> dict[str, Status]:
    """Returns the statuses that are votes in this term: those of its own log, and of nodes that know of no log."""
    ours = leader.node.committed
    answers = {}
    for name, follower in leader.followers.items():
        status = follower.status
        is_of_log = log_of(status.committed) in {None, log_of(ours)}
        if status.term == leader.node.term and is_of_log:
            answers[name] = status
    return answers


def _votes(
    leader: Leader,
    answered: frozenset[str],
    statuses: Iterable[Status],
    ended_followers: Iterable[EndedFollower],
    views: Iterable[View | None],
) -> Votes:
    """Returns the votes of one phase, with the ended and replaced nodes that the leader and its voters know of."""
    ended: list[EndedLeader] = [*leader.node.ended, *(each for status in statuses for each in status.ended)]
    configuration = configuration_of(leader)
    endpoints = [
        endpoint
        for endpoint, view in enumerate(views)
        if view and voting.is_named(configuration, endpoint, view.incarnation)
    ]
    return Votes(
        answered,
        frozenset(each.name for each in ended_followers),
        frozenset(each.name for each in ended),
        replaced(leader),
        len(endpoints),
    )


def replaced(leader: Leader) -> frozenset[str]:
    """Replaced: nodes that are gone, because another agent has replaced them."""
    statuses = [each.status for each in leader.followers.values()]
    return frozenset({*leader.node.replaces, *(name for status in statuses for name in status.replaces)})


# Proposing, and phase 2.


def propose(
    leader: Leader,
    members: Iterable[str],
    voters: Iterable[str],
    *,
    is_verdict: bool = False,
    failures: Iterable[str] = (),
    payload: Payload = NO_PAYLOAD,
) -> Leader:
    """Returns the leader with a proposal of its own.  Phase 1 must be complete and have found nothing pending."""
    assert leader.mandate and not leader.proposal, "phase 1 is complete and left the choice"
    committed, term = leader.node.committed, leader.node.term
    incarnations = _incarnations_now(leader)
    if isinstance(committed, Entry):
        proposal = next_entry(
            committed, term, members, voters, incarnations, is_verdict=is_verdict, failures=failures, payload=payload
        )
    else:
        proposal = first_entry(term, members, voters, incarnations, payload)
    leader = leader.replace(proposal=proposal)
    if not needs_endpoint(leader, proposal):
        leader = leader.replace(node=_having_accepted(leader, proposal))
    return _changed(leader)


def _incarnations_now(leader: Leader) -> tuple[str, ...]:
    known = configuration_of(leader).incarnations
    return tuple(view.incarnation if view else word for view, word in zip(own_views(leader), known, strict=True))


def _having_accepted(leader: Leader, proposal: Entry) -> Node:
    return without_outdated(leader.node.replace(accepted=Accepted(proposal, leader.node.term)))


def needs_endpoint(leader: Leader, proposal: Entry) -> bool:
    """New voters go to the endpoint first, unless it has forgotten the log that names it."""
    configuration, view = configuration_of(leader), leader.views[0]
    has_forgotten = view is not None and not voting.is_named(configuration, 0, view.incarnation)
    return voting.gives_new_votes(configuration, proposal) and not has_forgotten


def is_withheld(leader: Leader) -> bool:
    """New voters go to the endpoint first: whether the proposal must be kept from all nodes for now."""
    if leader.proposal is None or not needs_endpoint(leader, leader.proposal):
        return False
    view = leader.views[0]
    return view is None or not view.has_proposal


def plan_for(leader: Leader, name: str) -> Plan | None:
    """Returns the plan for a connected follower; `None` if the endpoint must have the proposal first."""
    if is_withheld(leader):
        return None
    status, committed = leader.followers[name].status, leader.node.committed
    has_vote = votes_in(committed, name) or votes_in(leader.proposal, name)
    return Plan(
        leader.node.term,
        leader.mandate is not Mandate.NONE or is_verdict(committed),
        committed if has_vote and needs_whole(status, committed) else id_of(committed),
        leader.proposal if has_vote and needs_whole(status, leader.proposal) else id_of(leader.proposal),
        own_accepted(leader) if has_vote else None,
    )


def needs_whole(status: Status, entry: EntryRef | None) -> bool:
    """Whole entries for voters: the id is enough only for a voter whose status has the entry whole."""
    return not holds(status, id_of(entry))


def own_accepted(leader: Leader) -> Accepted | None:
    """Rule 5b, what the leader itself has accepted: each plan for a node that may read its end names it."""
    return leader.node.accepted


def on_plan_sent(leader: Leader, name: str) -> Leader:
    """Returns the leader after its current plan for a follower went into the kernel's hands."""
    follower = leader.followers[name].replace(has_plan=True, is_welcomed=True)
    return leader.replace(followers={**leader.followers, name: follower})


def cell_for(leader: Leader, cell: Cell) -> Cell:
    """Returns what the leader writes over a cell that it has locked, with its proposal once phase 1 is complete."""
    if leader.mandate and leader.proposal:
        return write(cell, leader.node.committed, Accepted(leader.proposal, leader.node.term))
    is_next = cell.accepted is not None and cell.accepted.entry.parent == id_of(leader.node.committed)
    return write(cell, leader.node.committed, cell.accepted if is_next else None)


def on_cell_written(leader: Leader, endpoint: int, cell: Cell) -> Leader:
    """Returns the leader after the endpoint has taken a cell of `cell_for`."""
    proposal = leader.proposal if leader.mandate else None  # it may be newer than the cell that was written
    has_proposal = proposal is not None and cell.accepted == Accepted(proposal, leader.node.term)
    view = View(cell.incarnation, cell.log, cell.committed, cell.accepted, has_proposal)
    if has_proposal and proposal is not None:
        leader = leader.replace(node=_having_accepted(leader, proposal))
    return _with_view(leader, endpoint, view)


def _with_view(leader: Leader, endpoint: int, view: View) -> Leader:
    return leader.replace(views=(*leader.views[:endpoint], view, *leader.views[endpoint + 1 :]))


def commit(leader: Leader) -> Leader | None:
    """Phase 2: the leader after its proposal was committed; `None` if votes are missing."""
    proposal = leader.proposal
    if proposal is None or not leader.mandate or is_withheld(leader):
        return None
    if not voting.is_within(voting.mandate(configuration_of(leader), phase_2_votes(leader, proposal)), leader.mandate):
        return None
    return _at_phase_1(leader.replace(proposal=None), proposal)


def phase_2_votes(leader: Leader, proposal: Entry) -> Votes:
    mine = Accepted(proposal, leader.node.term)
    statuses = {name: each.status for name, each in leader.followers.items()}
    statuses.update({each.name: each.status for each in leader.node.ended_followers})
    acks = {name: status for name, status in statuses.items() if status.accepted == mine}
    views = [view if view and view.has_proposal else None for view in own_views(leader)]
    if not counts_itself(leader):  # nor does it speak for others
        return _votes(leader, frozenset(acks), acks.values(), (), views)
    answered = frozenset({*acks, leader.node.name} if leader.node.accepted == mine else acks)
    return _votes(leader, answered, acks.values(), leader.node.ended_followers, views)


def counts_itself(leader: Leader) -> bool:
    """Phase 2, the leader's own vote: it counts once the kernel has its plan for each follower that it has welcomed.

    Those nodes may read its end and speak for it (rule 5b).  A closed connection has no plan that could be late, and
    the node at its other end proves nothing.
    """
    return all(each.has_plan for each in leader.followers.values() if each.is_open and each.is_welcomed)
