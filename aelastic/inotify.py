"""Tells when files grow (`inotify(7)`).

The standard library does not have it; this is all we need of it.  Where it is not to be had (not Linux, or all of the
user's instances are taken), looking at intervals takes its place.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

import anyio

IN_MODIFY = 0x00000002
# The watch that stands for all of them: more happened than the kernel keeps (IN_Q_OVERFLOW).
LOST = -1
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows
# Where the kernel does not tell: as often as torch's agent looks at its log files.
LOOK_AGAIN_S = 0.1


class Growth:
    """Waits for any of the watched files to grow."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._fd: int | None = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        except AttributeError:
            self._fd = None
        if self._fd == -1:
            self._fd = None

    def watch(self, path: Path) -> int | None:
        """Starts to watch a file; gives the number it is named by, `None` where the kernel does not tell."""
        if self._fd is None:
            return None
        watch: int = self._libc.inotify_add_watch(self._fd, os.fsencode(path), IN_MODIFY)
        return None if watch == -1 else watch

    def forget(self, watch: int) -> None:
        if self._fd is not None:
            self._libc.inotify_rm_watch(self._fd, watch)

    async def wait(self, *, blind: bool) -> set[int]:
        """Which files have grown; `LOST` among them: any may have.

        Args:
            blind: some file could not be watched: come back after an interval in any case.
        """
        if self._fd is None:
            await anyio.sleep(LOOK_AGAIN_S)
            return set()
        with anyio.move_on_after(LOOK_AGAIN_S if blind else None):
            await anyio.wait_readable(self._fd)
            return self._read()
        return set()

    def _read(self) -> set[int]:
        assert self._fd is not None
        try:
            events = os.read(self._fd, 65536)
        except BlockingIOError:
            return set()
        grown, at = set(), 0
        while at < len(events):
            watch, _, _, length = _EVENT.unpack_from(events, at)
            grown.add(watch)
            at += _EVENT.size + length
        return grown

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
