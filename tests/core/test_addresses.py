"""The address where workers reach group rank 0."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aelastic.base.host.ports import is_address, is_loopback
from aelastic.rdzv.protocol import addresses
from aelastic.rdzv.protocol.addresses import node_addresses, peer_addresses, plain_address
from aelastic.rdzv.protocol.messages import Node


def node(address: str, way: str = "") -> Node:
    return Node("n", "host", "default", 1, address, 29500, None, way)


@pytest.mark.parametrize(
    "address, plain",
    [
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::FFFF:0a00:1", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("fd00::1", "fd00::1"),
        ("fd00:0:0::1", "fd00::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("node0", "node0"),
        ("", ""),
    ],
)
def test_an_address_is_written_as_people_do(address: str, plain: str) -> None:
    assert plain_address(address) == plain
    assert plain_address(plain) == plain


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_that_came_through_an_ipv6_socket_is_itself(address: ipaddress.IPv4Address) -> None:
    assert plain_address(f"::ffff:{address}") == str(address)


@pytest.mark.parametrize("name", ["node0", "", "1.2.3", "1.2.3.4.5", "localhost", "::g", "0x7f.1", "10.0.0.1:80"])
def test_a_name_is_not_an_address(name: str) -> None:
    assert not is_address(name)


def test_a_loopback_address_is_of_use_here_only() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "fe80::1", "node0", "", "128.0.0.1", "localhost.example")))


HERE, FAR = node("127.0.0.1", "127.0.0.1"), node("10.0.0.2", "10.0.0.9")


@pytest.mark.parametrize(
    "nodes, found",
    [
        pytest.param([node("10.0.0.1"), FAR], "10.0.0.1", id="where it says"),
        pytest.param([node("node0.example"), FAR], "node0.example", id="by a name"),
        pytest.param(
            [HERE, node("::1", "::1"), FAR, node("10.0.0.3", "10.1.0.9")],
            "10.0.0.9",
            id="on the coordinator's machine, which others have found",
        ),
        pytest.param([HERE, HERE], "127.0.0.1", id="all nodes on one machine"),
        pytest.param([node("127.0.0.1"), node("10.0.0.2", "")], "127.0.0.1", id="no way is known"),
    ],
)
def test_the_master_is_where_others_reach_the_first_node(nodes: list[Node], found: str) -> None:
    assert node_addresses(nodes)[0] == found


def test_nodes_are_also_where_their_connections_come_from() -> None:
    here = node("node0", "127.0.0.1").replace(peer_address="127.0.0.1")
    far = node("node1", "10.0.0.9").replace(peer_address="10.0.0.2")
    assert peer_addresses([here, far]) == ["10.0.0.9", "10.0.0.2"]


def test_each_address_of_a_large_round_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[str]()

    def look(address: str) -> bool:
        looks.append(address)
        return False

    monkeypatch.setattr(addresses, "is_loopback", look)
    nodes = [node(f"10.0.0.{number}") for number in range(100)]
    assert node_addresses(nodes) == [node.master_addr for node in nodes] and len(looks) == len(nodes)
