"""Status of an agent, as `/status` and `/readyz` give it: run events in, answers out.

Times are monotonic here; the wall clock's comes with the question, since it is for people only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias

from aelastic.core.record import Record
from aelastic.failures.failure import ProcessFailure
from aelastic.group.events import WorkerState
from aelastic.group.phases import Phase
from aelastic.observe import run_events as ev

SCHEMA = 1
# The last ten restarts, of six phases each.
PHASES_MAX = 60
# Of a failure's traceback; the end of it says most.
TRACEBACK_CHARACTERS_MAX = 8192

WorkerFact: TypeAlias = Literal["starting", "running", "succeeded", "failed", "stopped"]

_NOT_READY: dict[Phase, str] = {
    Phase.INIT: "the agent begins",
    Phase.JOINING: "waiting for a round to be complete",
    Phase.SPAWNING: "workers are being started",
    Phase.CANCELLING: "workers are being stopped",
    Phase.STOPPING: "workers are being stopped",
    Phase.AWAITING: "a worker failed; waiting for the coordinator's decision",
    Phase.BARRIER: "the workers of this node have succeeded; those of other nodes run",
    Phase.DONE: "the job is over",
}


class _Past(Record):
    """A phase that is over."""

    name: ev.PhaseName
    generation: int
    ended: float
    duration_s: float
    local_rank: int | None


class _LastFailure(Record):
    """The first failure of the last generation that failed."""

    generation: int
    report: ProcessFailure


class _LastRestart(Record):
    cause: ev.RestartCause
    reason: str
    at: float


class Status:
    """Status of one run."""

    def __init__(self) -> None:
        self._run: ev.RunBegan | None = None
        self._began = 0.0
        self._phase, self._state, self._reason = Phase.INIT, WorkerState.INIT, ""
        self._since = 0.0  # of the phase
        self._now: ev.PhaseName | None = None  # what takes time now
        self._now_since = 0.0
        self._waited = ""
        self._endpoints: dict[str, tuple[str, float]] = {}  # why each is missing, or "", and since when
        self._round: ev.RoundFormed | None = None
        self._round_at = 0.0
        self._ids: Mapping[int, Any] = {}
        self._started_at = 0.0
        self._facts: dict[int, WorkerFact] = {}  # by local rank
        self._past: deque[_Past] = deque(maxlen=PHASES_MAX)
        self._progress: tuple[ev.Progressed, float] | None = None  # of this generation, and when
        self._compared: tuple[ev.Compared, float] | None = None  # the last of this generation, and when
        self._restarts: dict[ev.RestartCause, int] = {"failure": 0, "membership": 0}
        self._last_restart: _LastRestart | None = None
        self._failure: _LastFailure | None = None
        self._fork_server: ev.ForkServerMeasured | None = None

    def tell(self, event: ev.RunEvent, now: float) -> None:  # noqa: C901, PLR0912  one case for each
        match event:
            case ev.RunBegan():
                self._run, self._began, self._since = event, now, now
            case ev.Changed():
                self._on_changed(event, now)
            case ev.RoundFormed():
                self._round, self._round_at, self._waited = event, now, ""
                self._ids, self._facts = {}, dict.fromkeys(range(event.local_world_size), "starting")
                self._progress = self._compared = None
            case ev.Progressed():
                self._progress = event, now
            case ev.Compared():
                self._compared = event, now
            case ev.WorkersStarted(ids=ids):
                self._ids, self._started_at = ids, now
                for local_rank, fact in self._facts.items():
                    self._facts[local_rank] = "running" if fact == "starting" else fact
            case ev.PhaseTook(name, duration_s, local_rank):
                self._past.append(_Past(name, self._generation, now, duration_s, local_rank))
            case ev.WorkerEnded(generation, local_rank, _, outcome, failure):
                self._facts[local_rank] = outcome
                if failure is not None and (self._failure is None or self._failure.generation != generation):
                    self._failure = _LastFailure(generation, failure)
            case ev.Restarting(cause, reason):
                self._restarts[cause] += 1
                self._last_restart = _LastRestart(cause, reason, now)
            case ev.ForkServerMeasured():
                self._fork_server = event
            case ev.Waited(text):
                self._waited = text
            case ev.EndpointChanged(endpoint, trouble):
                self._endpoints[endpoint] = trouble, now
            case ev.RunEnded(state, reason):
                self._phase, self._state, self._reason, self._now = Phase.DONE, state, reason, None
            case _:
                pass  # does not change the status

    def _on_changed(self, changed: ev.Changed, now: float) -> None:
        if changed.phase is not self._phase:
            self._since = self._now_since = now
            self._now = ev.NAME_OF.get(changed.phase)
            self._waited = ""
        self._phase, self._state, self._reason = changed.phase, changed.state, changed.reason

    @property
    def _generation(self) -> int:
        return 0 if self._round is None else self._round.generation

    # Answers.

    @property
    def compared(self) -> str:
        """What all workers of the job did when they were last compared; "" if they were not, in this generation."""
        return "" if self._compared is None else self._compared[0].text

    @property
    def role(self) -> str:
        return "" if self._run is None else self._run.role

    @property
    def running(self) -> Mapping[int, Any]:
        """Local ranks of workers that live, and what the back end calls them."""
        return {rank: self._ids.get(rank) for rank, fact in self._facts.items() if fact == "running"}

    @property
    def readiness(self) -> tuple[bool, str]:
        """Whether workers of a complete round run on this node; if not, why."""
        if self._phase is not Phase.RUNNING:
            why = _NOT_READY[self._phase]
            return False, f"{why}: {self._waited}" if self._waited and self._phase is Phase.JOINING else why
        return True, f"{len(self.running)} of {len(self._facts)} workers run"

    def describe(self, now: float, wall: datetime, usage: Mapping[int, tuple[float, int]]) -> dict[str, Any]:
        """All of it, for JSON.

        Args:
            wall: this moment on the wall clock.
            usage: CPU seconds and bytes of memory of workers that live, by local rank.
        """

        def at(moment: float) -> str:
            return (wall - timedelta(seconds=now - moment)).astimezone(UTC).isoformat(timespec="milliseconds")

        is_ready, why = self.readiness
        run = self._run
        return {
            "schema": SCHEMA,
            "time": at(now),
            "run": None if run is None else {**_fields(run), "began": at(self._began)},
            "phase": self._phase.value,
            "state": self._state.value,
            "reason": self._reason,
            "since": at(self._since),
            "ready": is_ready,
            "readiness": why,
            "waiting": self._waited or None,
            "endpoints": [
                {"endpoint": endpoint, "answers": not trouble, "trouble": trouble or None, "since": at(since)}
                for endpoint, (trouble, since) in sorted(self._endpoints.items())
            ]
            or None,
            "round": self._describe_round(at(self._round_at)),
            "progress": self._describe_progress(at),
            "compared": None
            if (told := self._compared) is None
            else {"text": told[0].text, "odd": list(told[0].odd), "at": at(told[1])},
            "restarts": dict(self._restarts),
            "last_restart": None if (last := self._last_restart) is None else {**_fields(last), "at": at(last.at)},
            "last_failure": self._describe_failure(),
            "now": None if self._now is None else {"phase": self._now, "began": at(self._now_since)},
            "phases": [
                {
                    "phase": past.name,
                    "generation": past.generation,
                    "began": at(past.ended - past.duration_s),
                    "ended": at(past.ended),
                    "duration_s": round(past.duration_s, 6),
                    **({} if past.local_rank is None else {"local_rank": past.local_rank}),
                }
                for past in self._past
            ],
            "fork_server": None if self._fork_server is None else _fields(self._fork_server),
            "workers": [self._describe_worker(rank, usage.get(rank), at(self._started_at)) for rank in self._facts],
        }

    def _describe_worker(self, local_rank: int, usage: tuple[float, int] | None, started: str) -> dict[str, Any]:
        worker_id, round_ = self._ids.get(local_rank), self._round
        assert round_ is not None  # or there would be no worker
        return {
            "local_rank": local_rank,
            "rank": round_.first_rank + local_rank,
            "state": self._facts[local_rank],
            "pid": worker_id if isinstance(worker_id, int) else None,
            "id": None if worker_id is None else str(worker_id),
            "started": started if local_rank in self._ids else None,
            "cpu_s": None if usage is None else usage[0],
            "rss_bytes": None if usage is None else usage[1],
        }

    def _describe_round(self, formed: str) -> dict[str, Any] | None:
        if self._round is None:
            return None
        fields = _fields(self._round)
        del fields["workers"]  # they follow from the ranks
        return {**fields, "formed": formed}

    def _describe_progress(self, at: Callable[[float], str]) -> dict[str, Any] | None:
        if self._progress is None:
            return None
        progress, told_at = self._progress
        fields = _fields(progress)
        for name in ("generation", "local_rank", "is_last"):
            del fields[name]
        return {**fields, "percent": None if progress.share is None else int(progress.share * 100), "at": at(told_at)}

    def _describe_failure(self) -> dict[str, Any] | None:
        if self._failure is None:
            return None
        report = self._failure.report
        fields = report.for_others().shared
        fields["at"] = _wall_time(fields.pop("timestamp"))
        fields["traceback"] = report.traceback[-TRACEBACK_CHARACTERS_MAX:]
        return {"generation": self._failure.generation, **fields}


def _fields(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in type(record).__match_args__}


def _wall_time(timestamp: int) -> str | None:
    """As people write it; `None` where it is not known."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds") if timestamp else None
