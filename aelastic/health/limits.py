"""The door of the health server: who may come in, how many, how fast, and for how long.

What is behind it is aiohttp's; the door knows of bytes and seconds only, so it holds for whatever a client does, with a
request or without.

- Few are in at a time.  One more, and who has been in longest goes; first of those that have not asked anything yet.
  So a thousand silent clients keep nobody out who comes with a question.
- A connection is for one request, and ends after a while, whoever is slow: in asking, or in taking the answer.
- It may send so many bytes, of whatever.
- So many new ones are taken in a second.  Who comes faster waits in the kernel, not in our loop.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import anyio

from aelastic.aio.accept import OUT_OF_FILES_PAUSE_S, attach, next_connection

_log = logging.getLogger(__name__)

# A probe, a scraper and some people need a handful.  Of what a process may open (1,024 files by default), an eighth
# at most: the rest is for workers.
CONNECTIONS_MAX = 128
SHARE_OF_FILES = 8
CONNECTIONS_MIN = 4
# A scraper waits 10 s by default (Prometheus' `scrape_timeout`), a kubelet 1 s (`timeoutSeconds`).
LIFE_S = 10.0
# A browser's cookies for `localhost` have some KiB; a probe's request has 200 bytes.
REQUEST_BYTES_MAX = 64 << 10
# An answer costs up to a millisecond: so many in a second are a fifth of a core at most.  Who waits in the kernel's
# queue (`health_address.BACKLOG`) is let in within a second all the same.
ACCEPTS_PER_S = 200
ACCEPTS_AT_ONCE = 20
PAUSE_S = 0.02

Dropped: TypeAlias = Literal["slow", "large", "crowd"]
DROPPED: tuple[Dropped, ...] = ("slow", "large", "crowd")


def connections_max() -> int:
    """How many connections are open at a time, at most."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return max(CONNECTIONS_MIN, min(CONNECTIONS_MAX, files // SHARE_OF_FILES))


class ConnectionLimits:
    """Lets connections in from a listening socket, until cancelled.

    Args:
        listener: non-blocking.  Not closed here.
        make_inner: makes what answers on one connection.
        on_dropped: told of each connection that is dropped.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_inner: Callable[[], asyncio.Protocol],
        on_dropped: Callable[[Dropped], None],
    ) -> None:
        self._listener = listener
        self._make_inner = make_inner
        self._on_dropped = on_dropped
        self._most = connections_max()
        # Oldest first.
        self._asking: dict[asyncio.Protocol, _Connection] = {}
        self._answered: dict[asyncio.Protocol, _Connection] = {}
        self._is_told = False  # that there are no descriptors

    def __len__(self) -> int:
        return len(self._asking) + len(self._answered)

    async def run(self) -> None:
        allowed, since = float(ACCEPTS_AT_ONCE), anyio.current_time()
        while True:
            await anyio.wait_readable(self._listener)
            now = anyio.current_time()
            allowed, since = min(ACCEPTS_AT_ONCE, allowed + (now - since) * ACCEPTS_PER_S), now
            if allowed < 1:
                await anyio.sleep(PAUSE_S)
            while allowed >= 1 and await self._accept():
                allowed -= 1

    async def _accept(self) -> bool:
        try:
            conn = next_connection(self._listener)
        except OSError as error:
            if not self._is_told:
                self._is_told = True
                _log.warning("health checks can't be taken for now: %s", error.strerror)
            await anyio.sleep(OUT_OF_FILES_PAUSE_S)
            return False
        if conn is None:
            return False
        since = anyio.current_time()
        await attach([conn], lambda: _Connection(self, self._make_inner(), since))
        return True

    def has_asked(self, inner: asyncio.Protocol) -> None:
        """The request of a connection has come."""
        if (connection := self._asking.pop(inner, None)) is not None:
            self._answered[inner] = connection

    def drop_slow(self, now: float) -> None:
        """Ends connections whose time is over.  To be called every second or so."""
        for connection in [*self._asking.values(), *self._answered.values()]:
            if now - connection.since >= LIFE_S:
                self.drop(connection, "slow")

    def drop_all(self) -> None:
        for connection in [*self._asking.values(), *self._answered.values()]:
            self.forget(connection)
            connection.abort()

    def let_in(self, connection: _Connection) -> None:
        if len(self) >= self._most:
            self.drop(next(iter((self._asking or self._answered).values())), "crowd")
        self._asking[connection.inner] = connection

    def drop(self, connection: _Connection, why: Dropped) -> None:
        self._on_dropped(why)
        self.forget(connection)
        connection.abort()

    def forget(self, connection: _Connection) -> None:
        self._asking.pop(connection.inner, None)
        self._answered.pop(connection.inner, None)


class _Connection(asyncio.Protocol):
    """One connection: what comes is counted, and passed on."""

    def __init__(self, limits: ConnectionLimits, inner: asyncio.Protocol, since: float) -> None:
        self._limits = limits
        self._transport: Any = None
        self._bytes = 0
        self.inner = inner
        self.since = since

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._limits.let_in(self)
        self.inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        if self._bytes > REQUEST_BYTES_MAX:
            self._limits.drop(self, "large")
        else:
            self.inner.data_received(data)

    def eof_received(self) -> bool:
        self.inner.eof_received()
        return True  # it says no more, and may wait for its answer still

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.forget(self)
        self.inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()
