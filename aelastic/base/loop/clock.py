"""The time of the event loop, and that of the host."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime


def now() -> float:
    """Returns monotonic seconds, the unit of deadlines: the loop's own clock, in tasks and in callbacks of the loop.

    anyio finds its clock by detecting the running library.  If `sniffio` is installed, that works in a task only: in a
    protocol's callback, a timer or a signal handler it raises an exception.  So no module uses anyio's clock (a rule of
    the linter).

    Raises:
        RuntimeError: no loop runs in this thread.
    """
    return asyncio.get_running_loop().time()


def wall_ms() -> int:
    """Returns milliseconds since 1970 on this host's wall clock, which may jump: for numbers that outlive a process."""
    return int(datetime.now(UTC).timestamp() * 1000)
