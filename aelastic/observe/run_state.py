"""Makes run events from what the worker group does, and folds them into the state of the run, for its observers.

`RunEventSource` sees each event after the worker group has handled it, and returns run events; it decides nothing.
First comes what happened, then how long the previous phase took, then the agent's phase now.

- `PhaseTook` comes when a phase is over.  At any time of a run exactly one phase is on, except for `detect`, which
  overlaps the end of `run` or `stop`: the durations of the others add up to that of the run.
- `Restarting` comes once on each node that takes part in the restart: when the leader announces it, whatever this
  node does at that moment.  A node that is leaving gets none.

`RunState` is folded once, for everything that shows it: log lines, the status line, the status page, metrics, systemd
and exporters.  A new event needs one new case there.  Times are on the events' clock.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

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
    WorkerState,
    signal_words,
)
from aelastic.agent.group.in_place import UNSHARED_ROUNDS_MAX, WorkerStage
from aelastic.agent.group.phases import Phase
from aelastic.base.record import Record
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.diagnose.failures.places import ranks_in_words
from aelastic.observe import run_events as ev
from aelastic.observe.time_spent import TimeSpent
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.cause import CauseKind
from aelastic.rdzv.decisions.decision import Decision
from aelastic.rdzv.protocol.messages import Assigned, Ended, Interrupted, StartAhead

if TYPE_CHECKING:
    from aelastic.agent.group.worker_group import WorkerGroup
    from aelastic.spec import WorkerSpec

# Reasons why a round does not continue in place.
OTHERS_CANNOT = "not all workers of the job can leave the round"
HAVE_RETURNED = "the functions of this node's workers had returned"
_OPTED_IN = {WorkerStage.READY, WorkerStage.RUNNING, WorkerStage.LEAVING, WorkerStage.DONE}
# Workers are being started, or may be started despite a stop.
_STARTING = {Phase.SPAWNING, Phase.CANCELLING}
# The last ten restarts, of six phases each.
PHASES_MAX = 60
ENDS_MAX = 20

WorkerFact: TypeAlias = Literal["starting", "running", "succeeded", "failed", "stopped"]


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
        told = [*self._what_happened(event, now), *self._killed(event)]
        if group.assigned is not self._assigned:
            told += self._round_formed()
        if (name := ev.NAME_OF.get(group.phase)) != self._name:
            told += [] if self._name is None else [ev.PhaseTook(self._name, now - self._since)]
            self._name, self._since = name, now
        if (group.phase, group.state) != (self._phase, self._state):
            reason = wording.text_of(group.reason) if group.reason else _words(event)
            told.append(ev.Changed(self._phase, group.phase, group.state, reason))
            self._phase, self._state = group.phase, group.state
        return told

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
                return self._not_recovered(self._why_given_up()) if self._is_given_up() else []
            case Spawned(generation, ids, warm) if generation == self._generation and self._phase in _STARTING:
                return [ev.WorkersStarted(generation, ids, warm)]
            # Otherwise the group ignored the report.
            case FoundUnhealthy() if group.exits.failed.get(event.local_rank) is event.failure:
                local_rank, reason = event.local_rank, event.reason or event.failure.short_message
                rank = group.workers[local_rank].global_rank
                self._left_at = now
                found = ev.Noticed(event.generation, local_rank, rank, event.by, reason, True, event.silent_s)
                return [found, *(self._not_recovered(self._why_given_up()) if self._is_given_up() else [])]
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
        told: list[ev.RunEvent] = [ev.WorkerEnded(event.generation, local_rank, rank, outcome, failure)]
        # An unhealthy worker's failure was known before the worker ended.
        if event.gone_at is not None and failure is not None and not failure.found_by:
            told.append(ev.PhaseTook("detect", max(0.0, now - event.gone_at), local_rank))
        return told

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


class WorkerNow(Record):
    """One worker of this node, in this generation."""

    rank: int
    local_rank: int
    id: Any = None  # a pid, or the back end's name for it; `None` until it is started
    state: WorkerFact = "starting"
    note: str = ""  # what a watch has found
    started_at: float | None = None

    @property
    def pid(self) -> int | None:
        return self.id if isinstance(self.id, int) else None


class PastPhase(Record):
    """A phase that is over."""

    name: ev.PhaseName
    generation: int
    ended: float
    duration_s: float
    local_rank: int | None


class GenerationEnd(Record):
    """Why the workers of a generation ended, or the run with them; in place, why a round ended."""

    generation: int
    began: float
    ended: float
    cause: ev.RestartCause | Literal["end"]
    reason: str
    failure: ProcessFailure | None  # the first that this node knows of
    step: int | None  # according to the workers' output
    again: float | None = None  # when workers ran again
    decision: Decision | None = None  # if one was made
    round: int = 0  # that this node took part in; 0: none yet
    in_place: bool = False  # only the round ended: workers kept their processes
    recovered: ev.Recovered | None = None  # once they had the state of the next round


class RunState:
    """The state of one run.  Observers read it, and only `tell` changes it."""

    def __init__(self) -> None:
        self.began: ev.RunBegan | None = None
        self.began_at = 0.0
        self.ended: ev.RunEnded | None = None
        # The agent's phase.
        self.phase, self.state, self.reason = Phase.INIT, WorkerState.INIT, ""
        self.phase_since = 0.0
        self._waiting: ev.Waited | None = None
        self.why_stopping = ""
        self.endpoints: dict[str, tuple[str, float]] = {}  # why each is missing, or "", and since when
        # This generation.
        self.formed: ev.RoundFormed | None = None
        self.formed_at = 0.0
        self.workers: dict[int, WorkerNow] = {}  # by local rank
        self.progress: tuple[ev.Progressed, float] | None = None  # and when
        self.compared: tuple[ev.Compared, float] | None = None  # the last, and when
        self.announced = ""  # the interruption that is announced now
        self._is_drain = False  # it is because a node leaves
        self.held = ""  # a failure for which nothing is stopped yet
        # The past.
        self.past: deque[PastPhase] = deque(maxlen=PHASES_MAX)
        self.took: dict[ev.PhaseName, float] = {}  # how long the last of each phase was, in seconds, however long ago
        self.restart_count = 0
        self.restarts: dict[ev.RestartCause, int] = {"failure": 0, "membership": 0}
        self.drains = 0  # announced interruptions that were not cancelled
        self.recoveries = 0  # in place
        self.last_recovery: tuple[ev.Recovered, float] | None = None  # and when
        self.last_progress: ev.Progressed | None = None
        self.first_failure: tuple[int, ProcessFailure] | None = None  # last failed generation, and its first failure
        self._failed_in = 0, 0  # the generation of that failure, and its round: in place, a generation has several
        self.last_failure: tuple[ProcessFailure, float] | None = None  # and when
        self.ends: deque[GenerationEnd] = deque(maxlen=ENDS_MAX)
        self.fork_server: ev.ForkServerMeasured | None = None
        self.spent = TimeSpent()

    @property
    def waited(self) -> str:
        """What the agent waits for; "" if it waits for nothing."""
        return "" if self._waiting is None else self._waiting.full

    @property
    def waited_parts(self) -> tuple[str, str]:
        """`waited` in two parts: what is missing, and the rest."""
        return ("", "") if self._waiting is None else (self._waiting.missing, self._waiting.text)

    def tell(self, event: ev.RunEvent, now: float) -> None:  # noqa: C901, PLR0912, PLR0915  one case for each run event
        self.spent.tell(ev.name_of(type(event).__name__), lambda name: getattr(event, name, None), now)
        match event:
            case ev.RunBegan():
                self.began, self.began_at, self.phase_since = event, now, now
            case ev.Changed(_, phase, state, reason):
                self._enter(phase, now)
                self.state, self.reason = state, reason
            case ev.Waited():
                self._waiting = event
            case ev.EndpointChanged(endpoint, trouble):
                self.endpoints[endpoint] = trouble, now
            case ev.RoundFormed():
                self._on_formed(event, now)
            case ev.WorkersStarted(_, ids):
                for each in [self.workers[local_rank] for local_rank in ids if local_rank in self.workers]:
                    fact = "running" if each.state == "starting" else each.state
                    started_at = now if each.started_at is None else each.started_at
                    self._set(each.local_rank, id=ids[each.local_rank], state=fact, started_at=started_at)
                if self.ends and self.ends[-1].again is None:
                    self.ends[-1] = self.ends[-1].replace(again=now)
            case ev.Recovered():
                self.recoveries += 1
                self.last_recovery = event, now
                if self.ends and self.ends[-1].in_place:
                    self.ends[-1] = self.ends[-1].replace(recovered=event)
            case ev.NotRecovered():
                if self.ends and self.ends[-1].again is None:
                    self.ends[-1] = self.ends[-1].replace(in_place=False)
            case ev.WorkerEnded(generation, local_rank, _, outcome, failure):
                self._set(local_rank, state=outcome)
                self._on_worker_failed(generation, failure, now)
            case ev.Noticed(_, local_rank, _, _, reason):
                self._set(local_rank, note=reason)
            case ev.Compared(_, text, odd):
                self.compared = event, now
                for each in [each for each in self.workers.values() if each.rank in odd]:
                    self._set(each.local_rank, note=text)
            case ev.Announced("held", text):
                self.held = self.announced = text
            case ev.Announced("saving" | "called off" as what, text):
                self.announced = text if what == "saving" else ""
                self._is_drain = event.verb == "drain"
            case ev.Progressed(generation):
                self._on_progress(event, now)
                if self._is_end_of(generation):  # workers continued to write until they were stopped
                    self.ends[-1] = self.ends[-1].replace(step=event.step)
            case ev.PhaseTook(name, duration_s, of_rank):
                self.past.append(PastPhase(name, self.generation, now, duration_s, of_rank))
                self.took[name] = duration_s
            case ev.Restarting(cause, decision, restart_count):
                self.restarts[cause] += 1
                reason = event.reason
                self._on_end(cause, reason, decision, None, now, in_place=event.in_place)
                self.restart_count, self.why_stopping = restart_count, reason
            case ev.ForkServerMeasured():
                self.fork_server = event
            case ev.StopAsked(signum):
                self.why_stopping = f"asked to by {signal_words(signum)}"
            case ev.RunEnded(state, reason, cause):
                self._enter(Phase.DONE, now)
                self.ended, self.state, self.reason = event, state, reason
                self._on_end("end", reason or state.value, event.decision, cause, now)
                self._on_failure(cause, now)
            case _:
                pass  # leaves no state

    def _enter(self, phase: Phase, now: float) -> None:
        if phase is not self.phase:
            self.phase, self.phase_since, self._waiting = phase, now, None
        if phase in {Phase.JOINING, Phase.SPAWNING}:
            self.why_stopping = ""

    def _on_formed(self, formed: ev.RoundFormed, now: float) -> None:
        self._enter(Phase.RUNNING if formed.in_place else Phase.SPAWNING, now)  # `Changed` follows in a moment
        self.formed, self.formed_at, self.restart_count = formed, now, formed.restart_count
        before = self.workers
        self.workers = {local: WorkerNow(formed.first_rank + local, local) for local in range(formed.local_world_size)}
        if formed.in_place:
            for worker in formed.workers:
                kept = before.get(worker.local_rank)
                if kept is not None and kept.id == worker.id:
                    self._set(worker.local_rank, started_at=kept.started_at)
        self.progress = self.compared = None

    def _on_end(
        self,
        cause: ev.RestartCause | Literal["end"],
        reason: str,
        decision: Decision | None,
        failure: ProcessFailure | None,
        now: float,
        *,
        in_place: bool = False,
    ) -> None:
        if failure is None and self.first_failure is not None and self._failed_in == (self.generation, self._round):
            failure = self.first_failure[1]
        self.drains += bool(self.announced and self._is_drain and not self.held)
        self.announced = self.held = ""
        last = self.last_progress
        step = None if last is None or last.generation != self.generation else last.step
        known = (self.generation, self.formed_at, now, cause, reason, failure, step)
        self.ends.append(GenerationEnd(*known, decision=decision, round=self._round, in_place=in_place))

    def _is_end_of(self, generation: int) -> bool:
        """Returns whether the last end is that of the generation.  In place, the generation runs again after it."""
        if not self.ends or self.ends[-1].generation != generation:
            return False
        return not self.ends[-1].in_place or self.ends[-1].again is None

    def _on_worker_failed(self, generation: int, failure: ProcessFailure | None, now: float) -> None:
        if failure is not None and self._failed_in != (generation, self._round):
            self.first_failure, self._failed_in = (generation, failure), (generation, self._round)
        if self._is_end_of(generation) and self.ends[-1].failure is None:
            self.ends[-1] = self.ends[-1].replace(failure=failure)  # it was held back until others were stopped
        self._on_failure(failure, now)

    def _on_progress(self, event: ev.Progressed, now: float) -> None:
        self.last_progress = event
        if event.generation >= self.generation:  # otherwise the last of a generation, after the next one has formed
            self.progress = event, now

    def _set(self, local_rank: int, **fields: Any) -> None:
        if local_rank in self.workers:
            self.workers[local_rank] = self.workers[local_rank].replace(**fields)

    def _on_failure(self, failure: ProcessFailure | None, now: float) -> None:
        if failure is not None and (self.last_failure is None or failure != self.last_failure[0]):
            self.last_failure = failure, now

    @property
    def generation(self) -> int:
        return 0 if self.formed is None else self.formed.generation

    @property
    def _round(self) -> int:
        return 0 if self.formed is None else self.formed.round

    @property
    def role(self) -> str:
        return "" if self.began is None else self.began.role

    @property
    def running(self) -> Mapping[int, Any]:
        """The ids that the back end gave to live workers, by local rank."""
        return {each.local_rank: each.id for each in self.workers.values() if each.state == "running"}
