"""Progress of workers: steps found in their output, the pace, and how it is shown."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import decided
from kit.arguments import complaint, invoke
from kit.metrics_text import values

from aelastic import InputError, LaunchConfig, WorkerSpec
from aelastic.agent.watches.progress import WINDOW_S, Pace
from aelastic.compat.launcher.launch_config import worker_spec
from aelastic.logs.expected_output import LINE_BYTES_MAX, ProgressMatcher
from aelastic.observe import run_events as ev
from aelastic.observe.export.trainer import described, status_server
from aelastic.observe.metrics import RunMetrics
from aelastic.observe.run_state import RunState
from aelastic.observe.status import describe
from aelastic.observe.status_text import StatusText
from aelastic.workers.states import WorkerState

PATTERN = r"step (\d+)/(\d+)"
AT = ev.Progressed(1, 0, 4, 250, 1000, 2.5, 300.0)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


# Matching.


@given(st.lists(st.integers(1, 900), min_size=1, max_size=9), st.sampled_from(["\n", "\r", "\r\n"]), st.integers(1, 40))
def test_the_newest_step_is_found_however_the_output_comes(steps: list[int], ending: str, size: int) -> None:
    matcher = ProgressMatcher(PATTERN)
    output = "".join(f"loss=1 step {step}/900{ending}no such thing{ending}" for step in steps).encode()
    for begin in range(0, len(output), size):
        matcher.feed(output[begin : begin + size])
    assert matcher.step == (steps[-1], 900)


@pytest.mark.parametrize(
    "pattern, line, found",
    [
        (PATTERN, b"step 7/90", (7, 90)),
        (r"it (\S+)(?: of (\d+))?", b"it 7", (7, None)),
        (r"it (\S+)(?: of (\d+))?", b"it 7 of 0", (7, None)),
        (r"it (\S+)", b"it 1,234", (1234, None)),
        (r"it (\S+)", b"it many", None),
        (r"it (\S+)", b"it " + b"9" * 5000, None),
        (r"\| (\d+)/(\d+) \[", b"\r 10%|#    | 10/100 [00:01<00:09]\r 11%|#    | 11/100 [00:01<00:08]\r", (11, 100)),
    ],
)
def test_steps_are_numbers_with_or_without_a_last_one(pattern: str, line: bytes, found: object) -> None:
    matcher = ProgressMatcher(pattern)
    matcher.feed(line + b"\n")
    assert matcher.step == found


def test_a_number_that_may_not_be_whole_counts_once_something_follows_it() -> None:
    matcher = ProgressMatcher(r"step (\d+)")
    matcher.feed(b"step 1249\nstep 12")
    assert [matcher.step for _ in range(3)] == [(1249, None)] * 3, "however often it is read"
    matcher.feed(b"50")
    assert matcher.step == (1249, None)
    matcher.feed(b" loss")
    assert matcher.step == (1250, None) and not matcher.begins_again


@pytest.mark.parametrize(
    "line, found",
    [
        (b"step 12", None),
        (b"step 12/9", None),
        (b"step 12/900", None),
        (b"step 12/900 ", (12, 900)),
        (b"\r 10%|#    | step 10/100 [00:01<00:09", (10, 100)),
    ],
)
def test_a_line_that_is_not_complete_counts_where_its_numbers_are(line: bytes, found: object) -> None:
    matcher = ProgressMatcher(PATTERN)
    matcher.feed(line)
    assert matcher.step == found


def test_the_last_line_of_a_worker_that_has_ended_counts_whole() -> None:
    matcher = ProgressMatcher(r"step (\d+)")
    matcher.feed(b"step 45\rstep 46")
    assert [matcher.step, matcher.last_step] == [(45, None), (46, None)]
    matcher.feed(b" saving\nall is well")
    assert matcher.step == matcher.last_step == (46, None)


def test_the_last_line_of_a_worker_that_has_ended_is_cut_off_if_it_goes_back() -> None:
    matcher = ProgressMatcher(r"step (\d+)")
    matcher.feed(b"step 1249\nstep 12")
    assert matcher.step == matcher.last_step == (1249, None)


def test_of_a_line_without_end_no_more_than_a_piece_is_kept() -> None:
    matcher = ProgressMatcher(PATTERN)
    matcher.feed(b"step 3/4 ")
    for _ in range(9):
        matcher.feed(b"x" * 10_000)
        assert len(matcher._tail) <= LINE_BYTES_MAX
    assert matcher.step == (3, 4)


# Pace.


def test_the_pace_is_that_of_the_last_minute_and_begins_again_with_an_epoch() -> None:
    pace = Pace()
    assert pace.saw(0, 0.0) is None
    assert pace.saw(10, 10.0) == 1
    assert pace.saw(10, 15.0) == 1  # nothing new
    for second in range(11, 200):
        rate = pace.saw(10 + 3 * second, float(second))
    assert rate == pytest.approx(3)
    assert len(pace._seen) <= WINDOW_S + 2
    assert pace.saw(0, 201.0) is None


def test_steps_that_take_longer_than_the_window_have_a_pace() -> None:
    pace = Pace()
    assert [pace.saw(step, 300.0 * step) for step in range(4)] == [None] + [pytest.approx(1 / 300)] * 3


def test_the_median_step_is_known_from_the_second_on_and_forgets_pauses() -> None:
    pace = Pace()
    pace.saw(10, 0.0)
    assert pace.step_s() is None
    now = 0.0
    for step in range(12, 60, 2):
        now += 600.0 if step == 30 else 4.0  # a step that saves or evaluates
        pace.saw(step, now)
        assert pace.step_s() == pytest.approx(2.0)
    pace.saw(0, now + 900)  # the next epoch
    assert pace.step_s() == pytest.approx(2.0)


# Display.


@pytest.mark.parametrize(
    "event, expected",
    [
        (AT, "step 250 of 1000, 25%, 2.5/s, 5 min 0 s left"),
        (AT.replace(steps_per_s=None, remaining_s=None), "step 250 of 1000, 25%"),
        (AT.replace(total=None, remaining_s=None), "step 250, 2.5/s"),
    ],
)
def test_the_status_line_shows_how_far_it_is_until_workers_start_again(event: ev.Progressed, expected: str) -> None:
    state = RunState()
    text = StatusText(state)
    state.tell(event, 1.0)
    assert text.line(1.0, 200) == f"aelastic | starting | {expected}"
    state.tell(ev.RoundFormed(1, 1, 0, 0, 1, 0, 1, 1), 2.0)
    assert "step" not in text.line(2.0, 200)


def test_an_end_has_the_last_step_of_its_generation_and_no_step_of_another() -> None:
    state = RunState()
    state.tell(ev.RoundFormed(1, 1, 0, 0, 1, 0, 1, 1), 1.0)
    state.tell(AT, 2.0)
    state.tell(ev.Restarting("failure", decided.restart(1, 3, decided.failed(0, "n0")), 1), 3.0)
    assert [end.step for end in state.ends] == [250]
    state.tell(ev.RoundFormed(2, 2, 1, 0, 1, 0, 1, 1), 4.0)
    state.tell(AT.replace(step=264, is_last=True), 4.0)  # written while it was being stopped
    assert [end.step for end in state.ends] == [264] and state.progress is None
    state.tell(ev.RunEnded(WorkerState.FAILED, "rank 0 failed on n0"), 5.0)
    assert [end.step for end in state.ends] == [264, None]


def test_the_status_and_the_metrics_have_it() -> None:
    state, metrics = RunState(), RunMetrics({})
    assert math.isnan(values(metrics.expose(state))["aelastic_progress_remaining_seconds"])
    state.tell(AT, 5.0)
    assert describe(state, 6.0, NOON, {})["progress"] == {
        "rank": 4, "step": 250, "total": 1000, "steps_per_s": 2.5, "remaining_s": 300.0, "percent": 25,
        "at": "2026-01-01T11:59:59.000+00:00",
    }  # fmt: skip
    found = values(metrics.expose(state))
    names = ("step", "steps", "steps_per_second", "remaining_seconds")
    assert [found[f"aelastic_progress_{name}"] for name in names] == [250, 1000, 2.5, 300]


@pytest.mark.parametrize(
    "event, state, percent, left",
    [
        (AT, None, 25, 300),
        (AT, WorkerState.SUCCEEDED, 100, 0),
        (AT.replace(step=1200, remaining_s=1e300), WorkerState.FAILED, 100, (1 << 31) - 1),
        (AT.replace(total=None, remaining_s=None), None, None, None),
    ],
)
def test_the_trainer_gets_what_its_schema_takes(
    event: ev.Progressed, state: WorkerState | None, percent: int | None, left: int | None
) -> None:
    status = described(event, state, NOON)
    assert (status.get("progressPercentage"), status.get("estimatedRemainingSeconds")) == (percent, left)
    assert {"name": "step", "value": str(event.step)} in status["metrics"]
    assert status["lastUpdatedTime"] == "2026-01-01T12:00:00Z"


URL, CA, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))


@pytest.mark.parametrize(
    "env, expected",
    [
        ({URL: "https://a/b", CA: "/ca"}, f"{URL} is set, but {TOKEN} is not"),
        ({URL: "https://a/b", TOKEN: "/t", CA: ""}, f"{URL} is set, but {CA} is not"),
        ({URL: "http://a/b", CA: "/ca", TOKEN: "/t"}, f"{URL}=http://a/b is not an https URL"),
    ],
)
def test_a_status_server_that_cannot_be_used_is_reported(
    caplog: pytest.LogCaptureFixture, env: dict[str, str], expected: str
) -> None:
    assert status_server(env) is None
    assert expected in caplog.text


def test_without_a_status_server_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert status_server({}) is None and not caplog.text


# Options.


def test_an_option_a_variable_a_field_and_a_config_ask_for_it(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert invoke("--progress", PATTERN, str(script)).spec.progress == PATTERN
    assert invoke(str(script), PET_PROGRESS=PATTERN).spec.progress == PATTERN
    plain = invoke(str(script)).spec
    assert plain.progress is None and not plain.watches_output
    config = LaunchConfig(1, 1, 1, rdzv_backend="c10d", progress=PATTERN)
    spec = worker_spec(config, "true", [], {"PATH": "/bin:/usr/bin"})
    assert spec.progress == PATTERN and spec.watches_output


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("", "the pattern is empty"),
        ("step", "the pattern 'step' has no group: put the step's digits in ( )"),
        ("(", "the pattern '(' is not a regular expression"),
    ],
)
def test_a_pattern_without_a_step_is_refused(tmp_path: Any, pattern: str, expected: str) -> None:
    script = tmp_path / "train.py"
    script.touch()
    text = complaint(f"--progress={pattern}", str(script))
    assert expected in text and "\n" not in text
    with pytest.raises(InputError, match=re.escape(expected)):
        WorkerSpec(entrypoint="true", progress=pattern)
