"""What happens to all workers of a node: these events may cost as much as they change, and no more."""

from __future__ import annotations

from collections.abc import Iterator

from aelastic.group import events as g
from aelastic.group.restart_grace import Looked, RestartGrace, Sample
from aelastic.group.worker_group import WorkerGroup
from aelastic.hangs import hang_rules, timer_rules
from aelastic.rdzv.member import member_events as me
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.spec import WorkerSpec
from kit.costs.terms import once
from kit.costs.workers import FAILURE, NOW, WALL, group_of, member_of, timers_of
from kit.visits import Act

LATE = NOW + 1000.0
STOPPED, ENDED = m.Interrupted(1, "a node was lost"), m.Ended(m.Outcome.FAILED, "rank 4 failed")


def joining(count: int) -> WorkerGroup:
    return WorkerGroup(WorkerSpec(entrypoint="train.py", local_world_size=count))


def told(group: WorkerGroup, *events: g.Event) -> WorkerGroup:
    for event in events:
        group.handle(event, NOW)
    return group


def assigned(count: int) -> m.Assigned:
    return m.Assigned(1, 0, NodeRanks(0, 1, 0, count, 0, count, count), "host", 29500)


a_run_begins = once(lambda count: Act(joining(count), g.Start(), NOW))
workers_are_to_be_started = once(lambda count: Act(told(joining(count), g.Start()), assigned(count), NOW))


def workers_are_started(count: int) -> Iterator[Act]:
    group = told(joining(count), g.Start(), assigned(count))
    yield Act(group, g.Spawned(1, dict.fromkeys(range(count), 7)), NOW)


def no_worker_is_started(count: int) -> Iterator[Act]:
    group = told(joining(count), g.Start(), assigned(count), STOPPED)
    yield Act(group, g.SpawnCancelled(1), NOW)


workers_are_stopped_for_another_round = once(lambda count: Act(group_of(count), STOPPED, NOW))
workers_are_stopped_for_good = once(lambda count: Act(group_of(count), ENDED, NOW))
workers_are_stopped_since_the_agent_leaves = once(lambda count: Act(group_of(count), g.StopRequested(), NOW))
workers_are_stopped_since_one_has_failed = once(lambda count: Act(group_of(count), g.Exited(1, 0, FAILURE), NOW))
workers_are_killed_since_to_wait_cannot_help = once(
    lambda count: Act(told(group_of(count), STOPPED), g.GraceOver(1, "idle"), NOW)
)
workers_are_killed_in_the_end = once(lambda count: Act(told(group_of(count), STOPPED), g.DeadlinePassed(), LATE))


def workers_that_are_stopped_are_looked_at(count: int) -> Iterator[Act]:
    grace = RestartGrace({rank: rank for rank in range(count)}, NOW)
    yield Act(grace, g.DeadlinePassed(), LATE)
    yield Act(grace, Looked({rank: Sample(0) for rank in range(count)}), LATE)


def workers_are_watched(count: int) -> Iterator[Act]:
    rules = hang_rules.HangRules(hang_rules.Rules(stuck_timeout_s=60.0))
    yield Act(rules, hang_rules.Began(tuple(range(count))), NOW)


def workers_that_are_watched_are_looked_at(count: int) -> Iterator[Act]:
    rules = hang_rules.HangRules(hang_rules.Rules(stuck_timeout_s=60.0))
    rules.handle(hang_rules.Began(tuple(range(count))), NOW)
    yield Act(rules, hang_rules.Looked({rank: hang_rules.Sample(sleep=1) for rank in range(count)}, LATE), LATE)


timers_are_for_a_new_generation = once(
    lambda count: Act(timers_of(count), timer_rules.Started(2, {pid: pid for pid in range(count)}), NOW)
)
all_timers_expire = once(lambda count: Act(timers_of(count), timer_rules.DeadlinePassed(), LATE + WALL))
a_worker_ends_and_each_timer_is_looked_at = once(lambda count: Act(timers_of(count), timer_rules.Ended(1, 0), NOW))


def a_node_says_which_others_have_departed(count: int) -> Iterator[Act]:
    story = member_of(count)
    story.tell(me.ConnectionLost(1, "connection closed"))
    yield Act(story.core, me.Connected(story.core.conn), story.now)
