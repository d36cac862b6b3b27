"""Event loops by name."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

LOOPS = ("uvloop", "asyncio")
TELL_INTERVAL_S = 60.0


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """The function that makes a loop of that name; asyncio's own where uvloop is not installed."""
    make: Callable[[], asyncio.AbstractEventLoop] = asyncio.SelectorEventLoop
    if name == "uvloop":
        try:
            import uvloop
        except ImportError as error:
            _log.info("uvloop cannot be imported (%s): running on asyncio", error)
        else:
            make = uvloop.new_event_loop

    def make_loop() -> asyncio.AbstractEventLoop:
        loop = make()
        loop.set_exception_handler(ExceptionsOnce())
        return loop

    return make_loop


class ExceptionsOnce:
    """The exception handler of a loop of ours: of what fails again and again, it shows one traceback in a minute."""

    def __init__(self) -> None:
        self._told_at = -math.inf
        self._untold = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if loop.time() - self._told_at < TELL_INTERVAL_S:
            self._untold += 1
            return
        more, self._untold, self._told_at = self._untold, 0, loop.time()
        loop.default_exception_handler(context)
        if more:
            _log.error("%d more exceptions of this event loop were not shown since the last one", more)
