"""What tests of recipes share: a Python that has other people's packages, which this project does not need.

`.ci/run` makes it in `build/recipes`.  Where it, or a package in it, is missing, the tests of that package are skipped,
except where `TEST_RECIPES=required` says that it must be there.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from kit.servers.programs import missing

ROOT = Path(__file__).parents[3]
BIN = ROOT / "build" / "recipes" / "bin"


def python_with(*packages: str) -> str:
    """A Python that has aelastic and these packages, or programs beside it; without them the test is skipped."""
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
