"""The children, descriptors and threads of this process, and workers for a supervisor in it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from aelastic import WorkerSpec
from aelastic.base.host import proc_table
from kit.waiting import DEADLINE_S, FIRST_PAUSE_S, LONGEST_PAUSE_S


def python(code: str, **spec: Any) -> WorkerSpec:
    return WorkerSpec(**{"entrypoint": sys.executable, "args": ("-c", code), "max_restarts": 0, **spec})


async def until(condition: Callable[[], Any]) -> Any:
    """Returns the value of the condition once it is true, for states of this loop or of other processes without an event."""
    pause_s = FIRST_PAUSE_S
    async with asyncio.timeout(DEADLINE_S):
        while not (answer := condition()):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return answer


def children() -> set[int]:
    """Child processes of this one, including dead ones."""
    table = (proc_table.process(name) for name in os.listdir("/proc") if name.isdigit())
    return {entry.pid for entry in table if entry is not None and entry.parent == os.getpid()}


def descriptors() -> dict[int, str]:
    """Open files by number, except the one that lists them."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass
    return found


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}
