"""Waits for jobs: for changes of their files, and the end of their processes.

All jobs of this process share one inotify(7) descriptor and one epoll(7), which exist before a test counts descriptors.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit import inotify
from kit.warm.kept import KeptProcess

# Nothing takes this long, even on a slow machine; a test that hangs should report where.
DEADLINE_S = float(os.environ.get("TEST_DEADLINE_S", "30"))
# Conditions without an event (a page, a state in /proc) are checked again after growing pauses.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.1

_CHANGES = inotify.MODIFIED | inotify.MOVED_HERE | inotify.CREATED | inotify.DELETED


class Events:
    """The events of jobs."""

    def __init__(self) -> None:
        self._changes = inotify.Inotify()
        self._epoll = select.epoll()
        self._epoll.register(self._changes, select.EPOLLIN)
        self._processes: dict[int, KeptProcess] = {}
        self._watches: dict[Path, int] = {}

    def watch(self, folder: Path) -> None:
        """Watches a folder for files that are created, written, renamed or deleted."""
        self._watches[folder] = self._changes.add(folder, _CHANGES)

    def unwatch(self, folder: Path) -> None:
        number = self._watches.pop(folder, None)
        if number is not None:
            self._changes.remove(number)

    def add(self, process: KeptProcess) -> None:
        """Watches for the end of a process, and of everything that it started."""
        self._processes[process.fileno()] = process
        self._epoll.register(process.fileno(), select.EPOLLIN)

    def discard(self, process: KeptProcess) -> None:
        if self._processes.pop(process.fileno(), None) is not None:
            self._epoll.unregister(process.fileno())

    def wait(self, timeout: float) -> None:
        """Returns at the next event, or after the timeout."""
        for fd, _ in self._epoll.poll(timeout):
            process = self._processes.get(fd)
            if process is None:
                self._changes.drain()
                continue
            process.read()
            if process.is_over:
                self.discard(process)


events = Events()


def wait_for(what: str | Callable[[], str], condition: Callable[[], Any], limit_s: float = DEADLINE_S) -> Any:
    """Returns the value of the condition once it is true."""
    deadline = time.monotonic() + limit_s
    pause_s = FIRST_PAUSE_S
    while not (answer := condition()):
        rest_s = deadline - time.monotonic()
        if rest_s < 0:
            pytest.fail(f"not after {limit_s:g} s: {what if isinstance(what, str) else what()}")
        events.wait(min(pause_s, rest_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return answer
