"""Whether to restart after a failure, and why not.

Pure.  Only failures ask; a change of membership restarts the workers without asking, and
without paying.
"""

from __future__ import annotations

from aelastic.core.record import Record


class RestartPolicy(Record):
    """A budget of restarts for the whole job (torchrun: `--max-restarts`, but per agent there)."""

    max_restarts: int

    def refusal(self, restart_count: int, *, is_final: bool = False) -> str | None:
        """Why the job may not restart once more after `restart_count` restarts; `None` when it may.

        Args:
            is_final: the worker that failed can't be ended.
        """
        if is_final:
            return "it can't be ended, and what it holds would be missed by another in its place"
        if restart_count < self.max_restarts:
            return None
        if self.max_restarts == 0:
            return "restarts are off (max_restarts is 0)"
        return f"all {self.max_restarts} restarts are used up"
