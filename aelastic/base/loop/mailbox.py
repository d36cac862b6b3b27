"""The only queue of a core's events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """The queue of a core's events, on which the task that runs the core waits.

    The writers bound its length: each task posts a known number of events and ends, and a connection is not read while
    too many of its messages wait here.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._arrived: asyncio.Future[None] | None = None  # set while the reader waits

    @property
    def is_empty(self) -> bool:
        """Whether there are no items."""
        return not self._items

    def post(self, item: T) -> None:
        """Adds an item.  Never blocks; safe in a signal handler of the loop."""
        self._items.append(item)
        self._wake_up()

    async def next_by(self, deadline: Callable[[], float | None]) -> T | None:
        """Like `next`, but computes the deadline only if there are no items."""
        return self._items.popleft() if self._items else await self.next(deadline())

    async def next(self, deadline: float | None) -> T | None:
        """Waits for the next item; returns `None` once the deadline (of the loop's clock) has passed without one."""
        if not self._items:  # an unnecessary wait costs more than most events
            await self._arrival(deadline)
        return self._items.popleft() if self._items else None

    async def _arrival(self, deadline: float | None) -> None:
        # A leader of many nodes waits here often: a cancel scope and an event would cost three times as much.
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
