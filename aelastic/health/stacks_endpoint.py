"""Stacks for whoever asks over HTTP: all who ask at the same time get the same."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from aelastic.observe.run_events import StacksTaken

# Stacks are there in 2 s; the disk they are read from may be slow.
TIMEOUT_S = 8.0
# Who asks again within it gets the same: each time stops the workers for some milliseconds.
INTERVAL_S = 1.0
# Of one worker, and of all: 100 threads with 10 frames have 64 KiB, and a person reads no more than some of them.
FILE_BYTES_MAX = 64 << 10
BYTES_MAX = 1 << 20
# One time is at most so long (`stacks.OUTPUT_BYTES_MAX`).
TAIL_BYTES = 1 << 20
_HEAD = b"=== "


class Collection:
    """Stacks that are being taken, or were."""

    def __init__(self) -> None:
        self.is_done = anyio.Event()
        self.ended = 0.0
        self.taken: StacksTaken | None = None
        self.texts: Mapping[int, str] = {}  # by local rank
        self.error = ""  # why there are none


class StacksEndpoint:
    """Takes them, one time after the other.

    Args:
        collect_stacks: takes the workers' stacks; its argument says why.
    """

    def __init__(self, collect_stacks: Callable[[str], Awaitable[StacksTaken]]) -> None:
        self._collect_stacks = collect_stacks
        self._last: Collection | None = None

    async def take(self, tasks: TaskGroup) -> Collection:
        """Waits for stacks that are taken now, or were a moment ago.

        Args:
            tasks: they are taken in one of these: whoever asked may go away.
        """
        last = self._last
        if last is None or (last.is_done.is_set() and anyio.current_time() - last.ended >= INTERVAL_S):
            last = self._last = Collection()
            tasks.start_soon(self._collect, last, name="health: stacks")
        await last.is_done.wait()
        return last

    async def _collect(self, collection: Collection) -> None:
        try:
            with anyio.fail_after(TIMEOUT_S):
                taken = await self._collect_stacks("asked over HTTP")
                collection.texts = await anyio.to_thread.run_sync(_texts_of, taken, abandon_on_cancel=True)
            collection.taken = taken
        except Exception as error:  # noqa: BLE001  said to who asked; it is no reason for anything else to end
            collection.error = str(error) or f"not within {TIMEOUT_S:g} s"
        finally:
            collection.ended = anyio.current_time()
            collection.is_done.set()


def _texts_of(taken: StacksTaken) -> dict[int, str]:
    """What was written for each worker, by local rank; of what is long, the beginning."""
    found: dict[int, str] = {}
    left = BYTES_MAX
    for rank in sorted(taken.source) if taken.path else ():
        # In a folder of its own, or in one that ranks share.
        for path in (os.path.join(taken.path, str(rank), "stack.txt"), os.path.join(taken.path, f"stack_{rank}.txt")):
            with suppress(OSError):
                data = _last_of(path)[: min(left, FILE_BYTES_MAX)]
                found[rank] = data.decode(errors="replace")
                left -= len(data)
                break
    return found


def _last_of(path: str) -> bytes:
    """Each time is added at the end, under a line that begins with `===`."""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - TAIL_BYTES))
        data = file.read(TAIL_BYTES)
    return data[max(0, data.rfind(b"\n" + _HEAD) + 1) :]
