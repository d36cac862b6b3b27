"""Watches workers that start, and tells how far they have come, as far as that can be seen from outside.

Seen are their first output, by the size of their files, and their first process group, by a connection to the workers'
store.  A thread looks, at moments that lie the further apart the longer the start takes: what is told is late by a
tenth, and of a worker that computes nothing meanwhile by half.  A start is followed for `LIMIT_S` at most, and not
further once its workers have computed nothing for half of its time: then nothing is looked at until the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from aelastic.aio import clock
from aelastic.aio.threads import run_sync
from aelastic.group.backend import WorkerStart
from aelastic.group.worker_group import WorkerGroup
from aelastic.host.usage import usage_of
from aelastic.observe.observer import Observer
from aelastic.observe.run_events import (
    Restarting,
    RunEvent,
    StartPhase,
    WorkerEnded,
    WorkerReached,
    WorkersStarted,
)

if TYPE_CHECKING:
    from aelastic.host.connections import Connections

INTERVAL_MIN_S = 0.025
# Of the time that has passed: a look at eight workers takes a millisecond, and they start for a second or more.
INTERVAL_PART, IDLE_INTERVAL_PART = 0.1, 1.0
LIMIT_S = 600.0
IDLE_S = 2.0  # at least: a disk that imports wait for holds them up for less, as a rule


class StartWatch(Observer):
    """The starts of one run's workers.

    It is the last of the observers: what it tells comes after the start of all workers for the others, too.

    Args:
        group: the workers; read, never changed.
        tell: takes what the observers are to hear.
        is_local: the workers are processes of this machine; else only their files are seen.
    """

    def __init__(self, group: WorkerGroup, tell: Callable[[RunEvent], None], *, is_local: bool) -> None:
        self._group = group
        self._tell = tell
        self._is_local = is_local
        self._visible: tuple[StartPhase, ...] = ("output", "process_group") if is_local else ("output",)
        self._files: Mapping[int, tuple[Path, ...]] = {}  # that workers write to, by local rank
        self._started = WorkersStarted(0, {})
        self._missing: dict[int, set[StartPhase]] = {}  # by local rank: what it has not reached yet
        self._changed = anyio.Event()
        self._limiter = anyio.CapacityLimiter(1)  # a thread that hangs keeps it

    def begin(self, starts: Sequence[WorkerStart]) -> None:
        """A new generation is about to start."""
        is_new = self._group.spec.logs_specs is None  # else the files may hold what earlier workers have written
        self._files = {start.local_rank: start.output_files if is_new else () for start in starts}

    def tell(self, event: RunEvent, now: float) -> None:  # noqa: ARG002  the state has it
        match event:
            case WorkersStarted():
                self._started = event
                self._missing = {local_rank: set(self._visible) for local_rank in event.ids}
                self._changed.set()
            case WorkerEnded(_, local_rank):
                self._missing.pop(local_rank, None)
            case Restarting():
                self._missing = {}
            case _:
                pass

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            await self._follow(self._started)

    async def _follow(self, started: WorkersStarted) -> None:
        """Returns when all have reached everything, or ended, or others start."""
        from aelastic.host.connections import Connections

        assert self._group.assigned is not None  # or there would be no workers
        connections = Connections(self._group.assigned.master_port)
        interval_s, busy_s, cpu_s = INTERVAL_MIN_S, 0.0, dict[int, float]()
        while self._missing and clock.now() - self.run_state.formed_at < LIMIT_S:
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
            if passed_s - busy_s >= max(IDLE_S, passed_s / 2):
                return
            interval_s = max(INTERVAL_MIN_S, passed_s * (INTERVAL_PART if is_busy else IDLE_INTERVAL_PART))
            interval_s = min(interval_s, LIMIT_S - passed_s)
            cpu_s.update(used)

    def _look(
        self, ids: Mapping[int, object], connections: Connections
    ) -> tuple[dict[int, frozenset[StartPhase]], dict[int, float]]:
        """What workers have reached, and their CPU time, by what the back end calls them.  In a thread."""
        from aelastic.host.session_activity import bytes_in  # not before workers are started, which need the CPUs

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
            self._tell(WorkerReached(started.generation, local_rank, rank, kind, phase, passed_s))
        if not missing:
            self._missing.pop(local_rank, None)
