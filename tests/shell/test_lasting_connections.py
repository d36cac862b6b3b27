"""Connections between workers that recover in place last until all of them have left the round."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from aelastic.agent.channels import ControlSockets
from aelastic.agent.worker_links import WorkerLinks
from aelastic.training import messages
from aelastic.training.sockets import GroupSockets

ROUND = 7


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def has_ended(connection: socket.socket, wait_s: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(wait_s * 1000))


def test_those_of_a_worker_last_until_the_next_round_begins(listener: socket.socket) -> None:
    sockets = GroupSockets()
    sockets.begin()
    with sockets.opening():
        mine = socket.create_connection(listener.getsockname())
    peers, _ = listener.accept()
    with peers:
        sockets.cut(world_size=2)
        mine.close()  # gloo does so when it finds the connection cut
        sockets.end()
        assert not has_ended(peers)
        peers.send(b"what gloo was about to send")
        sockets.begin()
        assert has_ended(peers, wait_s=10)


def test_each_connection_is_handed_over_once(listener: socket.socket) -> None:
    sockets = GroupSockets()
    sockets.begin()
    with sockets.opening(), socket.create_connection(listener.getsockname()):
        pass
    assert sockets.new_connections() == []  # it is closed already
    with sockets.opening():
        mine = socket.create_connection(listener.getsockname())
    assert len(sockets.new_connections()) == 1
    assert sockets.new_connections() == []
    mine.close()
    sockets.begin()


@pytest.mark.parametrize("is_last", [False, True], ids=["another round", "the last round"])
async def test_those_of_a_worker_that_has_died_last_until_the_round_has_ended(
    tmp_path: Path, listener: socket.socket, *, is_last: bool
) -> None:
    links = WorkerLinks(1, ControlSockets(tmp_path), lambda event: None)
    path = messages.socket_path(links.listen(0, 0)[messages.SOCKET_VARIABLE])
    assert path is not None
    following = asyncio.create_task(links.follow(0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
        worker.connect(path)
        with socket.create_connection(listener.getsockname()) as mine:
            peers, _ = listener.accept()
            socket.send_fds(worker, [messages.encode(messages.KEEP, round=ROUND)], [mine.fileno()])
    with peers:
        await following  # until the worker's end
        (link,) = links.present((0,)).values()
        links.on_ended(0)
        links.begin(link, ROUND, {}, 15.0)
        assert not has_ended(peers)
        if is_last:
            links.close()
        else:
            links.begin(link, ROUND + 1, {}, 15.0)
        assert has_ended(peers, wait_s=10)


async def test_what_comes_with_other_messages_is_not_kept(tmp_path: Path, listener: socket.socket) -> None:
    links = WorkerLinks(1, ControlSockets(tmp_path), lambda event: None)
    path = messages.socket_path(links.listen(0, 0)[messages.SOCKET_VARIABLE])
    assert path is not None
    following = asyncio.create_task(links.follow(0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
        worker.connect(path)
        for packet in [messages.encode(messages.READY, round=-1, step=-1), b"nonsense"]:
            with socket.create_connection(listener.getsockname()) as mine:
                peers, _ = listener.accept()
                socket.send_fds(worker, [packet], [mine.fileno()])
            with peers:
                assert await asyncio.to_thread(has_ended, peers, 10)
        await following
    links.close()


async def test_workers_leave_a_round_whatever_the_error_that_has_ended_it_says(tmp_path: Path) -> None:
    """A message may have 8,192 characters, some of which take 12 bytes in JSON: more than a packet."""
    ready = asyncio.Event()
    links = WorkerLinks(1, ControlSockets(tmp_path), lambda _: ready.set())
    path = messages.socket_path(links.listen(0, 0)[messages.SOCKET_VARIABLE])
    assert path is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
        worker.connect(path)
        worker.send(messages.encode(messages.READY, round=-1, step=-1))
        following = asyncio.create_task(links.follow(0))
        await ready.wait()
        links.leave((0,), ROUND, "\N{PILE OF POO}" * 8192)
        message = messages.decode(worker.recv(messages.MAX_PACKET))
    links.close()
    await following
    assert (message["kind"], message["round"]) == (messages.OVER, ROUND)


async def test_a_replacement_does_not_enter_the_round_that_the_process_before_it_was_about_to_enter(
    tmp_path: Path,
) -> None:
    """An address was looked up between the two."""
    ready = asyncio.Event()
    links = WorkerLinks(1, ControlSockets(tmp_path), lambda _: ready.set())
    links.listen(0, 0)
    (link,) = links.present((0,)).values()
    links.on_ended(0)
    path = messages.socket_path(links.listen(0, 1)[messages.SOCKET_VARIABLE])
    assert path is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as replacement:
        replacement.connect(path)
        replacement.send(messages.encode(messages.READY, round=-1, step=-1))
        following = asyncio.create_task(links.follow(0))
        await ready.wait()
        links.begin(link, ROUND, {}, 15.0)
        links.begin(links.present((0,))[0], ROUND + 1, {}, 15.0)
        message = messages.decode(replacement.recv(messages.MAX_PACKET))
    links.close()
    await following
    assert (message["kind"], message["round"]) == (messages.BEGIN, ROUND + 1)
