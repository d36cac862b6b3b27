"""Which worker of a node failed by itself, if one that blames a lost peer is noticed first."""

from __future__ import annotations

from kit.launching import Launcher

# The agent notices that rank 0 has ended, and only then ends rank 1, which rank 0 blames.
BLAMES_FIRST = """
import select
if rank == 0:
    wait_for("watched")
    raise RuntimeError("Connection reset by peer")
if rank == 1:
    wait_for("pid0")
    first = os.pidfd_open(int(open("pid0").read()))
    open("watched", "w").close()
    select.select([first], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
rest()
"""
PRINTS_PID = """
if rank == 0:
    open("pid", "w").write(str(os.getpid()))
    os.rename("pid", "pid0")
"""
# On a busy machine rank 1 takes longer to end than the limit.
PATIENT = "from aelastic.agent import generation\ngeneration.GIVES_WAY_S = 60.0\n"


def test_a_worker_that_was_killed_is_the_cause_though_one_that_blames_it_is_seen_first(launch: Launcher) -> None:
    job = launch(PRINTS_PID + BLAMES_FIRST, "--nproc-per-node", "3", wrapper=PATIENT)
    job.wait()
    report = job.stderr[job.stderr.index("Root Cause") :]
    assert "rank      : 1 " in report.partition("traceback")[0], job.story


def test_a_worker_that_blames_a_peer_elsewhere_is_the_cause_once_the_others_had_time_to_end(launch: Launcher) -> None:
    job = launch('if rank == 0:\n    raise RuntimeError("Connection reset by peer")\nrest()', "--nproc-per-node", "2")
    job.wait()
    assert "rank      : 0 " in job.stderr[job.stderr.index("Root Cause") :], job.story


def test_a_worker_that_somebody_else_kills_while_it_is_stopped_has_failed_as_well(launch: Launcher) -> None:
    job = launch(
        """
        if rank == 1:
            signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            say("ready")
            rest()
        wait_for("go")
        raise ValueError("batch is empty")
        """,
        "--nproc-per-node",
        "2",
    )
    job.wait_line("ready")
    job.go()
    job.wait()
    assert "rank 1 failed on" in job.stderr, job.story
    assert "ValueError: batch is empty" in job.stderr[job.stderr.index("Root Cause") :].partition("traceback")[0]
