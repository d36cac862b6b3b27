"""What one worker of a node does, and what its agent hears: the same on a node of any size, in a job of any size."""

from __future__ import annotations

from collections.abc import Iterator

from aelastic.failures.failure import ProcessFailure
from aelastic.group import events as g
from aelastic.group.worker_group import WorkerGroup
from aelastic.hangs import hang_rules, timer_rules
from aelastic.rdzv.member import member_events as me
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.spec import WorkerSpec
from kit.costs.terms import MORE
from kit.stories import member as members
from kit.visits import Act

FAILURE = ProcessFailure.from_elsewhere("host", 4, 0, 77, 1, "ValueError", "", 1000)
NOW, WALL = 100.0, 5000.0


def group_of(count: int) -> WorkerGroup:
    """So many workers run."""
    group = WorkerGroup(WorkerSpec(entrypoint="train.py", local_world_size=count))
    ranks = NodeRanks(0, 1, 0, count, 0, count, count)
    for event in (g.Start(), m.Assigned(1, 0, ranks, "host", 29500), g.Spawned(1, {})):
        group.handle(event, NOW)
    return group


def a_worker_succeeds(count: int) -> Iterator[Act]:
    group = group_of(count)
    for rank in range(MORE):
        yield Act(group, g.Exited(1, rank, None), NOW)


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


def workers_are_to_save(count: int) -> Iterator[Act]:
    group = group_of(count)
    yield Act(group, g.Drained(1, tuple(range(MORE)), NOW + 60), NOW)


def a_worker_that_is_watched_ends(count: int) -> Iterator[Act]:
    rules = hang_rules.HangRules(hang_rules.Rules(stuck_timeout_s=60.0))
    rules.handle(hang_rules.Began(tuple(range(count))), NOW)
    for rank in range(MORE):
        yield Act(rules, hang_rules.Ended(rank), NOW)


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


def a_timer_is_set(count: int) -> Iterator[Act]:
    timers = timers_of(count)
    for number in range(MORE):
        yield Act(timers, line(9000 + number, WALL + 30), NOW)


def a_timer_is_cleared(count: int) -> Iterator[Act]:
    timers = timers_of(count)
    for number in range(MORE):
        yield Act(timers, line(number, -1.0), NOW)


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


def a_member_is_told(*before: me.Event, of: int) -> members.Story:
    story = member_of(of)
    story.tell(*before)
    return story


LOST = me.ConnectionLost(1, "connection closed")


def a_node_loses_the_coordinator(count: int) -> Iterator[Act]:
    story = member_of(count)
    yield Act(story.core, LOST, story.now)


def a_node_does_not_reach_the_coordinator(count: int) -> Iterator[Act]:
    story = a_member_is_told(LOST, of=count)
    yield Act(story.core, me.ConnectFailed(story.core.conn, True, "refused"), story.now)


def a_node_reads_the_board(count: int) -> Iterator[Act]:
    story = a_member_is_told(LOST, me.ConnectFailed(2, True, "refused"), of=count)
    yield Act(story.core, me.BoardRead(members.record()), story.now)


def a_node_cannot_read_the_board(count: int) -> Iterator[Act]:
    story = a_member_is_told(LOST, me.ConnectFailed(2, True, "refused"), of=count)
    yield Act(story.core, me.BoardFailed("no answer"), story.now)


def a_node_is_not_to_lead(count: int) -> Iterator[Act]:
    story = a_member_is_told(LOST, me.ConnectFailed(2, True, "refused"), me.BoardRead(None), of=count)
    yield Act(story.core, me.NotEligible(), story.now)


def a_node_leads_no_longer(count: int) -> Iterator[Act]:
    story = member_of(count)
    yield Act(story.core, me.LeadershipLost(), story.now)


def a_node_is_due_to_say_that_it_lives(count: int) -> Iterator[Act]:
    story = member_of(count)
    assert story.core.deadline is not None
    yield Act(story.core, me.DeadlinePassed(), story.core.deadline)


def a_node_has_succeeded(count: int) -> Iterator[Act]:
    story = member_of(count)
    yield Act(story.core, me.Submitted(m.Succeeded("me", story.core.state.round)), story.now)
