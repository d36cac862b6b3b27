"""The state of a run, folded from its events.

It is folded once, for everything that shows it: log lines, the status line, the status page, metrics, systemd and
exporters.  A new event needs one new case here.  Times are on the events' clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from aelastic.base.record import Record
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.observe import run_events as ev
from aelastic.observe.time_spent import TimeSpent
from aelastic.rdzv.decisions.decision import Decision
from aelastic.workers.states import Phase, WorkerState, signal_words

if TYPE_CHECKING:
    pass

# The last ten restarts, of six phases each.
PHASES_MAX = 60
ENDS_MAX = 20

WorkerFact: TypeAlias = Literal["starting", "running", "succeeded", "failed", "stopped"]


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
        self.spent.handle(ev.name_of(type(event).__name__), lambda name: getattr(event, name, None), now)
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
            case ev.Compared(_, text, outliers):
                self.compared = event, now
                for each in [each for each in self.workers.values() if each.rank in outliers]:
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
