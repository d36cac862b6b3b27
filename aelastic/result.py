"""How a run ended: a value if the job has a verdict, otherwise an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aelastic.agent.group.events import WorkerState
from aelastic.agent.group.phases import Exits
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.errors import (
    ChildFailedError,
    InternalError,
    ProcessFailure,
    RendezvousError,
    RendezvousTimeoutError,
    UnkillableWorkerError,
)
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.decision import DecisionKind
from aelastic.rdzv.protocol.messages import Outcome

_OF_STOPS = {Outcome.STOPPED, Outcome.KILLED, Outcome.SAVED}


@dataclass(frozen=True, slots=True)
class RunResult:
    """The outcome of a run on this node (torch: `torch.distributed.elastic.agent.server.api.RunResult`).

    All mappings are keyed by global rank.  A worker appears in at most one of `failures`, `victims` and `raised`.

    Args:
        state: the final state of the workers.
        return_values: return values of this node's functions, if all workers succeeded; empty for programs.
        failures: first the failure that ended the job, which is the same on every node; then the failures of this
            node's workers, in the order in which the agent saw them.
        victims: workers that ended because the agent stopped them.
        reason: one line that explains why the run ended, including the cause of a failure.
        stacks: the stacks of workers that had to be killed, as text.
        cause: rank of the failure that ended the job.
        raised: workers that the agent stopped, but that had raised their own exception before.
        is_drained: this node left in order because it was going away; the same command may continue elsewhere.
        is_stopped: somebody requested the end of the whole job.
    """

    state: WorkerState
    # Not shown: `asyncio.run` formats the result of its main task, and values may be many megabytes.
    return_values: Mapping[int, Any] = field(default_factory=dict, repr=False)
    failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    victims: tuple[int, ...] = ()
    reason: str = ""
    stacks: Mapping[int, str] = field(default_factory=dict)
    cause: int | None = None
    raised: Mapping[int, ProcessFailure] = field(default_factory=dict)
    is_drained: bool = False
    is_stopped: bool = False

    def is_failed(self) -> bool:
        """Whether the run failed (torch: `RunResult.is_failed`)."""
        return self.state is WorkerState.FAILED


def failed_error(name: str, result: RunResult) -> ChildFailedError:
    """Returns the failure of a job as an error, whose text is the report.

    Args:
        name: the name of the workers' program or function.
        result: the result, with failures.
    """
    return ChildFailedError(name, result.failures, result.victims, result.stacks, result.cause, result.raised)


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
            raise InternalError("failed without a failure", story=group.story)
        return None, ours
    # This node knows more about its own workers than the verdict does.
    return cause.rank, {cause.rank: cause, **ours}
