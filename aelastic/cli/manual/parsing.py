"""A parser for a command, made from its row of the table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from aelastic.cli.manual.rows import Argument
from aelastic.cli.manual.table import COMMANDS
from aelastic.cli.manual.text import help_of
from aelastic.observe.ui.commands import Parser


def parser_of(name: str, prog: str = "") -> Parser:
    """A parser that prints the manual's text for `--help`, and raises `InputError` for what is wrong.

    Args:
        name: the command.
        prog: how it is called, if not as `aelastic NAME`.
    """
    command = COMMANDS[name]
    prog = prog or f"aelastic {name}"
    parser = Parser(prog=prog, allow_abbrev=False)
    parser.help_text = lambda: help_of(command, prog)
    if command.subcommand:
        added = parser.add_argument("subcommand", metavar=command.subcommand, choices=[command.subcommand])
        added.required = False
        parser.remedies["subcommand"] = f"no subcommand given, as in {command.examples[0].command}"
    for argument in command.arguments:
        _add(parser, argument)
    return parser


def _add(parser: Parser, argument: Argument) -> None:
    how: dict[str, Any] = {"action": "store_true"}
    if argument.metavar:
        how = {"metavar": argument.metavar, "type": _type_of(argument.read), "default": argument.default}
    if argument.nargs:
        how["nargs"] = argument.nargs
    added = parser.add_argument(*argument.names, **how)
    if argument.remedy:
        added.required = False  # the parser refuses it in our words
        parser.remedies[added.dest] = f"no {argument.metavar} given: {argument.remedy}"


def _type_of(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def read_or_explain(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_or_explain
