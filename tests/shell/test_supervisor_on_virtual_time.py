"""The supervisor with workers that run nowhere, on a clock that costs no time.

`FakeBackend` is also the proof that the extension point is small: start, wait, stop.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from kit.virtual_clock import Deadlock, DiskHangs, on_virtual_time

from aelastic import (
    InputError,
    RunResult,
    Supervisor,
    UnkillableWorkerError,
    WorkerBackend,
    WorkerExit,
    WorkerSpec,
    WorkerStart,
    WorkerState,
)
from aelastic.agent.postmortem import Postmortem
from aelastic.errors import HostError
from aelastic.group.phases import KILL_COUNT_MAX, KILL_WAIT_S
from aelastic.hangs.watch import Found, Watch
from aelastic.host.listeners import listen, loopback_address
from aelastic.logs.follower import Follower
from aelastic.logs.run_logs import RunLogs
from aelastic.observe.observer import Observer
from aelastic.observe.run_events import Noticed, RunEvent
from aelastic.rdzv.link import InProcessLink
from aelastic.tcpstore.host import _refusing

TERM, KILL = signal.SIGTERM, signal.SIGKILL


class RemoteBackend(WorkerBackend):
    """The smallest back end there can be: three methods.  Workers end when told to, or when a test says so."""

    def __init__(self) -> None:
        self.exits: dict[int, asyncio.Future[WorkerExit]] = {}

    async def start(self, starts: Sequence[WorkerStart]) -> Mapping[int, str]:
        self.exits = {start.local_rank: asyncio.get_running_loop().create_future() for start in starts}
        return {start.local_rank: f"remote-{start.local_rank}" for start in starts}

    async def wait(self, local_rank: int) -> WorkerExit:
        return await asyncio.shield(self.exits[local_rank])

    def stop(self, local_rank: int, signum: int) -> bool:
        was_running = not self.exits[local_rank].done()
        if was_running:
            self.exits[local_rank].set_result(WorkerExit(-signum))
        return was_running


@dataclass
class Plan:
    """What one worker does in one generation."""

    after_s: float = 10.0
    exit: WorkerExit = field(default_factory=lambda: WorkerExit(0))
    ignores: frozenset[int] = frozenset()  # signals
    dies_after_s: float = 0.0  # of a signal
    leaves_behind_s: float = 0.0  # something that lives on for so long


FOREVER = Plan(after_s=1e6)
STUBBORN = Plan(after_s=1e6, ignores=frozenset({TERM}))
UNKILLABLE = Plan(after_s=1e6, ignores=frozenset({TERM, KILL}))
SUCCEEDS = Plan()
FAILS = Plan(exit=WorkerExit(3))


class FakeBackend(WorkerBackend):
    """Follows a plan, worker by worker and generation by generation, and notes what it was asked to do."""

    def __init__(self, *generations: Sequence[Plan], start_s: float = 0.0) -> None:
        self.generations = list(generations)
        self.start_s = start_s
        self.starts: list[list[WorkerStart]] = []
        self.signals: list[tuple[float, int, int]] = []  # at, local rank, signal
        self.closed_at: list[float] = []
        self.running: set[int] = set()
        self.plans: Sequence[Plan] = ()
        self.deaths: dict[int, asyncio.Future[float]] = {}

    async def start(self, starts: Sequence[WorkerStart]) -> Mapping[int, int]:
        assert not self.running, "two generations alive at once"
        self.plans = self.generations[min(len(self.starts), len(self.generations) - 1)]
        self.starts.append(list(starts))
        self.deaths = {start.local_rank: asyncio.get_running_loop().create_future() for start in starts}
        await anyio.sleep(self.start_s)
        self.running = {start.local_rank for start in starts}
        return {start.local_rank: 100 * len(self.starts) + start.local_rank for start in starts}

    async def wait(self, local_rank: int) -> WorkerExit:
        plan, death = self.plans[local_rank], self.deaths[local_rank]
        with anyio.move_on_after(plan.after_s) as life:
            await asyncio.shield(death)
        if not life.cancelled_caught:
            await anyio.sleep(plan.dies_after_s)
        self.running.discard(local_rank)
        return plan.exit if life.cancelled_caught else WorkerExit(-int(death.result()))

    async def clear(self, local_rank: int) -> None:
        await anyio.sleep(self.plans[local_rank].leaves_behind_s)

    def stop(self, local_rank: int, signum: int) -> bool:
        self.signals.append((anyio.current_time(), local_rank, signum))
        if signum not in self.plans[local_rank].ignores and not self.deaths[local_rank].done():
            self.deaths[local_rank].set_result(signum)
        return local_rank in self.running

    def describe(self, local_rank: int) -> str:
        return f"worker {local_rank} of nowhere"

    async def aclose(self) -> None:
        self.closed_at.append(anyio.current_time())


class StoreStandIn:
    """Holds a port, serves nothing on it."""

    is_on_loopback = True

    def __init__(self, env: Mapping[str, str], *, is_bind_all: bool = False) -> None:
        self.listener: socket.socket | None = None
        self.served: list[int] = []
        stores.append(self)

    def open(self, port: int, loopback: str = "") -> int:
        if self.listener is None:
            self.listener = _refusing(lambda: listen(port, loopback_address(loopback) if loopback else ""), port)
        number: int = self.listener.getsockname()[1]
        return number

    def serve(self) -> None:
        self.served.append(self.open(0))

    async def run(self) -> None:
        await anyio.sleep_forever()

    async def aclose(self) -> None:
        if self.listener is not None:
            self.listener.close()


stores: list[StoreStandIn] = []


@pytest.fixture(autouse=True)
def _no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    stores.clear()
    monkeypatch.setattr("aelastic.agent.resources.StoreHost", StoreStandIn)


def work() -> None:
    """An entrypoint whose return value counts; it never runs here."""


def supervise(backend: WorkerBackend, workers: int = 2, **more: Any) -> Supervisor:
    options: dict[str, Any] = {"entrypoint": "train.py", "shutdown_timeout_s": 30.0, "max_restarts": 2, **more}
    return Supervisor(WorkerSpec(local_world_size=workers, **options), backend=backend)


@dataclass
class Running:
    """A run as a task of its own."""

    supervisor: Supervisor
    task: asyncio.Task[RunResult]


@asynccontextmanager
async def running(supervisor: Supervisor, until_s: float = 1.0) -> AsyncIterator[Running]:
    """Begins a run and lets it come so far."""
    task = asyncio.get_running_loop().create_task(supervisor.run())
    await anyio.sleep(until_s)
    try:
        yield Running(supervisor, task)
    finally:
        assert task.done(), "the test has not waited for the run"


def values_of(backend: FakeBackend, name: str) -> list[list[str]]:
    return [[start.env[name] for start in starts] for starts in backend.starts]


# The extension point.


@on_virtual_time
async def test_three_methods_are_a_back_end() -> None:
    backend = RemoteBackend()
    async with running(supervise(backend)) as run:
        assert run.supervisor.state is WorkerState.HEALTHY
        assert [worker.id for worker in run.supervisor.workers] == ["remote-0", "remote-1"]
        for rank, future in backend.exits.items():
            future.set_result(WorkerExit(0, rank))
        assert (await run.task).state is WorkerState.SUCCEEDED


@on_virtual_time
async def test_a_remote_worker_that_is_stopped_or_fails_is_told_like_a_local_one() -> None:
    backend = RemoteBackend()
    async with running(supervise(backend, max_restarts=0)) as run:
        backend.exits[1].set_result(WorkerExit(3, note="its machine went away"))
        result = await run.task
    assert (result.state, result.is_failed(), result.victims) == (WorkerState.FAILED, True, (0,))
    assert (result.failures[1].exitcode, result.failures[1].pid) == (3, -1)
    assert "its machine went away" in result.failures[1].message


# Success.


@on_virtual_time
async def test_return_values_are_keyed_by_global_rank() -> None:
    plans = [Plan(after_s=9 - rank, exit=WorkerExit(0, f"value {rank}")) for rank in range(3)]
    backend = FakeBackend(plans)
    result = await supervise(backend, 3, entrypoint=work).run()
    assert result.state is WorkerState.SUCCEEDED
    assert result.return_values == {0: "value 0", 1: "value 1", 2: "value 2"}
    assert (result.failures, result.victims) == ({}, ())
    assert anyio.current_time() == 9
    assert backend.closed_at == [9]


@on_virtual_time
async def test_a_run_is_not_over_before_what_the_workers_left_behind_is_gone() -> None:
    backend = FakeBackend([Plan(after_s=5, leaves_behind_s=4), Plan(after_s=6)])
    await supervise(backend).run()
    assert backend.closed_at == [9]


@on_virtual_time
async def test_a_worker_gets_the_environment_of_its_rank() -> None:
    backend = FakeBackend([SUCCEEDS] * 2)
    await supervise(backend, run_id="job", env={"HOME": "/nowhere"}, args=("--rank=${local_rank}", "7")).run()
    first, second = backend.starts[0]
    assert (second.env["RANK"], second.env["LOCAL_RANK"], second.env["WORLD_SIZE"]) == ("1", "1", "2")
    assert (second.env["TORCHELASTIC_RUN_ID"], second.env["HOME"]) == ("job", "/nowhere")
    assert int(second.env["AELASTIC_ROUND"]) % 1000 == 1 and second.env["AELASTIC_ROUND"] == first.env["AELASTIC_ROUND"]
    assert (first.args, second.args) == (("--rank=0", "7"), ("--rank=1", "7"))
    assert int(first.env["MASTER_PORT"]) == stores[0].served[0]


# Failure and restart.


@on_virtual_time
async def test_it_restarts_up_to_max_restarts_and_each_time_the_workers_are_told_which_it_is() -> None:
    backend = FakeBackend([FOREVER, FAILS])
    result = await supervise(backend, max_restarts=2).run()
    assert result.state is WorkerState.FAILED
    assert values_of(backend, "TORCHELASTIC_RESTART_COUNT") == [["0", "0"], ["1", "1"], ["2", "2"]]
    assert values_of(backend, "TORCHELASTIC_MAX_RESTARTS") == [["2", "2"]] * 3
    assert [values_of(backend, "MASTER_PORT")[n] for n in range(3)] == [[str(port)] * 2 for port in stores[0].served]
    assert len({path for (path, _) in values_of(backend, "TORCHELASTIC_ERROR_FILE")}) == 3
    assert anyio.current_time() == 30


@on_virtual_time
async def test_failures_and_victims_are_those_of_the_last_generation_by_global_rank() -> None:
    backend = FakeBackend([FAILS, FOREVER, FOREVER], [FOREVER, FOREVER, FAILS])
    result = await supervise(backend, 3, max_restarts=1).run()
    assert list(result.failures) == [2]
    assert (result.failures[2].exitcode, result.failures[2].pid, result.failures[2].local_rank) == (3, 202, 2)
    assert result.victims == (0, 1)
    assert "all 1 restarts are used up" in result.reason
    assert result.return_values == {}


def write(path: Path | None, text: str) -> None:
    assert path is not None
    path.write_text(text)


RAISED = 'Traceback (most recent call last):\n  File "t.py", line 3, in {}\nValueError: batch {} is empty\n'


@on_virtual_time
async def test_workers_that_raised_before_they_were_stopped_are_no_victims() -> None:
    """Rank 0 fails.  Of those that are stopped then, some had printed or recorded an exception of their own."""
    backend = FakeBackend([Plan(exit=WorkerExit(1))] + [FOREVER] * 6)
    async with running(supervise(backend, 7, max_restarts=0), until_s=9) as run:
        starts = backend.starts[0]
        for rank, text in (  # written as the workers would
            (0, RAISED.format("<module>", 0)),
            (1, RAISED.format("<module>", 1)),
            (2, ""),
            (3, RAISED.format("handled", 3)),  # and goes on
            (4, RAISED.format("<module>", 4)),  # long ago
            (6, RAISED.format("<module>", 0)),  # long ago, too: the machine is busy
        ):
            write(starts[rank].stderr, text)
        for rank in (4, 6):
            os.utime(str(starts[rank].stderr), (1e9, 1e9))
        starts[5].error_file.write_text('{"message": {"message": "OSError: recorded"}}')
        result = await run.task
    assert (list(result.failures), result.victims) == ([0], (2, 3, 4))
    assert {rank: (each.message, each.exitcode) for rank, each in result.raised.items()} == {
        1: ("ValueError: batch 1 is empty", -TERM),
        5: ("OSError: recorded", -TERM),
        6: ("ValueError: batch 0 is empty", -TERM),
    }


# Deadlines.


@on_virtual_time
async def test_workers_that_ignore_term_are_killed_after_exactly_the_shutdown_timeout() -> None:
    backend = FakeBackend([STUBBORN, FOREVER])
    async with running(supervise(backend, shutdown_timeout_s=45.0), until_s=8) as run:
        run.supervisor.stop()
        result = await run.task
    assert backend.signals == [(8, 0, TERM), (8, 1, TERM), (53, 0, KILL)]
    assert (result.state, result.victims, anyio.current_time()) == (WorkerState.STOPPED, (0, 1), 53)


@on_virtual_time
async def test_a_restart_grace_ends_earlier_than_the_shutdown_timeout_but_not_in_a_stop_for_good() -> None:
    backend = FakeBackend([FAILS, STUBBORN], [STUBBORN, STUBBORN])
    async with running(supervise(backend, restart_grace=3.0), until_s=20) as run:
        run.supervisor.stop()
        await run.task
    first, rest = backend.signals[:2], backend.signals[2:]
    assert first == [(10, 1, TERM), (13, 1, KILL)]
    assert rest == [(20, 0, TERM), (20, 1, TERM), (50, 0, KILL), (50, 1, KILL)]


@on_virtual_time
async def test_a_worker_that_survives_sigkill_ends_the_run_in_bounded_time_and_is_named() -> None:
    backend = FakeBackend([FOREVER, UNKILLABLE])
    async with running(supervise(backend), until_s=2) as run:
        run.supervisor.stop()
        with pytest.raises(UnkillableWorkerError) as caught:
            await run.task
    assert caught.value.processes == ("worker 1 of nowhere",)
    assert run.supervisor.state is WorkerState.UNKNOWN
    assert anyio.current_time() == 2 + 30 + KILL_COUNT_MAX * KILL_WAIT_S
    assert [signum for _, rank, signum in backend.signals if rank == 1] == [TERM] + [KILL] * KILL_COUNT_MAX
    assert len(backend.closed_at) == 1


@on_virtual_time
async def test_what_a_finished_worker_leaves_behind_for_ever_ends_the_run_in_bounded_time() -> None:
    backend = FakeBackend([Plan(after_s=1, leaves_behind_s=1e6), FOREVER])
    with pytest.raises(UnkillableWorkerError):
        await supervise(backend).run()
    assert anyio.current_time() == 1 + KILL_WAIT_S + 30 + KILL_COUNT_MAX * KILL_WAIT_S


# Stop.


@on_virtual_time
async def test_a_stop_passes_its_signal_on() -> None:
    backend = FakeBackend([FOREVER, FOREVER])
    async with running(supervise(backend)) as run:
        run.supervisor.stop(40)  # a signal that has no name
        result = await run.task
    assert backend.signals == [(1, 0, 40), (1, 1, 40)]
    assert (result.state, result.reason) == (WorkerState.STOPPED, "the agent was asked to stop (signal 40)")
    assert (result.failures, result.victims, result.is_failed()) == ({}, (0, 1), False)


@pytest.mark.parametrize("at, is_after", [(5, False), (20, True)])
@on_virtual_time
async def test_a_stop_after_the_verdict_ends_the_wait_for_agents_that_have_not_heard_it(
    monkeypatch: pytest.MonkeyPatch, at: int, is_after: bool
) -> None:
    """Also one that comes while workers are being stopped."""
    ended = list[float]()
    monkeypatch.setattr(InProcessLink, "hurry", lambda _: ended.append(anyio.current_time()))
    async with running(supervise(FakeBackend([FAILS, STUBBORN]), max_restarts=0), until_s=at) as run:
        run.supervisor.stop()
        await run.task
    assert ended == ([at] if is_after else [])


@on_virtual_time
async def test_a_stop_before_the_run_starts_nothing() -> None:
    backend = FakeBackend([FOREVER])
    supervisor = supervise(backend, 1)
    supervisor.stop()
    result = await supervisor.run()
    assert (result.state, backend.starts, len(backend.closed_at)) == (WorkerState.STOPPED, [], 1)


@pytest.mark.parametrize("steps", range(30))
@on_virtual_time
async def test_a_stop_at_any_moment_of_the_start_reaches_workers_that_start_all_the_same(steps: int) -> None:
    supervisor = supervise(RemoteBackend())
    async with running(supervisor, until_s=0) as run:
        for _ in range(steps):
            await asyncio.sleep(0)
        supervisor.stop()
        result = await run.task
    assert (result.state, anyio.current_time()) == (WorkerState.STOPPED, 0)


class SlowBackend(RemoteBackend):
    """Takes 5 s to start workers; may not let itself be cancelled meanwhile."""

    def __init__(self, *, shield: bool = False, start_s: float = 5.0) -> None:
        super().__init__()
        self.signals: list[int] = []
        self.shield, self.start_s = shield, start_s
        self.started_at: list[float] = []

    async def start(self, starts: Sequence[WorkerStart]) -> Mapping[int, str]:
        with anyio.CancelScope(shield=self.shield):
            await anyio.sleep(self.start_s)
        self.started_at.append(anyio.current_time())
        return await super().start(starts)

    def stop(self, local_rank: int, signum: int) -> bool:
        self.signals.append(signum)
        return super().stop(local_rank, signum)


@pytest.mark.parametrize("max_restarts", [0, 1])
@on_virtual_time
async def test_a_stop_while_a_slow_back_end_starts_workers_cancels_the_start(max_restarts: int) -> None:
    backend = SlowBackend()
    async with running(supervise(backend, 1, max_restarts=max_restarts)) as run:
        if max_restarts:
            await anyio.sleep(5)
            backend.exits[0].set_result(WorkerExit(1))
            await anyio.sleep(1)
        run.supervisor.stop()
        assert (await run.task).state is WorkerState.STOPPED
    assert (anyio.current_time(), backend.started_at) == ((7, [5]) if max_restarts else (1, []))


@on_virtual_time
async def test_workers_that_start_in_spite_of_a_stop_get_its_signal() -> None:
    backend = SlowBackend(shield=True)
    async with running(supervise(backend, 1)) as run:
        run.supervisor.stop()
        result = await run.task
    assert (result.state, result.victims) == (WorkerState.STOPPED, (0,))
    assert (anyio.current_time(), backend.started_at) == (5, [5])


@on_virtual_time
async def test_a_back_end_that_can_not_be_cancelled_is_no_worker_that_survives_sigkill() -> None:
    backend = SlowBackend(shield=True, start_s=100)
    async with running(supervise(backend, 1, shutdown_timeout_s=30)) as run:
        run.supervisor.stop()
        await anyio.sleep(35)
        assert run.supervisor.state is WorkerState.STOPPED
        result = await run.task
    assert (result.state, result.reason) == (WorkerState.STOPPED, "the agent was asked to stop (SIGTERM)")
    assert (backend.started_at, backend.signals) == ([100], [KILL]), "what it starts all the same is killed at once"


@on_virtual_time
async def test_a_stop_after_the_run_changes_nothing() -> None:
    supervisor = supervise(FakeBackend([SUCCEEDS]), 1)
    assert (await supervisor.run()).state is WorkerState.SUCCEEDED
    supervisor.stop()
    assert supervisor.state is WorkerState.SUCCEEDED


# Workers that do not do what is expected of them.


@dataclass
class WatchingStandIn:
    """Looks at no worker; a test says what is found."""

    on_found: Callable[[Found], Coroutine[Any, Any, None]]
    env: dict[str, str] = field(default_factory=lambda: {"WATCHED": "yes"})
    heard: list[tuple[Any, ...]] = field(default_factory=list)

    def open(self) -> None:
        self.heard.append(("open",))

    def started(self, generation: int, starts: Sequence[WorkerStart], ids: Mapping[int, Any]) -> None:
        self.heard.append(("started", generation, [start.local_rank for start in starts], dict(ids)))

    def ended(self, generation: int, local_rank: int) -> None:
        self.heard.append(("ended", generation, local_rank))

    async def run(self) -> None:
        await anyio.sleep_forever()

    def close(self) -> None:
        self.heard.append(("close",))


class Listener(Observer):
    def __init__(self) -> None:
        self.noticed: list[Noticed] = []

    def tell(self, event: RunEvent, now: float) -> None:
        if isinstance(event, Noticed):
            self.noticed.append(event)


@dataclass
class Watched:
    """A run, what is found of its workers, and what hears of it."""

    watching: list[WatchingStandIn]
    listener: Listener

    async def find(self, *local_ranks: int, generation: int = 1, signum: int | None = KILL, why: str = "hangs") -> None:
        """All at once, as a watch does."""
        async with anyio.create_task_group() as tasks:
            for rank in local_ranks:
                found = Found(generation, rank, "timer", f"{why} {rank}", signum)
                tasks.start_soon(self.watching[0].on_found, found)

    def supervise(self, backend: WorkerBackend, workers: int = 2, **more: Any) -> Supervisor:
        spec = WorkerSpec(local_world_size=workers, entrypoint="train.py", shutdown_timeout_s=30.0, **more)
        return Supervisor(spec, backend=backend, observers=[self.listener])


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    made: list[WatchingStandIn] = []

    def make(*arguments: Any) -> WatchingStandIn:
        made.append(WatchingStandIn(arguments[-1]))
        return made[-1]

    monkeypatch.setattr("aelastic.agent.resources.Watches", make)
    return Watched(made, Listener())


@on_virtual_time
async def test_watches_hear_which_workers_come_and_go_and_workers_get_their_variables(watched: Watched) -> None:
    backend = FakeBackend([FAILS, FOREVER], [Plan(after_s=2), SUCCEEDS])
    await watched.supervise(backend, max_restarts=1).run()
    assert watched.watching[0].heard == [
        ("open",),
        ("started", 1, [0, 1], {0: 100, 1: 101}),
        ("ended", 1, 0),
        ("ended", 1, 1),
        ("started", 2, [0, 1], {0: 200, 1: 201}),
        ("ended", 2, 0),
        ("ended", 2, 1),
        ("close",),
    ]
    assert values_of(backend, "WATCHED") == [["yes", "yes"]] * 2


@on_virtual_time
async def test_a_worker_that_hangs_is_stopped_as_asked_has_failed_and_all_start_again(watched: Watched) -> None:
    backend = FakeBackend([FOREVER, FOREVER], [SUCCEEDS, SUCCEEDS])
    async with running(watched.supervise(backend), until_s=4) as run:
        await watched.find(1, signum=signal.SIGUSR1)
        result = await run.task
    assert backend.signals == [(4, 1, signal.SIGUSR1), (4, 0, TERM)]
    assert (result.state, len(backend.starts)) == (WorkerState.SUCCEEDED, 2)
    assert watched.listener.noticed == [Noticed(1, 1, 1, "timer", "hangs 1", is_stopped=True)]


@on_virtual_time
async def test_what_it_was_stopped_for_is_its_failure_whatever_it_says_when_it_ends(watched: Watched) -> None:
    backend = RemoteBackend()
    async with running(watched.supervise(backend, max_restarts=0)) as run:
        await watched.find(1, signum=TERM)
        result = await run.task
    assert (result.failures[1].exitcode, result.failures[1].message) == (-TERM, "hangs 1")
    assert (list(result.failures), result.victims) == ([1], (0,))


@on_virtual_time
async def test_several_that_hang_have_all_failed_and_the_first_rank_of_them_is_the_reason(watched: Watched) -> None:
    backend = FakeBackend([STUBBORN] * 3)
    async with running(watched.supervise(backend, 3, max_restarts=0), until_s=4) as run:
        await watched.find(2, 0)
        result = await run.task
    assert {(rank, signum) for _, rank, signum in backend.signals if signum == KILL} == {
        (0, KILL),
        (1, KILL),
        (2, KILL),
    }
    assert [at for at, rank, signum in backend.signals if signum == KILL and rank != 1] == [4, 4]
    assert (sorted(result.failures), result.victims) == ([0, 2], (1,))
    assert "rank 0 failed" in result.reason
    assert sorted(noticed.local_rank for noticed in watched.listener.noticed) == [0, 2]


@on_virtual_time
async def test_what_is_only_to_be_reported_stops_no_worker(watched: Watched) -> None:
    backend = FakeBackend([SUCCEEDS] * 2)
    async with running(watched.supervise(backend)) as run:
        await watched.find(1, signum=None)
        result = await run.task
    assert (result.state, backend.signals) == (WorkerState.SUCCEEDED, [])
    assert watched.listener.noticed == [Noticed(1, 1, 1, "timer", "hangs 1", is_stopped=False)]


@on_virtual_time
async def test_what_is_found_too_late_is_dropped(watched: Watched) -> None:
    backend = FakeBackend([Plan(after_s=2), FOREVER], [Plan(after_s=50, exit=WorkerExit(3)), FOREVER], [SUCCEEDS] * 2)
    async with running(watched.supervise(backend, max_restarts=2), until_s=3) as run:
        await watched.find(0)  # it has succeeded
        await watched.find(1)
        await watched.find(1, why="hangs again")  # it is being stopped
        await anyio.sleep(1)
        await watched.find(0, 1, generation=1)  # of the generation before
        result = await run.task
    assert result.state is WorkerState.SUCCEEDED
    assert [noticed.reason for noticed in watched.listener.noticed] == ["hangs 1"]
    assert backend.signals == [(3, 1, KILL), (53, 1, TERM)]


class BrokenWatch(Watch):
    def started(self, generation: int, starts: Sequence[WorkerStart], ids: Mapping[int, Any]) -> None: ...

    def ended(self, generation: int, local_rank: int) -> None: ...

    async def run(self) -> None:
        await anyio.sleep(1)
        raise ZeroDivisionError("a bug of ours")


@on_virtual_time
async def test_a_watch_that_fails_is_told_and_the_job_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aelastic.hangs.watches._watches", lambda *_: [BrokenWatch()])
    spec = WorkerSpec(local_world_size=1, entrypoint="train.py")
    result = await Supervisor(spec, backend=FakeBackend([Plan(after_s=9, exit=WorkerExit(0))])).run()
    assert result.state is WorkerState.SUCCEEDED
    assert "watch BrokenWatch raised and was disabled" in caplog.text and "a bug of ours" in caplog.text


@on_virtual_time
async def test_a_worker_that_is_asked_to_end_is_a_victim_whatever_is_found_meanwhile(watched: Watched) -> None:
    backend = FakeBackend([Plan(after_s=1e6, dies_after_s=5)] * 2)
    async with running(watched.supervise(backend)) as run:
        run.supervisor.stop()
        await anyio.sleep(1)
        await watched.find(0, 1)
        result = await run.task
    assert (result.state, result.victims, result.failures) == (WorkerState.STOPPED, (0, 1), {})
    assert watched.listener.noticed == []
    assert {signum for _, _, signum in backend.signals} == {TERM}


@pytest.fixture
def _slow_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between what a watch finds and what follows from it, 2 s pass: stacks are taken, files are read."""
    look = Postmortem.of_living

    async def of_living(*arguments: Any) -> Any:
        await anyio.sleep(2)
        return await look(*arguments)

    monkeypatch.setattr(Postmortem, "of_living", of_living)


@pytest.mark.usefixtures("_slow_to_look")
@pytest.mark.parametrize("exit_", [WorkerExit(0), WorkerExit(3)])
@on_virtual_time
async def test_a_worker_that_ends_by_itself_while_it_is_looked_at_has_its_own_end(
    watched: Watched, exit_: WorkerExit
) -> None:
    backend = FakeBackend([Plan(after_s=5, exit=exit_), Plan(after_s=8)])
    async with running(watched.supervise(backend, max_restarts=0), until_s=4) as run:
        await watched.find(0)
        result = await run.task
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == ({0: 3} if exit_.exitcode else {})
    assert watched.listener.noticed == []


@pytest.mark.usefixtures("_slow_to_look")
@on_virtual_time
async def test_a_stop_that_is_asked_for_while_a_worker_is_looked_at_makes_it_a_victim(watched: Watched) -> None:
    backend = FakeBackend([Plan(after_s=1e6, dies_after_s=7)] * 2)
    async with running(watched.supervise(backend), until_s=4) as run:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watched.find, 0)
            await anyio.sleep(1)
            run.supervisor.stop()
        result = await run.task
    assert (result.state, result.victims, result.failures) == (WorkerState.STOPPED, (0, 1), {})
    assert backend.signals == [(5, 0, TERM), (5, 1, TERM)]
    assert watched.listener.noticed == []


@pytest.mark.usefixtures("_slow_to_look")
@on_virtual_time
async def test_what_was_found_of_a_generation_that_is_over_by_then_is_not_for_the_next(watched: Watched) -> None:
    backend = FakeBackend([FOREVER, Plan(after_s=5, exit=WorkerExit(3))], [SUCCEEDS, SUCCEEDS])
    async with running(watched.supervise(backend), until_s=4) as run:
        await watched.find(0)
        result = await run.task
    assert (result.state, len(backend.starts), anyio.current_time()) == (WorkerState.SUCCEEDED, 2, 15)
    assert backend.signals == [(5, 0, TERM)]
    assert watched.listener.noticed == []


# Cancellation.


@on_virtual_time
async def test_a_cancelled_task_stops_the_workers_and_then_lets_the_cancellation_through() -> None:
    backend = FakeBackend([STUBBORN, FOREVER])
    async with running(supervise(backend)) as run:
        run.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run.task
        assert run.task.cancelled()
    assert backend.signals == [(1, 0, TERM), (1, 1, TERM), (31, 0, KILL)]
    assert (backend.running, backend.closed_at) == (set(), [31])
    assert run.supervisor.state is WorkerState.STOPPED


@on_virtual_time
async def test_cancelled_twice_it_kills() -> None:
    backend = FakeBackend([STUBBORN])
    async with running(supervise(backend, 1)) as run:
        run.task.cancel()
        await anyio.sleep(3)
        run.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run.task
    assert backend.signals == [(1, 0, TERM), (4, 0, KILL)]
    assert backend.closed_at == [4]


@on_virtual_time
async def test_an_anyio_scope_stops_the_workers_and_catches_its_own_cancellation() -> None:
    backend = FakeBackend([STUBBORN])
    with anyio.move_on_after(20) as scope:
        await supervise(backend, 1).run()
    assert scope.cancelled_caught
    assert (backend.signals, backend.closed_at) == ([(20, 0, TERM), (50, 0, KILL)], [50])
    await anyio.sleep(1)  # the scope's cancellation is not ours any more


@on_virtual_time
async def test_cancelled_before_the_workers_are_there_it_starts_none() -> None:
    backend = FakeBackend([FOREVER])
    task = asyncio.get_running_loop().create_task(supervise(backend, 1).run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.running == set()


# Errors of ours and of the back end's.


class Broken(FakeBackend):
    """Raises where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__([Plan(after_s=3)])
        self.where = where

    def break_in(self, where: str) -> None:
        if where == self.where:
            raise ConnectionError(where)

    async def start(self, starts: Sequence[WorkerStart]) -> Mapping[int, int]:
        self.break_in("start")
        return await super().start(starts)

    async def wait(self, local_rank: int) -> WorkerExit:
        self.break_in("wait")
        return await super().wait(local_rank)

    async def clear(self, local_rank: int) -> None:
        self.break_in("clear")

    def stop(self, local_rank: int, signum: int) -> bool:
        self.break_in("stop")
        return True

    async def aclose(self) -> None:
        await super().aclose()
        self.break_in("aclose")


@pytest.mark.parametrize("where", ["start", "wait", "clear", "stop", "aclose"])
@on_virtual_time
async def test_an_exception_in_the_back_end_propagates_as_itself_and_it_is_closed(where: str) -> None:
    backend = Broken(where)
    async with running(supervise(backend, 1)) as run:
        if where == "stop":
            run.supervisor.stop()
        with pytest.raises(ConnectionError, match=where):
            await run.task
    assert len(backend.closed_at) == 1


@on_virtual_time
async def test_a_supervisor_that_runs_cannot_be_run_again_and_is_not_disturbed() -> None:
    async with running(supervise(FakeBackend([SUCCEEDS]), 1)) as run:
        with pytest.raises(RuntimeError, match="runs once"):
            await run.supervisor.run()
        assert (await run.task).state is WorkerState.SUCCEEDED


@on_virtual_time
async def test_a_port_in_use_is_told_before_anything_starts() -> None:
    backend = FakeBackend([SUCCEEDS])
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=str(port)):
            await supervise(backend, 1, master_port=port).run()
    assert (backend.starts, len(backend.closed_at)) == ([], 1)


@on_virtual_time
async def test_no_folder_is_left_of_a_run_whose_logs_were_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    await supervise(FakeBackend([FAILS, FOREVER])).run()
    assert not os.listdir(tmp_path)


# The clock itself.


def test_the_virtual_clock_finds_a_deadlock() -> None:
    @on_virtual_time
    async def wait_for_ever() -> None:
        await anyio.Event().wait()

    with pytest.raises(Deadlock):
        wait_for_ever()
    gc.collect()


# A disk that hangs under the logs.


def _hang(*_: Any, **__: Any) -> Any:
    raise DiskHangs


@pytest.fixture
def _dead_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunLogs, "tail", _hang)


@pytest.mark.usefixtures("_dead_disk")
@on_virtual_time
async def test_failures_on_a_disk_that_hangs_are_told_within_a_second_each_in_the_order_of_their_ends() -> None:
    backend = FakeBackend([Plan(after_s=9 + rank / 100, exit=WorkerExit(3 + rank)) for rank in (2, 0, 3, 1, 4, 5)])
    result = await supervise(backend, 6, max_restarts=0).run()
    assert anyio.current_time() == pytest.approx(10.05), "no failure waits for the others'"
    # Those that ended later, before the first was told, are failures, too.
    assert [failure.exitcode for failure in result.failures.values()] == [3, 4, 5, 6, 7, 8]
    assert (
        "exited with code 3; what it wrote is not known: no answer from the disk that holds"
        in result.failures[1].message
    )


@pytest.mark.usefixtures("_dead_disk")
@on_virtual_time
async def test_a_worker_that_fails_on_a_disk_that_hangs_is_restarted_and_the_agent_can_be_stopped() -> None:
    backend = FakeBackend([FAILS, FOREVER], [Plan(after_s=5, exit=WorkerExit(3)), FOREVER])
    async with running(supervise(backend), until_s=16.5) as run:
        run.supervisor.stop()
        result = await run.task
    assert (len(backend.starts), result.state, anyio.current_time()) == (2, WorkerState.STOPPED, 17.5)


@on_virtual_time
async def test_a_restart_whose_log_folder_cannot_be_made_for_a_minute_ends_the_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = FakeBackend([FAILS, FOREVER])
    async with running(supervise(backend), until_s=9) as run:
        monkeypatch.setattr("aelastic.logs.run_logs.lay_out", _hang)
        with pytest.raises(HostError, match=r"no answer from the disk that holds \S+ within 60 s"):
            await run.task
    assert (len(backend.starts), anyio.current_time()) == (1, 70)


@on_virtual_time
async def test_a_first_log_folder_that_cannot_be_made_for_a_minute_ends_the_agent_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = FakeBackend([FOREVER])
    monkeypatch.setattr(RunLogs, "_make_folders", _hang)
    with pytest.raises(HostError, match=r"no answer from the disk that holds \S+ or \S+ within 60 s"):
        await supervise(backend).run()
    assert (len(backend.starts), anyio.current_time()) == (0, 60)


@on_virtual_time
async def test_while_a_log_folder_is_not_made_the_agent_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend([FAILS, FOREVER])
    async with running(supervise(backend), until_s=9) as run:
        monkeypatch.setattr("aelastic.logs.run_logs.lay_out", _hang)
        monkeypatch.setattr(Follower, "size", _hang)
        await anyio.sleep(10)
        run.supervisor.stop()
        assert (await run.task).state is WorkerState.STOPPED
    assert (len(backend.starts), anyio.current_time()) == (1, 19)


@on_virtual_time
async def test_a_return_value_on_a_disk_that_hangs_ends_with_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(*_: Any) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(Postmortem, "return_value", read)
    backend = FakeBackend([SUCCEEDS, FOREVER])
    async with running(supervise(backend, entrypoint=work), until_s=15) as run:
        run.supervisor.stop()
        result = await run.task
    assert (result.state, anyio.current_time()) == (WorkerState.STOPPED, 15)


@on_virtual_time
async def test_a_folder_of_the_next_attempt_that_is_there_already_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend([FAILS, FOREVER])
    async with running(supervise(backend), until_s=9) as run:
        (backend.starts[0][0].error_file.parents[1].with_name("attempt_1")).mkdir()
        with pytest.raises(HostError, match=r"log folder \S+/attempt_1 exists already, and is not of this run: let"):
            await run.task


@on_virtual_time
async def test_folders_of_ended_attempts_that_are_not_kept_go_away() -> None:
    backend = FakeBackend(*[[FAILS, FOREVER]] * 5, [FOREVER, FOREVER])
    async with running(supervise(backend, max_restarts=9), until_s=55) as run:
        (run_folder,) = {start.error_file.parents[2] for starts in backend.starts for start in starts}
        assert (len(backend.starts), [each.name for each in run_folder.iterdir()]) == (6, ["attempt_5"])
        run.supervisor.stop()
        await run.task
