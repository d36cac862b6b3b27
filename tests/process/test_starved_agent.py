"""An agent that gets a twentieth of a CPU: what it decides late is decided as if it had been in time."""

from __future__ import annotations

import pytest
from kit.effort import EFFORT
from kit.faults.starving import starved
from kit.launching import LAUNCH_TIMEOUT_S, Launcher

MODULE = "colorsys"
# One sleeps, one ends at once: both looked like a process that never began.
ONCE = f"""
say("ran", rank, restart, {MODULE!r} in sys.modules)
open(f"up{{rank}}{{restart}}", "w")
wait_for(f"up{{1 - rank}}{{restart}}")
sys.exit(restart < 2)
"""


@pytest.mark.parametrize("attempt", range({"quick": 2, "all": 5, "soak": 50}[EFFORT]))
def test_a_warm_worker_runs_once(launch: Launcher, attempt: int) -> None:
    job = launch(ONCE, "--nproc-per-node", "2", "--preload", MODULE, "--max-restarts", "2")
    with starved(job.pid):
        assert job.wait(LAUNCH_TIMEOUT_S) == 0, job.story
    assert sorted(job.lines) == [f"ran {rank} {restart} True" for rank in range(2) for restart in range(3)], job.story
    job.assert_nothing_left()
