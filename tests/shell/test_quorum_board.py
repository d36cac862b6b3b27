"""The board of several endpoints, without a store: what it makes of endpoints that come up one after the other."""

from __future__ import annotations

import anyio
import pytest

from aelastic.errors import RendezvousConnectionError
from aelastic.rdzv.boards.endpoints import RefusedError
from aelastic.rdzv.boards.quorum import REFUSED, QuorumBoard
from aelastic.rdzv.settings import RendezvousSettings

SETTINGS = RendezvousSettings("c10d", "127.0.0.1:1,127.0.0.2:1,127.0.0.3:1", 3, 3)


class Part:
    """An endpoint that is up from a moment on; one that an agent serves answers then, others refuse until then."""

    is_serving = False
    own_address = endpoint_host = ""

    def __init__(self, is_up: anyio.Event, *, is_served_here: bool) -> None:
        self._is_up, self._is_served_here = is_up, is_served_here
        self._text = b""

    async def get(self) -> bytes:
        if self._is_served_here:
            await self._is_up.wait()
        elif not self._is_up.is_set():
            raise RefusedError("connection refused")
        return self._text

    async def compare_set(self, expected: bytes, text: bytes) -> bytes:
        if self._text == expected:
            self._text = text
        return self._text

    async def aclose(self) -> None:
        pass


async def test_endpoints_that_came_up_with_our_own_are_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    is_up, refused = anyio.Event(), set()

    def on_endpoint(name: str, why: str) -> None:
        refused.add(name if why == REFUSED else "")
        if len(refused) == 2:
            is_up.set()

    board = QuorumBoard(SETTINGS, "job", {}, on_endpoint)
    monkeypatch.setattr(board, "_parts", [Part(is_up, is_served_here=number == 0) for number in range(3)])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(board.run)
        with anyio.fail_after(20):
            assert await board.read() is None
        tasks.cancel_scope.cancel()


async def test_without_one_that_came_up_the_first_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    board = QuorumBoard(SETTINGS, "job", {})
    monkeypatch.setattr(board, "_parts", [Part(anyio.Event(), is_served_here=False) for _ in range(3)])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(board.run)
        with pytest.raises(RendezvousConnectionError, match="3 of 3 rendezvous endpoints are missing"):
            await board.read()
        tasks.cancel_scope.cancel()
