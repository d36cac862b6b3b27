"""Any input at a port, and any change to the messages of two agents: only what an agent sent gets through."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kit.effort import examples

from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import PROTOCOL, UPWARD, Decoder, WireError, encode
from aelastic.rdzv.protocol.handshake import NONCE_BYTES, Handshake, ProofError
from aelastic.rdzv.protocol.keys import Key
from aelastic.rdzv.protocol.seals import ForeignError, sign, verify

KEY, OTHER = Key(b"k" * 32, "run"), Key(b"o" * 32, "run")
GREETING = Handshake([KEY], PROTOCOL, "member", b"g" * NONCE_BYTES, is_client=True).begin()
FETCH = r.Fetch("a", "f", r.What.STATUS)
COUNT = 5  # messages that an honest agent sends


def server(nonce: bytes = b"s" * NONCE_BYTES) -> Handshake:
    return Handshake([KEY], PROTOCOL, "member", nonce, is_client=False)


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["protocol", "run", "keys", "nonce", "x"]), inner),
                    max_leaves=10)  # fmt: skip
SENT = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=240).map(frame),
    st.tuples(st.sampled_from(["Hello", "Refused", "Proof", "Alive"]), JSON).map(lambda fields: frame(json.dumps(fields).encode())),
    st.just(GREETING),
)  # fmt: skip


def fed(handshake: Handshake, data: bytes, cuts: list[int]) -> None:
    begin = 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        handshake.feed(data[begin:cut])
        begin = cut


@settings(max_examples=examples(500), deadline=None)
@given(
    data=st.lists(SENT, max_size=4).map(b"".join),
    cuts=st.lists(st.integers(0, 1000), max_size=4),
    is_client=st.booleans(),
)
def test_no_stranger_is_let_in_and_each_is_refused_in_words(data: bytes, cuts: list[int], is_client: bool) -> None:
    handshake = Handshake([KEY], PROTOCOL, "member", b"n" * NONCE_BYTES, is_client=is_client)
    words, answer = "", b""
    try:
        fed(handshake, data, cuts)
    except ProofError as error:
        words, answer = str(error), error.answer
    assert words.isprintable() and len(answer) <= 512
    assert handshake.tags is None


@settings(max_examples=examples(300), deadline=None)
@given(cuts=st.lists(st.integers(0, 1000), max_size=6))
def test_two_agents_meet_however_the_network_cuts_what_they_say(cuts: list[int]) -> None:
    client = Handshake([OTHER, KEY], PROTOCOL, "member", b"c" * NONCE_BYTES, is_client=True)
    at_server = server()
    greeting = client.begin()
    answer = b"".join(at_server.feed(greeting[index : index + 1]) for index in range(len(greeting)))
    begin, proof = 0, b""
    for cut in [*sorted(cut % (len(answer) + 1) for cut in cuts), len(answer)]:
        proof += client.feed(answer[begin:cut])
        begin = cut
    assert client.tags is not None
    message = encode(FETCH)
    at_server.feed(proof + message[:4] + client.tags.sent.tag(message[4:]) + message[4:])
    assert at_server.tags is not None
    decoder = Decoder(UPWARD)
    decoder.tagger = at_server.tags.received
    assert list(decoder.feed(at_server.rest)) == [FETCH]


DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 10_000), st.integers(0, 7)),
        st.tuples(st.just("drop"), st.integers(0, COUNT - 1), st.just(0)),
        st.tuples(st.just("repeat"), st.integers(0, COUNT - 1), st.integers(0, COUNT - 1)),
        st.tuples(st.just("swap"), st.integers(0, COUNT - 1), st.integers(0, COUNT - 1)),
        st.tuples(st.just("cut"), st.integers(0, 10_000), st.just(0)),
        st.tuples(st.just("insert"), st.integers(0, COUNT - 1), st.just(0)),
    ),
    max_size=3,
)  # fmt: skip


def done_to(frames: list[bytes], deeds: list[tuple[str, int, int]]) -> bytes:
    frames = list(frames)
    for what, one, other in deeds:
        match what:
            case "drop" if frames:
                del frames[one % len(frames)]
            case "repeat" if frames:
                frames.insert(other % len(frames), frames[one % len(frames)])
            case "swap" if frames:
                one, other = one % len(frames), other % len(frames)  # noqa: PLW2901
                frames[one], frames[other] = frames[other], frames[one]
            case "insert":
                frames.insert(one, encode(m.HungUp()))
            case _:
                pass
    data = bytearray(b"".join(frames))
    for what, one, other in deeds:
        if what == "flip" and data:
            data[one % len(data)] ^= 1 << other
        elif what == "cut":
            del data[one % (len(data) + 1) :]
    return bytes(data)


@settings(max_examples=examples(1000), deadline=None)
@given(deeds=DEEDS)
def test_of_what_an_agent_says_a_beginning_comes_in_whatever_is_done_on_the_way(
    deeds: list[tuple[str, int, int]],
) -> None:
    client = Handshake([KEY], PROTOCOL, "member", b"c" * NONCE_BYTES, is_client=True)
    at_server = server()
    at_server.feed(client.feed(at_server.feed(client.begin())))
    assert client.tags is not None and at_server.tags is not None
    words: list[Any] = [r.Fetch("a", str(number), r.What.STATUS) for number in range(COUNT)]
    sent = client.tags.sent
    frames = [each[:4] + sent.tag(each[4:]) + each[4:] for each in map(encode, words)]
    decoder = Decoder(UPWARD)
    decoder.tagger = at_server.tags.received
    received = []
    try:
        for message in decoder.feed(done_to(frames, deeds)):
            received.append(message)  # noqa: PERF402  messages before the error count
    except (ProofError, WireError):
        pass  # the connection ends
    assert received == words[: len(received)]


@settings(max_examples=examples(500), deadline=None)
@given(
    text=st.binary(max_size=200).map(lambda text: text + b"]"),
    signed_by=st.sampled_from([KEY, OTHER, None]),
    change=st.integers(0, 10_000),
)
def test_a_cell_shows_what_an_agent_of_this_job_wrote_or_nothing(
    text: bytes, signed_by: Key | None, change: int
) -> None:
    signed = bytearray(sign(text, [signed_by] if signed_by else []))
    if change % 2 and signed:
        signed[change % len(signed)] ^= 1 << change % 8
    is_changed, words = change % 2 and signed, ""
    try:
        read = verify(bytes(signed), [KEY])
    except ForeignError as error:
        words = str(error)
        assert words.isprintable() and (is_changed or signed_by is not KEY)
    else:
        assert read == text and not is_changed and signed_by is KEY
