"""What stands first on the command line and is not a script: `aelastic COMMAND`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from aelastic.cli.parser import ALIASES, COMMANDS, Groups, help_text, version_text
from aelastic.cli.spec_fields import did_you_mean
from aelastic.errors import InputError
from aelastic.ui.commands import say


def run_command(
    argv: Sequence[str], environ: Mapping[str, str], groups: Groups, complain: Callable[[str], None]
) -> int:
    """Runs one, and gives the exit code.

    Args:
        argv: the command, one of `COMMANDS`, and what follows.
        groups: the options of a job.
        complain: called with what is wrong.

    Raises:
        InputError: what follows cannot be read.
        SystemExit: after `--help`.
    """
    command, *rest = argv
    if os.path.isfile(command) or os.path.exists(os.path.join(command, "__main__.py")):
        complain(f"aelastic: {command} is a command here; the file of that name is ./{command}")
    if command == "help" and rest and rest[0] not in {"help", "version"}:
        if rest[0] not in COMMANDS and rest[0] not in ALIASES:
            raise InputError(f"help: there is no command {rest[0]}{did_you_mean(rest[0], COMMANDS)}")
        command, rest = rest[0], ["--help"]
    command = ALIASES.get(command, command)
    match command:
        case "help":
            say(help_text(groups).rstrip())
            return 0
        case "version":
            say(version_text())
            return 0
        case "doctor":
            from aelastic.cli.doctor import examine

            return examine(rest, environ, groups)
        case _:
            from aelastic.cli.verbs.asking import run_verb

            return run_verb([command, *rest], environ, complain)
