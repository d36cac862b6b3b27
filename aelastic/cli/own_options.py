"""The own options of a command that also takes a job's options, read like those: first the text, then its value."""

from __future__ import annotations

from aelastic.cli.converters import read_flag
from aelastic.cli.manual.table import COMMANDS
from aelastic.cli.options import Option


def own_options(name: str) -> tuple[Option, ...]:
    """Returns the options of one command, in the order of its help."""
    return tuple(
        Option(each.names, each.read if each.metavar else read_flag, each.default, each.metavar, each.text, ())
        for each in COMMANDS[name].arguments
    )
