"""What a run's events are worth telling: transitions, rounds, workers, and how long each phase took.

`Narrator` sees what the worker group sees, after the group has handled it, and gives happenings; it decides nothing.
Of a phase, the duration is told when it is over.  What happened comes first, then how long what was before it took,
then where the agent stands now.
"""

from __future__ import annotations

from typing import Literal

from aelastic.group import Phase, WorkerGroup
from aelastic.group_events import Event, Exited, Spawned, StopRequested
from aelastic.happenings import (
    Changed,
    Happening,
    PhaseName,
    PhaseTook,
    Restarting,
    RoundFormed,
    StopAsked,
    WorkerEnded,
    WorkersStarted,
)
from aelastic.rdzv.messages import Assigned, Ended, Interrupted

# `run` begins when the workers are started; before that, the phase is called `spawn`.
_NAMES: dict[Phase, PhaseName] = {
    Phase.JOINING: "rendezvous",
    Phase.STOPPING: "stop",
    Phase.AWAITING: "await",
    Phase.BARRIER: "barrier",
}


class Narrator:
    """Of one run.

    Args:
        group: the workers; read, never changed.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._phase = group.phase
        self._state = group.state
        self._generation = 0
        self._restart_count = 0
        self._name: PhaseName | None = None  # of what takes time now
        self._since = 0.0
        self._ended: set[int] = set()  # local ranks of this generation

    def handle(self, event: Event, now: float) -> list[Happening]:
        """What the event is worth telling.  The group has handled it."""
        told = self._what_happened(event, now)
        group = self._group
        if group.generation != self._generation:
            self._generation, self._ended = group.generation, set()
            told += [self._round_formed()]
        told += self._what_took_time(event, now)
        if (group.phase, group.state) != (self._phase, self._state):
            told.append(Changed(self._phase, group.phase, group.state, group.reason or _words(event)))
            self._phase, self._state = group.phase, group.state
        return told

    def _what_happened(self, event: Event, now: float) -> list[Happening]:
        group = self._group
        match event:
            case Spawned(generation, ids) if generation == group.generation and self._name == "spawn":
                return [WorkersStarted(generation, ids)]
            case Exited(generation, local_rank) if generation == group.generation and local_rank not in self._ended:
                self._ended.add(local_rank)
                return self._worker_ended(event, now)
            case Interrupted(_, reason, restart_count) if self._phase not in {Phase.JOINING, Phase.DONE}:
                is_paid = restart_count > self._restart_count
                self._restart_count = max(restart_count, self._restart_count)
                return [Restarting("failure" if is_paid else "membership", reason, self._restart_count)]
            case StopRequested(signum):
                return [StopAsked(signum)]
            case _:
                return []

    def _worker_ended(self, event: Exited, now: float) -> list[Happening]:
        group, local_rank = self._group, event.local_rank
        failure = event.failure or group.failed.get(local_rank)
        outcome: Literal["succeeded", "failed", "stopped"] = "succeeded"
        if failure is not None:
            outcome = "failed"
        elif local_rank in group.stopped:
            outcome = "stopped"
        rank = group.workers[local_rank].global_rank
        told: list[Happening] = [WorkerEnded(event.generation, local_rank, rank, outcome, failure)]
        if event.gone_at is not None and failure is not None:
            told.append(PhaseTook("detect", max(0.0, now - event.gone_at), local_rank))
        return told

    def _round_formed(self) -> RoundFormed:
        assigned = self._group.assigned
        assert assigned is not None  # or there would be no generation
        ranks = assigned.ranks
        self._restart_count = assigned.restart_count
        return RoundFormed(
            round=assigned.round,
            generation=self._generation,
            restart_count=assigned.restart_count,
            group_rank=ranks.group_rank,
            group_world_size=ranks.group_world_size,
            first_rank=ranks.first_rank,
            local_world_size=ranks.local_world_size,
            world_size=ranks.world_size,
        )

    def _what_took_time(self, event: Event, now: float) -> list[Happening]:
        name = self._name_now(event)
        if name == self._name and not (name == "spawn" and isinstance(event, Assigned)):
            return []
        told: list[Happening] = [] if self._name is None else [PhaseTook(self._name, now - self._since)]
        self._name, self._since = name, now
        return told

    def _name_now(self, event: Event) -> PhaseName | None:
        if self._group.phase is not Phase.RUNNING:
            return _NAMES.get(self._group.phase)
        is_spawned = isinstance(event, Spawned) and event.generation == self._generation
        return "run" if is_spawned or self._name == "run" else "spawn"


def _words(event: Event) -> str:
    match event:
        case Assigned(round=number):
            return f"round {number} is complete"
        case Ended(reason=reason):
            return reason
        case _:
            return type(event).__name__
