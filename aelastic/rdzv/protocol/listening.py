"""Where other agents reach this one, and so where it listens."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from aelastic.errors import InputError, RendezvousError
from aelastic.host.sockets import LOOPBACKS, HeldPort, is_address, is_loopback, loopback_address
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.endpoint_cell import EndpointCell
from aelastic.rdzv.stores.endpoints import RESOLVE_TIMEOUT_S, Endpoint, local_addresses_of, told_elsewhere

# Addresses that others are told beside a name; messages have a limit.
BESIDE_MAX = 8


def own_addresses(settings: RendezvousSettings, cell: EndpointCell) -> list[str]:
    """What others are told: addresses of this host, and the endpoint as the user wrote it."""
    if settings.is_on_loopback:
        return [loopback_address(settings.local_addr or "localhost")]
    if settings.local_addr:
        return [settings.local_addr]
    own = cell.own_address
    far = [own] if own and not is_loopback(own) else outward_addresses()
    return list(dict.fromkeys(each for each in (cell.endpoint_host, *far) if each)) or [loopback_address()]


def addresses_beside(told: Sequence[str], local: Sequence[str], cell: EndpointCell) -> list[str]:
    """What others are told beside the name of this host, for when no name server answers them.

    Args:
        told: as `own_addresses` gives it.
        local: as `local_addresses` gives it.
        cell: where this agent's connection to it comes from others may reach it, where its name says nothing here.
    """
    if any(map(is_address, told)):
        return []
    way = cell.own_address
    if local or not way or is_loopback(way):
        return list(local[:BESIDE_MAX])
    return [way]


async def local_addresses(settings: RendezvousSettings) -> list[str]:
    """Of this host, those of the name that others are told; none where that says nothing here."""
    if settings.local_addr and not settings.is_on_loopback:
        return await local_addresses_told(settings.local_addr, RESOLVE_TIMEOUT_S)
    return []


async def local_addresses_told(host: str, within_s: float) -> list[str]:
    """The addresses of this host behind a name that others are told; none if the name leads nowhere here."""
    with suppress(RendezvousError, InputError):  # it may be no name at all: others have told of it
        return told_elsewhere(await local_addresses_of(Endpoint(host, 0), within_s))
    return []


def listen_for_members(port: HeldPort, told: Sequence[str], local: Sequence[str]) -> None:
    """Listens where others are told to come.

    Args:
        told: as `own_addresses` gives it.
        local: as `local_addresses` gives it.
    """
    known = local or [each for each in map(loopback_address, told) if is_address(each)]
    port.listen_at([*known, *LOOPBACKS] if known else [])  # its own node comes over loopback


def outward_addresses() -> list[str]:
    """This machine's addresses on its way out, by the kernel's routes; no packet is sent (`connect(2)` on UDP)."""
    found = []
    # Addresses set aside for documentation (RFC 5737, RFC 3849): no host has them, so the default route counts.
    for family, somewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((somewhere, 9))
                found.append(str(probe.getsockname()[0]))
        except OSError:
            pass  # no such way
    return found
