"""Whether what the workers need of this machine is there, before anything is started for it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from typing import Any

from aelastic.errors import InputError


def check_program(entrypoint: str | Callable[..., Any], env: Mapping[str, str]) -> None:
    """Refuses a program that is not on this machine.

    Args:
        entrypoint: the workers'.
        env: that they start from.

    Raises:
        InputError: no such program, or it cannot be executed.
    """
    # As `subprocess` looks for it: in the PATH of the child (`os.get_exec_path`).
    if not isinstance(entrypoint, str) or shutil.which(entrypoint, path=env.get("PATH", os.defpath)) is not None:
        return
    if os.path.dirname(entrypoint):
        there = os.path.exists(entrypoint)
        problem = "cannot be executed: check its permissions" if there else "does not exist: check the path"
        raise InputError(f"entrypoint {entrypoint} {problem}")
    if entrypoint.endswith(".py"):
        raise InputError(
            f"entrypoint {entrypoint} is not a program in PATH: for a script use entrypoint=sys.executable, "
            f"args=({entrypoint!r}, ...)"
        )
    raise InputError(f"entrypoint {entrypoint} is not a program in PATH: check its name, or give its path")


def check_torch() -> None:
    """Refuses to serve the workers' store without torch.  It is looked for, not imported.

    Raises:
        InputError: this Python has no torch.
    """
    if "torch" not in sys.modules and PathFinder.find_spec("torch") is None:
        raise InputError(
            f"torch is not installed for {sys.executable}: pip install torch "
            "(or, for workers that need no store, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)"
        )
