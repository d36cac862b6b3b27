"""What a job requires of this machine: its program, and torch for the workers' store.

Checked before anything starts, so that a job is rejected up front rather than halfway through.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

from aelastic.errors import InputError
from aelastic.workers.forkserver.command import parse


def check_program(entrypoint: str | Callable[..., Any], env: Mapping[str, str], args: Sequence[Any] = ()) -> None:
    """Rejects a program that is not on this machine, or a Python without its script or module.

    Args:
        entrypoint: the workers' entrypoint.
        env: the basis of their environments.
        args: the arguments of the entrypoint.

    Raises:
        InputError: no such program, or it cannot be executed; no such script or module.
    """
    _check_executable(entrypoint, env)
    if isinstance(entrypoint, str):
        command = parse(entrypoint, [os.fsdecode(arg) for arg in args])
        if command is not None and command.kind == "script":
            check_script(command.target)
        elif command is not None and command.kind == "module" and entrypoint == sys.executable:
            check_module(command.target, env)


def check_script(script: str) -> None:
    """Rejects a script that is not on this machine.

    Raises:
        InputError: it does not exist, or cannot be read.
    """
    if "${local_rank}" in script:
        return  # another file for each worker
    if not os.path.exists(script):
        folder = "a deleted working folder"
        with suppress(FileNotFoundError):
            folder = os.getcwd()
        raise InputError(f"script {script} not found from {folder}: check the path, or use -m for a module")
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise InputError(f"script {script} is a folder without __main__.py: name a file in it")
    if not os.access(script, os.R_OK):
        raise InputError(f"script {script} cannot be read: check its permissions")


def check_module(module: str, env: Mapping[str, str]) -> None:
    """Rejects a module that is not on this machine.

    Looks for the top-level name only: finding a submodule imports its parents, perhaps torch.

    Raises:
        InputError: it does not exist.
    """
    top = module.partition(".")[0]
    if not top or os.sep in top:
        return  # not a module name; Python's own message is better
    if top in sys.modules or find_spec(top) is not None:
        return
    # Workers search the working folder, and the paths in their own environment.
    if PathFinder.find_spec(top, ["", *env.get("PYTHONPATH", "").split(os.pathsep)]) is None:
        raise InputError(f"module {top} not found: install it, set PYTHONPATH, or leave out -m for a script")


def _check_executable(entrypoint: str | Callable[..., Any], env: Mapping[str, str]) -> None:
    # Searched like in `subprocess`: in the PATH of the child (`os.get_exec_path`).
    if not isinstance(entrypoint, str) or shutil.which(entrypoint, path=env.get("PATH", os.defpath)) is not None:
        return
    as_script = f"for a script use entrypoint=sys.executable, args=({entrypoint!r}, ...)"
    is_script = entrypoint.endswith(".py")
    if not os.path.dirname(entrypoint):
        remedy = as_script if is_script else "check its name, or give its path"
        raise InputError(f"entrypoint {entrypoint} is not a program in PATH: {remedy}")
    if not os.path.exists(entrypoint):
        raise InputError(f"entrypoint {entrypoint} does not exist: check the path")
    if os.path.isdir(entrypoint):
        raise InputError(f"entrypoint {entrypoint} is a folder: name a program in it")
    remedy = as_script if is_script else "check its permissions"
    raise InputError(f"entrypoint {entrypoint} cannot be executed: {remedy}")


def check_torch() -> None:
    """Rejects serving the workers' store without torch.  Looks for torch without importing it.

    Raises:
        InputError: this Python has no torch.
    """
    if "torch" not in sys.modules and PathFinder.find_spec("torch") is None:
        raise InputError(
            f"torch is not installed for {sys.executable}: pip install torch "
            "(or, for workers that need no store, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)",
            topic="torch-is-not-installed",
        )
