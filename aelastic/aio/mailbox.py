"""A mailbox: what happened, in the order it was posted, for one reader with one deadline."""

from __future__ import annotations

import math
from collections import deque
from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class Mailbox(Generic[T]):
    """The queue of a core's events: the task that runs the core waits here.

    Its length is bounded by its writers: each task posts a known number of events and ends, and a connection is not
    read while too many of its messages wait here.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._arrived = anyio.Event()
        self._failure: Exception | None = None

    def post(self, item: T) -> None:
        """Never blocks; safe in a signal handler of the loop."""
        self._items.append(item)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """What the loop called has failed: the reader raises it, and ends with it."""
        self._failure = self._failure or error
        self._arrived.set()

    async def next(self, deadline: float | None) -> T | None:
        """The next item, or `None` once the deadline (of the loop's clock) has passed without one."""
        if self._failure is not None:
            raise self._failure
        if self._items:  # to wait for nothing costs more than most events
            return self._items.popleft()
        with anyio.CancelScope(deadline=math.inf if deadline is None else deadline):
            while not self._items and self._failure is None:
                self._arrived = anyio.Event()
                await self._arrived.wait()
        if self._failure is not None:
            raise self._failure
        return self._items.popleft() if self._items else None
