"""Turns run events into torchelastic's events and metrics, as its agent would make them at the same points.

Names, values and order are those of torch 2.13 (`agent/server/api.py`, `local_elastic_agent.py`,
`launcher/api.py`).  Differences follow from those between the agents:

- `agent_restarts` and `remaining_restarts` count the restarts of the job; each of torch's agents counts its own.
- A worker that ended because we asked it to has the state `TERMINATED`.  torch has this state for functions only; a
  program that it ended is reported as failed, with exit code -15.
- If a program cannot be started, torch's agent fails; here its worker does.
- Ranks come with the round: assigning them takes no extra time.
- The metrics that torch's `@prof` records for methods of its agent (calls, durations) have no counterpart here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from aelastic.base.record import Record
from aelastic.diagnose.failures.failure import NO_DATA, ProcessFailure
from aelastic.observe import run_events as ev
from aelastic.workers.states import Phase, Worker, WorkerState

Json: TypeAlias = dict[str, Any]

# torch's error traits for a worker that left no message and no signal.
_UNEXPLAINED = {"category": "system_terminated_error", "retryability": "False"}


class Metric(Record):
    """A value of the metric group `torchelastic`."""

    name: str
    value: int


class Status(Record):
    """The part of an event that the agent knows (torch: `torch.distributed.elastic.events.Event`)."""

    state: str
    source: Literal["AGENT", "WORKER"]
    restart_count: int
    group_rank: int | None  # None: before the first round
    group_world_size: int | None
    total_run_time_s: int = 0  # set by torch once the run is over
    worker: Worker | None = None
    failure: ProcessFailure | None = None
    raw_error: str | None = None
    duration_ms: float | None = None

    @property
    def name(self) -> str:
        return f"torchelastic.worker.status.{self.state}"


TorchRecord: TypeAlias = Metric | Status


def metadata_of(status: Status, entry_point: str, job: Json) -> Json:
    """Returns the event's metadata, with torch's keys; some are in a nested JSON text.

    Args:
        entry_point: the name of the program or function.
        job: the fields that all events of a run share.
    """
    worker, failure = status.worker, status.failure
    more: Json = {"group_world_size": status.group_world_size, "entry_point": entry_point}
    if worker is not None:
        more |= {
            "local_rank": [worker.local_rank],
            "role_rank": [worker.role_rank],
            "role_world_size": [worker.role_world_size],
            "exit_code": [None if failure is None else failure.exitcode],
            "worker_pid": [None if failure is None else failure.pid],
        }
    raw_error = status.raw_error
    if failure is not None:
        is_unexplained = failure.error_file_data == NO_DATA and failure.exitcode >= 0
        raw_error = json.dumps(failure.error_file_data | ({"errorTraits": _UNEXPLAINED} if is_unexplained else {}))
    return {
        **job,
        "global_rank": None if worker is None else worker.global_rank,
        "group_rank": status.group_rank,
        "worker_id": None if worker is None else str(worker.id),
        "state": status.state,
        "total_run_time": status.total_run_time_s,
        "raw_error": raw_error,
        "metadata": json.dumps(more),
        "agent_restarts": status.restart_count,
        "duration_ms": status.duration_ms,
    }


# torch's agent does not distinguish these: it starts workers as it initializes them.
_AT_WORK = {Phase.SPAWNING, Phase.RUNNING}


class TorchTranslator:
    """Translates the run events of one run into torchelastic's events and metrics.

    Args:
        role: the workers' role.
        max_restarts: the job's restart budget.
        now: when the run began.
    """

    def __init__(self, role: str, max_restarts: int, now: float) -> None:
        self._role, self._max_restarts = role, max_restarts
        self._phase = Phase.INIT
        self._workers: tuple[Worker, ...] = ()  # of the last round
        self._takes_part = False  # in that round
        self._has_failed = False
        self._restart_count = 0
        self._place: tuple[int | None, int | None] = (None, None)  # group rank and group world size
        self._began_at = self._joins_at = now

    def handle(self, event: ev.RunEvent, now: float) -> list[TorchRecord]:
        match event:
            case ev.RoundFormed():
                return self._assigned(event, now)
            case ev.WorkersStarted():
                self._workers = tuple(worker.replace(id=event.ids.get(worker.local_rank)) for worker in self._workers)
                return [self._status("START", worker=worker) for worker in self._workers]
            case ev.WorkerEnded(outcome="failed") | ev.Noticed(is_stopped=True):
                self._has_failed = True
            case ev.Restarting():
                self._restart_count = event.restart_count
            case ev.Changed():
                return self._changed(event, now)
            case ev.RunEnded(traceback="") if event.state in {WorkerState.SUCCEEDED, WorkerState.FAILED}:
                return self._finished(event.state, event.failures, now)
            case ev.RunEnded():
                # No verdict: the agent was stopped, or failed.
                return [self._final("FAILED", now, raw_error=event.traceback or event.reason)]
            case _:
                pass  # torch's agent has no counterpart
        return []

    def look(self) -> list[TorchRecord]:
        """Returns what torch's agent records each time it checks workers that are healthy."""
        return self._look(WorkerState.HEALTHY) if self._phase is Phase.RUNNING else []

    def _finished(self, state: WorkerState, failures: Mapping[int, ProcessFailure], now: float) -> list[TorchRecord]:
        """Returns the events and metrics of a run that ended with a verdict."""
        is_failed = state is WorkerState.FAILED
        records: list[TorchRecord] = []
        if self._takes_part or is_failed:
            records += self._balance(is_failed=is_failed)
        for worker in self._workers if self._takes_part else ():
            failure = failures.get(worker.global_rank)
            is_victim = is_failed and failure is None
            records.append(self._final("TERMINATED" if is_victim else state.value, now, worker=worker, failure=failure))
        return [*records, self._final("SUCCEEDED", now)]

    # A round.

    def _changed(self, event: ev.Changed, now: float) -> list[TorchRecord]:
        before, self._phase = self._phase, event.phase
        records: list[TorchRecord] = []
        if before in _AT_WORK and self._phase is Phase.BARRIER:
            records += self._look(WorkerState.SUCCEEDED)
        elif before in _AT_WORK and self._phase not in _AT_WORK and self._has_failed:
            # Our agent finds an unhealthy worker; torch's watchdog kills it, which its agent finds at its next check.
            records += self._look(WorkerState.FAILED)
        if before is Phase.JOINING and self._phase is Phase.DONE:
            records.append(self._status("RENDEZVOUS", duration_ms=(now - self._joins_at) * 1000))
        if self._phase is Phase.JOINING and before is not Phase.JOINING:
            self._joins_at, self._takes_part = now, False
        return records

    def _assigned(self, formed: ev.RoundFormed, now: float) -> list[TorchRecord]:
        self._restart_count = formed.restart_count
        # As in torch, these two still have the group rank and size of the previous round.
        records: list[TorchRecord] = [
            self._status("RENDEZVOUS", duration_ms=(now - self._joins_at) * 1000),
            self._status("ASSIGN_WORKER_RANKS", duration_ms=0.0),
        ]
        self._place = formed.group_rank, formed.group_world_size
        self._workers, self._takes_part, self._has_failed = formed.workers, True, False
        return records

    # Metrics and events.

    def _look(self, state: WorkerState) -> list[TorchRecord]:
        return [
            self._of_role("remaining_restarts", max(0, self._max_restarts - self._restart_count)),
            self._of_role(state.name.lower(), 1),
        ]

    def _balance(self, *, is_failed: bool) -> list[TorchRecord]:
        """Returns metrics on how much of the restart budget the job used, and which of four ways it ended."""
        limit, spent = self._max_restarts, self._restart_count
        left = max(0, limit - spent)
        records: list[TorchRecord] = [
            self._of_role("flakiness", 100 if is_failed else int(100.0 - 100.0 * (left + 1) / (limit + 1))),
            self._of_role("run_total", 1),
        ]
        for outcome, has_failed in (("success", False), ("failed", True)):
            for retries, has_retried in (("with_retries", True), ("no_retries", False)):
                is_so = is_failed is has_failed and (spent > 0) is has_retried
                records.append(self._of_role(f"run_{outcome}_{retries}", int(is_so)))
        return records

    def _of_role(self, name: str, value: int) -> Metric:
        return Metric(f"workers.{self._role}.{name}", value)

    def _final(self, state: str, now: float, **fields: Any) -> Status:
        return self._status(state, total_run_time_s=int(now - self._began_at), **fields)

    def _status(self, state: str, **fields: Any) -> Status:
        source: Literal["AGENT", "WORKER"] = "AGENT" if fields.get("worker") is None else "WORKER"
        return Status(state, source, self._restart_count, *self._place, **fields)
