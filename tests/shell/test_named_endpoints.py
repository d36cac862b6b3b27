"""Endpoints that are the addresses of one name, which DNS gets to know one by one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from aelastic.doctor.endpoint_checks import check_endpoints
from aelastic.errors import AelasticError, InputError, RendezvousConnectionError
from aelastic.rdzv.boards import endpoints
from aelastic.rdzv.boards.endpoints import Endpoint, endpoints_of
from aelastic.rdzv.boards.quorum import QuorumBoard
from aelastic.rdzv.settings import RendezvousSettings

SETTINGS = RendezvousSettings("c10d", "pods:29400", 3, 3, config={"endpoints": "3"})
V4, V6 = "10.0.0.2 10.0.0.3 10.0.0.1", "fd00::2 fd00::1 fd00::3"
TOO_MANY = "more than endpoints=3: use their number, or list the hosts"

Resolver = Callable[[str], None]


@pytest.fixture
def resolve_to(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    """Sets the addresses of each name."""

    def set_(addresses: str) -> None:
        async def resolve(endpoint: Endpoint) -> list[tuple[int, tuple[Any, ...]]]:
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
    assert " ".join(map(str, await endpoints_of(SETTINGS))) == found


@pytest.mark.parametrize(
    "addresses, kind, told",
    [
        ("10.0.0.2 10.0.0.1", RendezvousConnectionError, "2 of 3 IPv4 addresses (10.0.0.1, 10.0.0.2)"),
        ("fd00::1", RendezvousConnectionError, "1 of 3 IPv6 addresses (fd00::1)"),
        # The second IPv4 address may be there for the next agent.
        (f"10.0.0.1 {V6}", RendezvousConnectionError, "1 of 3 IPv4 addresses (10.0.0.1)"),
        (
            f"fd00::1 {V4} 10.0.0.4",
            InputError,
            f"4 IPv4 addresses (10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4), {TOO_MANY}",
        ),
    ],
)
async def test_too_few_addresses_are_waited_for_and_too_many_refused(
    resolve_to: Resolver, addresses: str, kind: type[AelasticError], told: str
) -> None:
    resolve_to(addresses)
    with pytest.raises(kind) as caught:
        await endpoints_of(SETTINGS)
    assert str(caught.value) == f"the rendezvous endpoint pods:29400 has {told}"


async def test_the_doctor_says_so_too(resolve_to: Resolver) -> None:
    resolve_to("10.0.0.2")
    (finding,) = [each async for each in check_endpoints(SETTINGS, "job", {})]
    told = "endpoint pods:29400: the rendezvous endpoint pods:29400 has 1 of 3 IPv4 addresses (10.0.0.2)"
    assert str(finding).split(None, 1) == ["error", told]


async def test_a_board_is_at_the_addresses_once_all_are_known(resolve_to: Resolver) -> None:
    board = QuorumBoard(SETTINGS, "job", {})
    for addresses in ("10.0.0.1", "10.0.0.3 10.0.0.1"):
        resolve_to(addresses)
        with pytest.raises(RendezvousConnectionError, match="of 3 IPv4 addresses"):
            await board.open()
        assert board.name == "c10d at pods:29400"
    resolve_to(V4)
    await board.open()
    resolve_to("10.0.0.1 10.0.0.2 10.0.0.9")
    await board.open()
    assert board.name == "c10d at 10.0.0.1:29400,10.0.0.2:29400,10.0.0.3:29400"
    assert [part.name for part in board._parts] == [f"c10d at 10.0.0.{host}:29400" for host in (1, 2, 3)]
    await board.aclose()
