"""Whether a leader's claims can be true, judged from this agent's settings and the knowledge of its node.

The story behind it: a program that can write to the endpoint names itself as leader, and claims that a lease lasts 0 s,
or that nodes of a term that never existed have a vote.  It goes away, but its claims would remain: no lease is kept,
and no round may begin.  So a leader that contradicts this agent is not followed, and its claims are void
(`sense.py` checks the rest).
"""

from __future__ import annotations

from aelastic.rdzv.leader.job_state import state_in
from aelastic.rdzv.log.entries import Entry
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.node_state import NodeState
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import WireError
from aelastic.rdzv.protocol.sense import is_too_high


def objection(message: m.Downward, terms: m.Terms, state: NodeState, term: int) -> str:
    """Returns what in a leader's message cannot be true; empty if all of it may be.

    Args:
        message: the message that came in.
        terms: the settings that this agent was started with.
        state: the state of its node.
        term: the highest term that it knows of.
    """
    if not isinstance(message, m.Plan):
        return ""
    if message.lease_s != terms.lease_s:
        return f"Plan.lease_s is {message.lease_s:g}, and this agent was started with {terms.lease_s:g}"
    if is_too_high(message.term, term):
        return f"Plan.term is {message.term}, and the last one known is {term}"
    return _objection_to_round(message, terms, state)


def _objection_to_round(plan: m.Plan, terms: m.Terms, state: NodeState) -> str:
    """Returns what in a plan's rounds cannot be true."""
    for decided in (plan.assigned, plan.interrupted):
        if decided is not None and decided.restart_count > terms.max_restarts:
            name, count = type(decided).__name__, decided.restart_count
            return f"{name}.restart_count is {count}, and --max-restarts is {terms.max_restarts}"
    if plan.assigned is None:
        return ""
    ranks, own = plan.assigned.ranks, state.node and state.node.local_world_size
    if ranks.group_world_size > terms.max_nodes:
        return f"Assigned.ranks.group_world_size is {ranks.group_world_size}, and {terms.max_nodes} nodes may join"
    if ranks.local_world_size != own:
        return f"Assigned.ranks.local_world_size is {ranks.local_world_size}, and this node has {own}"
    return ""


def not_followed(leader: m.LeaderAt, why: str) -> str:
    """Returns the message for the user about such a leader."""
    where = f"{next(iter(leader.addresses), 'an unknown host')}:{leader.port}"
    return f"ignoring the leader at {where}, which sent an invalid message: {why}"


def verdict_in(entry: Entry) -> ev.Deliver | ev.GiveUp:
    """Returns what follows from the verdict in the cell, which any program may have written."""
    try:
        verdict = state_in(entry).verdict
    except WireError:
        verdict = None
    if verdict is not None:
        return ev.Deliver(verdict)
    return ev.GiveUp("the job has ended, but its result in the rendezvous store is unreadable", is_refused=False)
