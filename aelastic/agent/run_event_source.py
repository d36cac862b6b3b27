"""Makes run events from what the worker group does.

`RunEventSource` sees each event after the worker group has handled it, and returns run events; it decides nothing.
First comes what happened, then how long the previous phase took, then the agent's phase now.

- `PhaseTook` comes when a phase is over.  At any time of a run exactly one phase is on, except for `detect`, which
  overlaps the end of `run` or `stop`: the durations of the others add up to that of the run.
- `Restarting` comes once on each node that takes part in the restart: when the leader announces it, whatever this
  node does at that moment.  A node that is leaving gets none.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Literal

from aelastic.agent.group.events import (
    DeadlinePassed,
    Event,
    Exited,
    FoundUnhealthy,
    GraceOver,
    Replaced,
    Shared,
    Spawned,
    StateLost,
    StopRequested,
)
from aelastic.agent.group.in_place import UNSHARED_ROUNDS_MAX, WorkerStage
from aelastic.diagnose.failures.places import ranks_in_words
from aelastic.observe import run_events as ev
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.cause import CauseKind
from aelastic.rdzv.protocol.messages import Assigned, Ended, Interrupted, StartAhead
from aelastic.workers.states import Phase

if TYPE_CHECKING:
    from aelastic.agent.group.worker_group import WorkerGroup
    from aelastic.spec import WorkerSpec

# Reasons why a round does not continue in place.
OTHERS_CANNOT = "not all workers of the job can leave the round"
HAVE_RETURNED = "the functions of this node's workers had returned"
_OPTED_IN = {WorkerStage.READY, WorkerStage.RUNNING, WorkerStage.LEAVING, WorkerStage.DONE}
# Workers are being started, or may be started despite a stop.
_STARTING = {Phase.SPAWNING, Phase.CANCELLING}


def introduction(spec: WorkerSpec, *, run_id: str, node_id: str, host: str, pid: int) -> ev.RunBegan:
    """Returns the first event of a run.

    Args:
        spec: the worker spec.
        run_id: the job's name.
        node_id: this agent's id.
        host: this machine's name.
        pid: the agent's pid.
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
    """Returns the name of the program; if it is Python, of the script or module."""
    name = spec.get_entrypoint_name()
    if callable(spec.entrypoint) or not name.rpartition("/")[2].startswith("python"):
        return name
    options = itertools.takewhile(lambda arg: arg not in {"-c", "-"}, map(str, spec.args))
    return next((arg for arg in options if not arg.startswith("-")), name)


class RunEventSource:
    """The run events of one worker group.

    Args:
        group: the worker group; read, never changed.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._phase = group.phase
        self._state = group.state
        self._generation = 0
        self._assigned: Assigned | None = None
        self._restart_count = 0
        self._is_killing = False
        self._name: ev.PhaseName | None = None  # the current phase
        self._since = 0.0
        self._restarted_round: int | None = None  # the last round for which a restart was reported
        self._given_up_in: int | None = None  # the last round reported as not continuing in place
        # Of this generation.
        self._ended: set[int] = set()  # local ranks
        # For a round that workers leave, or continue in place: since when, and how many of them.
        self._left_at = 0.0
        self._kept = 0
        self._state_from = -1, -1  # the step of the state of this round, and the rank that it came from

    def handle(self, event: Event, now: float) -> list[ev.RunEvent]:
        """Returns the run events that follow from an event that the group has handled."""
        group = self._group
        events = [*self._what_happened(event, now), *self._killed(event)]
        if group.assigned is not self._assigned:
            events += self._round_formed()
        if (name := ev.NAME_OF.get(group.phase)) != self._name:
            events += [] if self._name is None else [ev.PhaseTook(self._name, now - self._since)]
            self._name, self._since = name, now
        if (group.phase, group.state) != (self._phase, self._state):
            reason = wording.text_of(group.reason) if group.reason else _words(event)
            events.append(ev.Changed(self._phase, group.phase, group.state, reason))
            self._phase, self._state = group.phase, group.state
        return events

    def _what_happened(  # noqa: C901, PLR0912  a case for each event
        self, event: Event, now: float
    ) -> list[ev.RunEvent]:
        group = self._group
        match event:
            case Shared() if self._is_recovered(event):
                return [self._recovered(now)]
            case Exited() | DeadlinePassed() if self._is_no_longer_ahead():
                failure = next(iter(group.exits.failed.values()), None)
                why = wording.text_of(group.reason) + ("" if failure is None else f" ({failure.headline})")
                return [ev.Waited(f"{why}; the workers of this node start when a round takes it in")]
            case StateLost() | Exited() | DeadlinePassed() if self._is_given_up():
                return [*self._ended_now(event, now), *self._not_recovered(self._why_given_up())]
            case Replaced(generation, local_rank) if generation == group.generation:
                self._ended.discard(local_rank)
                return self._given_up()
            case Spawned(generation, ids, warm) if generation == self._generation and self._phase in _STARTING:
                return [ev.WorkersStarted(generation, ids, warm)]
            # Otherwise the group ignored the report.
            case FoundUnhealthy() if group.exits.failed.get(event.local_rank) is event.failure:
                local_rank, reason = event.local_rank, event.reason or event.failure.short_message
                rank = group.workers[local_rank].global_rank
                self._left_at = now
                found = ev.Noticed(event.generation, local_rank, rank, event.by, reason, True, event.silent_s)
                return [found, *self._given_up()]
            case Exited():
                return self._ended_now(event, now)
            case Interrupted():
                if self._phase is Phase.RUNNING:
                    self._left_at = now
                is_asked = event.decision.cause.kind is CauseKind.RESTART_REQUESTED
                restarting = self._restarting(event)
                why = ""
                if self._is_given_up():
                    why = self._why_given_up(event)
                elif restarting and self._given_up_in != event.round:
                    why = self._why_not_in_place(event)
                return [*restarting, *self._not_recovered("" if is_asked else why)]
            case Ended(outcome, decision, cause) if self._phase is not Phase.DONE:
                return [ev.JobEnded(outcome, decision, cause)]
            case StopRequested(is_drained=True) if self._phase is not Phase.DONE:
                return [ev.Announced("leaving", event.reason)]
            case StopRequested(signum, reason) if self._phase is not Phase.DONE:
                return [ev.RendezvousLost(reason) if reason else ev.StopAsked(signum)]
            case _:
                return []

    def _ended_now(self, event: Event, now: float) -> list[ev.RunEvent]:
        """Returns the run events for a worker's end, if the event is one."""
        if not isinstance(event, Exited) or event.generation != self._generation:
            return []  # the worker is of an earlier generation, or was started ahead of its round
        if event.local_rank in self._ended:
            return []  # already reported
        self._ended.add(event.local_rank)
        if self._phase is Phase.RUNNING:
            self._left_at = now if event.gone_at is None else event.gone_at
        return self._worker_ended(event, now)

    def _given_up(self) -> list[ev.RunEvent]:
        """Reports why workers that should have continued in place are stopped, if they are."""
        return self._not_recovered(self._why_given_up()) if self._is_given_up() else []

    def _is_given_up(self) -> bool:
        """Returns whether workers that should have continued in place are stopped instead."""
        group = self._group
        was_leaving, has_workers = self._phase in {Phase.LEAVING, Phase.FORMING}, self._phase is Phase.RUNNING
        could_recover = was_leaving or group.in_place.is_state_lost or (has_workers and group.in_place.is_worn_out)
        return group.phase is Phase.STOPPING and self._phase is not Phase.STOPPING and could_recover

    def _is_no_longer_ahead(self) -> bool:
        """Returns whether workers that were started ahead of their round are stopped, and will start in it."""
        group = self._group
        is_stopped = group.phase is Phase.STOPPING and self._phase is Phase.PREPARING
        return is_stopped and not group.is_leaving

    def _why_given_up(self, event: Interrupted | None = None) -> str:
        group = self._group
        if group.in_place.is_worn_out and self._phase is Phase.RUNNING and not group.in_place.is_state_lost:
            return f"{UNSHARED_ROUNDS_MAX} rounds in a row ended before all workers had the state"
        if event is not None and event.decision.cause.is_failure:
            return OTHERS_CANNOT
        return wording.text_of(group.reason if event is None else event.decision)

    def _not_recovered(self, why: str) -> list[ev.RunEvent]:
        """Reports a round as not continuing in place; returns nothing without a reason."""
        if not why:
            return []
        self._given_up_in = None if self._group.assigned is None else self._group.assigned.round
        return [ev.NotRecovered(self._group.generation, why)]

    def _why_not_in_place(self, event: Interrupted) -> str:
        """Returns why workers that opted in do not continue; empty if none did, or if there is nothing to report."""
        group = self._group
        if event.in_place:
            return ""
        if group.in_place.is_released:
            return HAVE_RETURNED
        stages = group.in_place.stage
        have_some = any(each in _OPTED_IN for each in stages.values())
        if group.phase is not Phase.STOPPING or not have_some:
            return ""
        others = [group.workers[rank].global_rank for rank, each in stages.items() if each is WorkerStage.STARTING]
        if others:
            return f"{ranks_in_words(others)} had not opted in"
        return OTHERS_CANNOT if event.decision.cause.is_failure else ""

    def _worker_ended(self, event: Exited, now: float) -> list[ev.RunEvent]:
        group, local_rank = self._group, event.local_rank
        failure = event.failure or group.exits.failed.get(local_rank)
        outcome: Literal["succeeded", "failed", "stopped"] = "succeeded"
        if failure is not None:
            outcome = "failed"
        elif local_rank in group.exits.stopped:
            outcome = "stopped"
        rank = group.workers[local_rank].global_rank
        events: list[ev.RunEvent] = [ev.WorkerEnded(event.generation, local_rank, rank, outcome, failure)]
        # An unhealthy worker's failure was known before the worker ended.
        if event.gone_at is not None and failure is not None and not failure.found_by:
            events.append(ev.PhaseTook("detect", max(0.0, now - event.gone_at), local_rank))
        return events

    def _restarting(self, event: Interrupted) -> list[ev.RunEvent]:
        group = self._group
        is_of_now = group.assigned is not None and group.assigned.round == event.round
        if not is_of_now or group.is_leaving or self._restarted_round == event.round:
            return []
        self._restarted_round = event.round
        has_failed = event.restart_count > self._restart_count or event.decision.cause.is_failure
        self._restart_count = max(event.restart_count, self._restart_count)
        cause: ev.RestartCause = "failure" if has_failed else "membership"
        in_place = event.in_place and group.phase in {Phase.LEAVING, Phase.FORMING}
        has_others = group.assigned is not None and group.assigned.ranks.group_world_size > 1
        only_here = event.in_place and not in_place and has_others
        return [ev.Restarting(cause, event.decision, self._restart_count, in_place, only_here)]

    def _is_recovered(self, shared: Shared) -> bool:
        """Returns whether all workers of this node now have the state of a round that continues in place."""
        group = self._group
        is_of_now = group.assigned is not None and shared.round == group.assigned.fence
        if not is_of_now or not self._kept or self._phase is not Phase.RUNNING:
            return False
        is_from_another = shared.source != group.workers[shared.local_rank].global_rank
        if is_from_another or self._state_from[0] < 0:
            self._state_from = shared.step, shared.source
        return not group.in_place.sharing

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

    def _recovered(self, now: float) -> ev.Recovered:
        group, (step, source) = self._group, self._state_from
        assert group.assigned is not None  # there is a round
        replaced = len(group.workers) - self._kept
        known = group.assigned.round, group.generation, self._kept, replaced, step, source
        return ev.Recovered(*known, now - self._left_at)

    def _round_formed(self) -> list[ev.RunEvent]:
        group, assigned = self._group, self._group.assigned
        assert assigned is not None  # it has changed, and was set
        is_new, in_place = group.generation != self._generation, group.phase is Phase.RUNNING
        self._generation, self._assigned, self._restart_count = group.generation, assigned, assigned.restart_count
        self._kept, self._state_from = len(group.in_place.kept) if in_place else 0, (-1, -1)
        if is_new:
            self._ended = set()
        formed = self._formed(assigned, in_place=in_place)
        ids = {worker.local_rank: worker.id for worker in group.workers}
        return [formed, ev.WorkersStarted(group.generation, ids, group.in_place.warm)] if in_place else [formed]

    def _formed(self, assigned: Assigned, *, in_place: bool) -> ev.RoundFormed:
        ranks = assigned.ranks
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
            in_place=in_place,
        )


def _words(event: Event) -> str:
    """Returns the reason for a change for which the group has none."""
    match event:
        case Assigned(round_):
            return f"round {round_} is complete"
        case StartAhead():
            return "workers start before a round takes this node in"
        case Spawned():
            return "all workers of this node are started"
        case _:
            return "the run begins"


# The state.
