"""Writes metrics as Prometheus' text (exposition format 0.0.4, which every scraper reads), or as OpenMetrics 1.0.

Each run has its own registry, because agents run inside other people's programs, any number of them side by side.
prometheus_client is not used: it counts from the start or not at all, and takes 47 ms to import.

Labels hold ranks and words from fixed lists, never a pid: the series of a value that never recurs would stay.  The one
series that identifies the run may hold its id.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# The type that a scraper names in `Accept` if it reads OpenMetrics.
OPEN_METRICS = "application/openmetrics-text"
OPEN_CONTENT_TYPE = f"{OPEN_METRICS}; version=1.0.0; charset=utf-8"


class Family:
    """Series of one name that differ in their labels' values, which are passed by position.

    Args:
        kind: `counter` or `gauge`.
        name: the name, with unit, and `_total` for a counter.
        text: the help text.
        labels: the names of the labels.
    """

    def __init__(self, kind: str, name: str, text: str, *labels: str) -> None:
        self.kind, self.name, self.text, self.labels = kind, name, text, labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    @property
    def series(self) -> tuple[tuple[str, ...], ...]:
        """The labels' values of each existing series."""
        return tuple(self._values)

    def set(self, value: float, *labels: object) -> None:
        self._values[self._key(labels)] = value

    def raise_to(self, value: float, *labels: object) -> None:
        """Sets the value unless it is already higher: a counter never shrinks."""
        self.set(max(value, self._values.get(self._key(labels), 0.0)), *labels)

    def inc(self, *labels: object, by: float = 1.0) -> None:
        key = self._key(labels)
        self._values[key] = self._values.get(key, 0.0) + by

    def clear(self) -> None:
        """Forgets all series."""
        self._values.clear()

    def lines(self, common: Mapping[str, str]) -> Iterator[str]:
        names, values = self._others(common)
        for key, value in self._values.items():
            yield _line(self.name, (*self.labels, *names), (*key, *values), value)

    def _others(self, common: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the common labels that this family does not define itself, and their values."""
        more = {label: value for label, value in common.items() if label not in self.labels}
        return tuple(more), tuple(more.values())

    def _key(self, labels: Sequence[object]) -> tuple[str, ...]:
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not {labels}")
        return tuple(map(str, labels))


class Histogram(Family):
    """Counts, for each bucket, the values up to its bound.

    Args:
        buckets: upper bounds, ascending, without infinity.
    """

    def __init__(self, name: str, text: str, *labels: str, buckets: Sequence[float]) -> None:
        super().__init__("histogram", name, text, *labels)
        self.buckets = tuple(buckets)
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._values.clear()  # here: the sums
        if not labels:
            self.declare()

    def declare(self, *labels: object) -> None:
        """Begins an empty series: a rate needs a zero to start from."""
        key = self._key(labels)
        self._values.setdefault(key, 0.0)
        self._counts.setdefault(key, [0] * (len(self.buckets) + 1))

    def observe(self, value: float, *labels: object) -> None:
        self.declare(*labels)
        key = self._key(labels)
        self._values[key] += value
        place = next((i for i, bound in enumerate(self.buckets) if value <= bound), len(self.buckets))
        self._counts[key][place] += 1

    def lines(self, common: Mapping[str, str]) -> Iterator[str]:
        names, values = self._others(common)
        for key, counts in self._counts.items():
            total = 0
            for bound, count in zip((*self.buckets, math.inf), counts, strict=True):
                total += count
                yield _line(f"{self.name}_bucket", (*self.labels, *names, "le"), (*key, *values, _number(bound)), total)
            yield _line(f"{self.name}_sum", (*self.labels, *names), (*key, *values), self._values[key])
            yield _line(f"{self.name}_count", (*self.labels, *names), (*key, *values), total)


F = TypeVar("F", bound=Family)


class Registry:
    """The families of one run."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    @property
    def families(self) -> tuple[Family, ...]:
        return tuple(self._families.values())

    def counter(self, name: str, text: str, *labels: str, start: Sequence[str] = ()) -> Family:
        """Adds a number that only grows.

        Args:
            start: values of the label whose series begin at 0 now: a rate needs a zero to start from.
        """
        family = self._add(Family("counter", name, text, *labels))
        for value in start:
            family.inc(value, by=0)
        return family

    def gauge(self, name: str, text: str, *labels: str) -> Family:
        return self._add(Family("gauge", name, text, *labels))

    def histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float]) -> Histogram:
        return self._add(Histogram(name, text, *labels, buckets=buckets))

    def _add(self, family: F) -> F:
        if family.name in self._families:
            raise ValueError(f"{family.name} is there already")
        self._families[family.name] = family
        return family

    def expose(self, common: Mapping[str, str] = MappingProxyType({}), *, is_open: bool = False) -> str:
        """Returns the text for a scraper.

        Args:
            common: labels for every series, with their values.
            is_open: in OpenMetrics, where a counter's family is named without `_total`, and the text has an end mark.
        """
        lines: list[str] = []
        for family in self._families.values():
            name = family.name.removesuffix("_total") if is_open else family.name
            text = _escaped(family.text) if is_open else family.text.replace("\\", r"\\").replace("\n", r"\n")
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {family.kind}", *family.lines(common)]
        if is_open:
            lines.append("# EOF")
        return "\n".join(lines) + "\n"


def _line(name: str, labels: Sequence[str], values: Sequence[str], number: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in zip(labels, values, strict=True))
    return f"{name}{{{pairs}}} {_number(number)}" if pairs else f"{name} {_number(number)}"


def _escaped(value: str) -> str:
    # A surrogate, from a byte that was not UTF-8, cannot be sent.
    text = value.encode(errors="replace").decode()
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(value)
