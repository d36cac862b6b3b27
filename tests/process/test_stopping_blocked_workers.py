"""Workers stopped for a restart: blocked ones don't delay it, and ones that save may finish."""

from __future__ import annotations

import json
import random
import signal

import pytest
from kit.effort import EFFORT
from kit.launching import Launcher

pytestmark = pytest.mark.usefixtures("warm_stores")

# Number of checkpoints written while a restart waits, several at a time, each in its own job.
CHECKPOINTS = {"quick": 6, "all": 12, "soak": 200}[EFFORT]
AT_ONCE = 6

# In the agent: it soon gives up on idle workers.  On a busy machine, their stacks may take longer.
IDLE_S = 0.4
HASTY = f"""
import aelastic.diagnose.stacks.collect as s
from aelastic.agent.group import restart_grace
restart_grace.IDLE_S = {IDLE_S}
s.MEMORY_UNTIL_S, s.PY_SPY_UNTIL_S, s.TIMEOUT_S = 19.0, 20.0, 25.0
"""
# Far beyond the test's deadline: a restart that waits for this fails the test.
PATIENT = "--shutdown-timeout=600"

# No signal ends this wait, and no Python handler runs during it, as in a collective whose peers are gone.  Nor does one
# run just before it.
BLOCKS = """
import ctypes

def block():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_init(lock, None)
    libc.pthread_mutex_lock(lock)
    say("blocked", rank, os.getpid())
    libc.pthread_mutex_lock(lock)

signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
"""

# Rank 0 fails once the others are blocked; later generations succeed.
FAILS = f"""
{BLOCKS}
if restart:
    say("again", rank)
elif rank:
    block()
else:
    wait_for("go")
    os._exit(3)
"""


def test_a_blocked_worker_does_not_hold_a_restart_until_the_shutdown_timeout(launch: Launcher) -> None:
    job = launch(FAILS, "--nproc-per-node=3", "--max-restarts=1", PATIENT, wrapper=HASTY)
    job.wait_line("blocked", 2)
    (job.folder / "go").touch()
    job.assert_ends()
    assert sorted(line for line in job.lines if line.startswith("again")) == ["again 0", "again 1", "again 2"]
    killed = f"aelastic: W ranks 1, 2 neither wrote nor used the CPU for {IDLE_S} s after SIGTERM: killed\n"
    assert killed in job.stderr, job.stderr
    assert job.stderr.count(" was in File ") == 2, job.stderr


def test_a_restart_grace_is_kept_whatever_the_worker_does(launch: Launcher) -> None:
    job = launch(FAILS, "--nproc-per-node=2", "--max-restarts=1", "--restart-grace=0.3", PATIENT)
    job.wait_line("blocked")
    (job.folder / "go").touch()
    assert job.wait() == 0, job.story
    assert "W rank 1 not ended 0.3 s after SIGTERM: killed\n" in job.stderr


def test_a_stop_for_good_is_patient(launch: Launcher) -> None:
    job = launch(f"{BLOCKS}\nblock()", "--max-restarts=1", "--shutdown-timeout=1.2", wrapper=HASTY)
    job.wait_line("blocked")
    job.signal(signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM, job.story
    assert "after SIGTERM: killed" not in job.stderr
    waited_s = float(job.stderr.partition("did not end within ")[2].partition(" s")[0])
    assert waited_s >= 1.2, job.stderr


# A worker with a blocked main thread, whose checkpoint is written by another thread, a child, or a grandchild.  Writing
# begins when rank 0 fails, and the worker reports when it is complete.
SAVES = f"""
import json, multiprocessing, threading
{BLOCKS}
plan = json.load(open("plan.json"))


def compute(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def save():
    wait_for("go")
    mapped = plan["how"] == "mapped"
    with open("part", "w+b") as file:
        if mapped:
            import mmap
            size = sum(len(piece) for _, _, piece in pieces())
            file.truncate(size)
            whole, at = mmap.mmap(file.fileno(), size), 0
        for pause_s, busy_s, piece in pieces():
            time.sleep(pause_s)
            compute(busy_s)
            if mapped:
                whole[at : at + len(piece)] = piece
                at += len(piece)
                whole.flush()
            else:
                file.write(piece)
                file.flush()
        os.fsync(file.fileno())
    os.rename("part", "whole")


def pieces():
    for number, (pause_s, busy_s, size) in enumerate(plan["pieces"]):
        yield pause_s, busy_s, bytes([number % 256]) * size


if restart:
    os._exit(0)
if rank == 0:
    wait_for("saving")
    open("go", "w").close()
    os._exit(3)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
if plan["by"] == "thread":
    threading.Thread(target=save, daemon=True).start()
elif not os.fork():
    if plan["by"] == "child" or not os.fork():
        save()
    os._exit(0)
open("saving", "w").close()
block()
"""


def plan_of(seed: int) -> dict[str, object]:
    """How a checkpoint is written: in pieces of very different sizes, with pauses and computation in between."""
    chance = random.Random(seed)
    pieces = [
        (chance.uniform(0.0, 1.4), chance.choice([0.0, 0.0, 0.05, 0.3]), int(10 ** chance.uniform(1, 6)))
        for _ in range(chance.randint(3, 8))
    ]
    return {
        "by": ("thread", "child", "grandchild")[seed % 3],
        "how": chance.choice(["written", "written", "mapped"]),
        "pieces": pieces,
    }


@pytest.mark.long
@pytest.mark.timeout(3600 if EFFORT == "soak" else 300)
@pytest.mark.all
def test_a_checkpoint_that_is_being_written_is_never_cut(launch: Launcher) -> None:
    for first in range(0, CHECKPOINTS, AT_ONCE):
        jobs = []
        for seed in range(first, min(first + AT_ONCE, CHECKPOINTS)):
            launch.write(f"{seed}/plan.json", json.dumps(plan_of(seed)), preamble="")
            options = "--nproc-per-node=2", "--max-restarts=1", "--shutdown-timeout=100"  # s; that bounds the grace
            jobs.append((seed, launch(SAVES, *options, name=str(seed))))
        for seed, job in jobs:
            folder = job.folder
            assert job.wait(120) == 0, f"seed {seed}: {job.story}"
            sizes = [size for _, _, size in plan_of(seed)["pieces"]]  # type: ignore[attr-defined]
            assert (folder / "whole").exists(), f"seed {seed} was cut: {plan_of(seed)}\n{job.story}"
            assert (folder / "whole").stat().st_size == sum(sizes), f"seed {seed}"
            assert "neither wrote nor used the CPU for 2 s" in job.stderr, job.story  # once the checkpoint was complete
