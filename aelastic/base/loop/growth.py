"""Waits for files to grow, or to be opened."""

from __future__ import annotations

import ctypes
import os

import anyio
import anyio.lowlevel
import anyio.to_thread

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


class GrowthWatch:
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
    """Returns the C library, and an inotify descriptor, or `None`."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(libc, "inotify_init1") else -1
    return libc, None if fd == -1 else fd
