"""How long starting workers are watched: as long as it may be useful."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from kit.virtual_clock import on_virtual_time

from aelastic.agent.watches import start
from aelastic.agent.watches.start import START_IDLE_S, START_LIMIT_S, StartWatch
from aelastic.observe.observer import Observers
from aelastic.observe.run_events import RoundFormed, WorkersStarted


@pytest.mark.parametrize(
    "is_seen, computes_until_s, first_s, last_s",
    [
        (True, 0.0, START_IDLE_S, 2 * START_IDLE_S),
        (True, 30.0, 60.0, 75.0),
        (True, START_LIMIT_S, START_LIMIT_S, START_LIMIT_S),
        (False, 0.0, START_LIMIT_S, START_LIMIT_S),
    ],
)
@on_virtual_time
async def test_workers_that_compute_nothing_any_more_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch, is_seen: bool, computes_until_s: float, first_s: float, last_s: float
) -> None:
    looked_at: list[float] = []
    began = anyio.current_time()

    async def look(_: object, places: Mapping[int, object], *__: object, **___: object) -> Any:
        await anyio.lowlevel.checkpoint()
        looked_at.append(anyio.current_time() - began)
        return {}, dict.fromkeys(places, min(looked_at[-1], computes_until_s)) if is_seen else {}

    monkeypatch.setattr(start, "run_sync", look)
    group: Any = SimpleNamespace(assigned=SimpleNamespace(master_port=1))
    watch = StartWatch(group, lambda _: None, is_local=is_seen)
    observers = Observers([watch])
    observers.tell(RoundFormed(1, 1, 0, 0, 1, 0, 2, 2), began)
    observers.tell(WorkersStarted(1, {0: 100, 1: 101}), began)
    with anyio.move_on_after(2 * START_LIMIT_S):
        await watch.run()
    assert first_s <= looked_at[-1] <= last_s + 1e-6


@on_virtual_time
async def test_in_place_only_replacements_start(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[set[int]] = []

    async def look(_: object, places: Mapping[int, object], *__: object, **___: object) -> Any:
        await anyio.lowlevel.checkpoint()
        looked_at.append(set(places))
        return dict.fromkeys(places, frozenset({"output", "process_group"})), {}

    monkeypatch.setattr(start, "run_sync", look)
    workers = [SimpleNamespace(global_rank=rank) for rank in range(2)]
    group: Any = SimpleNamespace(assigned=SimpleNamespace(master_port=1), workers=workers)
    emitted: list[Any] = []
    watch = StartWatch(group, emitted.append, is_local=True)
    observers = Observers([watch])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)
        observers.tell(RoundFormed(1, 1, 0, 0, 1, 0, 2, 2), anyio.current_time())
        observers.tell(WorkersStarted(1, {0: 100, 1: 101}), anyio.current_time())
        await anyio.sleep(1.0)
        assert {(each.local_rank, each.phase) for each in emitted} == {
            (rank, phase) for rank in range(2) for phase in ("output", "process_group")
        }
        looked_at.clear()
        emitted.clear()
        observers.tell(RoundFormed(2, 1, 1, 0, 1, 0, 2, 2, in_place=True), anyio.current_time())
        observers.tell(WorkersStarted(1, {0: 100, 1: 102}), anyio.current_time())
        await anyio.sleep(1.0)
        tasks.cancel_scope.cancel()
    assert looked_at == [{1}]
    assert [(each.local_rank, each.phase) for each in emitted] == [(1, "process_group")], "its file is not new"
