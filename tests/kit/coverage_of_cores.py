"""Prints covered lines by file and for all cores (`make coverage`); fails if the cores are below the floor.

python tests/kit/coverage_of_cores.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))

from core.test_layers import CORES  # noqa: E402  the list of cores

FLOOR = 95.0  # percent of the lines of all cores


def main() -> int:
    data = coverage.Coverage(config_file=str(ROOT / "pyproject.toml"))
    data.load()
    data.report()
    sys.stdout.write("\nThe cores:\n")
    places = [f"{ROOT}/aelastic/{core.replace('.', '/')}{end}" for core in CORES for end in ("/*", ".py")]
    return int(data.report(include=places) < FLOOR)


if __name__ == "__main__":
    sys.exit(main())
