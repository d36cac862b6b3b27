"""A connection of the simulation whose messages are the bytes of the real one, with proofs and tags (`rdzv/wire/stream.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aelastic.core.record import Record
from aelastic.rdzv.protocol.codec import HEAD_BYTES, PROTOCOL, Decoder, encode
from aelastic.rdzv.secret.handshake import NONCE_BYTES, Handshake, Tagger
from aelastic.rdzv.secret.keys import Key
from aelastic.rdzv.wire.stream import PROOF_TIMEOUT_S
from kit.simulated.world import End, World


class ProvedEnd:
    """One end; what its owner uses of `End`.

    Args:
        world: where it is.
        end: that carries the bytes.
        words: the messages that the other end may send.
        is_client: whether this end has connected.
        on_proved: called once both ends are.
    """

    def __init__(
        self, world: World, end: End, words: dict[str, type[Record]], on_proved: Callable[[], None], *, is_client: bool
    ) -> None:
        self._end, self.peer, self._on_proved = end, end.peer, on_proved
        self.on_message: Callable[[Any], None] | None = None
        self.on_closed: Callable[[], None] | None = None
        self._decoder, self._tagger = Decoder(words), Tagger(b"none yet")
        world.nonces += 1
        nonce = world.nonces.to_bytes(NONCE_BYTES, "big")
        self._proof: Handshake | None = Handshake(
            world.keys, PROTOCOL, "member", nonce, is_client=is_client, source="a file"
        )
        end.on_message, end.on_closed = self._hear, lambda: self.on_closed and self.on_closed()
        if is_client:
            end.send(self._proof.begin())
        world.after(PROOF_TIMEOUT_S, lambda: end.process.post(end, self._give_up))

    @property
    def is_open(self) -> bool:
        return self._end.is_open

    def break_off(self, *, is_heard: bool | None = None) -> None:
        self._end.break_off(is_heard=is_heard)

    @property
    def is_reset(self) -> bool:
        return self._end.is_reset or self._proof is not None

    def send(self, message: Any) -> None:
        assert self._proof is None
        frame = encode(message)
        self._end.send(frame[:HEAD_BYTES] + self._tagger.tag(frame[HEAD_BYTES:]) + frame[HEAD_BYTES:])

    def close(self) -> None:
        self._end.close()

    def end(self, how: str) -> None:
        self._end.end(how)

    def _give_up(self) -> None:
        if self._proof is not None and self._end.is_open:
            self._end.close()

    def _hear(self, data: bytes) -> None:
        if self._proof is not None:
            if answer := self._proof.feed(data):
                self._end.send(answer)
            if self._proof.tags is None:
                return
            (self._tagger, self._decoder.tagger), data = self._proof.tags, self._proof.rest
            self._proof = None
            self._on_proved()
        for message in self._decoder.feed(data):
            assert self.on_message is not None
            self.on_message(message)


class AsInTheFile:
    """`SecretFile`, without a file."""

    path = "a file"

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = keys
