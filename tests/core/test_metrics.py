"""Metrics of a run: what they count, and that Prometheus can parse them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import decided
from kit.metrics_text import values
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from aelastic.errors import ProcessFailure
from aelastic.observe import run_events as ev
from aelastic.observe.metrics import RunMetrics
from aelastic.observe.prometheus import Registry
from aelastic.observe.run_state import RunState
from aelastic.workers.states import Phase, WorkerState

BEGAN = ev.RunBegan("job 7", "node-1", "host-1", 4711, "trainer", "train.py", 2, 1, 2, 3, "c10d")
ROUND = ev.RoundFormed(
    round=1, generation=1, restart_count=0, group_rank=0, group_world_size=2, first_rank=0, local_world_size=2, world_size=4
)  # fmt: skip
STARTED = ev.WorkersStarted(1, {0: 10, 1: 11})


def spawning() -> ev.Changed:
    return ev.Changed(Phase.JOINING, Phase.SPAWNING, WorkerState.HEALTHY, "")


class Observed:
    """The state and the metrics of a run."""

    def __init__(self) -> None:
        self.state, self.metrics = RunState(), RunMetrics({"version": "0", "python": "3"})

    def tell(self, event: Any, now: float) -> None:
        self.state.tell(event, now)
        self.metrics.tell(event, now)

    def expose(self, **others: Any) -> str:
        return self.metrics.expose(self.state, **others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.metrics, name)


def exposed(run: Observed, **others: Any) -> dict[str, float]:
    return values(run.expose(**others))


def observed(*events: Any) -> Observed:
    """The metrics of a run with these events, one second apart."""
    run = Observed()
    for now, event in enumerate(events):
        run.tell(event, float(now))
    return run


# The text.


@given(st.text(), st.floats())
def test_whatever_a_label_holds_is_read_back(label: str, number: float) -> None:
    registry = Registry()
    registry.gauge("g", "line\nbreak \\ slash", "label").set(number, label)
    text = registry.expose()
    assert len(text.splitlines()) == 3 or not label.isprintable()
    (family,) = text_string_to_metric_families(text)
    (sample,) = family.samples
    assert sample.labels["label"] == label.encode(errors="replace").decode()
    assert sample.value == number or (sample.value != sample.value and number != number)  # noqa: PLR0124  NaN


@given(st.lists(st.floats(min_value=0, max_value=100)))
def test_a_histogram_counts_each_value_in_every_bucket_that_is_large_enough(observed: list[float]) -> None:
    registry = Registry()
    histogram = registry.histogram("h", "", "way", buckets=(0.1, 1, 10))
    histogram.declare("in")
    for value in observed:
        histogram.observe(value, "in")
    read = values(registry.expose())
    for bound in ("0.1", "1", "10", "+Inf"):
        assert read[f'h_bucket{{way="in",le="{bound}"}}'] == sum(value <= float(bound) for value in observed)
    assert read['h_count{way="in"}'] == len(observed)
    assert read['h_sum{way="in"}'] == pytest.approx(sum(observed))


def test_a_family_is_there_once_and_takes_its_labels_only() -> None:
    registry = Registry()
    counter = registry.counter("c", "", "cause")
    with pytest.raises(ValueError, match="there already"):
        registry.gauge("c", "")
    with pytest.raises(ValueError, match="has the labels"):
        counter.inc()


def test_two_registries_share_nothing() -> None:
    first, second = observed(BEGAN, ROUND), observed(BEGAN)
    assert exposed(first)["aelastic_rounds_total"] == 1
    assert exposed(second)["aelastic_rounds_total"] == 0


def test_prometheus_own_parser_reads_all_of_it_with_its_types() -> None:
    metrics = observed(BEGAN.replace(role='a "role"'), ROUND, STARTED)
    metrics.lag(0.02)
    text = metrics.expose(agent=(1.5, 2048), workers={0: (0.25, 4096)})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    ours = {family.name.removesuffix("_total"): family.kind for family in metrics.registry.families}
    assert {name: family.type for name, family in families.items()} == ours
    assert families["aelastic_worker_cpu_seconds"].samples[0].labels == {"local_rank": "0", "role": 'a "role"'}
    assert all(family.documentation for family in families.values())


def test_no_gauge_has_a_name_that_prometheus_reserves_for_counters_and_histograms() -> None:
    metrics = observed(BEGAN)
    gauges = {family.name for family in metrics.registry.families if family.kind == "gauge"}
    assert "aelastic_used_restarts" in gauges
    assert not [name for name in gauges if name.endswith(("_total", "_count", "_sum", "_bucket"))]


# What is counted.


def test_everything_is_there_before_anything_happens() -> None:
    read = exposed(observed())
    assert read['aelastic_restarts_total{cause="failure"}'] == 0
    assert read['aelastic_restarts_total{cause="membership"}'] == 0
    assert read["aelastic_watchdog_expiries_total"] == 0
    assert {f'aelastic_phase_duration_seconds_count{{phase="{name}"}}' for name in ev.PHASES} <= read.keys()
    assert sum(read[name] for name in read if name.startswith("aelastic_state{")) == 1


TOOK = 'worker_start_seconds_{}{{kind="{}",phase="{}"}}'
BEGUN = {
    ("cold", "spawned"): 1,
    ("warm", "spawned"): 1,
    ("warm", "imported"): 1,
    ("warm", "output"): 1.5,
    ("cold", "process_group"): 4,
}
LOST = ev.RunEnded(WorkerState.STOPPED, "no leader for 600 s", traceback="Traceback: ...")
STOPPING = ev.Changed(Phase.SPAWNING, Phase.CANCELLING, WorkerState.STOPPED, "")
SAME_PHASE = ev.Changed(Phase.SPAWNING, Phase.SPAWNING, WorkerState.HEALTHY, "the state changed")
COUNTED: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, float]]] = {  # events, what is given, series
    "the parts of a start, by worker, warm or cold": (
        (spawning(), ROUND, ev.WorkersStarted(1, {0: 10, 1: 11}, frozenset({1})),
         ev.WorkerReached(1, 1, 1, "warm", "output", 1.5), ev.WorkerReached(1, 0, 0, "cold", "process_group", 4.0),
         ev.ForkServerMeasured(2, 1 << 27)), {},
        {**{TOOK.format("sum", *of): seconds for of, seconds in BEGUN.items()},
         **{TOOK.format("count", *of): 1 for of in BEGUN},
         TOOK.format("count", "cold", "output"): 0, TOOK.format("count", "warm", "process_group"): 0,
         "parked_processes": 2, "fork_server_pss_bytes": 1 << 27},
    ),
    "restarts by their cause": (
        (ev.Restarting("failure", decided.restart(), 1), ev.Restarting("membership", decided.joined("n2"), 1),
         ev.Restarting("failure", decided.restart(2), 2)), {},
        {'restarts_total{cause="failure"}': 2, 'restarts_total{cause="membership"}': 1, "used_restarts": 2, "max_restarts": 3},
    ),
    "sizes of a round": (
        (ROUND,), {},
        {"world_size": 4, "group_world_size": 2, "local_world_size": 2, "round": 1, "rounds_total": 1},
    ),
    "phases by their names": (
        (ev.PhaseTook("stop", 0.02), ev.PhaseTook("stop", 20.0), ev.PhaseTook("detect", 0.002, 1)), {},
        {'phase_duration_seconds_sum{phase="stop"}': 20.02, 'phase_duration_seconds_bucket{phase="stop",le="0.05"}': 1,
         'phase_duration_seconds_count{phase="detect"}': 1},
    ),
    "a restart, from the first worker's end until all run again": (
        (ROUND, spawning(), STARTED,  # at 3
         ev.PhaseTook("detect", 0.5, 0),  # at 4: it ended at 3.5
         ev.PhaseTook("run", 1.0),  # at 5
         ev.PhaseTook("detect", 0.1, 1), ev.PhaseTook("stop", 2.0), ROUND, spawning(), STARTED), {},  # at 10
        {"restart_duration_seconds_count": 1, "restart_duration_seconds_sum": 6.5},
    ),
    "time in the exit barrier is no part of a restart": (
        (ROUND, spawning(), STARTED, ev.PhaseTook("run", 1.0), ev.PhaseTook("barrier", 1.0), ROUND, spawning(), STARTED), {},
        {"restart_duration_seconds_sum": 3},
    ),
    "workers that start while they are stopped end no restart": (
        (ROUND, spawning(), STARTED, ev.PhaseTook("run", 1.0), ROUND, spawning(), STOPPING, STARTED), {},
        {"restart_duration_seconds_count": 0},
    ),
    "a recovery in place is no restart of processes, and a restart after it begins with its own failure": (
        (ROUND, spawning(), STARTED, ev.PhaseTook("detect", 0.5, 0), ev.PhaseTook("run", 1.0),
         ev.Restarting("failure", decided.restart(), 1, in_place=True), ROUND.replace(round=2, in_place=True), STARTED,
         ev.Recovered(2, 1, 3, 1, 1234, 0, 0.06), ev.NotRecovered(1, "no state"),
         ev.PhaseTook("run", 3.0), ev.PhaseTook("stop", 1.0), ROUND.replace(round=3), spawning(), STARTED), {},  # 11 to 15
        {'restarts_total{cause="failure"}': 1, "restart_duration_seconds_count": 1, "restart_duration_seconds_sum": 4,
         'recoveries_total{outcome="recovered"}': 1, 'recoveries_total{outcome="restarted"}': 1,
         'recovered_workers_total{outcome="kept"}': 3, 'recovered_workers_total{outcome="replaced"}': 1,
         "recovery_duration_seconds_count": 1, "recovery_duration_seconds_sum": 0.06},
    ),
    "ends and notices": (
        (ev.WorkerEnded(1, 0, 0, "succeeded"), ev.WorkerEnded(1, 1, 1, "stopped"),
         ev.Noticed(1, 0, 0, "timer", "timer 'step' expired", is_stopped=True),
         ev.Noticed(1, 1, 1, "hang", "no sign of life", is_stopped=False),
         ev.Compared(1, "hang: cannot tell which rank the others wait for", ()),
         ev.StacksTaken(1, "asked", {0: "py-spy"}, "/x")), {},
        {'hangs_compared_total{outcome="named"}': 0, 'hangs_compared_total{outcome="not_named"}': 1,
         'worker_exits_total{outcome="succeeded"}': 1, 'worker_exits_total{outcome="stopped"}': 1,
         'worker_exits_total{outcome="failed"}': 0, "watchdog_expiries_total": 1, 'noticed_total{by="hang"}': 1,
         "stacks_taken_total": 1},
    ),
    "a run that was asked to stop": (
        (ev.RunEnded(WorkerState.STOPPED, "asked to stop"),), {}, {'run_ended{run_id="job 7",state="STOPPED"}': 1},
    ),
    "a run that ends with an error was not": ((LOST,), {}, {'run_ended{run_id="job 7",state="UNKNOWN"}': 1}),
    "missing nodes before a round": ((), {}, {"nodes_missing": 1, "leads": 0}),
    "missing nodes, the coordinator and silent workers": (
        (BEGAN.replace(max_nodes=5), ROUND), {"coordinates": True, "silence": (600.0, {1: 320.5})},
        {"nodes_missing": 3, "leads": 1, 'worker_silence_seconds{local_rank="1"}': 320.5,
         "worker_silence_max_seconds": 600},
    ),
    "the start of the phase is a time of day": (
        (spawning(), SAME_PHASE), {"now": 7.0, "epoch": 1e9}, {"phase_start_time_seconds": 1e9 + 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("events, given, series", COUNTED.values(), ids=COUNTED)
def test_what_is_counted(events: tuple[Any, ...], given: dict[str, Any], series: dict[str, float]) -> None:
    read = exposed(observed(BEGAN, *events), **given)
    assert {name: read[f"aelastic_{name}"] for name in series} == pytest.approx(series)


def test_only_workers_that_live_are_exposed() -> None:
    metrics = observed(BEGAN)
    rss = 'aelastic_worker_resident_memory_bytes{{local_rank="{}",role="trainer"}}'
    assert exposed(metrics, workers={0: (1, 100), 1: (1, 200)})[rss.format(1)] == 200
    read = exposed(metrics, workers={0: (2, 150)}, agent=(0.5, 1000))
    assert read[rss.format(0)] == 150 and rss.format(1) not in read
    assert (read["aelastic_agent_cpu_seconds_total"], read["aelastic_agent_resident_memory_bytes"]) == (0.5, 1000)


def test_what_the_kernel_says_of_a_worker_that_does_not_run_on_is_one_of_its_states() -> None:
    name = 'aelastic_worker_kernel_state{{local_rank="{}",role="trainer",state="{}"}}'
    read = exposed(observed(BEGAN), workers={0: (1, 100), 1: (1, 200)}, kernel={1: "stopped", 2: "zombie"})
    held = {key for key in read if key.startswith("aelastic_worker_kernel_state") and read[key]}
    assert held == {name.format(1, "stopped"), name.format(2, "zombie")}
    assert read[name.format(0, "stopped")] == read[name.format(1, "traced")] == 0


def test_one_state_and_one_phase_hold_at_a_time() -> None:
    read = exposed(observed(BEGAN, spawning()))
    chosen = {name for name in read if name.startswith(("aelastic_state{", "aelastic_phase{")) and read[name]}
    assert chosen == {'aelastic_state{state="HEALTHY"}', 'aelastic_phase{phase="spawning"}'}
    assert read["aelastic_ready"] == 0
    running = ev.Changed(Phase.SPAWNING, Phase.RUNNING, WorkerState.HEALTHY, "")
    assert exposed(observed(BEGAN, ROUND, running))["aelastic_ready"] == 1


def test_the_end_of_a_run_is_a_series_of_its_own_and_its_state() -> None:
    metrics = observed(BEGAN, spawning())
    assert not any(name.startswith("aelastic_run_ended") for name in exposed(metrics))
    metrics.tell(ev.RunEnded(WorkerState.FAILED, "rank 0 failed"), 3.0)
    read = exposed(metrics)
    assert read['aelastic_run_ended{run_id="job 7",state="FAILED"}'] == 1
    assert read['aelastic_state{state="FAILED"}'] == read['aelastic_phase{phase="done"}'] == 1
    assert read['aelastic_state{state="HEALTHY"}'] == 0


def test_labels_that_all_series_share_are_added_to_each_that_has_not_its_own() -> None:
    metrics = observed(BEGAN, spawning())
    names = [re.sub(r"\{|,?le=.*", "", name) for name in exposed(metrics)]
    read = exposed(metrics, common={"run_id": "other", "textfile": "a.prom"})
    assert len(read) == len(names)
    for name in read:
        assert name.count("run_id=") == name.count('textfile="a.prom"') == 1
        assert ('run_id="job 7"' if name.startswith("aelastic_run_info") else 'run_id="other"') in name
    text = metrics.expose(common={"x": "y"})
    assert all(
        sample.labels["x"] == "y" for family in text_string_to_metric_families(text) for sample in family.samples
    )


# Where the time goes.


FAILED = ev.WorkerEnded(1, 0, 0, "failed", ProcessFailure(0, 10, 1, ""))
BARRIER = ev.Changed(Phase.RUNNING, Phase.BARRIER, WorkerState.SUCCEEDED, "")
ENDED = ev.RunEnded(WorkerState.SUCCEEDED, "")


PROGRESSED = [ev.Progressed(1, 0, 0, step) for step in range(9)]


def spent(*events: Any, at: float) -> dict[str, float]:
    read = exposed(observed(*events), now=at)
    return {name.split('"')[1]: s for name, s in read.items() if name.startswith("aelastic_time_seconds") and s}


@pytest.mark.parametrize(
    "events, at, expected",
    [
        ((BEGAN,), 5.0, {"starting": 5}),
        ((BEGAN, spawning(), STARTED), 9.0, {"starting": 2, "trained": 7}),
        ((BEGAN, spawning(), STARTED, FAILED), 9.0, {"starting": 2 + 6, "trained": 1}),
        (
            (BEGAN, spawning(), STARTED, ev.Restarting("membership", decided.joined("n2"), 0), STARTED),
            9.0,
            {"starting": 2 + 1, "trained": 1 + 5},
        ),
        # Two of the last second's four steps are repeats.
        (
            (
                BEGAN, spawning(), STARTED, PROGRESSED[1], PROGRESSED[5], FAILED, ev.Restarting("failure", decided.restart(), 1),
                ROUND.replace(round=2), STARTED, PROGRESSED[3], PROGRESSED[7],
            ),
            10.0,
            {"starting": 3 + 4, "trained": 2 + 0.5, "twice": 0.5},
        ),
        ((BEGAN, spawning(), STARTED, ev.Announced("saving", "n1 leaves", 8)), 9.0, {"starting": 2, "trained": 1, "drained": 6}),
        (
            (BEGAN, spawning(), STARTED, ev.Announced("saving", "restart", 8, verb="restart"), ev.Restarting("membership", decided.joined("n2"), 0)),
            9.0,
            {"starting": 2 + 5, "trained": 1 + 1},
        ),
        ((BEGAN, ev.Waited("1 of 2 nodes")), 9.0, {"waiting": 9}),
        ((BEGAN, spawning(), STARTED, BARRIER, ENDED), 99.0, {"starting": 2, "trained": 2}),
    ],
)  # fmt: skip
def test_the_activities_add_up_to_the_whole_run(events: Any, at: float, expected: dict[str, float]) -> None:
    assert spent(*events, at=at) == expected


def test_what_was_exposed_never_shrinks() -> None:
    metrics = observed(BEGAN, spawning(), STARTED)
    assert exposed(metrics, now=8.0)['aelastic_time_seconds_total{spent="trained"}'] == 6
    metrics.tell(ev.Noticed(1, 0, 0, "hang", "no output for 4 s", is_stopped=False, silent_s=4.0), 8.0)
    read = exposed(metrics, now=9.0)
    assert [read[f'aelastic_time_seconds_total{{spent="{what}"}}'] for what in ("trained", "hung")] == [6, 5]


@pytest.mark.parametrize(
    "kind, events",
    [
        ("exception", [ProcessFailure(0, 10, 1, "", stderr_tail="Traceback (most recent call last):\n  File 'x', line 1\nE: x\n")]),
        ("exit", [ProcessFailure(0, 10, 3, "")]),
        ("signal", [ProcessFailure(0, 10, -9, "")]),
        ("oom", [ProcessFailure(0, 10, -9, "", oom="killed by the kernel")]),
        ("start", [ProcessFailure(0, -1, 1, "", note="could not be started: no such file")]),
        ("hang", [ev.Noticed(1, 0, 0, "hang", "silent", is_stopped=True), ProcessFailure(0, 10, -15, "", found_by="hang")]),
        ("signal", [ev.Noticed(1, 0, 0, "hang", "silent", is_stopped=False), ProcessFailure(0, 10, -15, "")]),
    ],
)  # fmt: skip
def test_failures_are_counted_by_how_the_worker_failed(kind: str, events: list[Any]) -> None:
    *before, failure = events
    read = exposed(observed(BEGAN, *before, ev.WorkerEnded(1, 0, 0, "failed", failure)))
    counted = {name: value for name, value in read.items() if name.startswith("aelastic_failures_total") and value}
    assert counted == {f'aelastic_failures_total{{kind="{kind}"}}': 1}


def test_a_reader_of_openmetrics_gets_the_same_numbers() -> None:
    metrics = observed(BEGAN, ROUND, spawning(), STARTED)
    asked: dict[str, Any] = {"agent": (1.5, 2048), "workers": {}, "now": 9.0}
    plain, is_open = metrics.expose(**asked), metrics.expose(**asked, is_open=True)
    assert is_open.endswith("\n# EOF\n")

    def read(families: Any) -> dict[Any, float]:
        samples = [each for family in families for each in family.samples]
        return {(each.name, tuple(sorted(each.labels.items()))): each.value for each in samples}

    families = openmetrics.text_string_to_metric_families(is_open)  # type: ignore[no-untyped-call]
    assert read(families) == pytest.approx(read(text_string_to_metric_families(plain)), nan_ok=True)
