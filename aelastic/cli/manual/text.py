"""The help of a command, as text: at most `WIDTH` columns wide, whatever terminal there is."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Protocol

from aelastic.cli.manual.rows import Argument, Command

WIDTH = 80
_COLUMN = 29


class Documented(Protocol):
    """What the help says of an option, of a command or of a job."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def metavar(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def default(self) -> str | None: ...


def help_of(command: Command, prog: str, job_options: Iterable[Documented] = ()) -> str:
    """What `--help` prints for a command.

    Args:
        prog: how it is called.
        job_options: those of a job that are shown.
    """
    return "\n".join(_lines(command, prog, tuple(job_options))) + "\n"


def _lines(command: Command, prog: str, job_options: tuple[Documented, ...]) -> Iterator[str]:
    yield sentence(command.phrase)
    yield ""
    yield f"Usage: {usage_of(command, prog)}"
    positional = [each for each in command.arguments if each.is_positional]
    if positional:
        yield from ("", "Arguments:")
        for each in positional:
            yield from entry(each.metavar, each.text)
    yield from ("", "Options:")
    yield from option_lines(each for each in command.arguments if not each.is_positional)
    yield from entry("-h, --help", "show this help and exit")
    if job_options:
        yield from ("", "Options of the job (aelastic --help-all shows all of them):")
        yield from option_lines(job_options)
    if command.note:
        yield ""
        yield from wrap(command.note)
    yield ""
    yield from example_lines(command)
    yield ""
    yield from exit_code_lines(command)


def usage_of(command: Command, prog: str) -> str:
    """The usage, in one line."""
    has_options = command.script or any(not each.is_positional for each in command.arguments)
    positional = [_shown(each) for each in command.arguments if each.is_positional]
    parts = [prog, command.subcommand, "[OPTIONS]" if has_options else "", *positional, command.script]
    return " ".join(filter(None, parts))


def sentence(phrase: str) -> str:
    """A phrase, with a capital and a full stop."""
    return f"{phrase[0].upper()}{phrase[1:]}."


def _shown(argument: Argument) -> str:
    more = "..." if argument.nargs in {"+", "*"} else ""
    return f"[{argument.metavar}]{more}" if argument.nargs in {"?", "*"} else f"{argument.metavar}{more}"


def option_lines(options: Iterable[Documented]) -> Iterator[str]:
    """Each option, with its default."""
    for option in options:
        default = f" (default: {option.default})" if option.default and option.metavar else ""
        yield from entry(f"{', '.join(option.names)} {option.metavar}".rstrip(), option.text + default)


def example_lines(command: Command) -> Iterator[str]:
    yield "Examples:"
    for example in command.examples:
        yield f"  # {example.purpose}"
        yield f"  {example.command}"


def exit_code_lines(command: Command) -> Iterator[str]:
    yield "Exit codes:"
    for code, meaning in command.exit_codes:
        yield from entry(code, meaning, column=10)


def entry(left: str, right: str, column: int = _COLUMN) -> Iterator[str]:
    """A name, and beside it, or below where it is long, what it is."""
    first, *rest = wrap(right, " " * column)
    if len(left) > column - 4:
        yield f"  {left}"
        yield first
    else:
        yield f"  {left}".ljust(column) + first.lstrip()
    yield from rest


def wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
