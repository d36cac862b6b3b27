"""Messages between an agent and a worker that recovers in place: what fits the schema, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aelastic.training import messages
from aelastic.training.messages import decode, encode

EXAMPLES: list[tuple[str, dict[str, Any]]] = [
    ("ready", {"round": -1, "step": -1}),
    ("ready", {"round": 1 << 40, "step": 12}),
    ("shared", {"round": 3, "step": 12, "source": 0}),
    ("differ", {"round": 3}),
    ("lost", {"round": 3}),
    ("done", {"round": 3}),
    ("keep", {"round": 3}),
    (
        "begin",
        {"round": 4, "env": {"RANK": "0", "TORCHELASTIC_ERROR_FILE": None, "PATH": "/caf\udce9"}, "patience": 15},
    ),
    ("held", {"round": 4}),
    ("over", {"round": 4, "why": "rank 2 (node n1) was lost"}),
    ("end", {}),
]


@pytest.mark.parametrize("kind, fields", EXAMPLES)
def test_a_message_comes_out_as_it_went_in(kind: str, fields: dict[str, Any]) -> None:
    assert decode(encode(kind, **fields)) == {"kind": kind, **fields}


def test_fields_of_a_later_version_are_dropped() -> None:
    assert decode(b'{"kind": "end", "since": 3}') == {"kind": "end"}


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\xff",
        b"[]",
        b"3",
        b"[" * 60000,
        b'{"round": 1}',
        b'{"kind": "stop"}',
        b'{"kind": ["end"]}',
        b'{"kind": "done"}',
        b'{"kind": "done", "round": "3"}',
        b'{"kind": "done", "round": true}',
        b'{"kind": "done", "round": 3.0}',
        b'{"kind": "done", "round": -2}',
        b'{"kind": "done", "round": 9223372036854775808}',
        b'{"kind": "over", "round": 3, "why": null}',
        b'{"kind": "begin", "round": 3, "patience": 15, "env": []}',
        b'{"kind": "begin", "round": 3, "patience": 15, "env": {"RANK": 0}}',
        b'{"kind": "begin", "round": 3, "patience": 15, "env": {"": "0"}}',
        b'{"kind": "begin", "round": 3, "patience": 15, "env": {"A=B": "0"}}',
        b'{"kind": "begin", "round": 3, "patience": 15, "env": {"A": "0\\u0000"}}',
        b'{"kind": "begin", "round": 3, "env": {}, "patience": 1.5}',
        b'{"kind": "begin", "round": 3, "env": {}}',
        b'{"kind": "end", "pad": "' + b"x" * 65536 + b'"}',
    ],
)
def test_anything_else_is_refused_with_one_kind_of_error(packet: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the sentence differs
        decode(packet)


def test_the_sender_is_held_to_the_same_schema() -> None:
    for kind, fields in (
        ("stop", {}),
        ("done", {}),
        ("done", {"round": "3"}),
        ("over", {"round": 1, "why": "x" * 65536}),
    ):
        with pytest.raises(ValueError):  # noqa: PT011  as above
            encode(kind, **fields)


def test_a_refusal_quotes_at_most_a_line_of_what_was_sent() -> None:
    with pytest.raises(ValueError, match="must be an integer") as refusal:
        decode(json.dumps({"kind": "done", "round": "x" * 60000}).encode())
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize(
    "value, path",
    [(None, None), ("", None), ("1:", None), ("2:/run/a", None), ("/run/a", None), ("1:/run/a:b", "/run/a:b")],
)
def test_the_variable_names_a_socket_of_this_version_only(value: str | None, path: str | None) -> None:
    assert messages.socket_path(value) == path


def test_the_agent_writes_the_variable_that_the_worker_reads() -> None:
    assert messages.socket_path(messages.variable("/proc/7/fd/3/0")) == "/proc/7/fd/3/0"
