"""Input at the control socket: either a whole command, or a reason why it is not a command."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aelastic.agent.requests.commands import LINE_BYTES_MAX, SAVE_S, Command, CommandError, command_of
from aelastic.rdzv.protocol import requests as r

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["verb", "node", "reason", "deadline_s", "at_save", "wait", "rank", "stderr", "follow", "unknown"]


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def test_a_command_has_what_was_sent_and_the_rest_by_default() -> None:
    assert command_of(line(verb="status")) == Command("status", deadline_s=SAVE_S)
    assert command_of(line(verb="logs", rank=3, stderr=True, later="unknown")) == Command("logs", rank=3, stderr=True)
    drain = command_of(line(verb="drain", node="n1", deadline_s=90, reason="spot", wait=True))
    assert drain == Command("drain", "n1", "spot", 90.0, wait=True) and type(drain.deadline_s) is float


def test_earlier_names_of_cordon_and_uncordon_are_taken() -> None:
    assert command_of(line(verb="exclude", node="n1")) == command_of(line(verb="cordon", node="n1"))
    assert command_of(line(verb="include", node="n1")) == command_of(line(verb="uncordon", node="n1"))


@pytest.mark.parametrize(
    "received, why",
    [
        (b"", "a request is a JSON object in one line"),
        (b"[1]\n", "a request is a JSON object in one line"),
        (b"\xff\n", "a request is a JSON object in one line"),
        (b"[" * (LINE_BYTES_MAX - 1) + b"\n", "a request is a JSON object in one line"),
        # Python 3.14 parses nesting this deep if its stack allows.
        (
            b'{"verb": %s1%s}\n' % (b"[" * 20_000, b"]" * 20_000),
            ("a request is a JSON object in one line", "verb is [[[["),
        ),
        (b'{"verb": %s}\n' % (b"9" * 9000), "a request is a JSON object in one line"),
        (line(), "verb is '': use one of here, status, stacks, why, logs, drain, "),
        (line(verb="explode"), "verb is 'explode': use one of "),
        (line(verb=7), "verb is 7: use a text of at most 255 characters"),
        (line(verb="logs"), "rank is missing: name the rank whose logs to show"),
        (b'{"verb": "logs", "rank": 1e999}\n', "rank is inf: use a whole number, at least 0"),
        (line(verb="logs", rank=True), "rank is True: use a whole number, at least 0"),
        (line(verb="logs", rank=1 << 70), "rank is 1180591620717411303424: use a whole number, at least 0"),
        (line(verb="drain", node="n" * 300), "node is 'nnnn"),
        (line(verb="restart", reason="r" * 1001), "reason is 'rrrr"),
        (line(verb="restart", deadline_s=float("nan")), "deadline_s is nan: use seconds, at most 1e+09"),
        (line(verb="restart", deadline_s=10**400), "deadline_s is 1000"),
        (line(verb="restart", deadline_s=-1), "deadline_s is -1: use seconds"),
        (line(verb="stop", at_save="yes"), "at_save is 'yes': use true or false"),
    ],
)
def test_what_is_none_says_in_one_line_why(received: bytes, why: str | tuple[str, ...]) -> None:
    with pytest.raises(CommandError) as caught:
        command_of(received)
    text = str(caught.value)
    assert text.startswith(why) and "\n" not in text and len(text) <= 160


@given(st.binary(max_size=60) | st.dictionaries(st.sampled_from(FIELDS), ANY_JSON | st.sampled_from([*r.Verb, "logs"])))
def test_whatever_arrives_is_a_command_or_none(example: bytes | dict[str, Any]) -> None:
    data = example if isinstance(example, bytes) else line(**example)
    try:
        command = command_of(data)
    except CommandError:
        return
    assert 0 <= command.deadline_s <= 1e9 and len(command.node) <= 255 and len(command.reason) <= r.REASON_MAX
