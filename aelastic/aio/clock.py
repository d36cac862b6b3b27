"""The loop's own clock, for tasks and for what the loop calls itself.

anyio finds its clock by asking which library runs.  Where `sniffio` is installed, the answer is known in a task only:
in a protocol's callback, a timer or a signal handler it is an exception.  So no module asks anyio (the linter's rule).
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime


def now() -> float:
    """Monotonic seconds, as deadlines are given in.

    Raises:
        RuntimeError: no loop runs in this thread.
    """
    return asyncio.get_running_loop().time()


def wall_ms() -> int:
    """Milliseconds since 1970 by this host's wall clock, which may jump: for numbers that outlive a process only."""
    return int(datetime.now(UTC).timestamp() * 1000)
