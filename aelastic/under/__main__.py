"""`python -m aelastic.under PROGRAM …`: runs a program with aelastic instead of torch's launcher."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from aelastic.under.site import sitecustomize

USAGE = """\
usage: python -m aelastic.under PROGRAM [arguments of the program]

Runs PROGRAM, and all that it starts, with aelastic instead of torchrun, torch.distributed.run and
torch.distributed.launcher. PROGRAM is one such as accelerate, torchx, deepspeed or jupyter, a script of Python
(train.py), or -m MODULE. Options of the launcher that PROGRAM does not have are given as variables, such as
PET_MAX_RESTARTS=3.
"""


def command_of(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Returns the command: a script or module for this Python, or a program, looked up next to this Python first.

    Raises:
        FileNotFoundError: there is no such program.
    """
    program, *args = argv
    if program in {"-m", "-c"} or program.endswith(".py"):
        return [sys.executable, *argv]
    folders = os.pathsep.join([os.path.dirname(sys.executable), environ.get("PATH", os.defpath)])
    found = shutil.which(program, path=folders)
    if found is None:
        raise FileNotFoundError(program)
    return [found, *args]


def environment_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the program, in which each Python imports our `sitecustomize.py`."""
    folder = os.path.dirname(os.path.abspath(sitecustomize.__file__))
    others = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path not in {"", folder}]
    return {**environ, "PYTHONPATH": os.pathsep.join([folder, *others])}


def main(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Becomes the program; exits with 2 after a usage error."""
    if not argv or argv[0] in {"-h", "--help"}:
        print(USAGE, end="", file=sys.stdout if argv else sys.stderr)
        sys.exit(0 if argv else 2)
    try:
        command = command_of(argv, environ)
    except FileNotFoundError:
        where = "" if os.sep in argv[0] else f" in {os.path.dirname(sys.executable)} or on PATH"
        print(f"aelastic.under: error: program {argv[0]} not found{where}, or not executable", file=sys.stderr)
        sys.exit(2)
    sys.stdout.flush()
    name = argv[1] if argv[0] == "-m" and argv[1:] else argv[0]
    environ = {**environment_of(environ), "AELASTIC_UNDER_PROGRAM": f"{os.getpid()} {name}"}
    os.execve(command[0], command, environ)


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
