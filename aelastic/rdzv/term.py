"""The term of an agent that has just been elected, by the board or by the nodes of a round."""

from __future__ import annotations

from aelastic.rdzv.coordinator.connections import Connections
from aelastic.rdzv.coordinator.coordinator import Coordinator
from aelastic.rdzv.coordinator.leader import Leader
from aelastic.rdzv.leader_record import LeaderRecord
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.survivors.electorate import Electorate
from aelastic.rdzv.survivors.leadership import LeaderLease


def begin_term(
    coordinator: Coordinator,
    terms: m.Terms,
    record: LeaderRecord,
    campaigned_at: float,
    *,
    has_fixed_ranks: bool = False,
    has_elections: bool = False,
    is_replaceable: bool = False,
) -> Leader:
    """The term of an agent that has just been elected.

    Args:
        coordinator: decides.
        terms: what each agent must have been told.
        record: the election's, as the board has it.
        campaigned_at: when the board was asked for it.
        has_fixed_ranks: a node rank is a command, so a second node cannot do without the one it came with.
        has_elections: nodes of a round may elect a coordinator among themselves.
        is_replaceable: another agent can coordinate, and reach the board without this one.
    """
    coordinator.roster.begin_epoch(record.epoch)
    electorate = Electorate(is_on=has_elections, is_on_board=not record.is_elected)
    electorate.on_board_knows(record.seats)
    if electorate.rounds:
        coordinator.forming.await_confirmation()  # their nodes are to be heard first
    token, epoch, looks_s = record.candidate.token, record.epoch, coordinator.rules.join_timeout_s
    sessions = Connections(terms, token, epoch, looks_s, has_fixed_ranks=has_fixed_ranks, electorate=electorate)
    lease = LeaderLease(record.epoch, terms.lease_s, campaigned_at, record.renewals or 0)
    return Leader(coordinator, sessions, lease, is_replaceable)
