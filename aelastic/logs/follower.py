"""Reads a worker's log file while it grows, as `tail -f` does, and splits it for the console.

The file is the buffer: an incomplete line stays there, and memory holds one chunk.  Once a worker has died, `tail_of`
returns the end of its stderr, which shows why.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from aelastic.logs.lines import Splitter

# Read and shown at once.  Larger buffers are slower: they miss the cache and are mapped again each time (`mallopt(3)`).
CHUNK_BYTES = 1 << 15
# The beginning of a line up to this length is read again with the rest of it, which is simpler than keeping it.
SHORT_BYTES = 1 << 12
# The end of a worker's stderr that is searched for the cause of its death.
TAIL_BYTES = 1 << 16
# How a traceback begins, and how much of it is kept if its end is further away than that.
TRACEBACK = b"Traceback (most recent call last)"
HEAD_BYTES = 1 << 15
# An exception's message may be long: how far back the beginning of its traceback is looked for.  Takes 10 ms.
SEARCH_BYTES = 16 << 20
_STEP_BYTES = 1 << 20
# Blocks that have been shown are freed in steps of this size.
PUNCH_BYTES = 1 << 20


class Follower:
    """Follows one file from its current end.

    Args:
        path: an existing file; its current contents are skipped.
        splitter: splits the file for where it is shown.
        is_scratch: blocks that have been shown are freed, and `close` removes the file.
        keeps: how many bytes at the end of a kept file are kept; blocks before them are freed; `None`: all are kept.
        sharers: other followers of the same file; only blocks that they have also read are freed.
    """

    def __init__(
        self,
        path: Path,
        splitter: Splitter,
        *,
        is_scratch: bool = False,
        keeps: int | None = None,
        sharers: Sequence[Follower] = (),
    ) -> None:
        self.watch: int | None = None  # the inotify watch that reports its growth, or `None`
        self.splitter = splitter
        self.is_ended = False
        self.path = path
        self.traceback = b""  # of a scratch file: the beginning of the last one that was shown
        self._is_scratch = is_scratch
        self._keeps = TAIL_BYTES if is_scratch else keeps  # the end may tell why the worker failed
        self._sharers = sharers
        self._fd = os.open(path, os.O_RDONLY if self._keeps is None else os.O_RDWR)
        end = os.fstat(self._fd).st_size
        self.can_free = keeps is None or self._free(end, 1)  # tried where the file has no data yet
        # Offsets in the file: shown <= showable <= read.
        self._shown_to = end
        self._showable_to = end  # the splitter has taken everything before it
        self._read_to = end  # beyond `_showable_to`: the beginning of a line that is held back
        self._ends_at: int | None = None  # set by `end`: later output is the next attempt's
        self._freed_to = 0
        self._has_more = False  # the last chunk was not the last of the file

    def fileno(self) -> int:
        return self._fd

    def end(self, at: int | None) -> None:
        """Notes that the worker has ended: later output is not shown.

        Args:
            at: where the file ends; `None` if unknown: no more is read.
        """
        if not self.is_ended:
            self._ends_at = self._read_to if at is None else at
            self.is_ended = True

    @property
    def offset(self) -> int:
        """The offset up to which the file has been shown."""
        return self._shown_to

    def size(self) -> int:
        """Returns where the file ends, or ended when the worker did; how far it was read if it has been closed."""
        if self._ends_at is not None:
            return self._ends_at
        try:
            return os.fstat(self._fd).st_size
        except OSError:
            return self._read_to

    @property
    def is_within_line(self) -> bool:
        """True if the next piece continues a line, which should not be split."""
        return self._shown_to < self._showable_to

    @property
    def is_at_end(self) -> bool:
        """True if everything has been read; what is written from now on is reported as growth."""
        return not self._has_more and not self.is_within_line

    def next_piece(self, *, is_ended: bool) -> bytes | None:
        """Returns the next piece that may be shown, or `None` for now.

        Args:
            is_ended: `end` has been called, so the last line is shown without its newline.
        """
        while True:
            if self._shown_to < self._showable_to:
                return self._show(self._read(self._shown_to, self._showable_to))
            chunk = self._read(self._read_to, self._ends_at)
            held = self._read_to - self._shown_to
            has_more = self._has_more = len(chunk) == CHUNK_BYTES and self._read_to + CHUNK_BYTES < self.size()
            if is_ended and not has_more and held + len(chunk):
                count = len(chunk)
            elif not chunk:
                return None
            elif not (count := self.splitter.takes(chunk, held, more=has_more)):
                if not has_more and len(chunk) <= SHORT_BYTES:
                    return None
                self._read_to += len(chunk)
                continue
            self._showable_to = self._read_to = self._read_to + count
            if not held:
                return self._show(chunk[:count])

    def _read(self, begin: int, end: int | None) -> bytes:
        count = CHUNK_BYTES if end is None else max(0, min(CHUNK_BYTES, end - begin))
        try:
            return os.pread(self._fd, count, begin)
        except OSError:
            return b""  # the disk fails, or a file server is gone: the worker also gets that error

    def _show(self, data: bytes) -> bytes:
        self._shown_to += len(data) or self._showable_to - self._shown_to  # unreadable data is skipped
        if self._is_scratch and (at := data.rfind(TRACEBACK)) >= 0:
            self.traceback = data[at : at + HEAD_BYTES]
        elif self.traceback and len(self.traceback) < HEAD_BYTES:
            self.traceback += data[: HEAD_BYTES - len(self.traceback)]
        if self._keeps is not None:
            end = min([self._shown_to, *(each.offset for each in self._sharers)]) - self._keeps
            if end - self._freed_to >= PUNCH_BYTES:
                self._free(self._freed_to, end - self._freed_to)
                self._freed_to = end
        return self.splitter.feed(data)

    def _free(self, begin: int, count: int) -> bool:
        """Frees blocks of the file on the disk; lengths and offsets stay.  Returns false if that is not possible."""
        return _fallocate is not None and _fallocate(self._fd, _PUNCH_HOLE | _KEEP_SIZE, begin, count) == 0

    def close(self) -> None:
        os.close(self._fd)
        if self._is_scratch and self.is_ended:
            self.path.unlink(missing_ok=True)


def _find_fallocate() -> Callable[[int, int, int, int], int] | None:
    """Returns fallocate(2): the standard library has no call that frees a part of a file."""
    try:
        function = ctypes.CDLL(None).fallocate
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return function


_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_fallocate = _find_fallocate()


# The end of a file.


def tail_of(path: Path, seen: bytes, *, is_searched: bool) -> str:
    """Returns the end of a file; "" if it cannot be read.  May block, as disks do.

    Args:
        path: the file.
        seen: the beginning of the last traceback that was seen in it, which may have been freed since.
        is_searched: if no traceback begins in the end of the file, the result begins with the last one before it.
    """
    if not path.is_file():
        return ""  # opening a FIFO would wait for a writer
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            end = os.pread(file.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES))
            if is_searched and size > TAIL_BYTES and TRACEBACK not in end:
                head = _last_traceback(file.fileno(), size - TAIL_BYTES) or seen
                if head:
                    note = b"\n... (what is between is left out)\n"
                    end = head[:HEAD_BYTES] + note + end[HEAD_BYTES + len(note) :]
            return end.decode(errors="replace")
    except OSError:
        return ""


def _last_traceback(file: int, end: int) -> bytes:
    """Returns a file's last traceback, and what follows, or ""."""
    stop = max(0, end - SEARCH_BYTES)
    while end > stop:
        begin = max(stop, end - _STEP_BYTES)
        # A little more, for a marker that begins in this step and ends in the next.
        at = os.pread(file, end - begin + len(TRACEBACK), begin).rfind(TRACEBACK)
        if at >= 0:
            return os.pread(file, HEAD_BYTES, begin + at)
        end = begin
    return b""
