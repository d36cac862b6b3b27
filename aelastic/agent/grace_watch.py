"""Watches workers that are being stopped for a restart, to wait for them only as long as that can help.

`group.restart_grace` decides; a thread samples the workers.  If a disk hangs and blocks the thread, the workers have
their whole shutdown timeout.  Workers are sampled only while they are being stopped, and not in the first moments, in
which most of them end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import anyio

from aelastic.agent.group.events import GraceOver
from aelastic.agent.resources import GenerationContext
from aelastic.base.host.usage import bytes_in
from aelastic.base.loop import clock
from aelastic.base.loop.threads import run_sync
from aelastic.workers.states import Phase

if TYPE_CHECKING:
    from aelastic.agent.group.restart_grace import Sample
    from aelastic.base.host.session_activity import SessionActivity


class GraceWatch:
    """The restart grace of one generation."""

    def __init__(self, context: GenerationContext) -> None:
        self._context, self._group = context, context.group
        grace = self._group.spec.restart_grace
        self._fixed_s = None if isinstance(grace, str) else grace
        self._is_on = self._fixed_s is not None or (grace is None and context.settings.is_local)
        self._is_watching = False
        self._limiter = anyio.CapacityLimiter(1)  # a thread that hangs keeps its token

    def stopping(self) -> None:
        """Workers were sent a signal that asks them to end."""
        generation = self._group.generation
        if self._is_on and not self._is_watching and self._is_restart(generation):
            self._is_watching = True
            self._context.tasks.start_soon(self._watch, generation, clock.now(), name="restart grace")

    def _is_restart(self, generation: int) -> bool:
        group = self._group
        is_stop = group.phase is Phase.STOPPING and not group.is_leaving and not group.exits.is_killing
        return is_stop and group.generation == generation

    async def _watch(self, generation: int, stopped_at: float) -> None:
        from aelastic.agent.group import restart_grace as rg
        from aelastic.base.host.session_activity import SessionActivity
        from aelastic.base.machine import DeadlinePassed

        workers = {rank: self._group.workers[rank] for rank in sorted(self._group.exits.alive)}
        grace = rg.RestartGrace({r: each.global_rank for r, each in workers.items()}, stopped_at, self._fixed_s)
        sessions = {rank: each.id for rank, each in workers.items() if isinstance(each.id, int)}
        activity = SessionActivity()
        while grace.deadline is not None:
            await anyio.sleep_until(grace.deadline)
            if not self._is_restart(generation):
                return
            actions = grace.handle(DeadlinePassed(), clock.now())
            if rg.Look() in actions:
                samples = await run_sync(self._look, activity, sessions, abandon_on_cancel=True, limiter=self._limiter)
                actions = grace.handle(rg.Looked(samples), clock.now())
            for action in actions:
                if isinstance(action, rg.GiveUp):
                    self._context.post(GraceOver(generation, action.reason))

    def _look(self, activity: SessionActivity, sessions: Mapping[int, int]) -> dict[int, Sample]:
        """Returns samples of the workers that have a process alive.  Runs in a thread."""
        from aelastic.agent.group.restart_grace import Sample

        seen = activity.look(sessions.values())
        samples = {}
        for rank, session in sessions.items():
            if (each := seen.get(session)) is not None:
                files = self._context.starts[rank].output_files
                written = None if each.written is None else each.written + (bytes_in(files) or 0)
                samples[rank] = Sample(written, each.cpu_s, each.waits_for_disk, each.waits_for_cpu)
        return samples
