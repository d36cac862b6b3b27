"""An out-of-memory kill in a real cgroup."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Watches its own cgroup while a child of it takes more than the limit, as an agent and its worker do.
AGENT = """
import subprocess, sys
from aelastic.failures.oom import OomWatch
sys.stdin.readline()  # until we are in the cgroup
watch = OomWatch()
worker = subprocess.run([sys.executable, "-c", "bytearray(256 << 20)"])
print(worker.returncode, watch.kills_since_start(), watch.explain(worker.returncode))
"""


def test_a_real_kill_in_a_real_cgroup_is_explained() -> None:
    parent = Path("/sys/fs/cgroup/memory")
    folder = parent / f"aelastic-test-{os.getpid()}"
    try:
        if not (parent / "memory.limit_in_bytes").exists():
            pytest.skip("this host has no cgroup v1 memory controller")
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    with contextlib.ExitStack() as stack:
        stack.callback(folder.rmdir)
        try:
            (folder / "memory.limit_in_bytes").write_text(str(64 << 20))
        except OSError as error:
            pytest.skip(f"no limit can be set here: {error}")
        agent = subprocess.Popen(
            [sys.executable, "-c", AGENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        stack.enter_context(agent)
        (folder / "cgroup.procs").write_text(str(agent.pid))
        said, _ = agent.communicate("go\n", timeout=60)
    assert said == "-9 1 the kernel's out-of-memory killer ended it (memory limit 64.0 MiB)\n"
