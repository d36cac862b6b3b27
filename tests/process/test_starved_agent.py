"""An agent with a twentieth of a CPU decides late, but as if it had been in time."""

from __future__ import annotations

import pytest
from kit.effort import EFFORT
from kit.faults.starving import starved
from kit.launching import LAUNCH_TIMEOUT_S, Launcher

pytestmark = pytest.mark.usefixtures("warm_stores")

MODULE = "colorsys"
# One sleeps, one exits at once: both used to look like processes that never began.
ONCE = f"""
say("ran", rank, restart, {MODULE!r} in sys.modules)
open(f"up{{rank}}{{restart}}", "w")
wait_for(f"up{{1 - rank}}{{restart}}")
sys.exit(restart < 1)
"""


@pytest.mark.all
@pytest.mark.parametrize("attempt", range({"quick": 1, "all": 2, "soak": 50}[EFFORT]))
def test_a_warm_worker_runs_once(launch: Launcher, attempt: int) -> None:
    job = launch(ONCE, "--nproc-per-node", "2", "--preload", MODULE, "--max-restarts", "1")
    with starved(job.pid):
        assert job.wait(LAUNCH_TIMEOUT_S) == 0, job.story
    assert sorted(job.lines) == [f"ran {rank} {restart} True" for rank in range(2) for restart in range(2)], job.story
    job.assert_nothing_left()


# Rank 0 fails; rank 1 saves for longer than an idle worker is given, or does nothing.
STOPPED = """
def save(*_):
    file = open("checkpoint", "wb", buffering=0)
    end = time.monotonic() + 4
    while time.monotonic() < end:
        file.write(bytes(1000))
        time.sleep(0.05)
    say("saved")
    sys.exit(0)


def be_stuck():
    while True:
        time.sleep(600)


if restart == 0 and rank == 1:
    signal.signal(signal.SIGTERM, save if "save" in sys.argv else signal.SIG_IGN)
    open("up", "w")
    be_stuck()
if restart == 0:
    wait_for("up")
    sys.exit(1)
"""


@pytest.mark.all
def test_a_worker_that_saves_is_waited_for(launch: Launcher) -> None:
    script = launch.write("job/worker.py", STOPPED)
    job = launch.command("--nproc-per-node", "2", "--max-restarts", "1", str(script), "save")
    with starved(job.pid):
        assert job.wait(LAUNCH_TIMEOUT_S) == 0, job.story
    assert job.lines == ["saved"]
    assert "killed" not in job.stderr
    job.assert_nothing_left()


@pytest.mark.all
def test_a_worker_that_does_nothing_is_killed_and_where_it_was_is_reported(launch: Launcher) -> None:
    script = launch.write("job/worker.py", STOPPED)
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--preload", MODULE)
    job = launch.command(*options, str(script), "idle")
    with starved(job.pid):
        assert job.wait(LAUNCH_TIMEOUT_S) == 0, job.story
    assert "W rank 1 neither wrote nor used the CPU for 2 s after SIGTERM: killed" in job.stderr
    assert "in be_stuck" in job.stderr
    job.assert_nothing_left()


BUSY = """
end = time.monotonic() + 6
while time.monotonic() < end:
    sum(range(100_000))
"""


@pytest.mark.all
def test_a_worker_that_computes_does_not_hang(launch: Launcher) -> None:
    job = launch(BUSY, "--hang-timeout", "2", "--nproc-per-node", "2")
    with starved(job.pid):
        assert job.wait(LAUNCH_TIMEOUT_S) == 0, job.story
    assert not job.stderr
    job.assert_nothing_left()
