"""Readers of texts that a user types, on the command line or in a variable.

Each returns the value, and its `ValueError` has the remedy.  Whether a job can have the value is a rule of
its setting (`base.setting`).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from aelastic.base import setting

T = TypeVar("T")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Signals that the agent cannot (signal(7)) or must not handle: SIGCHLD reports exits.
_UNHANDLED = frozenset({signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD})


def read_as(kind: Callable[[str], T], text: str, remedy: str) -> T:
    """Reads a text with a type that raises a `ValueError` of its own."""
    try:
        return kind(text)
    except ValueError:
        raise ValueError(remedy) from None


def keep(rule: setting.Rule, value: object) -> None:
    """Refuses a value that breaks a rule."""
    if remedy := rule(value):
        raise ValueError(remedy)


def one_of(*choices: str) -> Callable[[str], str]:
    """Returns a reader of one of these words, which are its `args[0]`."""
    return partial(_read_choice, choices)


def _read_choice(choices: Sequence[str], text: str) -> str:
    keep(setting.one_of(*choices), text)
    return text


def read_path(text: str) -> Path:
    if not text:
        raise ValueError("name a file or folder")
    return Path(text)


def read_flag(text: str) -> bool:
    return bool(read_as(int, text, "use 1 for yes, 0 or nothing for no"))


def read_int(text: str) -> int:
    return read_as(int, text, "use a whole number")


def read_seconds(text: str) -> float:
    return read_as(float, text, "use a number of seconds")


def read_size(text: str) -> int:
    number, unit = text[:-1], text[-1:].upper()
    if unit not in _UNITS:
        number, unit = text, ""
    if not (number.isascii() and number.isdigit()):
        raise ValueError("use a size, as in 500M or 2G")
    return int(number) * _UNITS[unit]


def read_address(text: str) -> str:
    # torchrun accepts an IPv6 address in brackets, and passes it to the workers without them.
    address = text.strip().removeprefix("[").removesuffix("]")
    if not address:
        raise ValueError("use a host name or an address")
    return address


def read_ranks(text: str) -> frozenset[int] | None:
    """Reads ranks separated by commas; an empty text is `None`, which means all ranks."""
    if not text.strip():
        return None
    return frozenset(read_as(int, rank, "use ranks separated by commas, such as 0,1") for rank in text.split(","))


def read_signal(text: str) -> signal.Signals:
    """Reads one signal, with or without SIG."""
    short = text.strip().upper()
    signums = read_signals(f"SIG{short}" if hasattr(signal, f"SIG{short}") else text)
    if len(signums) != 1:
        raise ValueError("use the name of one signal, such as SIGTERM")
    return signums[0]


def read_signals(text: str) -> tuple[signal.Signals, ...]:
    """Reads signals by name; returns each once, in the given order; none if the text is empty."""
    names = [name.strip().upper() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in signal.Signals.__members__:
            raise ValueError(f"{name} is not a signal of this system: use names such as SIGTERM,SIGUSR1")
        if signal.Signals[name] in _UNHANDLED:
            raise ValueError(f"{name} cannot be handled: leave it out")
    return tuple(dict.fromkeys(signal.Signals[name] for name in names))
