"""The core and simulation tests pass with numbers instead of sentences about decisions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# At least this many tests pass if few are skipped.
TESTS_MIN = 2_500


@pytest.mark.all
@pytest.mark.timeout(900)
def test_the_rings_without_processes_need_no_sentence(tmp_path: Path) -> None:
    rings = ["tests/core", "tests/simulation"]
    options = [
        "-q",
        "-m",
        "not all",
        "-p",
        "no:cacheprovider",
        "-p",
        "kit.numbered",
        f"--basetemp={tmp_path / 'tests'}",
    ]
    env = {**os.environ, "TEST_EFFORT": "quick", "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    command = [sys.executable, "-m", "pytest", *options, *rings]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= TESTS_MIN
