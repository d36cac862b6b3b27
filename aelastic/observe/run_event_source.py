"""Turns the worker group's events and transitions into run events.

`RunEventSource` sees each event after the worker group has handled it, and gives run events; it decides nothing.
What happened comes first, then how long what was before it took, then where the agent stands now.

`PhaseTook` comes when a phase is over.  From the start to the end of a run there is always exactly one of them, but for
`detect`, which lies at the end of `run` or in `stop`: the durations of the others add up to that of the run.

`Restarting` comes once on each node that takes part in the restart: when the coordinator announces it, whatever this
node does at that moment.  A node that leaves meanwhile has none.
"""

from __future__ import annotations

import itertools
from typing import Literal

from aelastic.group.events import Event, Exited, FoundUnhealthy, GraceOver, Spawned, StopRequested
from aelastic.group.phases import Phase
from aelastic.group.worker_group import WorkerGroup
from aelastic.observe import run_events as ev
from aelastic.rdzv.policy.restart_policy import Cause
from aelastic.rdzv.protocol.messages import Assigned, Ended, Interrupted
from aelastic.spec import WorkerSpec

# Workers are being started, or may be started in spite of a stop.
_STARTING = {Phase.SPAWNING, Phase.CANCELLING}


def introduction(spec: WorkerSpec, *, run_id: str, node_id: str, host: str, pid: int) -> ev.RunBegan:
    """The first event of a run.

    Args:
        spec: the workers.
        run_id: the job's name.
        node_id: this agent's.
        host: what this machine calls itself.
        pid: the agent's.
    """
    rdzv = spec.rdzv
    return ev.RunBegan(
        run_id=run_id,
        node_id=node_id,
        host=host,
        pid=pid,
        role=spec.role,
        entrypoint=_program(spec),
        local_world_size=spec.local_world_size,
        min_nodes=1 if rdzv is None else rdzv.min_nodes,
        max_nodes=1 if rdzv is None else rdzv.max_nodes,
        max_restarts=spec.max_restarts,
        rdzv_backend="" if rdzv is None else rdzv.backend,
    )


def _program(spec: WorkerSpec) -> str:
    """What runs: of a Python, the script or module."""
    name = spec.get_entrypoint_name()
    if callable(spec.entrypoint) or not name.rpartition("/")[2].startswith("python"):
        return name
    options = itertools.takewhile(lambda arg: arg not in {"-c", "-"}, map(str, spec.args))
    return next((arg for arg in options if not arg.startswith("-")), name)


class RunEventSource:
    """The run events of one worker group.

    Args:
        group: read, never changed.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._phase = group.phase
        self._state = group.state
        self._generation = 0
        self._restart_count = 0
        self._is_killing = False
        self._name: ev.PhaseName | None = None  # of what takes time now
        self._since = 0.0
        self._restarted_round: int | None = None  # the last one of which a restart was told
        # Of this generation.
        self._ended: set[int] = set()  # local ranks

    def handle(self, event: Event, now: float) -> list[ev.RunEvent]:
        """The run events that follow from an event, which the group has handled."""
        group = self._group
        told = [*self._what_happened(event, now), *self._killed(event)]
        if group.generation != self._generation:
            self._generation = group.generation
            self._ended = set()
            told.append(self._round_formed())
        if (name := ev.NAME_OF.get(group.phase)) != self._name:
            told += [] if self._name is None else [ev.PhaseTook(self._name, now - self._since)]
            self._name, self._since = name, now
        if (group.phase, group.state) != (self._phase, self._state):
            told.append(ev.Changed(self._phase, group.phase, group.state, group.reason or _words(event)))
            self._phase, self._state = group.phase, group.state
        return told

    def _what_happened(self, event: Event, now: float) -> list[ev.RunEvent]:
        group = self._group
        match event:
            case Spawned(generation, ids, warm) if generation == group.generation and self._phase in _STARTING:
                return [ev.WorkersStarted(generation, ids, warm)]
            # Else the group knew better.
            case FoundUnhealthy() if group.exits.failed.get(event.local_rank) is event.failure:
                local_rank, reason = event.local_rank, event.reason or event.failure.short_message
                rank = group.workers[local_rank].global_rank
                return [ev.Noticed(event.generation, local_rank, rank, event.by, reason, is_stopped=True)]
            case Exited(generation, local_rank) if generation == group.generation and local_rank not in self._ended:
                self._ended.add(local_rank)
                return self._worker_ended(event, now)
            case Interrupted():
                return self._restarting(event)
            case Ended(outcome, reason, cause) if self._phase is not Phase.DONE:
                return [ev.JobEnded(outcome, reason, cause)]
            case StopRequested(is_drained=True) if self._phase is not Phase.DONE:
                return [ev.Announced("leaving", event.reason)]
            case StopRequested(signum, reason) if self._phase is not Phase.DONE:
                return [ev.RendezvousLost(reason) if reason else ev.StopAsked(signum)]
            case _:
                return []

    def _worker_ended(self, event: Exited, now: float) -> list[ev.RunEvent]:
        group, local_rank = self._group, event.local_rank
        failure = event.failure or group.exits.failed.get(local_rank)
        outcome: Literal["succeeded", "failed", "stopped"] = "succeeded"
        if failure is not None:
            outcome = "failed"
        elif local_rank in group.exits.stopped:
            outcome = "stopped"
        rank = group.workers[local_rank].global_rank
        told: list[ev.RunEvent] = [ev.WorkerEnded(event.generation, local_rank, rank, outcome, failure)]
        # Of an unhealthy worker it was known before it ended.
        if event.gone_at is not None and failure is not None and not failure.found_by:
            told.append(ev.PhaseTook("detect", max(0.0, now - event.gone_at), local_rank))
        return told

    def _restarting(self, event: Interrupted) -> list[ev.RunEvent]:
        group = self._group
        is_of_now = group.assigned is not None and group.assigned.round == event.round
        if not is_of_now or group.is_leaving or self._restarted_round == event.round:
            return []
        self._restarted_round = event.round
        has_failed = event.restart_count > self._restart_count or Cause.is_failure(event.reason)
        self._restart_count = max(event.restart_count, self._restart_count)
        return [ev.Restarting("failure" if has_failed else "membership", event.reason, self._restart_count)]

    def _killed(self, event: Event) -> list[ev.RunEvent]:
        was_killing, self._is_killing = self._is_killing, self._group.exits.is_killing
        if was_killing or not self._is_killing:
            return []
        reason = f"not ended after {self._group.spec.shutdown_timeout_s:g} s"
        if isinstance(event, StopRequested):
            reason = "asked to stop again"
        elif isinstance(event, GraceOver):
            reason = event.reason
        return [ev.Killed(self._group.generation, self._group.exits.unended, reason, isinstance(event, GraceOver))]

    def _round_formed(self) -> ev.RoundFormed:
        assigned = self._group.assigned
        assert assigned is not None  # or there would be no generation
        ranks = assigned.ranks
        self._restart_count = assigned.restart_count
        return ev.RoundFormed(
            round=assigned.round,
            generation=self._generation,
            restart_count=assigned.restart_count,
            group_rank=ranks.group_rank,
            group_world_size=ranks.group_world_size,
            first_rank=ranks.first_rank,
            local_world_size=ranks.local_world_size,
            world_size=ranks.world_size,
            workers=self._group.workers,
        )


def _words(event: Event) -> str:
    """Why, where the group needs no reason."""
    match event:
        case Assigned(round_):
            return f"round {round_} is complete"
        case Spawned():
            return "all workers of this node are started"
        case _:
            return "the run begins"
