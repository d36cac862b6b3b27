"""The store of several endpoints, without TCPStores: how it handles endpoints that come up one after the other."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from kit.servers.etcd_cells import A

from aelastic.cli.doctor.endpoint_checks import check_endpoints
from aelastic.errors import AelasticError, InputError, RendezvousConnectionError
from aelastic.rdzv.protocol.codec import to_text
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores import endpoints
from aelastic.rdzv.stores.c10d import C10dStore
from aelastic.rdzv.stores.endpoints import REFUSED, Endpoint, RefusedError, endpoints_of
from aelastic.rdzv.stores.quorum import QuorumStore

SETTINGS = RendezvousSettings("c10d", "127.0.0.1:1,127.0.0.2:1,127.0.0.3:1", 3, 3)


class Part:
    """An endpoint that comes up at a given time; until then it refuses connections, unless an agent serves it."""

    is_served_here = False
    own_address = endpoint_host = ""

    def __init__(self, is_up: anyio.Event, *, is_ours: bool) -> None:
        self._is_up, self._is_ours = is_up, is_ours
        self._text = b""

    async def get_once(self) -> bytes:
        if self._is_ours:
            await self._is_up.wait()
        elif not self._is_up.is_set():
            raise RefusedError("cannot connect to the rendezvous endpoint n0:1: Connection refused", reason=REFUSED)
        return self._text

    async def compare_set_once(self, expected: bytes, text: bytes) -> bytes:
        if self._text == expected:
            self._text = text
        return self._text

    async def aclose(self) -> None:
        pass


async def test_endpoints_that_came_up_with_our_own_are_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    is_up, refused = anyio.Event(), set()

    def on_endpoint(name: str, why: str) -> None:
        refused.add(name if why == REFUSED else "")
        if len(refused) == 2:
            is_up.set()

    store = QuorumStore(SETTINGS, "job", {}, on_endpoint)
    monkeypatch.setattr(store, "_parts", [Part(is_up, is_ours=number == 0) for number in range(3)])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.run)
        with anyio.fail_after(20):
            assert await store.get() == b""
        tasks.cancel_scope.cancel()


async def test_without_one_that_came_up_the_first_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    store = QuorumStore(SETTINGS, "job", {})
    monkeypatch.setattr(store, "_parts", [Part(anyio.Event(), is_ours=False) for _ in range(3)])
    names = [f"127.0.0.{number}:1 (connection refused)" for number in (1, 2, 3)]
    missing = re.escape(f"3 of 3 rendezvous endpoints are missing, and 2 are needed: {', '.join(names)}")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.run)
        with pytest.raises(RendezvousConnectionError, match=missing):
            await store.get()
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    "names, config, expected",
    [
        ("n0:1,n1:1,n0:1", {}, "rendezvous endpoint n0:1 is in the list twice: list each host once"),
        ("n0:1,,n1:1", {}, "rendezvous endpoint '': use HOST:PORT"),
        ("n0:1,n1:1,n2:1", {"is_host": "true"}, "is_host=true is for a single endpoint"),
        ("localhost:0", {"is_host": "perhaps"}, "is_host=perhaps: use true or false"),
        ("localhost:0", {"is_host": "no"}, "is_host=false: give the store"),
    ],
)
def test_what_cannot_be_is_refused(names: str, config: dict[str, str], expected: str) -> None:
    store, nodes = QuorumStore if "," in names else C10dStore, len(names.split(","))
    with pytest.raises(InputError, match=expected):
        store(RendezvousSettings("c10d", names, nodes, nodes, config=config), "job", {})


def test_an_even_number_works_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    QuorumStore(RendezvousSettings("c10d", "n0:1,n1:1", 3, 3), "job", {})
    assert caplog.messages == ["2 rendezvous endpoints survive the loss of 0, no more than 1 do: use an odd number"]


def test_an_agent_that_finds_what_one_with_a_single_endpoint_has_written_gets_both() -> None:
    store = QuorumStore(SETTINGS, "job", {})
    own, other = SETTINGS.endpoint, "127.0.0.2:1"
    expected = f"this agent has the rendezvous endpoints {own}, another agent of this run has {other}: use the same list on every node"
    with pytest.raises(InputError, match=f"^{expected}$"):
        store._cell_of(to_text(A).encode(), other)


# Endpoints that are the addresses of one name, which appear in DNS one by one.

NAMED = RendezvousSettings("c10d", "pods:29400", 3, 3, config={"endpoints": "3"})
V4, V6 = "10.0.0.2 10.0.0.3 10.0.0.1", "fd00::2 fd00::1 fd00::3"
TOO_MANY = "more than endpoints=3: use their number, or list the hosts"

Resolver = Callable[[str], None]


@pytest.fixture
def resolve_to(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    """Sets the addresses of each name."""

    def set_(addresses: str) -> None:
        async def resolve(endpoint: Endpoint, within_s: float) -> list[tuple[int, tuple[Any, ...]]]:
            each = addresses.split()
            return [(socket.AF_INET6 if ":" in one else socket.AF_INET, (one, endpoint.port)) for one in each]

        monkeypatch.setattr(endpoints, "addresses_of", resolve)

    return set_


@pytest.mark.parametrize(
    "addresses, found",
    [
        (V4, "10.0.0.1:29400 10.0.0.2:29400 10.0.0.3:29400"),
        (f"{V4} {V4}", "10.0.0.1:29400 10.0.0.2:29400 10.0.0.3:29400"),
        (V6, "[fd00::1]:29400 [fd00::2]:29400 [fd00::3]:29400"),
        (f"{V6} {V4}", "10.0.0.1:29400 10.0.0.2:29400 10.0.0.3:29400"),
    ],
)
async def test_each_address_is_an_endpoint_in_one_family(resolve_to: Resolver, addresses: str, found: str) -> None:
    resolve_to(addresses)
    assert " ".join(map(str, await endpoints_of(NAMED))) == found


@pytest.mark.parametrize(
    "addresses, kind, expected",
    [
        ("10.0.0.2 10.0.0.1", RendezvousConnectionError, "2 of 3 IPv4 addresses (10.0.0.1, 10.0.0.2)"),
        ("fd00::1", RendezvousConnectionError, "1 of 3 IPv6 addresses (fd00::1)"),
        # The second IPv4 address may be meant for the next agent.
        (f"10.0.0.1 {V6}", RendezvousConnectionError, "1 of 3 IPv4 addresses (10.0.0.1)"),
        (
            f"fd00::1 {V4} 10.0.0.4",
            InputError,
            f"4 IPv4 addresses (10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4), {TOO_MANY}",
        ),
    ],
)
async def test_too_few_addresses_are_waited_for_and_too_many_refused(
    resolve_to: Resolver, addresses: str, kind: type[AelasticError], expected: str
) -> None:
    resolve_to(addresses)
    with pytest.raises(kind) as caught:
        await endpoints_of(NAMED)
    assert str(caught.value) == f"the rendezvous endpoint pods:29400 has {expected}"


async def test_the_doctor_reports_it_too(resolve_to: Resolver) -> None:
    resolve_to("10.0.0.2")
    (finding,) = [each async for each in check_endpoints(NAMED, "job", {})]
    expected = "endpoint pods:29400: the rendezvous endpoint pods:29400 has 1 of 3 IPv4 addresses (10.0.0.2)"
    assert str(finding).split(None, 1) == ["error", expected]


async def test_a_store_is_at_the_addresses_once_all_are_known(resolve_to: Resolver) -> None:
    store = QuorumStore(NAMED, "job", {})
    for addresses in ("10.0.0.1", "10.0.0.3 10.0.0.1"):
        resolve_to(addresses)
        with pytest.raises(RendezvousConnectionError, match="of 3 IPv4 addresses"):
            await store.open()
        assert store.name == "c10d at pods:29400"
    resolve_to(V4)
    await store.open()
    resolve_to("10.0.0.1 10.0.0.2 10.0.0.9")
    await store.open()
    assert store.name == "c10d at 10.0.0.1:29400,10.0.0.2:29400,10.0.0.3:29400"
    assert [part.name for part in store._parts] == [f"c10d at 10.0.0.{host}:29400" for host in (1, 2, 3)]
    await store.aclose()
