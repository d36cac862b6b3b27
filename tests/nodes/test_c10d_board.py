"""Boards on the stores `c10d` and `static`: which agent serves the store, what else may be at the endpoint, what dies and what is left.

What boards promise on every store is in `test_boards.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest
from kit.launching import alive, stand_still
from kit.ports import quiet_port
from kit.servers.etcd_boards import elected, seen_on, until, until_answered
from kit.servers.other_programs import answering, http_server, silent
from kit.servers.relay import Relay
from kit.servers.stores import in_each_store
from kit.waiting import wait_for

from aelastic.errors import InputError, RendezvousConnectionError, RendezvousStateError
from aelastic.host import proc_table
from aelastic.rdzv.board import Board
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.settings import READ_TIMEOUT_S, RendezvousSettings
from aelastic.rdzv.stores import c10d, endpoints, tcp_store
from aelastic.rdzv.stores.c10d import C10dStore
from aelastic.rdzv.stores.endpoints import Endpoint, RefusedError, local_address_of
from aelastic.rdzv.stores.static import static_store
from aelastic.tcpstore.child import StoreProcess
from aelastic.tcpstore.host import StoreHost

DEADLINE_S = 60.0
# Cold where a store dies: the process that stands for a warm one is gone a moment before its port.
pytestmark = pytest.mark.usefixtures("warm_stores")
A = Candidate(node_id="a", addresses=("10.0.0.1", "::1"), port=40000, token="secret of a")
B = Candidate(node_id="b", addresses=("10.0.0.2",), port=40001, token="secret of b")


def descriptors() -> set[str]:
    found = ((fd, _what_is(fd)) for fd in os.listdir("/proc/self/fd"))
    return {f"{fd} {what}" for fd, what in found if what and "/proc/" not in what}


def _what_is(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""  # closed meanwhile


def client_of(board: Board) -> Any:
    store: Any = board._store
    return store._client


def pid_of(board: Board) -> Any:
    """The child process that speaks to the store, or serves it."""
    return client_of(board)._process.pid


class World:
    """Makes boards on this machine; knows the processes that they start by a mark in the environment."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self.stack = stack
        self.folder = folder
        self.mark = f"BOARD_OF_TEST={uuid.uuid4()}"
        self.env = {**os.environ, "BOARD_OF_TEST": self.mark.partition("=")[2]}

    def c10d(self, endpoint: str, run_id: str = "job", env: Mapping[str, str] | None = None, **config: str) -> Board:
        settings = RendezvousSettings(backend="c10d", endpoint=endpoint, config=config)
        store = C10dStore(settings, run_id, self.env if env is None else env)
        board = Board(store, None, settings.lease_s)
        self.stack.push_async_callback(board.aclose)
        return board

    def left(self) -> list[int]:
        return [entry.pid for entry in proc_table.processes() if proc_table.carries(entry.pid, self.mark.encode())]

    def in_the_child(self, body: str) -> dict[str, str]:
        """An environment in which the child first runs this line."""
        return self.env | in_each_store(self.folder, body)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """Every test ends with what it began with: no process and no descriptor is left."""
    await anyio.getaddrinfo("127.0.0.1", 0)  # threads and what else a loop makes once
    before = descriptors()
    async with AsyncExitStack() as stack:
        world = World(stack, tmp_path)
        yield world
    assert not world.left()
    await until("no descriptor left (threads of a test's server may be ending)", lambda: not descriptors() - before)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time after which a silent store is looked at, short."""
    monkeypatch.setattr(tcp_store, "SILENCE_S", 1.5)


@pytest.fixture
def hurry_at_silence(hurry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that says nothing is given up soon, too; to connect takes as long as it takes."""
    first_words = endpoints.first_words

    async def look(endpoint: Endpoint) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(endpoints, "PROBE_TIMEOUT_S", 0.2)
            return await first_words(endpoint)

    monkeypatch.setattr(tcp_store, "first_words", look)


# Which agent serves.


async def test_the_first_agent_on_the_endpoints_machine_serves_the_store_and_others_are_its_clients(
    world: World,
) -> None:
    endpoint = f"localhost:{quiet_port()}"
    agents = [world.c10d(endpoint) for _ in range(4)]
    async with anyio.create_task_group() as tasks:
        for agent in agents:  # at once, and one gets the port
            tasks.start_soon(until_answered, agent.open)

    record = await agents[0].campaign(A, None, 0)

    assert record == LeaderRecord(epoch=1, candidate=A, renewals=0)
    assert [await agent.campaign(B, None, 0) for agent in agents] == [record] * 4
    assert {agent.name for agent in agents} == {f"c10d at {endpoint}"}
    assert sorted(agent.own_address for agent in agents) == ["", *["127.0.0.1"] * 3]
    assert {agent.endpoint_host for agent in agents} == {"localhost"}
    assert sorted(agent.is_served_here for agent in agents) == [False] * 3 + [True]


async def test_port_zero_picks_one_and_tells_which(world: World, caplog: pytest.LogCaptureFixture) -> None:
    a = world.c10d("localhost:0")
    await a.open()

    (line,) = [line for line in caplog.records if line.levelno >= logging.WARNING]
    words, _, endpoint = line.getMessage().rpartition(" ")
    assert words == "the rendezvous endpoint is"
    assert a.name == f"c10d at {endpoint}"
    b = world.c10d(endpoint)
    await b.open()
    record = await elected(b, B)
    assert await a.read() == record


@pytest.mark.parametrize("host", ["[::1]", "0.0.0.0", socket.gethostname()])
async def test_this_machine_has_many_names(world: World, host: str) -> None:
    endpoint = Endpoint(host.strip("[]"), 1)
    try:
        address = await local_address_of(endpoint)
    except RendezvousConnectionError:
        pytest.skip("this machine does not know its own name")
    if address is None:
        pytest.skip("this machine has no such address")
    a = world.c10d(f"{host}:{quiet_port()}")
    await a.open()

    assert a.endpoint_host == endpoint.host
    assert a.own_address in {"", address}
    assert a.own_address not in {"127.0.0.1", "::1", "0.0.0.0"}


async def test_the_user_may_say_which_agent_serves(world: World) -> None:
    endpoint = f"localhost:{quiet_port()}"
    client = world.c10d(endpoint, is_host="false")
    with pytest.raises(RefusedError, match=f"{endpoint}: Connection refused"):
        await client.open()

    # An address of a gateway, say.
    server = world.c10d(f"192.0.2.1:{endpoint.partition(':')[2]}", is_host="True")
    await server.open()
    await client.open()

    assert server.endpoint_host == "192.0.2.1"
    record = await elected(server, A)
    assert await client.read() == record
    with pytest.raises(InputError, match=rf"{endpoint} cannot be served \(Address already in use\)"):
        await world.c10d(endpoint, is_host="1").open()


@pytest.mark.parametrize(
    "addresses, others",
    [("127.0.0.1 192.0.2.1", "192.0.2.1"), ("127.0.0.1 127.0.0.2", ""), ("127.0.0.1 2001:db8::1", "")],
)
async def test_a_name_of_several_hosts_is_warned_of(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, addresses: str, others: str
) -> None:
    """Not so several addresses of one host, or its other family, which this host may not have."""
    port = quiet_port()

    async def resolve(_: Endpoint, within_s: float) -> list[tuple[int, tuple[str, int]]]:
        each = addresses.split()
        return [(socket.AF_INET6 if ":" in address else socket.AF_INET, (address, port)) for address in each]

    monkeypatch.setattr(endpoints, "addresses_of", resolve)
    await world.c10d(f"pods.example:{port}").open()
    told = [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING]
    assert bool(others) == bool(told) and all(f"is this host and others ({others})" in line for line in told)


@pytest.mark.all
@pytest.mark.ci
async def test_torch_itself_can_read_the_endpoint_byte_for_byte(world: World) -> None:
    """Agents of other versions, and people with torch's own tools, find a job by this key and this text."""
    endpoint = f"127.0.0.1:{quiet_port()}"
    board = world.c10d(endpoint, "a job/1")
    record = await elected(board, A)
    assert await board.renew(record)
    code = """if True:
        import sys
        from datetime import timedelta
        from aelastic.tcpstore.server import import_store
        store = import_store("quick")(sys.argv[1], int(sys.argv[2]), is_master=False, timeout=timedelta(seconds=30))
        print(store.get("aelastic/served_for").decode())
        print(store.get("aelastic/a%20job%2F1/leader").decode())
        print(store.num_keys())
    """
    command = [sys.executable, "-c", code, *endpoint.split(":")]
    done = await anyio.to_thread.run_sync(
        lambda: subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    )

    text = (
        '{"epoch": 1, "candidate": {"node_id": "a", "addresses": ["10.0.0.1", "::1"], "port": 40000, '
        '"token": "secret of a", "made_ms": 0}, "verdict": ""}'
    )
    served_for, *leader, keys = done.stdout.splitlines()
    assert (served_for, leader) == ("a%20job%2F1", ["1", text])
    assert keys == "2", "and nothing else"


# What else may be there.


@pytest.mark.parametrize(
    "endpoint, error, words",
    [
        # No host has an address of TEST-NET-1 (RFC 5737): another machine is never served for.
        ("192.0.2.1:0", InputError, "port 0 is for an endpoint on this host: use a fixed port"),
        (
            "no-such-host.invalid:29400",
            RendezvousConnectionError,
            "host of the rendezvous endpoint no-such-host.invalid:29400",
        ),
        (f"{'x' * 70}.invalid:29400", (InputError, RendezvousConnectionError), "x.invalid:29400"),
    ],
)
async def test_a_host_that_is_elsewhere_or_not_known_is_named(
    world: World, endpoint: str, error: Any, words: str
) -> None:
    with pytest.raises(error, match=words):
        await world.c10d(endpoint).open()


@pytest.mark.parametrize(
    "program, error, words",
    [
        pytest.param(
            lambda: answering(b"SSH-2.0-OpenSSH_9.2\r\n"),
            RendezvousStateError,
            "is not a torch TCPStore (it answered 'SSH-2.0-OpenSSH_9.2')",
            id="ssh",
        ),
        pytest.param(
            lambda: answering(bytes(64)),
            RendezvousStateError,
            f"is not a torch TCPStore (it answered {chr(0) * 40!r})",
            id="zeros",
            marks=pytest.mark.all,
        ),
        # It waits for the end of a line, and torch for an answer, both for ever.
        pytest.param(
            http_server,
            RendezvousStateError,
            "is not a torch TCPStore (it answered 'HTTP/1.0 200 OK')",
            id="http",
            marks=pytest.mark.all,
        ),
        # It may be a store that starts.
        pytest.param(lambda: answering(b""), RendezvousConnectionError, "closed the connection", id="hangs up"),
    ],
)
@pytest.mark.usefixtures("hurry")
async def test_nonsense_at_the_endpoint_is_no_store(
    world: World,
    program: Callable[[], AbstractContextManager[int]],
    error: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if error is RendezvousConnectionError:
        monkeypatch.setattr(tcp_store, "CONNECT_TIMEOUT_S", 0.3)
    with program() as port:
        board = world.c10d(f"127.0.0.1:{port}")
        with pytest.raises(error) as caught:
            await board.open()
    assert f"127.0.0.1:{port} {words}" in str(caught.value)


@pytest.mark.all
@pytest.mark.usefixtures("hurry_at_silence")
async def test_silence_is_told_and_is_no_store_in_the_end(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with silent() as sock:
        port = sock.getsockname()[1]
        board = world.c10d(f"127.0.0.1:{port}", read_timeout="2.5")
        with pytest.raises(
            RendezvousStateError,
            match=rf"{port} is not a torch TCPStore \(it accepted the connection but did not answer for 2.5 s",
        ):
            await board.open()
        assert pid_of(board) is None, "it would wait without end"
        assert f"127.0.0.1:{port} accepts connections, but has not answered as a TCPStore" in caplog.text


async def test_another_jobs_endpoint_is_refused(world: World) -> None:
    endpoint = f"localhost:{quiet_port()}"
    await world.c10d(endpoint, "job A").open()
    board = world.c10d(endpoint, "job B")

    for _ in range(2):
        with pytest.raises(
            InputError, match=f"{endpoint} serves run job A, not job B: use --rdzv-id job A, or another"
        ):
            await board.open()


# What dies, and what comes back.


@pytest.mark.cold
async def test_when_the_store_dies_with_its_agent_another_on_the_machine_serves_and_the_coordinator_goes_on(
    world: World,
) -> None:
    endpoint = f"localhost:{quiet_port()}"
    server, coordinator, other = (world.c10d(endpoint) for _ in range(3))
    await server.open()
    record = await elected(coordinator, A, above=41)
    assert await coordinator.renew(record)
    await other.open()

    await server.aclose()
    with pytest.raises(RendezvousConnectionError, match="refused"):
        await other.publish(record, "x")  # it does not serve an empty store for that

    assert await other.read() is None, "the new store is empty"
    assert await coordinator.renew(record)
    seen = await other.read()
    assert seen is not None and (seen.epoch, seen.candidate) == (42, A)
    assert coordinator.own_address == "127.0.0.1" and other.own_address == ""


@pytest.mark.all
@pytest.mark.cold
async def test_a_reign_on_a_board_that_is_gone_goes_on_and_its_end_is_told_to_a_new_store_too(world: World) -> None:
    endpoint = f"localhost:{quiet_port()}"
    server, coordinator = world.c10d(endpoint), world.c10d(endpoint, is_host="false")
    await server.open()
    record = await elected(coordinator, A)

    await server.aclose()

    for _ in range(3):
        assert await coordinator.renew(record), "no agent can claim it"
    with pytest.raises(RendezvousConnectionError):
        await coordinator.read()
    with pytest.raises(RendezvousConnectionError):
        await coordinator.publish(record, "over")

    again = world.c10d(endpoint)
    await again.open()
    assert await coordinator.renew(record)
    assert (await seen_on(again)).candidate == A

    # Another candidate is first in a store that is new again: it coordinates.
    await again.aclose()
    new = world.c10d(endpoint)
    await until_answered(new.open)
    newer = await elected(new, B, above=record.epoch)
    assert newer.epoch > record.epoch
    assert not await coordinator.renew(record)
    assert not await coordinator.publish(record, "over")
    assert await coordinator.read() == newer

    # The next reign ends in a store that does not know it.
    record = await elected(coordinator, A, newer, above=6)
    await new.aclose()
    last = world.c10d(endpoint)
    await until_answered(last.open)
    assert await coordinator.read() is None
    assert await coordinator.publish(record, "over")
    assert (await seen_on(last)).verdict == "over"
    await coordinator.resign(record)
    assert await last.read() is None
    newest = await elected(last, B)
    assert newest.epoch == record.epoch + 1


async def test_a_renewal_whose_answer_was_lost_is_not_taken_for_the_next_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = world.c10d(f"localhost:{quiet_port()}")
    record = await elected(board, A)
    assert record.renewals == 0
    store = client_of(board)

    async def lose_the_answer(key: str, expected: bytes, text: bytes) -> bytes:
        await tcp_store.TcpStore.compare_set(store, key, expected, text)
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(store, "compare_set", lose_the_answer)
        with pytest.raises(TimeoutError):
            await board.renew(record)
    assert (await board._store.get()).startswith(b"1\n"), "it has taken effect"

    renewed = await board.renew(record)

    assert renewed is not None and renewed.renewals == 2, "members see that the coordinator lives now, not then"
    assert (await board._store.get()).startswith(b"2\n")


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_refusal_proves_that_another_machines_store_is_gone_only_after_an_orderly_close(
    world: World, monkeypatch: pytest.MonkeyPatch, is_reset: bool
) -> None:
    """What resets connections and refuses new ones may be a firewall: others still reach the store, and see who renews."""
    port = quiet_port()
    await world.c10d(f"localhost:{port}").open()
    monkeypatch.setattr(c10d, "local_addresses_of", AsyncMock(return_value=[]))
    relay = Relay(port)
    async with relay as between:
        coordinator = world.c10d(between, is_host="false")
        record = await elected(coordinator, A)
        assert await coordinator.renew(record)
        if is_reset:
            for end in relay.ends:
                with suppress(OSError):  # that of a first look has gone
                    end.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )

    for _ in range(2):
        if is_reset:
            with pytest.raises(RefusedError):
                await coordinator.renew(record)
        else:
            assert await coordinator.renew(record)


@pytest.mark.cold
async def test_a_killed_child_of_a_client_is_replaced_and_one_that_serves_takes_the_store_with_it(world: World) -> None:
    endpoint = f"localhost:{quiet_port()}"
    server, client = world.c10d(endpoint), world.c10d(endpoint)
    record = await elected(server, A)
    await client.open()
    killed = pid_of(client)
    os.kill(killed, signal.SIGKILL)

    assert await client.read() == record
    assert pid_of(client) not in {killed, None}
    os.kill(pid_of(client), signal.SIGKILL)
    assert await client.publish(record, "x")

    os.kill(pid_of(server), signal.SIGKILL)
    assert await server.read() is None, "the new store is empty"
    assert await server.renew(record)
    assert (await seen_on(server)).candidate == A
    os.kill(pid_of(server), signal.SIGKILL)
    with pytest.raises(RendezvousConnectionError, match="refused"):
        await server.publish(record, "x")


@pytest.mark.all
@pytest.mark.cold
@pytest.mark.usefixtures("hurry_at_silence")
async def test_a_store_that_hangs_is_left_and_found_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"localhost:{quiet_port()}"
    server, client = world.c10d(endpoint), world.c10d(endpoint, read_timeout="2.5")
    record = await elected(server, A)
    await client.open()
    stand_still(pid_of(server))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(tcp_store, "ANSWER_TIMEOUT_S", 0.5)
            with pytest.raises(RendezvousConnectionError, match=r"no answer from .* within"):
                await client.read()
            assert pid_of(client) is None, "it would wait without end"
            # To an agent that has known it as a store it is one that hangs, and not something else.
            with pytest.raises(
                RendezvousConnectionError,
                match=r"no answer from .*: it accepted the connection but did not answer for 2.5 s",
            ):
                await client.open()
            # Nor does the agent that serves it give the store up so soon.
            with pytest.raises(RendezvousConnectionError, match=r"no answer from .* within"):
                await server.renew(record)
    finally:
        os.kill(pid_of(server), signal.SIGCONT)

    assert await server.renew(record)
    seen = await client.read()
    assert seen is not None and seen.candidate == A and seen.renewals is not None and seen.renewals > 0


# What no agent wrote (`test_etcd_settings.py` has more of it).


async def test_what_no_agent_wrote_is_an_error(world: World) -> None:
    board = world.c10d(f"localhost:{quiet_port()}")
    await board.open()
    await client_of(board).compare_set("aelastic/job/leader", b"", b"0\n{}")

    for operation in (board.read(), board.campaign(A, None, 0), board.renew(LeaderRecord(epoch=1, candidate=A))):
        with pytest.raises(
            RendezvousStateError, match=r"key aelastic/job/leader .* was not written by an aelastic agent"
        ):
            await operation


async def test_what_no_agent_wrote_over_the_record_of_a_coordinator_is_replaced(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    board = world.c10d(f"localhost:{quiet_port()}")
    record = await board.campaign(A, None, 0)
    assert record is not None
    for text in (b"hello", b"0\n{}"):
        await client_of(board).compare_set("aelastic/job/leader", await board._store.get(), text)
        assert record.is_same_term(renewed := await board.renew(record))
        assert renewed == await board.read()
    await client_of(board).compare_set("aelastic/job/leader", await board._store.get(), b"hello")
    assert await board.publish(record, "over")
    seen = await board.read()
    assert seen is not None and seen.verdict == "over"
    assert "another program wrote over the record of this leader: registering it" in caplog.text


# Cancelled, and left behind.


async def test_cancelled_while_the_child_starts_the_port_stays_ours_and_the_next_try_serves(world: World) -> None:
    env = world.in_the_child("import time\n    while not os.path.exists(__file__ + '.go'): time.sleep(0.01)")
    port = quiet_port()
    board = world.c10d(f"localhost:{port}", env=env)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(board.open)
            await until("a child", lambda: pid_of(board) is not None)
            scope.cancel()
    child = pid_of(board)

    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    (world.folder / "sitecustomize.py.go").touch()
    await board.open()

    assert pid_of(board) == child
    assert await world.c10d(f"localhost:{port}").read() is None


async def test_cancelled_while_the_store_is_silent_the_next_try_finds_it(world: World) -> None:
    with silent() as sock:
        closed, board = (world.c10d(f"127.0.0.1:{sock.getsockname()[1]}") for _ in range(2))
        await give_up_while_it_waits(closed)
        await closed.aclose()
        assert pid_of(closed) is None
        await give_up_while_it_waits(board)
        server = StoreProcess(world.env, "is slow")
        world.stack.push_async_callback(server.aclose)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(board.open)
            await until("it waits again", lambda: client_of(board)._process.is_busy)
            await server.ask("serve", sock.fileno(), timeout_s=DEADLINE_S, keys={})
        assert await board.read() is None


async def test_a_child_that_still_connects_does_not_connect_to_the_store_that_it_is_to_serve(world: World) -> None:
    with silent() as sock:
        endpoint = f"127.0.0.1:{sock.getsockname()[1]}"
        board = world.c10d(endpoint)
        await give_up_while_it_waits(board)
        accepted, _ = sock.accept()  # of our own look, which it closed
        accepted.close()
        accepted, _ = sock.accept()
    with accepted, anyio.fail_after(READ_TIMEOUT_S / 2):
        await board.open()  # the port is free
        assert await world.c10d(endpoint).read() is None


async def give_up_while_it_waits(board: Board) -> None:
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(board.open)
            await until("it waits", lambda: client_of(board)._process.is_busy)
            scope.cancel()


AGENT = """
import anyio, os, signal, sys
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.c10d import C10dStore

async def main():
    store = C10dStore(RendezvousSettings(backend="c10d", endpoint=sys.argv[1]), "job", os.environ)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.open)
        while not (store._client.is_connected or store._client._process.is_busy):
            await anyio.sleep(0.01)
        print("ready", flush=True)
        signal.pause()

anyio.run(main)
"""


async def test_of_a_killed_agent_nothing_is_left_also_where_it_waits_without_end(world: World) -> None:
    with silent() as sock:
        command = [sys.executable, "-c", AGENT, f"127.0.0.1:{sock.getsockname()[1]}"]
        with subprocess.Popen(command, env=world.env, stdout=subprocess.PIPE, text=True) as agent:  # noqa: ASYNC220
            assert agent.stdout is not None
            assert await anyio.to_thread.run_sync(agent.stdout.readline) == "ready\n"
            (child,) = set(world.left()) - {agent.pid}
            agent.kill()
            agent.wait()
            await until("the child is gone", lambda: not alive(child))


# The child itself.


@pytest.mark.cold
async def test_without_torch_the_user_is_told(world: World) -> None:
    env = world.in_the_child("sys.modules['torch'] = None")
    endpoint = f"localhost:{quiet_port()}"
    board = world.c10d(endpoint, env=env)

    with pytest.raises(InputError, match="cannot import torch: pip install torch"):
        await board.open()

    with pytest.raises(RefusedError):
        await world.c10d(endpoint, is_host="false").open()


# `static`: node 0 and the store of its workers.


class Nodes:
    """Boards of the nodes of a `static` job; the store of node 0 is served as the supervisor does."""

    def __init__(self, world: World, host: StoreHost) -> None:
        self.world, self.host = world, host
        self.endpoint = f"127.0.0.1:{quiet_port()}"

    def board(self, node_rank: int, run_id: str = "job") -> Board:
        settings = RendezvousSettings(
            backend="static", endpoint=self.endpoint, node_rank=node_rank, min_nodes=4, max_nodes=4
        )
        board = Board(static_store(settings, run_id, self.world.env, self.host), None, settings.lease_s)
        self.world.stack.push_async_callback(board.aclose)
        return board

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])


@pytest.fixture
async def nodes(world: World) -> AsyncIterator[Nodes]:
    host = StoreHost(world.env)
    running = asyncio.create_task(host.run())
    yield Nodes(world, host)
    running.cancel()
    await asyncio.wait([running])
    await host.aclose()


async def test_node_0_coordinates_and_the_others_read_it_in_the_workers_store(nodes: Nodes) -> None:
    zero, one = nodes.board(0), nodes.board(1)
    with pytest.raises(RefusedError):
        await one.open()
    await zero.open()
    assert await zero.read() is None
    assert await one.read() is None
    assert await one.campaign(B, None, 0) is None

    record = await elected(zero, A)

    assert record == LeaderRecord(epoch=1, candidate=A, renewals=0) == await zero.read()
    theirs = await until("it is told", lambda: one.campaign(B, None, 5))
    assert theirs == record == await one.read()
    assert (zero.name, one.name) == (f"static at {nodes.endpoint}",) * 2
    assert (zero.endpoint_host, zero.own_address, one.own_address) == ("127.0.0.1", "", "127.0.0.1")

    # Only node 0 changes anything.
    assert await one.campaign(B, theirs, 5) == theirs
    renewed = await zero.renew(record)
    assert renewed is not None and renewed.renewals == 1

    async def is_renewed() -> bool:
        return await one.read() == renewed

    await until("the renewal", is_renewed)
    assert await zero.publish(record, "over")

    async def is_over() -> bool:
        return (await seen_on(one)).verdict == "over"

    await until("the verdict", is_over)
    await zero.resign(record)

    async def is_vacant() -> bool:
        return await one.read() is None

    await until("the resignation", is_vacant)
    newer = await elected(zero, A)
    assert newer.epoch == 2
    assert not await zero.renew(record)


async def test_every_rounds_store_is_new_and_names_the_coordinator(nodes: Nodes) -> None:
    zero, one = nodes.board(0), nodes.board(1)
    await zero.open()
    await zero.campaign(A, None, 0)
    await until("it is told", one.read)
    assert await client_of(one).compare_set("visit", b"", b"before") == b"before"
    for visit in range(3):
        assert nodes.host.open(nodes.port) == nodes.port

        async def is_new(mine: bytes = b"%d" % visit) -> bool:
            # The process that serves it hears of the round a moment later; till then keys of an earlier one are there.
            try:
                await one.open()  # the connection to the last round's store ended with that store
                return bool(await client_of(one).compare_set("visit", b"", mine) == mine)
            except RendezvousConnectionError:
                return False

        await until("a store without keys of an earlier round", is_new)
        record = await until("it is told", one.read)
        assert record.candidate == A
        nodes.host.serve()
        # Workers of this round may have come before: the store is still the one of `open`.
        assert await client_of(one).compare_set("visit", b"", b"x") == b"%d" % visit


@pytest.mark.all
@pytest.mark.cold
async def test_a_store_of_node_0_that_was_killed_comes_back_with_the_leader(nodes: Nodes) -> None:
    zero, one = nodes.board(0), nodes.board(1)
    await zero.open()
    await zero.campaign(A, None, 0)

    async def seen() -> LeaderRecord | None:
        try:
            return await one.read()
        except RendezvousConnectionError:
            return None

    await until("it is told", seen)
    pid = nodes.host._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for("its end", lambda: not alive(pid))

    assert (await until("it is told again", seen)).candidate == A


async def test_another_static_job_at_the_masters_port_is_refused_and_node_0_needs_it(nodes: Nodes) -> None:
    with socket.create_server(("", nodes.port)), pytest.raises(InputError, match=f"port {nodes.port} .*in use"):
        await nodes.board(0).open()
    await nodes.board(0, "job A").open()
    with pytest.raises(InputError, match="serves run job A, not job B"):
        await until("it is refused", nodes.board(1, "job B").read)
