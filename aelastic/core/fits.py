"""Rules for values that a caller gave: each says what to use instead, and nothing where a value is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import index
from typing import Any, TypeAlias

Rule: TypeAlias = Callable[[Any], str]


def rule(holds: Callable[[Any], bool], remedy: str) -> Rule:
    return lambda value: "" if holds(value) else remedy


def all_of(*rules: Rule) -> Rule:
    """The rules in their order, so that a range may count on the type before it."""
    return lambda value: next((remedy for each in rules if (remedy := each(value))), "")


def optional(kind: Rule, *more: Rule) -> Rule:
    """`None`, or a value of a kind that keeps the other rules."""

    def check(value: Any) -> str:
        if value is None:
            return ""
        return f"{remedy}, or None" if (remedy := kind(value)) else all_of(*more)(value)

    return check


def one_of(*choices: str) -> Rule:
    """A rule for one of some words, which it has as `args[0]`."""
    return partial(_none_of, choices)


def _none_of(choices: Sequence[str], value: Any) -> str:
    return "" if value in choices else f"use one of {', '.join(choices)}"


def in_words(value: Any) -> str:
    """The value for a message; of an int of hundreds of digits, which Python may refuse to write, its size."""
    is_huge = isinstance(value, int) and not is_real(value)
    return f"an int of {value.bit_length()} bits, which is too much" if is_huge else repr(value)


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


# A number may be numpy's, and a path any that the system takes.
INT = rule(is_int, "use an int")
REAL = rule(is_real, "use a number")
STR = rule(lambda value: isinstance(value, str), "use a str")
PATH = rule(lambda value: isinstance(value, str) or hasattr(value, "__fspath__"), "use a Path")
BOOL = rule(lambda value: isinstance(value, bool), "use a bool")
MAPPING = rule(lambda value: isinstance(value, Mapping), "use a dict")
TEXTS = rule(are_texts, "use a tuple or list of texts")
NOT_NEGATIVE = rule(lambda value: value >= 0, "use 0 or more")
SECONDS = rule(lambda value: 0 <= value < math.inf, "use seconds, 0 or more")
