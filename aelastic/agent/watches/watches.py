"""Watches over the workers of a run: how far their start has come, their progress since, and whether they hang.

- `StartWatch`: the start of each generation, as far as it can be seen from outside.
- `Progress`: steps, steps per second and the time left, from commits or the workers' output.
- `Watches`: the watches that find workers that hang (`hangs`); most jobs have none.

`agent.resources` creates them, and each runs until the run ends.  None of them decides anything.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskGroup

from aelastic.agent.group.worker_env import STUCK_VARIABLE
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.base.host.connections import Connections
from aelastic.base.host.usage import bytes_in, usage_of
from aelastic.base.loop import clock
from aelastic.base.loop.threads import run_sync
from aelastic.logs.expected_output import Step
from aelastic.logs.run_logs import RunLogs
from aelastic.observe.observer import Observer
from aelastic.observe.run_events import (
    Progressed,
    Restarting,
    RunEvent,
    StartPhase,
    WorkerEnded,
    WorkerReached,
    WorkersStarted,
)
from aelastic.rdzv.ledger import NONE, UNKNOWN
from aelastic.spec import WorkerSpec
from aelastic.workers.backend import WorkerStart

if TYPE_CHECKING:
    from aelastic.agent.watches.watch import Found, Watch

_log = logging.getLogger(__name__)

# Interval between two looks at a start, and its share of the time that has passed: a look at eight workers takes a
# millisecond, and they take a second or more to start.
START_LOOK_MIN_S = 0.025
START_LOOK_PART, START_IDLE_LOOK_PART = 0.1, 1.0
START_LIMIT_S = 600.0
START_IDLE_S = 2.0  # at least: imports that wait for a disk usually wait for less

# Interval between two looks at steps, while workers write: the status line is drawn once a second.
LOOK_INTERVAL_S = 0.5
# The output of a worker that failed is searched within milliseconds; we do not wait longer for a busy pump.
CATCH_UP_S = 0.2
# Steps per second are those of the last minute, or of the last two steps that were seen if these take longer.
WINDOW_S = 60.0
# The median step is that of this many looks that saw new steps: a few long ones, with a save or an evaluation, do not
# matter.
STEPS_MAX = 64

# As in torch's agent: any other value is off.
FILE_TIMER_VARIABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"


class StartWatch(Observer):
    """Watches and reports the starts of one run's workers, as far as they can be seen from outside.

    The size of their files shows their first output, and a connection to the workers' store their first process group.
    A thread looks, at intervals that grow with the duration of the start: reports are late by a tenth of it, or by half
    for a worker that computes nothing meanwhile.  A start is followed for at most `START_LIMIT_S`, and only until its
    workers have computed nothing for half of its time: then nothing is looked at until the next start.

    This is the last observer: so the others, too, receive its events after the start of all workers.

    Args:
        group: the workers; read, never changed.
        tell: takes run events, for the observers.
        is_local: the workers are processes of this machine; otherwise only their files are seen.
    """

    def __init__(self, group: WorkerGroup, tell: Callable[[RunEvent], None], *, is_local: bool) -> None:
        self._group = group
        self._tell = tell
        self._is_local = is_local
        self._visible: tuple[StartPhase, ...] = ("output", "process_group") if is_local else ("output",)
        self._files: Mapping[int, tuple[Path, ...]] = {}  # files that workers write to, by local rank
        self._started = WorkersStarted(0, {})
        self._missing: dict[int, set[StartPhase]] = {}  # by local rank: the phases not reached yet
        self._changed = anyio.Event()
        self._limiter = anyio.CapacityLimiter(1)  # a thread that hangs keeps its token

    def begin(self, starts: Sequence[WorkerStart]) -> None:
        """A new generation is about to start."""
        is_new = self._group.spec.logs_specs is None  # otherwise the files may contain output of earlier workers
        self._files = {start.local_rank: start.output_files if is_new else () for start in starts}

    def tell(self, event: RunEvent, now: float) -> None:  # noqa: ARG002  the state has it
        match event:
            case WorkersStarted():
                self._missing = self._to_watch(event)
                self._started = event
                self._changed.set()
            case WorkerEnded(_, local_rank):
                self._missing.pop(local_rank, None)
            case Restarting():
                self._missing = {}
            case _:
                pass

    def _to_watch(self, started: WorkersStarted) -> dict[int, set[StartPhase]]:
        """Returns the phases that each worker has yet to reach.  One that keeps its process starts nothing."""
        formed, before = self.run_state.formed, self._started.ids
        if formed is None or not formed.in_place:
            return {local_rank: set(self._visible) for local_rank in started.ids}
        # A replacement appends to the files of the lost worker, so its first output cannot be recognized.
        visible = set(self._visible) - {"output"}
        return {local_rank: set(visible) for local_rank, id_ in started.ids.items() if before.get(local_rank) != id_}

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            await self._follow(self._started)

    async def _follow(self, started: WorkersStarted) -> None:
        """Returns when all workers have reached everything, or ended, or others start."""
        assert self._group.assigned is not None  # or there would be no workers
        connections = Connections(self._group.assigned.master_port)
        interval_s, busy_s, cpu_s = START_LOOK_MIN_S, 0.0, dict[int, float]()
        while self._missing and clock.now() - self.run_state.formed_at < START_LIMIT_S:
            with anyio.move_on_after(interval_s):
                await self._changed.wait()
            if not self._missing or self._changed.is_set():
                return
            places = {rank: started.ids[rank] for rank in self._missing}
            seen, used = await run_sync(self._look, places, connections, abandon_on_cancel=True, limiter=self._limiter)
            if self._started is not started:
                return
            for local_rank, reached in sorted(seen.items()):
                self._on_reached(started, local_rank, reached)
            passed_s = clock.now() - self.run_state.formed_at
            is_busy = any(used_s > cpu_s.get(local_rank, 0.0) for local_rank, used_s in used.items())
            busy_s = passed_s if is_busy or not used else busy_s
            if passed_s - busy_s >= max(START_IDLE_S, passed_s / 2):
                return
            interval_s = max(START_LOOK_MIN_S, passed_s * (START_LOOK_PART if is_busy else START_IDLE_LOOK_PART))
            interval_s = min(interval_s, START_LIMIT_S - passed_s)
            cpu_s.update(used)

    def _look(
        self, ids: Mapping[int, object], connections: Connections
    ) -> tuple[dict[int, frozenset[StartPhase]], dict[int, float]]:
        """Returns what workers have reached, and their CPU time, by local rank.  Runs in a thread."""
        pids = {rank: pid for rank, pid in ids.items() if self._is_local and isinstance(pid, int)}
        connected = connections.of(pids.values())
        reached: dict[int, frozenset[StartPhase]] = {}
        for rank in ids:
            output: set[StartPhase] = {"output"} if bytes_in(self._files.get(rank, ())) else set()
            reached[rank] = frozenset(output | ({"process_group"} if pids.get(rank) in connected else set()))
        usages = {rank: usage_of(pid, pid) for rank, pid in pids.items()}
        return reached, {rank: usage.cpu_s for rank, usage in usages.items() if usage is not None}

    def _on_reached(self, started: WorkersStarted, local_rank: int, reached: frozenset[StartPhase]) -> None:
        missing = self._missing.get(local_rank, set())
        rank, kind = self._group.workers[local_rank].global_rank, started.kind_of(local_rank)
        for phase in sorted(missing & reached):
            missing.discard(phase)
            passed_s = clock.now() - self.run_state.formed_at
            self._tell(WorkerReached(started.generation, local_rank, rank, kind, phase, passed_s))
        if not missing:
            self._missing.pop(local_rank, None)


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
        tell: takes run events, for the observers.
        is_on: `--progress` is given.
    """

    def __init__(
        self,
        logs: RunLogs,
        committed: Callable[[], Mapping[int, int]],
        tell: Callable[[Progressed], None],
        *,
        is_on: bool,
    ) -> None:
        self._is_on = is_on
        self._logs = logs
        self._committed = committed
        self._commits = anyio.Event()  # workers commit steps
        self._tell = tell
        self._generation = 0
        self._ranks: Sequence[int] = ()  # by local rank
        self._ended: set[int] = set()  # local ranks of workers that have ended, and left nothing in a buffer
        self._pace = Pace()
        self._rate: float | None = None  # steps per second
        self._told = Progressed(0, 0, 0, 0)
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
        told = self._told
        is_new = (now.generation, step, total) != (told.generation, told.step, told.total)
        if is_new or is_last:
            self._told = now
            self._tell(now)

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


class Watches:
    """The watches of one run, created as the spec and the environment require, and run together.

    A watch is created, and its module imported, only if the spec or the environment requires it.  Its findings go to
    the supervisor, which decides.  A watch that raises is a bug in aelastic; it is logged, and the job continues
    without it.

    Args:
        spec: the user's settings.
        env: the agent's environment.
        scratch: the run's own folder, which need not exist before `open`.
        count_matches: counts a worker's output that is as expected (`logs.RunLogs`).
        step_s: returns the median step, if it is known (`Progress`).
        waiting: returns local ranks that wait because they are asked to.
        on_found: receives each finding, in its own task.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        env: Mapping[str, str],
        scratch: Path,
        count_matches: Callable[[int], Awaitable[int]],
        step_s: Callable[[], float | None],
        waiting: Callable[[], Collection[int]],
        on_found: Callable[[Found], Coroutine[Any, Any, None]],
    ) -> None:
        self._on_found = on_found
        self._tasks: TaskGroup | None = None
        self._watches: list[Watch] = []
        if env.get(FILE_TIMER_VARIABLE) == "1":
            from aelastic.agent.watches.file_timer import FileTimerServer

            self._watches.append(FileTimerServer(env, scratch, self._report))
        if spec.finds_hangs or spec.expect_output is not None or env.get(STUCK_VARIABLE):
            from aelastic.agent.watches.activity import ActivitySampler, rules_of

            rules = rules_of(spec, env)
            is_told = spec.hang_timeout_steps is not None and spec.progress is None
            self._watches.append(
                ActivitySampler(
                    rules, count_matches, self._report, step_s=step_s, waiting=waiting, steps_are_told=is_told
                )
            )

    @property
    def env(self) -> dict[str, str]:
        """Variables for the workers' environment."""
        return {name: value for watch in self._watches for name, value in watch.env.items()}

    def open(self) -> None:
        """Creates what the watches need.

        Raises:
            InputError: a watch cannot get what it needs.
        """
        for watch in self._watches:
            watch.open()

    def started(self, generation: int, starts: Sequence[WorkerStart], ids: Mapping[int, Any]) -> None:
        for watch in self._watches:
            watch.started(generation, starts, ids)

    def ended(self, generation: int, local_rank: int) -> None:
        for watch in self._watches:
            watch.ended(generation, local_rank)

    def silence(self, now: float) -> tuple[float, Mapping[int, float]]:
        """Returns the `silence` of the watch that counts signs of life; (0, {}) if none does."""
        return max((watch.silence(now) for watch in self._watches), key=lambda found: found[0], default=(0.0, {}))

    async def run(self) -> None:
        """Runs all of them, until cancelled."""
        if not self._watches:
            return
        async with anyio.create_task_group() as self._tasks:
            for watch in self._watches:
                self._tasks.start_soon(_run, watch, name=type(watch).__name__)

    def _report(self, found: Found) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(self._on_found, found, name=f"found {found.local_rank}")

    def close(self) -> None:
        for watch in self._watches:
            watch.close()


async def _run(watch: Watch) -> None:
    try:
        await watch.run()
    except Exception:  # noqa: BLE001  the job is worth more than a watch
        _log.exception("watch %s raised and was disabled (a bug in aelastic: please report it)", type(watch).__name__)
