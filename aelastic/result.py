"""How a run ended: a value if the job has a verdict, otherwise an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aelastic.errors import (
    ChildFailedError,
    ProcessFailure,
)
from aelastic.workers.states import WorkerState


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
