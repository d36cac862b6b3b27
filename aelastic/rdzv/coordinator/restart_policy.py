"""Whether to restart after a failure, and why not.

Pure.  Only failures ask; a change of membership restarts the workers without asking, and without paying.
"""

from __future__ import annotations

from aelastic.core.record import Record
from aelastic.failures.failure import ProcessFailure
from aelastic.rdzv.protocol import messages as m


class RestartPolicy(Record):
    """A budget of restarts for the whole job (torchrun: `--max-restarts`, but per agent there)."""

    max_restarts: int

    def answer(self, failure: ProcessFailure, restart_count: int) -> m.Ended | str:
        """The verdict that a failure is after so many restarts, or the sentence that explains the next one."""
        where = f"rank {failure.rank} failed on {failure.host}"
        refusal = self.refusal(restart_count, failure.why_final)
        if refusal is not None:
            return m.Ended(m.Outcome.FAILED, f"{where}; {refusal}", failure)
        return f"{where}; restart {restart_count + 1} of {self.max_restarts}"

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
