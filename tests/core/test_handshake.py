"""The proof at the start of a connection, and the message if it fails."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aelastic.errors import InputError
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import HEAD_BYTES, PROTOCOL, UPWARD, Decoder, OtherAgentError, encode
from aelastic.rdzv.protocol.handshake import (
    NONCE_BYTES,
    UNPROVED_BYTES_MAX,
    Handshake,
    OtherSecretError,
    ProofError,
    RefusedError,
    Tags,
)
from aelastic.rdzv.protocol.keys import Key
from aelastic.rdzv.protocol.other_secret import OtherSecret
from aelastic.rdzv.protocol.seals import ForeignError, claimed, sign, verify
from aelastic.rdzv.protocol.writing import NotTrustedError

OLD, NEW, OTHER = (Key(word * 32, "run") for word in (b"o", b"n", b"x"))
NODE = m.Node("a", "host-a", "trainer", 1, "", 29500)
HELLO = m.Hello(PROTOCOL, m.Terms("run", 1, 2, 0, 5.0), "token", "a", m.Status(NODE, m.Past(m.NodePhase.READY)))


def end(
    *keys: Key, is_client: bool, protocol: int = PROTOCOL, purpose: str = "member", nonce: bytes = b""
) -> Handshake:
    nonce = nonce or (b"C" if is_client else b"S") * NONCE_BYTES
    return Handshake(keys, protocol, purpose, nonce, is_client=is_client, source="/etc/secret")


def meet(client: Handshake, server: Handshake) -> tuple[Tags, Tags]:
    server.feed(client.feed(server.feed(client.begin())))
    assert client.tags is not None and server.tags is not None
    return client.tags, server.tags


def refusals(client: Handshake, server: Handshake) -> tuple[str, str]:
    """Each end's error about the other."""
    with pytest.raises(ProofError) as at_server:
        server.feed(client.feed(server.feed(client.begin())))
    with pytest.raises(ProofError) as at_client:
        client.feed(at_server.value.answer)
    return str(at_client.value), str(at_server.value)


def test_two_ends_with_a_secret_know_each_other_and_have_a_key_for_each_direction() -> None:
    client, server = meet(end(NEW, is_client=True), end(NEW, is_client=False))
    bodies = [b"one", b"two", b"two"]
    up, down = [client.sent.tag(body) for body in bodies], [server.sent.tag(body) for body in bodies]
    assert up == [server.received.tag(body) for body in bodies]
    assert down == [client.received.tag(body) for body in bodies]
    assert len({*up, *down}) == 6, "no two tags are equal"


@pytest.mark.parametrize(
    "of_client, of_server",
    [((OLD, NEW), (OLD,)), ((OLD,), (NEW, OLD)), ((NEW, OLD), (OLD, NEW)), ((NEW,), (OLD, NEW)), ((NEW, OLD), (NEW,))],
)
def test_while_a_secret_is_changed_each_step_meets_the_one_before(
    of_client: tuple[Key, ...], of_server: tuple[Key, ...]
) -> None:
    meet(end(*of_client, is_client=True), end(*of_server, is_client=False))


def test_another_secret_is_named_on_both_sides_and_no_proof_is_given() -> None:
    client, server = end(OTHER, is_client=True), end(NEW, OLD, is_client=False)
    there = f"{NEW.id[:4]} and {OLD.id[:4]}"
    assert refusals(client, server) == (
        f"it has a different secret (key {there} there, {OTHER.id[:4]} here in /etc/secret)",
        f"it has a different secret (key {OTHER.id[:4]} there, {there} here in /etc/secret)",
    )


def test_two_secrets_at_either_end_are_being_changed() -> None:
    for of_client, of_server, may_be_changed in (
        ([OTHER], [NEW, OLD], True),
        ([NEW, OLD], [OTHER], True),
        ([OTHER], [NEW], False),
    ):
        client, server = end(*of_client, is_client=True), end(*of_server, is_client=False)
        with pytest.raises(OtherSecretError) as caught:
            server.feed(client.begin())
        assert caught.value.may_be_changed == may_be_changed


def test_another_run_id_differs_from_another_secret() -> None:
    other_run = end(Key(b"n" * 32, "other"), is_client=True)
    assert (
        refusals(other_run, end(NEW, is_client=False))
        == ("it has another run id: use the same --rdzv-id on all nodes",) * 2
    )


def test_another_version_with_the_secret_is_reported_on_both_sides() -> None:
    reasons = refusals(end(NEW, is_client=True, protocol=PROTOCOL + 1), end(NEW, is_client=False))
    install = "install the same version of aelastic on all nodes"
    assert reasons[0] == f"it speaks protocol {PROTOCOL}, and this agent {PROTOCOL + 1}: {install}"
    assert reasons[1] == f"it speaks protocol {PROTOCOL + 1}, and this agent {PROTOCOL}: {install}"


def test_an_older_agent_gets_a_reason_in_words_that_it_understands() -> None:
    """Version 7 sends no proof and knows no secrets."""
    hello = json.loads(encode(HELLO)[HEAD_BYTES:])
    hello[1]["protocol"] = 7
    body = json.dumps(hello, separators=(",", ":")).encode()
    with pytest.raises(
        ProofError, match=f"it speaks protocol 7, and this agent {PROTOCOL}: install the same version"
    ) as caught:
        end(NEW, is_client=False).feed(len(body).to_bytes(HEAD_BYTES, "big") + body)
    name, fields = json.loads(caught.value.answer[HEAD_BYTES:])
    reason = f"this agent speaks protocol 7, and the job {PROTOCOL}: install the same version of aelastic on all nodes"
    assert name == "Refused" and fields == {"reason": reason, "is_final": True}


def test_an_agent_without_a_secret_learns_that_the_job_has_one() -> None:
    with pytest.raises(
        ProofError, match="it has no secret and the job has one: use the same --secret-file on every node"
    ) as caught:
        end(NEW, is_client=False).feed(encode(HELLO))
    assert b"this agent has no secret and the job has one: use" in caught.value.answer


def test_an_agent_with_a_secret_learns_that_the_job_has_none() -> None:
    client = end(NEW, is_client=True)
    with pytest.raises(OtherAgentError, match="this agent has a secret and the job has none") as caught:
        list(Decoder(UPWARD).feed(client.begin()))
    assert (
        caught.value.shown == "it has a secret and the job has none: use the same --secret-file on every node, or none"
    )
    with pytest.raises(RefusedError, match="it refuses: this agent has a secret and the job has none") as refused:
        client.feed(encode(m.Refused(str(caught.value), True)))
    assert refused.value.is_final


def test_a_leader_without_a_secret_is_not_waited_for() -> None:
    """Its record alone proves nothing, and a refusal that is not final lets the node try again."""
    other, untrusted = OtherSecret(), NotTrustedError("the cell was not written with this agent's secret")
    assert other.is_new("token", 100.0)
    assert other.judge(untrusted, "c10d at node0", 100.0) is untrusted
    other.take(RefusedError("retry", is_final=False))
    assert other.judge(untrusted, "c10d at node0", 100.0) is untrusted
    other.take(RefusedError("this agent has a secret and the job has none", is_final=True))
    error = other.judge(untrusted, "c10d at node0", 100.0)
    assert isinstance(error, InputError)
    assert str(error) == "c10d at node0: its leader refused this agent: this agent has a secret and the job has none"


def test_what_a_stranger_says_is_shown_without_control_characters() -> None:
    with pytest.raises(ProofError) as caught:
        end(NEW, is_client=True).feed(encode(m.Refused("\x1b[2J no\nline", True)))
    assert str(caught.value) == "it refuses: ?[2J no?line"


def test_a_proof_for_one_port_is_none_for_another() -> None:
    client, server = end(NEW, is_client=True), end(NEW, is_client=False, purpose="campaign")
    answer = server.feed(client.begin())
    with pytest.raises(ProofError, match="its proof is wrong"):
        client.feed(answer)


def test_what_one_end_said_is_not_proof_of_the_other() -> None:
    """Reflection attack: the peer echoes the greeting, so the proof that it requests is our own."""
    client = end(NEW, is_client=True)
    mirror = end(NEW, is_client=False)
    greeting = client.begin()
    mirrored = mirror.feed(greeting)
    proof = client.feed(mirrored)
    client = end(NEW, is_client=True)
    assert client.feed(client.begin()) == b"", "it awaits the proof"
    with pytest.raises(ProofError, match="its proof is wrong"):
        client.feed(proof)


def test_a_recorded_session_proves_nothing_a_second_time() -> None:
    client, server = end(NEW, is_client=True), end(NEW, is_client=False)
    greeting = client.begin()
    proof = client.feed(server.feed(greeting))
    again = end(NEW, is_client=False, nonce=b"another nonce of thirty-two byte")
    again.feed(greeting)
    with pytest.raises(ProofError, match="its proof is wrong"):
        again.feed(proof)


def test_before_the_proof_few_bytes_are_taken() -> None:
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        (10 << 20).to_bytes(4, "big") + b"x",
        UNPROVED_BYTES_MAX.to_bytes(4, "big") + b"y",
    ):
        with pytest.raises(ProofError, match="it is not an aelastic agent, and proved nothing"):
            end(NEW, is_client=False).feed(data)
    assert len(end(NEW, OLD, is_client=True).begin()) <= UNPROVED_BYTES_MAX


@pytest.mark.parametrize(
    "fields",
    [
        None, [], {}, {"protocol": 8}, {"protocol": True, "run": "", "keys": [], "nonce": "0" * 64},
        {"protocol": 8, "run": "0" * 8, "keys": "k", "nonce": "0" * 64}, {"protocol": 8, "run": "0" * 8, "keys": [1], "nonce": "0" * 64},
        {"protocol": 8, "run": "0" * 8, "keys": ["a", "b", "c"], "nonce": "0" * 64}, {"protocol": 8, "run": 1, "keys": [], "nonce": "0" * 64},
        {"protocol": 8, "run": "0" * 8, "keys": ["0" * 16], "nonce": "0" * 63}, {"protocol": 8, "run": "0" * 8, "keys": ["0" * 16], "nonce": None},
    ],
)  # fmt: skip
def test_a_greeting_of_another_form_is_none(fields: Any) -> None:
    body = json.dumps(["Hello", fields]).encode()
    with pytest.raises(ProofError, match="and proved nothing"):
        end(NEW, is_client=False).feed(len(body).to_bytes(4, "big") + body)


def test_a_frame_that_was_changed_repeated_left_out_or_moved_ends_the_connection() -> None:
    def frames() -> tuple[list[bytes], Decoder]:
        client, server = meet(end(NEW, is_client=True), end(NEW, is_client=False))
        decoder = Decoder(UPWARD)
        decoder.tagger = server.received
        plain = [encode(r.Fetch("a", str(number), r.What.STATUS)) for number in range(3)]
        return [each[:4] + client.sent.tag(each[4:]) + each[4:] for each in plain], decoder

    (one, two, three), decoder = frames()
    assert list(decoder.feed(one + two + three)) == [r.Fetch("a", str(number), r.What.STATUS) for number in range(3)]
    for index in range(4, len(one)):
        (one, two, three), decoder = frames()
        changed = bytes(each ^ (at == index) for at, each in enumerate(one))
        with pytest.raises(ProofError, match="altered on the way"):
            list(decoder.feed(changed))
    for order in ([0, 0], [1], [1, 0], [0, 2], [2, 1, 0]):
        sent, decoder = frames()
        with pytest.raises(ProofError, match="altered on the way"):
            list(decoder.feed(b"".join(sent[each] for each in order)))


# The cell.


def test_what_is_written_with_a_secret_is_read_with_it_alone() -> None:
    text = b'["StoredCell", {"term": 1}]'
    signed = sign(text, [NEW])
    name, fields, proof = json.loads(signed)
    assert (name, fields) == ("StoredCell", {"term": 1}) and proof.startswith("proof "), "people can read it"
    assert claimed(signed) == claimed(text) == text
    assert verify(signed, [NEW]) == verify(signed, [OLD, NEW]) == text
    assert sign(text, []) == verify(text, []) == text and verify(b"", [NEW]) == b""
    for keys, why in (
        ([], "its agents have a secret and this one has none"),
        ([OTHER], f"it was written with another secret \\(key {NEW.id[:4]}; ours is {OTHER.id[:4]}\\)"),
        ([Key(b"n" * 32, "other run")], "it was changed after it was signed, or has another run id"),
    ):
        with pytest.raises(ForeignError, match=why):
            verify(signed, keys)
    with pytest.raises(ForeignError, match="it was written without a secret"):
        verify(text, [NEW])


def test_no_part_of_what_is_written_can_be_changed() -> None:
    signed = sign(b'["StoredCell", {"term": 1}]', [NEW])
    for index in range(len(signed)):
        changed = signed[:index] + bytes([signed[index] ^ 1]) + signed[index + 1 :]
        with pytest.raises(ForeignError):
            verify(changed, [NEW])
