"""Text for one row of a terminal: how wide it is, and what of it fits."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

# Control sequences of ECMA-48, those of the operating system command kind (titles, links) among them; and colours.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?|[\x00-\x1f\x7f-\x9f]"
)
_COLOUR = re.compile(r"\x1b\[[\d;:]*m")
_ERASES = (b"\x1b[K", b"\x1b[0K", b"\x1b[2K", b"\x1b[J")
# Wider than any other text.
_ALL = 1 << 30


def width_of(text: bytes) -> int:
    """The columns that a text covers."""
    if text.isascii() and b"\x1b" not in text:
        return len(text)
    if any(erases in text for erases in _ERASES):
        return _ALL
    return _columns(_CONTROL.sub("", text.decode(errors="replace")))


def _columns(plain: str) -> int:
    return len(plain) if plain.isascii() else sum(map(_width, plain))


def _width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in {"Mn", "Me", "Cf"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def overlaid(texts: Sequence[str]) -> str:
    """What is seen where each text was written over the one before."""
    *below, seen = texts
    for text in reversed(below):
        plain = _CONTROL.sub("", text)
        if not seen:
            seen = text
        elif (covered := _columns(_CONTROL.sub("", seen))) < len(plain):
            seen += plain[covered:]
    return seen


def cut_to(text: str, columns: int) -> bytes:
    """As much of a text as fits into a row, with its colours, and without any other control sequence."""
    kept: list[str] = []
    left = columns
    has_colour = False
    at = 0
    for control in _CONTROL.finditer(text):
        left -= _take(text[at : control.start()], left, kept)
        at = control.end()
        if _COLOUR.fullmatch(control[0]):
            kept.append(control[0])
            has_colour = True
        elif control[0] == "\t":
            left -= _take(" ", left, kept)
    _take(text[at:], left, kept)
    return ("".join(kept) + "\x1b[0m" * has_colour).encode(errors="replace")


def _take(plain: str, most: int, kept: list[str]) -> int:
    """Keeps the beginning that fits, and gives its width."""
    taken = 0
    if plain.isascii():
        kept.append(plain[:most])
        return min(most, len(plain))
    for character in plain:
        if taken + _width(character) > most:
            break
        kept.append(character)
        taken += _width(character)
    return taken
