"""Numbers of a run, and their text for Prometheus.

A registry of its own, not the process's: an agent lives in other people's programs, and any number of them side by
side.  The text is Prometheus' exposition format 0.0.4, which every scraper reads.

Labels hold ranks and words from fixed lists, never a pid: a series that nobody adds to again would stay for ever.  What
is said once for a run, in a series that never changes, may hold its id.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

F = TypeVar("F", bound="Family")


class Family:
    """Series of one name that differ in their labels' values; the values are given by position.

    Args:
        name: with unit, and `_total` for a counter.
        text: what is counted or measured.
        labels: their names.
    """

    kind = ""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name, self.text, self.labels = name, text, labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def set(self, value: float, *labels: object) -> None:
        self._values[self._key(labels)] = value

    def clear(self) -> None:
        """Forgets all series."""
        self._values.clear()

    def lines(self) -> Iterator[str]:
        for key, value in self._values.items():
            yield _line(self.name, self.labels, key, value)

    def _key(self, labels: Sequence[object]) -> tuple[str, ...]:
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not {labels}")
        return tuple(map(str, labels))


class Counter(Family):
    """Only grows.  `set` is for what somebody else counts, the kernel for one."""

    kind = "counter"

    def inc(self, *labels: object, by: float = 1.0) -> None:
        key = self._key(labels)
        self._values[key] = self._values.get(key, 0.0) + by


class Gauge(Family):
    kind = "gauge"

    def choose(self, chosen: str) -> None:
        """Of series that are 0 and 1, this one is 1 from now on."""
        for key in self._values:
            self._values[key] = float(key == (chosen,))


class Histogram(Family):
    """How often a value was so large, or less.

    Args:
        buckets: upper bounds, ascending, without infinity.
    """

    kind = "histogram"

    def __init__(self, name: str, text: str, *labels: str, buckets: Sequence[float]) -> None:
        super().__init__(name, text, *labels)
        self._buckets = tuple(buckets)
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._values.clear()  # here: the sums
        if not labels:
            self.declare()

    def declare(self, *labels: object) -> None:
        """Begins a series with nothing in it: a rate needs a zero to begin with."""
        key = self._key(labels)
        self._values.setdefault(key, 0.0)
        self._counts.setdefault(key, [0] * (len(self._buckets) + 1))

    def observe(self, value: float, *labels: object) -> None:
        self.declare(*labels)
        key = self._key(labels)
        self._values[key] += value
        place = next((i for i, bound in enumerate(self._buckets) if value <= bound), len(self._buckets))
        self._counts[key][place] += 1

    def lines(self) -> Iterator[str]:
        for key, counts in self._counts.items():
            total = 0
            for bound, count in zip((*self._buckets, math.inf), counts, strict=True):
                total += count
                yield _line(f"{self.name}_bucket", (*self.labels, "le"), (*key, _number(bound)), total)
            yield _line(f"{self.name}_sum", self.labels, key, self._values[key])
            yield _line(f"{self.name}_count", self.labels, key, total)


class Registry:
    """The families of one run."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    @property
    def families(self) -> tuple[Family, ...]:
        return tuple(self._families.values())

    def add(self, family: F) -> F:
        if family.name in self._families:
            raise ValueError(f"{family.name} is there already")
        self._families[family.name] = family
        return family

    def expose(self) -> str:
        """The text for a scraper."""
        lines: list[str] = []
        for family in self._families.values():
            text = family.text.replace("\\", r"\\").replace("\n", r"\n")
            lines += [f"# HELP {family.name} {text}", f"# TYPE {family.name} {family.kind}", *family.lines()]
        return "\n".join(lines) + "\n"


def _line(name: str, labels: Sequence[str], values: Sequence[str], number: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in zip(labels, values, strict=True))
    return f"{name}{{{pairs}}} {_number(number)}" if pairs else f"{name} {_number(number)}"


def _escaped(value: str) -> str:
    # A surrogate, from a byte that was no UTF-8, can't be sent.
    text = value.encode(errors="replace").decode()
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(value)
