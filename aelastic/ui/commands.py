"""What commands beside the launcher share: they say what is wrong in one line, and write for people and programs."""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import suppress
from typing import NoReturn, TextIO

from aelastic.errors import InputError
from aelastic.failures.failure import printable


class Parser(argparse.ArgumentParser):
    """Reads what follows `aelastic VERB`, or a module's name.

    Raises:
        InputError: an option is not known, or has another value than it takes.
    """

    def error(self, message: str) -> NoReturn:
        verb = self.prog.partition("aelastic ")[2]
        raise InputError(f"{verb}: {message} (see {self.prog} --help)" if verb else message)


SECONDS_MAX = 1e6


def seconds(text: str, least: float = 1.0) -> float:
    """An option's value, for argparse."""
    try:
        return read_seconds(text, least)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_seconds(text: str, least: float = 1.0) -> float:
    """An option's value.

    Raises:
        ValueError: it is none.
    """
    value = math.nan
    with suppress(ValueError):
        value = float(text)
    if value > SECONDS_MAX:
        raise ValueError(f"{text!r}: use {SECONDS_MAX:,.0f} seconds at most")
    if value >= least:
        return value
    raise ValueError(f"{text!r}: use seconds, at least {least:g}")


def say(text: str, to: TextIO | None = None) -> None:
    """Writes lines to stdout, or another stream, at once; a reader that has gone is none of our business."""
    to = sys.stdout if to is None else to
    with suppress(OSError):
        if to is not None:  # else it is closed
            to.write(f"{printable(text)}\n")
            to.flush()
