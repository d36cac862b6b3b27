"""A row of the manual: one command, with its arguments, examples and exit codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Argument(NamedTuple):
    """An option of a command, or a positional argument.

    Args:
        names: with dashes, the long one last; a single name without dashes is a positional argument.
        text: the help, without the default.
        metavar: what the help calls the value; empty for a flag.
        read: turns the text into the value; its `ValueError` names the remedy.
        default: the text that is read if the argument is not given; `None` is not read.
        nargs: of a positional argument: `?` may be left out, `+` and `*` may be repeated.
        remedy: of a positional argument: what to do if it is missing; empty: the error names the argument alone.
    """

    names: tuple[str, ...]
    text: str
    metavar: str = ""
    read: Callable[[str], Any] = str
    default: str | None = None
    nargs: str | None = None
    remedy: str = ""

    @property
    def is_positional(self) -> bool:
        return not self.names[0].startswith("-")


class Example(NamedTuple):
    """A command line, and what it is for."""

    purpose: str
    command: str


class Command(NamedTuple):
    """The manual's entry on one command.

    Args:
        name: what stands after `aelastic`; empty for running a job.
        group: the heading that it is listed under.
        phrase: what it does, in one line, without a capital and a full stop.
        examples: the first two lines that a user would try.
        exit_codes: each code, and what it means.
        arguments: in the order of the help.
        subcommand: the second word, if there is one.
        note: a paragraph below the options.
        script: how the usage shows the script of a job, for a command that also takes the options of a job.
        job_options: those of them that its help shows, by name.
        page: the page of the documentation that has more.
    """

    name: str
    group: str
    phrase: str
    examples: tuple[Example, ...]
    exit_codes: tuple[tuple[str, str], ...]
    arguments: tuple[Argument, ...] = ()
    subcommand: str = ""
    note: str = ""
    script: str = ""
    job_options: tuple[str, ...] = ()
    page: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} {self.subcommand}".rstrip()
