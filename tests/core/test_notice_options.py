"""Interruption notices: the options, and the lines in notice files and from notice commands."""

from __future__ import annotations

import pytest
from kit.arguments import complaint

from aelastic.agent.requests.notice_sources import notice_of
from aelastic.agent.resources import DrainRequest


@pytest.mark.parametrize(
    "line, asked",
    [
        ("drain 110 spot", DrainRequest(110.0, "spot")),
        ("drain 30", DrainRequest(30.0)),
        ("45.5 s maintenance  of\tthe host\n", DrainRequest(45.5, "maintenance of the host")),
        ("90", DrainRequest(90.0)),
        ("cancel\n", DrainRequest(None)),
        ("drain soon", None),
        ("drain -5", None),
        ("", None),
        ("drained 5", None),
        ("drain 99999999", None),
    ],
)
def test_what_a_line_says(line: str, asked: DrainRequest | None) -> None:
    assert notice_of(line) == asked


BAD = {
    ("--on-signal", "USR1"): "--on-signal USR1: use SIGNAL=drain:SECONDS or SIGNAL=pass",
    ("--on-signal", "USR1=drain:0"): "give at least 1 s to drain in",
    ("--on-signal", "USR1=drain:x"): "use a number of seconds",
    ("--on-signal", "FOO=pass"): "SIGFOO is not a signal of this system",
    ("--on-signal", "KILL=pass"): "SIGKILL cannot be handled",
    ("--on-signal", "USR1=pass,USR1=drain:5"): "name each signal once",
    ("--drain-signal", "SIGKILL"): "SIGKILL cannot be handled",
    ("--drain-signal", "SIGTERM,SIGINT"): "use the name of one signal",
    ("--drain-wait", "-1"): "use seconds, 0 or more",
    ("--notice-file", ""): "name a file or folder",
}


@pytest.mark.parametrize("options", BAD, ids=" ".join)
def test_what_cannot_be_is_refused(options: tuple[str, str]) -> None:
    text = complaint(*options, "train.py")
    assert text.startswith(" ".join(options)) and BAD[options] in text
