"""What one node of a job does, or what becomes of it: events that cost the same in a job of any size.

Each story is told up to an event that several nodes bring about, one after the other; what it yields is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from kit.costs.terms import (
    HANGS,
    MORE,
    NOTICE,
    act,
    asked,
    come,
    decided,
    doubtful,
    draining,
    due,
    gathered,
    greets,
    join,
    names,
    over,
    pass_until,
    past,
    published,
    running,
    said,
    says,
    taking_over,
)
from kit.stories.leader_terms import FAILURE, LEASE_S, RENEWED, Term, node
from kit.visits import Act, Name


def all_but_one_more(count: int) -> int:
    return count - MORE - 1


# A round that forms.


def a_connection_opens(count: int) -> Iterator[Act]:
    term = gathered(count)
    for number in range(MORE):
        yield act(term, ev.Opened(9000 + number, "10.0.0.9", "10.0.0.100"))


a_node_greets = come(gathered)


def a_node_greets_with_a_node_rank(count: int) -> Iterator[Act]:
    term = Term((count + MORE + 1, count + MORE + 1))
    for rank, name in enumerate(names(count)):
        join(term, name, rank)
    for rank, name in enumerate(names(MORE, count)):
        yield greets(term, name, rank=rank)  # that another has, which is asked whether it lives


a_node_is_alive = says(gathered, lambda _: m.Alive())
a_node_is_ready = says(gathered, lambda name: m.Ready(node(name)))
a_node_that_waits_has_prepared = says(gathered, lambda name: m.Prepared(name, m.Starts.WARM))
a_node_says_what_its_workers_do = says(asked, lambda name: m.Saw(name, 1, ()))
another_node_finds_the_same_hang = says(asked, lambda name: HANGS.replace(node_id=name))
a_node_that_waits_leaves = says(gathered, lambda name: m.Left(name, "SIGTERM"))


def a_connection_brings_garbage(count: int) -> Iterator[Act]:
    term = gathered(count)
    for name in names(MORE):
        yield act(term, ev.Garbled(term.conns[name], "no message of ours", False))


def a_connection_breaks(count: int) -> Iterator[Act]:
    term = gathered(count)
    for name in names(count - MORE):
        term.tell(ev.Closed(term.conns[name], is_reset=True))
    for name in names(MORE, count - MORE):
        yield act(term, ev.Closed(term.conns[name], is_reset=True))


a_node_hangs_up = says(gathered, lambda _: m.HungUp())


def a_node_is_not_back_in_its_grace(count: int) -> Iterator[Act]:
    term = gathered(count)
    for name in names(count):
        term.close(name)
        term.now += 1e-4
    for _ in range(MORE):
        yield due(term)


def a_node_is_silent_for_a_lease(count: int) -> Iterator[Act]:
    term = gathered(count)
    for name in names(count):
        term.say(name, m.Alive())
        term.now += 1e-4
    pass_until(term, lambda: (term.leader.sessions.deadline or 0) <= (term.leader.deadline or 0))
    for _ in range(MORE):
        yield due(term)


def an_agent_that_is_alone_looks_around(count: int) -> Iterator[Act]:
    term = Term((count + 9, count + 9))
    term.coordinator.own_node_id = Name("own")
    term.leader.is_replaceable = True
    for name in [Name("own"), *names(count)]:
        join(term, name)
    term.live_until(term.now + 1.1 * LEASE_S, *names(count))
    for _ in range(MORE):
        term.say("own", m.Alive())
        yield due(term)
        if term.leader.lease.is_asked:
            term.tell(RENEWED)


def an_agent_greets_that_knows_a_newer_epoch(count: int) -> Iterator[Act]:
    term = gathered(0, count + MORE + 1)
    for name in names(count):
        join(term, name, seen_epoch=9)
    for name in names(MORE, count):
        yield greets(term, name, seen_epoch=9)


# A round that runs.


a_node_of_the_round_is_alive = says(running, lambda _: m.Alive(1))


def a_node_of_the_round_is_back(count: int) -> Iterator[Act]:
    term = running(count)
    for rank, name in enumerate(names(MORE)):
        term.close(name)
        yield greets(term, name, past=m.Past(m.Standing.BUSY, 1, 0, rank, count))


def a_node_is_back_that_has_missed_its_ranks(count: int) -> Iterator[Act]:
    term = running(count)
    for name in names(MORE):
        term.close(name)
        yield greets(term, name)


a_node_of_a_round_that_went_on_is_back = come(
    partial(running, room=MORE), lambda count, _: m.Past(m.Standing.BUSY, 1, 0, 0, count)
)
a_newcomer_greets = come(partial(running, room=MORE))


def a_spare_greets(count: int) -> Iterator[Act]:
    term = running(count)
    for name in names(count, count):
        join(term, name)
    for name in names(MORE, 2 * count):
        yield greets(term, name)


def newcomers_are_looked_at(count: int) -> Iterator[Act]:
    """Of as many as run, one after the other has imported."""
    term = running(count, room=count + 1)
    for name in names(count, count):
        join(term, name, starts=m.Starts.PREPARING)
    term.pass_deadline()
    for name in names(MORE, count):
        yield said(term, name, m.Prepared(name, m.Starts.WARM))


a_node_has_succeeded = says(running, lambda name: m.Succeeded(name, 1), all_but_one_more)


def a_node_of_the_round_breaks(count: int) -> Iterator[Act]:
    term = running(count)
    for name in names(count - MORE):
        term.tell(ev.Closed(term.conns[name], is_reset=True))
    for name in names(MORE, count - MORE):
        yield act(term, ev.Closed(term.conns[name], is_reset=True))


# Its end.


def another_node_fails(count: int) -> Iterator[Act]:
    term = over(count)
    for name in names(MORE, 1):
        yield said(term, name, m.Failed(name, 1, FAILURE))


another_node_fails_before_all_know = says(running, lambda name: m.Failed(name, 1, FAILURE), lambda count: count - MORE)
another_node_is_ready_again = says(over, lambda name: m.Ready(node(name)), all_but_one_more)
another_node_leaves = says(over, lambda name: m.Left(name, "SIGTERM"), all_but_one_more)


def another_node_is_lost(count: int) -> Iterator[Act]:
    term = over(count)
    for name in names(count - 1):
        term.close(name)
        term.now += 1e-4
    for _ in range(count - 1 - MORE):
        term.pass_deadline()
    for _ in range(MORE):
        yield due(term)


def another_node_is_back_after_its_connection_broke(count: int) -> Iterator[Act]:
    term = over(count)
    for name in names(count):
        term.tell(ev.Closed(term.conns[name], is_reset=True))
    for rank, name in enumerate(names(count)):
        greeting = greets(term, name, past=m.Past(m.Standing.STOPPING, 1, 1, rank, count))
        if rank < count - MORE:
            term.tell(greeting.event)
        else:
            yield greeting


# A new coordinator.


a_node_takes_its_seat = come(taking_over, lambda count, rank: past(rank, count + MORE + 1))


def a_node_takes_its_seat_where_many_have_finished(count: int) -> Iterator[Act]:
    term = taking_over(9, departed=count)
    for rank, name in enumerate(names(MORE, 9 + count), 9 + count):
        yield greets(term, name, past=past(rank, count + 9 + MORE + 1))


a_node_with_a_seat_is_ready = says(taking_over, lambda name: m.Ready(node(name)))
a_node_with_a_seat_has_succeeded = says(taking_over, lambda name: m.Succeeded(name, 7))
a_node_with_a_seat_fails = says(taking_over, lambda name: m.Failed(name, 7, FAILURE))
a_node_with_a_seat_leaves = says(taking_over, lambda name: m.Left(name, "SIGTERM"))
# While the board is away, and after the verdict.


def a_node_is_back_once_more_while_decisions_wait(count: int) -> Iterator[Act]:
    term = doubtful(count)
    for _ in range(2):
        for rank, name in enumerate(names(count)):
            join(term, name, past=m.Past(m.Standing.BUSY, 1, 0, rank, count))
    for rank, name in enumerate(names(MORE, count // 2), count // 2):
        yield greets(term, name, past=m.Past(m.Standing.BUSY, 1, 0, rank, count))


def the_verdict_cannot_be_published(count: int) -> Iterator[Act]:
    term = decided(count)
    for _ in range(MORE):
        yield act(term, ev.PublishFailed())


def it_is_seen_whether_all_were_heard(count: int) -> Iterator[Act]:
    term = decided(count)
    for name in names(count - 1, 1):  # all but one
        term.say(name, m.Alive())
    for _ in range(MORE):
        yield due(term)


def a_node_has_heard_the_verdict(count: int) -> Iterator[Act]:
    term = published(count)
    for name in names(MORE):
        yield act(term, ev.Closed(term.conns[name]))


a_node_comes_after_the_verdict = come(published)
a_node_shows_something = says(running, lambda name: r.Fetched(name, names(1)[0], "ask", "", "text"))
a_node_wants_to_see_something_of_one = says(running, lambda name: r.Fetch(name, "ask", r.What.LOG, names(1)[0], 0))
a_node_holds_its_ranks = says(draining, lambda name: r.Frozen(name, NOTICE, 7, 2, 0))


def a_node_has_saved(count: int) -> Iterator[Act]:
    term = draining(count)
    for name in names(count):
        term.say(name, r.Frozen(name, NOTICE, 7, 2, 0))
    for name in names(MORE):
        yield said(term, name, r.Saved(name, NOTICE))
