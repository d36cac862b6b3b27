"""What the tests of boards on etcd share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import pytest

from aelastic.errors import RendezvousConnectionError
from aelastic.rdzv.board import Board
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.etcd import etcd_store
from kit.waiting import DEADLINE_S

T = TypeVar("T")

A = Candidate(node_id="a", addresses=("10.0.0.1",), port=29500, token="secret")
B = Candidate(node_id="b", addresses=("10.0.0.2",), port=29500, token="other secret")
# Closes a board when the test ends.
Closing = Callable[[Board], Board]

both_apis = pytest.mark.parametrize("backend", ["etcd-v3", "etcd-v2"])


def settings_of(endpoint: str, backend: str = "etcd", **config: str) -> RendezvousSettings:
    return RendezvousSettings(backend=backend, endpoint=endpoint, config={"lease": "10", **config})


def board_of(backend: str, endpoint: str, run_id: str = "job", **config: str) -> Board:
    settings = settings_of(endpoint, backend, **config)
    return Board(etcd_store(settings, run_id), None, settings.lease_s)


async def elected(board: Board, candidate: Candidate, seen: LeaderRecord | None = None, above: int = 0) -> LeaderRecord:
    """Claims, and it is ours."""
    record = await board.campaign(candidate, seen, above)
    assert record is not None and record.candidate == candidate
    return record


async def seen_on(board: Board) -> LeaderRecord:
    """What is there."""
    record = await board.read()
    assert record is not None
    return record


async def until(what: str, condition: Callable[[], Any], limit_s: float = 2 * DEADLINE_S) -> Any:
    """What the condition gives, or what it gives when awaited, once that is true."""
    with anyio.move_on_after(limit_s):
        while True:
            answer = condition()
            if answer := (await answer if isinstance(answer, Awaitable) else answer):
                return answer
            await anyio.sleep(0.01)
    pytest.fail(f"not after {limit_s:g} s: {what}")


async def until_answered(
    ask: Callable[[], Awaitable[T]], but: type[Exception] = RendezvousConnectionError, limit_s: float = DEADLINE_S
) -> T:
    """What it answers once it raises no such error."""
    with anyio.fail_after(limit_s):
        while True:
            with suppress(but):
                return await ask()
            await anyio.sleep(0.05)
