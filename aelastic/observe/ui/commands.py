"""Shared by the commands: reporting an error in one line, and output for people and for programs."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, NoReturn, TextIO, TypeAlias

from aelastic.diagnose.failures.failure import printable
from aelastic.errors import InputError

# A line of help that heads the lines below it.
_HEADING = re.compile(r"^(Usage:|\S.*:$)", re.MULTILINE)


class WrongUsageError(InputError):
    """A command line that its parser does not accept; the help of the command has examples."""


class Parser(argparse.ArgumentParser):
    """Parses the arguments after `aelastic COMMAND`, or after a module's name.

    Raises:
        WrongUsageError: an option is unknown, its value is wrong, or an argument is missing.
    """

    help_text: Callable[[], str] | None = None

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.remedies: dict[str, str] = {}  # for missing arguments, by the name in the namespace

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        found, more = self.parse_known_args(args, namespace)
        if more:
            self.refuse(more)
        return found

    def refuse(self, more: Sequence[str]) -> NoReturn:
        """Refuses words that the command does not take; suggests the right spelling of a misspelled option."""
        name = next((word for word in more if word.startswith("-")), "").partition("=")[0]
        if not name:
            self.error(f"unrecognized arguments: {' '.join(more)}")
        from difflib import get_close_matches  # only a misspelled command line pays for it

        known = [spelling for action in self._actions for spelling in action.option_strings]
        close = get_close_matches(name, known, n=1)
        self.error(f"unknown option {name}" + (f": did you mean {close[0]}?" if close else ""))

    # One signature for all three of argparse's: commands pass no namespace of their own.
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, more = super().parse_known_args(args, namespace)
        is_misspelled = any(word.startswith("-") for word in more)  # which the caller refuses
        for name, remedy in self.remedies.items():
            if getattr(found, name) is None and not is_misspelled:
                self.error(remedy)
        return found, more

    def error(self, message: str) -> NoReturn:
        command = self.prog.partition("aelastic ")[2]
        raise WrongUsageError(f"{command}: {message}" if command else message)

    def print_help(self, file: Any = None) -> None:
        """Prints `help_text`, if there is one."""
        if self.help_text is None:
            super().print_help(file)
        else:
            write_help(self.help_text())


SECONDS_MAX = 1e6


def read_seconds(text: str, least: float = 1.0) -> float:
    """Returns an option's value.

    Raises:
        ValueError: it is not a number of seconds in range.
    """
    value = math.nan
    with suppress(ValueError):
        value = float(text)
    if value > SECONDS_MAX:
        raise ValueError(f"{text!r}: use at most {SECONDS_MAX:,.0f} seconds")
    if value >= least:
        return value
    raise ValueError(f"{text!r}: use seconds, at least {least:g}")


def is_capable(stream: TextIO | None) -> bool:
    """Whether the stream is a terminal that understands control sequences."""
    environ = os.environ  # noqa: TID251  only for commands, which own the process
    if stream is None or environ.get("TERM", "dumb") in {"", "dumb"}:
        return False
    with suppress(ValueError):  # it is closed
        return stream.isatty()
    return False


def is_styled(stream: TextIO | None) -> bool:
    """Whether the stream is a terminal that shows bold text and colours; not if NO_COLOR is set (no-color.org)."""
    environ = os.environ  # noqa: TID251  as above
    return is_capable(stream) and not environ.get("NO_COLOR")


class Colour(StrEnum):
    """The colour of a word; the word means the same without it."""

    GOOD = "32"  # green
    BAD = "31"  # red
    DOUBTFUL = "33"  # yellow


Paint: TypeAlias = Callable[[str, Colour | None], str]


def plain(text: str, _: Colour | None) -> str:
    return text


def coloured(text: str, colour: Colour | None) -> str:
    return text if colour is None else f"\033[{colour}m{text}\033[0m"


def paint_for(stream: TextIO | None) -> Paint:
    """Returns a function that colours words on a terminal, and leaves them as they are elsewhere."""
    return coloured if is_styled(stream) else plain


def write_help(text: str) -> None:
    """Writes help to stdout; its headings are bold on a terminal."""
    if is_styled(sys.stdout):
        text = _HEADING.sub("\033[1m\\1\033[0m", text)
    with suppress(OSError):
        if sys.stdout is not None:
            sys.stdout.write(text)
            sys.stdout.flush()


def write_text(text: str, to: TextIO | None = None) -> None:
    """Writes lines to stdout, or another stream, at once; a closed pipe is ignored."""
    write_painted(printable(text), to)


def write_painted(text: str, to: TextIO | None = None) -> None:
    """Writes printable text, which may have been coloured, as `write_text` does."""
    to = sys.stdout if to is None else to
    with suppress(OSError):
        if to is not None:  # otherwise it is closed
            to.write(f"{text}\n")
            to.flush()
