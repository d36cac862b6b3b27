"""Whether to restart after a round's end, and why not.

Pure.  Only a failure asks; what ends a round for free restarts the workers without paying.
"""

from __future__ import annotations

from aelastic.core.record import Record
from aelastic.failures.failure import ProcessFailure
from aelastic.rdzv.protocol import messages as m


class Cause(Record):
    """Why a round has ended: a failure, which is charged, or for free."""

    reason: str  # empty while a connection is broken, and its node may yet come back
    failure: ProcessFailure | None = None

    @classmethod
    def of(cls, failure: ProcessFailure) -> Cause:
        return cls(f"rank {failure.rank} failed on {failure.host}", failure)


class RestartPolicy(Record):
    """A budget of restarts for the whole job (torchrun: `--max-restarts`, but per agent there)."""

    max_restarts: int

    def answer(self, cause: Cause, restart_count: int) -> m.Ended | str:
        """The verdict that a cause is after so many restarts, or the sentence that explains the next one."""
        failure = cause.failure
        if failure is None:
            return cause.reason
        refusal = self.refusal(restart_count, failure.why_final)
        if refusal is not None:
            return m.Ended(m.Outcome.FAILED, f"{cause.reason}; {refusal}", failure)
        return f"{cause.reason}; restart {restart_count + 1} of {self.max_restarts}"

    def is_final(self, cause: Cause | None, restart_count: int) -> bool:
        """Whether the job is over if that is the cause."""
        failure = None if cause is None else cause.failure
        return failure is not None and self.refusal(restart_count, failure.why_final) is not None

    def refusal(self, restart_count: int, why_final: str = "") -> str | None:
        """Why the job may not restart once more after `restart_count` restarts; `None` when it may.

        Args:
            why_final: why no restart may follow this failure; "" if one may.
        """
        if why_final:
            return why_final
        if restart_count < self.max_restarts:
            return None
        if self.max_restarts == 0:
            return "restarts are off (max_restarts is 0)"
        return f"all {self.max_restarts} restarts are used up"
