"""The board `etcd`: v3 where the server has it, else v2; asked once."""

from __future__ import annotations

from aelastic.rdzv.board import Board, Candidate, LeaderRecord
from aelastic.rdzv.boards.etcd_http import NoSuchApiError
from aelastic.rdzv.boards.etcd_v2 import EtcdV2Board
from aelastic.rdzv.boards.etcd_v3 import EtcdV3Board
from aelastic.rdzv.settings import RendezvousSettings


class EtcdBoard(Board):
    """A run id on an etcd of any age, as one agent uses it; the arguments are those of the other two."""

    def __init__(self, settings: RendezvousSettings, run_id: str) -> None:
        self._v3, self._v2 = EtcdV3Board(settings, run_id), EtcdV2Board(settings, run_id)
        self._chosen: Board | None = None

    async def open(self) -> None:
        if self._chosen is not None:
            await self._chosen.open()
            return
        try:
            await self._v3.open()
            self._chosen = self._v3
        except NoSuchApiError as no_v3:
            try:
                await self._v2.open()
            except NoSuchApiError:
                raise no_v3 from None
            self._chosen = self._v2

    async def read(self) -> LeaderRecord | None:
        return await self._board.read()

    async def campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        return await self._board.campaign(candidate, seen, above)

    async def renew(self, record: LeaderRecord) -> LeaderRecord | None:
        return await self._board.renew(record)

    async def publish(self, record: LeaderRecord, verdict: str) -> bool:
        return await self._board.publish(record, verdict)

    async def resign(self, record: LeaderRecord) -> None:
        await self._board.resign(record)

    async def aclose(self) -> None:
        try:
            await self._v3.aclose()
        finally:
            await self._v2.aclose()

    @property
    def name(self) -> str:
        return self._board.name if self._chosen else self._v3.name.replace("etcd-v3", "etcd", 1)

    @property
    def own_address(self) -> str:
        return self._board.own_address

    @property
    def endpoint_host(self) -> str:
        return self._board.endpoint_host

    @property
    def _board(self) -> Board:
        return self._chosen or self._v3
