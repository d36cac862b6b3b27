"""One connection between an agent and the leader: turns bytes into messages, and the reverse.

It uses callbacks instead of tasks: a leader has thousands of connections, each with a message every other second.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, cast

import anyio

from aelastic.base.host import names
from aelastic.base.host.resending import resend_soon
from aelastic.base.record import Record
from aelastic.rdzv.log.node import Close
from aelastic.rdzv.protocol.codec import HEAD_BYTES, Decoder, WireError
from aelastic.rdzv.protocol.handshake import Handshake, ProofError, Tagger

# A peer that reads nothing (suspended, or cut off) is dropped before it costs more memory than this.
UNSENT_MAX = 4 << 20
# Messages of one connection that wait to be handled; the peer's further messages stay in the network.
UNHANDLED_MAX = 64
# A network that works at all answers a connection attempt within this; SYNs are sent again after 1 s.
CONNECT_TIMEOUT_S = 2.5
# If the answer takes longer, a packet was probably lost.
FIRST_ATTEMPT_S = 0.2
# Times from one further attempt to the next: on a network that loses packets, one of several SYNs gets through sooner.
ATTEMPT_INTERVALS_S = (0.2, 0.3, 0.4, math.inf)
# Time for two round trips, while both ends may be busy with other work.
PROOF_TIMEOUT_S = 5.0
HANG_UP_S = 0.5  # for the other end to close as well
LINGER_0 = struct.pack("ii", 1, 0)


class Listener(Protocol):
    """Callbacks of a `Stream`."""

    def on_message(self, stream: Stream, message: Any) -> None: ...

    def on_unfinished(self, stream: Stream) -> None: ...

    def on_garbage(self, stream: Stream, error: WireError | ProofError) -> None: ...

    def on_closed(self, stream: Stream, reason: str) -> None: ...

    def on_failure(self, stream: Stream, error: Exception) -> None: ...


class Stream(asyncio.Protocol):
    """A connection, seen from either end.

    Its owner calls `handled` for each message; while too many are unhandled, nothing more is read.  An exception in a
    callback, here or in the listener, aborts only this connection (`on_failure`).

    Args:
        listener: called for each message, for a part of one, once for garbage, and once at the end.
        words: the messages that the other end may send: `codec.UPWARD` or `codec.DOWNWARD`.
        on_open: called when there is a connection.
        proof: the handshake that must succeed before a message is read or sent, or `None`.
        on_proved: called when it has succeeded.

    Attributes:
        is_proved: set when both ends are proved, or the connection is closed.
        refusal: why they are not proved.
        distrust: the error, if the other end was rejected.
    """

    def __init__(
        self,
        listener: Listener,
        words: dict[str, type[Record]],
        on_open: Callable[[Stream], None] = lambda _: None,
        proof: Handshake | None = None,
        on_proved: Callable[[Stream], None] = lambda _: None,
    ) -> None:
        self._listener = listener
        self._decoder = Decoder(words)
        self._on_open, self._on_proved = on_open, on_proved
        self._proof = proof  # until it is over
        self._proof_limit: asyncio.TimerHandle | None = None
        self._tagger: Tagger | None = None  # of frames to send
        self._unsent: list[bytes] = []  # frames that wait for the handshake
        self._flushed: list[Callable[[], None]] = []  # called when the kernel has taken all of it
        self._transport: asyncio.Transport | None = None
        self._is_deaf = self._has_hung_up = False
        self._unhandled = 0
        self._is_paused = False
        self.is_proved, self.closed = anyio.Event(), anyio.Event()
        self.refusal = ""
        self.distrust: ProofError | None = None
        self.is_reset = False  # the connection broke, or was aborted; otherwise one end closed it
        self.conn = 0  # its owner's number for it

    @property
    def peer(self) -> str:
        """The address at the other end."""
        return self._address("peername")

    @property
    def own_address(self) -> str:
        """The address at our end."""
        return self._address("sockname")

    def _address(self, which: str) -> str:
        name = self._transport.get_extra_info(which) if self._transport is not None else None
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def fileno(self) -> int:
        """The descriptor of the connection; -1 once it is closed."""
        conn = self._transport.get_extra_info("socket") if self._transport is not None else None
        return -1 if conn is None else int(conn.fileno())

    @property
    def unfinished_bytes(self) -> int:
        """The size of the messages that are not complete yet."""
        return self._decoder.unfinished_bytes

    @property
    def is_closing(self) -> bool:
        """Whether the connection is closed, or about to be."""
        return self._transport is None or self._has_hung_up or self._transport.is_closing()

    def handled(self) -> None:
        """Notes that the owner has handled a message, so there is room for another."""
        self._unhandled = max(0, self._unhandled - 1)
        if self._is_paused and self._unhandled <= UNHANDLED_MAX // 2 and not self._is_deaf:
            self._is_paused = False
            self._pass_on(b"")
            if not self._is_paused and self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def send(self, frame: bytes) -> None:
        """Sends a frame; never blocks.  Does nothing on a closed connection: `on_closed` was called."""
        if self._transport is None or self.is_closing:
            return
        if self._proof is not None:
            self._unsent.append(frame)
            return
        if self._tagger is not None:
            body = frame[HEAD_BYTES:]
            frame = frame[:HEAD_BYTES] + self._tagger.tag(body) + body
        self._transport.write(frame)
        if self._transport.get_write_buffer_size() > UNSENT_MAX:
            self.abort()

    def when_flushed(self, call: Callable[[], None]) -> None:
        """Calls a function once the kernel has taken everything that was sent; never if the connection ends before."""
        if self._transport is None or self._proof is not None or self._transport.get_write_buffer_size():
            self._flushed.append(call)
        else:
            call()

    def resume_writing(self) -> None:
        """Called by the loop when the write buffer is empty."""
        flushed, self._flushed = self._flushed, []
        for call in flushed:
            call()

    @property
    def how_closed(self) -> Close:
        """What the end of this connection proves: an orderly end, without half a message, is the end of the process."""
        is_orderly = not self.is_reset and not self._decoder.unfinished_bytes
        return Close.ORDERLY if is_orderly else Close.ABORTED

    def close(self) -> None:
        """Sends unsent data, then closes."""
        self._is_deaf = True
        if self._transport is not None:
            self._transport.close()

    def hang_up(self) -> None:
        """Sends unsent data, then closes once the other end has, so that its last messages do not cause a reset.

        A socket that is closed with unread data is reset, and a node whose connection was reset may live: the leader
        would wait a lease for that node to learn how the job ended.
        """
        if self._transport is None or self.is_closing:
            return
        self._is_deaf = self._has_hung_up = True
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        try:
            self._transport.write_eof()
        except OSError:  # the other end has reset it, and the loop has not noticed yet
            self._transport.close()
        else:
            asyncio.get_running_loop().call_later(HANG_UP_S, self._transport.close)

    def abort(self) -> None:
        """Closes now, with a reset: an orderly end would tell the other end that this process is gone."""
        self.is_reset = self._is_deaf = True
        if self._transport is None or self.fileno < 0:
            return
        # A socket that lingers for no time is reset when it is closed (socket(7), tcp(7)).
        conn = self._transport.get_extra_info("socket")
        with suppress(OSError):
            conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
        self._transport.abort()

    # Called by the loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=0)
        resend_soon(self._transport.get_extra_info("socket"))
        with self._ends_alone():
            self._on_open(self)
            if self._proof is None:
                self._begin()
            elif not self.is_closing:
                self._transport.write(self._proof.begin())
                late = ProofError(f"it proved nothing within {PROOF_TIMEOUT_S:g} s")
                self._proof_limit = asyncio.get_running_loop().call_later(PROOF_TIMEOUT_S, self._refuse, late)

    def _begin(self) -> None:
        """Both ends are proved, or need no proof."""
        self.is_proved.set()
        self._on_proved(self)

    def _refuse(self, error: ProofError) -> None:
        """Rejects the other end, at the handshake or at a wrong tag."""
        self.refusal, self.distrust = str(error), error
        self.is_reset = self._is_deaf = True
        with self._ends_alone():
            self._listener.on_garbage(self, error)
        if self._transport is not None:
            self._transport.write(error.answer)
        self.close()

    def _prove(self, data: bytes) -> bytes:
        """Continues the handshake; returns the data that came after it."""
        assert self._proof is not None and self._transport is not None
        try:
            self._transport.write(self._proof.feed(data))
        except ProofError as error:
            self._refuse(error)
            return b""
        if self._proof.tags is None:
            return b""
        rest, (self._tagger, self._decoder.tagger) = self._proof.rest, self._proof.tags
        self._proof = None
        self._stop_timer()
        for frame in self._unsent:
            self.send(frame)
        self._unsent.clear()
        self._begin()
        return rest

    def _stop_timer(self) -> None:
        if self._proof_limit is not None:
            self._proof_limit.cancel()

    def data_received(self, data: bytes) -> None:
        if self._proof is not None and not self._is_deaf:
            with self._ends_alone():
                data = self._prove(data)
            if not data:
                return
        if self._is_paused:
            self._decoder.hold(data)  # it was already on its way
        elif not self._is_deaf:
            try:  # called for each message: the generator of `_ends_alone` would take longer than the rest
                self._pass_on(data)
                if self._decoder.unfinished_bytes and not self._is_paused:
                    self._listener.on_unfinished(self)
            except Exception as error:  # noqa: BLE001  as in `_ends_alone`
                self._end(error)

    def _pass_on(self, data: bytes) -> None:
        try:
            for message in self._decoder.feed(data):
                self._unhandled += 1
                self._listener.on_message(self, message)
                if self._unhandled >= UNHANDLED_MAX and self._transport is not None:
                    self._is_paused = True
                    self._transport.pause_reading()
                    return
        except WireError as error:
            self._is_deaf = True
            self._listener.on_garbage(self, error)
        except ProofError as error:
            self._refuse(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reset |= error is not None
        self._stop_timer()
        if self._proof is not None:
            self.refusal = self.refusal or "it closed the connection before it proved anything"
        self.is_proved.set()
        self.closed.set()
        with self._ends_alone():
            self._listener.on_closed(self, "connection closed" if error is None else f"connection broken: {error}")

    @contextmanager
    def _ends_alone(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  a peer must not end this agent or the job
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._listener.on_failure(self, error)
        self.abort()


class NoConnectionError(Exception):
    """None of the addresses could be connected to.

    Attributes:
        is_refused: the host, or something in front of it, answered that no process listens at that port.
        is_here: the host is this machine, so its own kernel has answered.
    """

    def __init__(self, attempts: Sequence[tuple[str, OSError]], port: int, hosts: Sequence[str]) -> None:
        # asyncio's text is "[Errno 111] Connect call failed ('::1', 80, 0, 0)"; the kernel's says more.
        words = [os.strerror(e.errno) if e.errno and e.errno > 0 else e.strerror or str(e) for _, e in attempts]
        reasons = {f"{address}: {why}": None for (address, _), why in zip(attempts, words, strict=True)}
        super().__init__(f"cannot connect to port {port} ({'; '.join(reasons) or 'no address is known'})")
        # A name that cannot be resolved proves nothing about the port.
        connect_errors = [error for _, error in attempts if not isinstance(error, socket.gaierror)]
        self.is_refused = bool(connect_errors) and all(error.errno == errno.ECONNREFUSED for error in connect_errors)
        self.is_here = self.is_refused and all(_is_own(host) for host in hosts)


async def connect(addresses: Sequence[str], port: int, make: Callable[[], Stream], look_up_s: float) -> Stream:
    """Connects to the first address of a host that answers.

    Args:
        addresses: addresses or names.  A name with a slow look-up is skipped while there is another to try.
        port: the same at each address.
        make: makes the connection's protocol.
        look_up_s: how long to wait for a name server if there is nothing else to try.

    Raises:
        NoConnectionError: no address answers.
    """
    attempts: list[tuple[str, OSError]] = []
    unresolved: list[tuple[str, OSError]] = []
    tried: list[str] = []
    for within_s in (0.0, look_up_s):
        unresolved.clear()
        for address in addresses:
            try:
                hosts = [found.host for found in await names.look_up(address, within_s)]
            except OSError as error:
                unresolved.append((address, error))
                continue
            for host in hosts:
                tried.append(host)
                try:
                    return await _connect_to(host, port, make)
                except OSError as error:
                    attempts.append((address, error))
        is_any_late = any(isinstance(error, names.NoAnswerError) for _, error in unresolved)
        if tried or not is_any_late:
            break  # the caller tries again, with the look-ups that have finished by then
    raise NoConnectionError([*attempts, *unresolved], port, tried)


async def _connect_to(host: str, port: int, make: Callable[[], Stream]) -> Stream:
    """Connects to an address with one attempt or, if that takes long, with several in parallel.

    Raises:
        OSError: the address does not answer.
    """
    with anyio.move_on_after(FIRST_ATTEMPT_S):  # usually enough; several attempts take a task each
        return await _attempt(host, port, make)
    streams: list[Stream] = []
    errors: list[OSError] = [TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))]
    async with anyio.create_task_group() as tasks:

        async def attempt() -> None:
            try:
                streams.append(await _attempt(host, port, make))
            except OSError as error:
                errors.append(error)
            tasks.cancel_scope.cancel()

        with anyio.move_on_after(CONNECT_TIMEOUT_S):
            for interval_s in ATTEMPT_INTERVALS_S:
                tasks.start_soon(attempt)
                await anyio.sleep(interval_s)
        tasks.cancel_scope.cancel()
    for late in streams[1:]:
        late.abort()
    if not streams:
        raise errors[-1]
    return streams[0]


async def _attempt(host: str, port: int, make: Callable[[], Stream]) -> Stream:
    _, stream = await asyncio.get_running_loop().create_connection(make, host, port)
    return stream


def _is_own(address: str) -> bool:
    """Returns whether an address is this machine's: the kernel would then send from it.  No packet is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return bool(probe.getsockname()[0] == address)
    except OSError:
        return False
