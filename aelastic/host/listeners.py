"""Sockets that listen: for every host that reaches this one, or for this host's processes only."""

from __future__ import annotations

import errno
import socket
from ipaddress import ip_address

# Thousands of workers connect at the same moment; the kernel caps this at net.core.somaxconn.
BACKLOG = 4096
LOOPBACKS = ("127.0.0.1", "::1")
# Another process may have the same port of the other loopback address.
TRIES_MAX = 20
_NO_SUCH_ADDRESS = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


def listen(port: int, address: str = "") -> socket.socket:
    """A listening socket.

    Args:
        port: 0 picks a free one.
        address: of this machine; without one on all interfaces, IPv6 and IPv4.

    Raises:
        OSError: the port is in use, or not allowed.
        OverflowError: it is no port.
    """
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)


def is_loopback(host: str) -> bool:
    """Whether the host, an address or a name, is this one for every client.  No name server is asked."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_address(host: str = "localhost") -> str:
    """The address of a loopback host: IPv4's for a name, unless this machine has none."""
    if host != "localhost":
        return host
    try:
        with socket.socket() as probe:
            probe.bind((LOOPBACKS[0], 0))
    except OSError:
        return LOOPBACKS[1]
    return LOOPBACKS[0]


def listen_on_loopback(port: int, host: str = "localhost") -> list[socket.socket]:
    """Listening sockets, of one port, for clients on this host, which connect by name or by either address.

    torch's TCPStore resolves a name to IPv6 first, and then tries no other address until its timeout: each address that
    the name may lead to must listen.

    Args:
        port: 0 picks a free one.
        host: as clients know it: an address, or `localhost`.

    Returns:
        The first is the one that most clients of `localhost` come to.

    Raises:
        OSError: the port is in use, or not allowed.
        OverflowError: it is no port.
    """
    if host not in {"localhost", *LOOPBACKS}:
        return [listen(port, host)]
    for tries_left in reversed(range(TRIES_MAX)):
        listeners: list[socket.socket] = []
        try:
            for address in _preferred_first():
                _add(listeners, port, address)
        except OSError as error:
            for listener in listeners:
                listener.close()
            if port or error.errno != errno.EADDRINUSE or not listeners or not tries_left:
                raise
        else:
            break
    if not listeners:
        raise OSError(errno.EADDRNOTAVAIL, "this host has no loopback address")
    return listeners


def _add(listeners: list[socket.socket], port: int, address: str) -> None:
    try:
        listeners.append(listen(listeners[0].getsockname()[1] if listeners else port, address))
    except OSError as error:
        if error.errno not in _NO_SUCH_ADDRESS:  # else this machine has no IPv6, or no IPv4
            raise


def _preferred_first() -> list[str]:
    try:
        found = socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)  # in /etc/hosts: no name server is asked
    except OSError:
        return list(LOOPBACKS)
    first = str(found[0][4][0])
    return sorted(LOOPBACKS, key=lambda address: address != first)
