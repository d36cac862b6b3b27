"""Calls that block, or may hang with a disk, even if the host refuses another thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.lowlevel
import anyio.to_thread

from aelastic.base.host.shortages import is_refused_thread
from aelastic.base.loop.clock import now

T = TypeVar("T")
Args = TypeVarTuple("Args")

_log = logging.getLogger(__name__)

# How often to try again to start a thread.
LOOK_AGAIN_S = 0.05
# A short shortage is not worth a line: a worker that dies of it takes its processes along.
WARN_AFTER_S = 1.0


async def run_sync(
    function: Callable[[Unpack[Args]], T],
    *args: *Args,
    abandon_on_cancel: bool = False,
    limiter: anyio.CapacityLimiter | None = None,
) -> T:
    """Calls `anyio.to_thread.run_sync`; waits for a thread if the host lets no more be started.

    A worker that starts threads or processes up to a limit (`pids.max`, `ulimit -u`) also uses up the agent's share.
    So one thread is started before any worker runs (`keep_one`); a call that gets no thread waits until that is free.
    """
    waits_since: float | None = None
    while True:
        try:
            return await anyio.to_thread.run_sync(function, *args, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
        except RuntimeError as error:
            if not is_refused_thread(error):
                raise
        at = now()
        waits_since = at if waits_since is None else waits_since
        if 0 <= at - waits_since - WARN_AFTER_S < LOOK_AGAIN_S:
            _log.warning(
                "this host cannot start more threads (ulimit -u, pids.max): output may be late",
                extra={"topic": "the-host-is-out-of-processes-or-memory"},
            )
        await anyio.sleep(LOOK_AGAIN_S)


async def keep_one() -> None:
    """Starts a thread that stays until the loop ends: among idle threads, the last one used is kept.

    Raises:
        RuntimeError: the host has refused it for a second (`aelastic.base.host.shortages.shortage_of` tells why).
    """
    with anyio.move_on_after(WARN_AFTER_S):
        await run_sync(int)
        return
    await anyio.to_thread.run_sync(int)


async def in_thread(function: Callable[[], T], *, within_s: float, limiter: anyio.CapacityLimiter | None = None) -> T:
    """Runs a function that reads or writes files, and waits for it at most `within_s`.

    A thread that has not ended by then, or when the caller is cancelled, is abandoned: it ends when the disk answers,
    and its result is dropped.

    Args:
        function: what to run.
        within_s: how long to wait for it, and for a thread.
        limiter: limits the number of threads; by default, the call does not wait for other callers.

    Raises:
        TimeoutError: it has not ended in time.
    """
    with anyio.fail_after(within_s):
        return await run_sync(function, abandon_on_cancel=True, limiter=limiter or anyio.CapacityLimiter(1))
