"""File changes, reported by the kernel through inotify(7)."""

from __future__ import annotations

import ctypes
import os

MODIFIED, ATTRIBUTES, CLOSED, MOVED_HERE, CREATED, DELETED = 0x2, 0x4, 0x18, 0x80, 0x100, 0x200


class Inotify:
    """A descriptor that is readable when something has changed."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1: see fs.inotify.max_user_instances in inotify(7)")

    def fileno(self) -> int:
        return self._fd

    def add(self, path: str | os.PathLike[str], changes: int) -> int:
        """Adds a watch; returns its number."""
        number: int = self._libc.inotify_add_watch(self._fd, os.fsencode(path), changes)
        if number < 0:
            raise OSError(ctypes.get_errno(), f"inotify_add_watch: {path}")
        return number

    def remove(self, number: int) -> None:
        self._libc.inotify_rm_watch(self._fd, number)

    def drain(self) -> None:
        """Discards all changes so far."""
        try:
            while os.read(self._fd, 1 << 16):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        os.close(self._fd)
