"""Event loops by name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)

LOOPS = ("uvloop", "asyncio")


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """The function that makes a loop of that name; asyncio's own where uvloop is not installed."""
    if name == "uvloop":
        try:
            import uvloop
        except ImportError as error:
            _log.info("uvloop cannot be imported (%s): running on asyncio", error)
        else:
            return uvloop.new_event_loop
    return asyncio.SelectorEventLoop
