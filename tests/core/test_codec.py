"""The wire format: messages to bytes and back, and robust against any other input."""

from __future__ import annotations

import json
import math
import re
import types
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit import decided
from kit.effort import examples

from aelastic.base.record import Record
from aelastic.diagnose.failures.failure import SHARED_FIELDS
from aelastic.diagnose.failures.places import Place
from aelastic.errors import ProcessFailure
from aelastic.rdzv.decisions.cause import Cause, CauseKind
from aelastic.rdzv.decisions.decision import next_round
from aelastic.rdzv.leader.job_state import JobState
from aelastic.rdzv.log import node as log
from aelastic.rdzv.log.cell import Cell
from aelastic.rdzv.log.entries import Accepted, Payload, first_entry, next_entry
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import (
    CAMPAIGN,
    DOWNWARD,
    FRAME_MAX,
    PAYLOAD_MAX,
    PROTOCOL,
    STORED,
    TEXT_MAX,
    UPWARD,
    Decoder,
    OtherProtocolError,
    WireError,
    encode,
    from_text,
    record_from_text,
    record_to_text,
    to_text,
)
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.rdzv.protocol.sense import contradiction

WORDS = UPWARD | DOWNWARD | CAMPAIGN | STORED
NODE = m.Node("n1", "host-1", "trainer", 8, "10.0.0.1", 29500, 3, "10.0.0.9")
FAILURE = ProcessFailure.from_elsewhere("host-1", 4, 0, 77, -9, "SIGKILL", 'line 1\n\t"ü" 💥', 1_700_000_000)
PAST = m.Past(m.NodePhase.FAILED, 7, 2, FAILURE)
FIRST = first_entry(5, ["n1", "n2"], ["n1", "n2"], ("1f",), Payload("{}"))
SECOND = next_entry(FIRST, 6, ["n1", "n2"], ["n1", "n2"], ("1f",), failures=["n2 7"], payload=Payload("{}"))
ACCEPTED = Accepted(SECOND, 6)
ENDED = log.EndedLeader("n2", ACCEPTED)
KNOWS = log.Status(6, FIRST, ACCEPTED, (ENDED, log.EndedLeader("n3", None)), ("n0",), ("n1 7",))
STATUS = m.Status(NODE, PAST, 3, 1)
HELLO = m.Hello(PROTOCOL, m.Terms("job", 1, 4, 3, 5.0), "t0k3n", "n1~1", STATUS.replace(log=KNOWS))
RANKS = NodeRanks(
    group_rank=1,
    group_world_size=2,
    first_rank=4,
    world_size=8,
    first_role_rank=4,
    role_world_size=8,
    local_world_size=4,
)
PLACE = Place(4, "host-1", 4711, "train.py:120", "all_reduce (train.py:120)", "all_reduce", "S", 8)
LEADER = m.LeaderAt("n1", "n1~1", ("10.0.0.1", "node1"), 4711, "t0k3n")
CELL = Cell("1f", FIRST.log, 6, "t0k3n", 12, FIRST, ACCEPTED)
FETCH = r.Fetch("n1", "n1-6", r.What.LOG, "n2", 3, True, 4096)
FETCHED = r.Fetched("n2", "n1", "n1-6", "2-4096", "step 5\n")
VERDICTS = [
    m.Ended(m.Outcome.FAILED, decided.refused(3), FAILURE),
    m.Ended(m.Outcome.TIMED_OUT, decided.TOO_FEW),
    m.Ended(m.Outcome.SUCCEEDED, decided.SUCCEEDED),
]
MESSAGES: list[Any] = [
    m.HungUp(),
    FETCHED.replace(is_last=False, is_continued=True),
    m.Campaign(7, SECOND.id, LEADER),
    m.Campaign(0, None, LEADER),
    m.Declined(6, "this node has a leader", LEADER),
    m.Declined(0, "this agent campaigns"),
    m.StoredCell(CELL, LEADER),
    m.StoredCell(Cell("1f", None, 1, "")),
    HELLO,
    m.Hello(PROTOCOL, m.Terms("", 1, 1, 0, 5.0), "t", "n", m.Status(m.Node("n", "", "", 1, "", 1), m.Past(m.NodePhase.READY))),
    m.Alive(),
    STATUS,
    STATUS.replace(
        asks=(r.Ask("n1", "n1-5", r.Verb.DRAIN, "host-1", 110.0, "spot", spares_job=True),),
        frozen=r.Frozen("n1", 1000, 81, 2, 0, has_opted_in=True), saved=r.Saved("n1", 1000),
        question=m.Hangs("n1", 7, "no output for 60 s", 60.0, True, number=2),
        places=m.Saw("n1", 7, (PLACE,), 3),
        left=m.Left("n1", "SIGTERM"), log=KNOWS.replace(committed=FIRST.id),
    ),
    m.Plan(5, 5.0),
    m.Plan(5, 5.0, log.Plan(5, False, None, None, None)),
    m.Plan(6, 5.0, log.Plan(6, True, FIRST.id, SECOND, ACCEPTED)),
    m.Plan(
        5, 5.0,
        assigned=m.Assigned(7, 2, RANKS, "10.0.0.1", 29500, "worker", 5),
        interrupted=m.Interrupted(7, decided.restart(3, 3, decided.failed(4)), 3),
        settled=m.Settled(7, decided.lost("n2", "silent for 5 s")),
        ended=m.Ended(m.Outcome.FAILED, decided.refused(3), FAILURE),
        waiting=m.Waiting("1 of 2 nodes are ready"),
        starts_ahead=2,
        look=m.Look(7, "no output for 60 s", 3),
        compared=m.Compared(7, "hang: 7 of 8 ranks wait", (5,), True, number=3),
        notice=r.Notice(1000, 7, r.Stage.SAVE, 82, False, 98.5, decided.drain("host-1", 110.0, "spot")),
        cordoned=r.Cordoned("row 3", 3600.0, 2),
        answers=(r.Answer("n1-5", True, "drain of host-1 within 110 s (spot)", ("n1", "n2")),),
    ),
    m.Plan(5, 5.0, interrupted=m.Interrupted(7, next_round(Cause(CauseKind.CONTINUED_WITHOUT, round=7)), 3, went_on=True)),
    m.Refused("why", True),
    m.Heartbeat(),
    m.Heartbeat(True, 12),
    m.Probe(),
    m.GivenUp(),
    m.Goodbye("resigned", False),
    *(m.Plan(5, 5.0, ended=each) for each in VERDICTS),
    r.Answer("n1-5", True, "drain of host-1 within 110 s (spot)", ("n1", "n2")),
    FETCH,
    FETCHED,
    r.Show(FETCH),
    r.Shown(FETCHED),
]  # fmt: skip


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def decode(data: bytes, words: dict[str, type[Record]] = WORDS) -> list[Any]:
    return list(Decoder(words).feed(data))


def decode_json(value: Any, words: dict[str, type[Record]] = WORDS) -> Any:
    (message,) = decode(frame(json.dumps(value).encode()), words)
    return message


def as_json(message: Any) -> Any:
    return json.loads(encode(message)[4:])


def is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def assert_typed(value: Any, kind: Any) -> None:  # noqa: C901  one case per kind
    """Checks a value against its annotation, recursively; written without looking at the decoder."""
    if get_origin(kind) in {Union, types.UnionType}:
        if value is not None:
            inner = [each for each in get_args(kind) if each is not type(None)]
            assert_typed(value, inner[0] if len(inner) == 1 else type(value))
            assert len(inner) == 1 or type(value) in inner
    elif is_named_tuple(kind):
        assert type(value) is kind
        for name, hint in get_type_hints(kind).items():
            assert_typed(getattr(value, name), hint)
    elif kind is Payload:
        assert type(value) is str and value.isascii()
    elif get_origin(kind) is tuple:
        assert type(value) is tuple
        for item in value:
            assert_typed(item, get_args(kind)[0])
    elif isinstance(kind, type) and issubclass(kind, Record):
        assert type(value) is kind
        hints = get_type_hints(kind)
        assert kind.required <= value.__dict__.keys() <= set(kind.__match_args__)
        for name in SHARED_FIELDS if kind is ProcessFailure else kind.__match_args__:
            assert_typed(getattr(value, name), hints[name])
    else:
        assert type(value) is kind
        if kind is int:
            assert -(2**63) <= value < 2**63
        if kind is float:
            assert math.isfinite(value)


# Any valid message, built from its annotations and field names.

ANY_TEXT = st.text(st.characters(exclude_categories=[]), max_size=20)
TEXTS = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=20)  # what a terminal can show
WORD = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(1, 65535),
    float: st.floats(0.5, 1e9),
    str: TEXTS,
    bool: st.booleans(),
}
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(["node_id", "ask_id", "asker", "token", "name", "log_name", "incarnation"], WORD),
    **dict.fromkeys(["master_addr", "way_address", "peer_address", "address"], WORD),
    "key": st.just("") | WORD,
    "value": ANY_TEXT,
    **dict.fromkeys(["matched_rules", "departed"], st.lists(st.integers(0, 19), unique=True).map(tuple)),
    "addresses": st.lists(WORD, max_size=4, unique=True).map(tuple),
    "store_server": st.sampled_from(m.STORE_SERVERS),
    "protocol": st.just(PROTOCOL),
    "run_id": ANY_TEXT,
    "exitcode": st.integers(-(2**31), 2**31),
    **dict.fromkeys(["rank", "local_rank", "pid"], st.integers(-1, 2**31)),
    **dict.fromkeys(["message", "traceback", "stack", "oom", "note", "log_file"], ANY_TEXT),
}
# Fields whose text, or whose items, are words.
WORDS_IN = {"log", "digest", "members", "voters", "incarnations", "replaces"}
BY_KIND: dict[Any, Any] = {  # fields that belong together
    m.Terms: lambda terms: terms.replace(max_nodes=max(terms.min_nodes, terms.max_nodes)),
    m.Hello: lambda hello: hello.replace(
        terms=hello.terms.replace(max_restarts=max(hello.terms.max_restarts, hello.status.past.restart_count))
    ),
    NodeRanks: lambda ranks: ranks.replace(
        group_rank=ranks.group_rank % ranks.group_world_size,
        world_size=(size := max(ranks.group_world_size, ranks.first_rank + ranks.local_world_size,
                                ranks.first_role_rank + ranks.local_world_size)),
        role_world_size=size,
    ),
    m.Past: lambda past: past.replace(failure=past.failure or FAILURE),
    r.Answer: lambda answer: answer.replace(nodes=tuple({"".join(each.split()) or "n" for each in answer.nodes})),
    m.Compared: lambda compared: compared.replace(outliers=tuple(set(compared.outliers))),
    m.Ended: lambda ended: ended.replace(cause=ended.cause or FAILURE),
    m.Status: lambda status: status.replace(
        asks=tuple(each.replace(node_id=status.node.node_id) for each in status.asks),
        **{
            name: part.replace(node_id=status.node.node_id)
            for name in ("frozen", "saved", "question", "places", "left")
            if (part := getattr(status, name)) is not None
        },
    ),
}  # fmt: skip


def any_of(kind: Any, name: str = "") -> st.SearchStrategy[Any]:
    if name in BY_NAME:
        return BY_NAME[name]
    if get_origin(kind) in {Union, types.UnionType}:
        return st.one_of([st.none() if each is type(None) else any_of(each, name) for each in get_args(kind)])
    if get_origin(kind) is tuple:
        return st.lists(any_of(get_args(kind)[0], name), max_size=4).map(tuple)
    if kind is str and name in WORDS_IN:
        return WORD
    if kind is Payload:
        return st.text(st.characters(max_codepoint=127), max_size=20)
    if is_named_tuple(kind):
        return st.builds(kind, **{name: any_of(hint, name) for name, hint in get_type_hints(kind).items()})
    if issubclass(kind, Record):
        hints = get_type_hints(kind)
        if kind is ProcessFailure:
            return st.builds(kind.from_elsewhere, **{name: any_of(hints[name], name) for name in SHARED_FIELDS})
        fields = {name: any_of(hints[name], name) for name in kind.__match_args__}
        return st.builds(kind, **fields).map(BY_KIND.get(kind, lambda whole: whole))
    if issubclass(kind, StrEnum):
        return st.sampled_from(kind)
    return LEAVES[kind]


ANY_MESSAGE = st.one_of([any_of(kind) for kind in WORDS.values()])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=12,
)


# Round trips.


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was_sent(message: Any) -> None:
    (found,) = decode(encode(message))
    assert found == message
    assert repr(found) == repr(message), "entries are compared by id only"


def test_every_word_has_an_example_here() -> None:
    assert {type(message).__name__ for message in MESSAGES} == WORDS.keys()


def test_no_word_goes_both_ways() -> None:
    assert not UPWARD.keys() & DOWNWARD.keys()
    with pytest.raises(WireError, match="not a message of the protocol"):
        decode(encode(m.Heartbeat()), UPWARD)
    with pytest.raises(WireError, match="not a message of the protocol"):
        decode(encode(m.Alive()), DOWNWARD)


@given(ANY_MESSAGE)
def test_any_message_comes_back_as_it_was_sent(message: Any) -> None:
    (found,) = decode(encode(message))
    assert found == message and repr(found) == repr(message)
    assert_typed(found, type(message))


@given(st.lists(ANY_MESSAGE, max_size=4), st.data())
def test_bytes_that_come_in_any_pieces_are_the_same_messages(messages: list[Any], data: st.DataObject) -> None:
    stream = b"".join(map(encode, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder, found = Decoder(WORDS), list[Any]()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += decoder.feed(stream[start:end])
    assert found == messages


def test_bytes_that_come_one_by_one_are_the_same_messages() -> None:
    decoder = Decoder(WORDS)
    found = [message for byte in b"".join(map(encode, MESSAGES)) for message in decoder.feed(bytes([byte]))]
    assert found == MESSAGES


def test_what_was_complete_before_the_garbage_is_a_message_yet() -> None:
    found = Decoder(UPWARD).feed(encode(m.Alive()) + encode(HELLO) + frame(b"garbage") + encode(m.Alive()))
    assert [next(found), next(found)] == [m.Alive(), HELLO]
    with pytest.raises(WireError):
        next(found)


def test_a_listener_that_fails_does_not_receive_the_same_message_again() -> None:
    decoder = Decoder(UPWARD)
    messages: Any = decoder.feed(encode(m.Alive()) + encode(STATUS))
    assert next(messages) == m.Alive()
    messages.close()
    assert list(decoder.feed(b"")) == [STATUS]


# Invalid messages.


@given(st.binary(max_size=200))
@example(frame(b""))
@example(frame(b"\xff\xfe"))
@example(frame(b'"ab"'))
@example(frame(b'["Alive",{}'))
@example(frame(b'{"Alive":1,"x":2}'))
@example(frame(b'[["Alive"],{}]'))
@example(frame(b'["Alive",{},1]'))
@example(frame(b"-" + b"9" * 5000))
@example(frame(b"GET / HTTP/1.1\r\n\r\n"))
def test_any_bytes_are_refused_or_awaited(data: bytes) -> None:
    try:
        found = decode(data)
    except WireError:
        return
    for message in found:
        assert_typed(message, type(message))


@given(JSON, st.sampled_from(sorted(WORDS)))
def test_any_json_is_refused_or_a_message_of_the_right_types(value: Any, name: str) -> None:
    try:
        message = decode_json([name, value])
    except WireError:
        return
    assert_typed(message, WORDS[name])


@settings(max_examples=examples(300))
@given(ANY_MESSAGE, st.data())
def test_a_message_with_one_thing_replaced_is_refused_or_of_the_right_types(message: Any, data: st.DataObject) -> None:
    name, fields = as_json(message)
    where = fields
    while isinstance(where, dict) and where:
        key = data.draw(st.sampled_from(sorted(where)))
        inner = where[key]
        if not isinstance(inner, dict) or data.draw(st.booleans()):
            where[key] = data.draw(JSON)
            break
        where = inner
    try:
        found = decode_json([name, fields])
    except WireError:
        return
    assert_typed(found, WORDS[name])


@settings(max_examples=examples(300))
@given(ANY_MESSAGE, st.data())
def test_a_frame_with_one_byte_changed_is_refused_awaited_or_of_the_right_types(
    message: Any, data: st.DataObject
) -> None:
    mutated = bytearray(encode(message))
    mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(mutated))
    except WireError:
        return
    for each in found:
        assert_typed(each, type(each))


# Types.

NUMBERS: list[Any] = [True, False, "1", 1.0, None, [], {}, 2**63, -(2**63) - 1, 10**1000]
FLAGS: list[Any] = [0, 1, "true", None]
CHOICES: list[Any] = ["SUCCEEDED", "", None, 1, [], ["failed"], {}, True, 1.5]


@pytest.mark.parametrize(
    "field, message, values",
    [
        ("Plan.term", {"term": ..., "lease_s": 5.0}, NUMBERS),
        ("Plan.answers.is_applied", {"term": 1, "lease_s": 5.0, "answers": [{"ask_id": "a", "is_applied": ..., "text": ""}]}, FLAGS),
        ("Plan.ended.outcome", {"term": 1, "lease_s": 5.0, "ended": {"outcome": ..., "decision": {}}}, CHOICES),
    ],
)  # fmt: skip
def test_a_number_has_64_bits_a_flag_is_not_a_number_and_a_choice_is_one_of_those_there_are(
    field: str, message: dict[str, Any], values: list[Any]
) -> None:
    def filled(whole: Any, value: Any) -> Any:
        if isinstance(whole, dict):
            return {name: filled(inner, value) for name, inner in whole.items()}
        if isinstance(whole, list):
            return [filled(inner, value) for inner in whole]
        return value if whole is ... else whole

    for value in values:
        with pytest.raises(WireError, match=rf"^{re.escape(field)} is "):
            decode_json(["Plan", filled(message, value)])


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "true", '"1"', "null", "1" + "0" * 400])
def test_what_should_be_a_length_of_time_is_a_finite_number(text: str) -> None:
    body = encode(m.Plan(1, 5.0))[4:]
    assert decode(frame(body)) == [m.Plan(1, 5.0)]
    with pytest.raises(WireError):
        decode(frame(body.replace(b'"lease_s":5.0', b'"lease_s":' + text.encode())))


def test_a_length_of_time_may_come_as_a_whole_number() -> None:
    name, fields = as_json(m.Plan(1, 5.0))
    message = decode_json([name, {**fields, "lease_s": 5}])
    assert_typed(message, m.Plan)
    assert message == m.Plan(1, 5.0)


def test_a_field_too_few_or_too_many_is_refused_at_any_depth() -> None:
    for message in MESSAGES:
        name, fields = as_json(message)
        with pytest.raises(WireError):
            decode_json([name, {**fields, "more": 1}])
        for field in fields.keys() - {"protocol"}:
            lacking = {key: value for key, value in fields.items() if key != field}
            with pytest.raises(WireError):
                decode_json([name, {**lacking, "more": 1}])
            defaults = type(message).defaults
            expected = message.replace(**{field: defaults[field]}) if field in defaults else None
            if expected is not None and not contradiction(expected):
                assert decode_json([name, lacking]) == expected
                continue
            with pytest.raises(
                WireError, match=f"{name} lacks '{field}'" if expected is None else "contradicts itself"
            ):
                decode_json([name, lacking])
    hello = as_json(HELLO)
    hello[1]["status"]["past"]["failure"]["more"] = 1
    with pytest.raises(WireError, match=r"Hello\.status\.past\.failure is .* and should have the fields host, rank"):
        decode_json(hello)


def test_of_a_failure_some_fields_stay_on_its_host_and_can_not_come_from_another(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text('{"message": "no GPU", "timestamp": 77}')
    known: dict[str, Any] = {
        "rank": 4,
        "host": "host-1",
        "is_final": True,
        "oom": "killed",
        "log_file": "/logs/0/stderr.log",
    }
    failure = ProcessFailure(0, 77, 1, str(tmp_path / "e.json"), **known)
    status = m.Status(NODE, PAST.replace(failure=failure))
    name, whole = as_json(status)
    fields = whole["past"]
    assert tuple(fields["failure"]) == SHARED_FIELDS and not {"error_file", "stderr_tail"} & {*SHARED_FIELDS}
    (read,) = decode(encode(status))
    read_again = read.past
    assert read_again.failure == failure.for_others()
    assert failure.error_file_data["timestamp"] == 77 and read_again.failure.error_file == "<N/A>"
    assert (read_again.failure.message, read_again.failure.is_final, read_again.failure.oom) == (
        "no GPU",
        True,
        "killed",
    )
    assert read_again.failure.log_file == "/logs/0/stderr.log"
    past = {**fields, "failure": {**fields["failure"], "error_file": "/etc/passwd"}}
    with pytest.raises(WireError, match=r"Status\.past\.failure .* should have the fields host, rank"):
        decode_json([name, {**whole, "past": past}])
    fields["failure"]["is_final"] = 1
    with pytest.raises(WireError, match=r"Status\.past\.failure\.is_final"):
        decode_json([name, {**whole, "past": fields}])


def test_the_texts_of_a_failure_are_cut_so_that_it_can_continue_to_other_nodes() -> None:
    name, fields = as_json(STATUS)
    failure = fields["past"]["failure"]
    texts = dict.fromkeys((key for key, value in failure.items() if isinstance(value, str)), "x" * TEXT_MAX)
    again = decode_json([name, {**fields, "past": {**fields["past"], "failure": {**failure, **texts}}}])
    assert all(len(getattr(again.past.failure, key)) < TEXT_MAX for key in texts)
    worst = ProcessFailure.from_elsewhere(**{**FAILURE.shared, **dict.fromkeys(texts, "💥" * TEXT_MAX)})
    longest = decided.refused().replace(error="💥" * 1024, rule="💥" * 1024)
    assert len(encode(m.Plan(1, 5.0, ended=m.Ended(m.Outcome.FAILED, longest, worst)))) < FRAME_MAX


def test_what_may_be_missing_is_null_or_left_out() -> None:
    name, fields = as_json(m.Declined(1, "", LEADER))
    assert decode_json([name, {**fields, "leader": None}]).leader is None
    del fields["leader"]
    assert decode_json([name, fields]).leader is None


def test_what_has_its_default_is_left_out_where_there_is_much_of_it() -> None:
    assert as_json(m.Plan(5, 5.0)) == ["Plan", {"term": 5, "lease_s": 5.0}]
    assert as_json(m.Plan(5, 5.0, starts_ahead=2))[1].keys() == {"term", "lease_s", "starts_ahead"}
    assert as_json(STATUS)[1].keys() == {"node", "past", "ready_count", "prepared_count"}


@pytest.mark.parametrize(
    "pattern",
    [
        "%s",
        '["Alive",%s]',
        '["Goodbye",{"reason":"","is_gone":%s}]',
        '["Status",{"node":{"node_id":%s}}]',
        '["Hello",{"protocol":%s}]',
        '["Campaign",{"term":1,"committed":%s}]',
        '["Plan",{"term":1,"lease_s":5.0,"ended":{"outcome":%s}}]',
    ],
)
def test_nesting_however_deep_is_refused(pattern: str) -> None:
    # Close to Python's recursion limit, JSON can be parsed but not written again.
    for depth in (*range(850, 1000, 1 if pattern == "%s" else 10), 100_000):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            body = pattern % (opening * depth + "1" + closing * depth)
            with pytest.raises(WireError):
                decode(frame(body.encode()))


def test_the_complaint_about_garbage_is_short() -> None:
    long = "x" * 100_000
    for value in (long, [long], ["Goodbye", {"is_gone": [long], "reason": long}], ["Status", long], ["Status", {"node": long}], ["Heartbeat", {long: 1}],
                  ["Hello", {"protocol": long}], ["Plan", {"ended": {"outcome": long}}], ["Campaign", {"committed": [long]}],
                  ["StoredCell", {"cell": {"committed": [long] * 4}}]):  # fmt: skip
        with pytest.raises(WireError) as caught:
            decode_json(value)
        assert len(str(caught.value)) < 400


# Limits.


def test_the_limit_of_a_frame_is_exact() -> None:
    fits = m.Goodbye("x" * (FRAME_MAX - len(encode(m.Goodbye("", True))) + 4), True)
    assert len(encode(fits)) == FRAME_MAX + 4
    with pytest.raises(WireError, match=r"Goodbye\.reason .* should be a text of at most 40000 characters"):
        decode(encode(fits))  # the frame is accepted, but not its content
    with pytest.raises(WireError, match=f"Goodbye takes {FRAME_MAX + 1} bytes, {FRAME_MAX} are allowed"):
        encode(m.Goodbye(fits.reason + "x", True))


def test_a_frame_beyond_the_limit_is_refused_by_its_first_bytes() -> None:
    with pytest.raises(WireError, match=f"a message of {FRAME_MAX + 1} bytes"):
        decode((FRAME_MAX + 1).to_bytes(4, "big"))
    with pytest.raises(WireError, match=r"it begins with b'GET / HTTP/1.1"):
        decode(b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n")
    assert decode(FRAME_MAX.to_bytes(4, "big") + b"[") == []


def test_what_has_no_place_on_the_wire_is_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError, match="has no place on the wire"):
        encode(m.Goodbye(object(), True))  # type: ignore[arg-type]


# Other versions.


def test_the_text_in_the_cell_names_the_version_of_the_protocol() -> None:
    stored = m.StoredCell(CELL, LEADER)
    assert json.loads(to_text(stored))[1]["protocol"] == PROTOCOL
    assert from_text(to_text(stored)) == stored


@pytest.mark.parametrize("fields", [{"protocol": PROTOCOL + 1}, {"protocol": "1"}, {"protocol": None}, {}, {"protocol": 0, "words": []},
                                    {**as_json(HELLO)[1], "protocol": PROTOCOL + 1}])  # fmt: skip
def test_an_agent_of_another_version_is_known_by_its_greeting_whatever_else_is_in_it(fields: dict[str, Any]) -> None:
    with pytest.raises(OtherProtocolError) as caught:
        decode_json(["Hello", fields])
    theirs = fields.get("protocol")
    assert f"speaks protocol {theirs!r} and the job speaks {PROTOCOL}: install the same version" in str(caught.value)


@pytest.mark.parametrize("protocol", [True, 1.0, float(PROTOCOL)])
def test_a_protocol_that_is_not_a_whole_number_is_garbage(protocol: Any) -> None:
    with pytest.raises(WireError) as caught:
        decode_json(["Hello", {**as_json(HELLO)[1], "protocol": protocol}])
    assert not isinstance(caught.value, OtherProtocolError)


def test_the_answer_to_a_greeting_of_another_version_always_fits_into_a_frame() -> None:
    longest = "é" * ((FRAME_MAX - 100) // 2)
    with pytest.raises(OtherProtocolError) as caught:
        decode(frame(f'["Hello",{{"protocol":"{longest}"}}]'.encode()))
    assert len(encode(m.Refused(str(caught.value), True))) < 1000


# Log entries.


def test_an_entry_may_be_named_by_its_id() -> None:
    plan = m.Plan(5, 5.0, log.Plan(5, True, FIRST, SECOND.id, None))
    (found,) = decode(encode(plan))
    assert (type(found.log.committed), found.log.proposal) == (type(FIRST), SECOND.id)
    assert as_json(plan)[1]["log"]["proposal"] == [6, 2, FIRST.log, SECOND.id.digest]


@pytest.mark.parametrize(
    "wrong",
    [[], [6, 2, "1f"], [6, 2, "1f", "digest", 1], ["6", 2, "1f", "digest"], [[6], 2, "1f", "digest"],
     [6, -1, "1f", "digest"], "1f", 7, {}],
)  # fmt: skip
def test_what_is_not_an_id_is_refused(wrong: Any) -> None:
    campaign, status = as_json(m.Campaign(7, SECOND.id, LEADER)), as_json(STATUS.replace(log=KNOWS))
    campaign[1]["committed"] = status[1]["log"]["committed"] = wrong
    for whole, where in ((campaign, "Campaign"), (status, "Status.log")):
        with pytest.raises(WireError, match=rf"^{where}\.(committed|term|number) (is|lacks) "):
            decode_json(whole)


def test_a_record_that_was_read_before_is_checked_like_a_new_one() -> None:
    whole = as_json(STATUS.replace(node=NODE.replace(local_world_size=1)))
    decode_json(whole)
    whole[1]["node"]["local_world_size"] = True
    with pytest.raises(WireError, match=r"^Status\.node\.local_world_size is True, "):
        decode_json(whole)


@pytest.mark.parametrize("text", ["{}{}", " {}", "{} ", "\ufeff{}"])
def test_nothing_stands_around_the_content_of_an_entry(text: str) -> None:
    assert record_from_text(JobState, "{}") == JobState()
    with pytest.raises(WireError):
        record_from_text(JobState, text)


def test_a_flag_in_an_id_is_not_a_number_though_it_equals_one_that_was_read() -> None:
    whole = as_json(m.Campaign(7, SECOND.id._replace(term=1), LEADER))
    decode_json(whole)
    whole[1]["committed"][0] = True
    with pytest.raises(WireError, match=r"^Campaign\.term is True, "):
        decode_json(whole)


@pytest.mark.parametrize("wrong", ["x" * (PAYLOAD_MAX + 1), "é", 7, None, ["x"]])
def test_the_content_of_an_entry_is_a_text_of_ascii_with_a_limit(wrong: Any) -> None:
    whole = as_json(m.Plan(5, 5.0, log.Plan(5, True, FIRST, None, None)))
    whole[1]["log"]["committed"]["payload"] = wrong
    with pytest.raises(WireError, match=r"^Plan\.log\.committed\.payload is "):
        decode_json(whole)


def test_two_entries_of_the_largest_content_fit_into_a_cell() -> None:
    largest = Payload("x" * PAYLOAD_MAX)
    one = first_entry(5, ["n1"], ["n1"], ("1f",), largest)
    two = next_entry(one, 5, ["n1"], ["n1"], ("1f",), payload=largest)
    stored = m.StoredCell(Cell("1f", one.log, 5, "t0k3n", 0, one, Accepted(two, 5)), LEADER)
    assert from_text(to_text(stored)) == stored


@given(any_of(JobState))
def test_the_content_of_an_entry_comes_back_as_it_was_written(state: JobState) -> None:
    text = record_to_text(state)
    assert text.isascii()
    assert record_from_text(JobState, text) == state


@pytest.mark.parametrize(
    "text", ["", "x", "null", "7", "[]", '{"more":1}', '{"verdict":{}}', '{"restart_count":-1}', "[" * 100_000]
)
def test_the_content_of_an_entry_that_no_leader_wrote_is_refused(text: str) -> None:
    with pytest.raises(WireError):
        record_from_text(JobState, text)


# At the endpoint.


@given(any_of(m.StoredCell))
def test_a_cell_comes_back_from_the_endpoint(stored: m.StoredCell) -> None:
    text = to_text(stored)
    assert text.isascii() and "\n" not in text
    assert from_text(text) == stored


@pytest.mark.parametrize(
    "text",
    ["", "{}", "null", "x", '["Alive",{}]', '"\ud800"', "[" * 100_000, '["StoredCell",{"cell":null}]',
     '["StoredCell",{"cell":{"incarnation":"1f","log":null,"term":NaN,"leader":""}}]'],
)  # fmt: skip
def test_a_text_that_no_agent_wrote_is_refused(text: str) -> None:
    with pytest.raises(WireError):
        from_text(text)


@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_is_refused_or_a_message(text: str) -> None:
    try:
        message = from_text(text)
    except WireError:
        return
    assert_typed(message, type(message))


def test_a_text_beyond_the_limit_is_refused() -> None:
    with pytest.raises(WireError, match="are allowed"):
        from_text("x" * (FRAME_MAX + 1))
