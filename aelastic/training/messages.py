"""The messages between an agent and a worker that recovers in place: their schema, and their form as packets.

The agent listens on a UNIX socket of the type SEQPACKET and names it in `AELASTIC_IN_PLACE=1:/path/of/socket`, where 1
is the version of this protocol.  A packet is one JSON object with a `kind` and the fields of that kind.  A round is the
value of `AELASTIC_ROUND`; the receiver drops a message of a round that is not the current one.

Both sides use this module.  It imports only what costs a training script nothing.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SOCKET_VARIABLE = "AELASTIC_IN_PLACE"
VERSION = "1"
MAX_COPIES = 250  # in one packet; the system's limit is 253
MAX_PACKET = 65536  # bytes; an environment of a few hundred variables takes 20 KB

# From the worker.
READY = "ready"  # at the safe point after `round` (-1: never in a round); holds the state of `step` (-1: none)
SHARED = "shared"  # has the state of `step`, from the rank `source` (-1: from a checkpoint, or the state is new)
DIFFER = "differ"  # its state should be that of other ranks, and is not; it raises an error, which ends the job
LOST = "lost"  # no rank has a whole state, and there is no checkpoint
DONE = "done"  # the decorated function has returned
KEEP = "keep"  # with copies of connections of `round`, which last until it has ended everywhere
# From the agent.
# Enter `round`.  `env`: variables to set; null removes one.  `patience`: how many seconds a worker waits for the
# end of the round, once another rank has closed a connection.
BEGIN = "begin"
HELD = "held"  # a worker of this node failed in `round`; the round is held until somebody has looked at it
OVER = "over"  # leave `round`; `why` is a sentence for people
END = "end"  # every rank is done: the decorator returns

_INTEGER, _TEXT, _ENVIRONMENT = "an integer from -1 to 2**63 - 1", "a string", "an object of strings and nulls"
_FIELDS = {
    READY: {"round": _INTEGER, "step": _INTEGER},
    SHARED: {"round": _INTEGER, "step": _INTEGER, "source": _INTEGER},
    DIFFER: {"round": _INTEGER},
    LOST: {"round": _INTEGER},
    DONE: {"round": _INTEGER},
    KEEP: {"round": _INTEGER},
    BEGIN: {"round": _INTEGER, "env": _ENVIRONMENT, "patience": _INTEGER},
    HELD: {"round": _INTEGER},
    OVER: {"round": _INTEGER, "why": _TEXT},
    END: {},
}


def variable(path: str) -> str:
    """The value of `AELASTIC_IN_PLACE` for a socket at this path."""
    return f"{VERSION}:{path}"


def socket_path(value: str | None) -> str | None:
    """The path in a value of `AELASTIC_IN_PLACE`; None without one, or if it is of another version."""
    version, _, path = (value or "").partition(":")
    return path if version == VERSION and path else None


def encode(kind: str, **fields: Any) -> bytes:
    """A message as a packet.

    Raises:
        ValueError: it does not fit the schema, or into a packet.
    """
    _check(kind, fields)
    packet = json.dumps({"kind": kind, **fields}).encode()
    if len(packet) > MAX_PACKET:
        raise ValueError(f"{kind}: {len(packet)} bytes do not fit into a packet of {MAX_PACKET}")
    return packet


def decode(packet: bytes) -> dict[str, Any]:
    """Returns the message in a packet: `kind` and the fields of that kind.  Other fields are dropped.

    Raises:
        ValueError: the packet holds no message of this schema.
    """
    if len(packet) > MAX_PACKET:
        raise ValueError(f"a packet of {len(packet)} bytes; at most {MAX_PACKET} are allowed")
    try:
        message = json.loads(packet)
    except RecursionError:
        raise ValueError("a packet of deeply nested JSON") from None
    if not isinstance(message, dict):
        raise ValueError("a packet without a JSON object")  # noqa: TRY004  every fault of a packet is a ValueError
    fields = _check(message.get("kind"), message)
    return {name: message[name] for name in ("kind", *fields)}


def _check(kind: Any, fields: dict[str, Any]) -> dict[str, str]:
    """Returns the fields of this kind, with their forms; raises ValueError if one is missing or not of its form."""
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(f"unknown kind of message: {kind!r:.100}")
    for name, form in _FIELDS[kind].items():
        if name not in fields:
            raise ValueError(f"{kind}: {name} is missing")
        if not _fits(fields[name], form):
            raise ValueError(f"{kind}: {name} must be {form}, not {fields[name]!r:.100}")
    return _FIELDS[kind]


def _fits(value: Any, form: str) -> bool:
    if form == _INTEGER:
        return type(value) is int and -1 <= value < 2**63
    if form == _TEXT:
        return isinstance(value, str)
    return isinstance(value, dict) and all(_is_variable(name, each) for name, each in value.items())


def _is_variable(name: Any, value: Any) -> bool:
    """Whether the system accepts this name and this value: see environ(7)."""
    if not isinstance(name, str) or not name or "=" in name or "\0" in name:
        return False
    return value is None or (isinstance(value, str) and "\0" not in value)
