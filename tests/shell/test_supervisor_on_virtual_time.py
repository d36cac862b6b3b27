"""The supervisor with workers that run nowhere, on a clock that costs no time: stories (`stories/`), and what these do not show."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from kit import backends
from kit.backends import (
    FAILS,
    FOREVER,
    KILL,
    STUBBORN,
    SUCCEEDS,
    TERM,
    Broken,
    FakeBackend,
    Plan,
    RemoteBackend,
    StoreStandIn,
    WatchingStandIn,
)
from kit.stories.files import SHELL_FOLDER, changes
from kit.stories.supervisor import played
from kit.virtual_clock import Deadlock, on_virtual_time

from aelastic import InputError, RunResult, Supervisor, WorkerBackend, WorkerExit, WorkerSpec, WorkerStart, WorkerState
from aelastic.agent.watches.watch import Watch
from aelastic.errors import HostError


def test_its_stories_go_as_written() -> None:
    assert changes(SHELL_FOLDER / "supervisor.txt", played) == "", "if the change is intended: `make stories`"


@pytest.fixture(autouse=True)
def stores(monkeypatch: pytest.MonkeyPatch) -> list[StoreStandIn]:
    backends.stores.clear()
    monkeypatch.setattr("aelastic.agent.resources.StoreHost", StoreStandIn)
    return backends.stores


def supervise(backend: WorkerBackend, workers: int = 2, **more: Any) -> Supervisor:
    options: dict[str, Any] = {"entrypoint": "train.py", "shutdown_timeout_s": 30.0, "max_restarts": 2, **more}
    return Supervisor(WorkerSpec(local_world_size=workers, **options), backend=backend)


@dataclass
class Running:
    """A run as a task."""

    supervisor: Supervisor
    task: asyncio.Task[RunResult]


@asynccontextmanager
async def running(supervisor: Supervisor, until_s: float = 1.0) -> AsyncIterator[Running]:
    """Starts a run, and enters the block after `until_s` seconds."""
    task = asyncio.get_running_loop().create_task(supervisor.run())
    await anyio.sleep(until_s)
    try:
        yield Running(supervisor, task)
    finally:
        assert task.done(), "the test has not waited for the run"


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
async def test_a_remote_worker_that_is_stopped_or_fails_is_reported_like_a_local_one() -> None:
    backend = RemoteBackend()
    async with running(supervise(backend, max_restarts=0)) as run:
        backend.exits[1].set_result(WorkerExit(3, note="its machine went away"))
        result = await run.task
    assert (result.state, result.is_failed(), result.victims) == (WorkerState.FAILED, True, (0,))
    assert (result.failures[1].exitcode, result.failures[1].pid) == (3, -1)
    assert "its machine went away" in result.failures[1].message


@on_virtual_time
async def test_a_worker_gets_the_environment_of_its_rank(stores: list[StoreStandIn]) -> None:
    backend = FakeBackend([SUCCEEDS] * 2)
    await supervise(backend, run_id="job", env={"HOME": "/nowhere"}, args=("--rank=${local_rank}", "7")).run()
    first, second = backend.starts[0]
    assert (second.env["RANK"], second.env["LOCAL_RANK"], second.env["WORLD_SIZE"]) == ("1", "1", "2")
    assert (second.env["TORCHELASTIC_RUN_ID"], second.env["HOME"]) == ("job", "/nowhere")
    assert int(second.env["AELASTIC_ROUND"]) % 1000 == 1 and second.env["AELASTIC_ROUND"] == first.env["AELASTIC_ROUND"]
    assert (first.args, second.args) == (("--rank=0", "7"), ("--rank=1", "7"))
    assert int(first.env["MASTER_PORT"]) == stores[0].served[0]


@on_virtual_time
async def test_each_start_has_ports_and_error_files_of_its_own(stores: list[StoreStandIn]) -> None:
    backend = FakeBackend([FOREVER, FAILS])
    assert (await supervise(backend, max_restarts=2).run()).return_values == {}
    ports = [[start.env["MASTER_PORT"] for start in starts] for starts in backend.starts]
    assert ports == [[str(port)] * 2 for port in stores[0].served]
    assert len({starts[0].env["TORCHELASTIC_ERROR_FILE"] for starts in backend.starts}) == 3


def write(path: Path | None, text: str) -> None:
    assert path is not None
    path.write_text(text)


RAISED = 'Traceback (most recent call last):\n  File "t.py", line 3, in {}\nValueError: batch {} is empty\n'


@on_virtual_time
async def test_workers_that_raised_before_they_were_stopped_are_not_victims() -> None:
    """Rank 0 fails.  Some of the ranks stopped after that had printed or recorded an exception of their own."""
    backend = FakeBackend([Plan(exit=WorkerExit(1))] + [FOREVER] * 6)
    async with running(supervise(backend, 7, max_restarts=0), until_s=9) as run:
        starts = backend.starts[0]
        for rank, text in (  # written as the workers would
            (0, RAISED.format("<module>", 0)),
            (1, RAISED.format("<module>", 1)),
            (2, ""),
            (3, RAISED.format("handled", 3)),  # and continues
            (4, RAISED.format("<module>", 4)),  # long ago
            (6, RAISED.format("<module>", 0)),  # also long ago: the machine is busy
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


@pytest.mark.parametrize("steps", range(30))
@on_virtual_time
async def test_a_stop_at_any_moment_of_the_start_reaches_workers_that_start_anyway(steps: int) -> None:
    supervisor = supervise(RemoteBackend())
    async with running(supervisor, until_s=0) as run:
        for _ in range(steps):
            await asyncio.sleep(0)
        supervisor.stop()
        result = await run.task
    assert (result.state, anyio.current_time()) == (WorkerState.STOPPED, 0)


@on_virtual_time
async def test_watches_learn_which_workers_come_and_go_and_workers_get_their_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[WatchingStandIn] = []

    def make(*arguments: Any) -> WatchingStandIn:
        made.append(WatchingStandIn(arguments[-1]))
        return made[-1]

    monkeypatch.setattr("aelastic.agent.resources.Watches", make)
    backend = FakeBackend([FAILS, FOREVER], [Plan(after_s=2), SUCCEEDS])
    await supervise(backend, max_restarts=1).run()
    assert made[0].calls == [
        ("open",),
        ("started", 1, [0, 1], {0: 100, 1: 101}), ("ended", 1, 0), ("ended", 1, 1),
        ("started", 2, [0, 1], {0: 200, 1: 201}), ("ended", 2, 0), ("ended", 2, 1),
        ("close",),
    ]  # fmt: skip
    assert {start.env["WATCHED"] for starts in backend.starts for start in starts} == {"yes"}


class BrokenWatch(Watch):
    def started(self, generation: int, starts: Sequence[WorkerStart], ids: Mapping[int, Any]) -> None: ...

    def ended(self, generation: int, local_rank: int) -> None: ...

    async def run(self) -> None:
        await anyio.sleep(1)
        raise ZeroDivisionError("a bug of ours")


@on_virtual_time
async def test_a_watch_that_fails_is_reported_and_the_job_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setattr("aelastic.agent.watches.file_timer.FileTimerServer", lambda *_: BrokenWatch())
    spec = WorkerSpec(local_world_size=1, entrypoint="train.py")
    result = await Supervisor(spec, backend=FakeBackend([Plan(after_s=9, exit=WorkerExit(0))])).run()
    assert result.state is WorkerState.SUCCEEDED
    assert "watch BrokenWatch raised and was disabled" in caplog.text and "a bug of ours" in caplog.text


@on_virtual_time
async def test_an_anyio_scope_stops_the_workers_and_catches_its_own_cancellation() -> None:
    backend = FakeBackend([STUBBORN])
    with anyio.move_on_after(20) as scope:
        await supervise(backend, 1).run()
    assert scope.cancelled_caught
    assert (backend.signals, backend.closed_at) == ([(20, 0, TERM), (50, 0, KILL)], [50])
    await anyio.sleep(1)  # the scope's cancellation no longer applies to us


@on_virtual_time
async def test_cancelled_before_the_workers_are_there_it_starts_none() -> None:
    backend = FakeBackend([FOREVER])
    task = asyncio.get_running_loop().create_task(supervise(backend, 1).run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.running == set()


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
async def test_a_port_in_use_is_reported_before_anything_starts() -> None:
    backend = FakeBackend([SUCCEEDS])
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=str(port)):
            await supervise(backend, 1, master_port=port).run()
    assert (backend.starts, len(backend.closed_at)) == ([], 1)


def test_the_virtual_clock_finds_a_deadlock() -> None:
    @on_virtual_time
    async def wait_for_ever() -> None:
        await anyio.Event().wait()

    with pytest.raises(Deadlock):
        wait_for_ever()
    gc.collect(1)  # its leftovers are young


@on_virtual_time
async def test_a_folder_of_the_next_attempt_that_is_there_already_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend([FAILS, FOREVER])
    async with running(supervise(backend), until_s=9) as run:
        (backend.starts[0][0].error_file.parents[1].with_name("attempt_1")).mkdir()
        with pytest.raises(HostError, match=r"log folder \S+/attempt_1 already exists and belongs to another run: let"):
            await run.task


@on_virtual_time
async def test_folders_of_ended_attempts_that_are_not_kept_go_away() -> None:
    backend = FakeBackend(*[[FAILS, FOREVER]] * 5, [FOREVER, FOREVER])
    async with running(supervise(backend, max_restarts=9), until_s=55) as run:
        (run_folder,) = {start.error_file.parents[2] for starts in backend.starts for start in starts}
        assert (len(backend.starts), [each.name for each in run_folder.iterdir()]) == (6, ["attempt_5"])
        run.supervisor.stop()
        await run.task
