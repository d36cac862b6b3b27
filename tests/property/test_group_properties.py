"""The worker group in a fake world: workers, a coordinator, people and clocks act at random."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kit import decided
from kit.effort import examples

from aelastic.agent.group import events as ev
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.errors import ProcessFailure
from aelastic.rdzv.protocol.messages import Assigned, Ended, Interrupted, Outcome
from aelastic.rdzv.protocol.ranks import assign_ranks
from aelastic.spec import WorkerSpec
from aelastic.workers.states import KILL_COUNT_MAX, Phase, WorkerState

WORKERS = 3
# A stop request starts the stop deadline, and each SIGKILL restarts it; the next deadline is the end.  Waiting for a
# leftover adds one more in front.
DEADLINES_TO_THE_END = KILL_COUNT_MAX + 2
FAILURE = ProcessFailure.from_elsewhere("host", 0, 0, 77, 1, "ValueError", "", 1000)
HANGS = ProcessFailure.from_elsewhere("host", 0, 0, 77, -9, "timer 'step' expired", "", 1)
# Used to stop no other worker.
HANGS_WITH = signal.SIGUSR1
VERDICTS = [Ended(Outcome.FAILED, decided.refused(3), FAILURE), Ended(Outcome.SUCCEEDED, decided.SUCCEEDED)]


class FakeWorld(RuleBasedStateMachine):
    """Carries out actions, answers only those, and keeps its own books."""

    def __init__(self) -> None:
        super().__init__()
        self.group = WorkerGroup(
            WorkerSpec(entrypoint="x", local_world_size=WORKERS, shutdown_timeout_s=30, exit_barrier_timeout_s=300)
        )
        self.now = 0.0
        self.alive: dict[tuple[int, int], str] = {}  # generation and local rank: "runs", or "left something behind"
        self.past: list[ev.Event] = []  # events of workers, each delivered once
        self.generation = 0  # the last one started
        self.spawned: set[int] = set()  # generations that the back end reported
        self.is_starting = self.is_cancelled = False  # the last generation
        self.round = 0
        self.is_ready = self.is_ended = False
        self.lefts = 0
        self.is_interrupted = True  # the coordinator has ended the current round, or there is no round
        self.reported_failures: list[int] = []
        self.reported_successes: list[int] = []
        self.finished: list[ev.Finish] = []
        self.restarts_allowed = 0  # interruptions: each permits one more spawn
        self.spawns = 0
        self.stop_requests = 0
        self.real_failures = 0
        self.failed: set[int] = set()  # local ranks that failed in this generation
        self.signalled: set[int] = set()  # those that were asked to exit, but not for being unhealthy
        self.unhealthy: set[int] = set()  # those treated as failed while they are alive
        self.stops_for = ""  # "a failure", or "something else"

    # Actions.

    def handle(self, event: ev.Event) -> None:
        for action in self.group.handle(event, self.now):
            assert not self.finished, f"{action} after Finish"
            self.carry_out(action)

    def carry_out(self, action: Any) -> None:
        match action:
            case ev.Join():
                assert not self.alive and not self.is_starting, "ready while workers are alive, or may start"
                assert not self.is_ready and not self.lefts, "ready twice, or after leaving"
                self.is_ready = True
            case ev.Spawn(generation, assigned):
                assert not self.alive and not self.is_starting, "two generations alive at once"
                assert generation == self.generation + 1
                assert assigned is not None and assigned.round == self.round
                self.generation = generation
                self.is_starting, self.is_cancelled = True, False
                self.failed, self.signalled, self.unhealthy = set(), set(), set()
                self.stops_for = ""
                self.spawns += 1
            case ev.CancelSpawn(generation):
                assert generation == self.generation and self.is_starting, "nothing is being started"
                self.is_cancelled = True
            case ev.Stop():
                self.send(action)
            case ev.ReportFailed(round_):
                assert round_ == self.round
                assert round_ not in self.reported_failures, "one failure a round"
                assert self.real_failures, "a failure that no worker had"
                self.reported_failures.append(round_)
            case ev.ReportSucceeded(round_):
                assert not self.alive and round_ == self.round
                assert round_ not in self.reported_failures + self.reported_successes
                self.reported_successes.append(round_)
            case ev.ReportLeft():
                self.lefts += 1
                assert self.lefts <= 2, "told once when asked to leave, and once more when giving up"
            case ev.Finish():
                self.finished.append(action)
            case _:
                raise AssertionError(action)

    def send(self, stop: ev.Stop) -> None:
        local_ranks = set(stop.local_ranks)
        assert stop.generation == self.generation, "a signal for a generation that is gone"
        assert len(local_ranks) == len(stop.local_ranks)
        for rank in local_ranks:
            assert (stop.generation, rank) in self.alive, "a signal for no worker"
            assert stop.signum == signal.SIGKILL or self.alive[stop.generation, rank] == "runs"
        if stop.signum == HANGS_WITH:
            assert local_ranks <= self.unhealthy, "a signal for workers that it was not meant for"
            return
        assert stop.signum == signal.SIGKILL or not local_ranks & self.unhealthy, "asked to exit in two ways"
        self.signalled |= local_ranks - self.unhealthy

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator still talks to this node, perhaps because it has not processed the departure yet."""
        return not self.is_ended and not self.finished

    def changes_nothing(self, event: ev.Event) -> None:
        before = everything(self.group)
        assert self.group.handle(event, self.now) == []
        assert everything(self.group) == before

    # Events.

    @initialize()
    def start(self) -> None:
        self.handle(ev.Start())

    @precondition(lambda self: self.is_ready and self.is_connected)
    @rule(skipped=st.integers(0, 2), size=st.integers(1, 3))
    def round_completes(self, skipped: int, size: int) -> None:
        self.is_ready, self.is_interrupted = False, False
        self.round += 1 + skipped
        ranks = assign_ranks([("default", WORKERS)] * size)[-1]
        self.handle(Assigned(self.round, 0, ranks, "host0", 29500))

    @precondition(lambda self: not self.is_interrupted and self.is_connected)
    @rule()
    def round_is_interrupted(self) -> None:
        self.is_interrupted = True
        self.stops_for = "something else"
        self.restarts_allowed += 1
        self.handle(Interrupted(self.round, decided.restart()))

    @precondition(lambda self: self.round and self.is_connected)
    @rule(verdict=st.sampled_from(VERDICTS))
    def job_ends(self, verdict: Ended) -> None:
        self.is_ended = True
        self.stops_for = "something else"
        self.handle(verdict)

    @precondition(lambda self: self.is_starting and self.is_cancelled)
    @rule()
    def start_is_cancelled(self) -> None:
        self.is_starting = False
        event = ev.SpawnCancelled(self.generation)
        self.past.append(event)
        self.handle(event)

    @precondition(lambda self: self.is_starting)
    @rule()
    def back_end_answers(self) -> None:
        self.is_starting = False
        if not self.finished:  # otherwise the run kills at once whatever still starts
            self.alive = {(self.generation, rank): "runs" for rank in range(WORKERS)}
        self.spawned.add(self.generation)
        event = ev.Spawned(self.generation, {rank: 100 * self.generation + rank for rank in range(WORKERS)})
        self.past.append(event)
        self.handle(event)

    @precondition(lambda self: self.generation in self.spawned and "runs" in self.alive.values())
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]), clears=st.booleans())
    def worker_exits(self, data: Any, fails: bool, clears: bool) -> None:
        generation, rank = data.draw(st.sampled_from(sorted(w for w, how in self.alive.items() if how == "runs")))
        event = self.exit(generation, rank, fails=fails)
        self.past.append(event)
        self.handle(event)
        if clears:
            self.clear(generation, rank)

    def exit(self, generation: int, rank: int, *, fails: bool) -> ev.Exited:
        self.alive[generation, rank] = "left something behind"
        fails = fails and rank not in self.signalled  # later reports are ignored
        if fails and rank not in self.unhealthy:
            self.fail(rank)
        return ev.Exited(generation, rank, FAILURE if fails else None)

    def fail(self, rank: int) -> None:
        self.real_failures += 1
        self.failed.add(rank)
        self.stops_for = self.stops_for or "a failure"

    @precondition(lambda self: "runs" in self.alive.values())
    @rule(data=st.data())
    def workers_hang(self, data: Any) -> None:
        """Usually several, since they wait for each other."""
        running = sorted(worker for worker, how in self.alive.items() if how == "runs")
        for generation, rank in data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True)):
            self.find_unhealthy(generation, rank)

    def find_unhealthy(self, generation: int, rank: int) -> None:
        event = ev.FoundUnhealthy(generation, rank, HANGS, HANGS_WITH)
        is_let_be = rank in self.unhealthy or self.stops_for == "something else"
        if is_let_be or generation not in self.spawned or self.finished:
            self.changes_nothing(event)
            return
        self.unhealthy.add(rank)
        self.fail(rank)
        self.past.append(event)
        self.handle(event)
        failed = self.group.exits.failed[rank]  # with its rank in this round
        assert failed.replace(rank=HANGS.rank, world_size=HANGS.world_size) == HANGS

    @precondition(lambda self: "left something behind" in self.alive.values())
    @rule(data=st.data())
    def leftover_goes(self, data: Any) -> None:
        left = sorted(w for w, how in self.alive.items() if how != "runs")
        self.clear(*data.draw(st.sampled_from(left)))

    def clear(self, generation: int, rank: int) -> None:
        del self.alive[generation, rank]
        event = ev.Cleared(generation, rank)
        self.past.append(event)
        self.handle(event)

    @precondition(lambda self: self.generation in self.spawned and "runs" in self.alive.values())
    @rule(fails=st.booleans())
    def all_workers_end(self, fails: bool) -> None:
        """A shortcut: a random walk alone rarely reaches the next generation."""
        for generation, rank in sorted(w for w, how in self.alive.items() if how == "runs"):
            self.handle(self.exit(generation, rank, fails=fails))
        for generation, rank in sorted(self.alive):
            self.clear(generation, rank)

    @precondition(lambda self: self.stop_requests < 4)
    @rule(signum=st.sampled_from([signal.SIGTERM, signal.SIGINT]), seldom=st.integers(0, 3))
    def a_stop_is_requested(self, signum: int, seldom: int) -> None:
        if seldom == 0:
            self.stop_requests += 1
            self.stops_for = "something else"
            self.handle(ev.StopRequested(signum))

    @precondition(lambda self: self.generation > 0)
    @rule()
    def waiting_cannot_help(self) -> None:
        is_restart = self.group.phase is Phase.STOPPING and not self.stop_requests and not self.is_ended
        killed = self.group.exits.is_killing
        event = ev.GraceOver(self.generation, "rank 0 does nothing")
        if is_restart and not killed and not self.group.is_leaving:
            self.handle(event)
            assert self.group.exits.is_killing
        else:
            self.changes_nothing(event)

    @precondition(lambda self: self.group.deadline is not None)
    @rule()
    def deadline_passes(self) -> None:
        assert self.group.deadline is not None
        self.now = max(self.now, self.group.deadline)
        self.stops_for = self.stops_for or "something else"  # a leftover, which is not a failure
        self.handle(ev.DeadlinePassed())

    @precondition(lambda self: self.group.deadline is None or self.now < self.group.deadline)
    @rule()
    def spurious_timer(self) -> None:
        self.changes_nothing(ev.DeadlinePassed())

    @rule(dt=st.floats(0, 5))
    def time_passes(self, dt: float) -> None:
        limit = self.group.deadline
        self.now = self.now + dt if limit is None else max(self.now, min(self.now + dt, limit - 0.001))

    @precondition(lambda self: self.generation > 0)
    @rule(data=st.data(), rank=st.integers(0, WORKERS - 1), failure=st.sampled_from([None, FAILURE]))
    def stale_event_of_a_worker(self, data: Any, rank: int, failure: ProcessFailure | None) -> None:
        generation = data.draw(st.integers(0, self.generation - 1))
        self.changes_nothing(ev.Exited(generation, rank, failure))
        self.changes_nothing(ev.Cleared(generation, rank))
        self.changes_nothing(ev.FoundUnhealthy(generation, rank, HANGS, HANGS_WITH))
        self.changes_nothing(ev.Spawned(generation, {rank: 1}))
        self.changes_nothing(ev.GraceOver(generation, "rank 0 does nothing"))
        self.changes_nothing(ev.SpawnCancelled(generation))

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def event_of_a_worker_comes_twice(self, data: Any) -> None:
        self.changes_nothing(data.draw(st.sampled_from(self.past)))

    @precondition(lambda self: self.spawns)
    @rule(data=st.data())
    def stale_assignment(self, data: Any) -> None:
        ranks = assign_ranks([("default", WORKERS)])[0]
        assert self.group.assigned is not None
        round_ = data.draw(st.integers(0, self.group.assigned.round))
        self.changes_nothing(Assigned(round_, 0, ranks, "host0", 29500))

    @precondition(lambda self: self.round > 1)
    @rule(data=st.data())
    def stale_interruption(self, data: Any) -> None:
        self.changes_nothing(Interrupted(data.draw(st.integers(0, self.round - 1)), decided.restart()))

    # Invariants.

    @invariant()
    def books_agree(self) -> None:
        assert self.spawns <= 1 + self.restarts_allowed, "a restart that was not permitted"
        assert len(self.finished) <= 1
        assert self.group.is_done == bool(self.finished)
        if not self.finished:
            assert {rank for _, rank in self.alive} == set(self.group.exits.unended)
        assert len(self.group.workers) == (WORKERS if self.generation else 0)
        assert set(self.group.exits.failed) <= self.failed
        assert self.unhealthy <= set(self.group.exits.failed), "a worker that hung, and was forgotten"
        assert self.group.exits.stopped.keys() <= self.signalled
        assert set(self.group.exits.failed).isdisjoint(self.group.exits.stopped), "a culprit and a victim"

    @invariant()
    def state_means_what_is_documented(self) -> None:
        state, runs = self.group.state, bool(self.alive)
        match state:
            case WorkerState.INIT:
                assert not self.spawns
            case WorkerState.HEALTHY:
                assert self.spawns and not self.group.exits.failed
            case WorkerState.UNHEALTHY:
                assert self.spawns
            case WorkerState.STOPPED:
                assert self.restarts_allowed or self.stop_requests or self.reported_failures
            case WorkerState.SUCCEEDED:
                assert not runs and (self.finished or self.group.phase is Phase.BARRIER)
            case WorkerState.FAILED:
                assert self.finished and not runs
            case WorkerState.UNKNOWN:
                assert self.finished
        if runs and not self.finished:
            assert state not in {WorkerState.INIT, WorkerState.SUCCEEDED, WorkerState.FAILED, WorkerState.UNKNOWN}
        if state is not WorkerState.INIT and state is not WorkerState.HEALTHY:
            assert self.group.reason, f"{state} is not explained"

    @invariant()
    def whatever_ends_a_phase_is_bounded_or_up_to_others(self) -> None:
        armed = self.group.deadline is not None
        match self.group.phase:
            case Phase.CANCELLING | Phase.STOPPING | Phase.BARRIER:
                assert armed
            case Phase.RUNNING:
                assert armed == ("left something behind" in self.alive.values())
            case _:
                assert not armed

    @invariant()
    def a_stop_ends_the_run_within_some_deadlines_even_if_no_worker_ever_exits(self) -> None:
        self.must_end(copy.deepcopy(self.group), lambda group: group.handle(ev.StopRequested(), self.now))

    def must_end(self, group: WorkerGroup, ask: Callable[[WorkerGroup], Any]) -> None:
        if group.phase is Phase.INIT:
            return
        ask(group)
        for _ in range(DEADLINES_TO_THE_END):
            if group.is_done:
                return
            assert group.deadline is not None, f"{group.phase} would wait forever"
            group.handle(ev.DeadlinePassed(), group.deadline)
        assert group.is_done, f"still {group.phase} after {DEADLINES_TO_THE_END} deadlines"


def everything(group: WorkerGroup) -> dict[str, Any]:
    return {name: copy.copy(getattr(group, name)) for name in WorkerGroup.__dataclass_fields__ if name != "_trace"}


FakeWorld.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestGroupInAFakeWorld = FakeWorld.TestCase
