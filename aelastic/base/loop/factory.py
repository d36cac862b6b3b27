"""Event loops by name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aelastic.base.loop.reports import ExceptionsOnce

_log = logging.getLogger(__name__)

LOOPS = ("uvloop", "asyncio")


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Returns the function that makes a loop of that name; asyncio's own if uvloop is not installed."""
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
