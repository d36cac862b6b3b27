"""Whether a value that a caller gave is of a type that can be used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import index
from typing import Any, TypeAlias

# What fits, and the words for it.
Fits: TypeAlias = tuple[Callable[[Any], bool], str]


def optional(fits: Fits) -> Fits:
    check, remedy = fits
    return (lambda value: value is None or check(value)), f"{remedy}, or None"


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
