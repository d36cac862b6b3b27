"""What asyncio and anyio lack for an agent: a clock for every callback, a mailbox, threads on a full host, accepting.

- `now`: the time of the loop, `wall_ms`: that of the host
- `Mailbox`: the one queue of a core's events
- `run_sync`, `in_thread`: what blocks, or may hang with a disk, also where the host refuses another thread
- `next_connection`, `attach`: connections, of which none is dropped half made
- `loop_factory`: event loops by name
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.to_thread

from aelastic.host.usage import is_refused_thread

T = TypeVar("T")
Args = TypeVarTuple("Args")

_log = logging.getLogger(__name__)

LOOPS = ("uvloop", "asyncio")
# Of exceptions of a loop.
TELL_INTERVAL_S = 60.0
# Of threads, and of the processes of others that count as such.
LOOK_AGAIN_S = 0.05
# Short scarcity is no news: a worker that dies of it takes its processes along.
TELL_AFTER_S = 1.0
# Of descriptors, which others have taken and may give back.
OUT_OF_FILES_PAUSE_S = 1.0


def now() -> float:
    """Monotonic seconds, as deadlines are given in: the loop's own clock, in tasks and in what the loop calls itself.

    anyio finds its clock by asking which library runs.  Where `sniffio` is installed, the answer is known in a task
    only: in a protocol's callback, a timer or a signal handler it is an exception.  So no module asks anyio (the
    linter's rule).

    Raises:
        RuntimeError: no loop runs in this thread.
    """
    return asyncio.get_running_loop().time()


def wall_ms() -> int:
    """Milliseconds since 1970 by this host's wall clock, which may jump: for numbers that outlive a process only."""
    return int(datetime.now(UTC).timestamp() * 1000)


class Mailbox(Generic[T]):
    """The queue of a core's events: the task that runs the core waits here.

    Its length is bounded by its writers: each task posts a known number of events and ends, and a connection is not
    read while too many of its messages wait here.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._failure: Exception | None = None
        self._arrived: asyncio.Future[None] | None = None  # while the reader waits

    def post(self, item: T) -> None:
        """Never blocks; safe in a signal handler of the loop."""
        self._items.append(item)
        self._wake_up()

    def fail(self, error: Exception) -> None:
        """What the loop called has failed: the reader raises it, and ends with it."""
        self._failure = self._failure or error
        self._wake_up()

    async def next(self, deadline: float | None) -> T | None:
        """The next item, or `None` once the deadline (of the loop's clock) has passed without one."""
        if not self._items and self._failure is None:  # to wait for nothing costs more than most events
            await self._arrival(deadline)
        if self._failure is not None:
            raise self._failure
        return self._items.popleft() if self._items else None

    async def _arrival(self, deadline: float | None) -> None:
        # A coordinator of many nodes waits here often: a cancel scope and an event would cost three times as much.
        loop = asyncio.get_running_loop()
        self._arrived = loop.create_future()
        timer = None if deadline is None else loop.call_at(deadline, self._wake_up)
        try:
            await self._arrived
        finally:
            self._arrived = None
            if timer is not None:
                timer.cancel()

    def _wake_up(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)


async def run_sync(
    function: Callable[[Unpack[Args]], T],
    *args: *Args,
    abandon_on_cancel: bool = False,
    limiter: anyio.CapacityLimiter | None = None,
) -> T:
    """As `anyio.to_thread.run_sync`, which it calls; waits for a thread where the host lets no more be started.

    A worker that starts threads or processes up to a limit (`pids.max`, `ulimit -u`) takes the agent's share, too.  So
    one thread is there before a worker runs (`keep_one`); what finds no thread waits until that one is free.
    """
    waits_since: float | None = None
    while True:
        try:
            return await anyio.to_thread.run_sync(function, *args, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
        except RuntimeError as error:
            if not is_refused_thread(error):
                raise
        at = now()
        waits_since = at if waits_since is None else waits_since
        if 0 <= at - waits_since - TELL_AFTER_S < LOOK_AGAIN_S:
            _log.warning("no more threads can be started on this host (ulimit -u, pids.max): output may be late")
        await anyio.sleep(LOOK_AGAIN_S)


async def keep_one() -> None:
    """Starts a thread that stays until the loop ends: of those that are idle, the last one used is kept.

    Raises:
        RuntimeError: the host has refused it for a second (`aelastic.host.usage.shortage_of` tells).
    """
    with anyio.move_on_after(TELL_AFTER_S):
        await run_sync(int)
        return
    await anyio.to_thread.run_sync(int)


async def in_thread(function: Callable[[], T], *, within_s: float, limiter: anyio.CapacityLimiter | None = None) -> T:
    """Runs a function that reads or writes files, and waits for it no longer than that.

    A thread that has not ended by then, or when the caller is cancelled, is left to itself: it ends when the disk
    answers, and what it returns is dropped.

    Args:
        function: what to run.
        within_s: how long to wait for it, and for a thread.
        limiter: limits the threads at a time; by default, no other caller is waited for.

    Raises:
        TimeoutError: it has not ended in time.
    """
    with anyio.fail_after(within_s):
        return await run_sync(function, abandon_on_cancel=True, limiter=limiter or anyio.CapacityLimiter(1))


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
    """Gives each connection a protocol of its own; one that has gone already gets none.  Not to be cancelled.

    asyncio's own server, closed in the step in which it has accepted a connection, drops that: the client gets neither
    an answer nor an end of the connection (CPython's `Server._attach`).  The story behind it: an agent stops
    coordinating while a node connects; the node's hello is never read, and when it looks elsewhere its place has been
    given away.
    """
    loop = asyncio.get_running_loop()

    async def attach_one(conn: socket.socket) -> None:
        try:
            await loop.connect_accepted_socket(make_protocol, conn)
        except OSError:
            conn.close()

    with anyio.CancelScope(shield=True):  # a step or two; a half-made connection would never be closed
        await asyncio.gather(*map(attach_one, conns))


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """The function that makes a loop of that name; asyncio's own where uvloop is not installed."""
    make: Callable[[], asyncio.AbstractEventLoop] = asyncio.SelectorEventLoop
    if name == "uvloop":
        try:
            import uvloop
        except ImportError as error:
            _log.info("uvloop cannot be imported (%s): running on asyncio", error)
        else:
            make = uvloop.new_event_loop

    def make_loop() -> asyncio.AbstractEventLoop:
        loop = make()
        loop.set_exception_handler(ExceptionsOnce())
        return loop

    return make_loop


class ExceptionsOnce:
    """The exception handler of a loop of ours: of what fails again and again, it shows one traceback in a minute."""

    def __init__(self) -> None:
        self._told_at = -math.inf
        self._untold = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if loop.time() - self._told_at < TELL_INTERVAL_S:
            self._untold += 1
            return
        more, self._untold, self._told_at = self._untold, 0, loop.time()
        loop.default_exception_handler(context)
        if more:
            _log.error("%d more exceptions of this event loop were not shown since the last one", more)
