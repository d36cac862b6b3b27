"""What a member knows that its agent's part in elections is to know."""

from __future__ import annotations

from collections.abc import Callable

from aelastic.rdzv.leader_record import Candidate
from aelastic.rdzv.member.member import Member
from aelastic.rdzv.member.member_events import Phase
from aelastic.rdzv.survivors import election_events as ev
from aelastic.rdzv.survivors.election import Election
from aelastic.rdzv.survivors.election_events import Phase as ElectionPhase


def election_news(member: Member, election: Election, candidate: Callable[[], Candidate]) -> list[ev.Event]:
    """What has changed for the election with the member's last event.

    Args:
        member: after the event.
        election: of the same agent.
        candidate: makes the candidacy that others would follow.
    """
    news: list[ev.Event] = []
    if member.state.seats is not None and member.state.seats is not election.seats:
        news.append(ev.Seated(member.state.seats))
    match member.phase:
        case Phase.MEMBER:
            assert member.record is not None
            known, epoch = election.record, member.leader.epoch
            is_known = known is not None and (known.epoch, known.candidate) == (epoch, member.record.candidate)
            if not is_known or election.phase is not ElectionPhase.FOLLOWING:
                news.append(ev.Followed(member.record, epoch))
        case Phase.IDLE | Phase.OVER:
            pass  # this node has no workers
        case Phase.READING | Phase.CAMPAIGNING | Phase.PAUSING | Phase.CONNECTING | Phase.GREETING:
            since, is_dead = member.state.alone_since, member.leader.is_dead
            is_news = election.lost is None or (is_dead and not election.lost.is_dead)
            if since is not None and is_news and election.has_vote and not member.is_leader:
                news.append(ev.Lost(since, is_dead, candidate()))
    return news
