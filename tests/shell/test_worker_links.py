"""Large messages to a worker that recovers in place, on systems with small buffers."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aelastic.agent import worker_links
from aelastic.agent.channels import ControlSockets
from aelastic.agent.worker_links import WorkerLinks
from aelastic.training import messages

ROUND = 7


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[tuple[WorkerLinks, socket.socket]]:
    """The agent's end, and a ready worker's end."""
    ready = asyncio.Event()
    links = WorkerLinks(1, ControlSockets(folder), lambda _: ready.set())
    path = messages.socket_path(links.listen(0, 0)[messages.SOCKET_VARIABLE])
    assert path is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
        worker.settimeout(10)
        worker.connect(path)
        worker.send(messages.encode(messages.READY, round=-1, step=-1))
        following = asyncio.create_task(links.follow(0))
        await ready.wait()
        yield links, worker
        links.close()
        await following


def environment(size: int) -> dict[str, str]:
    """Variables that take about this many bytes in a message."""
    return {"PATH": "x" * (size - 100)}


@pytest.mark.parametrize("size", [1000, messages.MAX_PACKET])
async def test_a_message_of_any_size_that_fits_into_a_packet_arrives(tmp_path: Path, size: int) -> None:
    async with connected(tmp_path) as (links, worker):
        links.begin(links.present((0,))[0], ROUND, environment(size), 14.5)
        message = messages.decode(worker.recv(messages.MAX_PACKET))
    assert message["env"] == environment(size) and message["patience"] == 15


async def test_a_worker_for_which_a_message_is_too_large_for_the_system_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a small `net.core.wmem_max`, the buffer is as small as this one, whatever size is requested."""
    monkeypatch.setattr(worker_links, "_SEND_BUFFER", 1)
    caplog.set_level(logging.WARNING, "aelastic")
    async with connected(tmp_path) as (links, worker):
        links.begin(links.present((0,))[0], ROUND, environment(1000), 15.0)
        assert messages.decode(worker.recv(messages.MAX_PACKET))["round"] == ROUND
        links.begin(links.present((0,))[0], ROUND, environment(20_000), 15.0)
        assert await asyncio.to_thread(worker.recv, 1) == b"", "closed: the worker exits, and the job restarts it"
    (record,) = caplog.records
    assert "closing the in-place socket of local rank 0" in record.getMessage()
    assert "larger than net.core.wmem_max allows" in record.getMessage()
