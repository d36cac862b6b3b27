"""What a key of a TCPStore says about a run id, and the text that says it.

Two lines: the count of the keeps, and the reign; or, when nobody reigns any more, the epoch of the last one, so
that the next is above it.  A key that is not there is an empty text.
"""

from __future__ import annotations

import json

from aelastic.core.record import Record
from aelastic.rdzv.board import LeaderRecord
from aelastic.rdzv.boards.record_text import record_from_bytes, record_to_bytes

_DIGITS_MAX = 18  # less than 2^63


class State(Record):
    """What a text says."""

    text: bytes
    epoch: int = 0  # the last one
    record: LeaderRecord | None = None


def state_of(text: bytes) -> State:
    """Reads a text.

    Raises:
        ValueError: no agent wrote it.
    """
    if not text:
        return State(text)
    renewals, _, rest = text.partition(b"\n")
    if not renewals.isdigit() or len(renewals) > _DIGITS_MAX:
        raise ValueError("no count of keeps")
    try:
        data = json.loads(rest)
    except (ValueError, RecursionError):
        raise ValueError("no JSON") from None
    if isinstance(data, dict) and data.keys() == {"epoch"} and type(data["epoch"]) is int and data["epoch"] > 0:
        return State(text, data["epoch"])
    record = record_from_bytes(rest)
    return State(text, record.epoch, changed(record, renewals=int(renewals)))


def text_of(record: LeaderRecord) -> bytes:
    """The text that says who reigns.

    Raises:
        ValueError: it is too long.
    """
    return b"%d\n%s" % (record.renewals or 0, record_to_bytes(record))


def vacancy_after(record: LeaderRecord) -> bytes:
    """The text that says that nobody reigns any more."""
    return b"0\n" + json.dumps({"epoch": record.epoch}).encode()


def changed(record: LeaderRecord, *, renewals: int | None, verdict: str | None = None) -> LeaderRecord:
    """The same reign with another beat, and maybe another verdict."""
    return LeaderRecord(record.epoch, record.candidate, renewals, record.verdict if verdict is None else verdict)
