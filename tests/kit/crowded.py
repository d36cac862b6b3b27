"""Environments as users have them beside aelastic: of other versions, with other packages, with Python told to be otherwise.

Two are virtual environments below `build/crowded`, which `make crowded` makes: their own packages come before those of
the environment that the tests run in, whose torch they share.  The third is this environment under variables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kit.servers.programs import missing

FOLDER = Path(__file__).parents[2] / "build/crowded"

# Imported by each interpreter that starts, as tracers and coverage tools have themselves imported.
SITECUSTOMIZE = """
import atexit
import sys
import threading

import coverage

coverage.process_startup()
atexit.register(lambda: None)
threading.excepthook = lambda args: sys.__excepthook__(*args[:3])
print("sitecustomize is here", file=sys.stderr)
"""


def _hooks(folder: Path) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (folder / "usercustomize.py").write_text("import sys\nprint('usercustomize is here', file=sys.stderr)\n")
    (folder / "coveragerc").write_text(f"[run]\nparallel = true\ndata_file = {folder}/coverage\n")
    return {"PYTHONPATH": str(folder), "COVERAGE_PROCESS_START": str(folder / "coveragerc"), "PYTHONHASHSEED": "7"}


@dataclass(frozen=True)
class Environment:
    """One of them.

    Args:
        name: of the test.
        venv: its folder below `build/crowded`; empty: the environment that the tests run in.
        variables: what its interpreters find in their environment, with a folder for files of theirs.
    """

    name: str
    venv: str = ""
    variables: Callable[[Path], dict[str, str]] = lambda _: {}

    @property
    def python(self) -> str:
        """Its interpreter; skips the test where it was not made."""
        if not self.venv:
            return sys.executable
        python = FOLDER / self.venv / "bin/python"
        if not python.exists():
            missing(f"there is no {python}: make crowded", "CROWDED")
        return str(python)


ENVIRONMENTS = (
    Environment("oldest", "oldest"),
    Environment("image", "image"),
    Environment("hooks", variables=_hooks),
    Environment("optimized", variables=lambda _: {"PYTHONOPTIMIZE": "2"}),
    Environment("warnings are errors", variables=lambda _: {"PYTHONWARNINGS": "error"}),
)
