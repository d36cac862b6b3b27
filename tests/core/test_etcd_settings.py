"""The settings of etcd, and what a board reads as a leader record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.servers.etcd_boards import board_of, settings_of
from kit.servers.etcd_values import GARBAGE, GOOD

from aelastic.errors import InputError
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.protocol.messages import ROUND_MAX, Seat, Seats, fence_of
from aelastic.rdzv.record_text import (
    MAX_BYTES,
    OlderVersionError,
    record_from_bytes,
    record_to_bytes,
    state_of,
    text_without_leader,
)
from aelastic.rdzv.stores.etcd_settings import Endpoint, etcd_settings

# --- what the user chose


@pytest.mark.parametrize(
    "text, endpoints",
    [
        ("node0", [Endpoint("http", "node0", 2379)]),
        ("Node0.example:1234", [Endpoint("http", "Node0.example", 1234)]),
        ("http://a,https://b:1/", [Endpoint("http", "a", 2379), Endpoint("https", "b", 1)]),
        (" a , b:2 ,", [Endpoint("http", "a", 2379), Endpoint("http", "b", 2)]),
        ("[::1],[fe80::1]:7", [Endpoint("http", "::1", 2379), Endpoint("http", "fe80::1", 7)]),
    ],
)
def test_endpoints_are_read_as_people_write_them(text: str, endpoints: list[Endpoint]) -> None:
    assert list(etcd_settings(settings_of(text)).endpoints) == endpoints


def test_an_endpoint_is_shown_as_it_is_written() -> None:
    board = board_of("etcd-v3", "a,[::1]:7")

    assert board.name == "etcd-v3 at a:2379,[::1]:7"
    assert board_of("etcd", "a").name == "etcd at a:2379"
    assert (board.own_address, board.endpoint_host) == ("", "")


@pytest.mark.parametrize(
    "endpoint, config, what",
    [
        ("", {}, "needs"),
        (" , ", {}, "needs an endpoint"),
        ("a:0", {}, "a:0: use host:port"),
        ("a:65536", {}, "use host:port"),
        ("a:" + "9" * 9000, {}, "use host:port"),
        ("a:b", {}, "use host:port"),
        ("::1", {}, "in brackets"),
        ("[a]", {}, "in brackets"),
        ("a/b", {}, "use host:port"),
        ("a b", {}, "use host:port"),
        ("ftp://a", {}, "http:// or https://"),
        ("http://a", {"protocol": "https"}, "set the protocol once"),
        ("joe:pw@a:1", {}, "password_file"),
        ("a", {"protocol": "gopher"}, "protocol=gopher: use http or https"),
        ("a", {"password": "pw"}, "without a user"),
        ("a", {"user": "joe"}, "without a password"),
        ("a", {"user": "joe:pw", "password": "pw"}, "given twice"),
        ("a", {"user": "joe", "password_file": "/nonexistent/file"}, "password_file=/nonexistent/file: No such file"),
        ("a", {"etcd_prefix": "/a/../b"}, "etcd_prefix"),
        ("a", {"etcd_prefix": "/"}, "etcd_prefix"),
        ("a", {"cacert": "/nonexistent/ca"}, "cacert=/nonexistent/ca: No such file"),
        ("a", {"cacert": "/dev/null"}, "cacert=/dev/null"),
        ("a", {"cert": "/nonexistent/cert"}, "cert=/nonexistent/cert: No such file"),
        ("a", {"ssl_cert": "/dev/null", "ssl_cert_key": "/dev/null"}, "cert=/dev/null,key=/dev/null"),
        ("a", {"key": "/dev/null"}, "without cert"),
    ],
)
def test_what_cannot_work_is_said_at_once(endpoint: str, config: dict[str, str], what: str) -> None:
    with pytest.raises(InputError, match=what) as caught:
        board_of("etcd", endpoint, **config)
    assert "pw" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_password_comes_from_a_file_without_its_end_of_line(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(" p:w \n")
    chosen = etcd_settings(settings_of("a", user="joe", password_file=str(tmp_path / "password")))

    assert (chosen.user, chosen.password) == ("joe", " p:w ")
    assert etcd_settings(settings_of("a", user="joe:p:w")).password == "p:w"


# --- what is in the key

texts = st.text(max_size=20)
candidates = st.builds(
    lambda node_id, addresses, port, token, seat: Candidate(node_id, tuple(addresses), port, token, *seat),
    texts,
    st.lists(texts, max_size=3),
    st.integers(1, 65535),
    texts,
    st.just(()) | st.tuples(st.integers(1), st.integers(0)),
)


words = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
seats = st.builds(Seat, words, words, words, st.integers(1, 65535))
rounds = st.none() | st.builds(
    lambda epoch, round_, secret, seats: Seats(fence_of(epoch, round_), round_, secret, tuple(seats)),
    st.integers(1, 2**42),
    st.integers(1, ROUND_MAX),
    words,
    st.lists(seats, min_size=1, max_size=3, unique_by=lambda seat: seat.node_id),
)


@given(candidates, st.integers(1), texts, rounds)
def test_a_record_written_is_read_as_it_was(
    candidate: Candidate, epoch: int, verdict: str, round_: Seats | None
) -> None:
    record = LeaderRecord(epoch=epoch, candidate=candidate, verdict=verdict, seats=round_)

    assert record_from_bytes(record_to_bytes(record)) == record


@given(candidates, st.integers(1), rounds)
def test_the_round_that_a_coordinator_leaves_behind_is_read_as_it_was(
    candidate: Candidate, epoch: int, round_: Seats | None
) -> None:
    state = state_of(text_without_leader(LeaderRecord(epoch=epoch, candidate=candidate, seats=round_)))

    assert (state.record, state.epoch, state.seats) == (None, epoch, round_)


@pytest.mark.parametrize("text", [b"x", b"\xff\xfe", b"0\n{", b"0\n{}", b"0\n" + b"[" * 100_000, b"-1\n{}", b"0\nnull"])
def test_a_text_of_a_key_that_no_agent_wrote_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r" is missing|^no JSON"):
        state_of(text)


def test_what_an_older_version_left_on_etcd_is_told_from_what_no_agent_wrote() -> None:
    with pytest.raises(OlderVersionError):
        state_of(json.dumps(GOOD).encode())
    with pytest.raises(ValueError, match="is missing") as caught:
        state_of(json.dumps({**GOOD, "epoch": "1"}).encode())
    assert not isinstance(caught.value, OlderVersionError)


def test_a_round_whose_hosts_names_are_too_long_for_a_board_is_left_out() -> None:
    record = LeaderRecord(epoch=1, candidate=Candidate("a", ("host",), 1, "token"))
    long = Seats(1, 1, "token", (Seat("a", "h" * MAX_BYTES, "address", 1),))

    assert record_from_bytes(record_to_bytes(record.replace(seats=long))) == record


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["epoch", "candidate", "verdict", "port", "x"]), inner)
    ),
    max_leaves=8,
)


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_nothing_else_is_read_as_a_record(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        record_from_bytes(text)


@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_no_record(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        record_from_bytes(text)


@pytest.mark.parametrize("told", [7, "x", '["Waiting", {"text": "x"}]', '["Seats", {"fence": 1}]'])
def test_what_is_no_round_is_no_record(told: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        record_from_bytes(json.dumps({**GOOD, "seats": told}).encode())


def test_what_later_versions_add_to_a_reign_is_left_out() -> None:
    assert record_from_bytes(json.dumps({**GOOD, "later": 1}).encode()).epoch == 1
