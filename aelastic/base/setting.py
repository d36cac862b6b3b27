"""A setting is one annotated field: its type, default, rule and words, its option and its variable.

    hang_signals: tuple[HangSignal, ...] = setting(
        HANG_SIGNALS, _SIGNS, "the signs of life to look for", own("--hang-signals", read_signs, "SIGNS"))

The class of the field is a frozen dataclass, whose creation fails if `problem_of` finds something.  `cli.options` makes
the command line from the fields, and `make docs` the pages.  To add a setting, add its field, name its option in the
table of `cli.options`, and read the field where it matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, field, fields
from enum import IntFlag
from functools import partial
from operator import index
from typing import Any, NamedTuple, TypeAlias

# Rules: each returns what to use instead of a value, or an empty text if the value is valid.

Rule: TypeAlias = Callable[[Any], str]


def rule(holds: Callable[[Any], bool], remedy: str) -> Rule:
    return lambda value: "" if holds(value) else remedy


def all_of(*rules: Rule) -> Rule:
    """Combines rules in order, so that a range may rely on the type rule before it."""
    return lambda value: next((remedy for each in rules if (remedy := each(value))), "")


def optional(kind: Rule, *more: Rule) -> Rule:
    """Accepts `None`, or a value of a kind that satisfies the other rules."""

    def check(value: Any) -> str:
        if value is None:
            return ""
        return f"{remedy}, or None" if (remedy := kind(value)) else all_of(*more)(value)

    return check


def one_of(*choices: str) -> Rule:
    """Returns a rule that accepts one of these words."""
    return partial(_none_of, choices)


def _none_of(choices: Sequence[str], value: Any) -> str:
    return "" if value in choices else f"use one of {', '.join(choices)}"


def in_words(value: Any) -> str:
    """Formats a value for a message; for a huge int, which Python may refuse to print, its size."""
    is_huge = isinstance(value, int) and not is_real(value)
    return f"an int of {value.bit_length()} bits, which is too large" if is_huge else repr(value)


def is_real(value: Any) -> bool:
    try:
        return hasattr(value, "__float__") and isinstance(float(value), float)
    except (TypeError, ValueError, OverflowError):
        return False


def is_int(value: Any) -> bool:
    try:
        return is_real(index(value))
    except TypeError:
        return False


def is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def are_texts(value: Any) -> bool:
    return is_sequence(value) and all(isinstance(each, str) for each in value)


def are_ranks(value: Any) -> bool:
    return isinstance(value, Collection) and all(map(is_int, value))


# A number may be numpy's, and a path may be any that the system accepts.
ANY = all_of()
INT = rule(is_int, "use an int")
REAL = rule(is_real, "use a number")
STR = rule(lambda value: isinstance(value, str), "use a str")
PATH = rule(lambda value: isinstance(value, str) or hasattr(value, "__fspath__"), "use a Path")
BOOL = rule(lambda value: isinstance(value, bool), "use a bool")
MAPPING = rule(lambda value: isinstance(value, Mapping), "use a dict")
TEXTS = rule(are_texts, "use a tuple or list of texts")
NOT_NEGATIVE = rule(lambda value: value >= 0, "use 0 or more")
SECONDS = all_of(REAL, rule(lambda value: 0 <= value < math.inf, "use seconds, 0 or more"))
NAME_MAX = 255  # characters of a name that is sent to other nodes (`rdzv.protocol.sense`)
NAME = all_of(STR, rule(bool, "use a name that is not empty"))
RANKS = optional(
    rule(are_ranks, "use a frozenset of local ranks"), rule(lambda ranks: min(ranks, default=0) >= 0, "count from 0")
)


# Options.

Read: TypeAlias = Callable[[str], Any]


class Option(NamedTuple):
    """One option of the command line.

    Args:
        names: with dashes; the long one last.
        read: makes the value of a text; its `ValueError` has the remedy.
        metavar: what the help calls the value; empty for a flag.
        text: the help, without the default; by default, the words of the setting.
        default: the text that is read if the option is not given, by default that of the setting's default; `None`:
            the value is `None`.
        variables: environment variables that replace the default, the first one that is not empty.
        rule: what the value must be; by default, the rule of the setting.
    """

    names: tuple[str, ...]
    read: Read
    metavar: str = ""
    text: str = ""
    default: str | None = None
    variables: tuple[str, ...] = ()
    rule: Rule | None = None

    @property
    def name(self) -> str:
        return self.names[-1]

    @property
    def dest(self) -> str:
        return _dest(self.name)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the option accepts; none if it accepts other texts."""
        return self.read.args[0] if isinstance(self.read, partial) else ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """The names, and the long one with underscores if it has several words."""
        return tuple(dict.fromkeys([*self.names, "--" + self.dest]))


def of_torchrun(
    names: str, read: Read, metavar: str = "", text: str = "", *more: str, default: str | None = None,
    rule: Rule | None = None,
) -> Option:  # fmt: skip
    """Returns an option of torchrun, with its `PET_` variable, and `more` variables after that."""
    spelled = tuple(names.split())
    variables = f"PET_{_dest(spelled[-1]).upper()}", *more
    return Option(spelled, read, metavar, text, default, variables, rule)


def own(
    name: str, read: Read, metavar: str = "", text: str = "", *, default: str | None = None, rule: Rule | None = None
) -> Option:
    """Returns an option that torchrun lacks, with its `AELASTIC_` variable."""
    return Option((name,), read, metavar, text, default, (f"AELASTIC_{_dest(name).upper()}",), rule)


def _dest(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


# Settings.


class Setting(NamedTuple):
    """What a field's annotation and default do not say.

    Args:
        rule: what a value must be.
        text: what it means, for the pages; also the option's help, unless the option has its own.
        option: on the command line; `None`: it has no option of its own.
    """

    rule: Rule
    text: str
    option: Option | None


REQUIRED: Any = MISSING  # as a default: the field has none


def setting(default: Any, rule: Rule, text: str, option: Option | None = None) -> Any:
    """Returns the definition of a field: its default, its rule, its words, and its option."""
    if option is not None:
        option = option._replace(
            text=option.text or text,
            default=_text_of(default) if option.default is None else option.default,
            rule=rule if option.rule is None else option.rule,
        )
    metadata = {_KEY: Setting(rule, text, option)}
    if isinstance(default, Mapping):  # dataclasses take it for one that can change
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


_KEY = "setting"


def _text_of(default: Any) -> str | None:
    """Returns a default as one would type it; `None` for a default of `None`."""
    match default:
        case None | str():
            return default
        case _ if default is REQUIRED:
            return None
        case bool() | IntFlag():
            return str(int(default))
        case float():
            return f"{default:g}"
        case tuple():
            return ",".join(map(str, default))
        case _:
            return str(default)


def settings_of(kind: type[Any]) -> Mapping[str, Setting]:
    """Returns the settings among the fields of a class, by name."""
    return {each.name: each.metadata[_KEY] for each in fields(kind) if _KEY in each.metadata}


def options_of(*kinds: type[Any]) -> dict[str, Option]:
    """Returns the options of the classes' fields, by name."""
    found = [each.option for kind in kinds for each in settings_of(kind).values()]
    return {option.name: option for option in found if option is not None}


def problem_of(settings: Any) -> str:
    """Returns the first field of a value that breaks its rule, and what to use instead; empty if all are fine."""
    for name, each in settings_of(type(settings)).items():
        value = getattr(settings, name)
        if remedy := each.rule(value):
            return f"{name} is {in_words(value)}: {remedy}"
    return ""
