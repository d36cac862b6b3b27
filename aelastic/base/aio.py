"""Async helpers that asyncio and anyio lack: a shared clock, a mailbox, running blocking calls, and waiting for files.

- `now`: the time of the loop, `wall_ms`: that of the host
- `Mailbox`: the only queue of a core's events
- `run_sync`, `in_thread`: calls that block, or may hang with a disk, even if the host refuses another thread
- `wait_readable`: waits for a descriptor, in a loop that can be cancelled
- `next_connection`, `attach`: accept connections without dropping half-made ones
- `Growth`, `wait_opened`: wait for files to grow, or to be opened
- `RareWarnings`: warnings that others cannot use to flood the log; `described`: an unexpected exception in one line
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

from aelastic.base.host.usage import is_refused_thread

T = TypeVar("T")
Args = TypeVarTuple("Args")

_log = logging.getLogger(__name__)

LOOPS = ("uvloop", "asyncio")
# Interval between reports of a loop's exceptions, and of misbehaviour of others, who may do it all the time.
TELL_INTERVAL_S = 60.0
# How often to try again to start a thread.
LOOK_AGAIN_S = 0.05
# A short shortage is not worth a line: a worker that dies of it takes its processes along.
TELL_AFTER_S = 1.0
# How long to wait for descriptors, which others have taken and may release.
OUT_OF_FILES_PAUSE_S = 1.0
# How many characters of an exception are shown: it may contain received data.
DESCRIBED_MAX = 200
# If the kernel does not report growing files: as often as torch's agent looks at its log files.
LOOK_AT_FILES_S = 0.1
# The watch that represents all of them: more happened than the kernel keeps (IN_Q_OVERFLOW).
LOST = -1

# linux/inotify.h
IN_MODIFY = 0x00000002
IN_OPEN = 0x00000020
IN_ONESHOT = 0x80000000
# An event of a file: watch, mask, cookie, and the length of a name, which is absent for files.
_EVENT_INTS = 4


def now() -> float:
    """Returns monotonic seconds, the unit of deadlines: the loop's own clock, in tasks and in callbacks of the loop.

    anyio finds its clock by detecting the running library.  If `sniffio` is installed, that works in a task only: in a
    protocol's callback, a timer or a signal handler it raises an exception.  So no module uses anyio's clock (a rule of
    the linter).

    Raises:
        RuntimeError: no loop runs in this thread.
    """
    return asyncio.get_running_loop().time()


def wall_ms() -> int:
    """Returns milliseconds since 1970 on this host's wall clock, which may jump: for numbers that outlive a process."""
    return int(datetime.now(UTC).timestamp() * 1000)


class Mailbox(Generic[T]):
    """The queue of a core's events, on which the task that runs the core waits.

    The writers bound its length: each task posts a known number of events and ends, and a connection is not read while
    too many of its messages wait here.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._arrived: asyncio.Future[None] | None = None  # set while the reader waits

    @property
    def is_empty(self) -> bool:
        """Whether there are no items."""
        return not self._items

    def post(self, item: T) -> None:
        """Adds an item.  Never blocks; safe in a signal handler of the loop."""
        self._items.append(item)
        self._wake_up()

    async def next_by(self, deadline: Callable[[], float | None]) -> T | None:
        """Like `next`, but computes the deadline only if there are no items."""
        return self._items.popleft() if self._items else await self.next(deadline())

    async def next(self, deadline: float | None) -> T | None:
        """Waits for the next item; returns `None` once the deadline (of the loop's clock) has passed without one."""
        if not self._items:  # an unnecessary wait costs more than most events
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
    """Calls `anyio.to_thread.run_sync`; waits for a thread if the host lets no more be started.

    A worker that starts threads or processes up to a limit (`pids.max`, `ulimit -u`) also uses up the agent's share.
    So one thread is started before any worker runs (`keep_one`); a call that gets no thread waits until that is free.
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
    """Starts a thread that stays until the loop ends: among idle threads, the last one used is kept.

    Raises:
        RuntimeError: the host has refused it for a second (`aelastic.base.host.usage.shortage_of` tells why).
    """
    with anyio.move_on_after(TELL_AFTER_S):
        await run_sync(int)
        return
    await anyio.to_thread.run_sync(int)


async def in_thread(function: Callable[[], T], *, within_s: float, limiter: anyio.CapacityLimiter | None = None) -> T:
    """Runs a function that reads or writes files, and waits for it at most `within_s`.

    A thread that has not ended by then, or when the caller is cancelled, is abandoned: it ends when the disk answers,
    and its result is dropped.

    Args:
        function: what to run.
        within_s: how long to wait for it, and for a thread.
        limiter: limits the number of threads; by default, the call does not wait for other callers.

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


class RareWarnings:
    """Warnings about misbehaviour of others: at most one per minute with the same words.

    Args:
        log: the logger to use.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: dict[str, tuple[float, int]] = {}  # when a message was logged, and how many were not since

    def warn(self, message: str, *args: object, now: float) -> None:
        """Warns; the next warning with these words counts those that were suppressed."""
        told_at, untold = self._told.get(message, (-math.inf, 0))
        if now - told_at < TELL_INTERVAL_S:
            self._told[message] = told_at, untold + 1
            return
        self._told[message] = now, 0
        more = f" (and {untold} more since the last such line)" if untold else ""
        self._log.warning(f"{message}%s", *args, more)


def described(error: BaseException) -> str:
    """Describes an unexpected exception, and where it was raised, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    *_, (file, line, _, _) = traceback.extract_tb(error.__traceback__) or [("?", 0, "", "")]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text[:DESCRIBED_MAX]} ({os.path.basename(file)}:{line})"


class Growth:
    """Waits for any of the watched files to grow (`inotify(7)`, the part that we need).

    If it is not available (not Linux, or all of the user's instances are in use), files are checked at intervals
    instead.  Each file is watched for one event and then again: a worker that writes line by line would cause an event
    for each, which costs time on both sides.
    """

    def __init__(self) -> None:
        self._libc, self._fd = _inotify()
        self._files: dict[int, set[int]] = {}  # by the kernel's number; a file that is opened twice has one
        self._is_blind = False  # a file could not be watched again

    def watch(self, file: int) -> int | None:
        """Starts to watch an open file; returns its number in the results of `wait`, `None` if it cannot be watched."""
        return file if self._fd is not None and self._arm(file) else None

    def _arm(self, file: int) -> bool:
        # By descriptor: its name may be another file's by now, or be gone.
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
        """Waits until files have grown, and returns them; with `LOST` among them, any may have.

        Data written before the files are read next is read then; later writes are reported by the next call.

        Args:
            blind: some file could not be watched: return after an interval in any case.
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
    """Returns when a process has opened a file since the call; never if the kernel does not report it."""
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
    """Returns the C library, and an inotify descriptor; `None` if there is none."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(libc, "inotify_init1") else -1
    return libc, None if fd == -1 else fd


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Returns the function that makes a loop of that name; asyncio's own if uvloop is not installed."""
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
    """The exception handler of our loops: shows one traceback per minute if something keeps failing."""

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
