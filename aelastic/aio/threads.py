"""Threads for what may hang with a disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


async def in_thread(function: Callable[[], T], *, within_s: float, limiter: anyio.CapacityLimiter | None = None) -> T:
    """Runs a function that reads or writes files, and waits for it no longer than that.

    A thread that has not ended by then, or when the caller is cancelled, is left to itself: it ends when the disk
    answers, and what it returns is dropped.

    Args:
        function: what to run.
        within_s: how long to wait for it, and for a thread.
        limiter: limits the threads at a time; by default, no other caller is waited for.

    Raises:
        TimeoutError: it has not ended in time.
    """
    with anyio.fail_after(within_s):
        return await anyio.to_thread.run_sync(
            function, abandon_on_cancel=True, limiter=limiter or anyio.CapacityLimiter(1)
        )
