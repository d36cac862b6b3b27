"""Observers of a run: those of a supervisor without real workers, on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from kit.backends import (
    FAILS,
    SUCCEEDS,
    Broken,
    FakeBackend,
    StoreStandIn,
)
from kit.virtual_clock import on_virtual_time

from aelastic import InputError, RunResult, Supervisor, WorkerSpec, WorkerState
from aelastic.observe import run_events as ev
from aelastic.observe.observer import CLOSE_TIMEOUT_S, Observer
from aelastic.observe.run_state import RunState


@pytest.fixture(autouse=True)
def _no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aelastic.agent.resources.StoreHost", StoreStandIn)


class Witness(Observer):
    """Records its events, when it ran and when it was closed."""

    def __init__(self) -> None:
        self.events: list[ev.RunEvent] = []
        self.ran_until: float | None = None
        self.count_when_run_ended = 0
        self.closed_at: list[float] = []

    def tell(self, event: ev.RunEvent, now: float) -> None:
        assert not self.closed_at
        self.events.append(event)

    async def run(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self.ran_until = anyio.current_time()
            self.count_when_run_ended = len(self.events)

    async def aclose(self) -> None:
        self.closed_at.append(anyio.current_time())

    def of(self, *kinds: type[ev.RunEvent]) -> list[ev.RunEvent]:
        return [event for event in self.events if isinstance(event, kinds)]

    @property
    def ending(self) -> ev.RunEnded:
        assert isinstance(self.events[0], ev.RunBegan)
        assert len(self.of(ev.RunBegan, ev.RunEnded)) == 2
        assert isinstance(self.events[-1], ev.RunEnded)
        return self.events[-1]


class Fragile(Witness):
    """Raises in the methods that a test names."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def break_in(self, where: str) -> None:
        if where == self.where:
            raise ValueError(f"no {where}")

    def tell(self, event: ev.RunEvent, now: float) -> None:
        super().tell(event, now)
        if isinstance(event, ev.RoundFormed):
            self.break_in("tell")

    async def run(self) -> None:
        self.break_in("run")

    async def aclose(self) -> None:
        await super().aclose()
        self.break_in("aclose")


async def run(backend: FakeBackend, *observers: Observer, workers: int = 2, **more: Any) -> RunResult:
    options: dict[str, Any] = {"entrypoint": "train.py", "max_restarts": 2, **more}
    spec = WorkerSpec(local_world_size=workers, **options)
    return await Supervisor(spec, backend=backend, observers=observers).run()


# Events that `stories/supervisor.txt` does not show.


@on_virtual_time
async def test_observers_of_a_run_that_cannot_begin_get_nothing_and_are_closed(tmp_path: Path) -> None:
    witness = Witness()
    (tmp_path / "file").touch()
    with pytest.raises(InputError):
        await run(FakeBackend([SUCCEEDS]), witness, log_dir=tmp_path / "file" / "logs")
    assert witness.events == [] and witness.closed_at == [0]


@on_virtual_time
async def test_the_end_is_reported_after_everything_else_has_ended() -> None:
    witness = Witness()
    await run(FakeBackend([SUCCEEDS]), witness, workers=1)
    assert witness.count_when_run_ended == len(witness.events) - 1
    assert (witness.ran_until, witness.closed_at) == (10, [10])


@on_virtual_time
async def test_a_run_that_raises_ends_in_an_unknown_state_with_the_words_of_the_error() -> None:
    for where in ("start", "wait", "clear"):
        witness = Witness()
        with pytest.raises(ConnectionError):
            await run(Broken(where), witness, workers=1)
        assert (witness.ending.state, witness.ending.reason) == (WorkerState.UNKNOWN, f"ConnectionError: {where}")
        assert f"ConnectionError: {where}" in witness.ending.traceback
        assert len(witness.closed_at) == 1


async def test_an_event_log_that_cannot_be_made_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(_: Path) -> Observer:
        raise LookupError

    monkeypatch.setattr("aelastic.observe.event_log.EventLog", broken)
    witness, backend = Witness(), FakeBackend([SUCCEEDS])
    with pytest.raises(LookupError):
        await run(backend, witness, workers=1, log_dir=tmp_path)
    assert len(witness.closed_at) == len(backend.closed_at) == 1


# Failing observers.


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Log messages about observers; the log lines come from an observer as well."""
    records = [record for record in caplog.records if record.name == "aelastic.observe.observer"]
    return [record.getMessage() for record in records if record.funcName != "tell"]


@pytest.mark.parametrize("where", ["tell", "run", "aclose"])
@on_virtual_time
async def test_an_observer_that_raises_gets_no_more_events_and_harms_nothing(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    fragile, witness = Fragile(where), Witness()
    await run(FakeBackend([FAILS], [SUCCEEDS]), fragile, witness, workers=1)
    assert messages(caplog) == [f"observer Fragile raised and was disabled: ValueError: no {where}"]
    assert witness.ending.state is WorkerState.SUCCEEDED
    assert (len(fragile.closed_at), len(witness.closed_at)) == (1, 1)
    assert (
        len(fragile.events) == len(witness.events) if where == "aclose" else len(fragile.events) < len(witness.events)
    )


@on_virtual_time
async def test_an_observer_that_does_not_finish_is_left(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(Witness):
        async def aclose(self) -> None:
            await anyio.sleep(3600)

    witness = Witness()
    await run(FakeBackend([SUCCEEDS]), Slow(), witness, workers=1)
    assert anyio.current_time() == 10 + CLOSE_TIMEOUT_S
    assert messages(caplog) == ["Slow did not finish within 5 s"]
    assert witness.closed_at == [10]


@on_virtual_time
async def test_observers_that_use_the_same_instant_are_notified_one_after_the_other() -> None:
    events: list[tuple[str, ev.RunEvent]] = []

    class Named(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        def tell(self, event: ev.RunEvent, now: float) -> None:
            events.append((self.name, event))

    await run(FakeBackend([SUCCEEDS]), Named("a"), Named("b"), workers=1)
    names: Sequence[str] = [name for name, _ in events]
    assert names == ["a", "b"] * (len(events) // 2)
    assert [event for _, event in events[::2]] == [event for _, event in events[1::2]]


# The state of the run.


@on_virtual_time
async def test_an_observer_finds_the_run_as_it_is_with_the_event_that_it_gets() -> None:
    seen: list[tuple[int, int, str]] = []

    class Reader(Observer):
        def tell(self, event: ev.RunEvent, now: float) -> None:
            if isinstance(event, ev.WorkersStarted | ev.WorkerEnded):
                state = self.run_state
                seen.append((state.generation, state.restart_count, state.workers[0].state))

    await run(FakeBackend([FAILS], [SUCCEEDS]), Reader(), workers=1)
    assert seen == [(1, 0, "running"), (1, 0, "failed"), (2, 1, "running"), (2, 1, "succeeded")]


@on_virtual_time
async def test_a_bug_in_the_state_of_the_run_harms_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RunState, "tell", lambda *_: 1 / 0)
    witness = Witness()

    assert (await run(FakeBackend([SUCCEEDS]), witness, workers=1)).state is WorkerState.SUCCEEDED
    assert messages(caplog) == ["observer RunState raised and was disabled: ZeroDivisionError: division by zero"]
    assert isinstance(witness.events[-1], ev.RunEnded)
