"""How a run ended: as a value where the job has a verdict, as an error where it has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aelastic.agent.postmortem import failure_of
from aelastic.errors import (
    InternalError,
    ProcessFailure,
    RendezvousError,
    RendezvousTimeoutError,
    UnkillableWorkerError,
)
from aelastic.group.events import WorkerState
from aelastic.group.worker_group import WorkerGroup
from aelastic.rdzv.protocol.messages import Outcome


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended, all or nothing (torch: `torch.distributed.elastic.agent.server.api.RunResult`).

    Every mapping is keyed by global rank.  `return_values` holds what functions returned, if all
    succeeded.  `failures` holds the workers that failed, in the order they did.  `victims` are the
    workers that ended because the agent asked them to; they are in neither.  `stacks` says of those
    that did not, and were killed, where they stood.
    """

    state: WorkerState
    return_values: Mapping[int, Any] = field(default_factory=dict)
    failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    victims: tuple[int, ...] = ()
    reason: str = ""
    stacks: Mapping[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        return self.state is WorkerState.FAILED


def result_of(
    group: WorkerGroup,
    failures: Mapping[int, ProcessFailure],
    return_values: Mapping[int, Any],
    stacks: Mapping[int, str],
    describe: Callable[[int], str],
) -> RunResult:
    """The result of a run that is over.

    Args:
        group: the workers.
        failures: of its last generation, by local rank.
        return_values: likewise; empty for programs.
        stacks: where those stood that had to be killed, by global rank.
        describe: what can be told of a local rank that does not end.

    Raises:
        UnkillableWorkerError: a worker survives SIGKILL.
        RendezvousTimeoutError: too few nodes came.
        RendezvousError: another node came in this one's name.
        InternalError: a bug of ours.
    """
    if group.state is WorkerState.UNKNOWN:
        raise UnkillableWorkerError([describe(rank) for rank in group.unended] or [group.reason])
    verdict = group.verdict
    if verdict is not None and verdict.outcome is Outcome.TIMED_OUT:
        raise RendezvousTimeoutError(verdict.reason)
    if verdict is not None and verdict.outcome is Outcome.REPLACED:
        raise RendezvousError(verdict.reason)
    rank_of = {worker.local_rank: worker.global_rank for worker in group.workers}
    failed = {rank_of[local]: failures[local] for local in group.failed}
    if group.state is WorkerState.FAILED and not failed:
        if verdict is None or verdict.cause is None:
            raise InternalError("failed without a failure", story=group.story)
        failed = {verdict.cause.rank: failure_of(verdict.cause)}
    values = return_values if group.state is WorkerState.SUCCEEDED else {}
    return RunResult(
        state=group.state,
        return_values={rank_of[local]: values[local] for local in sorted(values)},
        failures=failed,
        victims=tuple(sorted(rank_of[local] for local in group.stopped)),
        reason=group.reason,
        stacks=stacks,
    )
