"""Hang detection options and variables, and the values that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.arguments import complaint, invoke

from aelastic import ExpectedOutput
from aelastic.agent.group.worker_env import STUCK_VARIABLE
from aelastic.agent.watches.activity import stuck_timeout_of
from aelastic.diagnose.hangs.options import HANG_SIGNALS


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('started')\n")
    return str(path)


def test_options_and_variables_reach_the_spec(script: str) -> None:
    spec = invoke(
        "--hang-timeout=1.5", "--hang-signals=io, output", "--hang-action=report", "--expect-output", r"a:\d+:12",
        "--expect-output-ranks=0,3", script,
    ).spec  # fmt: skip
    assert (spec.hang_timeout_s, spec.hang_signals, spec.hang_action) == (1.5, ("output", "io"), "report")
    assert spec.expect_output == ExpectedOutput(r"a:\d+", 12.0, frozenset({0, 3}))
    assert invoke(script, AELASTIC_HANG_TIMEOUT="300").spec.hang_timeout_s == 300
    assert invoke(script, AELASTIC_EXPECT_OUTPUT="x:1").spec.expect_output == ExpectedOutput("x", 1.0)
    plain = invoke(script).spec
    assert (plain.hang_timeout_s, plain.hang_signals, plain.hang_action) == (None, HANG_SIGNALS, "stop")
    assert plain.expect_output is None and not plain.watches_output


@pytest.mark.parametrize(
    "option, expected",
    [
        ("--hang-timeout=0", "--hang-timeout 0: use 1 second or more"),
        ("--hang-timeout=nan", "--hang-timeout nan: use 1 second or more"),
        ("--hang-timeout=soon", "--hang-timeout soon: use a number of seconds"),
        ("--hang-signals=output,gpu", "--hang-signals output,gpu: use one or more of output, cpu, io"),
        ("--hang-signals=", "use one or more of output, cpu, io"),
        ("--hang-action=kill", "--hang-action kill: use one of stop, report"),
        ("--expect-output=loss=", "the seconds are missing: use REGEX:SECONDS"),
        ("--expect-output=loss=:", "the seconds are missing"),
        ("--expect-output=:5", "the pattern is empty"),
        ("--expect-output=a:0", "use 1 second or more"),
        ("--expect-output=a:b", "use a number"),
        ("--expect-output=(:5", "the pattern '(' is not a regular expression (missing )"),
        ("--expect-output-ranks=0", "--expect-output-ranks 0: no effect without --expect-output"),
        ("--hang-action=report", "--hang-action report: no effect without hang detection: add --hang-timeout"),
        ("--hang-signals=cpu", "--hang-signals cpu: no effect without hang detection: add --hang-timeout"),
        ("--expect-output-ranks=x", "use ranks separated by commas"),
    ],
)
def test_what_cannot_be_is_refused(script: str, option: str, expected: str) -> None:
    assert expected in complaint(option, script)


@pytest.mark.parametrize(
    "text, timeout_s", [("", None), ("0", None), ("-5", None), ("inf", None), ("2.5", 2.5), (" 30 ", 30.0)]
)
def test_the_variable_of_torchs_agent_means_what_it_does_there(text: str, timeout_s: float | None) -> None:
    assert stuck_timeout_of({STUCK_VARIABLE: text}) == timeout_s
