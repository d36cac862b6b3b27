"""A file that a worker writes, read while it grows, and given to the console in pieces.

The file is the buffer: a line that is not complete yet is left there, and memory holds one chunk.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from aelastic.logs.lines import Cut

# Read and shown at once.  More is slower: larger buffers miss the cache, and are mapped anew each time (`mallopt(3)`).
CHUNK_BYTES = 1 << 15
# The beginning of a line up to this length is read again with the rest of it: simpler than to remember it.
SHORT_BYTES = 1 << 12
# Of a worker's stderr, what is searched for the cause of its death.
TAIL_BYTES = 1 << 16
# Scratch that has been shown is given back in steps of this size.
PUNCH_BYTES = 1 << 20


class Follower:
    """Reads a file from where it was left.

    Args:
        path: is there; what it holds already is passed over.
        cut: how it is shown.
        is_scratch: what has been shown is given back to the file system, and in the end the file is removed.
        sharer: who reads the same scratch, and has to have read what is given back.
    """

    def __init__(self, path: Path, cut: Cut, *, is_scratch: bool = False, sharer: Follower | None = None) -> None:
        self.watch: int | None = None  # what tells of its growth; `None` if nothing does
        self.cut = cut
        self.is_ended = False
        self._path = path
        self._is_scratch = is_scratch
        self._sharer = sharer
        self._fd = os.open(path, os.O_RDWR if is_scratch else os.O_RDONLY)
        end = os.fstat(self._fd).st_size
        # Offsets: what has been shown, what may be shown, what has been looked at (the beginning of a line, say).
        self._shown = self._taken = self._seen = end
        self._end: int | None = None  # what comes later is somebody else's
        self._has_more = False
        self._punched = 0

    def fileno(self) -> int:
        return self._fd

    def end(self) -> None:
        """Nobody writes any more: the file ends where it ends now."""
        self._end = os.fstat(self._fd).st_size
        self.is_ended = True

    @property
    def offset(self) -> int:
        """The offset up to which the file has been shown."""
        return self._shown

    def size(self) -> int:
        """The offset at which the file ends, by now or for good."""
        return os.fstat(self._fd).st_size if self._end is None else self._end

    @property
    def is_amid(self) -> bool:
        """Whether the next piece goes on with a line that should stay in one piece."""
        return self._shown < self._taken

    @property
    def is_at_end(self) -> bool:
        """Whether everything has been looked at; what is written from now on is told as growth."""
        return not self._has_more and not self.is_amid

    def next_piece(self, *, is_ended: bool) -> bytes | None:
        """The next of what may be shown; `None` when there is no more for now.

        Args:
            is_ended: `end` has been called, so the last line is shown without its newline.
        """
        while True:
            if self._shown < self._taken:
                return self._show(self._read(self._shown, self._taken))
            chunk = self._read(self._seen, self._end)
            held = self._seen - self._shown
            has_more = self._has_more = len(chunk) == CHUNK_BYTES and self._seen + CHUNK_BYTES < self.size()
            if is_ended and not has_more and held + len(chunk):
                count = len(chunk)
            elif not chunk:
                return None
            elif not (count := self.cut.takes(chunk, held, more=has_more)):
                if not has_more and len(chunk) <= SHORT_BYTES:
                    return None
                self._seen += len(chunk)
                continue
            self._taken = self._seen = self._seen + count
            if not held:
                return self._show(chunk[:count])

    def _read(self, begin: int, end: int | None) -> bytes:
        count = CHUNK_BYTES if end is None else max(0, min(CHUNK_BYTES, end - begin))
        try:
            return os.pread(self._fd, count, begin)
        except OSError:
            return b""  # the disk fails, or a server is gone: the worker hears of it, too

    def _show(self, data: bytes) -> bytes:
        self._shown += len(data) or self._taken - self._shown  # what can't be read any more is passed over
        self._punch()
        return self.cut.feed(data)

    def _punch(self) -> None:
        """Gives back what has been shown, but for the end, which may tell the cause of a failure."""
        end = (self._shown if self._sharer is None else min(self._shown, self._sharer.offset)) - TAIL_BYTES
        if self._is_scratch and end - self._punched >= PUNCH_BYTES and _fallocate is not None:
            _fallocate(self._fd, _PUNCH_HOLE | _KEEP_SIZE, self._punched, end - self._punched)
            self._punched = end

    def close(self) -> None:
        os.close(self._fd)
        if self._is_scratch and self.is_ended:
            self._path.unlink(missing_ok=True)


def _find_fallocate() -> Callable[[int, int, int, int], int] | None:
    """fallocate(2): the standard library has no call that gives a part of a file back."""
    try:
        function = ctypes.CDLL(None).fallocate
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return function


_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_fallocate = _find_fallocate()
