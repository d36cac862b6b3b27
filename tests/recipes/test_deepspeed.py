"""DeepSpeed's own launcher, which has no restarts, with aelastic underneath, on this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from kit.servers.recipes import python_with

LIMIT_S = 200.0
# Without an engine: on CPUs, DeepSpeed compiles its communication on first use, which takes more than a minute.
WORKER = """
import os, signal, sys

import deepspeed
import torch
import torch.distributed as dist

rank, restart = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
ranks = torch.tensor([rank])
dist.all_reduce(ranks)
# In one piece: both write to one pipe.
print(f"told rank {rank} restart {restart} sum {ranks.item()} {' '.join(sys.argv[1:])}\\n", end="", flush=True)
dist.all_reduce(ranks)  # both have told, or the kill would take the other in its first one
if restart == "0" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(ranks)
os._exit(0)  # now and then torch aborts as the interpreter ends (`kit.workers.torch_workers`)
"""

pytestmark = [pytest.mark.all, pytest.mark.timeout(LIMIT_S + 50)]


def test_workers_that_deepspeed_starts_are_restarted(tmp_path: Path) -> None:
    python = Path(python_with("deepspeed"))
    (tmp_path / "train.py").write_text(WORKER)
    added = {"PATH": f"{python.parent}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu", "PET_MAX_RESTARTS": "3"}
    done = subprocess.run(
        [python, "-m", "aelastic.under", "deepspeed", "--num_gpus", "2", "--master_port", "0", "train.py", "--x", "1"],
        cwd=tmp_path, env={**os.environ, **added}, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("told"))
    assert lines == [
        f"told rank {rank} restart {restart} sum 1 --local_rank={rank} --x 1" for rank in (0, 1) for restart in (0, 1)
    ]
    assert "rank 1 failed on" in done.stderr and "restart 1 of 3" in done.stderr
