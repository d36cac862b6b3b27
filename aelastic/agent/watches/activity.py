"""Samples CPU, I/O and output of workers for hang detection.

`hang_rules.py` judges, and decides when to look; threads here look, in `/proc` and at the files that workers write to.
A file system that hangs, which is a cause of hangs, does not stop the rest: file sizes are read in their own thread,
with a timeout.  A worker includes its session and the descendants of that, so a worker that waits for its data loaders
shows their activity.  If the back end has no pid for a worker, only its output is seen.

Works on Linux only; if `/proc` is missing or not readable nothing is seen, which is logged once.
"""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

import anyio

from aelastic.agent.group.worker_env import STUCK_VARIABLE
from aelastic.agent.watches.watch import Found, Report, Watch
from aelastic.base.host import proc_table
from aelastic.base.host.proc_table import Process
from aelastic.base.host.usage import CounterGrowth, bytes_in
from aelastic.base.loop import clock
from aelastic.base.loop.threads import run_sync
from aelastic.base.record import Record
from aelastic.diagnose.hangs.hang_rules import WORDS, Began, Ended, HangDetector, Looked, Sample
from aelastic.diagnose.hangs.options import HangRules, HangSignal
from aelastic.errors import InputError
from aelastic.workers.backend import WorkerStart

_log = logging.getLogger(__name__)

# A worker's output is searched within milliseconds, and file sizes are read as fast; a machine may be slow.
SEARCH_TIMEOUT_S = MEASURE_TIMEOUT_S = 1.0
WARNS_AFTER_S = 60.0  # without a step; the first one may take longer, while kernels are compiled

# Returns, for a local rank, a number that has grown if its output was as expected since the last call, once everything
# written so far is searched.
CountMatches: TypeAlias = Callable[[int], Awaitable[int]]


def stuck_timeout_of(env: Mapping[str, str]) -> float | None:
    """Returns how long a worker may sleep where no signal can end it, from torch's variable; `None`: off.

    Raises:
        InputError: the variable is not a number.
    """
    text = env.get(STUCK_VARIABLE, "")
    try:
        stuck_s = float(text or "0")
    except ValueError:
        stuck_s = math.nan
    if math.isnan(stuck_s):
        raise InputError(f"{STUCK_VARIABLE}={text}: use seconds; 0 is off")
    return stuck_s if 0 < stuck_s < math.inf else None


class ActivitySampler(Watch):
    """Watch for signs of life of one run's workers.

    Args:
        rules: what the workers must do.
        stuck_timeout_s: as `stuck_timeout_of` returns it.
        count_matches: counts a worker's output that is as expected.
        report: receives each verdict as a finding.
        look: reads `/proc`, in a thread.
        step_s: returns the median step; `None` if it is not known.
        waiting: returns local ranks that wait because they are asked to.
        steps_are_reported: the timeout is a number of steps, and only workers that recover in place report steps.
    """

    def __init__(
        self,
        rules: HangRules,
        count_matches: CountMatches,
        report: Report,
        look: Look | None = None,
        stuck_timeout_s: float | None = None,
        step_s: Callable[[], float | None] = lambda: None,
        waiting: Callable[[], Collection[int]] = lambda: (),
        *,
        steps_are_reported: bool = False,
    ) -> None:
        self._rules = rules
        self._signs = signs_for(rules, stuck_timeout_s)
        self._core = HangDetector(rules, stuck_timeout_s)
        self._count_matches = count_matches
        self._report, self._step_s, self._waiting = report, step_s, waiting
        self._look: Look = ProcTable() if look is None else look
        self._generation = 0
        self._misses_steps = steps_are_reported  # a warning is due if no step is reported
        self._began_at = 0.0
        self._targets: dict[int, SamplingTarget] = {}
        self._expecting: set[int] = set()  # local ranks whose output is matched
        self._unseen: set[HangSignal] = set()  # signs that have been logged as unreadable
        self._changed = anyio.Event()
        self._measuring = anyio.CapacityLimiter(1)  # a thread that hangs keeps its token

    def started(self, generation: int, starts: Sequence[WorkerStart], ids: Mapping[int, Any]) -> None:
        self._generation = generation
        self._targets = {
            start.local_rank: SamplingTarget(
                pid if isinstance(pid := ids.get(start.local_rank), int) else None, start.output_files
            )
            for start in starts
        }
        expected = self._rules.expect_output
        concerned = [start for start in starts if expected is not None and expected.concerns(start.env)]
        self._expecting = {start.local_rank for start in concerned}
        self._began_at = clock.now()
        self._core.handle(Began(tuple(self._targets)), self._began_at)
        self._changed.set()

    def ended(self, generation: int, local_rank: int) -> None:
        if generation == self._generation:
            self._targets.pop(local_rank, None)
            self._core.handle(Ended(local_rank), clock.now())
            self._changed.set()

    def silence(self, now: float) -> tuple[float, Mapping[int, float]]:
        return self._core.silence(now)

    async def run(self) -> None:
        limiter = anyio.CapacityLimiter(1)  # our own, so that we do not wait for other users of threads
        while True:
            self._changed = anyio.Event()
            if not await self._wait_due():
                continue
            generation, targets = self._generation, dict(self._targets)
            began_at = clock.now()
            samples = await run_sync(self._look, targets, self._signs, abandon_on_cancel=True, limiter=limiter)
            sizes = await self._sizes({rank: targets[rank] for rank in samples})
            matches = await self._matches(self._expecting & samples.keys())
            if generation == self._generation:
                full = {
                    rank: _completed(sample, output=sizes.get(rank), matches=matches.get(rank))
                    for rank, sample in samples.items()
                }
                self._warn_of_unseen(full.values())
                step_s = self._step_s()
                self._warn_of_missing_steps(step_s, began_at)
                self._judge(Looked(full, began_at, step_s, frozenset(self._waiting())))

    async def _wait_due(self) -> bool:
        """Waits until it is time to look, which returns true, or something has changed."""
        deadline = self._core.deadline
        with anyio.CancelScope(deadline=math.inf if deadline is None else deadline) as waiting:
            await self._changed.wait()
        return waiting.cancelled_caught

    async def _sizes(self, targets: Mapping[int, SamplingTarget]) -> dict[int, int | None]:
        """Returns how many bytes workers have written; empty if a file system does not answer."""
        is_wanted = "output" in self._signs
        if is_wanted and not self._measuring.borrowed_tokens:
            with anyio.move_on_after(MEASURE_TIMEOUT_S):
                return await run_sync(sizes_of, targets, abandon_on_cancel=True, limiter=self._measuring)
        return {}

    async def _matches(self, local_ranks: Collection[int]) -> dict[int, int]:
        """Returns the matches in the workers' output so far, without output that is not searched in time."""
        counts = {}
        with anyio.move_on_after(SEARCH_TIMEOUT_S):
            for rank in sorted(local_ranks):
                counts[rank] = await self._count_matches(rank)
        return counts

    def _judge(self, looked: Looked) -> None:
        for verdict in self._core.handle(looked, clock.now()):
            # SIGTERM, as for all others: a worker that waits in Python may save its state; others are killed after the
            # shutdown timeout.
            signum = signal.SIGTERM if verdict.is_stopped else None
            self._report(
                Found(self._generation, verdict.local_rank, verdict.by, verdict.reason, signum, verdict.waited_s)
            )

    def _warn_of_unseen(self, samples: Collection[Sample]) -> None:
        if not self._rules.finds_hangs:
            return
        for sign in self._rules.hang_signals:
            if any(each.of(sign) is None for each in samples) and sign not in self._unseen:
                self._unseen.add(sign)
                _log.warning("cannot read %s of workers; ignored for hang detection", WORDS[sign])

    def _warn_of_missing_steps(self, step_s: float | None, now: float) -> None:
        if step_s is not None:
            self._misses_steps = False
        elif self._misses_steps and now - self._began_at >= WARNS_AFTER_S:
            self._misses_steps = False
            _log.warning(
                "no limit for hangs yet: no worker has told a step for %.0f s; workers that do not recover in place "
                "need --progress", WARNS_AFTER_S, extra={"topic": "no-step-is-known"},
            )  # fmt: skip


def _completed(sample: Sample, **more: int | None) -> Sample:
    known = {name: value for name, value in more.items() if value is not None}
    return sample.replace(**known) if known else sample


# Looking.


class SamplingTarget(Record):
    """Where to look for one worker."""

    pid: int | None
    files: tuple[Path, ...]


# What a sample must show.
Signs: TypeAlias = frozenset[HangSignal | Literal["sleep"]]


def signs_for(rules: HangRules, stuck_timeout_s: float | None) -> Signs:
    """Returns what to look at for these rules."""
    signs: set[HangSignal | Literal["sleep"]] = set(rules.hang_signals) if rules.finds_hangs else set()
    if stuck_timeout_s is not None:
        signs.add("sleep")
    return frozenset(signs)


Look: TypeAlias = Callable[[Mapping[int, SamplingTarget], Signs], dict[int, Sample]]


class ProcTable:
    """Reads workers' activity from `/proc`.  Used by one thread at a time.

    Args:
        root: where `/proc` is.
    """

    def __init__(self, root: str = "/proc") -> None:
        self._root = root
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")
        self._ticks, self._io = CounterGrowth(), CounterGrowth()
        self._sums: dict[int, list[int]] = {}  # ticks and IO of each worker, by its pid

    def __call__(self, targets: Mapping[int, SamplingTarget], wants: Signs) -> dict[int, Sample]:
        """Returns samples of the live workers, without their output, by local rank."""
        table = self._processes() if wants & {"cpu", "io"} else {}
        members = self._members(table, {target.pid for target in targets.values() if target.pid is not None})
        samples = {}
        self._ticks.look()
        self._io.look()
        for rank, target in targets.items():
            own = None if target.pid is None else table.get(target.pid) or self._process(target.pid)
            if target.pid is not None and (own is None or own.state in "ZX"):
                continue
            cpu_s: float | None = None
            moved: int | None = None
            if own is not None and own.pid in table:
                sums = self._sums.setdefault(own.pid, [0, 0])
                sums[0] += sum(self._ticks.of(entry, entry.ticks)[0] for entry in members[own.pid])
                cpu_s = sums[0] * self._tick_s
                if "io" in wants and self._io_of(f"{own.pid}/io") is not None:
                    moves = ((entry, self._io_of(f"{entry.pid}/io")) for entry in members[own.pid])
                    sums[1] += sum(self._io.of(entry, count)[0] for entry, count in moves if count is not None)
                    moved = sums[1]
            sleep: int | None = None
            if own is not None and own.state == "D" and "sleep" in wants:
                # The IO counts of its thread do not change during an uninterruptible sleep.
                sleep = self._io_of(f"{own.pid}/task/{own.pid}/io") or 0
            samples[rank] = Sample(cpu_s=cpu_s, io=moved, sleep=sleep)
        pids = {target.pid for target in targets.values()}
        self._sums = {pid: sums for pid, sums in self._sums.items() if pid in pids}
        return samples

    def _members(self, table: Mapping[int, Process], leaders: set[int]) -> dict[int, list[Process]]:
        """Returns, for each worker, the live processes in its session and their descendants."""
        seeds = {pid: pid if pid in leaders else entry.session for pid, entry in table.items()}
        seeds = {pid: leader for pid, leader in seeds.items() if leader in leaders}
        members: dict[int, list[Process]] = {pid: [] for pid in leaders}
        for pid, leader in proc_table.with_descendants([*table.values()], seeds).items():
            if table[pid].state not in "ZX":
                members[leader].append(table[pid])
        return members

    def _processes(self) -> dict[int, Process]:
        with suppress(OSError):
            found = (self._process(int(name)) for name in os.listdir(self._root) if name.isdigit())
            return {entry.pid: entry for entry in found if entry is not None}
        return {}

    def _process(self, pid: int) -> Process | None:
        with suppress(IndexError, ValueError):
            return proc_table.process(pid, self._root)
        return None

    def _io_of(self, path: str) -> int | None:
        """Returns bytes plus calls of a process, or a thread, including those of children that it has waited for."""
        with suppress(OSError, ValueError):
            return sum(proc_table.io_counts(path, self._root).values())
        return None


def sizes_of(targets: Mapping[int, SamplingTarget]) -> dict[int, int | None]:
    """Returns the size of each worker's files, by local rank; `None` if none of them can grow (a pipe, for example)."""
    sizes = {rank: bytes_in(target.files) for rank, target in targets.items()}
    # If a worker is not a process here, it may not write to its files.
    return {rank: None if targets[rank].pid is None and not size else size for rank, size in sizes.items()}
