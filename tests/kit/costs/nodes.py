"""What one node of a job does, or what becomes of it: events that cost the same in a job of any size.

Each story is told up to an event that several nodes bring about, one after the other; what it yields is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from kit.costs.terms import (
    HANGS,
    MORE,
    act,
    decided,
    doubtful,
    due,
    gathered,
    greets,
    join,
    names,
    over,
    past,
    running,
    said,
    taking_over,
)
from kit.stories.leader_terms import FAILURE, LEASE_S, RENEWED, Term, node
from kit.visits import Act, Name


def draining(count: int) -> Term:
    """All nodes are asked to hold their ranks."""
    term = running(count)
    name = names(1)[0]
    term.say(name, r.Ask(name, "ask", r.Verb.DRAIN, "", 60.0, "spot"))
    return term


def asked(count: int) -> Term:
    """A node has found that one of its workers hangs, and the others are asked."""
    term = running(count)
    term.say(names(1)[0], HANGS)
    return term


def notice_of(term: Term) -> int:
    return term.coordinator.drain.notice_id


# What one node after the other says: in which term, the first ones or the last ones, and what.
SAID: dict[str, tuple[Callable[[int], Term], bool, Callable[[Term, Name], m.Upward]]] = {
    "a_node_is_alive": (gathered, True, lambda _, name: m.Alive()),
    "a_node_is_ready": (gathered, True, lambda _, name: m.Ready(node(name))),
    "a_node_that_waits_has_prepared": (gathered, True, lambda _, name: m.Prepared(name, m.Starts.WARM)),
    "a_node_that_waits_leaves": (gathered, True, lambda _, name: m.Left(name, "SIGTERM")),
    "a_node_hangs_up": (gathered, True, lambda _, name: m.HungUp()),
    "a_node_of_the_round_is_alive": (running, True, lambda _, name: m.Alive(1)),
    "a_node_says_what_its_workers_do": (asked, True, lambda _, name: m.Saw(name, 1, ())),
    "another_node_finds_the_same_hang": (asked, True, lambda _, name: HANGS.replace(node_id=name)),
    "a_node_shows_something": (running, True, lambda _, name: r.Fetched(name, names(1)[0], "ask", "", "text")),
    "a_node_wants_to_see_something_of_one": (
        running, True, lambda _, name: r.Fetch(name, "ask", r.What.LOG, names(1)[0], 0),
    ),
    "a_node_holds_its_ranks": (draining, True, lambda term, name: r.Frozen(name, notice_of(term), 7, 2, 0)),
    "a_node_with_a_seat_is_ready": (taking_over, False, lambda _, name: m.Ready(node(name))),
    "a_node_with_a_seat_has_succeeded": (taking_over, False, lambda _, name: m.Succeeded(name, 7)),
    "a_node_with_a_seat_fails": (taking_over, False, lambda _, name: m.Failed(name, 7, FAILURE)),
    "a_node_with_a_seat_leaves": (taking_over, False, lambda _, name: m.Left(name, "SIGTERM")),
}  # fmt: skip


# A round that forms.


def a_connection_opens(count: int) -> Iterator[Act]:
    term = gathered(count)
    for number in range(MORE):
        yield act(term, ev.Opened(9000 + number, "10.0.0.9", "10.0.0.100"))


def a_node_greets(count: int) -> Iterator[Act]:
    term = gathered(count)
    for name in names(MORE, count):
        yield greets(term, name)


def a_node_greets_with_a_node_rank(count: int) -> Iterator[Act]:
    term = Term((count + MORE + 1, count + MORE + 1))
    for rank, name in enumerate(names(count)):
        join(term, name, rank)
    for rank, name in enumerate(names(MORE, count)):
        yield greets(term, name, rank=rank)  # that another has, which is asked whether it lives


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
    while (term.leader.sessions.deadline or 0) > (term.leader.deadline or 0):
        if ev.Renew() in term.pass_deadline():
            term.tell(RENEWED)
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


def a_node_of_a_round_that_went_on_is_back(count: int) -> Iterator[Act]:
    term = running(count, room=MORE)
    for name in names(MORE, count):
        yield greets(term, name, past=m.Past(m.Standing.BUSY, 1, 0, 0, count))


def a_newcomer_greets(count: int) -> Iterator[Act]:
    term = running(count, room=MORE)
    for name in names(MORE, count):
        yield greets(term, name)


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


def a_node_has_succeeded(count: int) -> Iterator[Act]:
    term = running(count)
    for name in names(count - MORE - 1):
        term.say(name, m.Succeeded(name, 1))
    for name in names(MORE, count - MORE - 1):
        yield said(term, name, m.Succeeded(name, 1))


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


def another_node_fails_before_all_know(count: int) -> Iterator[Act]:
    term = running(count)
    for name in names(count - MORE):
        term.say(name, m.Failed(name, 1, FAILURE))
    for name in names(MORE, count - MORE):
        yield said(term, name, m.Failed(name, 1, FAILURE))


def another_node_is_ready_again(count: int) -> Iterator[Act]:
    term = over(count)
    for name in names(count - MORE - 1):
        term.say(name, m.Ready(node(name)))
    for name in names(MORE, count - MORE - 1):
        yield said(term, name, m.Ready(node(name)))


def another_node_leaves(count: int) -> Iterator[Act]:
    term = over(count)
    for name in names(count - MORE - 1):
        term.say(name, m.Left(name, "SIGTERM"))
    for name in names(MORE, count - MORE - 1):
        yield said(term, name, m.Left(name, "SIGTERM"))


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


def a_node_takes_its_seat(count: int) -> Iterator[Act]:
    term = taking_over(count)
    for rank, name in enumerate(names(MORE, count), count):
        yield greets(term, name, past=past(rank, count + MORE + 1))


def a_node_takes_its_seat_where_many_have_finished(count: int) -> Iterator[Act]:
    term = taking_over(9, departed=count)
    for rank, name in enumerate(names(MORE, 9 + count), 9 + count):
        yield greets(term, name, past=past(rank, count + 9 + MORE + 1))


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
    term = decided(count)
    term.tell(ev.Published(True))
    for name in names(MORE):
        yield act(term, ev.Closed(term.conns[name]))


def a_node_comes_after_the_verdict(count: int) -> Iterator[Act]:
    term = decided(count)
    term.tell(ev.Published(True))
    for name in names(MORE, count):
        yield greets(term, name)


def a_node_has_saved(count: int) -> Iterator[Act]:
    term = draining(count)
    for name in names(count):
        term.say(name, r.Frozen(name, term.coordinator.drain.notice_id, 7, 2, 0))
    for name in names(MORE):
        yield said(term, name, r.Saved(name, term.coordinator.drain.notice_id))
