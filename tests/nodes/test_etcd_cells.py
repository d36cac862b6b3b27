"""Cells on etcd: servers that die, hang and come back, and strangers at the endpoint."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import pytest
import uvloop
from kit.ports import quiet_port
from kit.servers.etcd_cells import (
    A,
    B,
    Closing,
    both_apis,
    cell_of,
    renew,
    renewed,
    settings_of,
    stored_by,
    until_answered,
    written,
)
from kit.servers.etcd_servers import EtcdServer, EtcdServers, distro_etcd, etcd
from kit.servers.etcd_values import PUT, put_v2
from kit.servers.other_programs import http_server
from kit.servers.relay import Relay

from aelastic.errors import AelasticError, InputError, RendezvousConnectionError, RendezvousError, RendezvousStateError
from aelastic.rdzv.protocol.messages import StoredCell
from aelastic.rdzv.stores.etcd import etcd_store

pytestmark = pytest.mark.usefixtures("kind_to_etcd")

# --- what others wrote


# The format of versions before the log: on etcd their first records had no count of renewals.
OLDER = b'{"epoch": 1, "candidate": {"node_id": "a", "addresses": ["h"], "port": 1, "token": ""}, "verdict": ""}'


# `test_etcd_settings.py` has more invalid data.
@both_apis
@pytest.mark.parametrize(
    "text, error, expected",
    [
        (b"\xff\xfe", RendezvousStateError, " was not written by an aelastic agent"),
        (OLDER, RendezvousStateError, " was not written by an aelastic agent"),
        (b"7\n" + OLDER, InputError, ": the job speaks protocol 17 or an older one"),
    ],
    ids=["garbage", "oldest", "older"],
)
async def test_what_is_not_a_cell_is_reported_with_the_key(
    backend: str,
    text: bytes,
    error: type[AelasticError],
    expected: str,
    etcds: EtcdServers,
    run_id: str,
    closing: Closing,
) -> None:
    server = etcds.of("distro")
    key = f"/aelastic/{quote(run_id, safe='')}/coordinator"
    PUT[backend](server, key, text, lease=True)  # as older versions did
    cell = closing(cell_of(backend, server.endpoint, run_id))
    for operation in (partial(cell.write, A), cell.read):
        with pytest.raises(error, match=f"key {key}{expected}") as caught:
            await operation()
        assert "\n" not in str(caught.value)


@both_apis
async def test_garbage_over_the_cell_of_a_leader_is_replaced(
    backend: str, etcds: EtcdServers, run_id: str, closing: Closing
) -> None:
    server, cell = etcds.of("distro"), closing(cell_of(backend, etcds.of("distro").endpoint, run_id))
    mine, key = await written(cell, A), f"/aelastic/{quote(run_id, safe='')}/coordinator"
    for text, lease in ((b"hello", True), (b"hello", False), (b"", False)):
        PUT[backend](server, key, text, lease=lease)
        assert await cell.write(renewed(mine)) is None, "it is ignored"
        mine = await written(cell, renewed(mine))
        assert await cell.read() == mine


async def test_a_directory_in_the_key_is_reported_with_the_key(etcds: EtcdServers, closing: Closing) -> None:
    server = etcds.of("distro")
    put_v2(server, "/aelastic/directory/coordinator/below", b"x", lease=False)
    with pytest.raises(RendezvousStateError, match="/aelastic/directory/coordinator"):
        await closing(cell_of("etcd-v2", server.endpoint, "directory")).read()


# --- two that write at once


@both_apis
async def test_of_two_writes_the_later_one_changes_nothing(
    etcds: EtcdServers, run_id: str, closing: Closing, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """a looks; b looks and writes; then a writes."""
    endpoint = etcds.of("distro").endpoint
    a, b = closing(cell_of(backend, endpoint, run_id)), closing(cell_of(backend, endpoint, run_id))
    store: Any = a._store
    write = store._replace
    others: list[StoredCell] = []

    async def write_later(*args: Any) -> Any:
        if not others:
            others.append(await written(b, B))
        return await write(*args)

    monkeypatch.setattr(store, "_replace", write_later)

    assert await a.write(A) == B
    newer = await written(a, stored_by("a", term=2))
    assert await b.read() == await a.read() == newer


@both_apis
async def test_a_store_tells_what_is_there_of_its_own_and_of_others(
    etcds: EtcdServers, run_id: str, backend: str
) -> None:
    settings = settings_of(etcds.of("distro").endpoint, backend)
    a, b = etcd_store(settings, run_id), etcd_store(settings, run_id)
    assert await a.get() == b""
    assert await b.compare_set(b"one", b"two") == b""
    assert await a.compare_set(b"", b"one") == b"one"
    assert await a.compare_set(b"", b"two") == b"one"
    assert await b.compare_set(b"", b"two") == b"one"
    assert await b.compare_set(b"one", b"two") == b"two"
    assert await a.compare_set(b"one", b"three") == b"two"
    assert await a.get() == await b.get() == b"two"
    await a.aclose()
    await b.aclose()


# --- servers that die, hang and come back


# Both APIs use the same HTTP client.


async def test_the_next_endpoint_is_asked_when_one_is_dead_and_no_proxy_of_the_environment(
    etcds: EtcdServers, run_id: str, closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{quiet_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    alive = etcds.of("distro").endpoint
    cell = closing(cell_of("etcd", f"127.0.0.1:{quiet_port()},{alive},no-such-host.invalid", run_id))
    await cell.open()
    await renew(cell, await written(cell, A))
    assert cell.endpoint_host == "127.0.0.1"


async def test_when_no_endpoint_answers_each_is_named(closing: Closing) -> None:
    one, two = f"127.0.0.1:{quiet_port()}", f"127.0.0.1:{quiet_port()}"
    cell = closing(cell_of("etcd", f"{one},{two}"))

    with pytest.raises(RendezvousConnectionError, match=rf"{one}: .*refused.*{two}: .*refused"):
        await cell.open()


@pytest.mark.all
@pytest.mark.ci
async def test_a_server_that_hangs_does_not_hold_up_the_agent(
    etcds: EtcdServers, tmp_path: Path, run_id: str, closing: Closing
) -> None:
    with etcd(EtcdServer(distro_etcd(), tmp_path / "etcd", ["--enable-v2"])) as server:
        reader, keeper, newcomer = (closing(cell_of("etcd", server.endpoint, run_id)) for _ in range(3))
        two = closing(cell_of("etcd", f"{server.endpoint},{etcds.of('distro').endpoint}", run_id))
        await reader.open()
        await keeper.open()
        await two.open()
        await written(keeper, A)
        server.stop()

        async def hangs(operation: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(RendezvousConnectionError, match=f"{server.endpoint}: no answer within"):
                await operation()

        async with anyio.create_task_group() as group:
            for operation in (reader.read, partial(keeper.write, renewed(A)), newcomer.open):
                group.start_soon(hangs, operation)
            # The other server belongs to another cluster, but it answers.
            assert await two.read() is None
        server.cont()
        await renew(keeper, A)  # whether or not the server had accepted it before
        assert await reader.read() == renewed(A)


@pytest.mark.parametrize("backend", ["etcd-v3", pytest.param("etcd-v2", marks=pytest.mark.all)])
async def test_a_server_that_restarts_also_elsewhere_under_its_name_still_has_the_cell(
    backend: str, tmp_path: Path, run_id: str, closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = socket.getaddrinfo
    with etcd(EtcdServer(distro_etcd(), tmp_path / "etcd", ["--enable-v2"])) as server:

        def resolve(host: str, *args: Any, **keywords: Any) -> Any:
            return known(server.host if host == "etcd.example" else host, *args, **keywords)

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        cell = closing(cell_of(backend, f"etcd.example:{server.port}", run_id, lease="60"))
        mine = await written(cell, A)
        server.end()
        with pytest.raises(RendezvousConnectionError, match="refused"):
            await cell.write(renewed(mine))
        server.start()

        # On the old connection, which is dead.
        mine = await renew(cell, mine)
        server.kill()
        server.host = "127.0.0.2"
        server.start()
        mine = await until_answered(partial(renew, cell, mine))
        other = closing(cell_of(backend, server.endpoint, run_id))
        assert await other.read() == mine
        server.restart()
        theirs = await written(other, stored_by("b", term=2))
        assert await until_answered(partial(cell.write, renewed(mine))) == theirs


@pytest.mark.parametrize("backend, lost", [("etcd-v3", b'"compare"'), ("etcd-v2", b"value=")])
async def test_a_write_whose_answer_is_lost_is_seen_later_and_counts(
    backend: str, lost: bytes, etcds: EtcdServers, run_id: str, closing: Closing
) -> None:
    server = etcds.of("distro")
    relay = Relay(server.port, lost)
    async with relay as endpoint:
        alone = closing(cell_of(backend, endpoint, run_id))
        with pytest.raises(RendezvousConnectionError, match=f"{endpoint}: it closes the connection"):
            await alone.write(A)
        assert relay.losses > 0
        assert await alone.read() == A
        direct = closing(cell_of(backend, server.endpoint, run_id))
        assert await direct.read() == A
        known = await renew(direct, A)

        # With a second address of the same cluster, the request is repeated there, and the cell is ours anyway.
        two_ways = closing(cell_of(backend, f"{endpoint},{server.endpoint}", run_id))
        assert await two_ways.read() == known
        losses = relay.losses
        mine = await written(two_ways, stored_by("a", term=2))
        assert relay.losses > losses
        mine = await renew(two_ways, mine)
        assert await direct.read() == mine
        await two_ways.aclose()


# --- other servers at the endpoint


@both_apis
@pytest.mark.parametrize(
    "status, body, error, what",
    [
        (200, b"<html>Welcome</html>", RendezvousStateError, "not an etcd that aelastic supports: .*200.*Welcome.*Server: Canned/1"),
        (404, b"not here", RendezvousStateError, "not an etcd that aelastic supports: .*404.*not here"),
        (400, b"Client sent an HTTP request to an HTTPS server.", InputError, "requires TLS: .*protocol=https"),
        (301, b"", RendezvousStateError, "301"),
        (200, b"{}", RendezvousStateError, "200"),
        (200, b"[" * 100_000, RendezvousStateError, "200"),
        (200, b'{"header": {}}', RendezvousStateError, "."),
        (200, b'{"header": {"revision": []}, "responses": [{"response_range": {}}, {"response_range": {}}]}', RendezvousStateError, "."),
        (200, b'{"header": 7, "responses": 7, "node": 7}', RendezvousStateError, "."),
        (200, b'{"header": {}, "node": {"modifiedIndex": "x"}}', RendezvousStateError, "."),
        (200, b" " * 5_000_000, RendezvousStateError, "more than"),
        (400, b'{"errorCode": 105, "code": 5, "message": "no"}', RendezvousStateError, "."),
        (500, b'{"errorCode": 301, "code": 14, "message": "no leader"}', RendezvousConnectionError, "no leader"),
        (503, b'{"error": {"grpc_code": 14, "message": "no leader"}}', RendezvousConnectionError, "no leader|503"),
        (502, b"<html>Bad gateway</html>", RendezvousConnectionError, "502"),
    ],
)  # fmt: skip
async def test_a_stranger_differs_from_an_etcd_that_cannot_answer_now(
    backend: str, status: int, body: bytes, error: type[AelasticError], what: str, closing: Closing
) -> None:
    with http_server(status, body) as port:
        endpoint = f"127.0.0.1:{port}"
        cell = closing(cell_of(backend, endpoint))
        with pytest.raises(error, match=what) as caught:
            await cell.open()
        assert endpoint in str(caught.value)
        assert len(str(caught.value)) < 400
        with pytest.raises(error):
            await cell.write(A)


@pytest.mark.parametrize(
    "answer, error",
    [(b"SSH-2.0-OpenSSH_9.2\r\n", RendezvousStateError), (b"", RendezvousConnectionError)],
    ids=["ssh", "nothing"],
)
async def test_a_server_that_does_not_speak_http_is_not_an_etcd(
    answer: bytes, error: type[RendezvousError], closing: Closing
) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(error, match=endpoint):
            await closing(cell_of("etcd-v3", endpoint)).open()


@pytest.mark.parametrize(
    "options, found, other, expected",
    [
        ([], "etcd-v3", "etcd-v2", r"does not serve the v2 API.* etcd-v3"),
        (["--enable-v2", "--enable-grpc-gateway=false"], "etcd-v2", "etcd-v3", r"does not serve its v3 API .* etcd-v2"),
    ],
)
async def test_of_a_server_with_one_api_the_other_shows_what_to_use(
    tmp_path: Path, closing: Closing, options: list[str], found: str, other: str, expected: str
) -> None:
    with etcd(EtcdServer(distro_etcd(), tmp_path / "etcd", options)) as server:
        with pytest.raises(RendezvousStateError, match=rf"etcd 3\.5\.1 at .* {expected}"):
            await closing(cell_of(other, server.endpoint)).open()
        either = closing(cell_of("etcd", server.endpoint))
        await either.open()
        await written(either, A)
        await either.open()
        assert await closing(cell_of(found, server.endpoint)).read() == A
        assert either.name == f"{found} at {server.endpoint}"


@pytest.mark.parametrize(
    "host, relayed",
    [("127.0.0.1", False), ("LOCALHOST", False), ("127.0.1.1", True)],  # in /etc/hosts, with an address of its own
)
async def test_a_cell_knows_its_way_to_etcd(host: str, relayed: bool, etcds: EtcdServers, closing: Closing) -> None:
    port = etcds.of("distro").port
    async with Relay(port, host=host if relayed else "127.0.0.1") as between:
        cell = cell_of("etcd", between if relayed else f"{host}:{port}")
        closing(cell)
        await cell.open()
        assert cell.own_address.startswith("127.") and (relayed or cell.own_address == "127.0.0.1")
        assert cell.endpoint_host == host
        client: Any = cell._store
        client = client._chosen
        client._ends = dict.fromkeys(client._ends, ("10.0.0.1", "10.0.0.2"))
        assert (cell.own_address, cell.endpoint_host) == ("10.0.0.1", ""), "the endpoint is elsewhere"
        await cell.aclose()


@both_apis
def test_cells_run_on_uvloop(backend: str, etcds: EtcdServers, run_id: str) -> None:
    endpoint = etcds.of("distro").endpoint

    async def story() -> None:
        cell = cell_of(backend, endpoint, run_id)
        await renew(cell, await written(cell, A))
        assert cell.own_address == "127.0.0.1"
        await cell.aclose()

    uvloop.run(story())


def test_an_interrupted_loop_leaves_nothing_open(etcds: EtcdServers, run_id: str) -> None:
    async def story() -> None:
        cell = cell_of("etcd-v3", etcds.of("distro").endpoint, run_id)
        try:
            with anyio.move_on_after(0.05):
                while True:
                    await cell.read()
        finally:
            await cell.aclose()

    asyncio.run(story())
