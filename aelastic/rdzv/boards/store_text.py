"""What a key of a TCPStore says about a run id, and the text that says it.

Two lines: the count of the keeps, and the reign; or, when nobody reigns any more, the epoch of the last one, so
that the next is above it.  A key that is not there is an empty text.
"""

from __future__ import annotations

import json

from aelastic.core.record import Record
from aelastic.rdzv.board import Reign
from aelastic.rdzv.boards.reign_text import reign_from_bytes, reign_to_bytes

_DIGITS_MAX = 18  # less than 2^63


class State(Record):
    """What a text says."""

    text: bytes
    epoch: int = 0  # the last one
    reign: Reign | None = None


def state_of(text: bytes) -> State:
    """Reads a text.

    Raises:
        ValueError: no agent wrote it.
    """
    if not text:
        return State(text)
    beat, _, rest = text.partition(b"\n")
    if not beat.isdigit() or len(beat) > _DIGITS_MAX:
        raise ValueError("no count of keeps")
    try:
        data = json.loads(rest)
    except (ValueError, RecursionError):
        raise ValueError("no JSON") from None
    if isinstance(data, dict) and data.keys() == {"epoch"} and type(data["epoch"]) is int and data["epoch"] > 0:
        return State(text, data["epoch"])
    reign = reign_from_bytes(rest)
    return State(text, reign.epoch, changed(reign, beat=int(beat)))


def text_of(reign: Reign) -> bytes:
    """The text that says who reigns.

    Raises:
        ValueError: it is too long.
    """
    return b"%d\n%s" % (reign.beat or 0, reign_to_bytes(reign))


def vacancy_after(reign: Reign) -> bytes:
    """The text that says that nobody reigns any more."""
    return b"0\n" + json.dumps({"epoch": reign.epoch}).encode()


def changed(reign: Reign, *, beat: int | None, verdict: str | None = None) -> Reign:
    """The same reign with another beat, and maybe another verdict."""
    return Reign(epoch=reign.epoch, claim=reign.claim, beat=beat, verdict=reign.verdict if verdict is None else verdict)
