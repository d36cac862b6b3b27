"""The examples, run as users run them: as programs, with deadlines, judged by exit code and output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from kit.warm.interpreters import Warm

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAIN_DIGITS = EXAMPLES / "demo" / "train_digits.py"
AELASTIC = "aelastic"
TORCHRUN = "torch.distributed.run"
# Some import torch and scikit-learn five times.  Less than pytest's own, so that a hanging example shows its output.
LIMIT_S = 250.0
pytestmark = pytest.mark.timeout(LIMIT_S + 50)


def run_python(
    *args: str | Path, python: str = sys.executable, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [python, *map(str, args)]
    environ = {**os.environ, **(env or {})}
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environ)
    except subprocess.TimeoutExpired as expired:
        stdout, stderr = ((text or b"").decode(errors="replace") for text in (expired.stdout, expired.stderr))
        pytest.fail(f"{command} is not over after {LIMIT_S:.0f} s\n{stdout}\n{stderr}")


def train(
    warm: Warm, checkpoint: Path, *options: str, workers: int = 2, launcher: str = AELASTIC
) -> subprocess.CompletedProcess[str]:
    agent = ("-m", launcher, "--standalone", "--nproc-per-node", str(workers), "--max-restarts", "1")
    python = sys.executable if launcher == AELASTIC else warm.python
    return run_python(*agent, TRAIN_DIGITS, "--checkpoint", checkpoint, *options, python=python, env=warm.env)


def epochs(stdout: str) -> list[int]:
    return [int(epoch) for epoch in re.findall(r"^epoch (\d+)/", stdout, re.MULTILINE)]


def test_the_training_script_does_not_know_aelastic() -> None:
    imports = [line for line in TRAIN_DIGITS.read_text().splitlines() if re.match(r"\s*(import|from)\s", line)]
    assert imports and not [line for line in imports if "aelastic" in line]


@pytest.mark.all
def test_training_reaches_its_accuracy_under_torchrun_too(tmp_path: Path, warm: Warm) -> None:
    done = train(warm, tmp_path / "digits.pt", launcher=TORCHRUN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert epochs(done.stdout) == list(range(1, 13))


def test_training_continues_from_its_checkpoint_after_a_worker_was_killed(tmp_path: Path, warm: Warm) -> None:
    done = train(warm, tmp_path / "digits.pt", "--crash-at-epoch", "4", "--crash-how", "kill")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming after epoch 3" in done.stdout
    assert epochs(done.stdout) == list(range(1, 13))
    assert "epoch 12/12" in done.stdout and "restart=1" in done.stdout


@pytest.mark.timeout(400)
@pytest.mark.all
def test_training_that_misses_its_accuracy_fails_and_reports_it_and_continues_with_another_number_of_workers(
    tmp_path: Path, warm: Warm
) -> None:
    checkpoint = tmp_path / "digits.pt"
    for workers, until, least, how in ((2, 3, "0.999", ""), (1, 5, "0", "raise"), (3, 12, "0.95", "exit")):
        crash = ("--crash-at-epoch", str(until - 1), "--crash-rank", "0", "--crash-how", how) if how else ()
        done = train(warm, checkpoint, "--epochs", str(until), "--min-accuracy", least, *crash, workers=workers)
        assert done.returncode == (0 if how else 1), done.stdout + done.stderr
        assert ("is below --min-accuracy 0.999" in done.stderr) is not bool(how)
        assert f"epoch {until}/{until}" in done.stdout and f"world_size={workers}" in done.stdout
    assert epochs(done.stdout) == list(range(6, 13))


@pytest.mark.all
def test_the_demo_kills_a_worker_and_the_training_finishes() -> None:
    done = run_python(EXAMPLES / "demo" / "demo.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with SIGKILL" in done.stdout and "demo: It worked" in done.stdout


@pytest.mark.long
@pytest.mark.all
def test_supervisors_run_side_by_side_in_a_program_and_one_is_cancelled() -> None:
    done = run_python(EXAMPLES / "embed.py", env={"OMP_NUM_THREADS": "1"})  # as our command line does
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("training: SUCCEEDED", "flaky: SUCCEEDED", "of 2 workers 0 are left", "left behind: nothing"):
        assert line in done.stdout


@pytest.mark.parametrize(
    "start_method",
    ["spawn", pytest.param("fork", marks=pytest.mark.all), pytest.param("forkserver", marks=pytest.mark.all)],
)
def test_a_function_returns_a_value_from_each_rank(start_method: str) -> None:
    done = run_python(EXAMPLES / "function.py", "--workers", "3", "--start-method", start_method)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^rank (\d): \d+ of", done.stdout, re.MULTILINE) == ["0", "1", "2"]
    assert "pi is about 3.1" in done.stdout
