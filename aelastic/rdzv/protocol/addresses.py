"""Where workers find the store of group rank 0, based on addresses that have worked for connections.

No names are looked up, forward or reverse: an agent's address is the source of its connection to the leader, and the
leader's is the one at which the others have reached it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv6Address, ip_address

from aelastic.base.host.ports import ADDRESSES_MAX, is_loopback
from aelastic.rdzv.protocol.messages import Node


@lru_cache(maxsize=ADDRESSES_MAX)  # called several times for each connection
def plain_address(address: str) -> str:
    """Returns an address in its plain form: IPv4 for an IPv4 address that an IPv6 socket reports."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return str(mapped or parsed)


def node_addresses(nodes: Sequence[Node]) -> list[str]:
    """Returns the address of each node, by group rank, the same for all nodes.  The first one is `MASTER_ADDR`."""
    return _useful_to_all([(node.master_addr, node.way_address) for node in nodes])


def peer_addresses(nodes: Sequence[Node]) -> list[str]:
    """Returns the source address of each node's connection, by group rank, the same for all nodes."""
    return _useful_to_all([(node.peer_address, node.way_address) for node in nodes])


def _useful_to_all(places: Sequence[tuple[str, str]]) -> list[str]:
    """Returns an address of each node that all nodes can use.

    A node on the leader's machine connects over loopback, and only its neighbours can use that address.  If others
    connect from elsewhere, its address is the one at which they reached the leader.

    Args:
        places: each node's address, and the address at which it reached the leader.
    """
    here = {address for address, _ in places if is_loopback(address)}
    way_to_leader = next((way for address, way in places if way and address not in here), "")
    return [(way_to_leader or address) if address in here else address for address, _ in places]
