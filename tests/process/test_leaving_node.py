"""A planned shutdown of a node: its ranks save at one step, it leaves, and its agent exits with 75."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from kit.launching import Job, Launcher, run
from kit.waiting import wait_for

from aelastic import Supervisor, WorkerSpec
from aelastic.errors import EXIT_TRY_AGAIN

# Takes steps of 10 ms; while `slow` exists, rank 1 takes none and reports that.
TRAINS = """
from aelastic import notice
say("start", rank, restart)
for step in range(1, 100_000):
    while rank == 1 and os.path.exists("slow"):
        os.path.exists("stands") or open("stands", "w").close()
        time.sleep(0.01)
    time.sleep(0.01)
    if notice.due():
        say("saved", rank, step)
        notice.saved()
        say("goes on", rank, step)
    if step == 10:
        say("trains", rank)
"""
TWO = "--nproc-per-node", "2"


def slow_down(job: Job) -> None:
    """Returns once rank 1 no longer takes steps."""
    (job.folder / "slow").touch()
    wait_for("rank 1 takes no step", (job.folder / "stands").exists)


# Floods, then exits.
FLOODS = "yes x | tr -d '\\n' | head -c 1000000; exit 3"
HANDLES = 'if rank < 2: signal.signal(signal.SIGUSR2, lambda *_: say("got it", rank))\n'


def test_a_signal_passes_to_workers_and_another_makes_all_ranks_save_at_one_step(launch: Launcher) -> None:
    """A notice command that floods and exits does not affect the job."""
    job = launch(
        HANDLES + TRAINS, "--nproc-per-node=3", "--on-signal=USR2=pass,USR1=drain:600", f"--notice-command={FLOODS}"
    )
    job.wait_line("trains", 3)
    wait_for("its end is reported", partial(_has_logged, job, "ended (exit code 3)"))
    job.signal(signal.SIGUSR2)
    job.wait_line("got it", 2)
    job.signal(signal.SIGUSR2)
    assert {*job.wait_line("got it", 4)} == {"got it 0", "got it 1"}, "the worker without a handler is alive"
    job.signal(signal.SIGUSR1)
    job.assert_ends(EXIT_TRY_AGAIN)
    assert len(job.wait_line("saved", 3)) == 3
    assert len({line.split()[2] for line in job.wait_line("saved", 3)}) == 1, "at one step"
    assert not any(line.startswith("goes on") for line in job.lines)
    assert "within 600 s (by SIGUSR1): all ranks save at call" in job.stderr
    assert "; all workers have ended; run the same command again to resume" in job.stderr


@pytest.mark.parametrize("hang_timeout_s", [0, pytest.param(1, marks=pytest.mark.all)])
def test_ranks_that_wait_do_not_hang_and_continue_once_the_notice_is_called_off(
    launch: Launcher, hang_timeout_s: int
) -> None:
    # They write until they wait: if one begins or arrives late, this keeps the other from looking hung.
    writes = TRAINS.replace("    if notice.due()", '    say("step", rank)\n    if notice.due()')
    writes = writes.replace("        time.sleep(0.01)\n", '        say("slow")\n        time.sleep(0.01)\n')
    options = [f"--hang-timeout={hang_timeout_s}"] if hang_timeout_s else []
    job = launch(writes, *TWO, "--notice-file=notice", "--on-signal=USR1=drain:600", *options)
    job.wait_line("trains", 2)
    slow_down(job)
    (job.folder / "new").write_text("drain 600 spot\n")
    (job.folder / "new").rename(job.folder / "notice")  # an empty file would be another notice
    job.wait_line("saved 0")
    wait_for("it is said", partial(_has_logged, job, "within 600 s (spot, by the notice file)"))
    if hang_timeout_s:
        since = (job.folder / "slow").stat().st_mtime
        wait_for("it would be found to hang", lambda: time.time() - since > 3.0 * hang_timeout_s)
    (job.folder / "notice").unlink()
    job.wait_line("goes on 0")
    (job.folder / "slow").unlink()
    job.signal(signal.SIGUSR1)
    job.assert_ends(EXIT_TRY_AGAIN)
    assert "drain cancelled" in job.stderr and "hang" not in job.stderr


@pytest.mark.all
@pytest.mark.ci
def test_a_rank_that_hangs_while_the_others_have_saved_is_found(launch: Launcher) -> None:
    # Each step writes output, so that no rank looks hung while it trains.
    hangs = TRAINS.replace("        time.sleep(0.01)\n", '        say("stands") or time.sleep(3600)\n')
    hangs = hangs.replace("    if notice.due()", '    say("step", rank)\n    if notice.due()')
    job = launch(hangs, *TWO, "--on-signal=USR1=drain:3600", "--hang-timeout=1")
    job.wait_line("trains", 2)
    (job.folder / "slow").touch()
    job.wait_line("stands")
    job.signal(signal.SIGUSR1)
    job.assert_ends(128 + signal.SIGTERM)
    assert job.wait_line("saved 0")
    assert "1 of 2 ranks waits in saved (" in job.stderr and "rank 1 on" in job.stderr


def test_workers_that_handle_the_signal_save_by_themselves(launch: Launcher) -> None:
    code = """
    def save(*_):
        say("saves", rank)
        wait_for("go")
        sys.exit(0)

    signal.signal(signal.SIGUSR2, save)
    say("start")
    rest()
    """
    job = launch(code, *TWO, "--drain-signal", "SIGUSR2", "--on-signal", "USR1=drain:600")
    job.wait_line("start", 2)
    job.signal(signal.SIGUSR1)
    job.wait_line("saves", 2)
    job.go()
    assert job.wait() == EXIT_TRY_AGAIN, job.story


@pytest.mark.all
@pytest.mark.ci
def test_workers_are_started_again_if_some_have_ended_when_a_notice_is_called_off(launch: Launcher) -> None:
    code = """
    def save(*_):
        say("saves", rank)
        rank and wait_for("go")
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
    say("start", restart)
    rest()
    """
    job = launch(code, *TWO, "--notice-file", "notice")
    job.wait_line("start", 2)
    (job.folder / "notice").write_text("drain 600 spot\n")
    job.wait_line("saves", 2)
    (job.folder / "notice").unlink()
    wait_for("it is called off", partial(_has_logged, job, "drain cancelled"))
    job.go()
    assert job.wait_line("start", 4) == ["start 0"] * 4, "no restart is charged"
    job.signal(signal.SIGTERM)
    job.wait()
    job.assert_nothing_left()


def test_workers_that_know_nothing_of_it_run_on_until_the_end(launch: Launcher) -> None:
    job = launch(
        'say("start"); signal.signal(signal.SIGTERM, signal.SIG_DFL)\nrest()', *TWO, "--on-signal", "USR1=drain:1"
    )
    job.wait_line("start", 2)
    job.signal(signal.SIGUSR1)
    assert job.wait() == EXIT_TRY_AGAIN, job.story
    assert "within 1 s" in job.stderr
    assert "; 1 of 1 nodes did not save in time; all workers" in job.stderr, job.story


def test_a_failure_while_ranks_save_is_one(launch: Launcher) -> None:
    code = TRAINS.replace('say("saved", rank, step)', 'say("saved", rank, step); rank and sys.exit(3)')
    job = launch(code, *TWO, "--on-signal", "USR1=drain:600", "--max-restarts", "0")
    job.wait_line("trains", 2)
    job.signal(signal.SIGUSR1)
    assert job.wait() == 3, job.story


def test_nothing_of_a_notice_command_outlives_an_agent_that_is_killed(launch: Launcher) -> None:
    job = launch(TRAINS, *TWO, "--notice-command", "sleep 600; true")
    job.wait_line("trains", 2)
    job.child("sleep 600")
    job.process.kill()
    job.wait_nothing_left()


def test_a_notice_command_is_read_outlives_the_workers_and_is_ended(launch: Launcher) -> None:
    waits = "while ! test -e told; do sleep 0.05; done; echo nonsense; echo drain 600 spot; sleep 600"
    prints = launch.write("says", waits, preamble="")
    trains = f"if rank == 1 and restart == 0:\n    sys.exit(3)\n{TRAINS}"
    job = launch(trains, *TWO, "--max-restarts=1", "--notice-command", f"sh {prints}")
    job.wait_line("trains", 2)
    (job.folder / "told").touch()
    job.assert_ends(EXIT_TRY_AGAIN)
    assert "within 600 s (spot, by the notice command)" in job.stderr
    assert "notice command: 'nonsense' is not a notice: print 'drain SECONDS REASON' or 'cancel'" in job.stderr
    assert "restarting it" not in job.stderr


@pytest.mark.all
def test_a_notice_command_that_floods_without_end_leaves_the_job_alone(launch: Launcher) -> None:
    job = launch(TRAINS, *TWO, "--notice-command", "yes x | tr -d '\\n'")
    job.wait_line("trains", 2)
    job.signal(signal.SIGTERM)
    job.assert_ends(-signal.SIGTERM)


def _has_logged(job: Job, words: str) -> bool:
    return words in job.stderr


def test_a_program_drains_its_own_node(tmp_path: Path) -> None:
    code = f"""
import os, time
from aelastic import notice
while not notice.due():
    time.sleep(0.01)
    open({str(tmp_path / "trains")!r}, "w").close()
notice.saved()
"""
    supervisor = Supervisor(WorkerSpec(entrypoint=sys.executable, args=("-c", code), env=dict(os.environ)))

    async def job() -> bool:
        running = asyncio.create_task(supervisor.run())
        while not (tmp_path / "trains").exists():  # noqa: ASYNC110  as above
            await asyncio.sleep(0.01)
        supervisor.drain(60.0, "by the program")
        result = await running
        return result.is_drained and result.reason.endswith(" (by the program)") and not result.failures

    assert run("uvloop", job())
