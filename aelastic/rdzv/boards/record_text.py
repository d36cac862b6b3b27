"""A reign as the bytes that a board keeps, and back.

JSON, so that people can read it with the board's own tools.  What is read was written by anybody who can reach the
board: every type is checked, and what no agent wrote is a `ValueError` that says why, never half a reign.
"""

from __future__ import annotations

import json
from typing import Any

from aelastic.rdzv.board import Candidate, LeaderRecord

# etcd takes 1.5 MiB by default (`--max-request-bytes`).  A claim is a few hundred bytes, a verdict a few thousand.
MAX_BYTES = 64 * 1024


def record_to_bytes(record: LeaderRecord) -> bytes:
    """The bytes of a reign, without its beat.

    Raises:
        ValueError: there are too many of them.
    """
    candidate = record.candidate
    data = {
        "epoch": record.epoch,
        "candidate": {
            "node_id": candidate.node_id,
            "addresses": list(candidate.addresses),
            "port": candidate.port,
            "token": candidate.token,
        },
        "verdict": record.verdict,
    }
    text = json.dumps(data).encode()
    if len(text) > MAX_BYTES:
        raise ValueError(f"a reign of {len(text)} bytes: at most {MAX_BYTES} fit")
    return text


def record_from_bytes(text: bytes) -> LeaderRecord:
    """The reign that an agent wrote; what is not known of it is left out.

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
    addresses = _field(candidate, "addresses", list)
    if not all(isinstance(address, str) for address in addresses):
        raise ValueError("addresses that are no text")
    epoch, port = _field(data, "epoch", int), _field(candidate, "port", int)
    if epoch < 1 or not 0 < port < 2**16:
        raise ValueError(f"epoch {epoch:.9g}, port {port:.9g}" if max(epoch, port) < 2**63 else "numbers too large")
    return LeaderRecord(
        epoch=epoch,
        candidate=Candidate(
            node_id=_field(candidate, "node_id", str),
            addresses=tuple(addresses),
            port=port,
            token=_field(candidate, "token", str),
        ),
        verdict=_field(data, "verdict", str),
    )


def is_same_term(now: LeaderRecord | None, record: LeaderRecord) -> bool:
    """Whether what the board says is this reign, whatever its beat, closed or not."""
    return now is not None and (now.epoch, now.candidate) == (record.epoch, record.candidate)


def _field(data: Any, name: str, kind: type) -> Any:
    """A field of just this type: `bool` is no `int` here."""
    value = data.get(name) if isinstance(data, dict) else None
    if type(value) is not kind:
        raise ValueError(f"no {name}, or one of another type")
    return value
