"""Waits for descriptors, in a loop that can be cancelled, and accepts connections without dropping half-made ones."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable

import anyio
import anyio.lowlevel
import anyio.to_thread

# How long to wait for descriptors, which others have taken and may release.
OUT_OF_FILES_PAUSE_S = 1.0


async def wait_readable(fd: int | socket.socket) -> None:
    """Waits until there is something to read.  A loop around it can be cancelled, even if data never runs out.

    Under uvloop, a loop around `anyio.wait_readable` cannot: by the time anyio looks for a task to cancel, its wait is
    over.  The story behind it: another agent took over from a leader while clients kept connecting to it, and the old
    leader kept accepting them.
    """
    await anyio.lowlevel.checkpoint_if_cancelled()
    await anyio.wait_readable(fd)


def next_connection(listener: socket.socket) -> socket.socket | None:
    """Accepts the next pending connection of a non-blocking TCP socket; returns `None` if there is none.

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
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it, but not for accepted ones
        return conn


async def attach(conns: Iterable[socket.socket], make_protocol: Callable[[], asyncio.Protocol]) -> None:
    """Gives each connection its own protocol; closes one whose client has gone already.  Shielded from cancellation.

    asyncio's own server, if closed in the step in which it accepts a connection, drops that: the client gets neither an
    answer nor an end of the connection (CPython's `Server._attach`).  The story behind it: an agent stops leading while
    a node connects; the node's hello is never read, and when it looks elsewhere its place has been given away.
    """
    loop = asyncio.get_running_loop()

    async def attach_one(conn: socket.socket) -> None:
        try:
            await loop.connect_accepted_socket(make_protocol, conn)
        except OSError:
            conn.close()

    with anyio.CancelScope(shield=True):  # takes a step or two; a half-made connection would never be closed
        await asyncio.gather(*map(attach_one, conns))
