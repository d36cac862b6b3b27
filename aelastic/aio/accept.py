"""Accept loop that never drops a half-attached connection on cancellation (asyncio's Server does).

asyncio's own server, closed in the step in which it has accepted a connection, drops that: the client gets neither an
answer nor an end of the connection (CPython's `Server._attach`).  The story behind it: an agent stops coordinating
while a node connects; the node's hello is never read, and when it looks elsewhere its place has been given away.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable

import anyio

# Of descriptors, which others have taken and may give back.
OUT_OF_FILES_PAUSE_S = 1.0


def next_connection(listener: socket.socket) -> socket.socket | None:
    """The next connection that waits at a TCP socket that does not block; `None` if none does.

    Raises:
        OSError: there are no descriptors left, or no memory.
    """
    while True:
        try:
            conn, _ = listener.accept()
        except BlockingIOError:
            return None
        except ConnectionAbortedError:
            continue  # it came and went
        conn.setblocking(False)
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does so, but not for accepted ones
        return conn


async def attach(conns: Iterable[socket.socket], make_protocol: Callable[[], asyncio.Protocol]) -> None:
    """Gives each connection a protocol of its own; one that has gone already gets none.  Not to be cancelled."""
    loop = asyncio.get_running_loop()

    async def attach_one(conn: socket.socket) -> None:
        try:
            await loop.connect_accepted_socket(make_protocol, conn)
        except OSError:
            conn.close()

    with anyio.CancelScope(shield=True):  # a step or two; a half-made connection would never be closed
        await asyncio.gather(*map(attach_one, conns))
