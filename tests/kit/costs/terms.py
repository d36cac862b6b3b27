"""What has happened before an event that is measured, in a job or on a node of any size; how such events come about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from aelastic.failures.failure import ProcessFailure
from aelastic.group import events as g
from aelastic.group.worker_group import WorkerGroup
from aelastic.hangs import hang_rules, timer_rules
from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.coordinator.coordinator_events import Phase
from aelastic.rdzv.coordinator.first_cause import GRACE_S
from aelastic.rdzv.coordinator.leader import Leader
from aelastic.rdzv.member import member_events as me
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.spec import WorkerSpec
from kit.stories import member as members
from kit.stories.leader_terms import LEASE_S, RENEWED, Term, hello, node
from kit.visits import Act, Name

MORE = 5  # nodes, or workers, that do something, one after the other, and are measured
NOW, WALL = 100.0, 5000.0
NOTICE = 4000  # of the first epoch
DRAIN = r.Ask(Name("n0"), "ask", r.Verb.DRAIN, "", 60.0, "spot")
HANGS = m.Hangs("n0", 1, "no output for 60 s", 60.0, is_stopped=True)
Story: TypeAlias = Callable[[int], Iterator[Act]]
Begin: TypeAlias = Callable[[int], Any]  # a `Job`, an `OnNode` or a member's story
Number: TypeAlias = Callable[[int], int]  # of nodes, by the size of the job


class Job(Term):
    """A coordinator's term in a job of any number of nodes."""

    @property
    def core(self) -> Leader:
        return self.leader

    @property
    def size(self) -> int:
        return len(self.coordinator.roster.participants)


class OnNode:
    """A core of one node that has heard some events, and the clock it is told."""

    def __init__(self, core: Any, *events: Any) -> None:
        self.core, self.now = core, NOW
        self.tell(*events)

    def tell(self, *events: Any) -> None:
        for event in events:
            self.core.handle(event, self.now)


def names(count: int, start: int = 0) -> list[Name]:
    return [Name(f"n{number}") for number in range(start, start + count)]


FIRST, SECOND = names(2)


def number_of(name: str) -> int:
    return int(name[1:])


# Who does something: how many before those that are measured, and the first of all.


def none(_: int) -> int:
    return 0


def all_of_them(count: int) -> int:
    return count


def all_but_more(count: int) -> int:
    return count - MORE


def all_but_one_more(count: int) -> int:
    return count - MORE - 1


# How events come about.


def act(there: Any, event: Any) -> Act:
    return Act(there.core, event, there.now)


def said(term: Job, name: str, message: Any) -> Act:
    return act(term, ev.Received(term.conns[name], message))


def due(term: Job, _: str = "") -> Act:
    """Time passes until something is due."""
    assert term.leader.deadline is not None
    term.now = max(term.now, term.leader.deadline)
    return act(term, ev.DeadlinePassed())


def breaks(term: Job, name: str) -> Act:
    return act(term, ev.Closed(term.conns[name], is_reset=True))


def greets(term: Job, name: str, rank: int | None = None, starts: m.Starts = m.Starts.COLD, **others: Any) -> Act:
    """A node connects, and is about to say hello."""
    term.open(name)
    greeting = hello(name, rank, terms=term.terms, **others)
    return said(term, name, greeting.replace(node=node(name, rank).replace(starts=starts)))


def comes_back(term: Job, name: str) -> Act:
    """A node of the round connects anew."""
    return greets(term, name, past=m.Past(m.Standing.BUSY, 1, 0, number_of(name), term.size))


def takes_its_seat(term: Job, name: str) -> Act:
    return greets(term, name, past=past(number_of(name), term.terms.max_nodes))


def once(act_of: Callable[[int], Act]) -> Story:
    """One event in a job, or on a node, of some size."""

    def story(count: int) -> Iterator[Act]:
        yield act_of(count)

    return story


def then(begin: Begin, event: Any) -> Story:
    return once(lambda count: act(begin(count), event))


def each(begin: Begin, event_of: Callable[[int], Any], start: Number = none) -> Story:
    """An event of some workers, timers or the like, one after the other, by their numbers."""

    def story(count: int) -> Iterator[Act]:
        there = begin(count)
        for number in range(start(count), start(count) + MORE):
            yield act(there, event_of(number))

    return story


def each_node(
    begin: Begin, act_of: Callable[[Job, Name], Act], *, before: Number = none, start: Number = none
) -> Story:
    """Nodes do something, one after the other; of the first ones, so many as `before` says, it is not measured."""

    def story(count: int) -> Iterator[Act]:
        term, unmeasured = begin(count), before(count)
        for done, name in enumerate(names(unmeasured + MORE, start(count))):
            what = act_of(term, name)
            if done < unmeasured:
                term.tell(what.event)
            else:
                yield what

    return story


def says(begin: Begin, message_of: Callable[[Name], Any], before: Number = none, *, start: Number = none) -> Story:
    return each_node(begin, lambda term, name: said(term, name, message_of(name)), before=before, start=start)


def comes(begin: Begin, act_of: Callable[[Job, Name], Act] = greets, start: Number = all_of_them) -> Story:
    return each_node(begin, act_of, start=start)


def first_says(begin: Begin, message: Any) -> Story:
    return once(lambda count: said(begin(count), FIRST, message))


def last_says(begin: Begin, message_of: Callable[[Name], Any]) -> Story:
    """The last node of all says something, which is measured."""

    def act_of(count: int) -> Act:
        *others, last = names(count)
        return said(after(others, begin(count), message_of), last, message_of(last))

    return once(act_of)


# A term so far.


def after(of: list[Name], term: Job, message_of: Callable[[Name], Any] = lambda _: m.Alive()) -> Job:
    """Some nodes have said something."""
    for name in of:
        term.say(name, message_of(name))
    return term


def join(term: Job, of: list[Name], **others: Any) -> Job:
    for name in of:
        term.tell(greets(term, name, **others).event)
    return term


def pass_until(term: Job, is_there: Callable[[], bool], *alive: Name) -> Job:
    """Time passes, deadline by deadline, while some nodes show that they live, and the board that it does."""
    while not is_there():
        after([*alive], term)
        if ev.Renew() in term.pass_deadline():
            term.tell(RENEWED)
    return term


def gathered(count: int, room: int = MORE + 1, **others: Any) -> Job:
    """So many nodes wait for the first round, which waits for more."""
    term = Job((count + room, count + room))
    term.leader.sessions.electorate.is_on = True
    return join(term, names(count), **others)


def with_ranks(count: int) -> Job:
    """They have said which rank they want."""
    term = Job((count + MORE + 1, count + MORE + 1))
    for name in names(count):
        join(term, [name], rank=number_of(name))
    return term


def with_one_rank(count: int) -> Job:
    """All want the same."""
    return join(Job((2, 2 * count)), names(count + 1), rank=0)


def knowing_of_another_epoch(count: int) -> Job:
    """They wait until this coordinator's epoch is above that."""
    return join(gathered(0, count + MORE + 1), names(count), seen_epoch=9)


def closed_one_after_the_other(count: int) -> Job:
    term = gathered(count)
    for name in names(count):
        term.close(name)
        term.now += 1e-4
    return term


def silent(count: int) -> Job:
    """They have been heard one after the other, a lease ago."""
    term = gathered(count)
    for name in names(count):
        term.say(name, m.Alive())
        term.now += 1e-4
    return pass_until(term, lambda: (term.leader.sessions.deadline or 0) <= (term.leader.deadline or 0))


def at_renewal(count: int) -> Job:
    """The board is asked to renew the record."""
    term = gathered(count)
    term.pass_time_until_renewal()
    return term


def alone(count: int) -> Job:
    """The coordinator's own agent has heard no other for a lease."""
    term = Job((count + 9, count + 9))
    term.coordinator.own_node_id, term.leader.is_replaceable = Name("own"), True
    join(term, [Name("own"), *names(count)])
    term.live_until(term.now + 1.1 * LEASE_S, *names(count))
    return term


def running(count: int, room: int = 0, **others: Any) -> Job:
    """A round of so many nodes is on."""
    term = Job((1, count + room), last_call_timeout_s=0.01, settle_time_s=0.02, **others)
    term.leader.sessions.electorate.is_on = True
    join(term, names(count))
    if room:
        term.pass_deadline()
    assert term.coordinator.phase is Phase.RUNNING and term.size == count
    return term


def with_spares(count: int) -> Job:
    """As many nodes more."""
    return join(running(count), names(count, count))


def with_newcomers(count: int) -> Job:
    """As many nodes more, that import yet."""
    term = join(running(count, room=count + 1), names(count, count), starts=m.Starts.PREPARING)
    term.pass_deadline()
    return term


def asked(count: int) -> Job:
    """One node has found a hang: all are asked what their workers do."""
    return after([FIRST], running(count), lambda _: HANGS)


def draining(count: int) -> Job:
    """All nodes are asked to hold their ranks."""
    term = after([FIRST], running(count), lambda _: DRAIN)
    assert term.coordinator.drain.notice_id == NOTICE
    return term


def frozen(name: str) -> r.Frozen:
    return r.Frozen(name, NOTICE, 7, 2, 0)


def over(count: int, **others: Any) -> Job:
    """The round is over: its nodes have heard so, and stop their workers."""
    term = running(count, **others)
    term.fail(FIRST)
    assert term.coordinator.phase is Phase.FORMING and not term.coordinator.forming.end.untold
    term.now += 2 * GRACE_S
    return after(names(count), term)  # so that what is lost from now on has not caused it


def decided(count: int) -> Job:
    """The job has failed; the board is to take the verdict."""
    term = running(count, max_restarts=0)
    term.fail(FIRST)
    assert term.coordinator.is_closed and term.leader.verdict.is_asked
    return term


def published(count: int) -> Job:
    """The board has the verdict."""
    term = decided(count)
    term.tell(ev.Published(True))
    return term


def doubtful(count: int) -> Job:
    """The board is away, and decisions wait."""
    term = running(count)
    while term.leader.lease.is_certain(term.now):
        after(names(count), term)
        if ev.Renew() in term.pass_deadline():
            term.tell(ev.RenewFailed("no answer"))
    return term


def past(rank: int, size: int, **others: Any) -> m.Past:
    return m.Past(m.Standing.BUSY, 7, 0, rank, size, 0, **others)


def taking_over(count: int, departed: int = 0) -> Job:
    """So many nodes of a round are back, of which another coordinator had begun it."""
    size = count + departed + MORE + 1
    term = Job((1, size))
    gone = tuple(range(count, count + departed))
    for name in names(count):
        join(term, [name], past=past(number_of(name), size, departed=gone if name == FIRST else ()))
    assert term.coordinator.phase is Phase.TAKING_OVER
    return term


# A node so far.


FAILURE = ProcessFailure.from_elsewhere("host", 4, 0, 77, 1, "ValueError", "", 1000)
STOPPED = m.Interrupted(1, "a node was lost")


def assigned(count: int) -> m.Assigned:
    return m.Assigned(1, 0, NodeRanks(0, 1, 0, count, 0, count, count), "host", 29500)


def group_of(count: int, *events: g.Event) -> OnNode:
    """So many workers are to run."""
    return OnNode(WorkerGroup(WorkerSpec(entrypoint="train.py", local_world_size=count)), *events)


def working(count: int, *events: g.Event) -> OnNode:
    """So many workers run."""
    return group_of(count, g.Start(), assigned(count), g.Spawned(1, {}), *events)


def unwatched(_: int) -> OnNode:
    return OnNode(hang_rules.HangRules(hang_rules.Rules(stuck_timeout_s=60.0)))


def watched(count: int) -> OnNode:
    rules = unwatched(count)
    rules.tell(hang_rules.Began(tuple(range(count))))
    return rules


def timed(count: int) -> OnNode:
    """So many timers run, of one worker."""
    lines = [timer_line(number, WALL + 60 + number) for number in range(count)]
    return OnNode(timer_rules.Timers(), timer_rules.Started(1, {7: 0}), *lines)


def timer_line(number: int, at: float, pid: int = 7) -> timer_rules.Heard:
    text = f'{{"version": 1, "pid": {pid}, "scope_id": "{number}", "expiration_time": {at}, "signal": 9}}\n'
    return timer_rules.Heard(text.encode(), WALL)


def member_of(count: int, *events: me.Event) -> members.Story:
    """An agent in a job of that many nodes; the others have finished and left, one after the other."""
    story = members.busy()
    story.tell(*(departed(1 + rank) for rank in range(count)), *events)
    return story


def departed(rank: int) -> me.Received:
    return me.Received(1, m.Departed(1, rank))
