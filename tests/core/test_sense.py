"""What has the right types and makes no sense: it is refused, and what refuses it names the field."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from kit import decided
from kit.stories.leader_terms import EPOCH, FAILURE, hello, running
from kit.stories.member import LEASE_S, Story, assigned, busy, interrupted, member

from aelastic.core.record import Record
from aelastic.errors import ProcessFailure
from aelastic.failures.failure import SHARED_FIELDS
from aelastic.rdzv.coordinator.plans import changed
from aelastic.rdzv.ledger import Excluded, Ledger, Spent
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.search import BACK_OFF_MAX_S, TRUST_AGAIN_S
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import BALLOT, DOWNWARD, UPWARD, Decoder, WireError, encode
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.rdzv.protocol.sense import ASKS_MAX, rule_of
from aelastic.rdzv.restart_rules import RESTARTS_MAX, RULES_MAX

RANKS = assigned().ranks
NODE = m.Node("a", "host-a", "default", 1, "", 29500)
PAST = m.Past(m.Standing.BUSY, 1, 0, 0, 2)
READY = m.Past(m.Standing.READY)
PLAN = m.Plan(4, 5.0)
FAILED = PAST.replace(standing=m.Standing.FAILED, failure=FAILURE)
ASK = r.Ask("a", "a-1", r.Verb.STOP, "", 0.0, "")
SEAT = m.Seat("a", "host-a", "10.0.0.1", 4000)


def planned(decision: m.CoordinatorMessage) -> m.Plan:
    """The plan of a node about which one thing is decided."""
    return changed(PLAN, decision)


def status(node: m.Node = NODE, past: m.Past = READY, **others: Any) -> m.Status:
    return m.Status(node, past, **others)


def decode(message: Any) -> Any:
    (found,) = Decoder(UPWARD | DOWNWARD | BALLOT).feed(encode(message))
    return found


@pytest.mark.parametrize(
    "field, message",
    [
        *(("lease_s", m.Plan(4, lease_s)) for lease_s in (0.0, -5.0, 1e300)),
        ("spent", planned(assigned().replace(ledger=Ledger(spent=(Spent(0, 1.0),) * (RULES_MAX * RESTARTS_MAX + 1))))),
        ("excluded", planned(assigned().replace(ledger=Ledger(excluded=(Excluded("h", 1.0, 1.0, "x"),) * 99)))),
        *(("at", planned(assigned().replace(ledger=Ledger(spent=(Spent(0, at),))))) for at in (-1.0, 1e300)),
        *(("epoch", m.Plan(epoch, 5.0)) for epoch in (-1, 2**62)),
        *(("master_addr", planned(assigned().replace(master_addr=text))) for text in ("", "a\0b", "a\nb", "a b", "x" * 40_000)),
        *(("master_port", planned(assigned().replace(master_port=port))) for port in (0, -1, 2**16, 2**40)),
        *(("group_rank", planned(assigned().replace(ranks=RANKS.replace(group_rank=rank)))) for rank in (-7, 3, 2**40)),
        *(("world_size", planned(assigned().replace(ranks=RANKS.replace(world_size=size)))) for size in (-2, 0, 1, 2**62)),
        *(("ranks", planned(assigned().replace(ranks=RANKS.replace(first_rank=rank)))) for rank in (-1, 5)),
        *(("local_world_size", planned(assigned().replace(ranks=RANKS.replace(local_world_size=size)))) for size in (0, -1)),
        *(("role", planned(assigned().replace(ranks=RANKS.replace(role_world_size=size)))) for size in (0, 1, 7)),
        ("coordinator_rank", planned(assigned().replace(coordinator_rank=3))),
        ("store_server", planned(assigned().replace(store_server="rm -rf"))),
        ("round", planned(assigned(0))),
        ("round", planned(assigned(2**62))),
        ("restart_count", planned(interrupted(1, -1))),
        ("cause", planned(m.Ended(m.Outcome.FAILED, decided.refused(), None))),
        ("group_rank", m.Departed(1, -1)),
        ("number", planned(m.Look(1, "x", -1))),
        ("again_s", planned(r.Benched("x", -1.0))),
        ("notice_id", planned(r.Notice(2**63 - 1, 1, r.Stage.FREEZE))),
        ("answers", PLAN.replace(answers=(r.Answer("1", True, ""),) * (ASKS_MAX + 1))),
        ("exitcode", status(past=FAILED.replace(failure=FAILURE.replace(exitcode=2**40)))),
        ("rank", status(past=FAILED.replace(failure=FAILURE.replace(rank=-7)))),
        ("failure_age_s", status(past=FAILED.replace(failure_age_s=-1.0))),
        ("node_id", status(NODE.replace(node_id=""))),
        ("ready_count", status(ready_count=-1)),
        ("prepared_count", status(prepared_count=2**40)),
        ("asks", status(asks=(ASK,) * (ASKS_MAX + 1))),
        ("another node", status(asks=(ASK.replace(node_id="b"),))),
        ("another node", status(frozen=r.Frozen("b", 1, 1, 1, 0))),
        ("another node", status(saved=r.Saved("b", 1))),
        ("another node", status(question=m.Hangs("b", 1, "x", 1.0, False))),
        ("another node", status(places=m.Saw("b", 1, ()))),
        ("another node", status(left=m.Left("b", "x"))),
        ("fence", m.Seats(2**62, 1, "s", (SEAT,))),
        ("fence", m.Seats(4_002, 1, "s", (SEAT,))),
        ("seats", m.Seats(4_001, 1, "s", (SEAT, SEAT))),
        ("seats", m.Seats(4_001, 1, "s", ())),
        ("seats", m.Seats(4_001, 1, "s", tuple(SEAT.replace(node_id=str(i)) for i in range(m.SEATS_MAX + 1)))),
        ("host", status(NODE.replace(host="h" * 256))),
        ("local_world_size", status(NODE.replace(local_world_size=0))),
        ("preferred_rank", status(NODE.replace(preferred_rank=-1))),
        ("ballot_port", status(NODE.replace(ballot_port=2**16))),
        ("departed", hello("a", past=PAST.replace(departed=(1, 1)))),
        ("departed", hello("a", past=PAST.replace(departed=(2,)))),
        ("group_rank", hello("a", past=PAST.replace(group_rank=-1))),
        ("restart_count", hello("a", past=PAST.replace(restart_count=4))),
        ("restart_count", hello("a", past=PAST.replace(restart_count=2**40))),
        ("group_world_size", hello("a", past=PAST.replace(group_world_size=4))),
        ("round", hello("a", past=m.Past(m.Standing.READY, restart_count=3))),
        ("failed", hello("a", past=PAST.replace(standing=m.Standing.FAILED))),
        ("seen_epoch", hello("a").replace(kept=m.Kept(seats=m.Seats(4_001, 1, "s", (SEAT,))), seen_epoch=3)),
        ("ended", hello("a").replace(kept=m.Kept(ended=("b", "b")))),
        ("min_nodes", hello("a", terms=m.Terms("job", 3, 2, 0, 5.0))),
        ("addresses", m.Vote(4_001, "s", m.Elected(1, "a", ("h\x1b[2J",), 1, "t"))),
        ("port", m.Voted(True, 1, "", m.Elected(1, "a", ("h",), 0, "t"))),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_the_name_of_its_field(field: str, message: Any) -> None:
    with pytest.raises(WireError, match=rf"^{type(message).__name__}\b.*{field}"):
        decode(message)


def test_each_field_of_each_message_has_a_rule() -> None:
    """Or its type leaves nothing to ask for."""
    seen: set[Any] = set()

    def look(kind: Any) -> None:
        if kind in seen or not (isinstance(kind, type) and issubclass(kind, Record)):
            return
        seen.add(kind)
        hints = get_type_hints(kind)
        for name in SHARED_FIELDS if kind is ProcessFailure else kind.__match_args__:
            inner = {hints[name], *getattr(hints[name], "__args__", ())}
            if inner & {int, float, str}:
                assert rule_of(kind, name) is not None, f"{kind.__name__}.{name}"
            for each in inner:
                look(each)

    for kind in {**UPWARD, **DOWNWARD, **BALLOT}.values():
        look(kind)
    assert {NodeRanks, m.Past, m.Seat, m.Elected, ProcessFailure} <= seen


@pytest.mark.parametrize(
    "text", ["\x1b[2Jx", "\x1b]0;title\x07x", "x\naelastic: E forged line", "x\r\x00\u202ey", "\ud800"]
)
def test_texts_that_people_read_move_no_cursor_and_begin_no_line(text: str) -> None:
    for message in (
        m.Refused(text, True), m.Goodbye(text, True), m.Voted(True, 1, text),
        planned(m.Waiting(text)), planned(m.Interrupted(1, decided.lost(text, text))), planned(m.Look(1, text)),
        planned(m.Ended(m.Outcome.SUCCEEDED, decided.SUCCEEDED.replace(error=text, rule=text, cordoned=text))),
        planned(r.Answer("a-1", True, text)), planned(r.Benched(text, 0.0)), planned(m.Compared(1, text, (), False)),
        status(NODE.replace(host=text, role=text)), status(left=m.Left("a", text)), status(question=m.Hangs("a", 1, text, 1.0, False)),
    ):  # fmt: skip
        body = str(decode(message))
        assert not any(sign in body for sign in ("\\x1b", "\\x07", "\\n", "\\r", "\\x00", "\\u202e", "\\ud800"))


# What only one end can judge.


@pytest.mark.parametrize(
    "message",
    [
        m.Plan(4, LEASE_S / 2),
        m.Plan(4 + m.EPOCHS_AHEAD_MAX + 1, LEASE_S),
        assigned(1, 4),
        assigned(1).replace(ranks=RANKS.replace(local_world_size=1)),
        assigned(1).replace(ranks=RANKS.replace(group_world_size=4)),
        interrupted(1, 4),
        m.Seats(5_007, 7, "secret", (SEAT,)),
        m.Seats(4_007, 7, "secret", tuple(SEAT.replace(node_id=str(i)) for i in range(4))),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_coordinator_that_contradicts_this_agent_is_not_followed_and_leaves_nothing_behind(message: Any) -> None:
    story = busy()
    before = story.core.state.past, story.core.state.seats, story.core.leader.lease_s, story.core.leader.epoch
    disconnect, told = story.hear(message)
    assert disconnect == ev.Disconnect() and isinstance(told, ev.Deliver) and isinstance(told.message, m.Waiting)
    field = type(message).__name__  # of a plan, what in it is wrong
    assert told.message.text.startswith("ignoring the leader at 10.0.0.1:4004, which sent an invalid message: " + field)
    assert (story.core.state.past, story.core.state.seats, story.core.leader.lease_s, story.core.leader.epoch) == before


def follow_and_distrust(story: Story) -> float:
    """The coordinator welcomes this node and sends garbage; gives for how long it is left alone then."""
    conn = story.core.conn
    story.tell(ev.ConnectionLost(conn, "Alive.fence is -1", is_reset=True, is_garbage=True))
    began = story.now
    while ev.ReadBoard() not in story.pass_deadline():
        pass
    story.tell(ev.BoardRead(story.core.record), ev.Connected(story.core.conn + 1))
    story.hear(m.Plan(4, LEASE_S))
    return story.now - began


def test_a_coordinator_that_sends_garbage_is_asked_later_each_time() -> None:
    story = member(renewals=1)
    pauses = [follow_and_distrust(story) for _ in range(7)]
    assert pauses == sorted(pauses) and pauses[0] < 0.5
    assert pauses[-1] == pauses[-2] == pytest.approx(BACK_OFF_MAX_S)
    story.be_silent_until(story.now + LEASE_S / 2)
    for _ in range(int(TRUST_AGAIN_S / LEASE_S) * 4):  # it is a good one now
        story.hear(m.Heartbeat(1))
        story.be_silent_until(story.now + LEASE_S / 4)
    assert follow_and_distrust(story) == pytest.approx(pauses[0])


@pytest.mark.parametrize(
    "past",
    [
        m.Past(m.Standing.READY, 1, 3),
        m.Past(m.Standing.READY, 1, 3, 0, 2, epoch=EPOCH),
        m.Past(m.Standing.READY, 7, 3, 0, 2, epoch=EPOCH),
    ],
    ids=["no seat", "a seat of the round", "a seat of a later round"],
)
def test_a_node_that_was_not_in_the_round_uses_up_none_of_its_restarts(past: m.Past) -> None:
    term = running("ab")
    term.join("s", past=past)
    interruptions = [each for each in term.hears(term.fail("a"))["b"] if isinstance(each, m.Interrupted)]
    assert interruptions == [m.Interrupted(1, decided.restart(1, 3, decided.failed(0, "host-a")), 1)]


def test_an_epoch_that_no_board_has_counted_to_is_refused() -> None:
    term = running("ab")
    (said, _) = term.join("s", seen_epoch=10**13)
    assert said.message == m.Refused(f"Hello.seen_epoch is {10**13}, and the job's is {EPOCH}", True)
