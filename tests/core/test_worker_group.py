"""The worker group: events in, actions out."""

from __future__ import annotations

import copy
import itertools
import signal
from collections.abc import Callable
from typing import Any, get_args

import pytest

from aelastic.core.machine import STORY_EVENT_CHARS_MAX, InvalidTransition
from aelastic.errors import ProcessFailure
from aelastic.failures.failure import MESSAGE_CHARS_MAX
from aelastic.group import events as ev
from aelastic.group.events import WorkerState
from aelastic.group.phases import KILL_COUNT_MAX, KILL_WAIT_S, Phase
from aelastic.group.worker_group import WorkerGroup
from aelastic.rdzv.protocol.messages import Assigned, Ended, Interrupted, Outcome
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.spec import WorkerSpec

SHUTDOWN_S = 30.0
BARRIER_S = 300.0
RANKS = NodeRanks(
    group_rank=1,
    group_world_size=3,
    first_rank=4,
    world_size=10,
    first_role_rank=2,
    role_world_size=6,
    local_world_size=2,
)
FAILURE = ProcessFailure.from_elsewhere("host", 4, 0, 77, 1, "ValueError: batch is empty", "", 1000)
OTHER_FAILURE = ProcessFailure.from_elsewhere("host", 5, 1, 78, -11, "SIGSEGV", "", 1000)
HANGS = ProcessFailure.from_elsewhere("host", 4, 0, 77, -9, "timer 'step' expired", "", 1000)
OTHER_HANGS = ProcessFailure.from_elsewhere("host", 5, 1, 78, -9, "timer 'step' expired", "", 1000)
FAILED = Ended(Outcome.FAILED, "rank 4 failed on host; all 3 restarts are used up", FAILURE)
SUCCEEDED = Ended(Outcome.SUCCEEDED, "every worker succeeded")
TIMED_OUT = Ended(Outcome.TIMED_OUT, "1 of at least 2 nodes came")


def assigned(round_: int) -> Assigned:
    return Assigned(round_, 0, RANKS, "host0", 29500)


def interrupted(round_: int) -> Interrupted:
    return Interrupted(round_, "rank 9 failed on host3; restart 1 of 3")


class Story:
    """A group of two workers, and the clock it is told."""

    def __init__(self, local_world_size: int = 2) -> None:
        self.group = WorkerGroup(
            WorkerSpec(
                entrypoint="train.py",
                local_world_size=local_world_size,
                shutdown_timeout_s=SHUTDOWN_S,
                exit_barrier_timeout_s=BARRIER_S,
            )
        )
        self.now = 100.0

    def tell(self, *events: ev.Event) -> list[Any]:
        """What the last of the events is answered with."""
        actions: list[Any] = []
        for event in events:
            actions = self.group.handle(event, self.now)
        return actions

    def pass_deadline(self) -> list[Any]:
        assert self.group.deadline is not None
        self.now = self.group.deadline
        return self.tell(ev.DeadlinePassed())

    @property
    def left_s(self) -> float | None:
        return None if self.group.deadline is None else self.group.deadline - self.now

    def end(self, *local_ranks: int, failure: ProcessFailure | None = None) -> list[Any]:
        """Workers end, and nothing of them is left."""
        actions: list[Any] = []
        for local_rank in local_ranks:
            actions = self.tell(ev.Exited(self.group.generation, local_rank, failure))
            actions += self.tell(ev.Cleared(self.group.generation, local_rank))
        return actions


def joining() -> Story:
    story = Story()
    story.tell(ev.Start())
    return story


def spawning(round_: int = 1) -> Story:
    story = joining()
    story.tell(assigned(round_))
    return story


def running(round_: int = 1) -> Story:
    story = spawning(round_)
    story.tell(ev.Spawned(1, {0: 700, 1: 701}))
    return story


def cancelling_for_another_round() -> Story:
    story = spawning()
    story.tell(interrupted(1))
    return story


def cancelling_for_good() -> Story:
    story = spawning()
    story.tell(ev.StopRequested(signal.SIGINT))
    return story


def cancelling_for_the_verdict() -> Story:
    story = spawning()
    story.tell(FAILED)
    return story


def stopping_for_another_round() -> Story:
    story = running()
    story.tell(interrupted(1))
    return story


def stopping_for_a_failure() -> Story:
    story = running()
    story.tell(ev.Exited(1, 0, FAILURE))
    return story


def stopping_for_a_worker_that_hangs() -> Story:
    story = running()
    story.tell(ev.FoundUnhealthy(1, 0, HANGS, signal.SIGKILL))
    return story


def stopping_for_good() -> Story:
    story = running()
    story.tell(ev.StopRequested())
    return story


def stopping_for_the_verdict() -> Story:
    story = stopping_for_a_failure()
    story.tell(FAILED)
    return story


def joining_again() -> Story:
    story = stopping_for_another_round()
    story.end(0, 1)
    return story


def awaiting() -> Story:
    story = stopping_for_a_failure()
    story.tell(ev.Cleared(1, 0))
    story.end(1)
    return story


def in_the_barrier() -> Story:
    story = running()
    story.end(0, 1)
    return story


def done() -> Story:
    story = in_the_barrier()
    story.tell(SUCCEEDED)
    return story


# One event, and what follows at once.

ASKED = "the agent was asked to stop (SIGTERM)"
LEAVES: list[ev.Action] = [ev.TellLeft(ASKED), ev.Finish(ASKED)]
WITHOUT_WORKERS: list[Callable[[], Story]] = [Story, joining, awaiting, in_the_barrier]
FOLLOWS: list[tuple[Callable[[], Story], ev.Event, list[ev.Action], WorkerState, float | None]] = [
    (Story, ev.Start(), [ev.Join()], WorkerState.INIT, None),
    (joining, TIMED_OUT, [ev.Finish(TIMED_OUT.reason)], WorkerState.FAILED, None),
    (in_the_barrier, SUCCEEDED, [ev.Finish(SUCCEEDED.reason)], WorkerState.SUCCEEDED, None),
    (in_the_barrier, FAILED, [ev.Finish(FAILED.reason)], WorkerState.FAILED, None),
    (in_the_barrier, interrupted(1), [ev.Join()], WorkerState.STOPPED, None),
    (running, ev.StopRequested(40),  # a signal that has no name
     [ev.TellLeft("the agent was asked to stop (signal 40)"), ev.Stop(1, (0, 1), 40)], WorkerState.STOPPED, SHUTDOWN_S),
    (stopping_for_good, ev.StopRequested(), [ev.Stop(1, (0, 1), signal.SIGKILL)], WorkerState.STOPPED, KILL_WAIT_S),
    (running, ev.Drained(1, (0,), 120.0), [ev.Stop(1, (0,), signal.SIGTERM)], WorkerState.HEALTHY, 20.0),
    (running, ev.Drained(1, (), 120.0), [], WorkerState.HEALTHY, 20.0),
    (spawning, FAILED, [ev.CancelSpawn(1)], WorkerState.UNHEALTHY, SHUTDOWN_S),
    (cancelling_for_the_verdict, ev.SpawnCancelled(1), [ev.Finish(FAILED.reason)], WorkerState.FAILED, None),
    *((where, ev.StopRequested(), LEAVES, WorkerState.STOPPED, None) for where in WITHOUT_WORKERS),
]  # fmt: skip


@pytest.mark.parametrize("where, event, actions, state, left_s", FOLLOWS)
def test_what_follows_at_once(
    where: Callable[[], Story], event: ev.Event, actions: list[ev.Action], state: WorkerState, left_s: float | None
) -> None:
    story = where()
    assert story.tell(event) == actions
    assert (story.group.state, story.left_s) == (state, left_s)
    assert story.group.is_done == any(isinstance(action, ev.Finish) for action in actions)
    if story.group.is_done:
        assert story.group.reason == actions[-1].reason  # type: ignore[union-attr]
    if isinstance(event, Ended):
        assert story.group.verdict == event
    if isinstance(event, Interrupted):
        assert story.group.reason == event.reason


# Start.


def test_a_group_begins_in_init_with_nothing_armed() -> None:
    group = Story().group
    assert (group.phase, group.state, group.deadline, group.exits.unended) == (Phase.INIT, WorkerState.INIT, None, ())


def test_an_assignment_spawns_the_first_generation() -> None:
    story = joining()
    assert story.tell(assigned(7)) == [ev.Spawn(1, assigned(7))]
    assert (story.group.phase, story.group.state, story.group.exits.unended) == (
        Phase.SPAWNING,
        WorkerState.HEALTHY,
        (),
    )
    assert story.tell(ev.Spawned(1, {0: 700, 1: 701})) == []
    assert (story.group.phase, story.group.state, story.group.exits.unended) == (
        Phase.RUNNING,
        WorkerState.HEALTHY,
        (0, 1),
    )


def test_workers_have_their_ranks_at_once_and_their_ids_once_they_are_spawned() -> None:
    story = joining()
    story.tell(assigned(1))
    first, second = story.group.workers
    assert (first.local_rank, first.global_rank, first.role_rank, first.id) == (0, 4, 2, None)
    assert (second.local_rank, second.global_rank, second.role_rank, second.id) == (1, 5, 3, None)
    assert (first.world_size, first.role_world_size) == (10, 6)
    assert story.tell(ev.Spawned(1, {0: 700, 1: 701})) == []
    assert [worker.id for worker in story.group.workers] == [700, 701]


def test_workers_stand_in_the_order_of_their_local_ranks_whatever_the_back_end_says() -> None:
    story = joining()
    story.tell(assigned(1), ev.Spawned(1, {1: "b"}))
    assert [(worker.local_rank, worker.id) for worker in story.group.workers] == [(0, None), (1, "b")]
    story = joining()
    story.tell(assigned(1), ev.Spawned(1, {1: "b", 0: "a"}))
    assert [(worker.local_rank, worker.id) for worker in story.group.workers] == [(0, "a"), (1, "b")]


# Success.


def test_a_worker_that_succeeds_waits_for_the_others() -> None:
    story = running()
    assert story.end(0) == []
    assert (story.group.phase, story.group.state, story.group.exits.unended) == (
        Phase.RUNNING,
        WorkerState.HEALTHY,
        (1,),
    )


def test_when_the_last_worker_succeeded_the_group_says_so_and_waits_for_other_nodes() -> None:
    story = running(round_=5)
    assert story.end(1, 0) == [ev.TellSucceeded(5)]
    assert (story.group.phase, story.group.state, story.left_s) == (Phase.BARRIER, WorkerState.SUCCEEDED, BARRIER_S)


def test_nothing_is_said_before_what_the_workers_left_behind_is_gone() -> None:
    story = running()
    assert story.tell(ev.Exited(1, 0, None), ev.Exited(1, 1, None)) == []
    assert story.tell(ev.Cleared(1, 1)) == []
    assert story.group.exits.unended == (0,)
    assert story.tell(ev.Cleared(1, 0)) == [ev.TellSucceeded(1)]


def test_other_nodes_that_do_not_finish_are_not_waited_for_for_ever() -> None:
    story = in_the_barrier()
    told, finish = story.pass_deadline()
    assert told == ev.TellLeft("exit barrier timed out after 300 s: other nodes still run")
    assert finish == ev.Finish(told.reason)
    assert story.group.state is WorkerState.SUCCEEDED


# What a finished worker leaves behind.


def test_what_a_worker_left_behind_has_a_limited_time_to_go() -> None:
    story = running()
    assert story.tell(ev.Exited(1, 0, None)) == []
    assert story.left_s == KILL_WAIT_S
    story.tell(ev.Cleared(1, 0))
    assert story.group.deadline is None


def test_a_deadline_for_one_leftover_is_not_disarmed_by_another_that_went() -> None:
    story = running()
    story.tell(ev.Exited(1, 0, None), ev.Exited(1, 1, None), ev.Cleared(1, 0))
    assert story.left_s == KILL_WAIT_S


def test_a_leftover_that_stays_stops_the_others_and_ends_in_unknown() -> None:
    story = running()
    story.tell(ev.Exited(1, 0, None))
    reason = "child processes of a finished worker survived SIGKILL"
    assert story.pass_deadline() == [ev.TellLeft(reason), ev.Stop(1, (1,), signal.SIGTERM)]
    assert story.left_s == SHUTDOWN_S
    assert story.end(1) == []
    assert story.group.exits.unended == (0,)
    assert story.pass_deadline() == [ev.Stop(1, (0,), signal.SIGKILL)]
    assert story.pass_deadline() == [ev.Stop(1, (0,), signal.SIGKILL)]
    *_, finish = story.pass_deadline()
    assert isinstance(finish, ev.Finish)
    assert (story.group.state, story.group.exits.unended) == (WorkerState.UNKNOWN, (0,))


# Failure.


def test_a_failure_is_told_first_and_the_others_are_stopped_second() -> None:
    story = running(round_=3)
    assert story.tell(ev.Exited(1, 0, FAILURE)) == [ev.TellFailed(3, FAILURE, 100.0), ev.Stop(1, (1,), signal.SIGTERM)]
    assert (story.group.phase, story.group.state, story.group.reason) == (
        Phase.STOPPING,
        WorkerState.UNHEALTHY,
        FAILURE.message,
    )
    assert story.left_s == SHUTDOWN_S


def test_a_message_of_a_megabyte_is_no_reason_of_a_megabyte() -> None:
    story = running(round_=3)
    story.tell(ev.Exited(1, 0, FAILURE.replace(message="x" * (1 << 20))))
    assert story.group.reason == "x" * MESSAGE_CHARS_MAX


def test_once_all_are_gone_the_coordinator_is_waited_for() -> None:
    story = stopping_for_a_failure()
    story.tell(ev.Cleared(1, 0))
    assert story.end(1) == []
    assert (story.group.phase, story.group.deadline) == (Phase.AWAITING, None)
    assert story.tell(interrupted(1)) == [ev.Join()]
    assert story.group.state is WorkerState.STOPPED


def test_no_restart_left_ends_the_run_with_the_verdict() -> None:
    story = awaiting()
    assert story.tell(FAILED) == [ev.Finish(FAILED.reason)]
    assert (story.group.state, story.group.verdict) == (WorkerState.FAILED, FAILED)
    assert story.group.exits.failed == {0: FAILURE}


def test_an_answer_that_comes_while_the_workers_are_being_stopped_is_kept() -> None:
    story = stopping_for_a_failure()
    assert story.tell(interrupted(1), ev.Cleared(1, 0)) == []
    assert story.end(1) == [ev.Join()]
    other = stopping_for_the_verdict()
    other.tell(ev.Cleared(1, 0))
    assert other.end(1) == [ev.Finish(FAILED.reason)]


def test_a_new_generation_forgets_the_failures_of_the_last() -> None:
    story = awaiting()
    story.tell(interrupted(1), assigned(2))
    assert (story.group.exits.failed, set(story.group.exits.stopped), story.group.exits.unended) == ({}, set(), ())
    assert (story.group.state, story.group.reason) == (WorkerState.HEALTHY, "")


# A stop while the workers are being started.


def test_a_stop_while_workers_are_being_started_cancels_the_start_and_signals_nothing() -> None:
    story = spawning()
    left, cancel = story.tell(ev.StopRequested(signal.SIGINT))
    assert (left, cancel) == (ev.TellLeft("the agent was asked to stop (SIGINT)"), ev.CancelSpawn(1))
    assert (story.group.phase, story.group.state, story.left_s) == (Phase.CANCELLING, WorkerState.STOPPED, SHUTDOWN_S)
    assert story.tell(ev.SpawnCancelled(1)) == [ev.Finish(left.reason)]
    assert (story.group.state, story.group.deadline, story.group.exits.unended) == (WorkerState.STOPPED, None, ())


def test_workers_that_are_started_in_spite_of_a_stop_get_its_signal_and_its_time() -> None:
    story = cancelling_for_good()
    story.now += SHUTDOWN_S - 1
    assert story.tell(ev.Spawned(1, {0: 100, 1: 101})) == [ev.Stop(1, (0, 1), signal.SIGINT)]
    assert (story.group.phase, story.left_s, story.group.exits.unended) == (Phase.STOPPING, SHUTDOWN_S, (0, 1))
    assert story.tell(ev.Spawned(1, {0: 100, 1: 101})) == []
    assert story.end(0, 1) == [ev.Finish("the agent was asked to stop (SIGINT)")]


def test_a_start_that_is_interrupted_is_cancelled_and_the_next_round_is_joined() -> None:
    story = spawning()
    assert story.tell(interrupted(1)) == [ev.CancelSpawn(1)]
    assert (story.group.state, story.group.reason) == (WorkerState.STOPPED, interrupted(1).reason)
    assert story.tell(interrupted(1)) == []
    assert story.tell(ev.SpawnCancelled(1)) == [ev.Join()]
    assert story.tell(assigned(2)) == [ev.Spawn(2, assigned(2))]
    assert story.tell(ev.SpawnCancelled(1), ev.Spawned(1, {0: 1})) == []
    assert story.group.phase is Phase.SPAWNING


def test_a_start_that_can_not_be_cancelled_ends_as_stopped_since_no_worker_is_known_to_survive() -> None:
    story = cancelling_for_good()
    assert story.pass_deadline() == [ev.Finish("the agent was asked to stop (SIGINT)")]
    assert (story.group.state, story.group.exits.unended, story.group.exits.is_killing) == (
        WorkerState.STOPPED,
        (),
        False,
    )
    assert story.tell(ev.Spawned(1, {0: 100, 1: 101})) == []
    assert story.tell(ev.SpawnCancelled(1)) == []


def test_a_start_that_can_not_be_cancelled_for_another_round_makes_the_agent_leave() -> None:
    story = cancelling_for_another_round()
    left, finish = story.pass_deadline()
    assert (left, finish) == (
        ev.TellLeft("a cancelled start of workers did not end within 30 s"),
        ev.Finish(left.reason),
    )
    assert story.group.state is WorkerState.STOPPED


def test_asked_again_while_a_start_is_cancelled_it_leaves_at_once() -> None:
    story = cancelling_for_good()
    assert story.tell(ev.StopRequested()) == [ev.Finish("the agent was asked to stop (SIGINT)")]
    story = cancelling_for_another_round()
    assert story.tell(ev.StopRequested()) == [ev.TellLeft("the agent was asked to stop (SIGTERM)")]
    assert story.tell(ev.StopRequested()) == [ev.Finish("the agent was asked to stop (SIGTERM)")]
    story = cancelling_for_the_verdict()
    assert story.tell(ev.StopRequested()) == []
    assert story.tell(ev.StopRequested()) == [ev.Finish(FAILED.reason)]
    assert story.group.state is WorkerState.FAILED


def test_an_assignment_of_an_earlier_round_starts_nothing() -> None:
    story = stopping_for_another_round()
    story.end(0, 1)
    assert story.tell(assigned(1)) == []
    assert story.group.phase is Phase.JOINING
    assert story.tell(assigned(2)) == [ev.Spawn(2, assigned(2))]
    assert story.tell(assigned(2)) == []  # told twice


# Workers that live, and do not do what is expected of them.


def test_an_unhealthy_worker_is_told_of_as_failed_then_stopped_in_its_own_way_and_the_others_in_theirs() -> None:
    story = running(round_=3)
    assert story.tell(ev.FoundUnhealthy(1, 0, HANGS, signal.SIGUSR1)) == [
        ev.TellFailed(3, HANGS, 100.0),
        ev.Stop(1, (0,), signal.SIGUSR1),
        ev.Stop(1, (1,), signal.SIGTERM),
    ]
    assert (story.group.phase, story.group.state, story.group.reason) == (
        Phase.STOPPING,
        WorkerState.UNHEALTHY,
        HANGS.message,
    )
    assert (story.group.exits.failed, sorted(story.group.exits.alive), story.left_s) == ({0: HANGS}, [0, 1], SHUTDOWN_S)


def test_an_unhealthy_worker_that_then_ends_has_failed_whatever_it_says_and_the_others_are_victims() -> None:
    story = stopping_for_a_worker_that_hangs()
    assert story.end(0, failure=FAILURE) == []
    assert story.end(1) == []
    assert (story.group.exits.failed, set(story.group.exits.stopped)) == ({0: HANGS}, {1})
    assert (story.group.phase, story.group.deadline) == (Phase.AWAITING, None)
    assert story.tell(interrupted(1)) == [ev.Join()]


def test_each_of_several_that_hang_has_failed_and_one_of_them_is_told_of() -> None:
    story = stopping_for_a_worker_that_hangs()
    deadline = story.group.deadline
    story.now += 1
    assert story.tell(ev.FoundUnhealthy(1, 1, OTHER_HANGS, signal.SIGKILL)) == [ev.Stop(1, (1,), signal.SIGKILL)]
    assert (story.group.exits.failed, story.group.deadline) == ({0: HANGS, 1: OTHER_HANGS}, deadline)
    story.end(0, 1)
    assert (story.group.exits.failed, set(story.group.exits.stopped)) == ({0: HANGS, 1: OTHER_HANGS}, set())


def test_an_unhealthy_worker_leaves_the_time_for_what_another_left_behind_as_long_as_a_stop_has() -> None:
    story = running()
    story.tell(ev.Exited(1, 1, None))
    told, stop = story.tell(ev.FoundUnhealthy(1, 0, HANGS, signal.SIGKILL))
    assert (told, stop) == (ev.TellFailed(1, HANGS, 100.0), ev.Stop(1, (0,), signal.SIGKILL))
    assert story.left_s == SHUTDOWN_S


def test_asked_to_stop_while_an_unhealthy_worker_ends_it_leaves_and_the_failure_stays_one() -> None:
    story = stopping_for_a_worker_that_hangs()
    reason = "the agent was asked to stop (SIGTERM)"
    assert story.tell(ev.StopRequested()) == [ev.TellLeft(reason)]
    story.end(0)
    assert story.end(1) == [ev.Finish(reason)]
    assert (story.group.state, story.group.exits.failed) == (WorkerState.STOPPED, {0: HANGS})


# Interruptions and verdicts from elsewhere.


def test_only_those_that_still_run_are_stopped() -> None:
    story = running()
    story.end(0)
    assert story.tell(interrupted(1)) == [ev.Stop(1, (1,), signal.SIGTERM)]
    assert (story.group.state, story.group.reason) == (WorkerState.STOPPED, interrupted(1).reason)
    assert story.end(1) == [ev.Join()]
    assert set(story.group.exits.stopped) == {1}


def test_a_final_failure_elsewhere_stops_the_workers_and_ends_the_run() -> None:
    story = running()
    assert story.tell(FAILED) == [ev.Stop(1, (0, 1), signal.SIGTERM)]
    assert story.group.state is WorkerState.UNHEALTHY
    assert story.end(0, 1) == [ev.Finish(FAILED.reason)]
    assert (story.group.state, story.group.exits.failed) == (WorkerState.FAILED, {})


# Stop.


def test_a_request_to_stop_is_told_and_passed_on_with_its_signal() -> None:
    story = running()
    left, stop = story.tell(ev.StopRequested(signal.SIGINT))
    assert left == ev.TellLeft("the agent was asked to stop (SIGINT)")
    assert stop == ev.Stop(1, (0, 1), signal.SIGINT)
    assert story.left_s == SHUTDOWN_S
    assert story.end(0, 1) == [ev.Finish(left.reason)]
    assert (story.group.state, set(story.group.exits.stopped)) == (WorkerState.STOPPED, {0, 1})


def test_asked_again_and_again_it_kills_a_limited_number_of_times_and_does_not_wait_longer() -> None:
    story = stopping_for_good()
    for _ in range(KILL_COUNT_MAX):
        assert story.tell(ev.StopRequested()) == [ev.Stop(1, (0, 1), signal.SIGKILL)]
    deadline = story.group.deadline
    story.now += 1
    assert story.tell(ev.StopRequested()) == []
    assert story.group.deadline == deadline


def test_a_request_during_a_stop_for_another_round_leaves_instead() -> None:
    story = stopping_for_another_round()
    deadline = story.group.deadline
    story.now += 1
    left, *others = story.tell(ev.StopRequested())
    assert isinstance(left, ev.TellLeft)
    assert not others
    assert story.group.deadline == deadline
    assert story.end(0, 1) == [ev.Finish(left.reason)]
    assert story.group.state is WorkerState.STOPPED


def test_a_request_after_a_failure_leaves_and_a_late_answer_is_not_for_us() -> None:
    story = stopping_for_a_failure()
    assert story.tell(ev.StopRequested()) == [ev.TellLeft("the agent was asked to stop (SIGTERM)")]
    assert story.tell(FAILED) == []
    assert story.tell(interrupted(1)) == []
    story.tell(ev.Cleared(1, 0))
    assert story.end(1) == [ev.Finish("the agent was asked to stop (SIGTERM)")]
    assert (story.group.state, story.group.verdict) == (WorkerState.STOPPED, None)


def test_a_second_request_during_the_stop_for_a_final_failure_kills_and_keeps_the_verdict() -> None:
    story = stopping_for_the_verdict()
    assert story.tell(ev.StopRequested(signal.SIGINT)) == [], "the first one keeps it, too"
    assert story.tell(ev.StopRequested()) == [ev.Stop(1, (0, 1), signal.SIGKILL)]
    story.tell(ev.Cleared(1, 0))
    assert story.end(1) == [ev.Finish(FAILED.reason)]
    assert (story.group.state, story.group.verdict) == (WorkerState.FAILED, FAILED)


# Deadlines.


@pytest.mark.parametrize("story", [stopping_for_another_round, stopping_for_good])
def test_workers_that_ignore_the_request_are_killed_when_the_time_is_up(story: Any) -> None:
    told = story()
    told.end(0)
    assert told.pass_deadline() == [ev.Stop(1, (1,), signal.SIGKILL)]
    assert told.left_s == KILL_WAIT_S


@pytest.mark.parametrize("story", [stopping_for_another_round, stopping_for_a_failure])
def test_in_a_restart_workers_are_killed_as_soon_as_waiting_cannot_help(story: Any) -> None:
    told = story()
    told.end(0)
    told.now += 2.0
    assert told.tell(ev.GraceOver(1, "rank 5 does nothing")) == [ev.Stop(1, (1,), signal.SIGKILL)]
    assert (told.left_s, told.group.exits.is_killing) == (KILL_WAIT_S, True)
    assert told.tell(ev.GraceOver(1, "rank 5 does nothing")) == []
    assert told.left_s == KILL_WAIT_S


@pytest.mark.parametrize(
    "story", [stopping_for_another_round, stopping_for_a_failure, stopping_for_good, stopping_for_the_verdict]
)
def test_a_worker_that_survives_sigkill_cannot_hold_the_agent_for_ever(story: Any) -> None:
    told = story()
    begin = told.now
    assert [type(action) for _ in range(KILL_COUNT_MAX) for action in told.pass_deadline()] == [
        ev.Stop
    ] * KILL_COUNT_MAX
    assert told.pass_deadline() == [ev.TellLeft("workers survived SIGKILL"), ev.Finish("workers survived SIGKILL")]
    assert told.now - begin == SHUTDOWN_S + KILL_COUNT_MAX * KILL_WAIT_S
    assert told.group.state is WorkerState.UNKNOWN
    assert 1 in told.group.exits.unended


# Fences.


def test_an_exit_of_an_earlier_generation_does_not_stop_a_healthy_group() -> None:
    story = stopping_for_another_round()
    story.end(0, 1)
    story.tell(assigned(2), ev.Spawned(2, {0: 800, 1: 801}))
    for stale in (
        ev.Exited(1, 1, FAILURE),
        ev.Exited(1, 0, None),
        ev.Cleared(1, 0),
        ev.FoundUnhealthy(1, 0, HANGS, signal.SIGKILL),
        ev.Spawned(1, {0: 1, 1: 2}),
    ):
        before = seen(story.group)
        assert story.tell(stale) == []
        assert seen(story.group) == before
    assert [worker.id for worker in story.group.workers] == [800, 801]


GRACE_OVER = ev.GraceOver(1, "rank 5 does nothing")
HANGS_TOO = ev.FoundUnhealthy(1, 1, OTHER_HANGS, signal.SIGKILL)
NOT_ARMED: list[Callable[[], Story]] = [Story, joining, running, awaiting, done]
NOTHING_FOLLOWS: list[tuple[str, Callable[[], Story], tuple[ev.Event, ...], tuple[ev.Event, ...]]] = [
    # what it is, where, what comes before, what changes nothing then
    ("an exit that is told twice", running, (ev.Exited(1, 0, None), ev.Cleared(1, 0)),
     (ev.Exited(1, 0, FAILURE), ev.Cleared(1, 0))),
    ("a local rank that does not exist", running, (),
     (ev.Exited(1, 9, FAILURE), ev.Cleared(1, -1), ev.FoundUnhealthy(1, 2, HANGS, signal.SIGKILL))),
    ("an exit of a worker that was not started", spawning, (), (ev.Exited(1, 0, None), ev.Cleared(1, 0))),
    ("an exit while the start is cancelled", cancelling_for_good, (), (ev.Exited(1, 0, None), ev.Cleared(1, 0))),
    ("an interruption of an earlier round", lambda: running(2), (), (interrupted(1),)),
    ("an interruption of a round to come", lambda: running(2), (), (interrupted(3),)),
    ("an interruption of the last round", joining_again, (), (interrupted(1),)),
    ("a second verdict", stopping_for_the_verdict, (), (SUCCEEDED,)),
    ("a round that completes while we leave", joining, (ev.StopRequested(),), (assigned(1),)),
    ("found unhealthy twice", stopping_for_a_worker_that_hangs, (),
     (ev.FoundUnhealthy(1, 0, OTHER_HANGS, signal.SIGKILL),)),
    ("unhealthy, stopped for another round", stopping_for_another_round, (), (HANGS_TOO,)),
    ("unhealthy, stopped for good", stopping_for_good, (), (HANGS_TOO,)),
    ("unhealthy, stopped for the verdict", stopping_for_the_verdict, (), (HANGS_TOO,)),
    ("unhealthy, ended by itself", running, (ev.Exited(1, 1, None),), (HANGS_TOO,)),
    ("unhealthy, not started", spawning, (), (HANGS_TOO,)),
    ("the end of the grace in a stop for good", stopping_for_good, (), (GRACE_OVER,)),
    ("the end of the grace after the verdict", stopping_for_the_verdict, (), (GRACE_OVER,)),
    ("the end of the grace after a request", stopping_for_another_round, (ev.StopRequested(),), (GRACE_OVER,)),
    ("the end of an earlier grace", stopping_for_another_round, (), (ev.GraceOver(0, "rank 5 does nothing"),)),
    ("the end of a grace while all run", running, (), (GRACE_OVER,)),
    *((f"a timer where none is armed: {where.__name__}", where, (), (ev.DeadlinePassed(),))
      for where in NOT_ARMED),
    ("a timer before the deadline of a stop", stopping_for_good, (), (ev.DeadlinePassed(),)),
    ("a timer before the deadline of the barrier", in_the_barrier, (), (ev.DeadlinePassed(),)),
]  # fmt: skip


@pytest.mark.parametrize(
    "where, before, events", [case[1:] for case in NOTHING_FOLLOWS], ids=[case[0] for case in NOTHING_FOLLOWS]
)
def test_nothing_follows(
    where: Callable[[], Story], before: tuple[ev.Event, ...], events: tuple[ev.Event, ...]
) -> None:
    story = where()
    story.tell(*before)
    story.now += 1 if story.group.deadline is not None else 10_000
    for event in events:
        known = seen(story.group)
        assert story.tell(event) == []
        assert seen(story.group) == known


# Every pair is decided.

STORIES: dict[str, Callable[[], Story]] = {
    "init": Story,
    "joining": joining,
    "spawning": spawning,
    "running": running,
    "cancelling for another round": cancelling_for_another_round,
    "cancelling for good": cancelling_for_good,
    "cancelling for the verdict": cancelling_for_the_verdict,
    "stopping for another round": stopping_for_another_round,
    "stopping for a failure": stopping_for_a_failure,
    "stopping for a worker that hangs": stopping_for_a_worker_that_hangs,
    "stopping for good": stopping_for_good,
    "stopping for the verdict": stopping_for_the_verdict,
    "awaiting": awaiting,
    "barrier": in_the_barrier,
    "done": done,
}
EVENTS: dict[str, ev.Event] = {
    "start": ev.Start(),
    "assigned": assigned(2),
    "assigned, stale": assigned(0),
    "interrupted": interrupted(1),
    "interrupted, stale": interrupted(0),
    "failed": FAILED,
    "succeeded": SUCCEEDED,
    "timed out": TIMED_OUT,
    "spawned": ev.Spawned(1, {0: 700, 1: 701}),
    "spawn cancelled": ev.SpawnCancelled(1),
    "spawn cancelled, stale": ev.SpawnCancelled(0),
    "exited": ev.Exited(1, 1, None),
    "exited, failed": ev.Exited(1, 1, OTHER_FAILURE),
    "exited, stale": ev.Exited(0, 0, FAILURE),
    "cleared": ev.Cleared(1, 0),
    "cleared, stale": ev.Cleared(0, 0),
    "unhealthy": ev.FoundUnhealthy(1, 1, OTHER_HANGS, signal.SIGKILL),
    "unhealthy, stale": ev.FoundUnhealthy(0, 0, HANGS, signal.SIGKILL),
    "grace over": ev.GraceOver(1, "rank 5 does nothing"),
    "grace over, stale": ev.GraceOver(0, "rank 5 does nothing"),
    "drained": ev.Drained(1, (0,), 100.0),
    "drained, by themselves": ev.Drained(1, (), 100.0),
    "drained, stale": ev.Drained(0, (0,), 100.0),
    "stop": ev.StopRequested(),
    "deadline": ev.DeadlinePassed(),
}
IMPOSSIBLE = {
    *((where, "start") for where in STORIES if where != "init"),
    ("init", "assigned, stale"),
    *((where, "assigned") for where in STORIES if where not in {"joining", "done"}),
    *((where, "spawn cancelled") for where in STORIES if where.startswith(("spawning", "running", "stopping"))),
}


def seen(group: WorkerGroup) -> dict[str, Any]:
    """All that a group knows, but for the story it tells."""
    return {name: copy.deepcopy(getattr(group, name)) for name in WorkerGroup.__dataclass_fields__ if name != "_story"}


def test_the_walk_covers_every_phase_and_every_event() -> None:
    assert {make().group.phase for make in STORIES.values()} == set(Phase)
    assert {type(event) for event in EVENTS.values()} == set(get_args(ev.Event))


@pytest.mark.parametrize("where, what", list(itertools.product(STORIES, EVENTS)))
def test_every_pair_of_phase_and_event_is_decided(where: str, what: str) -> None:
    story, event = STORIES[where](), EVENTS[what]
    before, told = seen(story.group), story.group.story
    story.now += 1_000_000  # any deadline has passed
    if (where, what) not in IMPOSSIBLE:
        actions = story.tell(event)
        if where == "done":
            assert actions == []
            assert seen(story.group)["phase"] is Phase.DONE
        assert len(story.group.story) == len(told) + 1
        assert repr(event)[:STORY_EVENT_CHARS_MAX] in story.group.story[-1]
        return
    with pytest.raises(InvalidTransition) as caught:
        story.tell(event)
    assert seen(story.group) == before
    assert (caught.value.phase, caught.value.event, caught.value.story) == (before["phase"], event, told)
    assert str(before["phase"]) in str(caught.value)


def test_the_story_is_bounded() -> None:
    story = running()
    for _ in range(500):
        story.tell(ev.DeadlinePassed())
    assert len(story.group.story) == 64


@pytest.mark.parametrize(
    "exited, failed, stopped",
    [
        (ev.Exited(1, 1, None), {0: FAILURE}, {1: None}),  # a victim, and no culprit
        (ev.Exited(1, 1, None, None, OTHER_FAILURE), {0: FAILURE}, {1: OTHER_FAILURE}),  # it raised before
        (ev.Exited(1, 1, OTHER_FAILURE), {0: FAILURE, 1: OTHER_FAILURE}, {}),  # it failed before it could be asked
    ],
)
def test_a_worker_that_ends_while_others_are_stopped_is_a_victim_unless_it_had_failed(
    exited: ev.Exited, failed: dict[int, ProcessFailure], stopped: dict[int, ProcessFailure | None]
) -> None:
    story = stopping_for_a_failure()
    story.tell(exited)
    assert (story.group.exits.failed, story.group.exits.stopped) == (failed, stopped)
