"""Connections that have not identified themselves: limited in number, memory, and log lines (one a minute).

Any program that can reach the leader's port may connect and send nothing, or half a message.  Agents identify
themselves at once.  So if there are too many others, the oldest from the address with the most of them is dropped, or
the one with the most unfinished data.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable

import anyio

from aelastic.base.loop import clock
from aelastic.base.loop.reports import RareWarnings, described
from aelastic.base.loop.sockets import OUT_OF_FILES_PAUSE_S, attach, next_connection, wait_readable
from aelastic.rdzv.protocol.addresses import plain_address
from aelastic.rdzv.protocol.handshake import ProofError
from aelastic.rdzv.protocol.stream import Stream

_log = logging.getLogger(__name__)

# All agents of a job may connect at the same moment, and again before their old connections are known to be broken.
UNAUTHENTICATED_MIN = 256
PER_NODE = 2
# From one address, which all nodes of a job may share.
PER_ADDRESS_MIN = 64
# The total size of incomplete messages.
UNFINISHED_BYTES_MAX = 4 << 20
# How many connections are accepted before messages of open ones are read.
ACCEPTS_AT_ONCE = 128


class UnauthenticatedPeers:
    """The connections that have not identified themselves, of all ports of an agent: they share its descriptors.

    Args:
        max_nodes: the job's.
        files_max: descriptors that connections may use; higher ones are for the workers.
    """

    def __init__(self, max_nodes: int, files_max: float = math.inf) -> None:
        self._files_max = files_max
        self._count_max = max(UNAUTHENTICATED_MIN, PER_NODE * max_nodes)
        self._of_address_max = max(PER_ADDRESS_MIN, PER_NODE * max_nodes)
        self._room: float = math.inf  # for them, once the descriptors were used up
        self._streams: dict[Stream, str] = {}  # and their addresses; the oldest first
        self._of_address: dict[str, dict[Stream, None]] = {}
        self._unfinished: dict[Stream, int] = {}  # bytes
        self._unfinished_sum = 0
        self.warnings = RareWarnings(_log)

    async def accept(self, listener: socket.socket, make_stream: Callable[[], Stream]) -> None:
        """Makes streams of the connections that come in at a port.  Runs until cancelled."""
        listener.setblocking(False)
        while True:
            await wait_readable(listener)
            conns: list[socket.socket] = []
            failure: OSError | None = None
            try:
                while len(conns) < ACCEPTS_AT_ONCE and (conn := next_connection(listener)) is not None:
                    conns.append(conn)
                    if conn.fileno() >= self._files_max:
                        break  # one for each that is dropped
            except OSError as error:
                failure = error
            await attach(conns, make_stream)
            if failure is not None:
                self.warnings.warn("cannot accept connections: %s", failure.strerror, now=clock.now())
                await anyio.sleep(OUT_OF_FILES_PAUSE_S)

    def add(self, stream: Stream, now: float) -> None:
        """Adds a new connection, and drops another if there are too many."""
        peer = self._streams[stream] = plain_address(stream.peer)
        of_peer = self._of_address.setdefault(peer, {})
        of_peer[stream] = None
        if len(of_peer) > self._of_address_max:
            self._drop(
                next(iter(of_peer)), now, f"{len(of_peer)} connections from there have not identified themselves"
            )
        elif len(self._streams) > self._count_max:
            self._drop(self._oldest_of_most(), now, f"{len(self._streams)} connections have not identified themselves")
        elif stream.fileno >= self._files_max or len(self._streams) > self._room:
            self._room = max(len(self._streams) - 1, 1)  # the next one gets the number of the one that is dropped
            self._drop(self._oldest_of_most(), now, "too few files may be opened for more (ulimit -n)")

    def _oldest_of_most(self) -> Stream:
        most = max(self._of_address, key=lambda peer: len(self._of_address[peer]))
        return next(iter(self._of_address[most]))

    def note(self, stream: Stream, now: float) -> None:
        """Notes that a connection has sent a part of a message."""
        if stream not in self._streams:
            return
        self._unfinished_sum += stream.unfinished_bytes - self._unfinished.get(stream, 0)
        self._unfinished[stream] = stream.unfinished_bytes
        if self._unfinished_sum > UNFINISHED_BYTES_MAX:
            largest = max(self._unfinished, key=self._unfinished.__getitem__)
            self._drop(largest, now, f"messages of {len(self._unfinished)} connections are not complete")

    def forget(self, stream: Stream) -> bool:
        """Removes a connection that has identified itself or closed; returns whether it had not identified itself."""
        peer = self._streams.pop(stream, None)
        if peer is not None:
            del self._of_address[peer][stream]
            if not self._of_address[peer]:
                del self._of_address[peer]
        if not self._streams:
            self._room = math.inf
        self._unfinished_sum -= self._unfinished.pop(stream, 0)
        return peer is not None

    def refuse(self, stream: Stream, why: ProofError | str) -> None:
        """Logs that its agent is not one of this job, or is no longer trusted; its stream closes."""
        self.warnings.warn("refused %s: %s", plain_address(stream.peer), why, now=clock.now())

    def on_failure(self, stream: Stream, error: Exception) -> None:
        """Logs an unexpected error in handling a connection, which is then aborted."""
        peer = plain_address(stream.peer)
        self.warnings.warn("aborted the connection with %s: %s", peer, described(error), now=clock.now())

    def _drop(self, stream: Stream, now: float, why: str) -> None:
        self.forget(stream)
        self.warnings.warn("dropped a connection from %s: %s", plain_address(stream.peer), why, now=now)
        stream.abort()
