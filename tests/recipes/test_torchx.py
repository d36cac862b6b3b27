"""`torchx run aelastic.ddp`, the component that TorchX finds by its entry point, on this machine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from kit.servers.recipes import ROOT, python_with

LIMIT_S = 200.0
WORKER = """
import os, sys

# To a file: torchx shows the output of a job that ends soon in part only.
os.dup2(os.open("told", os.O_CREAT | os.O_APPEND | os.O_WRONLY), 1)
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", *sys.argv[1:])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and "fail" in sys.argv:
    sys.exit(7)
"""

pytestmark = [pytest.mark.all, pytest.mark.timeout(LIMIT_S + 50)]


def torchx(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    bin_ = Path(python_with("torchx")).parent
    # `aelastic` is next to this Python, as the other environment has no script of its own.
    path = os.pathsep.join([str(bin_), os.path.dirname(sys.executable), os.environ["PATH"]])
    env = {**os.environ, "PATH": path}
    (folder / "train.py").write_text(WORKER)
    return subprocess.run(
        [bin_ / "torchx", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.ci
def test_a_component_starts_a_job_and_restarts_its_workers(tmp_path: Path) -> None:
    options = ("-s", "local_cwd", "--wait", "aelastic.ddp", "-j", "2x1", "--max_restarts", "2", "--script", "train.py")
    done = torchx(tmp_path, "run", *options, "fail")
    assert done.returncode == 0 and "SUCCEEDED" in done.stderr, done.stdout + done.stderr
    assert all(f"rank {rank} of 2, restart 1 fail" in (tmp_path / "told").read_text() for rank in (0, 1))


def test_the_command_of_the_page_starts_a_job(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/torchx.md").read_text()
    (shown,) = re.findall(r"^\$ torchx (run .*)", page, re.MULTILINE)
    done = torchx(tmp_path, *shlex.split(shown))
    assert done.returncode == 0 and "SUCCEEDED" in done.stderr, done.stdout + done.stderr
    assert "rank 1 of 2, restart 0 --epochs 5" in (tmp_path / "told").read_text()


def test_torchxs_own_components_are_still_there(tmp_path: Path) -> None:
    done = torchx(tmp_path, "builtins")
    assert all(f". {name}\n" in done.stdout for name in ("aelastic.ddp", "dist.ddp", "utils.echo")), done.stdout


def test_a_job_that_fails_for_good_is_failed(tmp_path: Path) -> None:
    options = ("-s", "local_cwd", "--wait", "aelastic.ddp", "--max_restarts", "0", "--script", "train.py", "fail")
    done = torchx(tmp_path, "run", *options)
    assert done.returncode == 1 and "FAILED" in done.stderr, done.stderr
