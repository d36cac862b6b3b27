"""The reference of the metrics: `docs/reference/metrics.md`, from what the code declares."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from markdown import code, lines, table
from sources import ROOT

sys.path.insert(0, str(ROOT))  # `make docs` needs no installed package

from aelastic.observe.health.server import request_counters
from aelastic.observe.metrics import RunMetrics
from aelastic.observe.prometheus import Family, Histogram

PAGE = "docs/reference/metrics.md"
HEAD = """\
<!-- Generated from what the code declares by `make docs`: change aelastic/observe/metrics.py, not this page. -->

# Metrics

The metrics that an agent serves at `GET /metrics` ([how to switch it on](http.md)) and writes with
`--metrics-textfile`: in Prometheus' format, or as OpenMetrics if `Accept` requests it. They describe this agent only,
not other metrics of its process. Series whose labels have fixed values exist from the start, with the value 0; the
series of `aelastic_run_info` never changes. For queries, rules and a dashboard, see
[alerts and a dashboard](../how-to/prometheus.md)."""
UNITS = (("_start_time_seconds", "s since 1970"), ("_per_second", "1/s"), ("_seconds", "s"), ("_bytes", "B"))
BUCKETS = "Upper bounds of the histograms' buckets:"


def pages() -> dict[str, str]:
    """The page, by its path below the root of the repository."""
    metrics = RunMetrics({"version": "", "python": ""})
    request_counters(metrics.registry)
    families = metrics.registry.families
    rows = [_row(family) for family in families]
    every = table(("metric", "type", "unit", "labels", "meaning"), rows)
    bounds = [
        (code(each.name), ", ".join(f"{bound:g}" for bound in each.buckets))
        for each in families
        if isinstance(each, Histogram)
    ]
    buckets = f"{BUCKETS}\n\n{table(('histogram', 'upper bounds in s, besides infinity'), bounds)}"
    return {PAGE: lines(HEAD, every, buckets)}


def _row(family: Family) -> tuple[str, ...]:
    name = family.name.removesuffix("_total")
    unit = next((unit for ending, unit in UNITS if name.endswith(ending)), "")
    return code(family.name), family.kind, unit, "; ".join(_labels(family)), family.text


def _labels(family: Family) -> Iterator[str]:
    """Each label, with its values where they are words from a fixed list."""
    for place, label in enumerate(family.labels):
        values = dict.fromkeys(series[place] for series in family.series if series[place])
        yield code(label) + (": " + ", ".join(map(code, values)) if values else "")
