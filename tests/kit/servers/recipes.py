"""Shared by the tests of recipes: a Python with third-party packages that this project does not need.

`.ci/run` makes it in `build/recipes`.  Without it, or without a package in it, the tests of that package are skipped,
unless `TEST_RECIPES=required` makes them fail.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from kit.servers.programs import missing

ROOT = Path(__file__).parents[3]
BIN = ROOT / "build" / "recipes" / "bin"


def python_with(*packages: str) -> str:
    """A Python with aelastic and these packages, or with these programs next to it; skips the test without them."""
    if lacking := [package for package in packages if not _has(package)]:
        what = " and no ".join(lacking)
        missing(f"no {what} here: as .ci/run does, install the extra `recipes` into build/recipes", "RECIPES")
    return str(BIN / "python")


@cache
def _has(package: str) -> bool:
    if (BIN / package).exists():
        return True
    code = f"import importlib.util as util, sys; sys.exit(util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([BIN / "python", "-c", code], check=False).returncode == 0
    except FileNotFoundError:
        return False
