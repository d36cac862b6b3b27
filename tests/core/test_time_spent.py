"""Where a job's time went: checked against a job whose times are known, with sums that add up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.effort import SPENT_JOBS
from kit.stories.spent_logs import Job
from kit.stories.timelines import logs_of

from aelastic.observe.time_spent import GAP_S, ON, STARTS, TimeSpent
from aelastic.tools.spent.report import in_tenths, notes_of, report_of
from aelastic.tools.timeline.reader import in_order, read_logs


@pytest.mark.parametrize("first", range(0, SPENT_JOBS, 20))
def test_each_share_is_what_it_was(first: int) -> None:
    for seed in range(first, first + 20):
        job = Job(seed)
        logs, spent = logs_of(*job.logs), TimeSpent(GAP_S)
        report = report_of(logs, (2.0, "gpu-"), None)
        for at, entry in in_order(logs):
            spent.handle(entry.kind, entry.fields.get, at)
        whole = sum(job.truth.values())
        assert report.length_s == pytest.approx(whole, abs=0.01)
        wrong = {name: report.seconds[name] / whole * 100 - job.truth[name] / whole * 100 for name in ON}
        assert all(abs(points) < 0.2 for points in wrong.values()), (seed, wrong)
        assert round(sum(report.shares.values()), 6) == 100.0
        parts = sum(spent.seconds[name] for name in STARTS)
        assert parts == pytest.approx(report.seconds["starting"], rel=0.01), "the parts of starting add up to it"
        assert report.cost == pytest.approx(whole / 3600 * 2 * 2 * job.count, rel=0.1)


@pytest.mark.parametrize("seed", range(SPENT_JOBS // 10))
def test_a_log_that_is_cut_anywhere_adds_up(seed: int) -> None:
    job, rng = Job(seed), random.Random(seed)
    data = [b"".join(node.lines) for node in job.logs]
    for _ in range(20):
        cut = [each[: rng.randrange(len(each))] for each in data]
        logs = [log for each in cut for log in read_logs("x", each.splitlines(keepends=True)) if log.entries]
        if logs:
            report = report_of(logs, None, None)
            assert round(sum(report.shares.values()), 6) == 100.0
            assert all(each >= -1e-6 for each in report.seconds.values())


def test_starts_in_place_are_reported_among_the_starts() -> None:
    spent = TimeSpent()
    for at, (number, in_place) in enumerate([(1, False), (2, True), (3, False)]):
        fields = {"round": number, "world_size": 4, "in_place": in_place}
        spent.handle("round_formed", fields.get, float(at))
    assert notes_of(spent)["starting"].startswith("3 starts, 1 in place: ")


@given(st.dictionaries(st.sampled_from(ON), st.floats(0, 1e9), min_size=len(ON)))
def test_percents_add_up(parts: dict[str, float]) -> None:
    found = in_tenths(parts)
    assert round(sum(found.values()), 6) == 100.0
    whole = sum(parts.values())
    assert not whole or all(abs(found[name] - parts[name] / whole * 100) <= 0.1 + 1e-6 for name in parts)
