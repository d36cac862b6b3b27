"""A job's keys for callers that block, as torch does: a loop in a thread of its own, and calls into it.

The thread starts with the first call and ends with `stop`; a call after that starts another.  It is a daemon: an agent
that ends without `stop` does not wait for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, Concatenate, ParamSpec, TypeVar

import anyio

from aelastic.errors import RendezvousConnectionError
from aelastic.rdzv.torchrun_plugin.keys import JobKeys

P = ParamSpec("P")
T = TypeVar("T")

# Hanging up takes milliseconds.
END_TIMEOUT_S = 2.0


class KeysThread:
    """Keeps the keys alive, and calls them.

    Args:
        open_keys: makes them, for each thread anew.
    """

    def __init__(self, open_keys: Callable[[], JobKeys]) -> None:
        self._open_keys = open_keys
        self._lock = threading.RLock()  # of starting and stopping; a finalizer may stop in the midst of anything
        self._running: _Running | None = None

    def call(
        self, method: Callable[Concatenate[JobKeys, P], Coroutine[Any, Any, T]], *args: P.args, **keywords: P.kwargs
    ) -> T:
        """Calls a method of `JobKeys` in the thread, and waits; interrupted, it is given up there, too.

        Raises:
            InputError: a setting that cannot work.
            RendezvousConnectionError: stopped while it was waited for; or what the method raises.
        """
        with self._lock:
            if self._running is None:
                self._running = _Running(self._open_keys())
            running = self._running
        future = asyncio.run_coroutine_threadsafe(method(running.keys, *args, **keywords), running.loop)
        try:
            return future.result()
        except CancelledError:
            raise RendezvousConnectionError("the rendezvous was shut down meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Ends the thread and its connections.  Nothing is kept alive any more."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.stop()


class _Running:
    """A thread that runs a loop; returns when that runs."""

    def __init__(self, keys: JobKeys) -> None:
        self.keys = keys
        self.loop: asyncio.AbstractEventLoop
        self._stop: anyio.Event
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="etcd-v3", daemon=True)
        self._thread.start()
        self._is_up.wait()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(END_TIMEOUT_S)

    async def _run(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), anyio.Event()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.keys.keep_alive)
                self._is_up.set()
                await self._stop.wait()
                tasks.cancel_scope.cancel()
        finally:
            await self._end_calls()
            await self.keys.aclose()

    @staticmethod
    async def _end_calls() -> None:
        """Ends what others wait for, lest it connects once more."""
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
