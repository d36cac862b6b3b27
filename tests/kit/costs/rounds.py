"""What happens to a whole job: these events may cost as much as they change, and no more.

Each is a story of its own, as in `nodes.py`; what it yields is measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from kit.costs.terms import (
    DRAIN,
    HANGS,
    MORE,
    NOTICE,
    act,
    asked,
    decided,
    doubtful,
    draining,
    due,
    first_says,
    gathered,
    greets,
    join,
    last_says,
    names,
    once,
    over,
    pass_until,
    past,
    running,
    said,
    taking_over,
)
from kit.stories.leader_terms import FAILURE, LEASE_S, RENEWED, Term, node, reclaimed
from kit.visits import Act

the_first_round_begins = once(lambda count: greets(gathered(count - 1, room=1), names(1, count)[0]))
the_next_round_begins = last_says(over, lambda name: m.Ready(node(name)))
a_failure_ends_the_round = first_says(running, m.Failed(names(1)[0], 1, FAILURE))
all_nodes_are_asked_what_their_workers_do = first_says(running, HANGS)
what_all_workers_do_is_compared = last_says(asked, lambda name: m.Saw(name, 1, ()))
all_nodes_hold_their_ranks = first_says(running, DRAIN)
a_call_to_save_at_is_named = last_says(draining, lambda name: r.Frozen(name, NOTICE, 7, 2, 0))


def all_nodes_hear_why_the_round_is_over(count: int) -> Iterator[Act]:
    term = running(count)
    term.say(names(1)[0], m.Failed(names(1)[0], 1, FAILURE.replace(exitcode=1)))
    yield due(term)


def all_nodes_hear_that_the_end_costs_nothing(count: int) -> Iterator[Act]:
    term = running(count)
    term.say(names(1)[0], m.Failed(names(1)[0], 1, FAILURE.replace(exitcode=1)))
    term.pass_deadline()
    yield said(term, names(1, 1)[0], m.Left(names(1, 1)[0], "SIGTERM", age_s=9.0))


def an_earlier_failure_is_heard_of_and_each_loss_weighed(count: int) -> Iterator[Act]:
    term = over(count)
    for name in names(count - 2, 2):
        term.tell(ev.Closed(term.conns[name], is_reset=True))
    yield said(term, names(1, 1)[0], m.Failed(names(1, 1)[0], 1, FAILURE, age_s=99.0))


def a_node_that_does_not_stop_its_workers_is_given_up(count: int) -> Iterator[Act]:
    term = over(count, join_timeout_s=3.0)
    for name in names(count // 2):
        term.say(name, m.Ready(node(name)))
    while term.coordinator.deadline is None or term.now < term.coordinator.deadline:
        for name in names(count):
            term.say(name, m.Alive())
        deadline = due(term)
        if term.coordinator.is_due(term.now):
            yield deadline
            return
        if ev.Renew() in term.tell(deadline.event):
            term.tell(RENEWED)


def newcomers_end_the_round(count: int) -> Iterator[Act]:
    term = running(count, room=count)
    for name in names(count - 1, count):
        join(term, name)
    yield due(term)


def a_node_that_has_finished_leaves_and_all_hear_so(count: int) -> Iterator[Act]:
    term = running(count)
    name = names(count)[-1]
    term.say(name, m.Succeeded(name, 1))
    yield said(term, name, m.Left(name, "SIGTERM"))


def a_node_is_back_that_has_missed_who_departed(count: int) -> Iterator[Act]:
    term = running(count + 2)
    for name in names(count):
        term.say(name, m.Succeeded(name, 1))
    for name in names(count):
        term.say(name, m.Left(name, "SIGTERM"))
    name = names(count + 2)[-1]
    term.close(name)
    yield greets(term, name, past=m.Past(m.Standing.BUSY, 1, 0, count + 1, count + 2))


def all_nodes_read_what_is_waited_for(count: int) -> Iterator[Act]:
    term = gathered(count)
    yield due(pass_until(term, lambda: term.leader.deadline == term.leader._waiting_text_at, *names(count)))


def nodes_that_have_finished_read_what_is_waited_for(count: int) -> Iterator[Act]:
    term = running(count)
    for name in names(count // 2):
        term.say(name, m.Succeeded(name, 1))
    yield due(pass_until(term, lambda: term.leader.deadline == term.leader._waiting_text_at, *names(count)))


def a_renewal_is_a_heartbeat_for_all(count: int) -> Iterator[Act]:
    term = gathered(count)
    term.pass_time_until_renewal()
    yield act(term, RENEWED)


def a_failed_renewal_is_one_too(count: int) -> Iterator[Act]:
    term = gathered(count)
    term.pass_time_until_renewal()
    yield act(term, ev.RenewFailed("no answer"))


def all_hear_of_a_new_epoch(count: int) -> Iterator[Act]:
    term = gathered(count)
    join(term, names(1, count)[0], seen_epoch=9)
    yield act(term, reclaimed(10))


def agents_that_waited_for_an_epoch_are_welcomed(count: int) -> Iterator[Act]:
    term = gathered(0, room=count + MORE)
    for name in names(count):
        join(term, name, seen_epoch=9)
    yield act(term, reclaimed(10))


the_coordinator_leaves = once(lambda count: act(gathered(count), ev.Resigned()))


def an_agent_that_has_slept_gives_all_another_lease(count: int) -> Iterator[Act]:
    term = gathered(count)
    term.now += 60.0
    yield act(term, ev.DeadlinePassed())


def all_are_silent_at_once(count: int) -> Iterator[Act]:
    term = gathered(count)
    yield due(pass_until(term, lambda: (term.leader.sessions.deadline or 0.0) <= (term.leader.deadline or 0.0)))


def an_agent_that_hears_no_other_stands_back(count: int) -> Iterator[Act]:
    term = running(count)
    term.coordinator.own_node_id, term.leader.is_replaceable = names(1)[0], True
    silent_at = term.now + LEASE_S
    while (term.leader.deadline or 0.0) < silent_at:
        if ev.Renew() in term.pass_deadline():
            term.tell(RENEWED)
        term.say(names(1)[0], m.Alive())
    yield due(term)


def what_has_waited_for_the_board_is_decided(count: int) -> Iterator[Act]:
    term = doubtful(count)
    for name in names(count - 1):
        term.say(name, m.Succeeded(name, 1))
    term.pass_time_until_renewal()
    yield act(term, RENEWED)


def the_verdict_is_held(count: int) -> Iterator[Act]:
    term = running(count, max_restarts=0)
    term.say(names(1)[0], m.Failed(names(1)[0], 1, FAILURE))
    yield due(term)


all_hear_the_verdict = once(lambda count: act(decided(count), ev.Published(True)))
all_succeed = last_says(running, lambda name: m.Succeeded(name, 1))


def a_round_is_taken_over(count: int) -> Iterator[Act]:
    term = taking_over(count)
    for rank, name in enumerate(names(MORE, count), count):
        join(term, name, past=past(rank, count + MORE + 1))
    last = names(1, count + MORE)[0]
    yield greets(term, last, past=past(count + MORE, count + MORE + 1))


def a_takeover_ends_without_some(count: int) -> Iterator[Act]:
    term = taking_over(count)
    yield due(pass_until(term, lambda: term.coordinator.deadline in {None, term.leader.deadline}, *names(count)))


a_newer_round_than_that_of_all_others_shows_itself = once(
    lambda count: greets(taking_over(count), names(1, count)[0], past=past(0, 2).replace(round=8))
)


def nodes_with_one_node_rank_are_told_apart(count: int) -> Iterator[Act]:
    term = Term((2, 2 * count))
    join(term, names(1)[0], 0)
    for name in names(count, 1):
        join(term, name, 0)
    yield said(term, names(1)[0], m.Alive())
