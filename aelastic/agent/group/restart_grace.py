"""Restart grace: how long to wait for workers that are being stopped for a restart.

A worker that is in a collective, or in another call that no peer will answer, never runs its Python handler of
SIGTERM; waiting for it blocks all nodes.  A worker that saves a checkpoint writes.  So the workers are observed while
they are being stopped, and the agent waits

- as long as one of their processes writes, or waits for a disk;
- `COMPUTE_S` while they only compute;
- `IDLE_S` while they do neither.

Time in which they wait for a CPU is not counted: on a busy machine they may do nothing else.

A worker is its whole session: a checkpoint that its child or thread writes is its own.  The agent waits for all workers
of a node together, because one that does nothing may wait for one that writes.  A worker that cannot be observed is
not judged.  The shutdown timeout still applies (`worker_group`), and a stop for good has no grace.

Time without a look does not count: an agent that was suspended, or is late on a busy machine, saw nothing in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import TypeAlias, assert_never

from aelastic.base.machine import DeadlinePassed, Machine, Trace
from aelastic.base.record import Record
from aelastic.diagnose.failures.places import ranks_in_words

IDLE_S = 2.0
COMPUTE_S = 5.0
INTERVAL_S = 0.25
# The first look reads the counters; later looks are compared with it.  Most workers have ended by then.
FIRST_LOOK_S = 0.1
# At most this much time counts between two looks.
COUNTED_S = 2 * INTERVAL_S
# A worker computes if it uses this much within `IDLE_S`, 2.5 % of a core; an idle thread uses less.
CPU_S = 0.05
# Timers of event loops may be early by a millisecond.
EARLY_S = 0.005
# How many ranks a reason names.
RANKS_MAX = 8


class Phase(StrEnum):
    WAITING = auto()  # until it is time to look
    LOOKING = auto()  # until the look is over
    OVER = auto()  # waiting longer cannot help; final


class Sample(Record):
    """The result of one look at a worker; counters only grow."""

    written: int | None = None  # bytes, by any of its processes; `None`: cannot be read
    cpu_s: float = 0.0
    waits_for_disk: bool = False
    waits_for_cpu: bool = False


# Events.


class Looked(Record):
    """A look is over."""

    samples: Mapping[int, Sample]  # by local rank; without workers that are gone


Event: TypeAlias = Looked | DeadlinePassed


# Actions.


class Look(Record):
    """Look at the workers.  Answered by `Looked`."""


class GiveUp(Record):
    """Stop waiting.  Not answered."""

    reason: str


Action: TypeAlias = Look | GiveUp


@dataclass(slots=True)
class _Activity:
    """What is known of one worker.

    Points in time are those of the look that noticed the change; time that does not count is added to them.
    """

    wrote_at: float
    computed_at: float
    cpu_s: float = 0.0  # used since `computed_at`
    starved_s: float = 0.0  # waited for a CPU since `wrote_at`
    sample: Sample | None = None  # the last one

    def take(self, sample: Sample, now: float, counted_s: float) -> None:
        before, self.sample = self.sample, sample
        if before is None:  # nothing to compare with: it may have written just now
            self.wrote_at = self.computed_at = now
            return
        used_s = sample.cpu_s - before.cpu_s
        starved_s = max(0.0, counted_s - used_s) if sample.waits_for_cpu else 0.0
        self.cpu_s += used_s
        self.starved_s += starved_s
        self.postpone(starved_s)
        if sample.written != before.written or sample.written is None or sample.waits_for_disk:
            self.wrote_at, self.starved_s = now, 0.0
        if self.cpu_s >= CPU_S:
            self.computed_at, self.cpu_s = now, 0.0

    def postpone(self, by_s: float) -> None:
        self.wrote_at += by_s
        self.computed_at += by_s

    def is_idle(self, now: float) -> bool:
        return now >= max(self.wrote_at, self.computed_at) + IDLE_S - EARLY_S

    def is_past(self, now: float) -> bool:
        """Whether it is not given more time."""
        return self.is_idle(now) or now >= self.wrote_at + COMPUTE_S - EARLY_S


@dataclass(slots=True)
class RestartGrace(Machine[Event, Action]):
    """The grace of one stop.

    Args:
        ranks: global ranks by local rank.
        stopped_at: when the workers were sent SIGTERM.
        fixed_s: how long to wait, whatever they do; `None`: depends on what they do.
    """

    ranks: Mapping[int, int]
    stopped_at: float
    fixed_s: float | None = None
    phase: Phase = Phase.WAITING
    deadline: float | None = None
    _looked_at: float = 0.0
    _activities: dict[int, _Activity] = field(default_factory=dict[int, _Activity])  # by local rank
    _trace: Trace = field(default_factory=Trace)

    def __post_init__(self) -> None:
        self._looked_at = self.stopped_at
        self._activities = {rank: _Activity(self.stopped_at, self.stopped_at) for rank in self.ranks}
        self.deadline = self.stopped_at + (FIRST_LOOK_S if self.fixed_s is None else self.fixed_s)

    def validate(self) -> None:
        """Asserts the invariants of the core."""
        assert (self.deadline is not None) == (self.phase is Phase.WAITING), "it has a deadline, or awaits an answer"
        assert self._activities.keys() <= self.ranks.keys(), "workers only disappear"

    def _dispatch(self, event: Event, now: float) -> list[Action]:
        match event:
            case DeadlinePassed() if self.phase is not Phase.WAITING or now < (self.deadline or 0.0) - EARLY_S:
                return []  # early; or the look takes its time, or it is over
            case DeadlinePassed() if self.fixed_s is not None:
                some = ranks_in_words(sorted(self.ranks.values()), RANKS_MAX)
                return self._give_up(f"{some} not ended {self.fixed_s:g} s after SIGTERM")
            case DeadlinePassed():
                self.phase, self.deadline = Phase.LOOKING, None
                return [Look()]
            case Looked() if self.phase is Phase.LOOKING:
                self._take(event.samples, now)
                return self._judge(now)
            case Looked():
                return []  # a duplicate
            case _:
                assert_never(event)

    def _take(self, samples: Mapping[int, Sample], now: float) -> None:
        since_s = now - self._looked_at
        counted_s = min(since_s, COUNTED_S)
        self._looked_at = now
        self._activities = {rank: activity for rank, activity in self._activities.items() if rank in samples}
        for rank, activity in self._activities.items():
            activity.postpone(since_s - counted_s)
            activity.take(samples[rank], now, counted_s)

    def _judge(self, now: float) -> list[Action]:
        if not self._activities or not all(activity.is_past(now) for activity in self._activities.values()):
            self.phase, self.deadline = Phase.WAITING, now + INTERVAL_S
            return []
        return self._give_up(self._reason(now))

    def _give_up(self, reason: str) -> list[Action]:
        self.phase, self.deadline = Phase.OVER, None
        return [GiveUp(reason)]

    def _reason(self, now: float) -> str:
        by_words: dict[str, list[int]] = {}
        for rank, activity in self._activities.items():
            words = f"used the CPU but wrote nothing for {COMPUTE_S:g} s"
            if activity.is_idle(now):
                words = f"neither wrote nor used the CPU for {IDLE_S:g} s"
            elif activity.starved_s >= 1.0:
                words += f", not counting {activity.starved_s:.0f} s waiting for a CPU"
            by_words.setdefault(words, []).append(self.ranks[rank])
        parts = [f"{ranks_in_words(sorted(ranks), RANKS_MAX)} {words}" for words, ranks in by_words.items()]
        waited_s = now - self.stopped_at
        when = "" if waited_s < COMPUTE_S + 1.0 else f", {waited_s:.0f} s"
        return f"{'; '.join(parts)}{when} after SIGTERM"
