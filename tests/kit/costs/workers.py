"""What one worker of a node does, and what its agent hears: the same on a node of any size, in a job of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from aelastic.failures.failure import ProcessFailure
from aelastic.group import events as g
from aelastic.group.worker_group import WorkerGroup
from aelastic.hangs import hang_rules, timer_rules
from aelastic.rdzv.member import member_events as me
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.spec import WorkerSpec
from kit.costs.terms import MORE, Story, once
from kit.stories import member as members
from kit.visits import Act

FAILURE = ProcessFailure.from_elsewhere("host", 4, 0, 77, 1, "ValueError", "", 1000)
NOW, WALL = 100.0, 5000.0


def each(begin: Callable[[int], Any], event_of: Callable[[int], Any]) -> Story:
    """An event of some workers, or timers, one after the other."""

    def story(count: int) -> Iterator[Act]:
        core = begin(count)
        for number in range(MORE):
            yield Act(core, event_of(number), NOW)

    return story


def watched(count: int) -> hang_rules.HangRules:
    """So many workers are watched."""
    rules = hang_rules.HangRules(hang_rules.Rules(stuck_timeout_s=60.0))
    rules.handle(hang_rules.Began(tuple(range(count))), NOW)
    return rules


def group_of(count: int) -> WorkerGroup:
    """So many workers run."""
    group = WorkerGroup(WorkerSpec(entrypoint="train.py", local_world_size=count))
    ranks = NodeRanks(0, 1, 0, count, 0, count, count)
    for event in (g.Start(), m.Assigned(1, 0, ranks, "host", 29500), g.Spawned(1, {})):
        group.handle(event, NOW)
    return group


a_worker_succeeds = each(group_of, lambda rank: g.Exited(1, rank, None))


def a_worker_that_has_succeeded_is_gone(count: int) -> Iterator[Act]:
    group = group_of(count)
    for rank in range(count):
        group.handle(g.Exited(1, rank, None), NOW)
    for rank in range(MORE):
        yield Act(group, g.Cleared(1, rank), NOW)


def a_worker_that_is_stopped_ends(count: int) -> Iterator[Act]:
    group = group_of(count)
    group.handle(g.Exited(1, 0, FAILURE), NOW)
    for rank in range(1, MORE + 1):
        yield Act(group, g.Exited(1, rank, FAILURE), NOW)


def a_worker_that_was_stopped_is_gone(count: int) -> Iterator[Act]:
    group = group_of(count)
    for rank in range(count):
        group.handle(g.Exited(1, rank, FAILURE), NOW)
    for rank in range(MORE):
        yield Act(group, g.Cleared(1, rank), NOW)


def another_worker_hangs(count: int) -> Iterator[Act]:
    group = group_of(count)
    for rank in range(count - MORE):
        group.handle(g.FoundUnhealthy(1, rank, FAILURE, 15), NOW)
    for rank in range(count - MORE, count):
        yield Act(group, g.FoundUnhealthy(1, rank, FAILURE, 15), NOW)


workers_are_to_save = once(lambda count: Act(group_of(count), g.Drained(1, tuple(range(MORE)), NOW + 60), NOW))
a_worker_that_is_watched_ends = each(watched, hang_rules.Ended)


def timers_of(count: int) -> timer_rules.Timers:
    """So many timers run, of one worker."""
    timers = timer_rules.Timers()
    timers.handle(timer_rules.Started(1, {7: 0}), NOW)
    for number in range(count):
        timers.handle(line(number, WALL + 60 + number), NOW)
    return timers


def line(number: int, at: float, pid: int = 7) -> timer_rules.Heard:
    text = f'{{"version": 1, "pid": {pid}, "scope_id": "{number}", "expiration_time": {at}, "signal": 9}}\n'
    return timer_rules.Heard(text.encode(), WALL)


a_timer_is_set = each(timers_of, lambda number: line(9000 + number, WALL + 30))
a_timer_is_cleared = each(timers_of, lambda number: line(number, -1.0))


def a_timer_expires(count: int) -> Iterator[Act]:
    timers = timers_of(count)
    for number in range(MORE):
        yield Act(timers, timer_rules.DeadlinePassed(), NOW + 60 + number)


def a_process_of_a_worker_is_found_to_be_one(count: int) -> Iterator[Act]:
    timers = timers_of(count)
    for pid in range(100, 100 + MORE):
        timers.handle(line(0, WALL + 60, pid), NOW)
        yield Act(timers, timer_rules.Belongs(1, pid, 0), NOW)


# An agent in a job of that many nodes.


def member_of(count: int) -> members.Story:
    """The others have finished and left, one after the other."""
    story = members.busy()
    for rank in range(count):
        story.core.handle(me.Received(story.core.conn, m.Departed(story.core.state.round, 1 + rank)), story.now)
    return story


def a_node_hears_that_another_has_departed(count: int) -> Iterator[Act]:
    story = member_of(count)
    for rank in range(9000, 9000 + MORE):
        yield Act(story.core, me.Received(story.core.conn, m.Departed(story.core.state.round, rank)), story.now)


def a_node_hears_a_heartbeat(count: int) -> Iterator[Act]:
    story = member_of(count)
    for renewals in range(MORE):
        yield Act(story.core, me.Received(story.core.conn, m.Heartbeat(renewals)), story.now)


def hears(*events: me.Event) -> Story:
    """The last of some events is measured."""

    def act_of(count: int) -> Act:
        story = member_of(count)
        story.tell(*events[:-1])
        return Act(story.core, events[-1], story.now)

    return once(act_of)


LOST, REFUSED = me.ConnectionLost(1, "connection closed"), me.ConnectFailed(2, True, "refused")


a_node_loses_the_coordinator = hears(LOST)
a_node_does_not_reach_the_coordinator = hears(LOST, REFUSED)
a_node_reads_the_board = hears(LOST, REFUSED, me.BoardRead(members.record()))
a_node_cannot_read_the_board = hears(LOST, REFUSED, me.BoardFailed("no answer"))
a_node_is_not_to_lead = hears(LOST, REFUSED, me.BoardRead(None), me.NotEligible())
a_node_leads_no_longer = hears(me.LeadershipLost())


def a_node_is_due_to_say_that_it_lives(count: int) -> Iterator[Act]:
    story = member_of(count)
    assert story.core.deadline is not None
    yield Act(story.core, me.DeadlinePassed(), story.core.deadline)


def a_node_says_that_it_has_succeeded(count: int) -> Iterator[Act]:
    story = member_of(count)
    yield Act(story.core, me.Submitted(m.Succeeded("me", story.core.state.round)), story.now)
