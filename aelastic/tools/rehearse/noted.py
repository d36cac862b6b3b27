"""The notes of one run's workers about themselves (`aelastic/training/rehearsed`), read by the rehearsal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aelastic.training.rehearsed import notes

SAME = 1e-6  # relative: to six digits


class Habit(NamedTuple):
    """A habit of a script that breaks its recovery in place, or may."""

    habit: str  # its name in `notes`
    where: str  # in the script, as `train.py:12`; empty if it is not known
    what: str


class Shared(NamedTuple):
    """A rank has the state of a round."""

    pid: int
    at: float
    step: int


class Noted:
    def __init__(self) -> None:
        self.is_in_place = False  # a worker can recover in place
        self.shared: dict[int, dict[int, Shared]] = {}  # by round and rank
        self.parameters: dict[int, dict[int, list[float]]] = {}  # of rank 0, by round and step
        self.random: dict[int, dict[tuple[int, int], dict[str, int]]] = {}  # by round, then step and rank
        self.habits: dict[Habit, None] = {}  # in the order in which they were found

    def take(self, note: Mapping[str, Any]) -> None:
        match note["kind"]:
            case notes.BEGAN:
                self.is_in_place = self.is_in_place or note["in_place"]
            case notes.SHARED:
                self.shared.setdefault(note["round"], {})[note["rank"]] = Shared(note["pid"], note["at"], note["step"])
            case notes.STEP:
                self.random.setdefault(note["round"], {})[note["step"], note["rank"]] = note["random"]
                if note["rank"] == 0:
                    self.parameters.setdefault(note["round"], {})[note["step"]] = note["parameters"]
            case notes.HABIT:
                self.habits[Habit(note["habit"], note["where"], note["what"])] = None

    @property
    def round(self) -> int:
        """The last in which a rank has the state; 0: there was none."""
        return max(self.shared, default=0)

    @property
    def steps(self) -> Sequence[int]:
        """Those at which parameters were noted, in order."""
        return sorted({step for each in self.parameters.values() for step in each})

    def newest(self, after: int = -1) -> int:
        """Returns the newest step at which parameters were noted, in a round after this one; -1 without one."""
        return max((max(each) for round_, each in self.parameters.items() if round_ > after), default=-1)

    def steps_after(self, round_: int) -> Sequence[int]:
        """Returns those of them in later rounds, in order."""
        return sorted({step for at, each in self.parameters.items() if at > round_ for step in each})

    def differs_at(self, usual: Noted, after: int, last: float = math.inf) -> int | None:
        """Returns the first step in a later round than `after` whose parameters are not those of another run.

        Args:
            usual: that run.
            after: the round of the fault.
            last: the last step to compare.
        """
        found = self._differences(usual, after)
        return next((step for step, value in found if step <= last and value > SAME), None)

    def is_random(self, usual: Noted, until: int) -> bool:
        """Whether parameters also differed before the fault: up to this round."""
        return any(value > SAME for round_ in self.parameters if round_ <= until
                   for _, value in self._of_round(usual, round_))  # fmt: skip

    def random_that_differ(self, usual: Noted, until: int) -> list[str]:
        """Returns generators of random numbers whose states differ after a fault, but did not before."""
        theirs = {of: states for each in usual.random.values() for of, states in each.items()}
        before, after = set[str](), set[str]()
        for round_, each in self.random.items():
            for of, states in each.items():
                known = theirs.get(of, states)
                other = {name for name, state in states.items() if known.get(name, state) != state}
                (before if round_ <= until else after).update(other)
        return sorted(after - before)

    def _differences(self, usual: Noted, after: int) -> list[tuple[int, float]]:
        return [each for round_ in sorted(self.parameters) if round_ > after for each in self._of_round(usual, round_)]

    def _of_round(self, usual: Noted, round_: int) -> list[tuple[int, float]]:
        theirs = {step: values for each in usual.parameters.values() for step, values in each.items()}
        own = self.parameters[round_]
        return [(step, difference(own[step], theirs[step])) for step in sorted(own.keys() & theirs.keys())]


def difference(values: Sequence[float], usual: Sequence[float]) -> float:
    """Returns how far values are from the usual ones, relative to their size."""
    if len(values) != len(usual):
        return math.inf
    off = math.sqrt(sum((one - other) ** 2 for one, other in zip(values, usual, strict=True)))
    size = math.sqrt(sum(other**2 for other in usual))
    if math.isnan(off) or math.isnan(size):
        return 0.0 if [*map(math.isnan, values)] == [*map(math.isnan, usual)] else math.inf
    return off / size if size else off
