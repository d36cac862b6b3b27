"""The state of a run, folded once from its run events, for all who show it.

Log lines, the status line, the status page, metrics, systemd and exporters read it; what to add for a new event is one
case here.  Times are those of the events' clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from aelastic.core.record import Record
from aelastic.failures.failure import ProcessFailure
from aelastic.group.events import WorkerState, signal_words
from aelastic.group.phases import Phase
from aelastic.observe import run_events as ev
from aelastic.observe.time_spent import TimeSpent

# The last ten restarts, of six phases each.
PHASES_MAX = 60
ENDS_MAX = 20

WorkerFact: TypeAlias = Literal["starting", "running", "succeeded", "failed", "stopped"]


class WorkerNow(Record):
    """One worker of this node, in this generation."""

    rank: int
    local_rank: int
    id: Any = None  # a pid, or what the back end calls it; `None` until it is started
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
    """Why the workers of a generation ended, or the run with them."""

    generation: int
    began: float
    ended: float
    cause: ev.RestartCause | Literal["end"]
    reason: str
    failure: ProcessFailure | None  # the first that this node knows of
    step: int | None  # by the workers' output
    again: float | None = None  # when workers ran again


class RunState:
    """The state of one run.  Observers read it, and only `tell` changes it."""

    def __init__(self) -> None:
        self.began: ev.RunBegan | None = None
        self.began_at = 0.0
        self.ended: ev.RunEnded | None = None
        # Where the agent stands.
        self.phase, self.state, self.reason = Phase.INIT, WorkerState.INIT, ""
        self.phase_since = 0.0
        self.waited = ""
        self.why_stopping = ""
        self.endpoints: dict[str, tuple[str, float]] = {}  # why each is missing, or "", and since when
        # This generation.
        self.formed: ev.RoundFormed | None = None
        self.formed_at = 0.0
        self.workers: dict[int, WorkerNow] = {}  # by local rank
        self.progress: tuple[ev.Progressed, float] | None = None  # and when
        self.compared: tuple[ev.Compared, float] | None = None  # the last, and when
        self.announced = ""  # an interruption, while it is
        self.held = ""  # a failure that nothing is stopped for
        # What was before.
        self.past: deque[PastPhase] = deque(maxlen=PHASES_MAX)
        self.took: dict[ev.PhaseName, float] = {}  # how long the last of each phase was, in seconds, however long ago
        self.restart_count = 0
        self.restarts: dict[ev.RestartCause, int] = {"failure": 0, "membership": 0}
        self.drains = 0  # interruptions that were announced, and not called off
        self.last_progress: ev.Progressed | None = None
        self.first_failure: tuple[int, ProcessFailure] | None = None  # of the last generation that failed: which, what
        self.last_failure: tuple[ProcessFailure, float] | None = None  # and when
        self.ends: deque[GenerationEnd] = deque(maxlen=ENDS_MAX)
        self.fork_server: ev.ForkServerMeasured | None = None
        self.spent = TimeSpent()

    def tell(self, event: ev.RunEvent, now: float) -> None:  # noqa: C901, PLR0912, PLR0915  one case for each run event
        self.spent.tell(ev.name_of(type(event).__name__), lambda name: getattr(event, name, None), now)
        match event:
            case ev.RunBegan():
                self.began, self.began_at, self.phase_since = event, now, now
            case ev.Changed(_, phase, state, reason):
                self._enter(phase, now)
                self.state, self.reason = state, reason
            case ev.Waited(text):
                self.waited = text
            case ev.EndpointChanged(endpoint, trouble):
                self.endpoints[endpoint] = trouble, now
            case ev.RoundFormed():
                self._on_formed(event, now)
            case ev.WorkersStarted(_, ids):
                for each in [self.workers[local_rank] for local_rank in ids if local_rank in self.workers]:
                    fact = "running" if each.state == "starting" else each.state
                    self._set(each.local_rank, id=ids[each.local_rank], state=fact, started_at=now)
                if self.ends and self.ends[-1].again is None:
                    self.ends[-1] = self.ends[-1].replace(again=now)
            case ev.WorkerEnded(generation, local_rank, _, outcome, failure):
                self._set(local_rank, state=outcome)
                if failure is not None and (self.first_failure is None or self.first_failure[0] != generation):
                    self.first_failure = generation, failure
                if self.ends and self.ends[-1].generation == generation and self.ends[-1].failure is None:
                    self.ends[-1] = self.ends[-1].replace(failure=failure)  # it was held until others were stopped
                self._on_failure(failure, now)
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
            case ev.Progressed():
                self.last_progress, self.progress = event, (event, now)
            case ev.PhaseTook(name, duration_s, of_rank):
                self.past.append(PastPhase(name, self.generation, now, duration_s, of_rank))
                self.took[name] = duration_s
            case ev.Restarting(cause, reason, restart_count):
                self.restarts[cause] += 1
                self._on_end(cause, reason, None, now)
                self.restart_count, self.why_stopping = restart_count, reason
            case ev.ForkServerMeasured():
                self.fork_server = event
            case ev.StopAsked(signum):
                self.why_stopping = f"asked to by {signal_words(signum)}"
            case ev.RunEnded(state, reason, cause):
                self._enter(Phase.DONE, now)
                self.ended, self.state, self.reason = event, state, reason
                self._on_end("end", reason or state.value, cause, now)
                self._on_failure(cause, now)
            case _:
                pass  # passes, and leaves no state

    def _enter(self, phase: Phase, now: float) -> None:
        if phase is not self.phase:
            self.phase, self.phase_since, self.waited = phase, now, ""
        if phase in {Phase.JOINING, Phase.SPAWNING}:
            self.why_stopping = ""

    def _on_formed(self, formed: ev.RoundFormed, now: float) -> None:
        self._enter(Phase.SPAWNING, now)  # which is said a moment later
        self.formed, self.formed_at, self.restart_count = formed, now, formed.restart_count
        self.workers = {local: WorkerNow(formed.first_rank + local, local) for local in range(formed.local_world_size)}
        self.progress = self.compared = None

    def _on_end(
        self, cause: ev.RestartCause | Literal["end"], reason: str, failure: ProcessFailure | None, now: float
    ) -> None:
        if failure is None and self.first_failure is not None and self.first_failure[0] == self.generation:
            failure = self.first_failure[1]
        self.drains += bool(self.announced and not self.held)
        self.announced = self.held = ""
        step = None if self.last_progress is None else self.last_progress.step
        self.ends.append(GenerationEnd(self.generation, self.formed_at, now, cause, reason, failure, step))

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
    def role(self) -> str:
        return "" if self.began is None else self.began.role

    @property
    def running(self) -> Mapping[int, Any]:
        """Local ranks of workers that live, and what the back end calls them."""
        return {each.local_rank: each.id for each in self.workers.values() if each.state == "running"}
