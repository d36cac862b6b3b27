"""Workers that hang: what is seen of them in `/proc` and in their files, and what becomes of the job."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from kit.agents import WORKER, c10d, team_of
from kit.arguments import complaint, invoke
from kit.launching import Launcher, wait_for
from kit.virtual_clock import on_virtual_time

from aelastic import ExpectedOutput, Supervisor, WorkerSpec, WorkerState
from aelastic.group.backend import WorkerStart
from aelastic.group.worker_env import STUCK_VARIABLE
from aelastic.hangs.activity import ActivitySampler, Place, ProcTable, rules_of, sizes_of
from aelastic.hangs.hang_rules import Rules, Sample
from aelastic.hangs.watch import Found
from aelastic.logs.follower import PUNCH_BYTES, TAIL_BYTES, Follower
from aelastic.logs.lines import PrefixedLines
from aelastic.observe import run_events as ev
from aelastic.observe.observer import Observer
from aelastic.settings import HANG_SIGNALS

pytestmark = pytest.mark.usefixtures("warm_stores")

TERM_CODE = 128 + signal.SIGTERM
# Long enough that a worker which is alive shows it on a busy machine, too.
TIMEOUT_S = 2
# Of workers that go on for longer than that, and then succeed.
GOES_ON = 2.25 * TIMEOUT_S
ALL = Rules(hang_timeout_s=60.0, hang_signals=HANG_SIGNALS, stuck_timeout_s=60.0)


# In an agent whose workers all hang together: nothing is seen before that.  On a busy machine they begin one after the
# other, and the first one to be found ends the others.
TOGETHER = """
import os
from aelastic.hangs import activity

class Table(activity.ProcTable):
    def __call__(self, places, rules):
        return super().__call__(places, rules) if all(os.path.exists(f"hangs{rank}") for rank in RANKS) else {}

activity.ProcTable = Table
"""
HANGS = 'open(f"hangs{rank}", "w").close()\n'


# Real workers.


def test_only_those_that_hang_are_named_however_they_do(launch: Launcher) -> None:
    job = launch(
        """
        import threading
        lock = threading.Lock()
        lock.acquire()
        open(f"hangs{rank}", "w").close()
        if rank == 1:
            time.sleep(600)
        if rank == 2:
            lock.acquire()
        if rank == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            sum(range(100_000))
            time.sleep(0.01)
        """,
        "--nproc-per-node=4",
        f"--hang-timeout={TIMEOUT_S}",
        "--shutdown-timeout=1",
        loop="asyncio",
        wrapper=TOGETHER.replace("RANKS", "range(4)"),
    )
    assert job.wait() == TERM_CODE, job.story
    reason = f"no output, CPU use or IO for {TIMEOUT_S} s"
    stopped = re.findall(rf"aelastic: W rank (\d) on \S+ is stopped: {reason}", job.stderr)
    assert stopped == ["1", "2", "3"], job.stderr
    assert "Stopped by the agent: rank 0" in job.stderr
    root = job.stderr[job.stderr.index("Root Cause") :]
    assert "rank      : 1 " in root
    assert f"cause     : {reason}" in root
    assert "stack     : by memory, most recent call first:" in root
    job.assert_nothing_left()


PRINTS = """
end = time.monotonic() + GOES_ON
while time.monotonic() < end:
    say("step")
    time.sleep(0.1)
"""
COMPUTES = """
end = time.monotonic() + GOES_ON
while time.monotonic() < end:
    sum(range(100_000))
"""
# What it does goes on in a process that the worker waits for.
LETS_OTHERS_COMPUTE = f"subprocess.run([sys.executable, '-c', {('import time' + COMPUTES)!r}])"


@pytest.mark.all
def test_the_chosen_signs_decide_which_worker_hangs(launch: Launcher) -> None:
    said = [f"no {word} for {TIMEOUT_S} s" for word in ("output", "CPU use")]
    table = [
        (PRINTS, "output", 0, ""),
        (PRINTS, "io", 0, ""),
        (PRINTS, "cpu", TERM_CODE, said[1]),
        (COMPUTES, "cpu", 0, ""),
        (LETS_OTHERS_COMPUTE, "cpu", 0, ""),
        (COMPUTES, "output", TERM_CODE, said[0]),
    ]
    jobs = [
        launch(
            code.replace("GOES_ON", str(600 if exitcode else GOES_ON)),  # who is to be found hangs until then
            f"--hang-timeout={TIMEOUT_S}",
            f"--hang-signals={signs}",
            name=f"job{number}",
        )
        for number, (code, signs, exitcode, _) in enumerate(table)
    ]
    for job, (code, signs, exitcode, reason) in zip(jobs, table, strict=True):
        assert job.wait() == exitcode, f"{code} with {signs}: {job.story}"
        assert reason in job.stderr
        assert ("step" in job.lines) is ("say" in code)
        job.assert_nothing_left()


def test_a_hang_pays_one_restart_and_the_next_attempt_may_succeed(launch: Launcher) -> None:
    job = launch(
        f"{HANGS}time.sleep(0 if restart else 600)",
        "--nproc-per-node=3",
        "--hang-timeout=1",
        "--max-restarts=3",
        wrapper=TOGETHER.replace("RANKS", "range(3)"),
    )
    assert job.wait() == 0, job.story
    assert job.stderr.count("restarting worker group") == 1
    assert "restarting worker group: rank 0 failed on" in job.stderr
    assert job.stderr.count("is stopped") == 3


class Listener(Observer):
    """Keeps what is noticed, and lets the worker go on then."""

    def __init__(self, go: Path) -> None:
        self.noticed: list[ev.Noticed] = []
        self._go = go

    def tell(self, event: ev.RunEvent, now: float) -> None:
        if isinstance(event, ev.Noticed):
            self.noticed.append(event)
            self._go.touch()


async def test_a_dry_run_only_tells_once_for_each_hang_and_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go = tmp_path / "go"
    code = f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.5)\n"
    listener = Listener(go)
    spec = WorkerSpec(
        entrypoint=sys.executable,
        args=("-c", code),
        hang_timeout_s=1.0,
        hang_signals=("output",),
        hang_action="report",
        expect_output=ExpectedOutput("never", 600.0),
    )
    result = await Supervisor(spec, observers=[listener]).run()
    assert result.state is WorkerState.SUCCEEDED
    assert listener.noticed == [ev.Noticed(1, 0, 0, "hang", "no output for 1 s", is_stopped=False)]
    (line,) = [record for record in caplog.records if "no output for 1 s" in record.getMessage()]
    assert line.levelname == "WARNING"
    assert line.getMessage().startswith("rank 0 on ")


def test_output_that_is_expected_is_met_missed_or_missed_later(launch: Launcher) -> None:
    goes_on, hangs = (PRINTS.replace("GOES_ON", end) for end in ("4.5", "600"))
    until_told = 'while not os.path.exists("go"):\n    say("step")\n    time.sleep(0.1)'
    within = r"--expect-output=loss=\d:3"
    bar = 'for _ in range(23):\n    os.write(2, b"\\rloss=1")\n    time.sleep(0.2)'
    table = [
        (goes_on.replace("step", "loss=1"), [within], 0, ""),
        (bar, [within], 0, ""),
        (bar, [within, "--redirects=3", "--log-dir=logs"], 0, ""),
        (f"if rank == 0:\n    {bar.replace(chr(10), chr(10) + '    ')}", [within, "--nproc-per-node=2", "--expect-output-ranks=0"], 0, ""),
        (hangs, [within], TERM_CODE, r"no output that matches 'loss=\d' in its first 3 s"),
        ("say('loss=1')\n" + hangs, [within, "--tee=3"], TERM_CODE, r"no output that matches 'loss=\d' for 3 s"),
        (until_told, [within, "--hang-action=report"], 0, r"no output that matches 'loss=\d' in its first 3 s"),
    ]  # fmt: skip
    jobs = [launch(code, *options, name=f"job{number}") for number, (code, options, _, _) in enumerate(table)]
    wait_for("it is reported", lambda: table[-1][-1] in jobs[-1].stderr)
    jobs[-1].go()
    for job, (code, options, exitcode, reason) in zip(jobs, table, strict=True):
        assert job.wait() == exitcode, f"{code} with {options}: {job.story}"
        assert reason in job.stderr
        assert ("no output" in job.stderr) is bool(reason)
        assert not job.left()


# Several nodes.


def test_a_worker_that_hangs_on_one_node_restarts_all_nodes_once(launch: Launcher) -> None:
    worker = f"if rank == 1 and restart == 0:\n    say('sleeps')\n    time.sleep(600)\n{WORKER}"
    assert "\nrest()\n" in worker
    busy = worker.replace("\nrest()\n", "\nwhile True:\n    sum(range(100_000))\n")
    options = (f"--hang-timeout={TIMEOUT_S}", "--max-restarts=3")
    with team_of(launch, c10d(), "2", options=options, worker=busy) as team:
        team.start_many(2)
        round_ = team.wait_round(team.agents)
        assert round_.restart == 1
        assert all(agent.stderr.count("restarting worker group: rank 1 failed on") == 1 for agent in team.agents)
        assert sum(f"is stopped: no output, CPU use or IO for {TIMEOUT_S} s" in a.stderr for a in team.agents) == 1
        team.finish(round_)


DEAD_DISK = """
import time
from aelastic.hangs import activity
from aelastic.logs.run_logs import RunLogs

activity.bytes_in = RunLogs.tail = lambda *_, **__: time.sleep(600)
"""


def test_a_file_system_that_hangs_does_not_keep_a_hung_worker_from_being_stopped(launch: Launcher) -> None:
    job = launch("time.sleep(600)", "--max-restarts=0", "--hang-timeout=1", wrapper=DEAD_DISK)
    assert job.wait() == 128 + signal.SIGTERM
    assert "cannot read output of workers; ignored for hang detection" in job.stderr
    assert "rank 0 on" in job.stderr and "is stopped: no " in job.stderr


# An agent whose workers look as if they were in uninterruptible sleep, once the file is there.
STUCK = f"""
import os
from aelastic.hangs import activity
from aelastic.hangs.hang_rules import Sample

os.environ["{STUCK_VARIABLE}"] = "1"
activity.ProcTable = lambda: lambda places, rules: {{rank: Sample(sleep=0) for rank in places if os.path.exists("stuck")}}
"""


@pytest.mark.all
def test_a_worker_that_is_stuck_ends_the_job_on_all_nodes_with_restarts_left(launch: Launcher) -> None:
    with team_of(launch, c10d(), "2", options=("--max-restarts=3",)) as team:
        team.start_many(1)
        stuck = team.start(wrapper=STUCK)
        team.wait_round(team.agents)
        (stuck.folder / "stuck").touch()
        for agent in team.agents:
            assert agent.wait() == TERM_CODE, team.story
            assert "in uninterruptible sleep (state D), which no signal ends, for 1 s" in agent.stderr
            assert "restarting worker group" not in agent.stderr
            assert len(agent.starts) == 1
        assert "the worker cannot be killed" in team.story


@pytest.mark.all
def test_as_with_torchrun_the_variable_alone_asks_for_it_and_a_busy_worker_is_not_stuck(launch: Launcher) -> None:
    going = launch(COMPUTES.replace("GOES_ON", "3"), env={STUCK_VARIABLE: "1"}, name="going")
    stuck = launch("open('stuck', 'w').close()\ntime.sleep(600)", "--max-restarts=5", wrapper=STUCK, name="stuck")
    assert going.wait() == 0, going.story
    assert stuck.wait() == TERM_CODE, stuck.story
    assert "restarting worker group" not in stuck.stderr


# Looking: a `/proc` of our own.


def put(root: Path, pid: int, *, parent: int = 1, session: int = 0, **more: Any) -> None:
    """One process; its name is meant to confuse."""
    values = {"state": "S", "ticks": 0, "io": 0, "own_io": 0, "began": 5, **more}
    folder = root / str(pid)
    (folder / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
    fields = [
        values["state"],
        parent,
        session,
        session,
        *[0] * 7,
        values["ticks"],
        0,
        0,
        0,
        20,
        0,
        1,
        0,
        values["began"],
    ]
    (folder / "stat").write_text(f"{pid} (a) S 1 (b)) " + " ".join(map(str, fields)) + " 0 0\n")
    for path, value in ((folder / "io", values["io"]), (folder / "task" / str(pid) / "io", values["own_io"])):
        if value is not None:
            path.write_text(f"rchar: {value}\nwchar: 0\nsyscr: 0\n")


def remove(root: Path, pid: int) -> None:
    (root / str(pid) / "stat").unlink()


PLACES = {0: Place(100, ()), 1: Place(200, ())}
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def test_a_worker_stands_for_its_session_and_all_that_descends_from_it(tmp_path: Path) -> None:
    look = ProcTable(str(tmp_path))
    put(tmp_path, 1)
    put(tmp_path, 100, parent=1, session=100, ticks=1, io=1)
    put(tmp_path, 101, parent=100, session=100, ticks=10, io=10)
    put(tmp_path, 102, parent=1, session=100, ticks=100, io=100)  # an orphan
    put(tmp_path, 103, parent=101, session=103, ticks=1000, io=1000)  # it has a session of its own
    put(tmp_path, 104, parent=103, session=103, ticks=10000, io=10000)
    put(tmp_path, 200, parent=1, session=200, ticks=5, io=6)
    put(tmp_path, 300, parent=1, session=300, ticks=7, io=7)
    first = look(PLACES, ALL)
    assert (first[0].cpu_s, first[1].cpu_s) == pytest.approx((11111 * TICK_S, 5 * TICK_S))
    assert (first[0].io, first[1].io) == (11111, 6)


def test_what_has_ended_takes_nothing_back_and_what_comes_is_new(tmp_path: Path) -> None:
    look = ProcTable(str(tmp_path))
    put(tmp_path, 100, session=100, io=10)
    put(tmp_path, 101, session=100, io=1000)
    assert look(PLACES, ALL)[0].io == 1010
    remove(tmp_path, 101)
    assert look(PLACES, ALL)[0].io == 1010
    put(tmp_path, 101, session=100, io=5, began=6)  # the number is another's now
    assert look(PLACES, ALL)[0].io == 1015
    put(tmp_path, 101, session=100, io=5, began=6)
    assert look(PLACES, ALL)[0].io == 1015
    put(tmp_path, 101, session=100, state="Z", io=999, began=6)
    assert look(PLACES, ALL)[0].io == 1015


def test_a_process_that_has_ended_is_not_seen_and_what_is_forbidden_is_none(tmp_path: Path) -> None:
    look = ProcTable(str(tmp_path))
    put(tmp_path, 100, session=100, state="Z")
    put(tmp_path, 200, session=200, io=None)
    assert look(PLACES, ALL) == {1: Sample(cpu_s=0.0)}
    (tmp_path / "200" / "io").mkdir()  # opened, and not read
    assert look(PLACES, ALL)[1].io is None
    (tmp_path / "200" / "stat").write_text("200 (truncated")
    assert look(PLACES, ALL) == {}
    assert ProcTable(str(tmp_path / "nowhere"))(PLACES, ALL) == {}


def test_sleep_that_no_signal_ends_is_told_by_what_its_thread_has_done(tmp_path: Path) -> None:
    look = ProcTable(str(tmp_path))
    put(tmp_path, 100, session=100, state="D", own_io=77)
    put(tmp_path, 200, session=200, state="D", own_io=None)
    assert {rank: sample.sleep for rank, sample in look(PLACES, ALL).items()} == {0: 77, 1: 0}
    put(tmp_path, 100, session=100, state="S")
    assert look(PLACES, ALL)[0].sleep is None


def test_only_what_is_asked_for_is_looked_at(tmp_path: Path) -> None:
    put(tmp_path, 100, session=100, state="D", io=5, ticks=5)
    look, places = ProcTable(str(tmp_path)), {0: Place(100, (tmp_path / "100" / "stat",))}
    assert look(places, Rules()) == {0: Sample()}
    assert look(places, Rules(hang_timeout_s=1.0, hang_signals=("cpu",)))[0].io is None
    in_steps = Rules(hang_timeout_steps=5.0, hang_signals=("cpu",))
    assert look(places, in_steps) == look(places, Rules(hang_timeout_s=1.0, hang_signals=("cpu",))) != {0: Sample()}
    assert look(places, Rules(stuck_timeout_s=1.0)) == {0: Sample(sleep=0)}


def test_output_is_the_size_of_files_and_pipes_have_none(tmp_path: Path) -> None:
    out, err, pipe = tmp_path / "out", tmp_path / "err", tmp_path / "pipe"
    out.write_bytes(b"123")
    err.write_bytes(b"4")
    os.mkfifo(pipe)

    def output(pid: int | None, *files: Path) -> int | None:
        return sizes_of({0: Place(pid, files)})[0]

    assert output(100, out, err) == 4
    assert output(100, out, pipe, Path(os.devnull)) == 3
    assert output(100, pipe, tmp_path / "missing") is None
    assert output(None, out) == 3
    out.write_bytes(b"")
    assert output(None, out) is None  # a worker that is no process here may write elsewhere
    assert output(100, out) == 0


def test_our_own_processes_are_seen_in_the_real_table() -> None:
    (sample,) = ProcTable()({0: Place(os.getpid(), ())}, ALL).values()
    assert sample.cpu_s and sample.io
    assert (sample.output, sample.sleep) == (None, None)


# The watch, on a clock that costs no time.


def start_of(rank: int) -> WorkerStart:
    path = Path(os.devnull)
    return WorkerStart(rank, "x", (), {"RANK": str(rank)}, path, path, path)


class FakeLook:
    """What is seen is set by the test."""

    def __init__(self, samples: Mapping[int, Sample]) -> None:
        self.samples = dict(samples)
        self.at: list[float] = []

    def __call__(self, places: Mapping[int, Place], rules: Rules) -> dict[int, Sample]:
        self.at.append(anyio.current_time())
        return {rank: sample for rank, sample in self.samples.items() if rank in places}


async def no_matches(local_rank: int) -> int:
    return 0


@on_virtual_time
async def test_a_watch_looks_only_while_workers_run_and_reports_those_that_hang() -> None:
    look, found = FakeLook({0: Sample(output=1), 1: Sample(output=1)}), list[Found]()
    rules = Rules(hang_timeout_s=10.0, hang_signals=("output",))
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
async def test_what_is_not_searched_in_time_is_no_reason_and_what_is_only_told_has_no_signal() -> None:
    waits = True

    async def count(local_rank: int) -> int:
        assert local_rank == 1
        if waits:
            await anyio.sleep_forever()
        return 0

    found = list[Found]()
    expected = ExpectedOutput("x", 10.0, frozenset({1}))
    rules = Rules(hang_action="report", expect_output=expected)
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
async def test_what_cannot_be_seen_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    look = FakeLook({0: Sample(output=1, cpu_s=1.0), 1: Sample(output=1, cpu_s=1.0)})
    sampler = ActivitySampler(Rules(hang_timeout_s=10.0, hang_signals=HANG_SIGNALS), no_matches, lambda _: None, look)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.run)
        sampler.started(1, [start_of(0), start_of(1)], {0: 11, 1: 12})
        await anyio.sleep(10)
        tasks.cancel_scope.cancel()
    assert [record.getMessage() for record in caplog.records] == [
        "cannot read IO of workers; ignored for hang detection"
    ]


# Scratch that is searched.


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


# What is asked for.


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('started')\n")
    return str(path)


def test_options_and_variables_reach_the_spec(script: str) -> None:
    spec = invoke(
        "--hang-timeout=1.5", "--hang-signals=io, output", "--hang-action=report", "--expect-output", r"a:\d+:12",
        "--expect-output-ranks=0,3", script,
    ).spec  # fmt: skip
    assert (spec.hang_timeout_s, spec.hang_signals, spec.hang_action) == (1.5, ("output", "io"), "report")
    assert spec.expect_output == ExpectedOutput(r"a:\d+", 12.0, frozenset({0, 3}))
    assert invoke(script, AELASTIC_HANG_TIMEOUT="300").spec.hang_timeout_s == 300
    assert invoke(script, AELASTIC_EXPECT_OUTPUT="x:1").spec.expect_output == ExpectedOutput("x", 1.0)
    plain = invoke(script).spec
    assert (plain.hang_timeout_s, plain.hang_signals, plain.hang_action) == (None, HANG_SIGNALS, "stop")
    assert plain.expect_output is None and not plain.watches_output


@pytest.mark.parametrize(
    "option, said",
    [
        ("--hang-timeout=0", "--hang-timeout 0: use 1 second or more"),
        ("--hang-timeout=nan", "--hang-timeout nan: use 1 second or more"),
        ("--hang-timeout=soon", "--hang-timeout soon: use a number of seconds"),
        ("--hang-signals=output,gpu", "--hang-signals output,gpu: use one or more of output, cpu, io"),
        ("--hang-signals=", "use one or more of output, cpu, io"),
        ("--hang-action=kill", "--hang-action kill: use one of stop, report"),
        ("--expect-output=loss=", "the seconds are missing: use REGEX:SECONDS"),
        ("--expect-output=loss=:", "the seconds are missing"),
        ("--expect-output=:5", "the pattern is empty"),
        ("--expect-output=a:0", "use 1 second or more"),
        ("--expect-output=a:b", "use a number"),
        ("--expect-output=(:5", "the pattern '(' is no regular expression (missing )"),
        ("--expect-output-ranks=0", "--expect-output-ranks 0: no effect without --expect-output"),
        ("--hang-action=report", "--hang-action report: no effect without hang detection: add --hang-timeout"),
        ("--hang-signals=cpu", "--hang-signals cpu: no effect without hang detection: add --hang-timeout"),
        ("--expect-output-ranks=x", "use ranks separated by commas"),
    ],
)
def test_what_cannot_be_is_refused(script: str, option: str, said: str) -> None:
    assert said in complaint(option, script)


@pytest.mark.parametrize(
    "text, timeout_s", [("", None), ("0", None), ("-5", None), ("inf", None), ("2.5", 2.5), (" 30 ", 30.0)]
)
def test_the_variable_of_torchs_agent_means_what_it_does_there(text: str, timeout_s: float | None) -> None:
    assert rules_of(WorkerSpec(entrypoint="true"), {STUCK_VARIABLE: text}).stuck_timeout_s == timeout_s


def test_a_variable_that_is_no_number_is_refused_before_anything_starts(launch: Launcher) -> None:
    job = launch("say('started')", env={STUCK_VARIABLE: "soon"})
    assert job.wait() == 2
    assert job.stderr == (
        f"aelastic: error: {STUCK_VARIABLE}=soon: use seconds; 0 is off (see docs/reference/environment.md)\n"
    )
    assert not job.stdout
    job.assert_nothing_left()


def test_without_a_watch_its_modules_are_not_imported(launch: Launcher) -> None:
    wrapper = """
    import atexit, sys
    atexit.register(lambda: print(sorted({"aelastic.hangs.activity", "aelastic.hangs.hang_rules"} & set(sys.modules)), file=sys.stderr))
    """
    off, on = (launch("", *options, wrapper=wrapper, name=name) for name, options in
               (("off", ()), ("on", ("--hang-timeout=5",))))  # fmt: skip
    assert (off.wait(), on.wait()) == (0, 0)
    assert off.stderr.splitlines() == ["[]"]
    assert on.stderr.splitlines() == ["['aelastic.hangs.activity', 'aelastic.hangs.hang_rules']"]
