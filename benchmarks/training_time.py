"""Effective training time: the schedule of faults, and which steps of a run counted.

Pure functions over what workers have written, for `goodput.py`.  A step of a round is finished when each rank of the
round has finished it, at the time of the last.  It counts unless a later round begins at or before it: that round
resumed from a checkpoint without it.  What an older round finishes after a newer one has finished its first step never
counts, since no checkpoint that is loaded holds it.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

KINDS = ("worker killed", "worker raises", "agent killed", "agent suspended", "agent asked to go", "node added")
ANNOUNCED = "node announced"  # some seconds before it is killed
JITTER = 0.15  # faults come that share of the interval earlier or later
PAUSE_STEPS = 5  # a gap of more steps than that is a pause
BLAME_STEPS = 10  # a fault that comes so many steps after the last one finished has still stopped the job


# --- the schedule -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Something that happens to a job.

    Attributes:
        at: seconds from the first step.
        kind: one of `KINDS`.
        choice: which of the nodes, as a number from 0 to below 1.
    """

    at: float
    kind: str
    choice: float


def schedule(seed: int, duration: float, every: float, announced_s: float = 0.0) -> list[Fault]:
    """The faults of a run: all kinds in a random order, then all kinds in another one, and so on.

    Args:
        seed: the same seed, the same faults.
        duration: seconds; the last fault leaves half an interval to recover.
        every: seconds between two faults, on average; 0 for none.
        announced_s: if it is given, each second fault is a node that goes, and says so that many seconds before.
    """
    chance = random.Random(seed)  # noqa: S311 - nothing is guarded by it
    faults: list[Fault] = []
    waiting: list[str] = []
    number = 1
    while every and number * every < duration - every / 2:
        waiting = waiting or chance.sample(KINDS, len(KINDS))
        at = number * every + chance.uniform(-JITTER, JITTER) * every
        is_announced = announced_s and number % 2 == 0
        kind = ANNOUNCED if is_announced else waiting.pop()
        faults.append(Fault(at - announced_s if is_announced else at, kind, chance.random()))
        number += 1
    return faults


# --- what counted -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A rank has finished a step."""

    at: float
    step: int
    round: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class Finished:
    """All ranks of a round have finished a step."""

    at: float
    step: int
    round: int
    world_size: int


@dataclass(frozen=True)
class Progress:
    """What a run has achieved.

    Attributes:
        counted: when each of the steps that counted was finished, in order of time.
        lost: how many finished steps did not count: those that were done again, or that no checkpoint held.
        work: the steps that counted, each as much as the share of the nodes that took part in it.
    """

    counted: tuple[float, ...]
    lost: int
    work: float


def parse(text: str) -> list[Line]:
    """The lines of one worker; the last one may be cut off, by the worker's death."""
    lines = []
    for line in text.splitlines(keepends=True):
        if line.startswith("step ") and line.endswith("\n"):
            at, *numbers = line.split()[1:]
            lines.append(Line(float(at), *map(int, numbers)))
    return lines


def finished(lines: Iterable[Line]) -> list[Finished]:
    """What all ranks of a round have finished, in order of time."""
    ranks: dict[tuple[int, int], dict[int, Line]] = {}
    for line in lines:
        ranks.setdefault((line.round, line.step), {})[line.rank] = line
    done = []
    for (round_, step), by_rank in ranks.items():
        size = next(iter(by_rank.values())).world_size
        if len(by_rank) == size:
            done.append(Finished(max(line.at for line in by_rank.values()), step, round_, size))
    return sorted(done, key=lambda each: (each.at, each.step))


def progress(done: Sequence[Finished], start: float, end: float, nodes: int = 1) -> Progress:
    """Which steps counted, of those finished after `start` and until `end`.

    Args:
        done: in order of time.
        start: the end of a step; this one and earlier ones are in the history, but in no figure.
        end: what is finished later is not looked at.
        nodes: a step of so many workers or more is whole work.
    """
    history: dict[int, Finished] = {}
    rounds: set[int] = set()
    newest: int | None = None
    lost = 0
    for each in done:
        if each.at > end:
            break
        if each.round not in rounds:
            rounds.add(each.round)
            newest = each.round
            discarded = [step for step in history if step >= each.step]
            lost += sum(history.pop(step).at > start for step in discarded)
        if each.round == newest:
            history[each.step] = each
        else:
            lost += each.at > start
    kept = [each for each in history.values() if each.at > start]
    work = sum(min(each.world_size, nodes) / nodes for each in kept)
    return Progress(tuple(sorted(each.at for each in kept)), lost, work)


def share(steps: float, step_s: float, start: float, end: float) -> float:
    """The share of the time from `start` to `end` that so many steps took."""
    return steps * step_s / (end - start)


# --- pauses -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Happened:
    """A fault that took place, and when."""

    at: float
    kind: str


@dataclass(frozen=True)
class Pause:
    """No step was finished for a while.

    Attributes:
        seconds: beyond the time of the step itself.
        cause: the kind of fault, or "none".
    """

    at: float
    seconds: float
    cause: str


def pauses(
    done: Sequence[Finished], faults: Sequence[Happened], step_s: float, start: float, end: float
) -> list[Pause]:
    """Where no round finished a step for long.

    The cause is the last fault before the pause: the one that stopped the job, or one whose consequences come in
    several parts, as the loss of a node and its return.  A fault during a pause is not its cause: training stood.
    """
    times = [start, *(each.at for each in done if start < each.at < end), end]
    found = []
    for before, after in pairwise(times):
        if after - before > PAUSE_STEPS * step_s:
            number = bisect_left([fault.at for fault in faults], before + BLAME_STEPS * step_s)
            cause = faults[number - 1].kind if number else "none"
            found.append(Pause(before, after - before - step_s, cause))
    return found


def counted_each_second(counted: Sequence[float], start: float, end: float) -> list[int]:
    """How many of the counted steps were finished by the first second, the second, and so on."""
    return [bisect_left(counted, start + second) for second in range(1, int(end - start) + 1)]
