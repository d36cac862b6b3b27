"""The proof at the beginning of a connection between two agents, and of each frame after it, as a pure core.

    client                                   server
    Hello {protocol, run, keys, nonce}  ->
                                        <-   Hello {protocol, run, keys, nonce}, Proof
    Proof                               ->

Each proof covers both greetings and the purpose of the port, and each side has its own: a recorded proof is worthless
on another connection, or when it is sent back.  Both ends greet before either is trusted, so each can tell what
differs.  After that, each direction has its own key, and each frame a tag that covers its number, which is not sent:
no frame can be dropped, added, changed, repeated or moved.

The greeting has the form of a `Hello`, so that older agents answer with their objection to its `protocol`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from aelastic.rdzv.protocol.keys import Key, shown

NONCE_BYTES = 32
TAG_BYTES = 16
# The most that one end may send in a message before it has proved itself.
UNPROVED_BYTES_MAX = 256
_HEAD = 4
# JSON, because older agents read it; handled as bytes, because each of thousands of connections has two.
_GREETING = b'["Hello",{"nonce":"%s","protocol":%d,"run":"%s","keys":["%s"]}]'
_IS_GREETING = re.compile(
    rb'\["Hello",\{"nonce":"[0-9a-f]{64}","protocol":([0-9]{1,9}),"run":"([0-9a-f]{8})",'
    rb'"keys":\["([0-9a-f]{16}(?:","[0-9a-f]{16})?)"\]\}\]'
)
# The first words of an agent without a secret.
_PLAIN_HELLO = re.compile(rb'\["Hello",\{"protocol":([0-9]{1,9})[,}]')
_PLAIN_HELLO_BYTES = 40


class ProofError(Exception):
    """The peer is not an agent of this job, or its messages are altered in transit; the message tells what differs.

    Attributes:
        answer: the frame to send to it.
    """

    def __init__(self, words: str, answer: bytes = b"") -> None:
        self.answer = answer
        super().__init__(words)


class OtherSecretError(ProofError):
    """The other end has another secret.

    Attributes:
        keys: the beginnings of both ends' key ids, and the file that ours are from.
        may_be_changed: one end has two secrets, so the secret is being changed on the nodes of the job, one by one.
    """

    def __init__(self, theirs: tuple[str, ...], ours: tuple[str, ...], source: str, answer: bytes) -> None:
        self.keys = f"key {shown(theirs)} there, {shown(ours)} here{source}"
        self.may_be_changed = len(theirs) > 1 or len(ours) > 1
        super().__init__(f"it has a different secret ({self.keys})", answer)


class RefusedError(ProofError):
    """The other end cannot read a proof, because it has no secret or another version, and answers with its reason.

    Attributes:
        reason: the reason that it gives.
        is_final: retrying cannot help.
    """

    def __init__(self, reason: str, *, is_final: bool) -> None:
        self.reason, self.is_final = reason, is_final
        super().__init__(f"it refuses: {reason}")


class Tagger:
    """Tags of the frames in one direction, in their order."""

    __slots__ = ("_keyed", "_number")

    def __init__(self, key: bytes) -> None:
        self._keyed = blake2b(key=key, digest_size=TAG_BYTES)
        self._number = 0

    def tag(self, body: bytes) -> bytes:
        """Returns the tag of the next frame."""
        mac = self._keyed.copy()
        mac.update(self._number.to_bytes(8, "big"))
        mac.update(body)
        self._number += 1
        return mac.digest()


class Tags(NamedTuple):
    """The taggers of a connection whose ends are both proved."""

    sent: Tagger
    received: Tagger


class _Greeting(NamedTuple):
    protocol: int
    run: bytes
    keys: tuple[str, ...]


class Handshake:
    """One end of a connection, until the other has proved itself.

    Args:
        keys: the job's; the first is used, each is accepted.
        protocol: the version that this agent speaks.
        purpose: the purpose of the connection.
        nonce: `NONCE_BYTES` bytes, used once.
        is_client: whether this end has connected.
        source: the file that the keys are from, for messages.

    Attributes:
        other_keys: ids of the other end's keys, once it has greeted.
        tags: set once the handshake is over.
        rest: the data that came after it.
    """

    def __init__(
        self, keys: Sequence[Key], protocol: int, purpose: str, nonce: bytes, *, is_client: bool, source: str = ""
    ) -> None:
        self._keys, self._purpose, self._is_client = keys, purpose.encode(), is_client
        self._source = f" in {source}" if source else ""
        self._own = own = _Greeting(protocol, keys[0].run.encode(), tuple(each.id for each in keys))
        self._own_greeting = _GREETING % (nonce.hex().encode(), own.protocol, own.run, '","'.join(own.keys).encode())
        self._their_greeting = b""  # the other end's greeting
        self._key: Key | None = None  # the key that both ends have
        self.other_keys: tuple[str, ...] = ()
        self._buffer = b""
        self.tags: Tags | None = None
        self.rest = b""

    def begin(self) -> bytes:
        """Returns the first data to send; a server waits for the client's greeting."""
        return _frame(self._own_greeting) if self._is_client else b""

    def feed(self, data: bytes) -> bytes:
        """Handles received data; returns the data to send.

        Raises:
            ProofError: the other end is not trusted.
        """
        self._buffer += data
        answer = b""
        while self.tags is None and (body := self._next_body()) is not None:
            answer += self._on_proof(body) if self._their_greeting else self._on_greeting(body)
        if self.tags is not None:
            self.rest, self._buffer = self._buffer, b""
        return answer

    def _next_body(self) -> bytes | None:
        size = int.from_bytes(self._buffer[:_HEAD], "big")
        if len(self._buffer) < _HEAD:
            return None
        if size > UNPROVED_BYTES_MAX - _HEAD:
            begun, words = self._buffer[_HEAD:], b'["Hello",{'
            if len(begun) < _PLAIN_HELLO_BYTES and (begun.startswith(words) or words.startswith(begun)):
                return None
            raise self._plain(begun)
        if len(self._buffer) < _HEAD + size:
            return None
        body, self._buffer = self._buffer[_HEAD : _HEAD + size], self._buffer[_HEAD + size :]
        return body

    def _plain(self, body: bytes) -> ProofError:
        """Returns why data that begins like this is not a greeting."""
        found = _PLAIN_HELLO.match(body)
        if found is None or self._their_greeting:
            return ProofError(f"it is not an aelastic agent, and proved nothing ({body[:16]!r})")
        if int(found[1]) == self._own.protocol:
            words = "it has no secret and the job has one: use the same --secret-file on every node"
        else:
            words = _other_protocol(int(found[1]), self._own.protocol)
        for_them = words.replace("it ", "this agent ", 1).replace("and this agent", "and the job")
        refused = json.dumps(["Refused", {"reason": for_them, "is_final": True}])  # the same in each version
        return ProofError(words, _frame(refused.encode()))

    def _on_greeting(self, body: bytes) -> bytes:
        theirs = self._read_greeting(body)
        self._their_greeting, self.other_keys = body, theirs.keys
        offered, had = (self._own, theirs) if self._is_client else (theirs, self._own)
        common = next((each for each in offered.keys if each in had.keys), None)
        answer = b"" if self._is_client else _frame(self._own_greeting)
        if theirs.protocol != self._own.protocol:
            raise ProofError(_other_protocol(theirs.protocol, self._own.protocol), answer)
        if common is None:
            raise OtherSecretError(theirs.keys, self._own.keys, self._source, answer)
        if theirs.run != self._own.run:
            raise ProofError("it has another run id: use the same --rdzv-id on all nodes", answer)
        self._key = next(each for each in self._keys if each.id == common)
        return answer if self._is_client else answer + _frame(self._key.made_of(b"aelastic proof", self._both)[1])

    def _read_greeting(self, body: bytes) -> _Greeting:
        if found := _IS_GREETING.fullmatch(body):
            return _Greeting(int(found[1]), found[2], tuple(found[3].decode().split('","')))
        try:
            name, fields = json.loads(body)
            reason = str(fields["reason"])[:UNPROVED_BYTES_MAX] if name == "Refused" else ""
            refusal = "".join(each if each.isprintable() else "?" for each in reason)
            is_final = fields.get("is_final") is True
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            refusal, is_final = "", False
        raise RefusedError(refusal, is_final=is_final) if refusal else self._plain(body)

    def _on_proof(self, body: bytes) -> bytes:
        assert self._key is not None
        client, server = self._key.made_of(b"aelastic proof", self._both)
        if not compare_digest(body, server if self._is_client else client):
            raise ProofError(f"its proof is wrong (key {shown([self._key.id])})")
        up, down = map(Tagger, self._key.made_of(b"aelastic frames", self._both))
        self.tags = Tags(up, down) if self._is_client else Tags(down, up)
        return _frame(client) if self._is_client else b""

    @cached_property
    def _both(self) -> bytes:
        """The purpose and both greetings; each part begins with its length."""
        greetings = (
            (self._own_greeting, self._their_greeting)
            if self._is_client
            else (self._their_greeting, self._own_greeting)
        )
        return b"".join(map(_frame, (self._purpose, *greetings)))


def _other_protocol(theirs: int, ours: int) -> str:
    return f"it speaks protocol {theirs}, and this agent {ours}: install the same version of aelastic on all nodes"


def _frame(body: bytes) -> bytes:
    return len(body).to_bytes(_HEAD, "big") + body
