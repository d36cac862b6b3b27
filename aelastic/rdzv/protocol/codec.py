"""Messages between agent and leader as bytes.

A frame is its length in four bytes, then JSON: `["Status", {…}]`, mostly without the fields that have their default.
If the job has a secret, a tag of 16 bytes comes between them, which the length does not count (`handshake.py`).

Data that comes in is checked against the types of `messages.py`, field by field, and for sense (`sense.py`), before
anything else reads it.  None of it is ever executed.  Frames have a limit, so neither garbage nor a hostile peer can
make an agent hold more than that.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import cache, lru_cache
from hmac import compare_digest
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from aelastic.base.record import Record
from aelastic.diagnose.failures.failure import SHARED_FIELDS, ProcessFailure
from aelastic.rdzv.log.entries import Payload
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.handshake import TAG_BYTES, ProofError, Tagger
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.rdzv.protocol.sense import Rule, anything, contradiction, rule_of

PROTOCOL = m.PROTOCOL
# The beginning of the cell's text up to protocol 17: a count of renewals, then JSON.
UNTIL_17 = re.compile(r'\d+\n\{"epoch":')
# The largest frame carries the traceback of a failure, which is cut long before this limit.
FRAME_MAX = 1 << 20
# The limit of a text: two texts of any characters fit into a frame.
TEXT_MAX = 40_000
# The limit of an entry; the cell has two of them.
PAYLOAD_MAX = 450_000
HEAD_BYTES = 4
# Records that messages of a round repeat: each node keeps sending the same `Node`, all nodes ended the same round, and
# most get the same ranks in the next one.
REPEATED: frozenset[type[Record]] = frozenset({m.Node, m.Past, NodeRanks})
REPEATED_MAX = 1 << 14  # more than a job has nodes

UPWARD: dict[str, type[Record]] = {cls.__name__: cls for cls in get_args(m.Upward)}
DOWNWARD: dict[str, type[Record]] = {cls.__name__: cls for cls in get_args(m.Downward)}
CAMPAIGN: dict[str, type[Record]] = {cls.__name__: cls for cls in get_args(m.OfCampaign)}
STORED: dict[str, type[Record]] = {m.StoredCell.__name__: m.StoredCell}


class WireError(Exception):
    """The data that came in is not a message of the protocol."""


class OtherProtocolError(WireError):
    """The data is from an agent of another version, or is a `Hello` of an agent with a secret."""


class OtherAgentError(OtherProtocolError):
    """The data is such a `Hello`; the message is the answer to that agent.

    Attributes:
        shown: the same, for the log of the agent that received it.
    """

    def __init__(self, answer: str) -> None:
        self.shown = answer.replace("this agent ", "it ", 1)
        super().__init__(answer)


SECRET_THERE = "this agent has a secret and the job has none: use the same --secret-file on every node, or none"  # noqa: S105


def encode(message: m.Upward | m.Downward | m.OfCampaign | m.Stored) -> bytes:
    """Returns a message as one frame."""
    body = _to_json([type(message).__name__, message]).encode()
    if len(body) > FRAME_MAX:
        raise WireError(f"{type(message).__name__} takes {len(body)} bytes, {FRAME_MAX} are allowed")
    return len(body).to_bytes(HEAD_BYTES, "big") + body


def objection(message: m.Upward) -> str:
    """Returns why a leader would not accept a message; empty if it would."""
    try:
        next(Decoder(UPWARD).feed(encode(message)))
    except WireError as error:
        return str(error)
    return ""


def to_text(message: m.Stored) -> str:
    """Returns a message as text, for the cell.  It names the protocol, which is a default and would be left out."""
    return encode(message.replace(protocol=message.protocol))[HEAD_BYTES:].decode()


def from_text(text: str) -> Any:
    """Returns the message that `to_text` turned into this text.

    Raises:
        OtherProtocolError: an agent of another version wrote it.
        WireError: this is not the text of a message.
    """
    if UNTIL_17.match(text):
        raise OtherProtocolError(_other_job("17 or an older one"))
    body = text.encode(errors="replace")  # no text of ours has half a surrogate pair: JSON escapes them
    return next(Decoder(STORED).feed(len(body).to_bytes(HEAD_BYTES, "big") + body))


def _other_job(protocol: str) -> str:
    return (
        f"the job speaks protocol {protocol} and this agent speaks {PROTOCOL}: "
        "install the same version of aelastic on all nodes"
    )


def record_to_text(record: Record) -> str:
    """Returns a record as text, for an entry of the log."""
    return _to_json(record)


RecordT = TypeVar("RecordT", bound=Record)


def record_from_text(kind: type[RecordT], text: str) -> RecordT:
    """Returns the record that `record_to_text` turned into this text.

    Raises:
        WireError: this is not the text of such a record.
    """
    try:
        value = _from_json(text)
    except (ValueError, RecursionError):
        raise WireError(f"no JSON: {text[:80]!r}") from None
    reader: Callable[[Any, str], RecordT] = _reader_of(cast(Any, kind))
    return reader(value, kind.__name__)


_NO_DEFAULT = object()
# Omitting this few costs more than sending them.
FEW_DEFAULTS = 2


def _fields_of(value: Any) -> dict[str, Any]:
    if isinstance(value, ProcessFailure):
        return value.shared
    if isinstance(value, Record):
        fields, defaults = value.given, value.defaults
        if len(defaults) <= FEW_DEFAULTS or len(fields) <= len(value.required):
            return fields
        return {name: each for name, each in fields.items() if defaults.get(name, _NO_DEFAULT) is not each}
    raise TypeError(f"{value!r} has no place on the wire")


_to_json = json.JSONEncoder(default=_fields_of, separators=(",", ":")).encode
_decode_json = json.JSONDecoder().raw_decode


def _from_json(text: str) -> Any:
    """Returns the value of a JSON text without space around it, as `_to_json` writes it.

    `json.loads` also guesses the encoding and skips space, which takes as long as a small message itself.

    Raises:
        ValueError: this is not such a text.
    """
    value, end = _decode_json(text)
    if end != len(text):
        raise ValueError("something follows the value")
    return value


class Decoder:
    """Turns a stream of bytes into messages.

    Args:
        kinds: `UPWARD` or `DOWNWARD`: what the other end may send.
    """

    def __init__(self, kinds: dict[str, type[Record]]) -> None:
        self._kinds = kinds
        self._buffer = bytearray()
        self.tagger: Tagger | None = None  # of the frames to come, if they have tags

    @property
    def unfinished_bytes(self) -> int:
        """How many bytes belong to messages that have not been returned."""
        return len(self._buffer)

    def hold(self, data: bytes) -> None:
        """Stores data that came in, but returns nothing until the next `feed`."""
        self._buffer += data

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yields the messages that are complete by now; those not consumed are yielded the next time.

        Raises:
            WireError: the stream is useless from here on.
            ProofError: the same, because a tag is wrong.
        """
        self._buffer += data
        start, tag_bytes = 0, 0 if self.tagger is None else TAG_BYTES
        try:
            while len(self._buffer) - start >= HEAD_BYTES:
                size = int.from_bytes(self._buffer[start : start + HEAD_BYTES], "big")
                if size > FRAME_MAX:
                    head = bytes(self._buffer[start : start + 16])
                    raise WireError(f"a message of {size} bytes (it begins with {head!r}), {FRAME_MAX} are allowed")
                begin = start + HEAD_BYTES + tag_bytes
                if len(self._buffer) < begin + size:
                    return
                tag, body = self._buffer[start + HEAD_BYTES : begin], bytes(self._buffer[begin : begin + size])
                start = begin + size
                if self.tagger is not None and not compare_digest(tag, self.tagger.tag(body)):
                    raise ProofError("the message was altered on the way, or another program sent it")
                yield self._message(body)
        finally:
            del self._buffer[:start]

    def _message(self, body: bytes) -> Any:
        try:
            name, fields = _from_json(body.decode())
            cls: Any = self._kinds[name]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise WireError(f"not a message of the protocol: {body[:80]!r}") from None
        try:
            theirs = fields.get("protocol") if cls is m.Hello and isinstance(fields, dict) else PROTOCOL
            if theirs != PROTOCOL and not isinstance(theirs, bool | float):  # no version is of these types
                raise OtherAgentError(
                    f"this agent speaks protocol {theirs!r:.80} and the job speaks {PROTOCOL}: "
                    "install the same version of aelastic on all nodes"
                )
            theirs = fields.get("protocol") if cls is m.StoredCell and isinstance(fields, dict) else PROTOCOL
            if theirs != PROTOCOL and type(theirs) is int:
                raise OtherProtocolError(_other_job(str(theirs)[:80]))
            if cls is m.Hello and isinstance(fields, dict) and "nonce" in fields:  # `handshake.py`
                raise OtherAgentError(SECRET_THERE)
            return _reader_of(cls)(fields, name)
        except RecursionError:  # JSON could nest this, but `repr` could not
            raise WireError(f"not a message of the protocol: {body[:80]!r}") from None


_Reader = Callable[[Any, str], Any]


@cache
def _reader_of(kind: Any) -> _Reader:
    """Returns a function that checks a value against a type, and converts it."""
    if get_origin(kind) in {Union, UnionType}:
        return _reader_of_union([each for each in get_args(kind) if each is not NoneType])
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _reader_of_named_tuple(kind)
    if get_origin(kind) is tuple:
        return _reader_of_tuple(kind)
    if isinstance(kind, type) and issubclass(kind, Record):
        return _reader_of_record(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _reader_of_enum(kind)
    if kind in (own := {int: _read_int, float: _read_float, str: _read_text, Payload: _read_payload}):
        return own[kind]

    def read(value: Any, where: str) -> Any:
        if type(value) is kind:  # a bool is not a number
            return value
        raise WireError(f"{where} is {value!r:.80}, and should be of type {kind.__name__}")

    return read


def _reader_of_union(kinds: list[Any]) -> _Reader:
    """Reads one kind, or a record that its id can replace: an object for the record, a list for the id."""
    if len(kinds) == 1:
        (read_inner,) = map(_reader_of, kinds)
        return lambda value, where: None if value is None else read_inner(value, where)
    of_record, of_id = sorted(kinds, key=lambda kind: not issubclass(kind, Record))
    read_record, read_id = _reader_of(of_record), _reader_of(of_id)

    def read(value: Any, where: str) -> Any:
        if value is None:
            return None
        return (read_id if isinstance(value, list) else read_record)(value, where)

    return read


def _reader_of_named_tuple(kind: Any) -> _Reader:
    hints = get_type_hints(kind)
    readers = [(name, _sensible(_reader_of(hints[name]), rule_of(kind, name))) for name in kind._fields]

    @lru_cache(maxsize=16, typed=True)  # thousands of nodes name the same entry; `typed`, because True equals 1
    def read_items(*items: Any) -> Any:
        return kind(*[reader(item, name) for (name, reader), item in zip(readers, items, strict=True)])

    def read(value: Any, where: str) -> Any:
        if isinstance(value, list) and len(value) == len(readers):
            with suppress(TypeError):  # an item is a list or an object
                return read_items(*value)
        raise WireError(f"{where} is {value!r:.80}, and should be {', '.join(kind._fields)}")

    return read


def _read_text(value: Any, where: str) -> str:
    # Data that comes in is sent on to other nodes, and JSON may take twelve bytes for a character.
    if type(value) is str and len(value) <= TEXT_MAX:
        return value
    raise WireError(f"{where} is {value!r:.80}, and should be a text of at most {TEXT_MAX} characters")


def _read_payload(value: Any, where: str) -> str:
    if type(value) is str and len(value) <= PAYLOAD_MAX and value.isascii():
        return value
    raise WireError(f"{where} is {value!r:.80}, and should be a text of at most {PAYLOAD_MAX} characters")


def _read_int(value: Any, where: str) -> int:
    # JSON has numbers of any length.
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        return value
    raise WireError(f"{where} is {value!r:.80}, and should be a whole number of 64 bits")


def _read_float(value: Any, where: str) -> float:
    # JSON may deliver it as an int, and knows NaN and infinity as well.
    if type(value) in {int, float} and -sys.float_info.max <= value <= sys.float_info.max:
        return float(value)
    raise WireError(f"{where} is {value!r:.80}, and should be a number")


def _reader_of_tuple(kind: Any) -> _Reader:
    read_item = _reader_of(get_args(kind)[0])  # tuple[X, ...]

    def read(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise WireError(f"{where} is {value!r:.80}, and should be a list")
        return tuple(read_item(item, where) for item in value)

    return read


def _reader_of_enum(kind: type[StrEnum]) -> _Reader:
    members = {each.value: each for each in kind}

    def read(value: Any, where: str) -> StrEnum:
        member = members.get(value) if type(value) is str else None
        if member is None:
            raise WireError(f"{where} is {value!r:.80}, and should be one of {', '.join(kind)}")
        return member

    return read


def _reader_of_record(kind: type[Record]) -> _Reader:
    if kind is ProcessFailure:
        return _reader_of_failure()
    names, required = kind.__match_args__, kind.required
    readers = _readers_of(kind, names)

    def read(value: Any, where: str) -> Record:
        if not isinstance(value, dict) or not readers.keys() >= value.keys():
            raise _other_fields(value, where, names)
        fields = {}
        try:
            for name, item in value.items():
                fields[name] = readers[name](item, name)
        except WireError as error:  # it begins with the field's name
            raise WireError(f"{where}.{error}") from None
        if not required <= fields.keys():
            lacking = next(name for name in names if name in required and name not in fields)
            raise WireError(f"{where} lacks {lacking!r}")
        record = kind.of_fields(fields)
        if problem := contradiction(record):
            raise WireError(f"{where} contradicts itself: {problem}")
        return record

    return _remembering(read) if kind in REPEATED else read


def _remembering(read: _Reader) -> _Reader:
    """Reads a record that many messages repeat only once, unless one of its fields is a list or a record."""

    @lru_cache(maxsize=REPEATED_MAX, typed=True)  # `typed`, because True equals 1
    def read_fields(where: str, names: tuple[str, ...], *values: Any) -> Any:
        return read(dict(zip(names, values, strict=True)), where)

    def read_again(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            return read(value, where)
        try:
            return read_fields(where, tuple(value), *value.values())
        except TypeError:  # a value is not hashable
            return read(value, where)

    return read_again


def _reader_of_failure() -> _Reader:
    """Reads a failure without the fields that stay on their host, and cuts texts: all nodes receive it."""
    names = SHARED_FIELDS
    readers = _readers_of(ProcessFailure, names)

    def read(value: Any, where: str) -> Record:
        if not isinstance(value, dict) or readers.keys() != value.keys():
            raise _other_fields(value, where, names)
        try:
            return ProcessFailure.from_elsewhere(*[reader(value[name], name) for name, reader in readers.items()])
        except WireError as error:
            raise WireError(f"{where}.{error}") from None

    return read


def _readers_of(kind: type[Record], names: Sequence[str]) -> dict[str, _Reader]:
    hints = get_type_hints(kind)
    return {name: _sensible(_reader_of(hints[name]), rule_of(kind, name)) for name in names}


def _other_fields(value: Any, where: str, names: Sequence[str]) -> WireError:
    return WireError(f"{where} is {value!r:.80}, and should have the fields {', '.join(names)}")


def _sensible(reader: _Reader, rule: Rule | None) -> _Reader:
    """Reads a value by its type, then applies the rule of its field."""
    if rule is None or rule is anything:
        return reader

    def read(value: Any, where: str) -> Any:
        try:
            return rule(reader(value, where))
        except ValueError as error:
            raise WireError(f"{where} is {value!r:.80}, and {error}") from None

    return read
