"""Completion scripts for shells, made by shtab from the tables of options and commands.

`aelastic --print-completion bash` prints one, as torchrun does.  A script completes commands, their options, scripts,
and run ids of jobs, for which it starts `job_names`.  shtab is an optional dependency, imported only here.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from aelastic.base.setting import Option
from aelastic.base.texts import one_of
from aelastic.cli.manual.table import COMMANDS
from aelastic.cli.manual.topics import topics
from aelastic.cli.options import COMPLETION_SHELLS
from aelastic.errors import InputError


def print_completion(shell: str, groups: Mapping[str, tuple[Option, ...]]) -> None:
    """Prints the script that completes the command `aelastic`.

    Args:
        groups: the options there are.

    Raises:
        InputError: no such shell, or shtab is not installed.
    """
    try:
        one_of(*COMPLETION_SHELLS)(shell)
    except ValueError as reason:
        raise InputError(f"--print-completion {shell}: {reason}") from None
    text = completion_of(_parser(groups), shell)
    with suppress(OSError):  # stdout is closed
        print(text, flush=True)  # noqa: T201


def completion_of(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for a parser's options.

    Raises:
        InputError: shtab is not installed, or too old.
    """
    try:
        import shtab  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise InputError(f"--print-completion {shell}: shtab is not installed: pip install shtab") from None
    if shell not in shtab.SUPPORTED_SHELLS:
        raise InputError(f"--print-completion {shell}: this shtab cannot: pip install --upgrade shtab")
    kinds = {"file": shtab.FILE, "directory": shtab.DIRECTORY, "job": JOBS, "ended job": ENDED_JOBS}
    commands = _commands_of(parser)
    for each in (parser, *commands.values()):
        for action in each._actions:  # noqa: SLF001  there is no other way to ask
            if kind := _kind_of(action, each):
                vars(action)["complete"] = kinds[kind]
    if not commands:
        return str(shtab.complete(parser, shell=shell))
    text = str(shtab.complete(parser, shell=shell, preamble=_preambles().get(shell, "")))
    return text + _FISH_END if shell == "fish" else text


def _kind_of(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """What completes the value of an action; empty if nothing does, or its choices do."""
    if action.choices:
        return ""
    if action.dest in {"script", "script_args", "training_script", "training_script_args"}:
        return "file"
    kind = KINDS.get(action.metavar, "") if isinstance(action.metavar, str) else ""
    return "ended job" if kind == "job" and parser.prog == "aelastic why" else kind


def _commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    choices = [each.choices for each in parser._actions if isinstance(each.choices, dict)]  # noqa: SLF001  as above
    return choices[0] if choices else {}


# What completes a value, by how the help calls it.
KINDS = {"JOB": "job", **dict.fromkeys(("FILE", "PATH", "LOGDIR", "EVENTS"), "file"), "DIR": "directory"}
# For shtab: what a shell calls, as `_preambles` defines it.
JOBS = {"bash": "_aelastic_jobs", "zsh": "_aelastic_jobs", "fish": "(_aelastic_jobs)"}
ENDED_JOBS = {"bash": "_aelastic_ended_jobs", "zsh": "_aelastic_ended_jobs", "fish": "(_aelastic_ended_jobs)"}

# In HOST:PORT, zsh would take them for the end of a part.
_COLONS = re.compile(r"[^\w]+")

_BASH = """\
_aelastic_jobs() { compgen -W "$(@NAMES@ 2>/dev/null)" -- "$1"; }
_aelastic_ended_jobs() { compgen -W "$(@NAMES@ --ended 2>/dev/null)" -- "$1"; compgen -f -- "$1"; }
# The first word is a command or a script; what follows a script is its own.
_shtab_aelastic_pos_0_COMPGEN=_shtab_compgen_files
_shtab_aelastic_pos_0_nargs=1
_shtab_aelastic_pos_1_COMPGEN=_shtab_compgen_files
_shtab_aelastic_pos_1_nargs=A...
"""
_ZSH = """\
_aelastic_jobs() { compadd -- ${(f)"$(@NAMES@ 2>/dev/null)"}; }
_aelastic_ended_jobs() { compadd -- ${(f)"$(@NAMES@ --ended 2>/dev/null)"}; _files; }
# The first word is a command or a script.
functions[_aelastic_commands]=$functions[_shtab_aelastic_commands]
_shtab_aelastic_commands() { _aelastic_commands; _files; }
"""
_FISH = """\
function _aelastic_jobs; @NAMES@ 2>/dev/null; end
function _aelastic_ended_jobs; @NAMES@ --ended 2>/dev/null; __fish_complete_path (commandline -ct); end
"""
# The first word is a command or a script; what follows a script is its own.
_FISH_END = """
complete -c aelastic -n _shtab_aelastic_using -a "(__fish_complete_path (commandline -ct))"
"""


def _preambles() -> dict[str, str]:
    """The functions that the scripts call, by shell."""
    names = f"{shlex.quote(sys.executable)} -P -m aelastic.cli.shells.job_names"
    return {shell: text.replace("@NAMES@", names) for shell, text in (("bash", _BASH), ("zsh", _ZSH), ("fish", _FISH))}


def _parser(groups: Mapping[str, tuple[Option, ...]]) -> argparse.ArgumentParser:
    """A parser with the texts that shells show next to options; the one that runs a job has none, to start fast."""
    parser = argparse.ArgumentParser(prog="aelastic")
    _add_options(parser, groups)
    parser.add_argument("--help-all", action="store_true", help="show all commands and options, and exit")
    parser.add_argument("--version", action="version", version="", help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND or SCRIPT")
    for name, command in COMMANDS.items():
        _add_command(commands.add_parser(name, help=command.phrase, prog=f"aelastic {name}"), name, groups)
    return parser


def _add_command(parser: argparse.ArgumentParser, name: str, groups: Mapping[str, tuple[Option, ...]]) -> None:
    command = COMMANDS[name]
    if command.subcommand:
        parser.add_argument("subcommand", choices=[command.subcommand], help="what to do with the policy")
    for argument in command.arguments:
        how: dict[str, Any] = {"help": argument.text.replace("%", "%%")}
        how |= {"metavar": argument.metavar} if argument.metavar else {"action": "store_true"}
        how |= {"nargs": argument.nargs} if argument.nargs else {}
        how |= {"choices": [*COMMANDS, *topics()]} if argument.metavar == "COMMAND" else {}
        parser.add_argument(*argument.names, **how)
    if command.script:  # it takes the options of a job, and its script
        _add_options(parser, groups)
        parser.add_argument("script", metavar="SCRIPT", help="the script of the job")
        parser.add_argument("script_args", metavar="ARGS", nargs="*", help="the arguments of the script")


def _add_options(parser: argparse.ArgumentParser, groups: Mapping[str, tuple[Option, ...]]) -> None:
    for option in (option for options in groups.values() for option in options):
        words, flag = option.text.replace("%", "%%"), {"action": "store_true"}
        metavar = _COLONS.sub(" ", option.metavar)
        more = {"metavar": metavar, "choices": option.choices or None} if option.metavar else flag
        parser.add_argument(*option.names, dest=option.dest, help=words, **more)
