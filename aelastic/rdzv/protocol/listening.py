"""The addresses at which other agents reach this one, and at which it therefore listens."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from aelastic.base.host.ports import LOOPBACKS, HeldPort, is_address, is_loopback, loopback_address
from aelastic.errors import InputError, RendezvousError
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.endpoint_cell import EndpointCell
from aelastic.rdzv.stores.endpoints import RESOLVE_TIMEOUT_S, Endpoint, listen_addresses, local_addresses_of

# How many addresses others get besides a name; messages have a limit.
BESIDE_MAX = 8


def own_addresses(settings: RendezvousSettings, cell: EndpointCell) -> list[str]:
    """Returns the addresses that others get: those of this host, and the endpoint as the user wrote it."""
    if settings.is_on_loopback:
        return [loopback_address(settings.local_addr or "localhost")]
    if settings.local_addr:
        return [settings.local_addr]
    own = cell.own_address
    far = [own] if own and not is_loopback(own) else outward_addresses()
    return list(dict.fromkeys(each for each in (cell.endpoint_host, *far) if each)) or [loopback_address()]


def addresses_beside(given: Sequence[str], local: Sequence[str], cell: EndpointCell) -> list[str]:
    """Returns the addresses that others get besides the name of this host, in case no name server answers them.

    Args:
        given: the result of `own_addresses`.
        local: the result of `local_addresses`.
        cell: if `local` is empty, the source address of this agent's connection to the cell is returned.
    """
    if any(map(is_address, given)):
        return []
    way = cell.own_address
    if local or not way or is_loopback(way):
        return list(local[:BESIDE_MAX])
    return [way]


async def local_addresses(settings: RendezvousSettings) -> list[str]:
    """Returns the addresses that the name given to others has on this host; none if it has no useful ones here."""
    if settings.local_addr and not settings.is_on_loopback:
        return await local_addresses_of_name(settings.local_addr, RESOLVE_TIMEOUT_S)
    return []


async def local_addresses_of_name(host: str, within_s: float) -> list[str]:
    """Returns this host's addresses behind a name that others were given; none if the name has no useful ones here."""
    with suppress(RendezvousError, InputError):  # another agent sent it, so it may not be a valid name
        return listen_addresses(await local_addresses_of(Endpoint(host, 0), within_s))
    return []


def listen_for_members(port: HeldPort, given: Sequence[str], local: Sequence[str]) -> None:
    """Listens at the addresses that others were given.

    Args:
        given: the result of `own_addresses`.
        local: the result of `local_addresses`.
    """
    known = local or [each for each in map(loopback_address, given) if is_address(each)]
    port.listen_at([*known, *LOOPBACKS] if known else [])  # its own node connects over loopback


def outward_addresses() -> list[str]:
    """Returns the source addresses that the kernel picks for outgoing traffic; sends nothing (`connect(2)` on UDP)."""
    found = []
    # Addresses set aside for documentation (RFC 5737, RFC 3849): no host has them, so the default route counts.
    for family, somewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((somewhere, 9))
                found.append(str(probe.getsockname()[0]))
        except OSError:
            pass  # no route in this address family
    return found
