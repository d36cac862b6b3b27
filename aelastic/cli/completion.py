"""Completion scripts for shells, made by shtab from the table of options.

`aelastic --print-completion bash` prints one, as torchrun does.  shtab is an optional dependency, imported only here.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import suppress

from aelastic.cli.converters import one_of
from aelastic.cli.options import COMPLETION_SHELLS, Option
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
    for action in parser._actions:  # noqa: SLF001  there is no other way to ask
        if not action.option_strings:
            vars(action)["complete"] = shtab.FILE  # the script, and its arguments
        elif action.dest == "log_dir":
            vars(action)["complete"] = shtab.DIRECTORY
    return str(shtab.complete(parser, shell=shell))


def _parser(groups: Mapping[str, tuple[Option, ...]]) -> argparse.ArgumentParser:
    """A parser with the texts that shells show next to options; the one that runs a job has none, to start fast."""
    parser = argparse.ArgumentParser(prog="aelastic")
    for option in (option for options in groups.values() for option in options):
        words, flag = option.text.replace("%", "%%"), {"action": "store_true"}
        more = {"metavar": option.metavar, "choices": option.choices or None} if option.metavar else flag
        parser.add_argument(*option.spellings, dest=option.dest, help=words, **more)
    parser.add_argument("--help-all", action="store_true", help="show all commands and options, and exit")
    parser.add_argument("--version", action="version", version="", help="show the version and exit")
    parser.add_argument("script", help="what to run")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="the arguments of the script")
    return parser
