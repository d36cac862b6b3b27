"""A store in this process, shared by several agents of a test, and the cell in it."""

from __future__ import annotations

import anyio.lowlevel

from aelastic.errors import RendezvousConnectionError
from aelastic.rdzv.settings import LEASE_S
from aelastic.rdzv.stores.endpoint_cell import EndpointCell
from aelastic.rdzv.stores.store import Store


class SharedWorld:
    """Shared by the stores of one process: cells that are always consistent, and answer unless a test stops that."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}
        self.is_down = False


class InProcessStore(Store):
    """One agent's store for one run id in a shared world."""

    name = "a store in this process"
    own_address = endpoint_host = "127.0.0.1"  # for all agents that share it

    def __init__(self, run_id: str, world: SharedWorld) -> None:
        self._run_id, self._world = run_id, world

    async def get(self) -> bytes:
        await anyio.lowlevel.checkpoint()
        if self._world.is_down:
            raise RendezvousConnectionError("the store in this process is down")
        return self._world.texts.get(self._run_id, b"")

    async def compare_set(self, expected: bytes, new: bytes) -> bytes:
        text = await self.get()
        if text == expected:
            self._world.texts[self._run_id] = text = new
        return text

    async def aclose(self) -> None:
        """Does nothing: the world belongs to its creator."""


class InProcessCell(EndpointCell):
    """The cell in such a store."""

    def __init__(self, run_id: str, world: SharedWorld) -> None:
        super().__init__(InProcessStore(run_id, world), None, LEASE_S)
