"""Connections that end before the agent has looked at them, or that nobody accepts."""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from kit.launching import LOOPS, run

from aelastic.errors import RendezvousConnectionError
from aelastic.rdzv.stores import endpoints
from aelastic.rdzv.stores.endpoints import Endpoint, RefusedError, first_words, probe


@pytest.mark.parametrize("loop", LOOPS)
def test_an_endpoint_that_resets_a_connection_at_once_is_not_reached(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_tcp = anyio.connect_tcp

    async def connect(*address: Any) -> SocketStream:
        stream = await connect_tcp(*address)
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            await stream.receive()  # the loop has noticed
        return stream

    async def look() -> None:
        with pytest.raises(RendezvousConnectionError, match=r"cannot connect .* Connection reset by peer"):
            await probe(endpoint)
        assert await first_words(endpoint) == ""

    monkeypatch.setattr(anyio, "connect_tcp", connect)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])
        run(loop, look())


async def test_a_closed_port_reports_it_without_the_name_of_the_endpoint() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = Endpoint("127.0.0.1", closed.getsockname()[1])
    with pytest.raises(RefusedError) as caught:
        await probe(endpoint)
    assert (caught.value.reason, str(endpoint) in str(caught.value)) == ("connection refused", True)
    assert RendezvousConnectionError("no answer").reason == "no answer", "the message, if there is nothing shorter"


async def test_an_endpoint_that_does_not_answer_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "PROBE_TIMEOUT_S", 0.2)
    # With a full queue, the kernel drops incoming connections.
    with socket.socket() as full, ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for other in [stack.enter_context(socket.socket()) for _ in range(4)]:
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        with anyio.fail_after(20), pytest.raises(RendezvousConnectionError, match=r"no answer within 0.2 s"):
            await probe(Endpoint("127.0.0.1", full.getsockname()[1]))
