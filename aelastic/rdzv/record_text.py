"""The leader record as the text that a store keeps, and back.

Two lines: the count of renewals, and the leader record; or, when no agent leads any more, the epoch of the last one, so
that the next is above it, and the round that was left behind.  An empty text is a store without a record.

The records are JSON, so that people can read them with the store's own tools.  What is read may have been written by
any program that can reach the store: every type is checked, and what no agent wrote is a `ValueError` that says why,
never half a record.
"""

from __future__ import annotations

import json
from typing import Any

from aelastic.core.record import Record
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.protocol.codec import WireError, from_text, to_text
from aelastic.rdzv.protocol.messages import Seats

# etcd takes 1.5 MiB by default (`--max-request-bytes`).  A candidate has a few hundred bytes, a verdict a few thousand.
MAX_BYTES = 64 * 1024
_OF_CANDIDATE = {"node_id": str, "addresses": list, "port": int, "token": str}  # what each agent writes of itself


def record_to_bytes(record: LeaderRecord) -> bytes:
    """The bytes of a record, without its renewals.

    Raises:
        ValueError: there are too many of them.
    """
    unset = () if record.candidate.fence else ("fence", "group_rank")
    data = {
        "epoch": record.epoch,
        "candidate": {name: value for name, value in record.candidate.__dict__.items() if name not in unset},
        "verdict": record.verdict,
        **({"is_by_nodes": True} if record.is_by_nodes else {}),
        **_seats_field(record.seats),
    }
    text = json.dumps(data).encode()
    if len(text) > MAX_BYTES and record.seats is not None:  # the names of its hosts are very long
        return record_to_bytes(record.replace(seats=None))
    if len(text) > MAX_BYTES:
        raise ValueError(f"a leader record of {len(text)} bytes: at most {MAX_BYTES} fit")
    return text


def record_from_bytes(text: bytes) -> LeaderRecord:
    """The record that an agent wrote, without its renewals.

    Raises:
        ValueError: no agent wrote this.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"{len(text)} bytes")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("no JSON") from None
    candidate = _field(data, "candidate", dict)
    known = {name: _field(candidate, name, kind) for name, kind in _OF_CANDIDATE.items()}
    known |= {name: _field(candidate, name, int) for name in ("fence", "group_rank", "made_ms") if name in candidate}
    if not all(isinstance(address, str) for address in known["addresses"]):
        raise ValueError("addresses are not text")
    epoch, port = _field(data, "epoch", int), known["port"]
    if epoch < 1 or not 0 < port < 2**16:
        raise ValueError(f"epoch {epoch:.9g}, port {port:.9g}" if max(epoch, port) < 2**63 else "numbers too large")
    return LeaderRecord(
        epoch,
        Candidate(**known | {"addresses": tuple(known["addresses"])}),
        verdict=_field(data, "verdict", str),
        is_by_nodes="is_by_nodes" in data and _field(data, "is_by_nodes", bool),
        seats=_seats_in(data),
    )


def _seats_field(seats: Seats | None) -> dict[str, str]:
    return {} if seats is None else {"seats": to_text(seats)}


def _seats_in(data: Any) -> Seats | None:
    if "seats" not in data:
        return None
    try:
        seats = from_text(_field(data, "seats", str))
    except WireError as error:
        raise ValueError(str(error)) from None
    if isinstance(seats, Seats):
        return seats
    raise ValueError("its seats are malformed")


def _field(data: Any, name: str, kind: type) -> Any:
    """A field of just this type: `bool` is no `int` here."""
    value = data.get(name) if isinstance(data, dict) else None
    if type(value) is not kind:
        raise ValueError(f"{name} is missing, or has another type")
    return value


# The text of a cell.

_DIGITS_MAX = 18  # less than 2^63


class OlderVersionError(ValueError):
    """An agent of an older version wrote it: on etcd, records had no count of renewals."""


class CellState(Record):
    """What the text of a cell says."""

    text: bytes
    epoch: int = 0  # the last one
    record: LeaderRecord | None = None
    seats: Seats | None = None  # of the last round whose nodes may live
    is_foreign: bool = False  # no agent of this job wrote it: it counts as nothing


def state_of(text: bytes) -> CellState:
    """Reads a text.

    Raises:
        OlderVersionError: an agent of an older version wrote it.
        ValueError: no agent wrote it.
    """
    if not text:
        return CellState(text)
    if text.startswith(b"{"):
        record_from_bytes(text)
        raise OlderVersionError
    renewals, _, rest = text.partition(b"\n")
    if not renewals.isdigit() or len(renewals) > _DIGITS_MAX:
        raise ValueError("the count of renewals is missing")
    try:
        data = json.loads(rest)
    except (ValueError, RecursionError):
        raise ValueError("no JSON") from None
    if isinstance(data, dict) and data.keys() - {"seats"} == {"epoch"}:
        if (epoch := _field(data, "epoch", int)) < 1:
            raise ValueError(f"epoch {epoch:.9g}")
        return CellState(text, epoch, seats=_seats_in(data))
    record = record_from_bytes(rest)
    return CellState(text, record.epoch, record.replace(renewals=int(renewals)), record.seats)


def text_of(record: LeaderRecord) -> bytes:
    """The text that says which agent leads.

    Raises:
        ValueError: it is too long.
    """
    return b"%d\n%s" % (record.renewals or 0, record_to_bytes(record))


def text_without_leader(record: LeaderRecord) -> bytes:
    """The text that says that no agent leads any more; `record` was the last leader's."""
    return b"0\n" + json.dumps({"epoch": record.epoch, **_seats_field(record.seats)}).encode()
