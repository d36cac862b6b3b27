"""Where workers find the store of group rank 0, from what connections have shown to work.

No name is looked up here, and none is turned around: an agent is where its connection to the coordinator
comes from, and the coordinator's own is where the others have reached it.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address

from aelastic.host.sockets import is_loopback
from aelastic.rdzv.protocol.messages import Node


def plain_address(address: str) -> str:
    """An address as it is written: an IPv4 one that came through an IPv6 socket is an IPv4 one."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return str(mapped or parsed)


def master_address(nodes: Sequence[Node]) -> str:
    """`MASTER_ADDR` for a round, the same for all.

    A node on the coordinator's machine came over the loopback interface, an address that is of use to its neighbours
    only.  If others came from elsewhere, it is where these found the coordinator.

    Args:
        nodes: by group rank.
    """
    master = nodes[0].master_addr
    if not is_loopback(master):
        return master
    ways = (node.way_address for node in nodes if not is_loopback(node.master_addr))
    return next((way for way in ways if way), master)


def peer_addresses(nodes: Sequence[Node]) -> list[str]:
    """Where the connections of nodes come from, the same for all; by group rank."""
    located = [node.replace(master_addr=node.peer_address) for node in nodes]
    return [master_address([node, *located]) for node in located]
