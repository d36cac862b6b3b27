"""A board in this process, for several agents of a test that share one: that of the simulation, which counts renewals."""

from __future__ import annotations

import anyio.lowlevel

from aelastic.errors import RendezvousConnectionError
from aelastic.rdzv.board import Board, Candidate, LeaderRecord
from kit.simulated import board as simulated
from kit.simulated.world import World


class SharedWorld:
    """What the boards of one process share: a store that is always consistent, and answers unless told not to."""

    def __init__(self) -> None:
        self.boards: dict[str, simulated.Board] = {}
        self.is_down = False


class InProcessBoard(Board):
    """One run id in a shared world, as one agent uses it."""

    name = "a board in this process"
    own_address = endpoint_host = "127.0.0.1"  # for all agents that share it

    def __init__(self, run_id: str, world: SharedWorld) -> None:
        self._world = world
        self._board = world.boards.setdefault(run_id, simulated.Board(World(0), None))

    async def open(self) -> None:
        await self._reach()

    async def read(self) -> LeaderRecord | None:
        await self._reach()
        return self._board.read()

    async def campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        await self._reach()
        return self._board.campaign(candidate, seen, above)

    async def renew(self, record: LeaderRecord) -> LeaderRecord | None:
        await self._reach()
        return self._board.renew(record)

    async def publish(self, record: LeaderRecord, verdict: str) -> bool:
        await self._reach()
        return self._board.publish(record, verdict)

    async def resign(self, record: LeaderRecord) -> None:
        await self._reach()
        self._board.resign(record)

    async def aclose(self) -> None:
        """Nothing to release: the world belongs to its maker."""

    async def _reach(self) -> None:
        await anyio.lowlevel.checkpoint()
        if self._world.is_down:
            raise RendezvousConnectionError("the board in this process is down")
