"""The own options of a command that also takes a job's options, read like those: first the text, then its value."""

from __future__ import annotations

from aelastic.base.setting import Option
from aelastic.base.texts import read_flag
from aelastic.cli.manual.table import COMMANDS


def own_options(name: str) -> tuple[Option, ...]:
    """Returns the options of one command, in the order of its help."""
    return tuple(
        Option(each.names, each.read if each.metavar else read_flag, each.metavar, each.text, each.default)
        for each in COMMANDS[name].arguments
    )
