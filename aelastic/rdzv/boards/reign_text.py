"""A reign as the bytes that a board keeps, and back.

JSON, so that people can read it with the board's own tools.  What is read was written by anybody who can reach the
board: every type is checked, and what no agent wrote is a `ValueError` that says why, never half a reign.
"""

from __future__ import annotations

import json
from typing import Any

from aelastic.rdzv.board import Claim, Reign

# etcd takes 1.5 MiB by default (`--max-request-bytes`).  A claim is a few hundred bytes, a verdict a few thousand.
MAX_BYTES = 64 * 1024


def reign_to_bytes(reign: Reign) -> bytes:
    """The bytes of a reign, without its beat.

    Raises:
        ValueError: there are too many of them.
    """
    claim = reign.claim
    data = {
        "epoch": reign.epoch,
        "claim": {
            "node_id": claim.node_id,
            "addresses": list(claim.addresses),
            "port": claim.port,
            "token": claim.token,
        },
        "verdict": reign.verdict,
    }
    text = json.dumps(data).encode()
    if len(text) > MAX_BYTES:
        raise ValueError(f"a reign of {len(text)} bytes: at most {MAX_BYTES} fit")
    return text


def reign_from_bytes(text: bytes) -> Reign:
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
    claim = _field(data, "claim", dict)
    addresses = _field(claim, "addresses", list)
    if not all(isinstance(address, str) for address in addresses):
        raise ValueError("addresses that are no text")
    epoch, port = _field(data, "epoch", int), _field(claim, "port", int)
    if epoch < 1 or not 0 < port < 2**16:
        raise ValueError(f"epoch {epoch:.9g}, port {port:.9g}" if max(epoch, port) < 2**63 else "numbers too large")
    return Reign(
        epoch=epoch,
        claim=Claim(
            node_id=_field(claim, "node_id", str),
            addresses=tuple(addresses),
            port=port,
            token=_field(claim, "token", str),
        ),
        verdict=_field(data, "verdict", str),
    )


def is_same_reign(now: Reign | None, reign: Reign) -> bool:
    """Whether what the board says is this reign, whatever its beat, closed or not."""
    return now is not None and (now.epoch, now.claim) == (reign.epoch, reign.claim)


def _field(data: Any, name: str, kind: type) -> Any:
    """A field of just this type: `bool` is no `int` here."""
    value = data.get(name) if isinstance(data, dict) else None
    if type(value) is not kind:
        raise ValueError(f"no {name}, or one of another type")
    return value
