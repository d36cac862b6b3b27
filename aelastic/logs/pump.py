"""Shows the output of workers: a pump is the thread that shows their files as they grow; a sink is the destination.

A console may stall, and the event loop must not, so each pump has its own thread and pumps do not wait for each other.
Within a pump, the files take turns.

A `Sink` is one of the agent's own streams, or a file.  A sink tracks which splitter's line is open, and ends that line
before text of another worker.  Writing may block: a sink is used in the thread of one `Pump`, never in the event loop.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import anyio

from aelastic.base.loop.growth import LOST
from aelastic.base.loop.threads import run_sync
from aelastic.logs.follower import Follower
from aelastic.logs.lines import Splitter
from aelastic.logs.terminal import TerminalStream

# How many chunks of one file are shown before the next file's turn.
CHUNKS_PER_TURN = 32
# At the end, a console that accepts nothing for this long is given up, and the files are kept.
STALL_TIMEOUT_S = 30.0
# How long a console may still take once the user wants to end: a terminal shows a short rest at once.
CUT_SHORT_S = 0.5
# At most this much is written at once, which is what a pipe holds: so the progress of a slow console is visible.
WRITE_BYTES = 1 << 16
# A console that cannot be written to now is retried after this time.
RETRY_S = 0.05
# Errors that mean that the reader is gone.
_GONE = {errno.EPIPE, errno.EBADF, errno.EIO}


class Pump:
    """Files, each with the sink that shows it, and the thread that reads and writes.

    When `run` is cancelled, a running turn continues in its thread; the files are closed after it.
    """

    def __init__(self) -> None:
        self.is_stalled = False
        self.is_cut_short = False
        self._files: list[tuple[Follower, Sink]] = []
        self._grown = anyio.Event()
        self._idle_or_over = anyio.Event()
        self._grown_watches: set[int] = set()
        self._any_has_grown = False
        self._lock = threading.Lock()  # of these two
        self._is_in_turn = False  # the thread uses the files
        self._is_closed = False

    @property
    def is_blind(self) -> bool:
        """True if the growth of some file is not reported by the kernel."""
        return any(follower.watch is None for follower, _ in self._files)

    def add(self, follower: Follower, sink: Sink) -> None:
        self._files.append((follower, sink))

    def sizes(self) -> dict[Follower, int]:
        """Returns where the files end now.  May block; called in a thread."""
        return {follower: follower.size() for follower, _ in list(self._files) if not follower.is_ended}

    def end_followers(self, ends: Mapping[Follower, int]) -> None:
        """Shows what is left in the files of ended workers, then closes them.

        Args:
            ends: where each file ends.  A file that is missing here is on a disk that hangs: no more of it is read.
        """
        for follower, _ in self._files:
            follower.end(ends.get(follower))
        self._any_has_grown = True
        self._grown.set()

    def wake(self, watches: set[int]) -> None:
        """Reports growth, by inotify watch; `LOST` among them means any file."""
        mine = watches & {follower.watch for follower, _ in self._files}
        any_has_grown = self.is_blind or LOST in watches
        if mine or any_has_grown:
            self._grown_watches |= mine
            self._any_has_grown |= any_has_grown
            self._grown.set()

    def give_up(self) -> None:
        """Ends `drain`, and a waiting `show`."""
        if self._files:
            self.is_stalled = True
            self._idle_or_over.set()
            for _, sink in self._files:
                sink.give_up()

    def cut_short(self) -> None:
        """Ends `drain` within `CUT_SHORT_S`, even if output is left to show."""
        if not self.is_cut_short:
            self.is_cut_short = True
            self._idle_or_over.set()

    async def drain(self) -> None:
        """Returns when all is shown, no sink has accepted anything for `STALL_TIMEOUT_S`, or soon after `cut_short`."""
        while self._files and not self.is_stalled:
            before = self._bytes_taken()
            self._idle_or_over = anyio.Event()
            is_last = self.is_cut_short
            with anyio.move_on_after(CUT_SHORT_S if is_last else STALL_TIMEOUT_S) as waited:
                await self._idle_or_over.wait()
            if waited.cancelled_caught and (is_last or self._bytes_taken() == before):
                self.give_up()

    def _bytes_taken(self) -> int:
        return sum(sink.bytes_taken for _, sink in self._files)

    async def run(self, forget: Callable[[int], None]) -> None:
        """Shows what is new whenever files grow.  Runs until cancelled.

        Args:
            forget: called with each watch that is no longer needed.
        """
        limiter = anyio.CapacityLimiter(1)  # our own, so that other users of anyio's threads cannot delay it
        unfinished: list[Follower] = []
        while True:
            await self._grown.wait()
            self._grown = anyio.Event()
            watches, any_has_grown = self._grown_watches, self._any_has_grown
            self._grown_watches, self._any_has_grown = set(), False
            turn = [
                (follower, sink, follower.is_ended)
                for follower, sink in self._files
                if any_has_grown or follower.watch in watches or follower in unfinished
            ]
            unfinished = await run_sync(self._take_turn, turn, abandon_on_cancel=True, limiter=limiter)
            if unfinished and not self.is_stalled:
                self._grown.set()
            for follower, sink, was_ended in turn:
                if was_ended and follower not in unfinished:
                    self._files.remove((follower, sink))
                    if follower.watch is not None:
                        forget(follower.watch)
                    follower.close()
                    sink.close()
            if not self._files:
                self._idle_or_over.set()

    def _take_turn(self, turn: list[tuple[Follower, Sink, bool]]) -> list[Follower]:
        """Shows some of each file; returns those that hold more.  Called in the thread."""
        with self._lock:
            if self._is_closed:
                return []
            self._is_in_turn = True
        try:
            return [follower for follower, sink, is_ended in turn if not _show_some(follower, sink, is_ended)]
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        with self._lock:
            self._is_in_turn = False
            if self._is_closed:
                self._close_files()

    def close(self) -> None:
        """Closes the files: at once or, if an abandoned turn still uses them, at the end of that turn.

        If they were closed while the thread uses them, it could write to, or free blocks of, another file that the
        program has since opened under the same descriptor.
        """
        self.give_up()
        with self._lock:
            self._is_closed = True
            if not self._is_in_turn:
                self._close_files()

    def _close_files(self) -> None:
        for follower, sink in self._files:
            follower.close()
            sink.close()
        self._files.clear()


def _show_some(follower: Follower, sink: Sink, is_ended: bool) -> bool:
    """Shows up to a turn's worth of one file; returns true if that was all of it."""
    count = 0
    while not sink.is_given_up and (count < CHUNKS_PER_TURN or follower.is_within_line):
        piece = follower.next_piece(is_ended=is_ended)
        if piece is None:
            if is_ended:
                sink.show(follower.splitter, follower.splitter.end())
            return True
        if not sink.is_given_up:
            sink.show(follower.splitter, piece)
        if follower.is_at_end and not is_ended:
            return True  # otherwise each line of a worker that writes line by line would be shown on its own
        count += 1
    return False


# Sinks.


class Sink(ABC):
    """A destination of output, used in the thread of one pump."""

    def __init__(self) -> None:
        self.bytes_taken = 0
        self._is_gone = False  # its reader is gone; the workers' files are still kept
        self._is_given_up = threading.Event()
        self._last: Splitter | None = None

    @property
    def is_live(self) -> bool:
        """True if rows can be redrawn there."""
        return False

    def show(self, splitter: Splitter, piece: bytes) -> None:
        """Returns when the piece is written, or can no longer be written."""
        if not piece:
            return
        if self._last is not None and self._last is not splitter and self._last.is_open:
            self._last.interrupt()
            piece = self._end_of_line() + piece
        self._last = splitter
        if self._is_gone:
            self.bytes_taken += len(piece)
        else:
            self._is_gone = not self._write(piece)

    def _end_of_line(self) -> bytes:
        """Returns the bytes that end the open line."""
        return b"\n"

    @property
    def may_stall(self) -> bool:
        """True if a worker that inherited the agent's stdout could be blocked by a slow reader."""
        return False

    @property
    def is_given_up(self) -> bool:
        return self._is_given_up.is_set()

    def give_up(self) -> None:
        """Makes a `show` that waits for a slow reader return soon.  Callable from any thread."""
        self._is_given_up.set()

    @abstractmethod
    def _write(self, piece: bytes) -> bool:
        """Writes the piece; returns false if the destination is gone."""

    def close(self) -> None:  # noqa: B027  the agent's own streams stay open
        """Closes the descriptor if this sink owns it."""


class DescriptorSink(Sink):
    """An open file: a terminal, a pipe, a file on disk.

    Args:
        stream: Python's own stream to the same destination; its buffer is flushed first.
        is_ours: `close` closes the descriptor.
    """

    def __init__(self, fd: int, stream: io.TextIOWrapper | None = None, *, is_ours: bool = False) -> None:
        super().__init__()
        self._fd = fd
        self._stream = stream
        self._terminal = stream.terminal if isinstance(stream, TerminalStream) else None
        self._is_ours = is_ours

    @property
    def is_live(self) -> bool:
        return self._terminal is not None and self._terminal.is_live

    def show(self, splitter: Splitter, piece: bytes) -> None:
        if self._terminal is not None and self._terminal.is_live:
            from aelastic.logs.live_lines import LiveLines  # not for a start in a pipe

            if isinstance(splitter, LiveLines):
                self._terminal.hold(splitter.place, splitter.rows)
        super().show(splitter, piece)

    @property
    def may_stall(self) -> bool:
        if not _is_same_file(self._fd, 1):
            return False  # workers inherit another file
        found = os.fstat(self._fd)
        return not (stat.S_ISREG(found.st_mode) or os.path.samestat(found, os.stat(os.devnull)))

    def _write(self, piece: bytes) -> bool:
        if self._stream is not None:
            with suppress(OSError, ValueError):  # an error of the program that wrote to it
                self._stream.flush()
            self._stream = None
        if self._terminal is None:
            return self._write_out(piece)
        with self._terminal.writing(piece, "workers") as whole:
            return self._write_out(whole)

    def _end_of_line(self) -> bytes:
        return b"\n" if self._terminal is None or self._terminal.is_line_open else b""  # else the agent has ended it

    def _write_out(self, piece: bytes) -> bool:
        rest = memoryview(piece)
        while rest and not self.is_given_up:
            try:
                count = os.write(self._fd, rest[:WRITE_BYTES])
            except BlockingIOError:  # made non-blocking by another process that shares it: not ours to undo
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll(RETRY_S * 1000)
            except OSError as error:
                if error.errno in _GONE:
                    return False
                self._is_given_up.wait(RETRY_S)  # a full disk may have room again later
            else:
                self.bytes_taken += count
                rest = rest[count:]
        return True

    def close(self) -> None:
        if self._is_ours:
            os.close(self._fd)


class StreamSink(Sink):
    """A Python object with `write` that the embedding program assigned to `sys.stdout`."""

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


class NullSink(Sink):
    """A sink that discards everything."""

    def _write(self, piece: bytes) -> bool:
        self.bytes_taken += len(piece)
        return True


def sinks_of(stdout: Any, stderr: Any) -> tuple[Sink, Sink]:
    """Returns sinks for Python's standard streams: one for both if they share a destination, so that no lines mix."""
    fds = _fd_of(stdout), _fd_of(stderr)
    first = _sink_of(stdout, fds[0])
    is_same = (stdout is not None and stdout is stderr) or _is_same_file(*fds)
    return first, first if is_same else _sink_of(stderr, fds[1])


def _sink_of(stream: Any, fd: int | None) -> Sink:
    if fd is not None:
        return DescriptorSink(fd, stream)
    return NullSink() if stream is None else StreamSink(stream)


def _fd_of(stream: Any) -> int | None:
    """Returns the descriptor of a `TextIOWrapper`; objects of other classes may do more than write to theirs."""
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
