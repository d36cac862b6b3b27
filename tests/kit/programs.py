"""Programs of Python that a test waits for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_python(*argv: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """What a Python says that can import aelastic, in a folder, without variables that choose options of it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "AELASTIC_"))}
    env = {**clean, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *argv], cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )
