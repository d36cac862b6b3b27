"""Shared by the tests of cells, on etcd and on other stores."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import pytest

from aelastic.errors import RendezvousConnectionError
from aelastic.rdzv.leader.job_state import JobState, Participant, Round, payload_of
from aelastic.rdzv.log.cell import Cell
from aelastic.rdzv.log.entries import Payload
from aelastic.rdzv.protocol.messages import LeaderAt, StoredCell
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.endpoint_cell import EndpointCell
from aelastic.rdzv.stores.etcd import etcd_store
from kit.waiting import DEADLINE_S

T = TypeVar("T")


def stored_by(name: str, term: int = 1) -> StoredCell:
    """The cell that an agent of this name writes as the leader of a term."""
    leader = LeaderAt(name, name, ("10.0.0.1",), 29500, f"token-of-{name}")
    return StoredCell(Cell("1f", None, term, leader.token), leader)


def renewed(stored: StoredCell) -> StoredCell:
    """The leader's next renewal of the cell."""
    return stored.replace(cell=stored.cell.replace(renewals=stored.cell.renewals + 1))


def resigned(stored: StoredCell) -> StoredCell:
    """The cell that its leader writes when it leaves: nobody leads."""
    return renewed(stored).replace(cell=renewed(stored).cell.replace(leader=""), leader=None)


def payload_with(number: int, nodes: int = 2) -> Payload:
    """The payload of an entry with a round of this number."""
    dice = random.Random(number)
    participants = tuple(
        Participant(dice.randbytes(8).hex(), f"n{rank}", f"node{rank}", "default", 8, f"node{rank}.example", 30000)
        for rank in range(nodes)
    )
    return payload_of(JobState(Round(number, 1, participants, "10.0.0.1", 29500)))


A, B = stored_by("a"), stored_by("b")
# Closes a cell when the test ends.
Closing = Callable[[EndpointCell], EndpointCell]

both_apis = pytest.mark.parametrize("backend", ["etcd-v3", "etcd-v2"])


def settings_of(endpoint: str, backend: str = "etcd", **config: str) -> RendezvousSettings:
    return RendezvousSettings(backend=backend, endpoint=endpoint, config={"lease": "10", **config})


def cell_of(backend: str, endpoint: str, run_id: str = "job", **config: str) -> EndpointCell:
    settings = settings_of(endpoint, backend, **config)
    return EndpointCell(etcd_store(settings, run_id), None, settings.lease_s)


async def written(cell: EndpointCell, stored: StoredCell) -> StoredCell:
    """Writes the cell, and expects to win."""
    assert await cell.write(stored) == stored
    return stored


async def renew(cell: EndpointCell, mine: StoredCell) -> StoredCell:
    """Writes the next renewal."""
    return await written(cell, renewed(mine))


async def until(what: str, condition: Callable[[], Any], limit_s: float = 2 * DEADLINE_S) -> Any:
    """Returns the value of the condition, awaited if necessary, once it is true."""
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
    """The answer of `ask`, repeated until it does not raise this error."""
    with anyio.fail_after(limit_s):
        while True:
            with suppress(but):
                return await ask()
            await anyio.sleep(0.05)
