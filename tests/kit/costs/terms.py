"""A coordinator's term in a job of any number of nodes: what has happened before an event that is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.coordinator.coordinator_events import Phase
from aelastic.rdzv.coordinator.first_cause import GRACE_S
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from kit.stories.leader_terms import RENEWED, Term, hello, node
from kit.visits import Act, Name

MORE = 5  # nodes that do something, one after the other
Story: TypeAlias = Callable[[int], Iterator[Act]]
Before: TypeAlias = Callable[[int], int]
NOTICE = 4000  # of the first epoch
DRAIN = r.Ask(Name("n0"), "ask", r.Verb.DRAIN, "", 60.0, "spot")
HANGS = m.Hangs("n0", 1, "no output for 60 s", 60.0, is_stopped=True)


def names(count: int, start: int = 0) -> list[Name]:
    return [Name(f"n{number}") for number in range(start, start + count)]


def act(term: Term, event: Any) -> Act:
    return Act(term.leader, event, term.now)


def said(term: Term, name: str, message: Any) -> Act:
    return act(term, ev.Received(term.conns[name], message))


def once(act_of: Callable[[int], Act]) -> Story:
    """One event in a job, or a node, of some size."""

    def story(count: int) -> Iterator[Act]:
        yield act_of(count)

    return story


def says(begin: Callable[[int], Term], message_of: Callable[[Name], Any], before: Before = lambda _: 0) -> Story:
    """Some nodes say something, one after the other; so many others have said it `before`."""

    def story(count: int) -> Iterator[Act]:
        term, have_said = begin(count), before(count)
        for name in names(have_said):
            term.say(name, message_of(name))
        for name in names(MORE, have_said):
            yield said(term, name, message_of(name))

    return story


def come(begin: Callable[[int], Term], past_of: Callable[[int, int], m.Past | None] = lambda *_: None) -> Story:
    """Nodes greet, one after the other; `past_of` says, by the size of the job and the rank, what they bring along."""

    def story(count: int) -> Iterator[Act]:
        term = begin(count)
        for rank, name in enumerate(names(MORE, count), count):
            yield greets(term, name, past=past_of(count, rank))

    return story


def last_says(begin: Callable[[int], Term], message_of: Callable[[Name], Any]) -> Story:
    """The last node of all says something, which is measured."""

    def story(count: int) -> Iterator[Act]:
        term, last = begin(count), names(count)[-1]
        for name in names(count - 1):
            term.say(name, message_of(name))
        yield said(term, last, message_of(last))

    return story


def first_says(begin: Callable[[int], Term], message: Any) -> Story:
    return once(lambda count: said(begin(count), names(1)[0], message))


def pass_until(term: Term, is_there: Callable[[], bool], *alive: str) -> Term:
    """Time passes, deadline by deadline, while some nodes show that they live, and the board that it does."""
    while not is_there():
        for name in alive:
            term.say(name, m.Alive())
        if ev.Renew() in term.pass_deadline():
            term.tell(RENEWED)
    return term


def due(term: Term) -> Act:
    """Time passes until something is due."""
    assert term.leader.deadline is not None
    term.now = max(term.now, term.leader.deadline)
    return act(term, ev.DeadlinePassed())


def greets(term: Term, name: str, rank: int | None = None, starts: m.Starts = m.Starts.COLD, **others: Any) -> Act:
    """A node connects, and is about to say hello."""
    term.open(name)
    greeting = hello(name, rank, terms=term.terms, **others)
    return said(term, name, greeting.replace(node=node(name, rank).replace(starts=starts)))


def join(term: Term, name: str, rank: int | None = None, **others: Any) -> None:
    term.tell(greets(term, name, rank, **others).event)


def gathered(count: int, room: int = MORE + 1, **others: Any) -> Term:
    """So many nodes wait for the first round, which waits for more."""
    term = Term((count + room, count + room), **others)
    term.leader.sessions.electorate.is_on = True
    for name in names(count):
        join(term, name)
    return term


def running(count: int, room: int = 0, **others: Any) -> Term:
    """A round of so many nodes is on."""
    term = Term((1, count + room), last_call_timeout_s=0.01, settle_time_s=0.02, **others)
    term.leader.sessions.electorate.is_on = True
    for name in names(count):
        join(term, name)
    if room:
        term.pass_deadline()
    assert term.coordinator.phase is Phase.RUNNING and len(term.coordinator.roster.participants) == count
    return term


def asked(count: int) -> Term:
    """One node has found a hang: all are asked what their workers do."""
    term = running(count)
    term.say(names(1)[0], HANGS)
    return term


def draining(count: int) -> Term:
    """All nodes are asked to hold their ranks."""
    term = running(count)
    term.say(names(1)[0], DRAIN)
    assert term.coordinator.drain.notice_id == NOTICE
    return term


def over(count: int, **others: Any) -> Term:
    """The round is over: its nodes have heard so, and stop their workers."""
    term = running(count, **others)
    term.fail(names(1)[0])
    assert term.coordinator.phase is Phase.FORMING and not term.coordinator.forming.end.untold
    term.now += 2 * GRACE_S
    for name in names(count):
        term.say(name, m.Alive())  # so that what is lost from now on has not caused it
    return term


def decided(count: int) -> Term:
    """The job has failed; the board is to take the verdict."""
    term = running(count, max_restarts=0)
    term.fail(names(1)[0])
    assert term.coordinator.is_closed and term.leader.verdict.is_asked
    return term


def published(count: int) -> Term:
    """The board has the verdict."""
    term = decided(count)
    term.tell(ev.Published(True))
    return term


def doubtful(count: int) -> Term:
    """The board is away, and decisions wait."""
    term = running(count)
    while term.leader.lease.is_certain(term.now):
        for name in names(count):
            term.say(name, m.Alive())
        if ev.Renew() in term.pass_deadline():
            term.tell(ev.RenewFailed("no answer"))
    return term


def past(rank: int, size: int, **others: Any) -> m.Past:
    return m.Past(m.Standing.BUSY, 7, 0, rank, size, 0, **others)


def taking_over(count: int, departed: int = 0) -> Term:
    """So many nodes of a round are back, of which another coordinator had begun it."""
    size = count + departed + MORE + 1
    term = Term((1, size))
    gone = tuple(range(count, count + departed))
    for rank, name in enumerate(names(count)):
        join(term, name, past=past(rank, size, departed=gone if rank == 0 else ()))
    assert term.coordinator.phase is Phase.TAKING_OVER
    return term
