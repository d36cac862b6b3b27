"""Whether a coordinator can mean what it says, by what this agent was started with and what its node knows.

The story behind it: what has reached the board names itself as leader, and says that a lease lasts 0 s, or that nodes
of an epoch that never was have a vote.  It goes, and what it said would stay: no lease is kept, no round may begin.  So
a coordinator that contradicts this agent is not followed, and what it said is void (`sense.py` asks for the rest).
"""

from __future__ import annotations

from aelastic.rdzv.leader_record import LeaderRecord
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.node_state import NodeState
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import verdict_from_text


def objection(message: m.Downward, terms: m.Terms, state: NodeState, read: int, epoch: int) -> str:
    """What in a coordinator's message cannot be; empty if it may all be.

    Args:
        message: that has come in.
        terms: what this agent was started with.
        state: of its node.
        read: the coordinator's epoch, as its node has read it on the board.
        epoch: the newest that has welcomed its node.
    """
    match message:
        case m.Plan(_, lease_s) if lease_s != terms.lease_s:
            return f"Plan.lease_s is {lease_s:g}, and this agent was started with {terms.lease_s:g}"
        case m.Plan(newer) if newer > max(read, epoch) + m.EPOCHS_AHEAD_MAX:
            return f"Plan.epoch is {newer}, and the last one known is {max(read, epoch)}"
        case m.Plan():
            return _objection_to_round(message, terms, state)
        case m.Seats(fence, round_) if m.epoch_of(fence, round_) > epoch:
            return f"Seats.fence is {fence}, and the newest epoch is {epoch}"
        case m.Seats() if message.closing_epoch > epoch:
            return f"Seats.closing.epoch is {message.closing_epoch}, and the newest epoch is {epoch}"
        case m.Seats() if len(message.seats) > terms.max_nodes:
            return f"Seats.seats are {len(message.seats)}, and {terms.max_nodes} nodes may join"
        case _:
            return ""


def _objection_to_round(plan: m.Plan, terms: m.Terms, state: NodeState) -> str:
    """What in a plan's rounds cannot be."""
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


def not_followed(record: LeaderRecord, why: str) -> str:
    """What the user reads of such a coordinator."""
    where = f"{next(iter(record.candidate.addresses), 'an unknown host')}:{record.candidate.port}"
    return f"ignoring the leader at {where}, which sent an invalid message: {why}"


def last_word(verdict: str) -> ev.Deliver | ev.GiveUp:
    """What follows from the verdict on the board, which any program may have written."""
    if (ended := verdict_from_text(verdict)) is not None:
        return ev.Deliver(ended)
    return ev.GiveUp("the job has ended, but its result in the rendezvous store is unreadable", is_refused=False)
