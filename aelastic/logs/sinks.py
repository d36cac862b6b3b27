"""Places where the output of workers is shown: the agent's own streams, or a file.

A `Sink` knows which splitter's line is open there, and ends that line before text of another worker.  Writing may
block: a sink is used in the thread of one `Pump`, never in the event loop.
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
from contextlib import suppress
from typing import Any

from aelastic.logs.lines import Splitter
from aelastic.logs.terminal import TerminalStream

# At most this much is asked of the console at once, what a pipe takes: so a slow one is seen to make progress.
WRITE_BYTES = 1 << 16
# A console that cannot be written to now is tried again after this.
RETRY_S = 0.05
# Errors that say that the reader is gone.
_GONE = {errno.EPIPE, errno.EBADF, errno.EIO}


class Sink(ABC):
    """A place where output is shown, used in the thread of one pump."""

    def __init__(self) -> None:
        self.bytes_taken = 0
        self._is_gone = False  # its reader is gone; the workers' files are kept all the same
        self._is_given_up = threading.Event()
        self._last: Splitter | None = None

    @property
    def is_live(self) -> bool:
        """True if rows can be drawn again and again there."""
        return False

    def show(self, splitter: Splitter, piece: bytes) -> None:
        """Returns when the piece is written, or cannot be any more."""
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
        """What ends the line that is open."""
        return b"\n"

    @property
    def may_stall(self) -> bool:
        """True if a worker that inherited the agent's stdout could be blocked by a slow reader."""
        return False

    @property
    def is_given_up(self) -> bool:
        return self._is_given_up.is_set()

    def give_up(self) -> None:
        """Lets a `show` that waits for a slow reader return soon.  Callable from any thread."""
        self._is_given_up.set()

    @abstractmethod
    def _write(self, piece: bytes) -> bool:
        """Writes the piece; false if the place is gone."""

    def close(self) -> None:  # noqa: B027  the agent's own streams stay open
        """Closes what this sink has opened."""


class DescriptorSink(Sink):
    """An open file: a terminal, a pipe, a file on disk.

    Args:
        stream: Python's own stream to the same place; its buffer is flushed first.
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
            return False  # it is not what workers inherit
        found = os.fstat(self._fd)
        return not (stat.S_ISREG(found.st_mode) or os.path.samestat(found, os.stat(os.devnull)))

    def _write(self, piece: bytes) -> bool:
        if self._stream is not None:
            with suppress(OSError, ValueError):  # an error of the program that has written to it
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
    """A Python object with `write` that the embedding program has assigned to `sys.stdout`."""

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
    """The sinks of Python's standard streams: one for both if they lead to the same place, lest lines mix there."""
    fds = _fd_of(stdout), _fd_of(stderr)
    first = _sink_of(stdout, fds[0])
    is_same = (stdout is not None and stdout is stderr) or _is_same_file(*fds)
    return first, first if is_same else _sink_of(stderr, fds[1])


def _sink_of(stream: Any, fd: int | None) -> Sink:
    if fd is not None:
        return DescriptorSink(fd, stream)
    return NullSink() if stream is None else StreamSink(stream)


def _fd_of(stream: Any) -> int | None:
    """The descriptor of a stream of Python's own class; objects of other classes may do more than write to theirs."""
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
