"""What asyncio and anyio lack for an agent: a clock for every callback, a mailbox, waiting for what blocks or grows.

- `now`: the time of the loop, `wall_ms`: that of the host
- `Mailbox`: the one queue of a core's events
- `run_sync`, `in_thread`: what blocks, or may hang with a disk, also where the host refuses another thread
- `wait_readable`: waits for a descriptor, in a loop that can be cancelled
- `next_connection`, `attach`: connections, of which none is dropped half made
- `Growth`, `wait_opened`: files that grow, or are opened
- `RareWarnings`: a log that others cannot fill; `described`: an unexpected exception in one line
- `loop_factory`: event loops by name
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import os
import socket
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.lowlevel
import anyio.to_thread

from aelastic.host.usage import is_refused_thread

T = TypeVar("T")
Args = TypeVarTuple("Args")

_log = logging.getLogger(__name__)

LOOPS = ("uvloop", "asyncio")
# Of exceptions of a loop, and of what others do to an agent, who may do it all the time.
TELL_INTERVAL_S = 60.0
# Of threads, and of the processes of others that count as such.
LOOK_AGAIN_S = 0.05
# Short scarcity is no news: a worker that dies of it takes its processes along.
TELL_AFTER_S = 1.0
# Of descriptors, which others have taken and may give back.
OUT_OF_FILES_PAUSE_S = 1.0
# Characters of an exception, of which a part may be what came in.
DESCRIBED_MAX = 200
# Where the kernel does not tell of files that grow: as often as torch's agent looks at its log files.
LOOK_AT_FILES_S = 0.1
# The watch that stands for all of them: more happened than the kernel keeps (IN_Q_OVERFLOW).
LOST = -1

# linux/inotify.h
IN_MODIFY = 0x00000002
IN_OPEN = 0x00000020
IN_ONESHOT = 0x80000000
# An event of a file: watch, mask, cookie, and the length of a name that files don't have here.
_EVENT_INTS = 4


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
        self._arrived: asyncio.Future[None] | None = None  # while the reader waits

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be handled."""
        return not self._items

    def post(self, item: T) -> None:
        """Never blocks; safe in a signal handler of the loop."""
        self._items.append(item)
        self._wake_up()

    async def next_by(self, deadline: Callable[[], float | None]) -> T | None:
        """As `next`, but computes the deadline only if nothing waits to be handled."""
        return self._items.popleft() if self._items else await self.next(deadline())

    async def next(self, deadline: float | None) -> T | None:
        """The next item, or `None` once the deadline (of the loop's clock) has passed without one."""
        if not self._items:  # to wait for nothing costs more than most events
            await self._arrival(deadline)
        return self._items.popleft() if self._items else None

    async def _arrival(self, deadline: float | None) -> None:
        # A leader of many nodes waits here often: a cancel scope and an event would cost three times as much.
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
            _log.warning(
                "this host cannot start more threads (ulimit -u, pids.max): output may be late",
                extra={"topic": "the-host-is-out-of-processes-or-memory"},
            )
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


async def wait_readable(fd: int | socket.socket) -> None:
    """Waits until there is something to read.  A loop around it can be cancelled, even if data never runs out.

    Under uvloop, a loop around `anyio.wait_readable` cannot: by the time anyio looks for a task to cancel, its wait is
    over.  The story behind it: another agent took over from a leader while clients kept connecting to it, and the old
    leader kept accepting them.
    """
    await anyio.lowlevel.checkpoint_if_cancelled()
    await anyio.wait_readable(fd)


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


class RareWarnings:
    """Warnings about what others do to an agent: at most one in a minute with the same words.

    Args:
        log: where they go.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: dict[str, tuple[float, int]] = {}  # when a message was told, and how many have not been since

    def warn(self, message: str, *args: object, now: float) -> None:
        """Warns; the next warning with these words says how many there were meanwhile."""
        told_at, untold = self._told.get(message, (-math.inf, 0))
        if now - told_at < TELL_INTERVAL_S:
            self._told[message] = told_at, untold + 1
            return
        self._told[message] = now, 0
        more = f" (and {untold} more since the last such line)" if untold else ""
        self._log.warning(f"{message}%s", *args, more)


def described(error: BaseException) -> str:
    """An unexpected exception, and where it was raised, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    *_, (file, line, _, _) = traceback.extract_tb(error.__traceback__) or [("?", 0, "", "")]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text[:DESCRIBED_MAX]} ({os.path.basename(file)}:{line})"


class Growth:
    """Waits for any of the watched files to grow (`inotify(7)`, of which this is all we need).

    Where it is not to be had (not Linux, or all of the user's instances are taken), looking at intervals takes its
    place.  Each file is watched for one event and then anew: a worker that writes line by line would make an event of
    each, which it pays for as it writes, and we as we read them.
    """

    def __init__(self) -> None:
        self._libc, self._fd = _inotify()
        self._files: dict[int, set[int]] = {}  # by the kernel's number; what is opened twice has one
        self._is_blind = False  # a file could not be watched anew

    def watch(self, file: int) -> int | None:
        """Starts to watch an open file, and gives the number it is named by: `None` where the kernel does not tell."""
        return file if self._fd is not None and self._arm(file) else None

    def _arm(self, file: int) -> bool:
        # By descriptor: its name may lead elsewhere by now, or nowhere.
        path = b"/proc/self/fd/%d" % file
        number: int = self._libc.inotify_add_watch(self._fd, path, ctypes.c_uint32(IN_MODIFY | IN_ONESHOT))
        if number != -1:
            self._files.setdefault(number, set()).add(file)
        return number != -1

    def forget(self, file: int) -> None:
        """Ends a `watch`; called before the file is closed."""
        for number in [number for number, files in self._files.items() if file in files]:
            self._files[number].discard(file)
            if self._fd is not None and not self._files[number]:
                del self._files[number]
                self._libc.inotify_rm_watch(self._fd, number)

    async def wait(self, *, blind: bool) -> set[int]:
        """Which files have grown; `LOST` among them: any may have.

        What is written before the files are read next is in them by then; what is written later, the next call tells.

        Args:
            blind: some file could not be watched: come back after an interval in any case.
        """
        if self._fd is None:
            await anyio.sleep(LOOK_AT_FILES_S)
            return set()
        with anyio.move_on_after(LOOK_AT_FILES_S if blind or self._is_blind else None):
            await anyio.wait_readable(self._fd)
            return self._read()
        return {LOST}

    def _read(self) -> set[int]:
        assert self._fd is not None
        try:
            events = os.read(self._fd, 65536)
        except BlockingIOError:
            return set()
        grown = set()
        for number in set(memoryview(events).cast("i")[::_EVENT_INTS]):
            files = {LOST} if number == LOST else self._files.pop(number, set())
            grown |= files
            for file in files - {LOST}:
                self._is_blind |= not self._arm(file)
        return grown

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


async def wait_opened(path: str) -> None:
    """Returns when a process has opened a file since the call; not at all where the kernel does not tell."""
    libc, fd = _inotify()
    try:
        if fd is None or libc.inotify_add_watch(fd, os.fsencode(path), ctypes.c_uint32(IN_OPEN | IN_ONESHOT)) == -1:
            await anyio.sleep_forever()
        else:
            await anyio.wait_readable(fd)
    finally:
        if fd is not None:
            os.close(fd)


def _inotify() -> tuple[ctypes.CDLL, int | None]:
    """The C library, and a descriptor that tells; `None` where none is to be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(libc, "inotify_init1") else -1
    return libc, None if fd == -1 else fd


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
            _log.error("%d more exceptions of this event loop were not logged since the last one", more)
