"""The end of what a worker wrote to stderr, which tells why it died.  May block, as disks do."""

from __future__ import annotations

import os
from pathlib import Path

from aelastic.logs.follower import HEAD_BYTES, TAIL_BYTES, TRACEBACK

# An exception's message may be long: so far back its traceback's beginning is looked for.  Takes 10 ms.
SEARCH_BYTES = 16 << 20
_STEP_BYTES = 1 << 20


def tail_of(path: Path, seen: bytes, *, is_searched: bool) -> str:
    """The end of a file; "" if it cannot be read.

    Args:
        path: the file.
        seen: the beginning of the last traceback that was seen in it, which may have been freed since.
        is_searched: if no traceback begins in the end of the file, what is given begins with the last one before it.
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
    """Where a file's last traceback begins, and what follows; empty if none does."""
    stop = max(0, end - SEARCH_BYTES)
    while end > stop:
        begin = max(stop, end - _STEP_BYTES)
        # A little more, for one that begins here and ends there.
        at = os.pread(file, end - begin + len(TRACEBACK), begin).rfind(TRACEBACK)
        if at >= 0:
            return os.pread(file, HEAD_BYTES, begin + at)
        end = begin
    return b""
