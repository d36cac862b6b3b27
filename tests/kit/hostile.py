"""A hostile client: it reaches the ports of a job's agents and speaks their protocol, but does not have the job's secret.

`attack` is one session, determined by a seed.  Some sessions replay the messages of an honest agent: `record` makes such a
recording with a client that has the secret.  For data that is cut, changed, moved or reflected in transit, see
`tests/core/test_handshake.py`.
"""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import HEAD_BYTES, PROTOCOL, encode
from aelastic.rdzv.protocol.handshake import NONCE_BYTES, UNPROVED_BYTES_MAX, Handshake, ProofError
from aelastic.rdzv.protocol.keys import Key
from kit.waiting import DEADLINE_S

# How long a stranger waits: agents close at once, or after 5 s at the latest; a store never answers it.
ANSWER_S = 8.0
LARGE_BYTES = 10 << 20


@dataclass(frozen=True)
class Recording:
    """The messages of an honest client, in the parts that it sent after each answer."""

    frames: tuple[bytes, ...]


@dataclass
class Knowledge:
    """What a stranger knows about a job: everything but its secret.

    Args:
        run_id: the job's run id.
        token: its leader's token from the cell.
        recordings: sessions of this job, and of an earlier one.
    """

    run_id: str
    token: str
    recordings: Sequence[Recording]

    @property
    def hello(self) -> m.Hello:
        return m.Hello(PROTOCOL, m.Terms(self.run_id, 1, 9, 3, 2.0), self.token, "stranger", self.status)

    @property
    def status(self) -> m.Status:
        node = m.Node("stranger", "host-x", "default", 1, "203.0.113.66", 6666)
        return m.Status(node, m.Past(m.NodePhase.READY))

    @property
    def words(self) -> list[m.Upward]:
        """Messages that would join the job, end it, or use up its restarts."""
        ready = self.status.replace(past=m.Past(m.NodePhase.READY, 1), ready_count=3)
        return [
            self.hello,
            self.hello.replace(status=ready),
            self.status.replace(past=m.Past(m.NodePhase.FINISHED, 1)),
            self.status.replace(left=m.Left("stranger", "bye")),
            m.Alive(),
        ]


def _client(sock: socket.socket, key: Key, purpose: str) -> tuple[Handshake, list[bytes]]:
    """Completes the handshake, or tries to."""
    proof = Handshake([key], PROTOCOL, purpose, os.urandom(NONCE_BYTES), is_client=True)
    sent = [proof.begin()]
    sock.sendall(sent[0])
    while proof.tags is None and (data := sock.recv(4096)):
        if answer := proof.feed(data):
            sent.append(answer)
            sock.sendall(answer)
    return proof, sent


def record(host: str, port: int, key: Key, message: m.Upward) -> Recording:
    """Records an honest session with one message."""
    with socket.create_connection((host, port), timeout=DEADLINE_S) as sock:
        proof, sent = _client(sock, key, "member")
        assert proof.tags is not None, "the port is the leader's, and the secret is right"
        frame = encode(message)
        sent.append(frame[:HEAD_BYTES] + proof.tags.sent.tag(frame[HEAD_BYTES:]) + frame[HEAD_BYTES:])
        sock.sendall(sent[-1])
        sock.recv(1)
    return Recording(tuple(sent))


def _rest(sock: socket.socket) -> bytes:
    received = b""
    with suppress(OSError):
        while data := sock.recv(65536):
            received += data
    return received


def _send(sock: socket.socket, parts: Sequence[bytes]) -> None:
    for index, part in enumerate(parts):
        if index:
            sock.recv(4096)
        sock.sendall(part)


def _garbage(dice: random.Random, sock: socket.socket, known: Knowledge) -> None:
    sock.sendall(dice.randbytes(dice.randint(1, 2 * UNPROVED_BYTES_MAX)))


def _replay(dice: random.Random, sock: socket.socket, known: Knowledge) -> None:
    frames = dice.choice(known.recordings).frames
    _send(sock, frames if dice.random() < 0.5 else [b"".join(frames)])


def _large(dice: random.Random, sock: socket.socket, known: Knowledge) -> None:
    sock.sendall(LARGE_BYTES.to_bytes(4, "big"))
    for _ in range(LARGE_BYTES >> 16):
        sock.sendall(dice.randbytes(1 << 10) * 64)


def _other_secret(dice: random.Random, sock: socket.socket, known: Knowledge) -> None:
    key = Key(dice.randbytes(32), known.run_id)
    with suppress(ProofError):
        _client(sock, key, dice.choice(["member", "campaign"]))
    sock.sendall(b"".join(encode(each) for each in known.words))


def _claimed_key(dice: random.Random, sock: socket.socket, known: Knowledge) -> None:
    """Names the job's own key, reads the greeting, and invents a proof."""
    greeting = json.loads(dice.choice(known.recordings).frames[0][HEAD_BYTES:])
    greeting[1]["nonce"] = dice.randbytes(NONCE_BYTES).hex()
    body = json.dumps(greeting, separators=(",", ":")).encode()
    sock.sendall(len(body).to_bytes(4, "big") + body)
    sock.recv(4096)
    sock.sendall((32).to_bytes(4, "big") + dice.randbytes(32) + b"".join(encode(each) for each in known.words))


KINDS: tuple[Callable[[random.Random, socket.socket, Knowledge], None], ...] = (
    _garbage, _replay, _large, _other_secret, _claimed_key,
)  # fmt: skip


def attack(seed: int, host: str, ports: Sequence[int], known: Knowledge, *, stays: bool = True) -> tuple[str, bytes]:
    """Runs one session; returns its kind, and the data received at its end.

    Args:
        seed: determines the session.
        host: the agents' host.
        ports: the session attacks one of them.
        known: what the stranger knows about the job.
        stays: wait until the agent hangs up, instead of closing the sending side.
    """
    dice = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    with socket.create_connection((host, dice.choice(ports)), timeout=ANSWER_S) as sock:
        with suppress(OSError, ProofError):  # it was hung up on
            kind(dice, sock, known)
            if not stays:
                sock.shutdown(socket.SHUT_WR)
        return kind.__name__, _rest(sock)


def half_open(host: str, ports: Sequence[int], count: int, data: bytes) -> Iterator[socket.socket]:
    """Opens connections that send nothing or half a message, and stay open."""
    for index in range(count):
        with suppress(OSError):
            sock = socket.create_connection((host, ports[index % len(ports)]), timeout=ANSWER_S)
            if index % 2:
                sock.sendall(data[: index % len(data)])
            yield sock
