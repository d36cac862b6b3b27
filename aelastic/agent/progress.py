"""How far workers are, by what their output says: steps, steps per second, and the time that is left.

A look once a second, and only where `--progress` asks for it; `logs.expected_output` finds the steps.  Of the workers
of this node the first one that says how far it is speaks for all of them: they step together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import anyio

from aelastic.aio import clock
from aelastic.logs.run_logs import RunLogs
from aelastic.observe.run_events import Progressed
from aelastic.rdzv.policy.ledger import NONE, UNKNOWN

# Between two looks, and between two events of progress: the Trainer asks for one status in 5 s at most.
LOOK_INTERVAL_S = 1.0
TELL_INTERVAL_S = 5.0
# What a worker wrote before it failed is searched within milliseconds; a busy pump is not waited for.
CATCH_UP_S = 0.2
# Steps per second are those of the last minute, or of the last two steps that were seen if these take longer.
WINDOW_S = 60.0
# The median step is of so many looks that saw new ones: a few that take longer, to save or to evaluate, change nothing.
STEPS_MAX = 64


class Pace:
    """The speed of one generation: steps, and when they were seen."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._took: deque[float] = deque(maxlen=STEPS_MAX)

    def saw(self, step: int, now: float) -> float | None:
        """Steps per second, with this one; `None` where that is not known yet."""
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()  # the next epoch counts from the beginning
        if self._seen and step > self._seen[-1][1]:
            self._took.append((now - self._seen[-1][0]) / (step - self._seen[-1][1]))
        if not self._seen or step > self._seen[-1][1]:
            self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        (began, first), (at, last) = self._seen[0], self._seen[-1]
        return (last - first) / (at - began) if at > began else None

    def step_s(self) -> float | None:
        """How long a step takes, the median of the last ones; `None` where that is not known yet."""
        return sorted(self._took)[len(self._took) // 2] if self._took else None


class Progress:
    """The progress of one run's workers.

    Args:
        is_on: `--progress` asks for it.
        logs: their output.
        tell: takes what observers are to hear.
    """

    def __init__(self, logs: RunLogs, tell: Callable[[Progressed], None], *, is_on: bool) -> None:
        self._is_on = is_on
        self._logs = logs
        self._tell = tell
        self._generation = 0
        self._ranks: Sequence[int] = ()  # by local rank
        self._pace = Pace()
        self._told = Progressed(0, 0, 0, 0)
        self._told_at = 0.0
        self._is_behind = False  # workers may have written more steps than were seen

    def begin(self, generation: int, ranks: Sequence[int]) -> None:
        """The files of a new generation are open.

        Args:
            ranks: of its workers, by local rank.
        """
        self._generation, self._ranks, self._pace, self._is_behind = generation, ranks, Pace(), False

    def step_s(self) -> float | None:
        """The median step of this generation, in seconds; `None` where it is not known yet."""
        return self._pace.step_s()

    async def catch_up(self) -> None:
        """What the workers have written by now is searched for steps, if that can be done soon."""
        if self._is_on:
            with anyio.move_on_after(CATCH_UP_S) as waited:
                await self._logs.have_steps()
            self._is_behind = waited.cancelled_caught

    def reached(self) -> int:
        """The largest step of this generation, as `Reached` has it."""
        if self._is_behind or self._logs.begin_again:
            return UNKNOWN
        return max((found.step for found in self._logs.steps().values()), default=NONE)

    async def run(self) -> None:
        """Looks now and then, until cancelled."""
        while self._is_on:
            await anyio.sleep(LOOK_INTERVAL_S)
            self.look()

    def look(self, *, is_last: bool = False) -> None:
        """Emits `Progressed` for new steps.

        Args:
            is_last: no more of this generation follows.
        """
        generation, now = self._generation, clock.now()
        if not (steps := self._logs.steps()):
            return
        local_rank, (step, total) = next(iter(steps.items()))
        rate = self._pace.saw(step, now)
        left = None if total is None or not rate else max(0, total - step) / rate
        found = Progressed(generation, local_rank, self._ranks[local_rank], step, total, rate, left, is_last)
        is_new = (generation, step, total) != (self._told.generation, self._told.step, self._told.total)
        says_more = generation != self._told.generation or (self._told.steps_per_s is None and rate is not None)
        if is_last or (is_new and (says_more or now - self._told_at >= TELL_INTERVAL_S)):
            self._told, self._told_at = found, now
            self._tell(found)
