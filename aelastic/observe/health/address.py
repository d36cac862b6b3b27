"""The address of the health server: reads `TORCHELASTIC_HEALTH_CHECK_PORT`, and listens there."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import NoReturn

from aelastic.base.record import Record
from aelastic.errors import InputError

HEALTH_PORT_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"  # of the agent, not passed on to workers
# Clients are on this host, unless the user chooses otherwise.
LOOPBACK = "127.0.0.1"
# Clients wait in the kernel while we are busy; its usual limit (`somaxconn` before Linux 5.4) is as low.
BACKLOG = 128


class Address(Record):
    """Where to listen."""

    text: str  # as the user wrote it
    host: str
    port: int  # 0: any free port


def read_address(text: str) -> Address:
    """Reads `8080`, `host:8080` or `[::1]:8080`.

    Raises:
        InputError: it is none of these.
    """
    host, colon, digits = text.strip().rpartition(":")
    if not colon:
        host = LOOPBACK
    elif host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        _refuse(text, "put an IPv6 address in brackets, as in [::1]:8080")
    if not host:
        _refuse(text, "name the host before the colon; 0.0.0.0 or [::] means all addresses of this machine")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 5 and int(digits) <= 65535):
        _refuse(text, "use a port of 0 to 65535, or HOST:PORT")
    return Address(text, host, int(digits))


def listen_at(address: Address) -> socket.socket:
    """Returns a listening socket.  Looks the host's name up, which may block.

    Raises:
        InputError: the address cannot be used.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no name server would accept
        _refuse(address.text, f"the host cannot be found ({getattr(error, 'strerror', None) or error})")
    reason: OSError | None = None
    for family, _, _, _, where in sorted(found, key=lambda each: each[0] != socket.AF_INET):  # as most clients do
        try:
            return _listen(family, where)
        except OSError as error:
            reason = reason or error
    return _refuse(address.text, f"cannot listen there ({reason and reason.strerror}); 0 takes a free port")


def _listen(family: int, where: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # An agent that starts again must not wait for remains of the last one's connections (`tcp(7)`).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def close(listener: socket.socket) -> None:
    """Closes the socket, even if a forked worker has inherited it."""
    with suppress(OSError):  # closed already
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _refuse(text: str, why: str) -> NoReturn:
    raise InputError(f"{HEALTH_PORT_VARIABLE}={text}: {why}")
