"""A mailbox: what happened, in the order it was posted, for one reader with one deadline."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """The queue of a core's events: the task that runs the core waits here.

    Its length is bounded by its writers: each task posts a known number of events and ends, and a connection is not
    read while too many of its messages wait here.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._failure: Exception | None = None
        self._arrived: asyncio.Future[None] | None = None  # while the reader waits

    def post(self, item: T) -> None:
        """Never blocks; safe in a signal handler of the loop."""
        self._items.append(item)
        self._wake_up()

    def fail(self, error: Exception) -> None:
        """What the loop called has failed: the reader raises it, and ends with it."""
        self._failure = self._failure or error
        self._wake_up()

    async def next(self, deadline: float | None) -> T | None:
        """The next item, or `None` once the deadline (of the loop's clock) has passed without one."""
        if not self._items and self._failure is None:  # to wait for nothing costs more than most events
            await self._arrival(deadline)
        if self._failure is not None:
            raise self._failure
        return self._items.popleft() if self._items else None

    async def _arrival(self, deadline: float | None) -> None:
        # A coordinator of many nodes waits here often: a cancel scope and an event would cost three times as much.
        loop = asyncio.get_running_loop()
        self._arrived = loop.create_future()
        timer = None if deadline is None else loop.call_at(deadline, self._wake_up)
        try:
            await self._arrived
        finally:
            self._arrived = None
            if timer is not None:
                timer.cancel()

    def _wake_up(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
