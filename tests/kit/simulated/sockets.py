"""Sockets of simulated processes: a world's connections as asyncio transports, and listening ports.

They behave as `asyncio.Protocol`s, `next_connection` and the owners of a `HeldPort` expect of real ones.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from asyncio import Future, Protocol
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kit.simulated.world import FIN, RST, End, Listener

if TYPE_CHECKING:
    from kit.simulated.event_loop import EventLoop
    from kit.simulated.process import SimulatedProcess


class Socket:
    """A process's view of a connection."""

    def __init__(self, end: End, number: int) -> None:
        self.end, self._number = end, number
        self._is_closed, self._lingers = False, True

    def fileno(self) -> int:
        return -1 if self._is_closed else self._number

    def setblocking(self, flag: bool) -> None:
        """None ever blocks."""

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_LINGER):
            self._lingers = False

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._lingers:
            self.end.close()
        else:
            self.end.reset()


class ListeningSocket:
    """A port that listens."""

    def __init__(self, process: SimulatedProcess, port: int) -> None:
        self._process, self._number = process, process.new_descriptor()
        self._listener = Listener(process.world, process, port, self._on_connection)
        process.listening[self._number] = self

    @property
    def has_connections(self) -> bool:
        return bool(self._listener.backlog)

    def fileno(self) -> int:
        return self._number

    def setblocking(self, flag: bool) -> None:
        """None ever blocks."""

    def accept(self) -> tuple[Socket, tuple[str, int]]:
        if not self._listener.backlog:
            raise BlockingIOError
        end = self._listener.backlog.popleft()
        return Socket(end, self._process.new_descriptor()), end.peer_address

    def _on_connection(self) -> None:
        self._process.post(self, lambda: self._process.loop.on_readable(self))

    def close(self) -> None:
        if self._process.listening.pop(self._number, None) is not None:
            self._listener.close()


class SimulatedPort:
    """A port of the running process's host (`HeldPort`): once it listens, it does so at all addresses."""

    def __init__(self, number: int = 0, what: str = "", *, is_bind_all: bool = False) -> None:
        loop: Any = asyncio.get_running_loop()
        self._process: SimulatedProcess = loop.process
        self.number = number or self._process.world.new_port()
        self.listeners: list[ListeningSocket] = []

    def listen_at(self, addresses: Sequence[str]) -> bool:
        if not self.listeners:
            self.listeners = [ListeningSocket(self._process, self.number)]
        return True

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()
        self.listeners = []


class Transport(asyncio.Transport):
    """asyncio's view of a connection; it starts reading once its protocol knows of it."""

    def __init__(self, loop: EventLoop, sock: Socket, protocol: Protocol, begun: Future[None]) -> None:
        end = sock.end
        super().__init__({"peername": end.peer_address, "sockname": end.own_address, "socket": sock})
        self._loop, self._socket, self._end, self._protocol = loop, sock, end, protocol
        self._is_closing = self._is_paused = self._has_written_eof = False
        loop.call_soon(protocol.connection_made, self)
        loop.call_soon(self._start_reading)
        loop.call_soon(_begin, begun)

    def _start_reading(self) -> None:
        self._end.reader = self
        self._end.pump()

    # Called by the end.

    def is_reading(self) -> bool:
        return not self._is_paused and not self._is_closing

    def on_item(self, item: Any) -> None:
        if item is RST:
            self._close(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
        elif item is FIN:
            if not self._protocol.eof_received():
                self.close()
        else:
            self._protocol.data_received(item)

    def on_sent(self) -> None:
        if not self._is_closing:
            self._protocol.resume_writing()

    # Called by the protocol.

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Sets nothing: only data held back by a cut is unsent; the kernel takes all other data at once."""

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._loop.call_soon(self._end.pump)

    def write(self, data: Any) -> None:
        if not data or self._is_closing:
            return
        assert not self._has_written_eof, "asyncio: cannot call write() after write_eof()"
        if self._end.is_reset:
            self._close(BrokenPipeError(errno.EPIPE, "Broken pipe"))
        else:
            self._end.send(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self._end.unsent_bytes

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._is_closing:
            self._has_written_eof = True
            self._end.shut_down()

    def close(self) -> None:
        self._close(None)

    def abort(self) -> None:
        self._close(None)

    def _close(self, error: OSError | None) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(partial(self._lose, error))

    def _lose(self, error: OSError | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._socket.close()


def _begin(begun: Future[None]) -> None:
    if not begun.done():
        begun.set_result(None)
