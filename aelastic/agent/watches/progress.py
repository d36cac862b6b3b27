"""How far workers are: steps, steps per second and the time left, from commits or from their output."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio

from aelastic.base.loop import clock
from aelastic.logs.expected_output import Step
from aelastic.logs.run_logs import RunLogs
from aelastic.observe.run_events import (
    Progressed,
)
from aelastic.rdzv.ledger import NONE, UNKNOWN

if TYPE_CHECKING:
    pass

# Interval between two looks at steps, while workers write: the status line is drawn once a second.
LOOK_INTERVAL_S = 0.5
# The output of a worker that failed is searched within milliseconds; we do not wait longer for a busy pump.
CATCH_UP_S = 0.2
# Steps per second are those of the last minute, or of the last two steps that were seen if these take longer.
WINDOW_S = 60.0
# The median step is that of this many looks that saw new steps: a few long ones, with a save or an evaluation, do not
# matter.
STEPS_MAX = 64


class Pace:
    """The speed of one generation: steps, and when they were seen."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._took: deque[float] = deque(maxlen=STEPS_MAX)

    def saw(self, step: int, now: float) -> float | None:
        """Adds a step; returns steps per second, `None` if that is not known yet."""
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()  # the next epoch counts from the beginning again
        if self._seen and step > self._seen[-1][1]:
            self._took.append((now - self._seen[-1][0]) / (step - self._seen[-1][1]))
        if not self._seen or step > self._seen[-1][1]:
            self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        (began, first), (at, last) = self._seen[0], self._seen[-1]
        return (last - first) / (at - began) if at > began else None

    def step_s(self) -> float | None:
        """Returns how long a step takes, the median of the last ones; `None` if that is not known yet."""
        return sorted(self._took)[len(self._took) // 2] if self._took else None


class Progress:
    """The progress of one run's workers.

    Workers that recover in place commit each step, to a page that they share with the agent.  For others,
    `logs.expected_output` finds the steps in their output, if `--progress` is given.  Steps are read twice a second
    (from output only while workers write), when a worker has ended, and on request.  The first worker of this node that
    reports a step speaks for all of them: they step together.

    Args:
        logs: their output.
        committed: returns the newest committed steps by local rank.
        emit: takes run events, for the observers.
        is_on: `--progress` is given.
    """

    def __init__(
        self,
        logs: RunLogs,
        committed: Callable[[], Mapping[int, int]],
        emit: Callable[[Progressed], None],
        *,
        is_on: bool,
    ) -> None:
        self._is_on = is_on
        self._logs = logs
        self._committed = committed
        self._commits = anyio.Event()  # workers commit steps
        self._emit = emit
        self._generation = 0
        self._ranks: Sequence[int] = ()  # by local rank
        self._ended: set[int] = set()  # local ranks of workers that have ended, and left nothing in a buffer
        self._pace = Pace()
        self._rate: float | None = None  # steps per second
        self._emitted = Progressed(0, 0, 0, 0)
        self._is_behind = False  # workers may have written more steps than were seen

    def begin(self, generation: int, ranks: Sequence[int]) -> None:
        """The files of a new generation are open.

        Args:
            ranks: the ranks of its workers, by local rank.
        """
        self._generation, self._ranks, self._pace, self._is_behind = generation, ranks, Pace(), False
        self._ended, self._rate = set(), None

    def renumber(self, ranks: Sequence[int]) -> None:
        """Workers continue in place with these ranks, by local rank."""
        self._ranks = ranks

    def expect_commits(self) -> None:
        """Workers commit their steps from now on."""
        self._commits.set()

    def steps(self) -> Mapping[int, Step]:
        """Returns the newest step of each worker of this generation that has reported one, by local rank."""
        if committed := self._committed():
            return {rank: Step(step, None) for rank, step in sorted(committed.items())}
        return self._logs.steps(self._ended)

    def step_s(self) -> float | None:
        """Returns the median step of this generation, in seconds; `None` if it is not known yet."""
        return self._pace.step_s()

    async def catch_up(self) -> None:
        """Waits, for a short time, until the output so far is searched for steps."""
        if self._is_on:
            with anyio.move_on_after(CATCH_UP_S) as waited:
                await self._logs.have_steps()
            self._is_behind = waited.cancelled_caught

    async def look_now(self) -> None:
        """Emits the steps written so far, on request."""
        await self.catch_up()
        self.look()

    async def on_ended(self, local_rank: int, exitcode: int) -> None:
        """A worker has ended: its last step counts, however little time it had to report it."""
        if exitcode >= 0:  # otherwise a signal ended it, perhaps in the middle of a number
            self._ended.add(local_rank)
        await self.look_now()

    async def end(self) -> None:
        """All workers of the generation have ended: emits its last step."""
        await self.catch_up()
        self._measure()
        self.look(is_last=True)

    def reached(self) -> int:
        """Returns the largest step of this generation, for `Reached`."""
        is_unclear = self._is_behind or self._logs.begin_again
        if is_unclear and not self._committed():
            return UNKNOWN
        return max((found.step for found in self.steps().values()), default=NONE)

    async def run(self) -> None:
        """Looks while workers write, or commit steps, until cancelled."""
        async with anyio.create_task_group() as tasks:
            if self._is_on:
                tasks.start_soon(self._look_after, self._logs.wait_grown, name="steps in the output")
            tasks.start_soon(self._look_after, self._wait_for_commits, name="committed steps")

    async def _look_after(self, something: Callable[[], Awaitable[None]]) -> None:
        while True:
            await something()
            await anyio.sleep(LOOK_INTERVAL_S)
            self._measure()
            self.look()

    async def _wait_for_commits(self) -> None:
        await self._commits.wait()

    def look(self, *, is_last: bool = False) -> None:
        """Emits `Progressed` for new steps.

        Args:
            is_last: no more steps of this generation follow.
        """
        found = self._find()
        if found is None:
            return
        local_rank, step, total = found
        left = None if total is None or not self._rate else max(0, total - step) / self._rate
        rank = self._ranks[local_rank]
        now = Progressed(self._generation, local_rank, rank, step, total, self._rate, left, is_last)
        before = self._emitted
        is_new = (now.generation, step, total) != (before.generation, before.step, before.total)
        if is_new or is_last:
            self._emitted = now
            self._emit(now)

    def _find(self) -> tuple[int, int, int | None] | None:
        """Returns the worker that speaks for all, its step, and the total that it reports."""
        steps = self.steps().items()
        return next(((local_rank, step, total) for local_rank, (step, total) in steps), None)

    def _measure(self) -> None:
        """Measures the pace; looks on request are too close to each other for that."""
        found = self._find()
        if found is not None:
            _, step, _ = found
            self._rate = self._pace.saw(step, clock.now())
