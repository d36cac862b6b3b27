"""Runs `aelastic COMMAND`: a first word of the command line that is not a script."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence

from aelastic.cli.help import command_help, short_help
from aelastic.cli.manual.parsing import parser_of
from aelastic.cli.manual.topics import entry
from aelastic.cli.parser import ALIASES, COMMANDS, Groups, version_text, versions
from aelastic.cli.spec_fields import did_you_mean
from aelastic.errors import InputError
from aelastic.observe.ui.commands import write_help, write_text


def run_command(
    argv: Sequence[str], environ: Mapping[str, str], groups: Groups, complain: Callable[[str], None]
) -> int:
    """Runs a command, and returns the exit code.

    Args:
        argv: the command, one of `COMMANDS` or `ALIASES`, and its arguments.
        groups: the options of a job.
        complain: called with each complaint.

    Raises:
        InputError: the arguments are wrong.
        SystemExit: after `--help`.
    """
    command, *rest = argv
    if os.path.isfile(command) or os.path.exists(os.path.join(command, "__main__.py")):
        complain(f"aelastic: {command} runs the command of that name; to run the file, use ./{command}")
    command = ALIASES.get(command, command)
    try:
        return _run(command, rest, environ, groups, complain)
    except InputError as error:
        if "--json" in rest:
            write_text(json.dumps({"code": "usage", "text": " ".join(str(error).split())}))
        raise


def _run(
    command: str,
    rest: Sequence[str],
    environ: Mapping[str, str],
    groups: Groups,
    complain: Callable[[str], None],
) -> int:
    match command:
        case "help":
            return _help(parser_of("help").parse_args(rest).command, groups)
        case "version":
            is_json = parser_of("version").parse_args(rest).json
            write_text(json.dumps({"code": "ok", **versions()}, indent=2) if is_json else version_text())
            return 0
        case "doctor":
            from aelastic.cli.doctor.command import examine

            return examine(rest, environ, groups)
        case "rehearse" | "policy" | "timeline" | "spent":
            try:
                return _run_beside(command, rest, environ)
            except KeyboardInterrupt:
                return 128 + signal.SIGINT
        case _:
            from aelastic.cli.verbs.asking import run_verb

            return run_verb([command, *rest], environ, complain)


def _run_beside(command: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs a command that queries no agent; each imports only what it needs."""
    match command:
        case "rehearse":
            from aelastic.cli.rehearsal import rehearse

            return rehearse(argv, environ)
        case "policy":
            from aelastic.cli.verbs.explaining import run_policy

            return run_policy(argv)
        case "timeline":
            from aelastic.cli.timeline import run_timeline

            return run_timeline(argv)
        case _:
            from aelastic.cli.spent import run_spent

            return run_spent(argv)


def _help(words: Sequence[str], groups: Groups) -> int:
    """Prints the help of a command, that of `aelastic`, or what helps with a message that names its topic."""
    if not words:
        write_help(short_help(groups))
        return 0
    name = ALIASES.get(words[0], words[0])
    if name not in COMMANDS and (text := entry(words[0])) is not None:
        write_text(text)
        return 0
    if name not in COMMANDS:
        raise InputError(f"help: there is no command or topic {words[0]}{did_you_mean(words[0], COMMANDS)}")
    write_help(command_help(name))
    return 0
