"""Connections whose ends prove a secret to each other, on the event loop."""

from __future__ import annotations

import asyncio
import math
import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from kit.waiting import DEADLINE_S

from aelastic.base.host.ports import HeldPort
from aelastic.base.loop.reports import described
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import proofs as proofs_module
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol import stream as stream_module
from aelastic.rdzv.protocol.codec import DOWNWARD, UPWARD, encode
from aelastic.rdzv.protocol.handshake import ProofError
from aelastic.rdzv.protocol.proofs import MEMBER, Proofs
from aelastic.rdzv.protocol.secret_file import SecretFile
from aelastic.rdzv.protocol.stream import NoConnectionError, Stream, connect
from aelastic.rdzv.protocol.unauthenticated import UnauthenticatedPeers


def numbered(number: int) -> r.Fetched:
    """A message that differs from the others."""
    return r.Fetched("a", "b", f"b-{number}", "0", "text", is_last=True)


class Received:
    """A listener that records its messages."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.refusals: list[str] = []
        self.resets: list[bool] = []
        self.failures: list[str] = []
        self.has_news = anyio.Event()

    def _note(self) -> None:
        self.has_news.set()
        self.has_news = anyio.Event()

    def on_message(self, stream: Stream, message: Any) -> None:
        self.messages.append(message)
        stream.handled()
        self._note()

    def on_unfinished(self, stream: Stream) -> None: ...

    def on_garbage(self, stream: Stream, error: Exception) -> None:
        assert isinstance(error, ProofError)
        self.refusals.append(str(error))

    def on_closed(self, stream: Stream, reason: str) -> None:
        self.resets.append(stream.is_reset)
        self._note()

    def on_failure(self, stream: Stream, error: Exception) -> None:
        self.failures.append(described(error))

    async def wait(self, count: int) -> None:
        """Waits for `count` messages, or for the end."""
        with anyio.fail_after(DEADLINE_S):
            while len(self.messages) + len(self.resets) < count:
                await self.has_news.wait()


@pytest.fixture
def secrets(tmp_path: Path) -> tuple[Proofs, Proofs]:
    """Secrets of two jobs."""
    found = []
    for name in ("one", "other"):
        path = tmp_path / name
        path.touch(0o600)
        path.write_bytes(os.urandom(24).hex().encode())
        found.append(Proofs(SecretFile(str(path), "run")))
    return found[0], found[1]


@asynccontextmanager
async def serving(received: Received, proofs: Proofs, streams: list[Stream]) -> Any:
    """A port that accepts streams."""
    port = HeldPort()
    port.listen_at(["127.0.0.1"])

    def new() -> Stream:
        streams.append(Stream(received, UPWARD, proof=proofs.make(MEMBER, is_client=False)))
        return streams[-1]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(UnauthenticatedPeers(2).accept, port.listeners[0], new)
        yield port.number
        tasks.cancel_scope.cancel()
    port.close()


async def test_messages_of_both_ends_come_in_once_both_are_proved(secrets: tuple[Proofs, Proofs]) -> None:
    server, client, streams = Received(), Received(), list[Stream]()
    async with serving(server, secrets[0], streams) as port:
        stream = await connect(
            ["127.0.0.1"],
            port,
            lambda: Stream(client, DOWNWARD, proof=secrets[0].make(MEMBER, is_client=True)),
            DEADLINE_S,
        )
        for number in range(3):
            stream.send(encode(numbered(number)))  # it waits for the proof
        await server.wait(3)
        assert server.messages == [numbered(number) for number in range(3)]
        assert stream.is_proved.is_set() and not stream.refusal
        streams[0].send(encode(m.Probe()))
        await client.wait(1)
        assert client.messages == [m.Probe()]
        stream.close()
        await server.wait(4)
        assert server.resets == [False] and not server.refusals


async def test_who_hangs_up_resets_nothing_though_the_other_end_still_speaks() -> None:
    server, client, streams = Received(), Received(), list[Stream]()
    nobody = Proofs(None)
    async with serving(server, nobody, streams) as port:
        stream = await connect(["127.0.0.1"], port, lambda: Stream(client, DOWNWARD), DEADLINE_S)
        stream.send(encode(m.Alive()))
        await server.wait(1)
        for _ in range(100):
            streams[0].send(encode(m.Goodbye("the result", False)))
        stream.hang_up()
        stream.send(encode(m.Alive()))  # which is not sent, and does no harm
        await server.wait(2)
        assert server.resets == [False], "a node that was reset may be alive, and is awaited"
        with anyio.fail_after(DEADLINE_S):
            await stream.closed.wait()
        assert not client.messages, "it ignores messages"


async def connect_and_break(port: int, server: Received, client: Received, streams: list[Stream]) -> Stream:
    """A client's stream, which the server has aborted."""
    stream = await connect(["127.0.0.1"], port, lambda: Stream(client, DOWNWARD), DEADLINE_S)
    stream.send(encode(m.Alive()))
    await server.wait(1)
    streams[0].abort()
    return stream


async def test_an_attempt_to_connect_that_is_lost_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, attempts = stream_module._attempt, list[str]()

    async def lose_two(host: str, port: int, make: Any) -> Stream:
        attempts.append(host)
        if len(attempts) <= 2:
            await anyio.sleep_forever()
        return await attempt(host, port, make)

    monkeypatch.setattr(stream_module, "_attempt", lose_two)
    monkeypatch.setattr(stream_module, "FIRST_ATTEMPT_S", 0.01)
    monkeypatch.setattr(stream_module, "ATTEMPT_INTERVALS_S", (0.01, math.inf))
    server, streams = Received(), list[Stream]()
    async with serving(server, Proofs(None), streams) as port:
        stream = await connect(["127.0.0.1"], port, lambda: Stream(Received(), DOWNWARD), DEADLINE_S)
        stream.send(encode(m.Alive()))
        await server.wait(1)
        assert server.messages == [m.Alive()] and len(attempts) > 2
        stream.abort()


async def test_who_hangs_up_on_a_connection_that_the_other_end_has_broken_raises_nothing() -> None:
    server, client, streams = Received(), Received(), list[Stream]()
    async with serving(server, Proofs(None), streams) as port:
        stream = await connect_and_break(port, server, client, streams)
        await server.wait(2)
        stream.hang_up()
        with anyio.fail_after(DEADLINE_S):
            await stream.closed.wait()


async def test_a_message_whose_handling_raises_resets_its_own_connection() -> None:
    class Bad(Received):
        def on_message(self, stream: Stream, message: Any) -> None:
            if message == numbered(13):
                raise LookupError("nobody\nexpected this")
            super().on_message(stream, message)

    server, clients, streams = Bad(), [Received(), Received()], list[Stream]()
    async with serving(server, Proofs(None), streams) as port:
        bad = await connect(["127.0.0.1"], port, lambda: Stream(clients[0], DOWNWARD), DEADLINE_S)
        good = await connect(["127.0.0.1"], port, lambda: Stream(clients[1], DOWNWARD), DEADLINE_S)
        bad.send(encode(numbered(13)) + encode(numbered(14)))
        await clients[0].wait(1)
        assert clients[0].resets == server.resets == [True], "an orderly end would mean that the other agent is gone"
        good.send(encode(numbered(13)))
        await clients[1].wait(1)
        good = await connect(["127.0.0.1"], port, lambda: Stream(clients[1], DOWNWARD), DEADLINE_S)
        good.send(encode(numbered(1)))
        await server.wait(3)
        assert server.messages == [numbered(1)]
        good.close()
    assert len(server.failures) == 2
    assert server.failures[0].startswith("LookupError: nobody expected this (test_stream.py:")


async def test_an_aborted_connection_is_a_reset_at_both_ends() -> None:
    server, client, streams = Received(), Received(), list[Stream]()
    async with serving(server, Proofs(None), streams) as port:
        await connect_and_break(port, server, client, streams)
        await client.wait(1)
        assert client.resets == server.resets == [True]
        streams[0].abort()  # again, without effect


async def test_what_has_another_secret_is_closed_and_both_ends_know_why(secrets: tuple[Proofs, Proofs]) -> None:
    server, client, streams = Received(), Received(), list[Stream]()
    async with serving(server, secrets[0], streams) as port:
        stream = await connect(
            ["127.0.0.1"],
            port,
            lambda: Stream(client, DOWNWARD, proof=secrets[1].make(MEMBER, is_client=True)),
            DEADLINE_S,
        )
        stream.send(encode(m.Alive()))
        await stream.is_proved.wait()
        await server.wait(1)
        assert not server.messages and "it has a different secret" in stream.refusal
        assert len(client.refusals) == len(server.refusals) == 1
        assert all("it has a different secret" in each for each in client.refusals + server.refusals)


async def test_what_says_nothing_is_closed_after_a_while(
    secrets: tuple[Proofs, Proofs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "PROOF_TIMEOUT_S", 0.2)
    server, streams = Received(), list[Stream]()
    async with serving(server, secrets[0], streams) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
        writer.close()
        await server.wait(1)
        assert server.refusals == ["it proved nothing within 0.2 s"]


async def test_a_frame_that_was_changed_is_a_broken_connection_and_not_a_word_of_its_node(
    secrets: tuple[Proofs, Proofs],
) -> None:
    server, client, streams = Received(), Received(), list[Stream]()
    async with serving(server, secrets[0], streams) as port:
        stream = await connect(
            ["127.0.0.1"],
            port,
            lambda: Stream(client, DOWNWARD, proof=secrets[0].make(MEMBER, is_client=True)),
            DEADLINE_S,
        )
        await stream.is_proved.wait()
        stream.send(encode(numbered(1)))
        assert stream._transport is not None
        frame = encode(numbered(2))
        stream._transport.write(frame[:4] + bytes(16) + frame[4:])
        await server.wait(2)
        assert server.messages == [numbered(1)]
        assert server.refusals == ["the message was altered on the way, or another program sent it"]
        assert server.resets == [True], "the node has time to reconnect"


def test_one_line_says_that_nothing_is_proved_and_only_beyond_loopback(
    secrets: tuple[Proofs, Proofs], caplog: pytest.LogCaptureFixture
) -> None:
    without = Proofs(None)
    for proofs in (without, secrets[0]):
        for peer in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "", "::ffff:192.0.2.9", "192.0.2.9", "192.0.2.10"):
            proofs.warn_if_open(peer)
    assert caplog.messages == [proofs_module.OPEN % "192.0.2.9"]


@pytest.mark.parametrize("address", ["a..b", ".", "n" * 64, "x" * 300, "\ud800", "a\0b", ""])
async def test_an_address_that_no_host_can_have_is_one_that_does_not_answer(address: str) -> None:
    with pytest.raises(NoConnectionError) as caught:
        await connect([address], 1, lambda: Stream(Received(), DOWNWARD), DEADLINE_S)
    assert not caught.value.is_refused
