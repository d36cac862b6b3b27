"""Makes the answers of `/status` and `/readyz` from the state of a run.

Times are monotonic here; the caller passes the time of the wall clock, which is only for people.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

from aelastic.base.host.kernel_states import sentence_of
from aelastic.base.record import Record
from aelastic.base.renamed import with_old_names
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.observe.run_events import NAME_OF, Compared, Progressed, Recovered
from aelastic.observe.run_state import GenerationEnd, RunState, WorkerNow
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.as_json import to_json
from aelastic.rdzv.restart_policy import innocence
from aelastic.workers.states import Phase

SCHEMA = 1
# How much of the end of a failure's traceback is shown; the end says most.
TRACEBACK_CHARACTERS_MAX = 8192

_NOT_READY: dict[Phase, str] = {
    Phase.INIT: "the agent begins",
    Phase.JOINING: "waiting for a round to be complete",
    Phase.SPAWNING: "workers are being started",
    Phase.PREPARING: "workers are ready for a round, or start before it; waiting for it to be complete",
    Phase.LEAVING: "workers leave the round and keep their processes",
    Phase.FORMING: "workers are ready for the next round",
    Phase.CANCELLING: "workers are being stopped",
    Phase.STOPPING: "workers are being stopped",
    Phase.AWAITING: "a worker failed; waiting for the leader's decision",
    Phase.BARRIER: "the workers of this node have succeeded; those of other nodes run",
    Phase.DONE: "the job is over",
}


_NONE: Mapping[int, str] = MappingProxyType({})


def readiness(state: RunState, kernel: Mapping[int, str] = _NONE) -> tuple[bool, str]:
    """Returns whether workers of a complete round run on this node; if not, why.

    Args:
        state: the state of the run.
        kernel: kernel states of workers that are alive but not running, by local rank.
    """
    if state.phase is not Phase.RUNNING:
        why, is_waiting = _NOT_READY[state.phase], state.phase in {Phase.JOINING, Phase.PREPARING}
        return False, f"{why}: {state.waited}" if state.waited and is_waiting else why
    halted = sentence_of({state.workers[local].rank: word for local, word in kernel.items() if local in state.workers})
    return True, "; ".join(filter(None, [f"{len(state.running)} of {len(state.workers)} workers run", halted]))


def describe(
    state: RunState,
    now: float,
    wall: datetime,
    usage: Mapping[int, tuple[float, int]],
    kernel: Mapping[int, str] = _NONE,
) -> dict[str, Any]:
    """Returns the whole status, for JSON.

    Args:
        state: the state of the run.
        now: on the clock of the events.
        wall: this moment on the wall clock.
        usage: CPU seconds and bytes of memory of live workers, by local rank.
        kernel: as in `readiness`.
    """

    def at(moment: float) -> str:
        return (wall - timedelta(seconds=now - moment)).astimezone(UTC).isoformat(timespec="milliseconds")

    is_ready, why = readiness(state, kernel)
    run, failure, takes = state.began, state.first_failure, NAME_OF.get(state.phase)
    formed, compared, recovery = state.formed, state.compared, state.last_recovery
    last = next((end for end in reversed(state.ends) if end.cause != "end"), None)
    return {
        "schema": SCHEMA,
        "time": at(now),
        "run": None if run is None else {**_fields(run), "began": at(state.began_at)},
        "phase": "held" if state.held and state.phase is Phase.RUNNING else state.phase.value,
        "state": state.state.value,
        "reason": state.reason,
        "since": at(state.phase_since),
        "ready": is_ready,
        "readiness": why,
        "waiting": state.waited or None,
        "endpoints": [
            {"endpoint": endpoint, "answers": not trouble, "trouble": trouble or None, "since": at(since)}
            for endpoint, (trouble, since) in sorted(state.endpoints.items())
        ]
        or None,
        # The round's workers follow from the ranks.
        "round": None if formed is None else {**_fields(formed, "workers"), "formed": at(state.formed_at)},
        "progress": None if state.progress is None else _describe_progress(*state.progress, at),
        "compared": None if compared is None else _describe_comparison(*compared, at),
        "announced": state.announced or None,
        "drains": state.drains,
        "spent": {name: round(seconds, 3) for name, seconds in state.spent.until(now).items()},
        "restarts": dict(state.restarts),
        "last_restart": None if last is None else _describe_restart(last, at),
        "recoveries": state.recoveries,
        "last_recovery": recovery and {**_describe_recovery(recovery[0]), "at": at(recovery[1])},
        "last_failure": None if failure is None else _describe_failure(*failure),
        "now": None if takes is None else {"phase": takes, "began": at(state.phase_since)},
        "phases": [
            {
                "phase": past.name,
                "generation": past.generation,
                "began": at(past.ended - past.duration_s),
                "ended": at(past.ended),
                "duration_s": round(past.duration_s, 6),
                **({} if past.local_rank is None else {"local_rank": past.local_rank}),
            }
            for past in state.past
        ],
        "fork_server": None if state.fork_server is None else _fields(state.fork_server),
        "workers": [
            _describe_worker(each, usage.get(each.local_rank), kernel.get(each.local_rank), at)
            for each in state.workers.values()
        ],
    }


def describe_ends(ends: Sequence[GenerationEnd], now: float, wall: datetime) -> list[dict[str, Any]]:
    """Returns why each generation ended, the latest first, for JSON."""
    return [
        {
            "generation": each.generation,
            "round": each.round or None,
            "at": (wall - timedelta(seconds=now - each.ended)).astimezone(UTC).isoformat(timespec="milliseconds"),
            "after_s": round(each.ended - each.began, 3) if each.generation else None,
            "step": each.step,
            "cause": each.cause,
            "symptom": _symptom(each.failure),
            "reason": each.reason,
            "decision": to_json(each.decision),
            "otherwise": wording.instead_of(each.decision),
            "blame": "" if each.failure is None else wording.blame(each.failure.host, innocence(each.failure)),
            "failure": None if each.failure is None else _describe_failure(each.generation, each.failure),
            "again_s": None if each.again is None else round(each.again - each.ended, 3),
            "in_place": each.in_place,
            "recovered": None if each.recovered is None else _describe_recovery(each.recovered),
        }
        for each in reversed(ends)
    ]


def _describe_restart(end: GenerationEnd, at: Callable[[float], str]) -> dict[str, Any]:
    decision = to_json(end.decision)
    return {
        "cause": end.cause, "reason": end.reason, "decision": decision, "in_place": end.in_place, "at": at(end.ended),
    }  # fmt: skip


def _describe_recovery(recovered: Recovered) -> dict[str, Any]:
    return {**_fields(recovered), "text": recovered.text}


def _describe_comparison(compared: Compared, compared_at: float, at: Callable[[float], str]) -> dict[str, Any]:
    fields = {"text": compared.text, "outliers": list(compared.outliers), "at": at(compared_at)}
    return with_old_names("compared", fields)


def _symptom(failure: ProcessFailure | None) -> str:
    """Returns how a worker failed, without the cause."""
    if failure is None:
        return ""
    from aelastic.diagnose.failures.exit_reason import how_it_ended

    how = f"was stopped ({failure.found_by})" if failure.found_by else how_it_ended(failure.exitcode)
    return f"rank {failure.rank} on {failure.host} {how}"


def _describe_worker(
    worker: WorkerNow, usage: tuple[float, int] | None, kernel: str | None, at: Callable[[float], str]
) -> dict[str, Any]:
    return {
        **_fields(worker, "id", "note", "started_at"),
        "pid": worker.pid,
        "id": None if worker.id is None else str(worker.id),
        "kernel": kernel,
        "started": None if worker.started_at is None else at(worker.started_at),
        "cpu_s": None if usage is None else usage[0],
        "rss_bytes": None if usage is None else usage[1],
    }


def _describe_progress(progress: Progressed, reported_at: float, at: Callable[[float], str]) -> dict[str, Any]:
    percent = None if progress.share is None else int(progress.share * 100)
    return {**_fields(progress, "generation", "local_rank", "is_last"), "percent": percent, "at": at(reported_at)}


def _describe_failure(generation: int, report: ProcessFailure) -> dict[str, Any]:
    fields = report.for_others().shared
    timestamp = fields.pop("timestamp")
    fields["at"] = datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds") if timestamp else None
    fields["traceback"] = report.traceback[-TRACEBACK_CHARACTERS_MAX:]
    return {"generation": generation, **fields}


def _fields(record: Record, *others: str) -> dict[str, Any]:
    """Returns all fields except these."""
    return {name: getattr(record, name) for name in type(record).__match_args__ if name not in others}
