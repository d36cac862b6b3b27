"""Cells in the stores `c10d` and `static`: who serves the store, other servers at the endpoint, deaths, and leftovers.

`test_cells.py` has the promises that cells keep in every store.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from kit.launching import alive, stand_still
from kit.ports import quiet_port
from kit.servers.etcd_cells import A, B, renew, renewed, resigned, stored_by, until, until_answered, written
from kit.servers.other_programs import answering, http_server, silent
from kit.servers.stores import in_each_store
from kit.waiting import wait_for

from aelastic.base.host import proc_table
from aelastic.errors import InputError, RendezvousConnectionError, RendezvousStateError
from aelastic.rdzv.protocol.messages import PROTOCOL, StoredCell
from aelastic.rdzv.settings import READ_TIMEOUT_S, RendezvousSettings
from aelastic.rdzv.stores import endpoints, tcp_store
from aelastic.rdzv.stores.c10d import C10dStore
from aelastic.rdzv.stores.endpoint_cell import EndpointCell
from aelastic.rdzv.stores.endpoints import Endpoint, RefusedError, local_address_of
from aelastic.rdzv.stores.static import static_store
from aelastic.workers.tcpstore.child import StoreProcess
from aelastic.workers.tcpstore.host import StoreHost

DEADLINE_S = 60.0
# Tests in which a store dies start it cold: a warm store's stand-in process exits shortly before its port closes.
pytestmark = pytest.mark.usefixtures("warm_stores")


def descriptors() -> set[str]:
    found = ((fd, _what_is(fd)) for fd in os.listdir("/proc/self/fd"))
    return {f"{fd} {what}" for fd, what in found if what and "/proc/" not in what}


def _what_is(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""  # closed meanwhile


def client_of(cell: EndpointCell) -> Any:
    store: Any = cell._store
    return store._client


def pid_of(cell: EndpointCell) -> Any:
    """The child process that serves the store or connects to it."""
    return client_of(cell)._process.pid


class World:
    """Makes cells on this machine, and finds the processes that they start by a marker in the environment."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self.stack = stack
        self.folder = folder
        self.mark = f"CELL_OF_TEST={uuid.uuid4()}"
        self.env = {**os.environ, "CELL_OF_TEST": self.mark.partition("=")[2]}

    def c10d(
        self, endpoint: str, run_id: str = "job", env: Mapping[str, str] | None = None, **config: str
    ) -> EndpointCell:
        settings = RendezvousSettings(backend="c10d", endpoint=endpoint, config=config)
        store = C10dStore(settings, run_id, self.env if env is None else env)
        cell = EndpointCell(store, None, settings.lease_s)
        self.stack.push_async_callback(cell.aclose)
        return cell

    def left(self) -> list[int]:
        return [entry.pid for entry in proc_table.processes() if proc_table.carries(entry.pid, self.mark.encode())]

    def in_the_child(self, body: str) -> dict[str, str]:
        """An environment in which the child runs this line first."""
        return self.env | in_each_store(self.folder, body)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """Checks that each test leaves no process and no descriptor behind."""
    await anyio.getaddrinfo("127.0.0.1", 0)  # threads and whatever else a loop creates once
    before = descriptors()
    async with AsyncExitStack() as stack:
        world = World(stack, tmp_path)
        yield world
    assert not world.left()
    await until("no descriptor left (threads of a test's server may be ending)", lambda: not descriptors() - before)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the time after which a silent store is checked."""
    monkeypatch.setattr(tcp_store, "SILENCE_S", 1.5)


@pytest.fixture
def hurry_at_silence(hurry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives up early on a silent server as well; connecting may take as long as usual."""
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
        for agent in agents:  # at the same time, and only one gets the port
            tasks.start_soon(until_answered, agent.open)

    await written(agents[0], A)

    assert [await agent.write(B) for agent in agents[1:]] == [A] * 3
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
    await written(b, B)
    assert await a.read() == B


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


async def test_the_user_may_choose_which_agent_serves(world: World) -> None:
    endpoint = f"localhost:{quiet_port()}"
    client = world.c10d(endpoint, is_host="false")
    with pytest.raises(RefusedError, match=f"{endpoint}: Connection refused"):
        await client.open()

    # A gateway's address, for example.
    server = world.c10d(f"192.0.2.1:{endpoint.partition(':')[2]}", is_host="True")
    await server.open()
    await client.open()

    assert server.endpoint_host == "192.0.2.1"
    await written(server, A)
    assert await client.read() == A
    with pytest.raises(InputError, match=rf"{endpoint} cannot be served \(Address already in use\)"):
        await world.c10d(endpoint, is_host="1").open()


@pytest.mark.parametrize(
    "addresses, others",
    [("127.0.0.1 192.0.2.1", "192.0.2.1"), ("127.0.0.1 127.0.0.2", ""), ("127.0.0.1 2001:db8::1", "")],
)
async def test_a_name_of_several_hosts_is_warned_of(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, addresses: str, others: str
) -> None:
    """Not for several addresses of one host, or for an address family that this host may lack."""
    port = quiet_port()

    async def resolve(_: Endpoint, within_s: float) -> list[tuple[int, tuple[str, int]]]:
        each = addresses.split()
        return [(socket.AF_INET6 if ":" in address else socket.AF_INET, (address, port)) for address in each]

    monkeypatch.setattr(endpoints, "addresses_of", resolve)
    await world.c10d(f"pods.example:{port}").open()
    warnings = [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING]
    assert bool(others) == bool(warnings) and all(f"is this host and others ({others})" in line for line in warnings)


@pytest.mark.all
@pytest.mark.ci
async def test_torch_itself_can_read_the_endpoint_byte_for_byte(world: World) -> None:
    """Agents of other versions, and users of torch's own tools, find a job by this key and text."""
    endpoint = f"127.0.0.1:{quiet_port()}"
    cell = world.c10d(endpoint, "a job/1")
    await cell.open()
    await renew(cell, await written(cell, A))
    code = """if True:
        import sys
        from datetime import timedelta
        from aelastic.workers.tcpstore.server import import_store
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
        '["StoredCell",{"cell":{"incarnation":"1f","log":null,"term":1,"leader":"token-of-a","renewals":1},'
        '"leader":{"node_id":"a","name":"a","addresses":["10.0.0.1"],"port":29500,"token":"token-of-a"},'
        f'"protocol":{PROTOCOL}}}]'
    )
    assert done.stdout.splitlines() == ["a%20job%2F1", text, "2"], "two keys, and nothing else"


# Other servers at the endpoint.


@pytest.mark.parametrize(
    "endpoint, error, words",
    [
        # No host has an address in TEST-NET-1 (RFC 5737), and an agent never serves on another machine's behalf.
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
        # It waits for the end of a line while torch waits for an answer, both forever.
        pytest.param(
            http_server,
            RendezvousStateError,
            "is not a torch TCPStore (it answered 'HTTP/1.0 200 OK')",
            id="http",
            marks=pytest.mark.all,
        ),
        # It may be a store that is starting.
        pytest.param(lambda: answering(b""), RendezvousConnectionError, "closed the connection", id="hangs up"),
    ],
)
@pytest.mark.usefixtures("hurry")
async def test_nonsense_at_the_endpoint_is_not_a_store(
    world: World,
    program: Callable[[], AbstractContextManager[int]],
    error: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if error is RendezvousConnectionError:
        monkeypatch.setattr(tcp_store, "CONNECT_TIMEOUT_S", 0.3)
    with program() as port:
        cell = world.c10d(f"127.0.0.1:{port}")
        with pytest.raises(error) as caught:
            await cell.open()
    assert f"127.0.0.1:{port} {words}" in str(caught.value)


@pytest.mark.all
@pytest.mark.usefixtures("hurry_at_silence")
async def test_silence_is_reported_and_is_not_a_store_in_the_end(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with silent() as sock:
        port = sock.getsockname()[1]
        cell = world.c10d(f"127.0.0.1:{port}", read_timeout="2.5")
        with pytest.raises(
            RendezvousStateError,
            match=rf"{port} is not a torch TCPStore \(it accepted the connection but did not answer for 2.5 s",
        ):
            await cell.open()
        assert pid_of(cell) is None, "it would wait without end"
        assert f"127.0.0.1:{port} accepts connections, but has not answered as a TCPStore" in caplog.text


async def test_another_jobs_endpoint_is_refused(world: World) -> None:
    endpoint = f"localhost:{quiet_port()}"
    await world.c10d(endpoint, "job A").open()
    cell = world.c10d(endpoint, "job B")

    for _ in range(2):
        with pytest.raises(
            InputError, match=f"{endpoint} serves run job A, not job B: use --rdzv-id job A, or another"
        ):
            await cell.open()


# Deaths and recoveries.


@pytest.mark.cold
async def test_when_the_store_dies_with_its_agent_another_on_the_machine_serves_an_empty_one(world: World) -> None:
    endpoint = f"localhost:{quiet_port()}"
    server, leader, other = (world.c10d(endpoint) for _ in range(3))
    await server.open()
    mine = await renew(leader, await written(leader, A))
    assert await other.read() == mine

    await server.aclose()
    with pytest.raises(RendezvousConnectionError, match="refused"):
        await other.write(B)  # it does not react by serving an empty store

    assert await other.read() is None, "the new store is empty"
    assert await leader.write(renewed(mine)) is None, "the leader learns that the store has lost its data"
    await written(leader, renewed(mine))
    assert await other.read() == renewed(mine)
    assert leader.own_address == "127.0.0.1" and other.own_address == ""


@pytest.mark.all
@pytest.mark.cold
async def test_a_store_that_is_gone_is_reported_and_a_new_one_has_what_is_first_written_there(world: World) -> None:
    endpoint = f"localhost:{quiet_port()}"
    server, leader = world.c10d(endpoint), world.c10d(endpoint, is_host="false")
    await server.open()
    await written(leader, A)

    await server.aclose()

    for _ in range(3):
        with pytest.raises(RendezvousConnectionError):
            await leader.write(renewed(A))
        with pytest.raises(RendezvousConnectionError):
            await leader.read()

    new = world.c10d(endpoint)
    await until_answered(new.open)
    await written(new, B)
    assert await leader.write(renewed(A)) == B, "another agent leads"
    assert await leader.read() == B

    # It leads again, and leaves while the store does not know it.
    mine = await written(leader, stored_by("a", term=2))
    await new.aclose()
    last = world.c10d(endpoint)
    await until_answered(last.open)
    assert await leader.write(resigned(mine)) is None
    await written(leader, resigned(mine))
    assert await last.read() == resigned(mine)


@pytest.mark.parametrize("is_by_another", [False, True])
async def test_a_write_whose_answer_was_lost_is_valid_while_no_other_agent_has_written(
    world: World, monkeypatch: pytest.MonkeyPatch, is_by_another: bool
) -> None:
    endpoint = f"localhost:{quiet_port()}"
    cell, other = world.c10d(endpoint), world.c10d(endpoint)
    await cell.open()
    await written(cell, A)
    store = client_of(cell)

    async def lose_the_answer(key: str, expected: bytes, text: bytes) -> bytes:
        await tcp_store.TcpStore.compare_set(store, key, expected, text)
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(store, "compare_set", lose_the_answer)
        with pytest.raises(TimeoutError):
            await cell.write(renewed(A))
    assert await other.read() == renewed(A), "the write took effect"

    if is_by_another:
        await written(other, B)
        assert await cell.write(renewed(A)) == B
    else:
        mine = await renew(cell, await renew(cell, A))
        assert await other.read() == mine


@pytest.mark.cold
async def test_a_killed_child_of_a_client_is_replaced_and_one_that_serves_takes_the_store_with_it(world: World) -> None:
    endpoint = f"localhost:{quiet_port()}"
    server, client = world.c10d(endpoint), world.c10d(endpoint)
    await server.open()
    await written(server, A)
    await client.open()
    killed = pid_of(client)
    os.kill(killed, signal.SIGKILL)

    assert await client.read() == A
    assert pid_of(client) not in {killed, None}
    os.kill(pid_of(client), signal.SIGKILL)
    await written(client, B)

    os.kill(pid_of(server), signal.SIGKILL)
    assert await server.read() is None, "the new store is empty"
    mine = await written(server, renewed(A))
    assert await server.read() == mine
    os.kill(pid_of(server), signal.SIGKILL)
    with pytest.raises(RendezvousConnectionError, match="refused"):
        await server.write(renewed(mine))


@pytest.mark.all
@pytest.mark.cold
@pytest.mark.usefixtures("hurry_at_silence")
async def test_a_store_that_hangs_is_left_and_found_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"localhost:{quiet_port()}"
    server, client = world.c10d(endpoint), world.c10d(endpoint, read_timeout="2.5")
    await server.open()
    await written(server, A)
    await client.open()
    stand_still(pid_of(server))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(tcp_store, "ANSWER_TIMEOUT_S", 0.5)
            with pytest.raises(RendezvousConnectionError, match=r"no answer from .* within"):
                await client.read()
            assert pid_of(client) is None, "it would wait without end"
            # An agent that has seen a store there reports that it hangs, not that it is something else.
            with pytest.raises(
                RendezvousConnectionError,
                match=r"no answer from .*: it accepted the connection but did not answer for 2.5 s",
            ):
                await client.open()
            # The agent that serves the store does not give up that soon either.
            with pytest.raises(RendezvousConnectionError, match=r"no answer from .* within"):
                await server.write(renewed(A))
    finally:
        os.kill(pid_of(server), signal.SIGCONT)

    await renew(server, A)  # it took effect when the store resumed, and its answer came too late
    assert await client.read() == renewed(A)


# Data that no agent wrote (more of it in `test_etcd_settings.py`).


NO_AGENTS = r"key aelastic/job/leader .* was not written by an aelastic agent"


async def test_what_no_agent_wrote_is_an_error(world: World) -> None:
    cell = world.c10d(f"localhost:{quiet_port()}")
    await cell.open()
    await client_of(cell).compare_set("aelastic/job/leader", b"", b"0\n{}")

    for operation in (cell.write(A), cell.read()):
        with pytest.raises(RendezvousStateError, match=NO_AGENTS):
            await operation


async def test_what_was_refused_is_not_written_over_by_an_agent_that_does_not_lead(world: World) -> None:
    cell = world.c10d(f"localhost:{quiet_port()}")
    await cell.open()
    await client_of(cell).compare_set("aelastic/job/leader", b"", b"0\n{}")
    with pytest.raises(RendezvousStateError, match=NO_AGENTS):
        await cell.read()
    with pytest.raises(RendezvousStateError, match=NO_AGENTS):
        await cell.write(A)
    assert await cell._store.get() == b"0\n{}"


async def test_what_no_agent_wrote_over_the_cell_of_a_leader_is_replaced(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    cell = world.c10d(f"localhost:{quiet_port()}")
    await cell.open()
    mine = await written(cell, A)
    for text in (b"hello", b"0\n{}"):
        assert await client_of(cell).compare_set("aelastic/job/leader", await cell._store.get(), text) == text
        assert await cell.write(renewed(mine)) is None, "it is ignored"
        mine = await written(cell, renewed(mine))
        assert await cell.read() == mine
    assert "another program wrote over the record of this leader: registering it" in caplog.text


# Cancellation and abandonment.


async def test_cancelled_while_the_child_starts_the_port_stays_ours_and_the_next_try_serves(world: World) -> None:
    env = world.in_the_child("import time\n    while not os.path.exists(__file__ + '.go'): time.sleep(0.01)")
    port = quiet_port()
    cell = world.c10d(f"localhost:{port}", env=env)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cell.open)
            await until("a child", lambda: pid_of(cell) is not None)
            scope.cancel()
    child = pid_of(cell)

    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    (world.folder / "sitecustomize.py.go").touch()
    await cell.open()

    assert pid_of(cell) == child
    assert await world.c10d(f"localhost:{port}").read() is None


async def test_cancelled_while_the_store_is_silent_the_next_try_finds_it(world: World) -> None:
    with silent() as sock:
        closed, cell = (world.c10d(f"127.0.0.1:{sock.getsockname()[1]}") for _ in range(2))
        await give_up_while_it_waits(closed)
        await closed.aclose()
        assert pid_of(closed) is None
        await give_up_while_it_waits(cell)
        server = StoreProcess(world.env, "is slow")
        world.stack.push_async_callback(server.aclose)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cell.open)
            await until("it waits again", lambda: client_of(cell)._process.is_busy)
            await server.ask("serve", sock.fileno(), timeout_s=DEADLINE_S, keys={})
        assert await cell.read() is None


async def test_a_child_that_still_connects_does_not_connect_to_the_store_that_it_is_to_serve(world: World) -> None:
    with silent() as sock:
        endpoint = f"127.0.0.1:{sock.getsockname()[1]}"
        cell = world.c10d(endpoint)
        await give_up_while_it_waits(cell)
        accepted, _ = sock.accept()  # from our own check, which closed it
        accepted.close()
        accepted, _ = sock.accept()
    with accepted, anyio.fail_after(READ_TIMEOUT_S / 2):
        await cell.open()  # the port is free
        assert await world.c10d(endpoint).read() is None


async def give_up_while_it_waits(cell: EndpointCell) -> None:
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cell.open)
            await until("it waits", lambda: client_of(cell)._process.is_busy)
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
async def test_without_torch_the_user_gets_an_error(world: World) -> None:
    env = world.in_the_child("sys.modules['torch'] = None")
    endpoint = f"localhost:{quiet_port()}"
    cell = world.c10d(endpoint, env=env)

    with pytest.raises(InputError, match="cannot import torch: pip install torch"):
        await cell.open()

    with pytest.raises(RefusedError):
        await world.c10d(endpoint, is_host="false").open()


# `static`: node 0 and its workers' store.


class Nodes:
    """Cells of the nodes of a `static` job; node 0's store is served as by the supervisor."""

    def __init__(self, world: World, host: StoreHost) -> None:
        self.world, self.host = world, host
        self.endpoint = f"127.0.0.1:{quiet_port()}"

    def cell(self, node_rank: int, run_id: str = "job") -> EndpointCell:
        settings = RendezvousSettings(
            backend="static", endpoint=self.endpoint, node_rank=node_rank, min_nodes=4, max_nodes=4
        )
        cell = EndpointCell(static_store(settings, run_id, self.world.env, self.host), None, settings.lease_s)
        self.world.stack.push_async_callback(cell.aclose)
        return cell

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


async def test_node_0_leads_and_the_others_read_it_in_the_workers_store(nodes: Nodes) -> None:
    zero, one = nodes.cell(0), nodes.cell(1)
    with pytest.raises(RefusedError):
        await one.open()
    await zero.open()
    assert await zero.read() is None
    assert await one.read() is None
    assert await one.write(B) is None, "only node 0 may change anything"

    async def is_stored(stored: StoredCell) -> bool:
        return await one.read() == stored

    await written(zero, A)

    await until("it is told", lambda: is_stored(A))
    assert await zero.read() == A
    assert (zero.name, one.name) == (f"static at {nodes.endpoint}",) * 2
    assert (zero.endpoint_host, zero.own_address, one.own_address) == ("127.0.0.1", "", "127.0.0.1")

    assert await one.write(B) == A
    mine = await renew(zero, A)
    await until("the renewal", lambda: is_stored(mine))
    await written(zero, resigned(mine))
    await until("that nobody leads", lambda: is_stored(resigned(mine)))
    assert await one.write(B) == resigned(mine) == await zero.read()


async def test_every_rounds_store_is_new_and_names_the_coordinator(nodes: Nodes) -> None:
    zero, one = nodes.cell(0), nodes.cell(1)
    await zero.open()
    await written(zero, A)
    await until("it is told", one.read)
    assert await client_of(one).compare_set("visit", b"", b"before") == b"before"
    for visit in range(3):
        assert nodes.host.open(nodes.port) == nodes.port

        async def is_new(mine: bytes = b"%d" % visit) -> bool:
            # The process that serves it learns of the round a moment later; until then it has the previous keys.
            try:
                await one.open()  # the connection to the last round's store closed with that store
                return bool(await client_of(one).compare_set("visit", b"", mine) == mine)
            except RendezvousConnectionError:
                return False

        await until("a store without keys of an earlier round", is_new)
        assert await until("it is told", one.read) == A
        nodes.host.serve()
        # This round's workers may have been faster: the store is still the one that `open` found.
        assert await client_of(one).compare_set("visit", b"", b"x") == b"%d" % visit


@pytest.mark.all
@pytest.mark.cold
async def test_a_store_of_node_0_that_was_killed_comes_back_with_the_leader(nodes: Nodes) -> None:
    zero, one = nodes.cell(0), nodes.cell(1)
    await zero.open()
    await written(zero, A)

    async def seen() -> StoredCell | None:
        try:
            return await one.read()
        except RendezvousConnectionError:
            return None

    await until("it is told", seen)
    pid = nodes.host._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for("its end", lambda: not alive(pid))

    assert await until("it is told again", seen) == A


async def test_another_static_job_at_the_masters_port_is_refused_and_node_0_needs_it(nodes: Nodes) -> None:
    with socket.create_server(("", nodes.port)), pytest.raises(InputError, match=f"port {nodes.port} .*in use"):
        await nodes.cell(0).open()
    await nodes.cell(0, "job A").open()
    with pytest.raises(InputError, match="serves run job A, not job B"):
        await until("it is refused", nodes.cell(1, "job B").read)
