"""What a run's events are worth telling: events in, run events out."""

from __future__ import annotations

import signal
from contextlib import suppress
from random import Random
from typing import Any, TypeVar

import pytest

from aelastic.core.machine import InvalidTransition
from aelastic.errors import ProcessFailure
from aelastic.group import events as g
from aelastic.group.phases import KILL_COUNT_MAX, Phase
from aelastic.group.worker_group import WorkerGroup
from aelastic.observe import run_events as ev
from aelastic.observe.run_event_source import RunEventSource, introduction
from aelastic.rdzv.protocol.messages import Assigned, Ended, Interrupted, Outcome
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.spec import WorkerSpec

RANKS = NodeRanks(
    group_rank=1, group_world_size=3, first_rank=4, world_size=10, first_role_rank=2, role_world_size=6,
    local_world_size=2,
)  # fmt: skip
FAILURE = ProcessFailure.from_elsewhere("host", 4, 0, 77, 1, "ValueError: batch is empty", "", 1000)
EXPIRED = ProcessFailure.from_elsewhere("host", 4, 0, 77, -9, "timer 'step' expired", "", 1000, found_by="timer")
SUCCEEDED = Ended(Outcome.SUCCEEDED, "every worker succeeded")

T = TypeVar("T")


class Story:
    """A group of two workers, what is told of it, and the clock."""

    def __init__(self) -> None:
        spec = WorkerSpec(entrypoint="train.py", local_world_size=2, shutdown_timeout_s=30, exit_barrier_timeout_s=300)
        self.group = WorkerGroup(spec)
        self.source = RunEventSource(self.group)
        self.now = 100.0
        self.began_at = self.done_at = self.now
        self.told: list[ev.RunEvent] = []

    def put(self, *events: g.Event, after_s: float = 0.0) -> list[ev.RunEvent]:
        """What the last of the events is worth telling."""
        told: list[ev.RunEvent] = []
        self.now += after_s
        for event in events:
            was = self.group.phase
            self.group.handle(event, self.now)
            self.began_at = self.now if was is Phase.INIT else self.began_at
            self.done_at = self.now if was is not Phase.DONE else self.done_at
            told = self.source.handle(event, self.now)
            self.told += told
        return told

    def pass_deadline(self) -> list[ev.RunEvent]:
        assert self.group.deadline is not None
        self.now = self.group.deadline
        return self.put(g.DeadlinePassed())

    def end(self, *local_ranks: int, failure: ProcessFailure | None = None, after_s: float = 0.0) -> list[ev.RunEvent]:
        """Workers end, and nothing of them is left."""
        generation = self.group.generation
        told: list[ev.RunEvent] = []
        for local_rank in local_ranks:
            told = self.put(g.Exited(generation, local_rank, failure), after_s=after_s)
            told += self.put(g.Cleared(generation, local_rank))
        return told

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.told if isinstance(event, kind)]

    @property
    def durations(self) -> dict[str, float]:
        """Of the phases that follow each other."""
        sums: dict[str, float] = {}
        for took in self.of(ev.PhaseTook):
            sums[took.name] = sums.get(took.name, 0.0) + took.duration_s
        sums.pop("detect", None)
        return sums


def assigned(round_: int, restart_count: int = 0) -> Assigned:
    return Assigned(round_, restart_count, RANKS, "host0", 29500)


def running(round_: int = 1, restart_count: int = 0) -> Story:
    story = Story()
    story.put(g.Start(), assigned(round_, restart_count), g.Spawned(1, {0: 700, 1: 701}))
    return story


def names(told: list[ev.RunEvent]) -> list[str]:
    return [type(event).__name__ for event in told]


# Transitions.


def test_a_round_is_told_with_what_it_took_to_form_it_and_where_the_agent_stands_then() -> None:
    story = Story()
    story.put(g.Start())
    assert story.put(assigned(7, restart_count=2), after_s=3) == [
        ev.RoundFormed(7, 1, 2, 1, 3, 4, 2, 10, story.group.workers),
        ev.PhaseTook("rendezvous", 3.0),
        ev.Changed(Phase.JOINING, Phase.SPAWNING, g.WorkerState.HEALTHY, "round 7 is complete"),
    ]


def test_the_start_of_the_workers_ends_the_phase_spawn() -> None:
    story = Story()
    story.put(g.Start(), assigned(1))
    assert story.put(g.Spawned(1, {0: 700, 1: 701}), after_s=0.5) == [
        ev.WorkersStarted(1, {0: 700, 1: 701}),
        ev.PhaseTook("spawn", 0.5),
        ev.Changed(Phase.SPAWNING, Phase.RUNNING, g.WorkerState.HEALTHY, "all workers of this node are started"),
    ]
    assert story.put(g.Spawned(1, {0: 700, 1: 701})) == []


def test_workers_that_are_stopped_before_they_have_started_are_told_once_they_have() -> None:
    story = Story()
    story.put(g.Start(), assigned(1), g.StopRequested())
    assert story.put(g.Spawned(1, {0: 700, 1: 701})) == [
        ev.WorkersStarted(1, {0: 700, 1: 701}),
        ev.Changed(Phase.CANCELLING, Phase.STOPPING, g.WorkerState.STOPPED, "the agent was asked to stop (SIGTERM)"),
    ]
    story.end(0, 1)
    assert "run" not in story.durations


def test_every_transition_has_a_sentence() -> None:
    story = running()
    story.put(g.Exited(1, 0, FAILURE, story.now), g.Cleared(1, 0))
    story.end(1)
    story.put(Interrupted(1, "rank 4 failed on host; restart 1 of 3", 1), assigned(2, 1), g.Spawned(2, {0: 1, 1: 2}))
    story.end(0, 1)
    story.put(SUCCEEDED)
    changes = story.of(ev.Changed)
    assert [change.phase for change in changes] == [
        Phase.JOINING, Phase.SPAWNING, Phase.RUNNING, Phase.STOPPING, Phase.AWAITING,
        Phase.JOINING, Phase.SPAWNING, Phase.RUNNING, Phase.BARRIER, Phase.DONE,
    ]  # fmt: skip
    assert [after.before for after in changes[1:]] == [before.phase for before in changes[:-1]]
    assert all(change.reason for change in changes)
    assert changes[0].reason == "the run begins"
    assert changes[-1] == ev.Changed(Phase.BARRIER, Phase.DONE, g.WorkerState.SUCCEEDED, "every worker succeeded")


# Durations.


def run_with_everything() -> Story:
    """A crash with a restart, an interruption, a stop that is not heard, and the exit barrier."""
    story = Story()
    story.put(g.Start())
    story.put(assigned(1), after_s=1)
    story.put(g.Spawned(1, {0: 700, 1: 701}), after_s=2)
    story.put(g.Exited(1, 0, FAILURE, story.now + 4), g.Cleared(1, 0), after_s=4.5)
    story.end(1, after_s=8)
    story.put(Interrupted(1, "rank 4 failed on host; restart 1 of 3", 1), after_s=16)
    story.put(assigned(2, 1), after_s=32)
    story.put(g.Spawned(2, {0: 702, 1: 703}), after_s=64)
    story.put(Interrupted(2, "node c has come", 1), after_s=128)
    story.end(0, 1, after_s=128)
    story.put(assigned(3, 1), after_s=256)
    story.put(g.Spawned(3, {0: 704, 1: 705}), after_s=512)
    story.end(0, 1, after_s=512)
    story.put(SUCCEEDED, after_s=3)
    return story


def test_the_phases_lie_end_to_end_and_their_durations_add_up_to_that_of_the_run() -> None:
    story = run_with_everything()
    assert story.group.is_done
    assert story.durations == {
        "rendezvous": 1 + 32 + 256,
        "spawn": 2 + 64 + 512,
        "run": 4.5 + 128 + 1024,
        "stop": 8 + 256,
        "await": 16,
        "barrier": 3,
    }
    assert sum(story.durations.values()) == story.now - 100


def test_what_it_took_to_find_out_why_a_worker_failed_is_told_of_that_worker() -> None:
    story = run_with_everything()
    assert [took for took in story.of(ev.PhaseTook) if took.name == "detect"] == [ev.PhaseTook("detect", 0.5, 0)]


def test_every_name_of_a_phase_is_used() -> None:
    assert {took.name for took in run_with_everything().of(ev.PhaseTook)} == set(ev.PHASES)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_worker_that_is_found_unhealthy_has_failed_and_was_detected_before_it_ended(order: tuple[int, int]) -> None:
    story = running()
    assert names(story.put(g.FoundUnhealthy(1, 0, EXPIRED, signal.SIGKILL))) == ["Noticed", "PhaseTook", "Changed"]
    for local_rank in order:
        story.put(g.Exited(1, local_rank, None, story.now), g.Cleared(1, local_rank), after_s=1)
    ended = {each.local_rank: (each.outcome, each.failure) for each in story.of(ev.WorkerEnded)}
    assert ended == {0: ("failed", EXPIRED), 1: ("stopped", None)}
    assert "detect" not in {took.name for took in story.of(ev.PhaseTook)}


# Workers.


def test_a_worker_ends_once_with_its_rank_and_what_became_of_it() -> None:
    story = running()
    story.put(g.Exited(1, 1, None))
    story.put(g.Exited(1, 1, FAILURE))  # told twice
    story.put(g.Exited(1, 0, FAILURE, 99.0))
    assert story.of(ev.WorkerEnded) == [
        ev.WorkerEnded(1, 1, 5, "succeeded"),
        ev.WorkerEnded(1, 0, 4, "failed", FAILURE),
    ]


def test_victims_are_stopped_and_a_worker_that_fails_meanwhile_has_failed() -> None:
    story = running()
    story.put(g.StopRequested())
    story.end(0)
    story.end(1, failure=FAILURE)
    assert [(each.local_rank, each.outcome) for each in story.of(ev.WorkerEnded)] == [(0, "stopped"), (1, "failed")]


def test_the_end_of_a_worker_of_an_earlier_generation_is_not_told() -> None:
    story = running()
    story.put(Interrupted(1, "node c has come"))
    story.end(0, 1)
    story.put(assigned(2), g.Spawned(2, {0: 702, 1: 703}))
    assert story.put(g.Exited(1, 0, FAILURE)) == []
    assert story.put(g.FoundUnhealthy(1, 0, FAILURE, signal.SIGKILL)) == []


def test_a_kill_is_told_once_with_the_workers_left_and_why() -> None:
    story = running()
    story.put(g.StopRequested())
    story.end(0)
    assert ev.Killed(1, (1,), "not ended after 30 s") in story.pass_deadline()
    for _ in range(KILL_COUNT_MAX):
        story.pass_deadline()
    assert story.group.state is g.WorkerState.UNKNOWN
    assert len(story.of(ev.Killed)) == 1


def test_a_kill_because_of_a_second_request_says_so() -> None:
    story = running()
    story.put(g.StopRequested(signal.SIGINT))
    told = story.put(g.StopRequested(signal.SIGINT))
    assert told == [ev.StopAsked(signal.SIGINT), ev.Killed(1, (0, 1), "asked to stop again")]


def test_a_kill_before_the_shutdown_timeout_says_why() -> None:
    story = running()
    story.put(Interrupted(1, "node c has come"))
    reason = "rank 1 neither wrote nor computed for 2 s after SIGTERM"
    assert story.put(g.GraceOver(1, reason)) == [ev.Killed(1, (0, 1), reason, is_early=True)]


# Restarts.


@pytest.mark.parametrize(
    "reason, count, cause",
    [("why", 3, "failure"), ("why", 2, "membership"), ("rank 1 failed on h; restart 1 of 2 within 1h", 2, "failure")],
)
def test_a_restart_is_told_with_its_cause_and_the_count_of_the_round_to_come(
    reason: str, count: int, cause: Any
) -> None:
    story = running(restart_count=2)
    told = story.put(Interrupted(1, reason, count))
    assert told[0] == ev.Restarting(cause, reason, count)


def test_a_restart_is_told_once_although_it_is_said_again() -> None:
    story = running()
    story.put(Interrupted(1, "node c has come", 0), Interrupted(1, "node d has come", 0))
    story.end(0, 1)
    story.put(Interrupted(1, "node d has come", 0))
    assert [restart.reason for restart in story.of(ev.Restarting)] == ["node c has come"]


def test_the_word_that_comes_after_the_failure_is_the_one_that_is_told() -> None:
    story = running()
    story.put(g.Exited(1, 0, FAILURE))
    assert story.of(ev.Restarting) == []
    told = story.put(Interrupted(1, "restart 1 of 3", 1))  # the other worker is still being stopped
    assert told == [ev.Restarting("failure", "restart 1 of 3", 1)]
    story.end(1)
    assert len(story.of(ev.Restarting)) == 1


def test_every_restart_of_a_run_is_told() -> None:
    assert [(each.cause, each.restart_count) for each in run_with_everything().of(ev.Restarting)] == [
        ("failure", 1),
        ("membership", 1),
    ]


def test_no_restart_is_told_of_another_round_or_before_the_first() -> None:
    story = Story()
    story.put(g.Start())
    assert story.put(Interrupted(3, "late")) == []
    story.put(assigned(5), g.Spawned(1, {0: 1, 1: 2}))
    assert story.put(Interrupted(4, "late")) == []


def test_a_node_that_leaves_has_no_restart() -> None:
    story = running()
    story.put(g.StopRequested())
    assert story.put(Interrupted(1, "node c has come")) == []
    story = running()
    told = story.put(Ended(Outcome.FAILED, "no restart is left", FAILURE))
    assert told[0] == ev.JobEnded(Outcome.FAILED, "no restart is left", FAILURE)
    assert story.put(Interrupted(1, "node c has come")) == []


def test_an_agent_that_cannot_go_on_was_not_asked_to_stop() -> None:
    story = running()
    told = story.put(g.StopRequested(reason="the coordinator cannot be reached"))
    assert told[0] == ev.RendezvousLost("the coordinator cannot be reached")
    assert told[-1] == ev.Changed(
        Phase.RUNNING, Phase.STOPPING, g.WorkerState.STOPPED, "the coordinator cannot be reached"
    )
    assert story.of(ev.StopAsked) == []


# Whatever happens.


def some_event(random: Random, story: Story) -> g.Event:
    """Of now or of before; many of them cannot come in this phase."""
    if random.random() < 0.02:
        return random.choice((SUCCEEDED, Ended(Outcome.FAILED, "no restart is left", FAILURE), g.StopRequested()))
    generation = max(1, story.group.generation - random.choice((0, 0, 0, 1)))
    rank, failure = random.randrange(2), random.choice((None, FAILURE))
    return random.choice(
        (
            g.Start(),
            assigned(story.group.generation + 1, random.randrange(3)),
            g.Spawned(generation, {0: 700, 1: 701}),
            Interrupted(generation, "why", random.randrange(3)),
            g.Exited(generation, rank, failure, story.now),
            g.Cleared(generation, rank),
            g.FoundUnhealthy(generation, rank, EXPIRED, signal.SIGKILL),
            g.DeadlinePassed(),
        )
    )


@pytest.mark.parametrize("seed", range(100))
def test_whatever_happens_the_story_makes_sense(seed: int) -> None:
    random, story = Random(seed), Story()
    while not story.group.is_done:
        event = some_event(random, story)
        if isinstance(event, g.Cleared) and event.local_rank in story.group.exits.alive:
            continue  # it follows its `Exited`
        with suppress(InvalidTransition):  # then nothing has changed
            story.put(event, after_s=random.randrange(3))
    restarts, changes = story.of(ev.Restarting), story.of(ev.Changed)
    ended = [(each.generation, each.local_rank) for each in story.of(ev.WorkerEnded)]
    assert len(ended) == len(set(ended))
    assert len(restarts) <= len(story.of(ev.RoundFormed)) <= len(restarts) + 1
    assert [after.before for after in changes[1:]] == [before.phase for before in changes[:-1]]
    assert all(change.reason for change in changes)
    assert sum(story.durations.values()) == story.done_at - story.began_at


@pytest.mark.parametrize(
    "command, name",
    [
        (("/usr/bin/python3", "-u", "train.py", "--epochs", "3"), "train.py"),
        (("python", "-u", "-m", "package.train", "-v"), "package.train"),
        (("python", "-c", "print()"), "python"),
        (("./train", "python"), "./train"),
    ],
)
def test_an_interpreter_is_introduced_by_what_it_runs(command: tuple[str, ...], name: str) -> None:
    spec = WorkerSpec(entrypoint=command[0], args=command[1:])
    assert introduction(spec, run_id="job", node_id="node", host="host", pid=1).entrypoint == name
