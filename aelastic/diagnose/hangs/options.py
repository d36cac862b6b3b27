"""What a user can set about hangs, and the names of the watches that find them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

from aelastic.base.record import Record

# Which watch found a worker unhealthy: a timer that it set and did not clear, no sign of life, missing output, a sleep
# that no signal ends.
WatchName: TypeAlias = Literal["timer", "hang", "output", "stuck"]

# Signs of life of a worker: output in its files, CPU use, bytes and calls of its reads and writes.
HangSignal: TypeAlias = Literal["output", "cpu", "io"]
HANG_SIGNALS: tuple[HangSignal, ...] = get_args(HangSignal)
# What happens to a worker that hangs.
HangAction: TypeAlias = Literal["stop", "report"]
HANG_ACTIONS: tuple[str, ...] = get_args(HangAction)
# Workers are looked at once a second at most.
HANG_TIMEOUT_MIN_S = 1.0


class ExpectedOutput(Record):
    """Output that workers must write repeatedly, on stdout or stderr.

    Args:
        pattern: regular expression that must match a line, or an update of a progress bar.
        within_s: seconds from the worker's start to the first match, and from each match to the next.
        ranks: global ranks of the workers that must write it; `None`: all.
    """

    pattern: str
    within_s: float
    ranks: frozenset[int] | None = None

    def concerns(self, env: Mapping[str, str]) -> bool:
        """Whether the worker with this environment must write it."""
        return self.ranks is None or int(env["RANK"]) in self.ranks
