"""Parses the command of an interpreter: `python [options] script|-m module|-c code [arguments]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from aelastic.base.record import Record

Kind: TypeAlias = Literal["script", "module", "code"]

_INTERPRETER = re.compile(r"(python|pypy)(\d+(\.\d+)?)?t?")
# Options that run no program, or are interactive: not possible in a forked interpreter.
_WITHOUT_PROGRAM = set("hViv?x")
_WITH_VALUE = set("WX")


class PythonCommand(Record):
    """One start of an interpreter.

    Args:
        interpreter: as it was named.
        options: for the interpreter itself.
        kind: what it runs.
        target: the script's path, the module's name or the code.
        argv: the initial `sys.argv`.
    """

    interpreter: str
    options: tuple[str, ...]
    kind: Kind
    target: str
    argv: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The command as it was given."""
        flag = {"script": [], "module": ["-m"], "code": ["-c"]}[self.kind]
        return [self.interpreter, *self.options, *flag, self.target, *self.argv[1:]]


# Replaces an exec: takes a command, and descriptors by their numbers in the process; returns the pid.
Launch: TypeAlias = Callable[[PythonCommand, Mapping[int, int]], int]


def parse(entrypoint: str, args: Sequence[str]) -> PythonCommand | None:
    """Reads a command.

    Returns `None` if it is not an interpreter's, or runs no program (`-V`, `-i`, standard input).
    """
    if not _INTERPRETER.fullmatch(entrypoint.rpartition("/")[2]):
        return None
    options: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            return PythonCommand(entrypoint, tuple(options), "script", word, (word, *rest)) if word else None
        letters, flag, value = _split(word)
        if word.startswith("--") or word == "-" or set(letters) & _WITHOUT_PROGRAM:
            return None
        options += [f"-{letters}"] if letters else []
        if not flag:
            continue
        if not value and not rest:
            return None
        value = value or rest.pop(0)
        if flag not in _WITH_VALUE:
            kind: Kind = "module" if flag == "m" else "code"
            return PythonCommand(entrypoint, tuple(options), kind, value, (f"-{flag}", *rest))
        options += [f"-{flag}{value}"]
    return None


def _split(word: str) -> tuple[str, str, str]:
    """Splits short options into letters without a value, the letter that takes one, and the value right after it."""
    for place, letter in enumerate(word[1:], start=1):
        if letter in _WITH_VALUE or letter in "mc":
            return word[1:place], letter, word[place + 1 :]
    return word[1:], "", ""
