"""Threads for what blocks, where the host may refuse another one.

A worker that starts threads or processes up to a limit (`pids.max`, `ulimit -u`) takes the agent's share, too.  So one
thread is there before a worker runs (`keep_one`); what finds no thread waits until that one is free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.to_thread

from aelastic.aio import clock
from aelastic.host.usage import is_refused_thread

T = TypeVar("T")
Args = TypeVarTuple("Args")

_log = logging.getLogger(__name__)

# Of threads, and of the processes of others that count as such.
LOOK_AGAIN_S = 0.05
# Short scarcity is no news: a worker that dies of it takes its processes along.
TELL_AFTER_S = 1.0


async def run_sync(
    function: Callable[[Unpack[Args]], T],
    *args: *Args,
    abandon_on_cancel: bool = False,
    limiter: anyio.CapacityLimiter | None = None,
) -> T:
    """As `anyio.to_thread.run_sync`, which it calls; waits for a thread where the host lets no more be started."""
    waits_since: float | None = None
    while True:
        try:
            return await anyio.to_thread.run_sync(function, *args, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
        except RuntimeError as error:
            if not is_refused_thread(error):
                raise
        now = clock.now()
        waits_since = now if waits_since is None else waits_since
        if 0 <= now - waits_since - TELL_AFTER_S < LOOK_AGAIN_S:
            _log.warning("no more threads can be started on this host (ulimit -u, pids.max): output may be late")
        await anyio.sleep(LOOK_AGAIN_S)


async def keep_one() -> None:
    """Starts a thread that stays until the loop ends: of those that are idle, the last one used is kept.

    Raises:
        RuntimeError: the host has refused it for a second (`aelastic.host.usage.shortage_of` tells).
    """
    with anyio.move_on_after(TELL_AFTER_S):
        await run_sync(int)
        return
    await anyio.to_thread.run_sync(int)


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
        return await run_sync(function, abandon_on_cancel=True, limiter=limiter or anyio.CapacityLimiter(1))
