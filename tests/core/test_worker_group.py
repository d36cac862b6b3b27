"""The worker group: stories as text (`stories/group/`), each phase with each event, and other cases."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
from kit.stories.group import FAILURE, WHERE, Playing

from aelastic.agent.group import events as ev
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.base.machine import TRACE_EVENT_CHARS_MAX, InvalidTransition
from aelastic.diagnose.failures.failure import MESSAGE_CHARS_MAX
from aelastic.workers.states import Phase


def test_a_group_begins_in_init_with_nothing_armed() -> None:
    assert [part for part, _ in Playing("init").state[:2]] == ["init", "INIT"] and Playing("init").core.deadline is None


def test_a_message_of_a_megabyte_is_not_a_reason_of_a_megabyte() -> None:
    story = Playing("running")
    story.core.handle(ev.Exited(1, 0, FAILURE.replace(message="x" * (1 << 20))), story.now)
    assert story.core.reason == "x" * MESSAGE_CHARS_MAX


@pytest.mark.parametrize("rank", [-1, 99])
def test_a_failure_has_the_rank_of_the_round_that_it_ends(rank: int) -> None:
    """A worker that ended just before it got this rank reports none, or the previous round's."""
    story = Playing("running")
    worker = story.core.workers[0]
    (report, *_) = story.core.handle(ev.Exited(1, 0, FAILURE.replace(rank=rank)), story.now)
    assert isinstance(report, ev.ReportFailed) and report.failure.rank == worker.global_rank


NOTHING_FOLLOWS = {  # state, earlier events, and events without an effect
    "an exit that is told twice": ("running", "0 ends", "0 exits failed; 0 clears"),
    "a local rank that does not exist": ("running", "", "9 exits failed; -1 clears; 2 hangs"),
    "an exit of a worker that was not started": ("spawning", "", "0 ends"),
    "an exit while the start is cancelled": ("cancelling for good", "", "0 ends"),
    "an interruption of another round": ("init", "start; round 2; spawned", "interrupted 1; interrupted 3"),
    "an interruption of the last round": ("stopping for another round", "0 1 ends", "interrupted 1"),
    "a second verdict": ("stopping for the verdict", "", "verdict succeeded"),
    "a round that completes while we leave": ("joining", "stop", "round 1"),
    "an earlier generation": (
        "stopping for another round", "0 1 ends; round 2; spawned of=2",
        "1 exits failed; 0 exits; 0 clears; 0 hangs; spawned",
    ),
    "found unhealthy twice": ("stopping for a worker that hangs", "", "0 hangs"),
    "unhealthy, stopped for another round": ("stopping for another round", "", "1 hangs"),
    "unhealthy, stopped for good": ("stopping for good", "", "1 hangs"),
    "unhealthy, stopped for the verdict": ("stopping for the verdict", "", "1 hangs"),
    "unhealthy, ended by itself": ("running", "1 exits", "1 hangs"),
    "unhealthy, not started": ("spawning", "", "1 hangs"),
    "the end of the grace in a stop for good": ("stopping for good", "", "grace over"),
    "the end of the grace after the verdict": ("stopping for the verdict", "", "grace over"),
    "the end of the grace after a request": ("stopping for another round", "stop", "grace over"),
    "the end of an earlier grace": ("stopping for another round", "", "grace over of=0"),
    "the end of a grace while all run": ("running", "", "grace over"),
    **{
        f"a timer where none is armed: {where}": (where, "", "a timer fires")
        for where in ("init", "joining", "running", "awaiting", "done")
    },
    "a timer before the deadline of a stop": ("stopping for good", "", "a timer fires"),
    "a timer before the deadline of the barrier": ("barrier", "", "a timer fires"),
}  # fmt: skip


@pytest.mark.parametrize("where, before, lines", NOTHING_FOLLOWS.values(), ids=NOTHING_FOLLOWS)
def test_nothing_follows(where: str, before: str, lines: str) -> None:
    story = Playing(where)
    for line in filter(None, before.split("; ")):
        story.handle(line)
    story.now += 1 if story.core.deadline is not None else 10_000
    for line in lines.split("; "):
        known = seen(story.core)
        assert (story.handle(line), seen(story.core)) == ([], known)


# Every pair of state and event is decided.

EVENTS = [
    "start", "start ahead", "round 2", "round 0", "interrupted 1", "interrupted 0", "verdict failed", "verdict succeeded",
    "verdict timed out", "spawned", "cancelled", "cancelled of=0", "1 exits", "1 exits failed", "0 exits failed of=0",
    "0 clears", "0 clears of=0", "1 hangs", "0 hangs of=0", "grace over", "grace over of=0", "drained 0", "drained",
    "drained 0 of=0", "stop", "a timer fires", "interrupted 1 in-place",
    "0 ready", "0 ready of=0", "0 ready process=7", "0 ready after=1", "1 ready after=1", "0 shares", "0 shares in=9",
    "0 has no state", "0 has no state in=9", "0 is done", "0 is done in=9", "0 is replaced", "0 is replaced of=0",
]  # fmt: skip
AHEAD = "starting ahead", "ready ahead"
WITH_WORKERS = "spawning", "running", "stopping", "opted in", "leaving", "replacing", "forming", *AHEAD
ROUND_MAY_COME = {"joining", "forming", "leaving again", "done", *AHEAD}
IMPOSSIBLE = {
    *((where, "start") for where in WHERE if where != "init"),
    ("init", "round 0"),
    ("init", "start ahead"),
    *((where, "round 2") for where in WHERE if where not in ROUND_MAY_COME),
    *((where, "cancelled") for where in WHERE if where.startswith(WITH_WORKERS)),
    *((where, "0 clears") for where in ("forming", *AHEAD)),
}


def seen(group: WorkerGroup) -> dict[str, Any]:
    """Everything that a group knows, except its trace."""
    return {name: copy.deepcopy(getattr(group, name)) for name in WorkerGroup.__dataclass_fields__ if name != "_trace"}


def test_the_walk_covers_every_phase_and_every_event() -> None:
    assert {Playing(where).core.phase for where in WHERE} == set(Phase)
    assert {type(event) for line in EVENTS for event in Playing("init").events(line)} == set(get_args(ev.Event))


@pytest.mark.parametrize("where", WHERE)
def test_every_event_is_decided_in_every_phase(where: str) -> None:
    for line in EVENTS:
        assert_decided(where, line)


def assert_decided(where: str, line: str) -> None:
    story = Playing(where)
    (event,) = story.events(line)
    before, trace = seen(story.core), story.core.trace
    story.now += 1_000_000  # any deadline has passed
    if (where, line) not in IMPOSSIBLE:
        actions = story.handle(line)
        if where == "done":
            assert (actions, story.core.phase) == ([], Phase.DONE), line
        assert len(story.core.trace) == len(trace) + 1, line
        assert repr(event)[:TRACE_EVENT_CHARS_MAX] in story.core.trace[-1]
        return
    with pytest.raises(InvalidTransition) as caught:
        story.handle(line)
    assert seen(story.core) == before, line
    assert (caught.value.phase, caught.value.event, caught.value.trace) == (before["phase"], event, trace)
    assert str(before["phase"]) in str(caught.value)


def test_the_trace_is_bounded() -> None:
    story = Playing("running")
    for _ in range(500):
        story.handle("a timer fires")
    assert len(story.core.trace) == 64
