"""Warnings that others cannot use to flood the log, and unexpected exceptions in one line."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import traceback
from typing import Any

_log = logging.getLogger(__name__)

# Interval between reports of a loop's exceptions, and of misbehaviour of others, who may do it all the time.
WARN_INTERVAL_S = 60.0
# How many characters of an exception are shown: it may contain received data.
DESCRIBED_MAX = 200


class RareWarnings:
    """Warnings about misbehaviour of others: at most one per minute with the same words.

    Args:
        log: the logger to use.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged: dict[str, tuple[float, int]] = {}  # when a message was logged, and how many were not since

    def warn(self, message: str, *args: object, now: float) -> None:
        """Warns; the next warning with these words counts those that were suppressed."""
        logged_at, suppressed = self._logged.get(message, (-math.inf, 0))
        if now - logged_at < WARN_INTERVAL_S:
            self._logged[message] = logged_at, suppressed + 1
            return
        self._logged[message] = now, 0
        more = f" (and {suppressed} more since the last such line)" if suppressed else ""
        self._log.warning(f"{message}%s", *args, more)


def described(error: BaseException) -> str:
    """Describes an unexpected exception, and where it was raised, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    *_, (file, line, _, _) = traceback.extract_tb(error.__traceback__) or [("?", 0, "", "")]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text[:DESCRIBED_MAX]} ({os.path.basename(file)}:{line})"


class ExceptionsOnce:
    """The exception handler of our loops: shows one traceback per minute if something keeps failing."""

    def __init__(self) -> None:
        self._logged_at = -math.inf
        self._suppressed = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if loop.time() - self._logged_at < WARN_INTERVAL_S:
            self._suppressed += 1
            return
        more, self._suppressed, self._logged_at = self._suppressed, 0, loop.time()
        loop.default_exception_handler(context)
        if more:
            _log.error("%d more exceptions of this event loop were not logged since the last one", more)
