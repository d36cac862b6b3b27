"""Recovery in place, in a fake world with its own books of processes, rounds and charges."""

from __future__ import annotations

import signal
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kit import decided
from kit.effort import examples

from aelastic.agent.group import events as ev
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.base.machine import DeadlinePassed
from aelastic.errors import ProcessFailure
from aelastic.rdzv.protocol.messages import Assigned, Interrupted, StartAhead
from aelastic.rdzv.protocol.ranks import assign_ranks
from aelastic.spec import WorkerSpec
from aelastic.workers.states import KILL_COUNT_MAX, Phase

WORKERS = 3
FAILURE = ProcessFailure.from_elsewhere("host", 0, 0, 77, 1, "ValueError", "", 1000)
# A stop starts the deadline; each SIGKILL restarts it.
INTERRUPTIBLE = {Phase.PREPARING, Phase.RUNNING, Phase.LEAVING, Phase.STOPPING, Phase.AWAITING, Phase.BARRIER}
DEADLINES_TO_THE_END = KILL_COUNT_MAX + 2


class Process:
    """One process of a worker, as the world sees it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_alive = True
        self.round = -1  # its current round; -1: at the safe point, or not there yet
        self.left = -1  # the last round that it was in
        self.is_at_safe_point = self.is_leaving = self.is_done = self.may_end = False


class InPlaceWorld(RuleBasedStateMachine):
    """Carries out the group's actions, and answers only those."""

    def __init__(self) -> None:
        super().__init__()
        self.group = WorkerGroup(WorkerSpec(entrypoint="x", local_world_size=WORKERS))
        self.now = 0.0
        self.generation = self.round = 0
        self.processes: dict[int, Process] = {}  # by local rank: alive, or not cleaned up
        self.to_start: list[ev.Replace] = []
        self.is_starting = False  # a generation
        self.is_ready = False  # for the next round
        self.is_over = True  # the round
        self.charged: list[int] = []  # rounds with a reported failure
        self.kept: dict[int, int] = {}  # process numbers of the last round's survivors, by local rank
        self.stop_requests = 0
        self.is_finished = False

    def handle(self, event: ev.Event) -> None:
        for action in self.group.handle(event, self.now):
            self.carry_out(action)

    def carry_out(self, action: Any) -> None:  # noqa: C901, PLR0912  one case per action
        match action:
            case ev.Join(are_ready=are_ready):
                known = [*self.processes.values()]  # the end of one may be unknown yet
                is_in_place = len(known) == WORKERS and all(each.is_at_safe_point for each in known)
                assert is_in_place or not self.processes, "ready while workers are in a round, or on their way to one"
                assert are_ready == (is_in_place and not self.group.in_place.is_worn_out)
                assert not self.to_start and not self.is_starting
                self.is_ready = self.is_over = True
            case ev.Spawn(generation):
                assert not self.processes, "two generations alive at once"
                self.generation, self.is_starting = generation, True
            case ev.CancelSpawn():
                self.is_starting = False
                self.handle(ev.SpawnCancelled(self.generation))
            case ev.Begin(generation, local_ranks, assigned):
                assert (generation, assigned.round) == (self.generation, self.round) and not self.is_over
                for rank in local_ranks:
                    process = self.processes[rank]
                    assert process.is_at_safe_point, "a round begins with a worker that is not at the safe point"
                    process.is_at_safe_point, process.round = False, assigned.fence
                in_round = [each for each in self.processes.values() if each.round == assigned.fence]
                is_next = len(local_ranks) == WORKERS and self.kept
                assert not is_next or len(in_round) == WORKERS, "a round begins without a worker of this node"
                for rank, number in self.kept.items():
                    process = self.processes[rank]
                    assert process.number >= number, "an older process is back"
            case ev.Leave(_, local_ranks, round_):
                for rank in local_ranks:
                    process = self.processes[rank]
                    assert process.round == round_ and not process.is_leaving, "told to leave a round that it is not in"
                    process.is_leaving, process.is_done = True, False
                self.kept = {rank: self.processes[rank].number for rank in local_ranks}
            case ev.Replace(_, local_rank, number):
                assert local_rank not in self.processes, "replaced while the last process has not been cleaned up"
                assert all(each.local_rank != local_rank for each in self.to_start), "replaced twice"
                assert number > self.kept.get(local_rank, 0) - 1
                self.to_start.append(action)
            case ev.Release():
                assert all(each.is_done for each in self.processes.values()), "released before all are done"
                for process in self.processes.values():
                    process.may_end = True
            case ev.ReportOptedIn(round_):
                fences = {each.round for each in self.processes.values()}
                assert round_ == self.round and fences == {self.round}, "a worker is not in the round"
            case ev.ReportPrepared(are_ready):
                at_safe_point = [each for each in self.processes.values() if each.is_at_safe_point]
                is_worn_out = self.group.in_place.is_worn_out
                assert len(at_safe_point) == WORKERS * (are_ready or is_worn_out), (
                    "reported as ready, but not at the safe point"
                )
                assert self.is_ready and self.is_over, "this node is in the round"
            case ev.ReportFailed(round_):
                assert round_ == self.round and round_ not in self.charged, "one charge per round"
                self.charged.append(round_)
            case ev.ReportSucceeded():
                assert not self.processes
            case ev.Stop(_, local_ranks, signum):
                starting = {each.local_rank for each in self.to_start}  # SIGKILL is for every rank that has leftovers
                for rank in set(local_ranks) - starting:
                    assert rank in self.processes, "a signal for no worker"
                    if signum == signal.SIGKILL:
                        self.die(rank, None)
            case ev.ReportLeft() | ev.Finish():
                self.is_finished |= isinstance(action, ev.Finish)
            case _:
                raise AssertionError(action)

    # Workers.

    def die(self, rank: int, failure: ProcessFailure | None) -> None:
        process = self.processes[rank]
        if process.is_alive:
            process.is_alive = False
            self.pending.append((rank, failure))

    pending: list[tuple[int, ProcessFailure | None]]  # ends that the group does not know of

    @initialize(opt_in=st.sampled_from([True, True, True, False]))
    def start(self, opt_in: bool) -> None:
        self.pending = []
        self.handle(ev.Start())
        self.a_round_is_complete(size=1)
        self.workers_are_started()
        if opt_in:
            self.all_that_can_come_to_the_safe_point()

    @precondition(lambda self: bool(self.pending))
    @rule(clears=st.booleans())
    def an_end_is_seen(self, clears: bool) -> None:
        rank, failure = self.pending.pop(0)
        self.handle(ev.Exited(self.generation, rank, failure))
        if clears:
            self.clear(rank)

    def clear(self, rank: int) -> None:
        del self.processes[rank]
        self.handle(ev.Cleared(self.generation, rank))

    @precondition(lambda self: any(not each.is_alive for each in self.processes.values()))
    @rule(data=st.data())
    def leftovers_go(self, data: Any) -> None:
        unseen = {rank for rank, _ in self.pending}
        gone = sorted(rank for rank, each in self.processes.items() if not each.is_alive and rank not in unseen)
        if gone:
            self.clear(data.draw(st.sampled_from(gone)))

    @precondition(lambda self: self.is_starting)
    @rule()
    def workers_are_started(self) -> None:
        self.is_starting = False
        self.processes = {rank: Process(0) for rank in range(WORKERS)}
        self.kept = {}
        self.handle(ev.Spawned(self.generation, {rank: rank + 1 for rank in range(WORKERS)}))
        for rank in (0, 1):
            self.a_worker_comes_to_the_safe_point(rank)

    @precondition(lambda self: bool(self.to_start))
    @rule()
    def a_replacement_is_started(self) -> None:
        replace = self.to_start.pop(0)
        self.processes[replace.local_rank] = Process(replace.process)
        self.handle(ev.Replaced(self.generation, replace.local_rank, 9))

    @precondition(lambda self: not self.is_starting and bool(self.processes))
    @rule(rank=st.integers(0, WORKERS - 1))
    def a_worker_comes_to_the_safe_point(self, rank: int) -> None:
        process = self.processes.get(rank)
        if process is None or not process.is_alive or process.is_at_safe_point:
            return
        if process.round < 0 or process.is_leaving:
            process.left, process.round = process.round, -1
            process.is_at_safe_point, process.is_leaving = True, False
            self.handle(ev.Ready(self.generation, rank, process.number, process.left))

    @precondition(lambda self: not self.is_starting and bool(self.processes))
    @rule()
    def all_that_can_come_to_the_safe_point(self) -> None:
        """A shortcut: a random walk alone rarely reaches the next round."""
        while self.to_start:
            self.a_replacement_is_started()
        for rank in sorted(self.processes):
            self.a_worker_comes_to_the_safe_point(rank)

    @precondition(lambda self: any(each.round >= 0 for each in self.processes.values()))
    @rule(rank=st.integers(0, WORKERS - 1), what=st.sampled_from(["shares"] * 4 + ["is done"] * 3 + ["lost"]))
    def a_worker_sends(self, rank: int, what: str) -> None:
        """It has the state, is done, or, rarely, reports that there is no state."""
        process = self.processes.get(rank)
        if process is None or not process.is_alive or process.round < 0 or process.is_done:
            return
        known = self.generation, rank, process.number, process.round
        if what == "shares":
            self.handle(ev.Shared(*known, 5, 0))
        elif what == "is done" and not process.is_leaving:
            process.is_done = True
            self.handle(ev.Done(*known))
        elif what == "lost":
            self.handle(ev.StateLost(*known))

    @precondition(lambda self: self.group.phase is Phase.STOPPING)
    @rule()
    def all_that_are_stopped_end(self) -> None:
        while self.to_start:
            self.a_replacement_is_started()
        for rank in sorted(self.processes):
            self.die(rank, None)
        while self.pending:
            self.an_end_is_seen(clears=True)
        for rank in sorted(self.processes):
            self.clear(rank)

    @precondition(lambda self: bool(self.processes))
    @rule(rank=st.integers(0, WORKERS - 1), fails=st.booleans())
    def a_worker_dies(self, rank: int, fails: bool) -> None:
        process = self.processes.get(rank)
        if process is not None and process.is_alive and (fails or process.may_end):
            self.die(rank, FAILURE if fails else None)

    @rule(rank=st.integers(0, WORKERS - 1), number=st.integers(0, 3), round_=st.integers(-1, 3))
    def a_late_message_of_a_replaced_process(self, rank: int, number: int, round_: int) -> None:
        process = self.processes.get(rank)
        if process is None or number >= process.number:
            return
        for event in (
            ev.Ready(self.generation, rank, number, round_), ev.Done(self.generation, rank, number, round_),
            ev.StateLost(self.generation, rank, number, round_),
        ):  # fmt: skip
            before = repr(self.group.in_place), self.group.phase
            assert self.group.handle(event, self.now) == []
            assert (repr(self.group.in_place), self.group.phase) == before

    # The coordinator, people and clocks.

    @precondition(lambda self: self.is_ready and not self.is_finished)
    @rule(size=st.integers(1, 3))
    def a_round_is_complete(self, size: int) -> None:
        self.round += 1
        self.is_ready, self.is_over = False, False
        ranks = assign_ranks([("default", WORKERS)] * size)[-1]
        self.handle(Assigned(self.round, 0, ranks, "host0", 29500))

    @precondition(lambda self: self.is_ready and not self.is_finished)
    @rule()
    def a_running_round_can_be_left_in_place(self) -> None:
        self.handle(StartAhead())

    @precondition(lambda self: not self.is_over and not self.is_finished and self.group.phase in INTERRUPTIBLE)
    @rule(in_place=st.sampled_from([True, True, True, False]))
    def the_round_is_over(self, in_place: bool) -> None:
        self.is_over = True
        self.handle(Interrupted(self.round, decided.restart(), in_place=in_place))

    @precondition(lambda self: self.group.deadline is not None)
    @rule(seldom=st.integers(0, 9))
    def time_passes(self, seldom: int = 0) -> None:
        if seldom and self.group.phase is Phase.LEAVING:
            return
        assert self.group.deadline is not None
        self.now = max(self.now, self.group.deadline)
        self.handle(DeadlinePassed())

    @precondition(lambda self: not self.stop_requests)
    @rule(seldom=st.integers(0, 19))
    def a_stop_is_requested(self, seldom: int) -> None:
        if seldom == 0:
            self.stop_requests += 1
            self.handle(ev.StopRequested())

    @invariant()
    def survivors_are_those_that_live(self) -> None:
        for rank in self.group.in_place.kept if self.group.phase in {Phase.LEAVING, Phase.FORMING} else ():
            unseen = {each for each, _ in self.pending}
            assert rank in self.processes and (self.processes[rank].is_alive or rank in unseen), "a survivor is gone"

    def teardown(self) -> None:
        """After a stop the run ends, even if no worker exits by itself."""
        self.handle(ev.StopRequested())
        for _ in range(DEADLINES_TO_THE_END):
            if self.group.is_done:
                break
            while self.pending:
                self.an_end_is_seen(clears=True)
            if self.group.deadline is not None:
                self.time_passes()
        assert self.group.is_done, self.group.trace


TestRecoveryInPlace = InPlaceWorld.TestCase
TestRecoveryInPlace.settings = settings(
    max_examples=examples(200), stateful_step_count=60, deadline=None, suppress_health_check=[*HealthCheck]
)
