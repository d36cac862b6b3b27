"""Limits the connections of the health server: how many, how fast, and for how long.

aiohttp limits the size of requests; this module limits connections.

- Few are open at a time.  To accept one more, the oldest that has not sent a request is closed, or else the oldest of
  all: a thousand silent clients cannot block a probe.
- A connection is for one request, and is closed after a while, however slow the client is.
- Connections are accepted at a limited rate; clients that come faster wait in the kernel, not in our loop.
"""

from __future__ import annotations

import logging
import resource
import socket
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import anyio

from aelastic.base.loop import clock
from aelastic.base.loop.sockets import OUT_OF_FILES_PAUSE_S, attach, next_connection, wait_readable

_log = logging.getLogger(__name__)

# A probe, a scraper and some people need a handful.  At most an eighth of the files that a process may open (1,024 by
# default): the rest is for workers.
CONNECTIONS_MAX = 128
SHARE_OF_FILES = 8
CONNECTIONS_MIN = 4
# A scraper waits 10 s by default (Prometheus' `scrape_timeout`), a kubelet 1 s (`timeoutSeconds`).
LIFE_S = 10.0
# An answer costs up to a millisecond, so this rate takes at most a fifth of a core.
ACCEPTS_PER_S = 200

Dropped: TypeAlias = Literal["slow", "crowd"]
DROPPED: tuple[Dropped, ...] = ("slow", "crowd")


def connections_max() -> int:
    """Returns how many connections may be open at a time."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return max(CONNECTIONS_MIN, min(CONNECTIONS_MAX, files // SHARE_OF_FILES))


class ConnectionLimits:
    """Accepts connections of a listening socket, within limits.

    Args:
        listener: a non-blocking socket.  Not closed here.
        make_handler: makes aiohttp's handler for one connection.
        on_dropped: called for each connection that is closed because of a limit.
    """

    def __init__(
        self, listener: socket.socket, make_handler: Callable[[], Any], on_dropped: Callable[[Dropped], None]
    ) -> None:
        self._listener = listener
        self._make_handler = make_handler
        self._on_dropped = on_dropped
        self._most = connections_max()
        self._since: dict[Any, float] = {}  # handlers of open connections, oldest first; lost ones until the next check
        self._answered: set[Any] = set()  # handlers whose request has come
        self._has_warned = False

    def __len__(self) -> int:
        """Returns how many connections are open."""
        self._forget_lost()
        return len(self._since)

    async def run(self) -> None:
        """Accepts connections, until cancelled."""
        while True:
            await wait_readable(self._listener)
            try:
                conn = next_connection(self._listener)
            except OSError as error:
                if not self._has_warned:
                    self._has_warned = True
                    _log.warning(
                        "the health server cannot accept connections for now: %s",
                        error.strerror,
                        extra={"topic": "the-health-server-cannot-answer"},
                    )
                await anyio.sleep(OUT_OF_FILES_PAUSE_S)
                continue
            if conn is not None:
                if len(self) >= self._most:
                    oldest = next(iter(self._since))
                    self._drop(next((each for each in self._since if each not in self._answered), oldest), "crowd")
                await self._attach(conn)
            await anyio.sleep(1 / ACCEPTS_PER_S)

    async def _attach(self, conn: socket.socket) -> None:
        handler = self._make_handler()
        await attach([conn], lambda: handler)
        self._since[handler] = clock.now()  # now: a handler without a transport is lost

    def has_asked(self, handler: Any) -> None:
        """Notes that the request of a connection has arrived."""
        self._answered.add(handler)

    def drop_slow(self, now: float) -> None:
        """Closes connections whose time is over.  Call it about every second."""
        self._forget_lost()
        for handler in [each for each, since in self._since.items() if now - since >= LIFE_S]:
            self._drop(handler, "slow")

    def drop_all(self) -> None:
        self._forget_lost()
        for handler in self._since:
            handler.transport.abort()

    def _drop(self, handler: Any, why: Dropped) -> None:
        self._on_dropped(why)
        del self._since[handler]
        handler.transport.abort()

    def _forget_lost(self) -> None:
        # aiohttp's handlers have a transport while they are connected.
        self._since = {each: since for each, since in self._since.items() if each.transport is not None}
        self._answered = {each for each in self._answered if each.transport is not None}
