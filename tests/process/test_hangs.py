"""Workers that hang: how they look in `/proc` and in their files, and what happens to the job."""

from __future__ import annotations

import re
import signal

import pytest
from kit.agents import WORKER, c10d, team_of
from kit.launching import Launcher
from kit.waiting import wait_for

from aelastic.agent.group.worker_env import STUCK_VARIABLE

pytestmark = pytest.mark.usefixtures("warm_stores")

TERM_CODE = 128 + signal.SIGTERM
# Long enough that a live worker shows signs of life even on a busy machine.
TIMEOUT_S = 2
# Run time of workers that continue for longer than that, and then succeed.
GOES_ON = 2.25 * TIMEOUT_S


# In an agent: it has no samples before all workers are in place.  On a busy machine they begin one after the other, and
# the first one found would end the others, or be found because it started late.
TOGETHER = """
import os
from aelastic.agent.watches import activity

class Table(activity.ProcTable):
    def __call__(self, places, rules):
        return super().__call__(places, rules) if all(os.path.exists(f"there{rank}") for rank in range(4)) else {}

activity.ProcTable = Table
"""


# Real workers.


def test_only_those_that_hang_are_named_however_they_do(launch: Launcher) -> None:
    job = launch(
        """
        import threading
        lock = threading.Lock()
        lock.acquire()
        open(f"there{rank}", "w").close()
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
        "--shutdown-timeout=0.2",
        loop="asyncio",
        wrapper=TOGETHER,
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
# A process that the worker waits for does the work.
LETS_OTHERS_COMPUTE = f"subprocess.run([sys.executable, '-c', {('import time' + COMPUTES)!r}])"


@pytest.mark.all
def test_the_chosen_signs_decide_which_worker_hangs(launch: Launcher) -> None:
    reasons = [f"no {word} for {TIMEOUT_S} s" for word in ("output", "CPU use")]
    table = [
        (PRINTS, "output", 0, ""),
        (PRINTS, "io", 0, ""),
        (PRINTS, "cpu", TERM_CODE, reasons[1]),
        (COMPUTES, "cpu", 0, ""),
        (LETS_OTHERS_COMPUTE, "cpu", 0, ""),
        (COMPUTES, "output", TERM_CODE, reasons[0]),
    ]
    jobs = [
        launch(
            code.replace("GOES_ON", str(600 if exitcode else GOES_ON)),  # a worker to be found hangs until then
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


def test_expected_output_is_found_in_files_pipes_and_progress_bars_and_who_writes_none_is_reported(
    launch: Launcher,
) -> None:
    job = launch(
        r"""
        def write():
            if rank == 0:
                say("loss=1")
            elif rank == 1:
                os.write(2, b"\rloss=1")
            else:
                say("step")

        write()
        open(f"there{rank}", "w").close()
        while not os.path.exists("go"):
            write()
            time.sleep(0.05)
        """,
        r"--expect-output=loss=\d:2",
        "--expect-output-ranks=0,1,2",
        "--hang-action=report",
        "--nproc-per-node=4",
        "--redirects=0:3",
        "--log-dir=logs",
        wrapper=TOGETHER,
    )
    reported = r"rank (\d) on \S+ .*no output that matches 'loss=\\d' in its first 2 s"
    wait_for(lambda: job.story, lambda: re.search(reported, job.stderr))
    job.go()
    job.assert_ends()
    assert re.findall(reported, job.stderr) == ["2"]
    assert job.stderr.count("no output") == 1


@pytest.mark.all
def test_output_that_is_expected_is_met_missed_or_missed_later(launch: Launcher) -> None:
    hangs = PRINTS.replace("GOES_ON", "600")
    until_asked = 'while not os.path.exists("go"):\n    say("step")\n    time.sleep(0.1)'
    within = r"--expect-output=loss=\d:3"
    lines, bar = 'say("loss=1")', 'os.write(2, b"\\rloss=1")'
    two_and_another = (
        f"for _ in range(23):\n    {lines} if rank == 0 else {bar} if rank == 1 else 0\n    time.sleep(0.2)"
    )
    of_two = [within, "--nproc-per-node=3", "--expect-output-ranks=0,1"]
    table = [
        (two_and_another, of_two, 0, ""),
        (two_and_another, [*of_two, "--redirects=3", "--log-dir=logs"], 0, ""),
        (hangs, [within], TERM_CODE, r"no output that matches 'loss=\d' in its first 3 s"),
        ("say('loss=1')\n" + hangs, [within, "--tee=3"], TERM_CODE, r"no output that matches 'loss=\d' for 3 s"),
        (until_asked, [within, "--hang-action=report"], 0, r"no output that matches 'loss=\d' in its first 3 s"),
    ]  # fmt: skip
    jobs = [launch(code, *options, name=f"job{number}") for number, (code, options, _, _) in enumerate(table)]
    wait_for("it is reported", lambda: table[-1][-1] in jobs[-1].stderr)
    jobs[-1].go()
    for job, (code, options, exitcode, reason) in zip(jobs, table, strict=True):
        assert job.wait() == exitcode, f"{code} with {options}: {job.story}"
        assert reason in job.stderr
        assert ("no output" in job.stderr) is bool(reason)
        assert not job.left()


# What torch 2.15 logs when an NCCL collective times out, from its source, before it aborts.
ABORTS = """
if rank == 0:
    wait_for("there1")
    log = "[rank0]:[E1129 12:00:00.123456789 ProcessGroupNCCL.cpp:1234] [TC][rank=0][name=default] "
    sys.stderr.write(f"{log}Aborting process on rank 0 due to timeout - timeout watchdog detected operation timeout\\n")
    os.abort()
open("there1", "w").close()
time.sleep(600)
"""


def test_a_worker_that_aborts_since_a_collective_timed_out_is_not_the_cause(launch: Launcher) -> None:
    job = launch(ABORTS, "--nproc-per-node=2", "--max-restarts=0")
    assert job.wait() == TERM_CODE, job.story
    assert re.search(r"hang: 1 of 2 ranks waits in a collective; rank 1 on \S+ does not: .*sleeps", job.stderr)
    root = job.stderr.partition("Root Cause")[2]
    assert re.search(r"rank +: 1 ", root) and "Aborting" not in root


# Several nodes.


@pytest.mark.all
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
from aelastic.agent import postmortem
from aelastic.agent.watches import activity
from aelastic.logs.run_logs import RunLogs

activity.MEASURE_TIMEOUT_S = postmortem._READ_TIMEOUT_S = 0.1
activity.bytes_in = RunLogs.tail = lambda *_, **__: time.sleep(600)
"""


@pytest.mark.all
def test_a_file_system_that_hangs_does_not_keep_a_hung_worker_from_being_stopped(launch: Launcher) -> None:
    job = launch("time.sleep(600)", "--max-restarts=0", "--hang-timeout=1", wrapper=DEAD_DISK)
    assert job.wait() == 128 + signal.SIGTERM
    assert "cannot read output of workers; ignored for hang detection" in job.stderr
    assert "rank 0 on" in job.stderr and "is stopped: no " in job.stderr


# An agent that sees its workers in uninterruptible sleep, once the file exists.
STUCK = f"""
import os
from aelastic.agent.watches import activity
from aelastic.diagnose.hangs.hang_rules import Sample

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
            assert "in uninterruptible sleep (state D), which no signal can end, for 1 s" in agent.stderr
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
