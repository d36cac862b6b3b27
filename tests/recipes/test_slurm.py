"""`deploy/slurm/train.sbatch` in a real Slurm: jobs succeed, fail, are cancelled, requeued, and run out of time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kit.launching import PREAMBLE, cmdline
from kit.servers.slurm import LIMIT_S, NODES, Slurm, slurm
from kit.waiting import wait_for

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "train.sbatch"
ONE_WORKER = "--export=ALL,NPROC_PER_NODE=1"

# Counts from its last checkpoint, and writes one when stopped.  `finish` in its folder lets it end.
TRAINING = """
from pathlib import Path

name, fails = sys.argv[1:]
checkpoint = Path(f"{name}.{rank}")
begin = int(checkpoint.read_text()) if checkpoint.exists() else 0
step = begin + 1


def save(*_):
    checkpoint.write_text(str(step))
    say(f"saved at {step}")
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
say(f"rank {rank} of {os.environ['WORLD_SIZE']} begins at {begin}, restart {restart}, queue {os.environ.get('SLURM_RESTART_COUNT', 0)}")
if fails == "always" or fails == "once" and restart == 0:
    world = [Path(f"{name}.has-begun.{restart}.{each}") for each in range(int(os.environ["WORLD_SIZE"]))]
    world[rank].touch()
    for each in world:
        wait_for(each)  # all have said so, or the first to fail would end one that has not
    sys.exit(7)
wait_for("finish")
say("finished")
"""

pytestmark = pytest.mark.timeout(300)
in_slurm = pytest.mark.all


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm(folder) as running:
        (folder / "train.py").write_text(PREAMBLE + TRAINING)
        yield running


@pytest.fixture
def cluster(running: Slurm) -> Iterator[Slurm]:
    yield running
    running.run("scancel", "--me")
    (running.folder / "finish").unlink(missing_ok=True)
    wait_for(f"no process: {running.processes()}", lambda: not running.processes())


def finish(cluster: Slurm) -> None:
    (cluster.folder / "finish").touch()


@in_slurm
def test_a_job_has_an_agent_on_each_node_and_one_world(cluster: Slurm) -> None:
    job = cluster.submit("--export=ALL,NPROC_PER_NODE=2", SCRIPT, "train.py", "plain", "never")
    cluster.wait_output(job, " of 4 begins at 0", 4)
    finish(cluster)
    assert cluster.wait_end(job) == ("COMPLETED", "0:0"), cluster.story(job)
    assert "error" not in cluster.story(job) and "Terminated" not in cluster.story(job)


@in_slurm
@pytest.mark.parametrize(
    "fails, end",
    [pytest.param("once", ("COMPLETED", "0:0"), marks=pytest.mark.ci), ("always", ("FAILED", "7:0"))],
)
def test_a_failed_worker_is_started_again_and_its_code_becomes_the_jobs(
    cluster: Slurm, fails: str, end: tuple[str, str]
) -> None:
    finish(cluster)
    job = cluster.submit(f"{ONE_WORKER},MAX_RESTARTS=1", SCRIPT, "train.py", f"fails-{fails}", fails)
    assert cluster.wait_end(job) == end, cluster.story(job)
    # From 0, or from 1: the other worker saves at its current step before it has found the order to end.
    assert len(re.findall(r"begins at [01], restart 1", cluster.story(job))) == 2


@in_slurm
def test_scancel_lets_the_workers_save(cluster: Slurm) -> None:
    job = cluster.submit(ONE_WORKER, SCRIPT, "train.py", "cancelled", "never")
    cluster.wait_output(job, "begins at 0", 2)
    cluster.run("scancel", job)
    assert cluster.wait_end(job)[0] == "CANCELLED"
    cluster.wait_output(job, "saved at 1", 2)


@in_slurm
@pytest.mark.long
def test_near_its_time_limit_or_put_back_a_job_saves_and_continues_from_there_later(cluster: Slurm) -> None:
    options = ("--time=60", "--signal=B:USR1@110")
    job = cluster.submit(*options, ONE_WORKER, SCRIPT, "train.py", "limit", "never")
    cluster.wait_output(job, "begins at 0", 2)
    # Not earlier: Slurm checks every half minute, and would warn a job with so little time as soon as it has begun.
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    cluster.wait_output(job, f"job {job} goes back into the queue")
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    assert cluster.story(job).count("saved at 1") == 2
    cluster.wait_output(job, "begins at 1, restart 0, queue 1", 2)
    cluster.run("scontrol", "requeue", job)
    cluster.wait_output(job, "begins at 2, restart 0, queue 2", 2)
    finish(cluster)
    assert cluster.wait_end(job) == ("COMPLETED", "0:0"), cluster.story(job)


STEPS = """
from aelastic import notice

for step in range(1, 100_000):
    if os.path.exists("finish"):
        break
    time.sleep(0.02)
    if step == 5:
        say("trains")
    if notice.due():
        say(f"saves at {step}")
        notice.saved()
"""


@in_slurm
@pytest.mark.long
def test_told_by_slurm_all_ranks_of_one_element_save_at_one_step_and_it_goes_back_but_the_others_do_not(
    cluster: Slurm,
) -> None:
    """The last array element has the array's own number, but actions on it don't affect the others."""
    (cluster.folder / "steps.py").write_text(PREAMBLE + STEPS)
    array = cluster.submit("--array=0-1", ONE_WORKER, SCRIPT, "steps.py")
    other, notified = f"{array}_0", f"{array}_1"
    for element in (other, notified):
        cluster.wait_output(element, "trains", 2)
    cluster.run("scancel", "--batch", "--signal=USR1", notified)
    cluster.wait_output(notified, f"job {notified} goes back into the queue")
    steps = [line.split()[-1] for line in cluster.story(notified).splitlines() if "saves at" in line]
    assert len(steps) == 2 and len({*steps}) == 1, cluster.story(notified)
    assert "saves" not in cluster.story(other)
    finish(cluster)
    for element in (other, notified):
        assert cluster.wait_end(element) == ("COMPLETED", "0:0"), cluster.story(element)


@in_slurm
def test_the_others_continue_without_a_lost_node(cluster: Slurm) -> None:
    job = cluster.submit(f"{ONE_WORKER},MIN_NODES=1", SCRIPT, "train.py", "lost", "never")
    cluster.wait_output(job, " of 2 begins at 0", 2)
    for pid in cluster.processes(f"SLURM_JOB_ID={job}", "SLURM_NODEID=1"):
        with suppress(ProcessLookupError):  # it ended with the previous one
            os.kill(pid, signal.SIGKILL)
    cluster.wait_output(job, "rank 0 of 1 begins at 1")
    finish(cluster)
    assert cluster.wait_end(job) == ("FAILED", "137:0"), cluster.story(job)
    assert "finished" in cluster.story(job)


def watches(cluster: Slurm, node: str) -> bool:
    return any("watch_first_node" in cmdline(pid) for pid in cluster.processes(f"SLURMD_NODENAME={node}"))


@in_slurm
@pytest.mark.long
def test_without_its_first_node_a_job_goes_back_into_the_queue(tmp_path: Path) -> None:
    """Its batch script and its endpoint are gone, and with `--no-kill` it would wait for its time limit."""
    (tmp_path / "train.py").write_text(PREAMBLE + TRAINING)
    with slurm(tmp_path, "SlurmdTimeout=5") as cluster:
        job = cluster.submit(f"{ONE_WORKER},MIN_NODES=1,WATCH_INTERVAL=1", SCRIPT, "train.py", "first", "never")
        cluster.wait_output(job, " of 2 begins at 0", 2)
        wait_for("what watches the first node", lambda: watches(cluster, NODES[1]), LIMIT_S)
        cluster.lose(NODES[0])
        wait_for("the queue", lambda: cluster.fields(job)["JobState"] == "PENDING", LIMIT_S)
        assert cluster.fields(job)["Restarts"] == "1"


@pytest.mark.parametrize(
    "env, words",
    [
        (
            {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "PATH": "/bin"},
            "no aelastic in PATH=/bin: activate its environment before sbatch, and keep ALL in --export",
        ),
        ({}, "SLURM_JOB_ID= is no job of Slurm: start this script with sbatch"),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "0"}, "SLURM_NNODES=0 is no number of nodes"),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}, "there is no training script on the command line"),
    ],
)
def test_what_is_not_a_job_of_slurm_is_refused_in_a_sentence(env: dict[str, str], words: str) -> None:
    done = subprocess.run(
        [SCRIPT],
        env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, f"train.sbatch: {words}, see docs/how-to/slurm.md\n")
