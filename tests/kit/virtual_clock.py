"""A virtual clock for asyncio: when nothing is ready, time jumps to the next deadline.

This makes tests deterministic, not merely quick: nothing runs outside the loop.  Calls that would go to a thread run at
once, inline, and the loop polls the kernel, without waiting, before time may jump.  So a test does not depend on a scheduler.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from kit.loop_guard import as_in_a_thread


class Deadlock(AssertionError):
    """No task is ready and no timer is armed: all tasks would wait forever."""


class _JumpSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise Deadlock("no task is ready and no timer is armed")
        self.now += timeout
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop with a virtual clock that starts at 0."""

    def __init__(self) -> None:
        self._jump = _JumpSelector()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Runs it now; aiofiles uses this."""
        future = self.create_future()
        try:
            with as_in_a_thread():
                future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  handed to the task that awaits it
            future.set_exception(error)
        return future


class DiskHangs(BaseException):
    """Raised by a test's function where a real one would block its thread forever."""


async def _run_inline(func: Callable[..., Any], *args: Any, abandon_on_cancel: bool = False, **options: Any) -> Any:
    """Replaces `anyio.to_thread.run_sync`."""
    await anyio.lowlevel.checkpoint()
    try:
        with as_in_a_thread():
            return func(*args)
    except DiskHangs:
        with anyio.CancelScope(shield=not abandon_on_cancel):
            await anyio.sleep_forever()


def on_virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an asynchronous test on its own loop, whose clock jumps."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        async def main() -> None:
            await test(*args, **fixtures)

        with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
            patch.setattr(anyio.to_thread, "run_sync", _run_inline)
            runner.run(main())

    return run
