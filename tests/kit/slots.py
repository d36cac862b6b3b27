"""Limits tests with processes to one per core at a time, across all test runs on the machine.

A slot is a lock on a file that all processes of the machine share (flock(2)), so it becomes free however its holder ends.
inotify(7) wakes waiting processes: a holder touches its file, and the kernel closes the file of one that dies.
"""

from __future__ import annotations

import fcntl
import os
import select
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit import inotify

FOLDER = Path(tempfile.gettempdir()) / "aelastic-test-slots"
# A test may run pytest itself: the processes of that run belong to the test.
_HELD = "TEST_SLOT_IS_HELD"
# The kernel reports each release.  This is for a folder that somebody has removed.
_LOOK_AGAIN_S = 5.0


class Slots:
    """The slots of this machine.

    Args:
        folder: the folder of the files.
        count: the number of slots.
    """

    def __init__(self, folder: Path, count: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = [_opened(folder / str(number)) for number in range(count)]
        self._releases = inotify.Inotify()
        self._releases.add(folder, inotify.CLOSED | inotify.ATTRIBUTES)

    def acquire(self) -> int:
        """Waits for a free slot; returns its number."""
        while (number := self._free_one()) is None:
            select.select([self._releases], [], [], _LOOK_AGAIN_S)
            self._releases.drain()
        return number

    def release(self, number: int) -> None:
        fcntl.flock(self._files[number], fcntl.LOCK_UN)
        os.utime(self._files[number])  # wakes waiting processes

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._releases.close()

    def _free_one(self) -> int | None:
        for number, file in enumerate(self._files):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return number
        return None


def _opened(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    if os.fstat(file).st_uid == os.getuid():
        os.fchmod(file, 0o666)  # other users wait for the same slots
    return file


_slots = Slots(FOLDER, os.cpu_count() or 1)  # before any test counts the descriptors of its process


@contextmanager
def slot() -> Iterator[None]:
    """Holds a slot of this machine."""
    if os.environ.get(_HELD):
        yield
        return
    number = _slots.acquire()
    os.environ[_HELD] = "1"
    try:
        yield
    finally:
        del os.environ[_HELD]
        _slots.release(number)
