"""Environments of users: other versions, other packages, Python with other settings.

Two are virtual environments below `build/crowded`, made by `make crowded`: their own packages precede those of the tests'
environment, whose torch they share.  The third is the tests' environment with other variables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kit.servers.programs import missing

FOLDER = Path(__file__).parents[2] / "build/crowded"

# Each interpreter imports it at start, like tracers and coverage tools.
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
    """One environment.

    Args:
        name: the name of the test.
        venv: its folder below `build/crowded`; empty for the environment of the tests.
        variables: variables for its interpreters, given a folder for their files.
    """

    name: str
    venv: str = ""
    variables: Callable[[Path], dict[str, str]] = lambda _: {}

    @property
    def python(self) -> str:
        """Its interpreter; skips the test if the environment was not made."""
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
