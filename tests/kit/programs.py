"""Python programs that a test waits for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_python(*argv: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python that can import aelastic, in a folder, without the variables that set aelastic's options."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "AELASTIC_"))}
    env = {**clean, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *argv], cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )
