"""torch.compile finds what an earlier job compiled, even if that job was killed while compiling."""

from __future__ import annotations

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Launcher, alive
from kit.waiting import wait_for

COMPILE = """
import torch
from torch._dynamo.utils import counters


def step(x):
    return torch.nn.functional.gelu(x @ x).sum() * 3


say("compiling", os.getpid())
torch.compile(step)(torch.ones(64, 64))
found = counters["inductor"]["fxgraph_cache_hit"]
say("hits", found)
"""


@pytest.mark.long
@pytest.mark.all
@pytest.mark.timeout(400)
def test_a_second_job_finds_what_the_first_one_compiled_though_one_was_killed_meanwhile(launch: Launcher) -> None:
    kept = str(launch.folder / "kept")
    killed = launch(COMPILE, "--cache-dir", kept, name="killed")
    wait_for("it compiles", lambda: killed.lines, LAUNCH_TIMEOUT_S)
    compilers = wait_for("a compiler runs", lambda: [pid for pid in killed.left() if pid != killed.pid], 100)
    killed.process.kill()
    killed.process.wait()
    wait_for("all has ended", lambda: not any(alive(pid) for pid in compilers))
    hits = []
    for name in ("first", "second"):
        job = launch(COMPILE, "--cache-dir", kept, name=name)
        assert job.wait(150) == 0, job.story
        hits += [int(line.split()[1]) for line in job.lines if line.startswith("hits")]
    assert hits == [0, 1]
