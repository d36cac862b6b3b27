"""Listening sockets, for every host that reaches this one, or for the processes of this host only."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import ip_address

_log = logging.getLogger(__name__)
# Thousands of workers may connect at the same moment; the kernel caps this at net.core.somaxconn.
BACKLOG = 4096
# More than a job has nodes: each round looks at those of all nodes, and a cache that is too small would not help.
ADDRESSES_MAX = 1 << 14
LOOPBACKS = ("127.0.0.1", "::1")
_NO_SUCH_ADDRESS = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


def listen(port: int, address: str = "") -> socket.socket:
    """Opens a listening socket.

    Args:
        port: 0 picks a free one.
        address: an address of this machine; "": all interfaces, IPv6 and IPv4.

    Raises:
        OSError: the port is in use, or not allowed.
        OverflowError: it is not a port.
    """
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)


@lru_cache(maxsize=ADDRESSES_MAX)
def is_address(host: str) -> bool:
    """Whether the host is an address rather than a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=ADDRESSES_MAX)
def is_loopback(host: str) -> bool:
    """Whether the host, an address or a name, is this one for every client.  Does not ask a name server."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_address(host: str = "localhost") -> str:
    """Returns the address of a loopback host: IPv4's for a name, unless this machine has none."""
    if host != "localhost":
        return host
    try:
        with socket.socket() as probe:
            probe.bind((LOOPBACKS[0], 0))
    except OSError:
        return LOOPBACKS[1]
    return LOOPBACKS[0]


def listen_at(port: int, addresses: Sequence[str]) -> list[socket.socket]:
    """Opens listening sockets, all on one port, at advertised addresses.

    torch's TCPStore resolves a name to IPv6 first, and then tries no other address until its timeout: each address to
    which a name may resolve must listen.

    Args:
        port: 0 picks a free one.
        addresses: if it is empty, or contains one that this machine does not have: all addresses.  A loopback address
                  that it does not have is left out.

    Raises:
        OSError: the port is in use, or not allowed.
        OverflowError: it is not a port.
    """
    listeners: list[socket.socket] = []
    try:
        for address in dict.fromkeys(addresses):
            number = listeners[0].getsockname()[1] if listeners else port
            listeners += filter(None, [_listen_if_here(number, address)])
    except OSError as error:
        for listener in listeners:
            listener.close()
        if error.errno not in _NO_SUCH_ADDRESS:
            raise
        listeners = []
    return listeners or [listen(port)]


def _listen_if_here(port: int, address: str) -> socket.socket | None:
    try:
        return listen(port, address)
    except OSError as error:
        # This machine may have no IPv6, or no IPv4.
        if error.errno not in _NO_SUCH_ADDRESS or not is_loopback(address):
            raise
        return None


def is_at_all(listener: socket.socket) -> bool:
    """Whether the socket listens at all addresses of this host."""
    return bool(ip_address(listener.getsockname()[0].partition("%")[0]).is_unspecified)


class HeldPort:
    """A port of this host that nobody else can get, and that listens at advertised addresses.

    A socket at all addresses holds it without accepting connections, and lets other sockets of this process do so
    (`SO_REUSEADDR` in socket(7)).  Once it listens at an address it continues to: otherwise a process with a copy of
    the socket would block the address later.

    Args:
        number: 0 picks a free one.
        what: its purpose, for a message.
        is_bind_all: listen at all addresses, whatever is advertised.

    Raises:
        OSError: the port is in use, or not allowed.
        OverflowError: it is not a port.
    """

    def __init__(self, number: int = 0, what: str = "", *, is_bind_all: bool = False) -> None:
        self._what, self._is_bind_all = what, is_bind_all
        is_dual = socket.has_dualstack_ipv6()
        self._held = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET)
        self._kept: dict[str, socket.socket] = {}  # by address; "": all
        self.listeners: list[socket.socket] = []  # those at the advertised addresses, in their order
        try:
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_dual:
                self._held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._held.bind(("", number))
        except BaseException:
            self._held.close()
            raise
        self.number: int = self._held.getsockname()[1]

    def listen_at(self, addresses: Sequence[str]) -> bool:
        """Listens at advertised addresses; if that is not possible, at all, or where it has listened before.

        Returns:
            Whether it listens at the advertised addresses.
        """
        addresses = () if self._is_bind_all else tuple(dict.fromkeys(addresses))
        if "" not in self._kept:
            is_first = not self._kept
            try:
                for address in addresses:
                    self._open(address)
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise
                addresses = ()
            if is_first and not addresses:
                self._close_kept()
            if not self._kept:
                self._open("")
                if not self._is_bind_all:
                    _log.info("%s listens at all addresses of this host and advertises none of them", self._what)
        self.listeners = [self._kept[each] for each in addresses if each in self._kept] or list(self._kept.values())
        return bool(addresses) and "" not in self._kept

    def _open(self, address: str) -> None:
        if address in self._kept:
            return
        try:
            listener = _listen_if_here(self.number, address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            self._held.close()  # some kernels (gVisor's) let nothing listen beside a bound socket
            listener = _listen_if_here(self.number, address)
        if listener is not None:
            self._kept[address] = listener

    def close(self) -> None:
        self._held.close()
        self._close_kept()

    def _close_kept(self) -> None:
        for listener in self._kept.values():
            listener.close()
        self.listeners, self._kept = [], {}
