"""Takes stack dumps for HTTP clients."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import MappingProxyType

import anyio

from aelastic.base.loop import clock
from aelastic.base.loop.threads import run_sync
from aelastic.base.record import Record
from aelastic.observe.run_events import StacksTaken

# Stacks take up to 2 s; the disk they are read from may be slow.
TIMEOUT_S = 8.0
# A client that asks again within this time gets the same dump: each one stops the workers for some milliseconds.
INTERVAL_S = 1.0
# For one worker, and for all: 100 threads with 10 frames have 64 KiB, and a person reads no more than some of them.
FILE_BYTES_MAX = 64 << 10
BYTES_MAX = 1 << 20
# One dump is at most this long (`stacks.OUTPUT_BYTES_MAX`).
TAIL_BYTES = 1 << 20
_HEAD = b"=== "


class Collection(Record):
    """One dump of the stacks of this node's workers."""

    taken: StacksTaken | None = None
    texts: Mapping[int, str] = MappingProxyType({})  # by local rank
    error: str = ""  # why there are none


class StacksEndpoint:
    """Serialises stack dumps for HTTP clients: those that ask at the same time get the same dump.

    Args:
        collect_stacks: takes the workers' stacks; its argument is the reason.
    """

    def __init__(self, collect_stacks: Callable[[str], Awaitable[StacksTaken]]) -> None:
        self._collect_stacks = collect_stacks
        self._turn = anyio.Lock()
        self._last = Collection()
        self._began_at = self._ended_at = -INTERVAL_S

    async def take(self) -> Collection:
        """Returns stacks taken now or a moment ago."""
        asked_at = clock.now()
        async with self._turn:
            if self._ended_at < asked_at and clock.now() - self._ended_at >= INTERVAL_S:
                await anyio.sleep_until(self._began_at + INTERVAL_S)  # a client may ask and leave at once
                self._began_at = clock.now()
                try:
                    with anyio.fail_after(TIMEOUT_S):
                        taken = await self._collect_stacks("asked over HTTP")
                        texts = await run_sync(texts_of, taken, abandon_on_cancel=True)
                    self._last = Collection(taken, texts)
                except Exception as error:  # noqa: BLE001  it is the client's answer, and ends nothing else
                    self._last = Collection(error=str(error) or f"not within {TIMEOUT_S:g} s")
                self._ended_at = clock.now()
            return self._last


def texts_of(taken: StacksTaken) -> dict[int, str]:
    """Returns the dump of each worker, by local rank; only the beginning of long ones."""
    found: dict[int, str] = {}
    left = BYTES_MAX
    for rank in sorted(taken.source) if taken.path else ():
        # In the worker's own folder, or in one that ranks share.
        for path in (os.path.join(taken.path, str(rank), "stack.txt"), os.path.join(taken.path, f"stack_{rank}.txt")):
            with suppress(OSError):
                data = _last_of(path)[: min(left, FILE_BYTES_MAX)]
                found[rank] = data.decode(errors="replace")
                left -= len(data)
                break
    return found


def _last_of(path: str) -> bytes:
    """Returns the last dump in the file: each is appended, under a line that begins with `===`."""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - TAIL_BYTES))
        data = file.read(TAIL_BYTES)
    return data[max(0, data.rfind(b"\n" + _HEAD) + 1) :]
