"""Hang samples from a fake `/proc`, and the times of the looks, on a virtual clock."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from kit.virtual_clock import on_virtual_time

from aelastic import ExpectedOutput, InputError
from aelastic.agent.group.worker_env import STUCK_VARIABLE
from aelastic.agent.watches.activity import (
    ActivitySampler,
    ProcTable,
    SamplingTarget,
    Signs,
    signs_for,
    sizes_of,
    stuck_timeout_of,
)
from aelastic.agent.watches.watch import Found
from aelastic.diagnose.hangs.hang_rules import Sample
from aelastic.diagnose.hangs.options import HANG_SIGNALS, HangRules
from aelastic.logs.follower import PUNCH_BYTES, TAIL_BYTES, Follower
from aelastic.logs.lines import PrefixedLines
from aelastic.workers.backend import WorkerStart

ALL = signs_for(HangRules(hang_timeout_s=60.0), stuck_timeout_s=60.0)


# Looking: a fake `/proc`.


def put(root: Path, pid: int, *, parent: int = 1, session: int = 0, **more: Any) -> None:
    """Adds a process whose name is meant to confuse parsers."""
    values = {"state": "S", "ticks": 0, "io": 0, "own_io": 0, "began": 5, **more}
    folder = root / str(pid)
    (folder / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
    fields = [
        values["state"], parent, session, session, *[0] * 7, values["ticks"], 0, 0, 0, 20, 0, 1, 0, values["began"],
    ]  # fmt: skip
    (folder / "stat").write_text(f"{pid} (a) S 1 (b)) " + " ".join(map(str, fields)) + " 0 0\n")
    for path, value in ((folder / "io", values["io"]), (folder / "task" / str(pid) / "io", values["own_io"])):
        if value is not None:
            path.write_text(f"rchar: {value}\nwchar: 0\nsyscr: 0\n")


def remove(root: Path, pid: int) -> None:
    (root / str(pid) / "stat").unlink()


TARGETS = {0: SamplingTarget(100, ()), 1: SamplingTarget(200, ())}
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def test_a_worker_represents_its_session_and_all_that_descends_from_it(tmp_path: Path) -> None:
    look = ProcTable(str(tmp_path))
    put(tmp_path, 1)
    put(tmp_path, 100, parent=1, session=100, ticks=1, io=1)
    put(tmp_path, 101, parent=100, session=100, ticks=10, io=10)
    put(tmp_path, 102, parent=1, session=100, ticks=100, io=100)  # an orphan
    put(tmp_path, 103, parent=101, session=103, ticks=1000, io=1000)  # it has its own session
    put(tmp_path, 104, parent=103, session=103, ticks=10000, io=10000)
    put(tmp_path, 200, parent=1, session=200, ticks=5, io=6)
    put(tmp_path, 300, parent=1, session=300, ticks=7, io=7)
    first = look(TARGETS, ALL)
    assert (first[0].cpu_s, first[1].cpu_s) == pytest.approx((11111 * TICK_S, 5 * TICK_S))
    assert (first[0].io, first[1].io) == (11111, 6)


def test_what_has_ended_takes_nothing_back_and_what_comes_is_new(tmp_path: Path) -> None:
    look = ProcTable(str(tmp_path))
    put(tmp_path, 100, session=100, io=10)
    put(tmp_path, 101, session=100, io=1000)
    assert look(TARGETS, ALL)[0].io == 1010
    remove(tmp_path, 101)
    assert look(TARGETS, ALL)[0].io == 1010
    put(tmp_path, 101, session=100, io=5, began=6)  # the number now belongs to another process
    assert look(TARGETS, ALL)[0].io == 1015
    put(tmp_path, 101, session=100, io=5, began=6)
    assert look(TARGETS, ALL)[0].io == 1015
    put(tmp_path, 101, session=100, state="Z", io=999, began=6)
    assert look(TARGETS, ALL)[0].io == 1015


def test_a_process_that_has_ended_is_not_seen_and_what_is_forbidden_is_none(tmp_path: Path) -> None:
    look = ProcTable(str(tmp_path))
    put(tmp_path, 100, session=100, state="Z")
    put(tmp_path, 200, session=200, io=None)
    assert look(TARGETS, ALL) == {1: Sample(cpu_s=0.0)}
    (tmp_path / "200" / "io").mkdir()  # can be opened, but not read
    assert look(TARGETS, ALL)[1].io is None
    (tmp_path / "200" / "stat").write_text("200 (truncated")
    assert look(TARGETS, ALL) == {}
    assert ProcTable(str(tmp_path / "nowhere"))(TARGETS, ALL) == {}


def test_sleep_that_no_signal_ends_is_judged_from_its_threads_work(tmp_path: Path) -> None:
    look = ProcTable(str(tmp_path))
    put(tmp_path, 100, session=100, state="D", own_io=77)
    put(tmp_path, 200, session=200, state="D", own_io=None)
    assert {rank: sample.sleep for rank, sample in look(TARGETS, ALL).items()} == {0: 77, 1: 0}
    put(tmp_path, 100, session=100, state="S")
    assert look(TARGETS, ALL)[0].sleep is None


def test_only_what_is_requested_is_looked_at(tmp_path: Path) -> None:
    put(tmp_path, 100, session=100, state="D", io=5, ticks=5)
    look, targets = ProcTable(str(tmp_path)), {0: SamplingTarget(100, (tmp_path / "100" / "stat",))}
    in_seconds = signs_for(HangRules(hang_timeout_s=1.0, hang_signals=("cpu",)), None)
    in_steps = signs_for(HangRules(hang_timeout_steps=5.0, hang_signals=("cpu",)), None)
    assert look(targets, signs_for(HangRules(), None)) == {0: Sample()}
    assert look(targets, in_seconds)[0].io is None
    assert look(targets, in_steps) == look(targets, in_seconds) != {0: Sample()}
    assert look(targets, signs_for(HangRules(), 1.0)) == {0: Sample(sleep=0)}


def test_output_is_the_size_of_files_and_pipes_have_none(tmp_path: Path) -> None:
    out, err, pipe = tmp_path / "out", tmp_path / "err", tmp_path / "pipe"
    out.write_bytes(b"123")
    err.write_bytes(b"4")
    os.mkfifo(pipe)

    def output(pid: int | None, *files: Path) -> int | None:
        return sizes_of({0: SamplingTarget(pid, files)})[0]

    assert output(100, out, err) == 4
    assert output(100, out, pipe, Path(os.devnull)) == 3
    assert output(100, pipe, tmp_path / "missing") is None
    assert output(None, out) == 3
    out.write_bytes(b"")
    assert output(None, out) is None  # a worker that is not a process on this host may write elsewhere
    assert output(100, out) == 0


def test_our_own_processes_are_seen_in_the_real_table() -> None:
    (sample,) = ProcTable()({0: SamplingTarget(os.getpid(), ())}, ALL).values()
    assert sample.cpu_s and sample.io
    assert (sample.output, sample.sleep) == (None, None)


def test_a_variable_of_torchs_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(InputError, match=f"^{STUCK_VARIABLE}=soon: use seconds; 0 is off"):
        stuck_timeout_of({STUCK_VARIABLE: "soon"})


# The watch, on a virtual clock.


def start_of(rank: int) -> WorkerStart:
    path = Path(os.devnull)
    return WorkerStart(rank, "x", (), {"RANK": str(rank)}, path, path, path)


class FakeLook:
    """Shows what the test sets."""

    def __init__(self, samples: Mapping[int, Sample]) -> None:
        self.samples = dict(samples)
        self.at: list[float] = []

    def __call__(self, targets: Mapping[int, SamplingTarget], signs: Signs) -> dict[int, Sample]:
        self.at.append(anyio.current_time())
        return {rank: sample for rank, sample in self.samples.items() if rank in targets}


async def no_matches(local_rank: int) -> int:
    return 0


@on_virtual_time
async def test_a_watch_looks_only_while_workers_run_and_reports_those_that_hang() -> None:
    look, found = FakeLook({0: Sample(output=1), 1: Sample(output=1)}), list[Found]()
    rules = HangRules(hang_timeout_s=10.0, hang_signals=("output",))
    sampler = ActivitySampler(rules, no_matches, found.append, look)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.run)
        await anyio.sleep(100)
        assert look.at == []
        sampler.started(1, [start_of(0), start_of(1)], {0: 11, 1: 12})
        await anyio.sleep(5.5)
        sampler.ended(1, 0)
        sampler.ended(0, 1)  # of an earlier generation
        await anyio.sleep(6)
        assert found == [Found(1, 1, "hang", "no output for 10 s", signal.SIGTERM, waited_s=10.0)]
        assert look.at == pytest.approx([100.0 + second for second in range(1, 12)])
        sampler.ended(1, 1)
        await anyio.sleep(100)
        assert len(look.at) == 11
        sampler.started(2, [start_of(0)], {0: 13})
        await anyio.sleep(11.5)
        assert [each.generation for each in found] == [1, 2]
        tasks.cancel_scope.cancel()


@on_virtual_time
async def test_what_is_not_searched_in_time_is_not_a_reason_and_what_is_only_reported_has_no_signal() -> None:
    waits = True

    async def count(local_rank: int) -> int:
        assert local_rank == 1
        if waits:
            await anyio.sleep_forever()
        return 0

    found = list[Found]()
    expected = ExpectedOutput("x", 10.0, frozenset({1}))
    rules = HangRules(hang_action="report", expect_output=expected)
    sampler = ActivitySampler(rules, count, found.append, FakeLook({0: Sample(), 1: Sample()}))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.run)
        sampler.started(1, [start_of(0), start_of(1)], {0: 11, 1: 12})
        await anyio.sleep(100)
        assert not found
        waits = False
        await anyio.sleep(15)
        (only,) = found
        assert (only.local_rank, only.by, only.signum) == (1, "output", None)
        tasks.cancel_scope.cancel()


@on_virtual_time
async def test_what_cannot_be_seen_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    look = FakeLook({0: Sample(output=1, cpu_s=1.0), 1: Sample(output=1, cpu_s=1.0)})
    sampler = ActivitySampler(
        HangRules(hang_timeout_s=10.0, hang_signals=HANG_SIGNALS), no_matches, lambda _: None, look
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.run)
        sampler.started(1, [start_of(0), start_of(1)], {0: 11, 1: 12})
        await anyio.sleep(10)
        tasks.cancel_scope.cancel()
    assert [record.getMessage() for record in caplog.records] == [
        "cannot read IO of workers; ignored for hang detection"
    ]


@on_virtual_time
async def test_a_limit_in_steps_of_which_none_is_reported_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    steps: list[float | None] = [None]
    rules = HangRules(hang_timeout_steps=5.0, hang_signals=("output",))
    look = FakeLook({0: Sample(output=1)})
    sampler = ActivitySampler(rules, no_matches, lambda _: None, look, step_s=lambda: steps[0], steps_are_reported=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.run)
        sampler.started(1, [start_of(0)], {0: 11})
        await anyio.sleep(30)
        steps[0] = 1.0
        await anyio.sleep(60)
        assert not caplog.records, "the step was reported"
        tasks.cancel_scope.cancel()
    sampler = ActivitySampler(rules, no_matches, lambda _: None, look, steps_are_reported=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.run)
        sampler.started(1, [start_of(0)], {0: 11})
        await anyio.sleep(300)
        tasks.cancel_scope.cancel()
    assert [record.getMessage() for record in caplog.records] == [
        "no limit for hangs yet: no worker has told a step for 60 s; workers that do not recover in place need --progress"
    ]


# Scanning of new data.


def test_scratch_is_given_back_when_it_is_shown_and_searched(tmp_path: Path) -> None:
    path = tmp_path / "scratch"
    path.touch()
    search = Follower(path, PrefixedLines(None))
    shown = Follower(path, PrefixedLines(None), is_scratch=True, sharers=[search])
    size = 3 * PUNCH_BYTES
    path.write_bytes(b"x" * (size - 1) + b"\n")
    while shown.next_piece(is_ended=False):
        pass
    assert path.stat().st_blocks * 512 >= size
    while piece := search.next_piece(is_ended=False):
        assert b"\0" not in piece
    with path.open("ab") as file:
        file.write(b"y" * PUNCH_BYTES)
    while shown.next_piece(is_ended=False):
        pass
    if path.stat().st_blocks * 512 > 2 * PUNCH_BYTES + TAIL_BYTES:
        pytest.skip("this file system gives nothing back")
    search.close()
    shown.close()
