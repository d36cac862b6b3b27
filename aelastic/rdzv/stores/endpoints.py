"""An endpoint of one host and port: whether it is this machine, and what answers there.

Everything here is bounded, and only `first_words` sends any data.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from typing import Any

import anyio
from anyio.abc import SocketAttribute, SocketStream

from aelastic.base.host import names
from aelastic.base.host.ports import is_loopback
from aelastic.base.record import Record
from aelastic.errors import InputError, RendezvousConnectionError
from aelastic.rdzv.protocol.addresses import plain_address

# For a name server when nothing is urgent; agents of a job use `look_up_limit_s`.
RESOLVE_TIMEOUT_S = 10.0
# A machine answers in milliseconds, or its firewall never does; a lost packet is sent again after 1 s.
PROBE_TIMEOUT_S = 2.0
REFUSED = "connection refused"
_WORDS_MAX = 40


class Endpoint(Record):
    """One host and port."""

    host: str  # as the user wrote it, without the brackets of IPv6
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RefusedError(RendezvousConnectionError):
    """The port is closed: no process listens there.  `reason` is `REFUSED`."""


class Way(Record):
    """The two addresses of a connection to an endpoint that has worked."""

    address: str  # the endpoint's
    own_address: str  # ours


def look_up_limit_s(lease_s: float) -> float:
    """Returns how long an agent waits for a name server: short enough to connect, and to try again, within a lease."""
    return lease_s / 4


async def local_addresses_of(endpoint: Endpoint, within_s: float = RESOLVE_TIMEOUT_S) -> list[str]:
    """Returns the addresses of the endpoint's host that are this machine's.

    A name alone proves nothing: it may be an alias, or that of a service or container.  An address is this machine's if
    it can be bound here.

    Raises:
        RendezvousConnectionError: the name is not known, at least not yet.
        InputError: the host name is invalid.
    """
    found = await addresses_of(endpoint, within_s)
    return list(dict.fromkeys(str(sockaddr[0]) for family, sockaddr in found if _can_be_bound(family, sockaddr)))


async def local_address_of(endpoint: Endpoint) -> str | None:
    """Returns one of those addresses, loopback only if there is no other; `None` if it is another machine."""
    return first_of(await local_addresses_of(endpoint))


def first_of(addresses: Sequence[str]) -> str | None:
    """Returns the address by which others may know this machine."""
    return next((address for address in addresses if not is_loopback(address)), addresses[0] if addresses else None)


def listen_addresses(addresses: Sequence[str]) -> list[str]:
    """Returns where to listen for others that were given a name with these addresses here; none: at all addresses.

    A loopback address does not tell what the name means on other hosts, and neither does an unspecified address.
    """
    return list(addresses) if all(map(useful_elsewhere, addresses)) else []


async def other_hosts_of(endpoint: Endpoint, within_s: float = RESOLVE_TIMEOUT_S) -> list[str]:
    """Returns addresses that a local endpoint's name has on other machines, in a family in which it also has ours.

    Raises:
        RendezvousConnectionError, InputError: as `local_address_of`.
    """
    addresses = await addresses_of(endpoint, within_s)
    found = [(family, address[0], _can_be_bound(family, address)) for family, address in addresses]
    ours = {family for family, _, is_ours in found if is_ours}
    return [str(address) for family, address, is_ours in found if family in ours and not is_ours]


def useful_elsewhere(address: str) -> str:
    """Returns an address of this machine if other nodes may reach it, otherwise an empty string."""
    address = plain_address(address)
    is_of_no_use = is_loopback(address) or address in {"0.0.0.0", "::"} or "%" in address  # noqa: S104  compared only
    return "" if is_of_no_use else address


async def probe(endpoint: Endpoint, within_s: float = RESOLVE_TIMEOUT_S) -> Way:
    """Connects, then closes the connection.

    Raises:
        RefusedError: the port is closed.
        RendezvousConnectionError: the host is not known, or cannot be reached.
        InputError: the host name is invalid.
    """
    stream, way = await _connect(endpoint, within_s)
    await stream.aclose()
    return way


async def first_words(endpoint: Endpoint) -> str:
    """Returns what a server sends that waits for a line of text, or speaks first; empty if nothing comes in time."""
    data = b""
    with anyio.move_on_after(PROBE_TIMEOUT_S):
        try:
            stream, _ = await _connect(endpoint, PROBE_TIMEOUT_S)
            async with stream:
                await stream.send(b"GET / HTTP/1.0\r\n\r\n")
                data = await stream.receive(_WORDS_MAX)
        except (OSError, RendezvousConnectionError, anyio.EndOfStream, anyio.BrokenResourceError):
            pass  # it hangs up, as a TCPStore does
    return repr(data.decode(errors="replace").partition("\r\n")[0]) if data else ""


async def _connect(endpoint: Endpoint, within_s: float) -> tuple[SocketStream, Way]:
    reasons: list[str] = []
    is_refused = True
    for _, sockaddr in await addresses_of(endpoint, within_s):
        try:
            with anyio.fail_after(PROBE_TIMEOUT_S):
                stream = await anyio.connect_tcp(str(sockaddr[0]), endpoint.port)
        except TimeoutError:
            is_refused, reason = False, f"no answer within {PROBE_TIMEOUT_S:g} s"
        except OSError as error:
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
            is_refused &= isinstance(cause, ConnectionRefusedError)
            reason = os.strerror(cause.errno) if cause.errno else str(cause)
        else:
            # The kernel may give this port to this very connection, which then meets itself (RFC 9293, simultaneous
            # open).
            own, other = _ends(stream)
            if other is not None and own != other:
                return stream, Way(address=str(other[0]), own_address=plain_address(str(own[0])))
            await stream.aclose()
            is_refused &= other is not None
            reason = os.strerror(errno.ECONNRESET if other is None else errno.ECONNREFUSED)
        reasons.append(reason)
    reason = ", ".join(dict.fromkeys(reasons))
    words = f"cannot connect to the rendezvous endpoint {endpoint}: {reason}"
    if is_refused:
        raise RefusedError(words, reason=REFUSED)
    raise RendezvousConnectionError(words, reason=reason)


def _ends(stream: SocketStream) -> tuple[Any, Any]:
    """Returns our address and the peer's; `None` if the peer has already hung up (ENOTCONN, getpeername(2))."""
    try:
        sock = stream.extra(SocketAttribute.raw_socket)  # noqa: S610  not Django's
        return sock.getsockname(), sock.getpeername()
    except (OSError, AttributeError):  # uvloop has released the socket, which anyio does not expect
        return None, None


async def addresses_of(endpoint: Endpoint, within_s: float = RESOLVE_TIMEOUT_S) -> list[names.Address]:
    """Returns what the endpoint's host resolves to; raises as `local_address_of` does."""
    try:
        return await names.look_up(endpoint.host, within_s)
    except names.InvalidNameError:
        raise InputError(f"rendezvous endpoint {endpoint}: invalid host name") from None
    except OSError as error:
        reason = error.strerror or str(error)
    raise RendezvousConnectionError(
        f"cannot resolve the host of the rendezvous endpoint {endpoint}: {reason}: "
        f"check the name (getent hosts {endpoint.host})",
        reason=reason,
        topic="the-name-of-the-endpoint-cannot-be-resolved",
    )


def _can_be_bound(family: int, sockaddr: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((sockaddr[0], 0, *sockaddr[2:]))
    except OSError:
        return False
    return True
