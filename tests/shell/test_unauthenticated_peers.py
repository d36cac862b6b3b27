"""Connections to a leader that send nothing, half a message or too much, or arrive as its server shuts down."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup
from kit.launching import on_both_loops, run
from kit.servers.etcd_cells import stored_by
from kit.shared_cell import InProcessCell, SharedWorld
from kit.virtual_clock import on_virtual_time
from kit.waiting import DEADLINE_S

from aelastic.base.host.ports import HeldPort
from aelastic.base.loop import sockets
from aelastic.rdzv.leader.connections import Connections
from aelastic.rdzv.leader.coordinator import Coordinator
from aelastic.rdzv.leader.leader import Leader
from aelastic.rdzv.leader.leader_cell import LeaderCell
from aelastic.rdzv.leader.roster import RoundRules
from aelastic.rdzv.leader_server import LeaderServer
from aelastic.rdzv.log.leader import campaign
from aelastic.rdzv.log.node import Node
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import unauthenticated as unauthenticated_module
from aelastic.rdzv.protocol.codec import DOWNWARD, FRAME_MAX, PROTOCOL, UPWARD, encode, to_text
from aelastic.rdzv.protocol.proofs import Proofs
from aelastic.rdzv.protocol.stream import UNHANDLED_MAX, Stream, connect
from aelastic.rdzv.protocol.unauthenticated import (
    PER_ADDRESS_MIN,
    UNAUTHENTICATED_MIN,
    UNFINISHED_BYTES_MAX,
    UnauthenticatedPeers,
)
from aelastic.rdzv.restart_policy import RestartPolicy

TERMS = m.Terms("run", 1, 2, 0, 300.0)
HELLO = m.Hello(
    PROTOCOL, TERMS, "token", "a", m.Status(m.Node("a", "host-a", "trainer", 1, "", 29500), m.Past(m.NodePhase.READY))
)


class Silent:
    """A fake connection."""

    def __init__(self, conn: int, *, fileno: int = 10, unfinished_bytes: int = 0, peer: str = "192.0.2.1") -> None:
        self.peer = peer
        self.conn, self.fileno, self.unfinished_bytes = conn, fileno, unfinished_bytes
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def add(unauthenticated: UnauthenticatedPeers, streams: Sequence[Any]) -> None:
    for stream in streams:
        unauthenticated.add(stream, 0.0)


def dropped(streams: list[Any]) -> list[int]:
    return [stream.conn for stream in streams if stream.is_aborted]


def test_of_too_many_connections_the_oldest_that_has_said_nothing_goes_first() -> None:
    unauthenticated = UnauthenticatedPeers(2)
    streams = [Silent(conn, peer=f"192.0.2.{conn % 128}") for conn in range(UNAUTHENTICATED_MIN + 3)]
    for stream in streams:
        unauthenticated.add(stream, 0.0)  # type: ignore[arg-type]
        if stream.conn == 0:
            unauthenticated.forget(streams[0])  # type: ignore[arg-type]
    assert dropped(streams) == [1, 2]


def test_of_too_many_connections_those_of_the_address_go_that_has_most() -> None:
    unauthenticated = UnauthenticatedPeers(2)
    ours, others = Silent(-1, peer="192.0.2.7"), [Silent(conn) for conn in range(5000)]
    add(unauthenticated, [ours, *others])
    assert len(dropped([ours, *others])) == len(dropped(others)) == 5000 - PER_ADDRESS_MIN
    many = [Silent(conn, peer=f"198.51.100.{conn}") for conn in range(230)]
    add(unauthenticated, many)
    assert not dropped([ours, *many]), "an address with many connections gives way to one with few"


def test_a_job_of_many_nodes_may_connect_twice_at_once() -> None:
    unauthenticated, streams = UnauthenticatedPeers(4000), [Silent(conn) for conn in range(8000)]
    add(unauthenticated, streams)
    assert not dropped(streams)


def test_connections_leave_the_descriptors_that_workers_need() -> None:
    unauthenticated, streams = (
        UnauthenticatedPeers(2, files_max=100),
        [Silent(conn, fileno=97 + conn) for conn in range(5)],
    )
    add(unauthenticated, streams)
    assert dropped(streams) == [0, 1]
    # A new one reuses the low number of a dropped one.
    more = [Silent(conn, fileno=97) for conn in range(10, 20)]
    add(unauthenticated, more)
    assert len(dropped(streams)) + len(dropped(more)) == 2 + len(more)


def test_of_unfinished_messages_the_largest_goes_first() -> None:
    unauthenticated, streams = UnauthenticatedPeers(2), [Silent(conn) for conn in range(6)]
    for stream in streams:
        unauthenticated.add(stream, 0.0)  # type: ignore[arg-type]
        stream.unfinished_bytes = FRAME_MAX + (stream.conn == 2) - (stream.conn == 5)
        unauthenticated.note(stream, 0.0)  # type: ignore[arg-type]
    assert dropped(streams) == [0, 2]
    assert FRAME_MAX * 4 == UNFINISHED_BYTES_MAX


class Kept:
    """A listener that handles nothing by itself; and a transport."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.is_reading = True

    def on_message(self, _: Stream, message: Any) -> None:
        self.messages.append(message)

    def on_unfinished(self, _: Stream) -> None: ...

    def on_garbage(self, _: Stream, error: Exception) -> None:
        raise error

    def on_closed(self, _: Stream, reason: str) -> None: ...

    def on_failure(self, _: Stream, error: Exception) -> None:
        raise error

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, _: str) -> socket.socket:
        with socket.socket() as closed:
            return closed

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


@on_virtual_time
async def test_a_connection_is_not_read_while_too_many_of_its_messages_wait() -> None:
    kept, count = Kept(), 3 * UNHANDLED_MAX
    stream = Stream(kept, UPWARD)
    stream.connection_made(kept)  # type: ignore[arg-type]
    sent = [m.Status(HELLO.status.node, HELLO.status.past, number) for number in range(count)]
    frames = b"".join(encode(message) for message in sent)
    stream.data_received(frames[:-5])
    assert len(kept.messages) == UNHANDLED_MAX and not kept.is_reading
    stream.data_received(frames[-5:])  # it was on its way
    assert len(kept.messages) == UNHANDLED_MAX
    for handled in range(count):
        assert len(kept.messages) - handled <= UNHANDLED_MAX
        stream.handled()
    assert kept.messages == sent and kept.is_reading


# With a server, in this process.

LEASE_S = 0.3
ENOUGH = 5


def leader_server(lease_s: float) -> tuple[LeaderServer, int, SharedWorld]:
    """A server that leads as soon as it runs, its port, and the world with its cell."""
    port, world = HeldPort(), SharedWorld()
    port.listen_at(["127.0.0.1"])
    terms, at = TERMS.replace(lease_s=lease_s), m.LeaderAt("node", "node", ("127.0.0.1",), port.number, "token")
    core, connections = Coordinator(RoundRules(1, 2), RestartPolicy(0)), Connections(terms, at.token, 1, 60.0)
    candidate = campaign(Node("node"), 1, 1, has_listened=True)
    leader = Leader(core, connections, candidate, at, "host", False, LeaderCell("1f", lease_s), anyio.current_time())
    cell, unauthenticated = InProcessCell("run", world), UnauthenticatedPeers(2)
    server = LeaderServer(
        leader,
        cell,
        anyio.Lock(),
        port,
        None,
        lambda: None,
        lambda *_: None,
        lambda *_: None,
        unauthenticated,
        Proofs(None),
    )
    return server, port.number, world


class Crowd:
    """Clients that keep connecting, and wait for the other end to close the connection."""

    def __init__(self) -> None:
        self.is_met = anyio.Event()  # some have been connected
        self.is_over = False
        self._met = 0
        self._connecting = 0

    async def knock(self, port: int, tasks: TaskGroup) -> None:
        while not self.is_over:
            # No more than are answered: on a busy machine they would leave the server no time.
            for _ in range(ENOUGH - self._connecting):
                self._connecting += 1
                tasks.start_soon(self._connect, port)
            await anyio.sleep(0.001)

    async def _connect(self, port: int) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            return  # refused: the server is gone
        finally:
            self._connecting -= 1
        self._met += 1
        if self._met == ENOUGH:
            self.is_met.set()
        with suppress(ConnectionError):  # reset: likewise
            await reader.read()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@on_both_loops
@pytest.mark.parametrize("end", ["displaced", "cancelled"])
def test_a_client_that_connects_as_the_server_ends_is_disconnected(loop: str, end: str) -> None:
    """No client keeps a connection without a server: all are closed, while both ends are alive."""

    async def main() -> None:
        crowd = Crowd()
        server, port, world = leader_server(LEASE_S if end == "displaced" else DEADLINE_S)

        async def end_it(scope: anyio.CancelScope) -> None:
            await crowd.is_met.wait()
            if end == "displaced":  # it reads this when it renews the cell
                world.texts["run"] = to_text(stored_by("other", term=9)).encode()
            else:
                scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(crowd.knock, port, tasks)
            with anyio.CancelScope() as scope:
                tasks.start_soon(end_it, scope)
                await server.run()
            crowd.is_over = True

    run(loop, asyncio.wait_for(main(), DEADLINE_S))


@on_both_loops
def test_more_agents_than_descriptors_come_in_as_soon_as_there_are_some(
    loop: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take, failures = sockets.next_connection, [OSError(24, "Too many open files")] * 2

    def next_connection(listener: socket.socket) -> socket.socket | None:
        if failures:
            raise failures.pop()
        return take(listener)

    monkeypatch.setattr(unauthenticated_module, "next_connection", next_connection)
    monkeypatch.setattr(unauthenticated_module, "OUT_OF_FILES_PAUSE_S", 0.01)

    async def main() -> None:
        server, port, _ = leader_server(DEADLINE_S)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert b"Refused" in await reader.read()
            writer.close()
            tasks.cancel_scope.cancel()

    run(loop, asyncio.wait_for(main(), DEADLINE_S))
    assert caplog.text.count("cannot accept connections: Too many open files") == 1


@on_both_loops
@pytest.mark.parametrize("broken", ["add", "forget"])
def test_what_fails_where_the_loop_calls_ends_its_connection_and_no_other(
    loop: str, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a connection opens, and as it closes."""

    def fail(*_: object) -> None:
        raise LookupError(broken)

    async def main() -> None:
        server, port, _ = leader_server(TERMS.lease_s)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run)
            with monkeypatch.context() as patched:
                patched.setattr(UnauthenticatedPeers, broken, fail)
                for _ in range(3):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    if broken == "add":
                        with pytest.raises(ConnectionResetError):
                            await reader.read()
                    writer.close()
                    with suppress(ConnectionError):
                        await writer.wait_closed()
                while not caplog.messages:  # noqa: ASYNC110  it comes with the next event of the loop
                    await asyncio.sleep(0)
            member = await connect(["127.0.0.1"], port, lambda: Stream(kept, DOWNWARD), DEADLINE_S)
            member.send(encode(HELLO))
            while not kept.messages:  # noqa: ASYNC110  as above
                await asyncio.sleep(0)
            tasks.cancel_scope.cancel()

    kept = Kept()
    run(loop, asyncio.wait_for(main(), DEADLINE_S))
    assert isinstance(kept.messages[0], m.Plan)
    (line,) = caplog.messages
    assert line.startswith(
        f"aborted the connection with 127.0.0.1: LookupError: {broken} (test_unauthenticated_peers.py:"
    )


@on_both_loops
@pytest.mark.parametrize(
    "half", [b"", (FRAME_MAX - 1).to_bytes(4, "big") + b"x" * (FRAME_MAX - 100)], ids=["idle", "half"]
)
def test_an_agent_is_welcomed_among_connections_that_say_nothing(loop: str, half: bytes) -> None:
    count = 20 if half else UNAUTHENTICATED_MIN + 20

    async def main() -> None:
        server, port, _ = leader_server(300.0)
        ended = 0

        async def peer() -> None:
            nonlocal ended
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(half)
                await reader.read()
            except ConnectionError:
                with suppress(ConnectionError):
                    await writer.wait_closed()
            finally:
                ended += 1
                writer.transport.abort()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run)
            for _ in range(count):
                tasks.start_soon(peer)
            while ended < (16 if half else 20):  # noqa: ASYNC110  they end in tasks of their own
                await anyio.sleep(0.01)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(encode(HELLO))
            assert b"Plan" in await reader.read(1000)
            writer.close()
            tasks.cancel_scope.cancel()
        await anyio.lowlevel.checkpoint()  # transports close in the loop's next step

    run(loop, asyncio.wait_for(main(), DEADLINE_S))
