"""What one node does, or one worker, or what becomes of it: events that cost the same however many there are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from aelastic.group import events as g
from aelastic.hangs import hang_rules, timer_rules
from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.member import member_events as me
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from kit.costs import terms as t
from kit.costs.terms import MORE, NOTICE, NOW, WALL, Job, all_but_more, all_but_one_more, comes, each, each_node, says
from kit.stories import member as members
from kit.stories.leader_terms import FAILURE, RENEWED, node
from kit.visits import Act

# A round that forms.

a_connection_opens = each(t.gathered, lambda number: ev.Opened(9000 + number, "10.0.0.9", "10.0.0.100"))
a_node_greets = comes(t.gathered)
a_node_greets_with_a_node_rank = comes(  # that another has, which is asked whether it lives
    t.with_ranks, lambda term, name: t.greets(term, name, rank=t.number_of(name) % MORE)
)
an_agent_greets_that_knows_a_newer_epoch = comes(
    t.knowing_of_another_epoch, lambda term, name: t.greets(term, name, seen_epoch=9)
)
a_node_is_alive = says(t.gathered, lambda _: m.Alive())
a_node_is_ready = says(t.gathered, lambda name: m.Ready(node(name)))
a_node_that_waits_has_prepared = says(t.gathered, lambda name: m.Prepared(name, m.Starts.WARM))
a_node_that_waits_leaves = says(t.gathered, lambda name: m.Left(name, "SIGTERM"))
a_node_hangs_up = says(t.gathered, lambda _: m.HungUp())
a_connection_brings_garbage = each_node(
    t.gathered, lambda term, name: t.act(term, ev.Garbled(term.conns[name], "no message of ours", False))
)
a_connection_breaks = each_node(t.gathered, t.breaks, before=all_but_more)
a_node_is_not_back_in_its_grace = each_node(t.closed_one_after_the_other, t.due)
a_node_is_silent_for_a_lease = each_node(t.silent, t.due)


def _looks_around(term: Job, _: str) -> Act:
    if term.leader.lease.is_asked:
        term.tell(RENEWED)
    term.say("own", m.Alive())
    return t.due(term)


an_agent_that_is_alone_looks_around = each_node(t.alone, _looks_around)


# A round that runs.


def _is_back(term: Job, name: str) -> Act:
    term.close(name)
    return t.comes_back(term, name)


def _is_back_without_ranks(term: Job, name: str) -> Act:
    term.close(name)
    return t.greets(term, name)


a_node_of_the_round_is_alive = says(t.running, lambda _: m.Alive(1))
a_node_of_the_round_is_back = each_node(t.running, _is_back)
a_node_is_back_that_has_missed_its_ranks = each_node(t.running, _is_back_without_ranks)
a_node_of_a_round_that_went_on_is_back = comes(
    partial(t.running, room=MORE),
    lambda term, name: t.greets(term, name, past=m.Past(m.Standing.BUSY, 1, 0, 0, term.size)),
)
a_newcomer_greets = comes(partial(t.running, room=MORE))
a_spare_greets = comes(t.with_spares, start=lambda count: 2 * count)
newcomers_are_looked_at = says(t.with_newcomers, lambda name: m.Prepared(name, m.Starts.WARM), start=t.all_of_them)
a_node_has_succeeded = says(t.running, lambda name: m.Succeeded(name, 1), all_but_one_more)
a_node_of_the_round_breaks = each_node(t.running, t.breaks, before=all_but_more)
a_node_says_what_its_workers_do = says(t.asked, lambda name: m.Saw(name, 1, ()))
another_node_finds_the_same_hang = says(t.asked, lambda name: t.HANGS.replace(node_id=name))
a_node_shows_something = says(t.running, lambda name: r.Fetched(name, t.FIRST, "ask", "", "text"))
a_node_wants_to_see_something_of_one = says(t.running, lambda name: r.Fetch(name, "ask", r.What.LOG, t.FIRST, 0))
a_node_holds_its_ranks = says(t.draining, t.frozen)
a_node_has_saved = says(
    lambda count: t.after(t.names(count), t.draining(count), t.frozen), lambda name: r.Saved(name, NOTICE)
)

# Its end.

another_node_fails = says(t.over, lambda name: m.Failed(name, 1, FAILURE), start=lambda _: 1)
another_node_fails_before_all_know = says(t.running, lambda name: m.Failed(name, 1, FAILURE), all_but_more)
another_node_is_ready_again = says(t.over, lambda name: m.Ready(node(name)), all_but_one_more)
another_node_leaves = says(t.over, lambda name: m.Left(name, "SIGTERM"), all_but_one_more)


def another_node_is_lost(count: int) -> Iterator[Act]:
    term = t.over(count)
    for name in t.names(count - 1):
        term.close(name)
        term.now += 1e-4
    for _ in range(count - 1 - MORE):
        term.pass_deadline()
    for _ in range(MORE):
        yield t.due(term)


def _all_connections_broken(count: int) -> Job:
    term = t.over(count)
    for name in t.names(count):
        term.tell(t.breaks(term, name).event)
    return term


another_node_is_back_after_its_connection_broke = each_node(
    _all_connections_broken,
    lambda term, name: t.greets(term, name, past=m.Past(m.Standing.STOPPING, 1, 1, t.number_of(name), len(term.conns))),
    before=all_but_more,
)

# A new coordinator.

a_node_takes_its_seat = comes(t.taking_over, t.takes_its_seat)
a_node_takes_its_seat_where_many_have_finished = comes(
    lambda count: t.taking_over(9, departed=count), t.takes_its_seat, start=lambda count: 9 + count
)
a_node_with_a_seat_is_ready = says(t.taking_over, lambda name: m.Ready(node(name)))
a_node_with_a_seat_has_succeeded = says(t.taking_over, lambda name: m.Succeeded(name, 7))
a_node_with_a_seat_fails = says(t.taking_over, lambda name: m.Failed(name, 7, FAILURE))
a_node_with_a_seat_leaves = says(t.taking_over, lambda name: m.Left(name, "SIGTERM"))

# While the board is away, and after the verdict.


def _back_twice(count: int) -> Job:
    term = t.doubtful(count)
    for name in 2 * t.names(count):
        term.tell(t.comes_back(term, name).event)
    return term


a_node_is_back_once_more_while_decisions_wait = comes(_back_twice, t.comes_back, start=lambda count: count // 2)
the_verdict_cannot_be_published = each(t.decided, lambda _: ev.PublishFailed())
it_is_seen_whether_all_were_heard = each_node(
    lambda count: t.after(t.names(count - 1, 1), t.decided(count)), t.due
)  # all but one
a_node_has_heard_the_verdict = each_node(t.published, lambda term, name: t.act(term, ev.Closed(term.conns[name])))
a_node_comes_after_the_verdict = comes(t.published)

# A worker of a node.

_ended = partial(g.Exited, 1, failure=None)
_failed = partial(g.Exited, 1, failure=t.FAILURE)
_cleared = partial(g.Cleared, 1)
_hangs = partial(g.FoundUnhealthy, 1, failure=t.FAILURE, signum=15)

a_worker_succeeds = each(t.working, _ended)
a_worker_that_has_succeeded_is_gone = each(lambda count: t.working(count, *map(_ended, range(count))), _cleared)
a_worker_that_is_stopped_ends = each(lambda count: t.working(count, _failed(0)), _failed, start=lambda _: 1)
a_worker_that_was_stopped_is_gone = each(lambda count: t.working(count, *map(_failed, range(count))), _cleared)
another_worker_hangs = each(
    lambda count: t.working(count, *map(_hangs, range(all_but_more(count)))), _hangs, start=all_but_more
)
workers_are_to_save = t.then(t.working, g.Drained(1, tuple(range(MORE)), NOW + 60))
a_worker_that_is_watched_ends = each(t.watched, hang_rules.Ended)
a_timer_is_set = each(t.timed, lambda number: t.timer_line(9000 + number, WALL + 30))
a_timer_is_cleared = each(t.timed, lambda number: t.timer_line(number, -1.0))


def a_timer_expires(count: int) -> Iterator[Act]:
    timers = t.timed(count)
    for number in range(MORE):
        yield Act(timers.core, timer_rules.DeadlinePassed(), NOW + 60 + number)


def a_process_of_a_worker_is_found_to_be_one(count: int) -> Iterator[Act]:
    timers = t.timed(count)
    for pid in range(100, 100 + MORE):
        timers.tell(t.timer_line(0, WALL + 60, pid))
        yield t.act(timers, timer_rules.Belongs(1, pid, 0))


# An agent in a job of many nodes.

_LOST, _REFUSED = me.ConnectionLost(1, "connection closed"), me.ConnectFailed(2, True, "refused")


def _hears(*events: me.Event) -> t.Story:
    """The last of some events is measured."""
    return t.then(lambda count: t.member_of(count, *events[:-1]), events[-1])


a_node_hears_that_another_has_departed = each(t.member_of, t.departed, start=lambda _: 9000)
a_node_hears_a_heartbeat = each(t.member_of, lambda renewals: me.Received(1, m.Heartbeat(renewals)))
a_node_loses_the_coordinator = _hears(_LOST)
a_node_does_not_reach_the_coordinator = _hears(_LOST, _REFUSED)
a_node_reads_the_board = _hears(_LOST, _REFUSED, me.BoardRead(members.record()))
a_node_cannot_read_the_board = _hears(_LOST, _REFUSED, me.BoardFailed("no answer"))
a_node_is_not_to_lead = _hears(_LOST, _REFUSED, me.BoardRead(None), me.NotEligible())
a_node_leads_no_longer = _hears(me.LeadershipLost())
a_node_says_that_it_has_succeeded = _hears(me.Submitted(m.Succeeded("me", 1)))


def a_node_is_due_to_say_that_it_lives(count: int) -> Iterator[Act]:
    story = t.member_of(count)
    assert story.core.deadline is not None
    yield Act(story.core, me.DeadlinePassed(), story.core.deadline)
