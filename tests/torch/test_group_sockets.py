"""Which sockets of a process belong to a round, and what cutting them does."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator

import pytest

from aelastic.training.sockets import GroupSockets


class Pair:
    """A TCP connection with both ends in this process."""

    def __init__(self, listener: socket.socket) -> None:
        self.mine = socket.create_connection(listener.getsockname())
        self.peers, _ = listener.accept()
        self.mine.settimeout(10)
        self.peers.settimeout(10)

    def close(self) -> None:
        self.mine.close()
        self.peers.close()

    def is_cut(self) -> bool:
        """Whether a read of this end returns at once."""
        poll = select.poll()
        poll.register(self.mine, select.POLLRDHUP)
        return bool(poll.poll(0))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def sockets() -> Iterator[GroupSockets]:
    made = GroupSockets()
    made.begin()
    yield made
    made.begin()


@pytest.fixture
def pair(listener: socket.socket, sockets: GroupSockets) -> Iterator[Pair]:
    """A connection opened while a group is being made."""
    with sockets.opening():
        made = Pair(listener)
    yield made
    made.close()


def test_a_socket_of_a_group_is_cut_for_reading_only(sockets: GroupSockets, pair: Pair) -> None:
    """gloo forgets a message that it fails to send."""
    assert (pair.is_cut(), sockets.is_to_be_cut) == (False, True)
    sockets.cut(2)
    assert (pair.is_cut(), sockets.is_to_be_cut) == (True, False)
    assert pair.mine.recv(1) == b""
    pair.mine.sendall(b"!")
    assert pair.peers.recv(1) == b"!"


def test_sockets_that_were_there_before_or_came_after_are_left_alone(
    sockets: GroupSockets, listener: socket.socket
) -> None:
    before = Pair(listener)
    with sockets.opening():
        group = Pair(listener)
    after = Pair(listener)
    sockets.cut(2)
    assert [before.is_cut(), group.is_cut(), after.is_cut()] == [False, True, False]
    for each in before, group, after:
        each.close()


def test_sockets_of_other_kinds_are_left_alone(sockets: GroupSockets) -> None:
    with sockets.opening():
        one, other = socket.socketpair()
    with one, other:
        sockets.cut(2)
        other.send(b"!")
        assert one.recv(1) == b"!"


def test_what_is_being_opened_is_cut_as_well(sockets: GroupSockets, listener: socket.socket) -> None:
    with sockets.opening():
        made = Pair(listener)
        sockets.cut(2)
        assert made.is_cut()
        assert sockets.is_to_be_cut, "more may be opened"
    made.close()


def test_a_rank_that_waits_for_a_peer_to_connect_gets_a_connection_from_each(sockets: GroupSockets) -> None:
    """gloo treats the first number on it as the peer's."""
    with sockets.opening(), socket.create_server(("127.0.0.1", 0)) as waiting:
        waiting.settimeout(10)
        sockets.cut(3)
        numbers = []
        for _ in range(3):
            caller, _ = waiting.accept()
            with caller:
                numbers.append(struct.unpack("=q", caller.recv(8, socket.MSG_WAITALL)))
                assert caller.recv(1) == b""
        assert numbers == [(0,), (1,), (2,)]
        sockets.cut(3)
        waiting.setblocking(False)
        with pytest.raises(BlockingIOError):
            waiting.accept()


def test_a_descriptor_that_is_another_file_by_now_is_left_alone(sockets: GroupSockets, listener: socket.socket) -> None:
    with sockets.opening():
        group = Pair(listener)
    number = group.mine.fileno()
    group.mine.close()
    other = Pair(listener)
    assert other.mine.fileno() == number
    sockets.cut(2)
    assert not other.is_cut()
    other.close()
    group.peers.close()


def test_the_sockets_of_a_round_that_was_left_are_not_cut(sockets: GroupSockets, pair: Pair) -> None:
    sockets.end()
    sockets.cut(2)
    assert not pair.is_cut() and not sockets.is_to_be_cut


def test_a_peer_that_closes_its_socket_is_noticed_until_nobody_watches(sockets: GroupSockets, pair: Pair) -> None:
    assert not sockets.is_cut_by_peer()
    pair.peers.shutdown(socket.SHUT_RDWR)  # both ends are in this process, and watched: closing one would end nothing
    assert sockets.is_cut_by_peer()
    pair.mine.close()
    assert sockets.is_cut_by_peer(), "gloo also closes its end"
    sockets.watch_no_more()
    assert not sockets.is_cut_by_peer() and sockets.was_cut_by_peer()


def test_the_connection_to_a_store_is_cut_and_not_watched(sockets: GroupSockets, listener: socket.socket) -> None:
    with sockets.opened():
        store = Pair(listener)
    store.peers.close()
    assert not sockets.is_cut_by_peer()
    store.close()


def test_groups_that_connect_when_they_need_to_are_cut_as_well(
    sockets: GroupSockets, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    sockets.begin()
    late = Pair(listener)
    sockets.cut(2)
    assert late.is_cut()
    late.close()
