"""Where workers find the store of group rank 0, from what connections have shown to work.

No name is looked up here, and none is turned around: an agent is where its connection to the leader
comes from, and the leader's own is where the others have reached it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv6Address, ip_address

from aelastic.host.sockets import ADDRESSES_MAX, is_loopback
from aelastic.rdzv.protocol.messages import Node


@lru_cache(maxsize=ADDRESSES_MAX)  # needed several times for each connection
def plain_address(address: str) -> str:
    """An address as it is written: an IPv4 one that came through an IPv6 socket is an IPv4 one."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return str(mapped or parsed)


def node_addresses(nodes: Sequence[Node]) -> list[str]:
    """Where each node is reached, the same for all; by group rank.  The first one is `MASTER_ADDR`."""
    return _useful_to_all([(node.master_addr, node.way_address) for node in nodes])


def peer_addresses(nodes: Sequence[Node]) -> list[str]:
    """Where the connections of nodes come from, the same for all; by group rank."""
    return _useful_to_all([(node.peer_address, node.way_address) for node in nodes])


def _useful_to_all(places: Sequence[tuple[str, str]]) -> list[str]:
    """The address of each node.

    A node on the leader's machine came over the loopback interface, an address that is of use to its neighbours only.
    If others came from elsewhere, it is where these found the leader.

    Args:
        places: of each node its address, and that at which it found the leader.
    """
    here = {address for address, _ in places if is_loopback(address)}
    way_to_leader = next((way for address, way in places if way and address not in here), "")
    return [(way_to_leader or address) if address in here else address for address, _ in places]
