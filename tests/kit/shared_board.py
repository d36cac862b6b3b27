"""A board in this process, for several agents of a test that share one.

It does not forget a dead coordinator: like a plain store without leases it counts renewals, and the other
agents see the count stand still.
"""

from __future__ import annotations

import anyio.lowlevel

from aelastic.errors import RendezvousConnectionError
from aelastic.rdzv.board import Board, Candidate, LeaderRecord


class SharedWorld:
    """What the boards of one process share: a store that is always consistent, and answers unless told not to."""

    def __init__(self) -> None:
        self.records: dict[str, LeaderRecord] = {}
        self.epochs: dict[str, int] = {}  # the last of each run id; outlives the leader
        self.is_down = False


class InProcessBoard(Board):
    """One run id in a shared world, as one agent uses it."""

    def __init__(self, run_id: str, world: SharedWorld) -> None:
        self._run_id = run_id
        self._world = world

    async def open(self) -> None:
        await self._reach()

    async def read(self) -> LeaderRecord | None:
        await self._reach()
        return self._world.records.get(self._run_id)

    async def campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        await self._reach()
        now = self._world.records.get(self._run_id)
        if now != seen:
            return now
        epoch = max(above, self._world.epochs.get(self._run_id, 0)) + 1
        self._world.epochs[self._run_id] = epoch
        return self._write(LeaderRecord(epoch=epoch, candidate=candidate, renewals=0))

    async def renew(self, record: LeaderRecord) -> LeaderRecord | None:
        now = await self._ours(record)
        return None if now is None else self._write(now.renewed())

    async def publish(self, record: LeaderRecord, verdict: str) -> bool:
        now = await self._ours(record)
        if now is not None:
            self._write(now.replace(verdict=verdict))
        return now is not None

    async def resign(self, record: LeaderRecord) -> None:
        if await self._ours(record) is not None:
            del self._world.records[self._run_id]

    async def aclose(self) -> None:
        """Nothing to release: the world belongs to its maker."""

    @property
    def name(self) -> str:
        return "a board in this process"

    @property
    def own_address(self) -> str:
        return "127.0.0.1"

    @property
    def endpoint_host(self) -> str:
        return "127.0.0.1"  # for all agents that share it

    async def _reach(self) -> None:
        await anyio.lowlevel.checkpoint()
        if self._world.is_down:
            raise RendezvousConnectionError("the board in this process is down")

    async def _ours(self, record: LeaderRecord) -> LeaderRecord | None:
        await self._reach()
        now = self._world.records.get(self._run_id)
        return now if record.is_same_term(now) else None

    def _write(self, record: LeaderRecord) -> LeaderRecord:
        self._world.records[self._run_id] = record
        return record
