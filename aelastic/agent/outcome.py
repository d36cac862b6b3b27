"""The result of a run that is over, from what became of its worker group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aelastic.agent.group.phases import Exits
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.errors import (
    InternalError,
    ProcessFailure,
    RendezvousError,
    RendezvousTimeoutError,
    UnkillableWorkerError,
)
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.decision import DecisionKind
from aelastic.rdzv.protocol.messages import Outcome
from aelastic.result import RunResult
from aelastic.workers.states import WorkerState

_OF_STOPS = {Outcome.STOPPED, Outcome.KILLED, Outcome.SAVED}


def result_of(
    group: WorkerGroup,
    return_values: Mapping[int, Any],
    stacks: Mapping[int, str],
    describe: Callable[[int], str],
) -> RunResult:
    """Returns the result of a run that is over.

    Args:
        group: the workers.
        return_values: those of its last generation, by local rank; empty for programs.
        stacks: the stacks of workers that had to be killed, by global rank.
        describe: describes a local rank that does not end.

    Raises:
        UnkillableWorkerError: a worker survived SIGKILL.
        RendezvousTimeoutError: too few nodes joined.
        RendezvousError: another node joined with this one's rank.
        InternalError: a bug in aelastic.
    """
    if group.state is WorkerState.UNKNOWN:
        raise UnkillableWorkerError([describe(rank) for rank in group.exits.unended] or [wording.text_of(group.reason)])
    verdict = group.verdict
    if verdict is not None and verdict.outcome is Outcome.TIMED_OUT:
        raise RendezvousTimeoutError(wording.text_of(verdict.decision))
    if verdict is not None and verdict.outcome is Outcome.REPLACED:
        raise RendezvousError(wording.text_of(verdict.decision), topic="node-ranks-do-not-fit-together")
    exits = Exits() if group.in_place.is_ahead else group.exits  # workers without a round are not part of the job
    rank_of = {worker.local_rank: worker.global_rank for worker in group.workers}
    values = return_values if group.state is WorkerState.SUCCEEDED else {}
    cause, failures = _failures(group, {rank_of[local]: failure for local, failure in exits.failed.items()})
    return RunResult(
        state=group.state,
        return_values={rank_of[local]: values[local] for local in sorted(values)},
        failures=failures,
        victims=tuple(sorted(rank_of[local] for local, raised in exits.stopped.items() if raised is None)),
        reason=_reason(group, failures.get(cause) if cause is not None else next(iter(failures.values()), None)),
        stacks=stacks,
        cause=cause,
        raised={rank_of[local]: raised for local, raised in sorted(exits.stopped.items()) if raised is not None},
        is_drained=group.is_drained,
        is_stopped=verdict is not None and verdict.outcome in _OF_STOPS,
    )


def _reason(group: WorkerGroup, failure: ProcessFailure | None) -> str:
    """Returns why the run ended; after a failure, also what failed."""
    reason, verdict = wording.text_of(group.reason), group.verdict
    names_error = verdict is not None and verdict.decision.kind is DecisionKind.SAME_ERROR
    if group.state is not WorkerState.FAILED or failure is None or names_error:
        return reason
    return f"{reason}; cause: {failure.headline}"


def _failures(
    group: WorkerGroup, ours: Mapping[int, ProcessFailure]
) -> tuple[int | None, Mapping[int, ProcessFailure]]:
    """Returns the rank whose failure ended the job, and all failures that this node knows, with that one first."""
    if group.state is not WorkerState.FAILED:
        return None, ours
    cause = None if group.verdict is None else group.verdict.cause
    if cause is None:
        if not ours:
            raise InternalError("failed without a failure", trace=group.trace)
        return None, ours
    # This node knows more about its own workers than the verdict does.
    return cause.rank, {cause.rank: cause, **ours}
