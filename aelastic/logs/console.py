"""The agent's own streams, and other places where the output of workers is shown.

A `Sink` is one such place: it knows whose line is open there, and keeps others out of it.  A `Lane` shows files on
sinks, each file in its turn, in a thread: a console may stall, the loop must not.  Lanes do not wait for each other.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import select
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.to_thread

from aelastic.host.inotify import LOST
from aelastic.logs.follower import Follower
from aelastic.logs.lines import Cut
from aelastic.logs.terminal import TerminalStream

# So much of one worker's output is shown before another's turn comes.
CHUNKS_PER_TURN = 32
# At most this much is asked of the console at once, what a pipe takes: so a slow one is seen to make progress.
WRITE_BYTES = 1 << 16
# A console that can't be written to just now is tried again.
RETRY_S = 0.05
# At the end, a console that takes nothing for this long is given up; the files are kept then.
STALL_TIMEOUT_S = 30.0
# Nobody is there to read it any more.
_GONE = {errno.EPIPE, errno.EBADF, errno.EIO}


class Sink(ABC):
    """Somewhere that output is shown.  Called in a thread of one lane only."""

    def __init__(self) -> None:
        self.bytes_taken = 0
        self._is_gone = False  # nobody reads it any more; the files are kept still
        self._is_given_up = threading.Event()
        self._last: Cut | None = None

    def show(self, cut: Cut, piece: bytes) -> None:
        """Returns when all of it is shown, or never will be."""
        if self._last is not None and self._last is not cut and self._last.is_open:
            self._last.interrupt()
            piece = b"\n" + piece
        self._last = cut
        if self._is_gone:
            self.bytes_taken += len(piece)
        else:
            self._is_gone = not self._write(piece)

    @property
    def may_stall(self) -> bool:
        """Whether a worker that writes to the agent's stdout itself may have to wait for somebody who reads."""
        return False

    @property
    def is_given_up(self) -> bool:
        return self._is_given_up.is_set()

    def give_up(self) -> None:
        """A `show` that waits for the reader returns soon.  Callable from any thread."""
        self._is_given_up.set()

    @abstractmethod
    def _write(self, piece: bytes) -> bool:
        """Gives whether the place is still there."""

    def close(self) -> None:  # noqa: B027  what was there before us stays open
        """Lets go of it."""


class Descriptor(Sink):
    """An open file: a terminal, a pipe, a file on disk.

    Args:
        stream: what Python programs write to the same place through; what it has buffered goes first.
        is_ours: it is closed in the end.
    """

    def __init__(self, fd: int, stream: io.TextIOWrapper | None = None, *, is_ours: bool = False) -> None:
        super().__init__()
        self._fd = fd
        self._stream = stream
        self._terminal = stream.terminal if isinstance(stream, TerminalStream) else None
        self._is_ours = is_ours

    @property
    def may_stall(self) -> bool:
        if not _is_same_file(self._fd, 1):
            return False  # it is not what workers inherit
        found = os.fstat(self._fd)
        return not (stat.S_ISREG(found.st_mode) or os.path.samestat(found, os.stat(os.devnull)))

    def _write(self, piece: bytes) -> bool:
        if self._stream is not None:
            with suppress(OSError, ValueError):  # that is for whoever has written it
                self._stream.flush()
            self._stream = None
        if self._terminal is None:
            return self._write_out(piece)
        with self._terminal.writing(piece) as whole:
            return self._write_out(whole)

    def _write_out(self, piece: bytes) -> bool:
        rest = memoryview(piece)
        while rest and not self.is_given_up:
            try:
                count = os.write(self._fd, rest[:WRITE_BYTES])
            except BlockingIOError:  # somebody made it non-blocking; it is shared, so we can't undo that
                self._wait_writable()
            except OSError as error:
                if error.errno in _GONE:
                    return False
                self._is_given_up.wait(RETRY_S)  # a full disk may have room again; a stall, till then
            else:
                self.bytes_taken += count
                rest = rest[count:]
        return True

    def _wait_writable(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        poll.poll(RETRY_S * 1000)

    def close(self) -> None:
        if self._is_ours:
            os.close(self._fd)


class Stream(Sink):
    """A Python object with `write`, which a program around the agent has put in the place of `sys.stdout`."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def _write(self, piece: bytes) -> bool:
        try:
            self._stream.write(self._decoder.decode(piece))
            if callable(flush := getattr(self._stream, "flush", None)):
                flush()
        except Exception:  # noqa: BLE001  a user's object may raise anything; the files have everything
            return False
        self.bytes_taken += len(piece)
        return True


class Nowhere(Sink):
    """For what nobody shows."""

    def _write(self, piece: bytes) -> bool:
        self.bytes_taken += len(piece)
        return True


def sinks_of(stdout: Any, stderr: Any) -> tuple[Sink, Sink]:
    """Where Python's standard streams lead; one sink where both lead to the same place, for lines not to mix there."""
    fds = _fd_of(stdout), _fd_of(stderr)
    first = _sink_of(stdout, fds[0])
    is_same = (stdout is not None and stdout is stderr) or _is_same_file(*fds)
    return first, first if is_same else _sink_of(stderr, fds[1])


def _sink_of(stream: Any, fd: int | None) -> Sink:
    if fd is not None:
        return Descriptor(fd, stream)
    return Nowhere() if stream is None else Stream(stream)


def _fd_of(stream: Any) -> int | None:
    """The descriptor behind a stream of Python's own; what others write through may do more than write there."""
    if not isinstance(stream, io.TextIOWrapper):
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _is_same_file(fd: int | None, other: int | None) -> bool:
    try:
        return fd is not None and other is not None and os.path.sameopenfile(fd, other)
    except OSError:
        return False


class Lane:
    """Shows what files hold, as they grow; each file has its turn."""

    def __init__(self) -> None:
        self.is_stalled = False
        self._followers: list[tuple[Follower, Sink]] = []
        self._grown = anyio.Event()
        self._idle_or_over = anyio.Event()
        self._everything = False  # any file may have grown
        self._watches: set[int] = set()  # likewise, these

    @property
    def is_blind(self) -> bool:
        """Whether the kernel does not tell of every file's growth."""
        return any(follower.watch is None for follower, _ in self._followers)

    def add(self, follower: Follower, sink: Sink) -> None:
        self._followers.append((follower, sink))

    def end_followers(self) -> None:
        """Nobody writes any more: what is left is shown, then the files are let go."""
        for follower, _ in self._followers:
            follower.end()
        self._everything = True
        self._grown.set()

    def wake(self, watches: set[int]) -> None:
        mine = watches & {follower.watch for follower, _ in self._followers}
        everything = self.is_blind or LOST in watches
        if mine or everything:
            self._watches |= mine
            self._everything |= everything
            self._grown.set()

    def give_up(self) -> None:
        """Ends `drain` and a `show` that waits."""
        if self._followers:
            self.is_stalled = True
            self._idle_or_over.set()
            for _, sink in self._followers:
                sink.give_up()

    async def drain(self) -> None:
        """Returns when everything has been shown, or nothing was taken for a while."""
        while self._followers and not self.is_stalled:
            before = self._bytes_taken()
            self._idle_or_over = anyio.Event()
            with anyio.move_on_after(STALL_TIMEOUT_S) as waited:
                await self._idle_or_over.wait()
            if waited.cancelled_caught and self._bytes_taken() == before:
                self.give_up()

    def _bytes_taken(self) -> int:
        return sum(sink.bytes_taken for _, sink in self._followers)

    async def run(self, forget: Callable[[int], None]) -> None:
        """Shows what there is whenever there is more.  Runs until cancelled.

        Args:
            forget: told of watches that are not needed any more.
        """
        limiter = anyio.CapacityLimiter(1)  # our own: whoever else uses threads does not keep us waiting
        unfinished: list[Follower] = []
        while True:
            await self._grown.wait()
            self._grown = anyio.Event()
            watches, everything = self._watches, self._everything
            self._watches, self._everything = set(), False
            turn = [
                (follower, sink, follower.is_ended)
                for follower, sink in self._followers
                if everything or follower.watch in watches or follower in unfinished
            ]
            unfinished = await anyio.to_thread.run_sync(_show, turn, abandon_on_cancel=True, limiter=limiter)
            if unfinished and not self.is_stalled:
                self._grown.set()
            for follower, sink, was_ended in turn:
                if was_ended and follower not in unfinished:
                    self._let_go(follower, sink, forget)
            if not self._followers:
                self._idle_or_over.set()

    def _let_go(self, follower: Follower, sink: Sink, forget: Callable[[int], None]) -> None:
        self._followers.remove((follower, sink))
        if follower.watch is not None:
            forget(follower.watch)
        follower.close()
        sink.close()

    def close(self) -> None:
        self.give_up()  # a thread may still be waiting
        for follower, sink in self._followers:
            follower.close()
            sink.close()
        self._followers.clear()


def _show(turn: list[tuple[Follower, Sink, bool]]) -> list[Follower]:
    """Shows some of each file, and gives those that hold more."""
    return [follower for follower, sink, is_ended in turn if not _show_some(follower, sink, is_ended)]


def _show_some(follower: Follower, sink: Sink, is_ended: bool) -> bool:
    """Whether that was all."""
    count = 0
    while not sink.is_given_up and (count < CHUNKS_PER_TURN or follower.is_amid):
        piece = follower.next_piece(is_ended=is_ended)
        if piece is None:
            if is_ended and (last := follower.cut.end()):
                sink.show(follower.cut, last)
            return True
        if piece and not sink.is_given_up:
            sink.show(follower.cut, piece)
        if follower.is_at_end and not is_ended:
            return True  # else a worker that writes line by line would have each of them shown by itself
        count += 1
    return False
