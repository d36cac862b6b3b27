"""Watches the start of each generation, as far as it can be seen from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.base.host.connections import Connections
from aelastic.base.host.usage import bytes_in, usage_of
from aelastic.base.loop import clock
from aelastic.base.loop.threads import run_sync
from aelastic.observe.observer import Observer
from aelastic.observe.run_events import (
    Restarting,
    RunEvent,
    StartPhase,
    WorkerEnded,
    WorkerReached,
    WorkersStarted,
)
from aelastic.workers.backend import WorkerStart

if TYPE_CHECKING:
    pass

# Interval between two looks at a start, and its share of the time that has passed: a look at eight workers takes a
# millisecond, and they take a second or more to start.
START_LOOK_MIN_S = 0.025
START_LOOK_PART, START_IDLE_LOOK_PART = 0.1, 1.0
START_LIMIT_S = 600.0
START_IDLE_S = 2.0  # at least: imports that wait for a disk usually wait for less


class StartWatch(Observer):
    """Watches and reports the starts of one run's workers, as far as they can be seen from outside.

    The size of their files shows their first output, and a connection to the workers' store their first process group.
    A thread looks, at intervals that grow with the duration of the start: reports are late by a tenth of it, or by half
    for a worker that computes nothing meanwhile.  A start is followed for at most `START_LIMIT_S`, and only until its
    workers have computed nothing for half of its time: then nothing is looked at until the next start.

    This is the last observer, so the others also receive its events after the start of all workers.

    Args:
        group: the workers; read, never changed.
        emit: takes run events, for the observers.
        is_local: the workers are processes of this machine; otherwise only their files are seen.
    """

    def __init__(self, group: WorkerGroup, emit: Callable[[RunEvent], None], *, is_local: bool) -> None:
        self._group = group
        self._emit = emit
        self._is_local = is_local
        self._visible: tuple[StartPhase, ...] = ("output", "process_group") if is_local else ("output",)
        self._files: Mapping[int, tuple[Path, ...]] = {}  # files that workers write to, by local rank
        self._started = WorkersStarted(0, {})
        self._missing: dict[int, set[StartPhase]] = {}  # by local rank: the phases not reached yet
        self._changed = anyio.Event()
        self._limiter = anyio.CapacityLimiter(1)  # a thread that hangs keeps its token

    def begin(self, starts: Sequence[WorkerStart]) -> None:
        """A new generation is about to start."""
        is_new = self._group.spec.logs_specs is None  # otherwise the files may contain output of earlier workers
        self._files = {start.local_rank: start.output_files if is_new else () for start in starts}

    def tell(self, event: RunEvent, now: float) -> None:  # noqa: ARG002  the state has it
        match event:
            case WorkersStarted():
                self._missing = self._to_watch(event)
                self._started = event
                self._changed.set()
            case WorkerEnded(_, local_rank):
                self._missing.pop(local_rank, None)
            case Restarting():
                self._missing = {}
            case _:
                pass

    def _to_watch(self, started: WorkersStarted) -> dict[int, set[StartPhase]]:
        """Returns the phases that each worker has yet to reach.  One that keeps its process starts nothing."""
        formed, before = self.run_state.formed, self._started.ids
        if formed is None or not formed.in_place:
            return {local_rank: set(self._visible) for local_rank in started.ids}
        # A replacement appends to the files of the lost worker, so its first output cannot be recognized.
        visible = set(self._visible) - {"output"}
        return {local_rank: set(visible) for local_rank, id_ in started.ids.items() if before.get(local_rank) != id_}

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            await self._follow(self._started)

    async def _follow(self, started: WorkersStarted) -> None:
        """Returns when all workers have reached everything, or ended, or others start."""
        assert self._group.assigned is not None  # or there would be no workers
        connections = Connections(self._group.assigned.master_port)
        interval_s, busy_s, cpu_s = START_LOOK_MIN_S, 0.0, dict[int, float]()
        while self._missing and clock.now() - self.run_state.formed_at < START_LIMIT_S:
            with anyio.move_on_after(interval_s):
                await self._changed.wait()
            if not self._missing or self._changed.is_set():
                return
            places = {rank: started.ids[rank] for rank in self._missing}
            seen, used = await run_sync(self._look, places, connections, abandon_on_cancel=True, limiter=self._limiter)
            if self._started is not started:
                return
            for local_rank, reached in sorted(seen.items()):
                self._on_reached(started, local_rank, reached)
            passed_s = clock.now() - self.run_state.formed_at
            is_busy = any(used_s > cpu_s.get(local_rank, 0.0) for local_rank, used_s in used.items())
            busy_s = passed_s if is_busy or not used else busy_s
            if passed_s - busy_s >= max(START_IDLE_S, passed_s / 2):
                return
            interval_s = max(START_LOOK_MIN_S, passed_s * (START_LOOK_PART if is_busy else START_IDLE_LOOK_PART))
            interval_s = min(interval_s, START_LIMIT_S - passed_s)
            cpu_s.update(used)

    def _look(
        self, ids: Mapping[int, object], connections: Connections
    ) -> tuple[dict[int, frozenset[StartPhase]], dict[int, float]]:
        """Returns what workers have reached, and their CPU time, by local rank.  Runs in a thread."""
        pids = {rank: pid for rank, pid in ids.items() if self._is_local and isinstance(pid, int)}
        connected = connections.of(pids.values())
        reached: dict[int, frozenset[StartPhase]] = {}
        for rank in ids:
            output: set[StartPhase] = {"output"} if bytes_in(self._files.get(rank, ())) else set()
            reached[rank] = frozenset(output | ({"process_group"} if pids.get(rank) in connected else set()))
        usages = {rank: usage_of(pid, pid) for rank, pid in pids.items()}
        return reached, {rank: usage.cpu_s for rank, usage in usages.items() if usage is not None}

    def _on_reached(self, started: WorkersStarted, local_rank: int, reached: frozenset[StartPhase]) -> None:
        missing = self._missing.get(local_rank, set())
        rank, kind = self._group.workers[local_rank].global_rank, started.kind_of(local_rank)
        for phase in sorted(missing & reached):
            missing.discard(phase)
            passed_s = clock.now() - self.run_state.formed_at
            self._emit(WorkerReached(started.generation, local_rank, rank, kind, phase, passed_s))
        if not missing:
            self._missing.pop(local_rank, None)
