"""Messages with the right types that make no sense are refused, and the refusal names the field."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from kit import decided
from kit.stories.member import FAILURE, FIRST, LEASE_S, TERM, Story, assigned, busy, following, interrupted, leader_at
from kit.stories.member import stored as stored_cell

from aelastic.base.record import Record
from aelastic.diagnose.failures.failure import SHARED_FIELDS
from aelastic.errors import ProcessFailure
from aelastic.rdzv.leader.connections import Connections
from aelastic.rdzv.leader.coordinator import Coordinator
from aelastic.rdzv.leader.job_state import JobState, Participant, Round
from aelastic.rdzv.leader.leader import Leader
from aelastic.rdzv.leader.leader_cell import LeaderCell
from aelastic.rdzv.leader.leader_events import CellAnswered, DeadlinePassed, Opened, Received, WriteCell
from aelastic.rdzv.leader.plans import changed
from aelastic.rdzv.leader.roster import RoundRules
from aelastic.rdzv.ledger import Excluded, Ledger, Spent
from aelastic.rdzv.log import leader as leading
from aelastic.rdzv.log import node as log
from aelastic.rdzv.log.cell import Cell
from aelastic.rdzv.log.entries import Accepted, Entry
from aelastic.rdzv.log.node import Node
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.member_events import Phase
from aelastic.rdzv.member.search import BACK_OFF_MAX_S, TRUST_AGAIN_S
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import (
    CAMPAIGN,
    DOWNWARD,
    PROTOCOL,
    STORED,
    UPWARD,
    Decoder,
    WireError,
    encode,
    record_from_text,
    record_to_text,
)
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.rdzv.protocol.sense import ASKS_MAX, TERM_MAX, rule_of
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.restart_rules import RESTARTS_MAX, RULES_MAX

RANKS = assigned().ranks
NODE = m.Node("a", "host-a", "default", 1, "", 29500)
PAST = m.Past(m.NodePhase.BUSY, 1, 4)
READY = m.Past(m.NodePhase.READY)
PLAN = m.Plan(4, 5.0)
FAILED = PAST.replace(phase=m.NodePhase.FAILED, failure=FAILURE)
ASK = r.Ask("a", "a-1", r.Verb.STOP, "", 0.0, "")
TERMS = m.Terms("job", 1, 3, 3, LEASE_S)
KNOWS = log.Status(4, FIRST, None, (), (), ())
CELL = stored_cell(committed=FIRST)
PARTICIPANT = Participant("a", "a", "host-a", "default", 1, "10.0.0.1", 4712)
ROUND = Round(1, 4, (PARTICIPANT,), "10.0.0.1", 29500)


def planned(decision: m.LeaderMessage) -> m.Plan:
    """A node's plan with one decision."""
    return changed(PLAN, decision)


def status(node: m.Node = NODE, past: m.Past = READY, **others: Any) -> m.Status:
    return m.Status(node, past, **others)


def hello(*, terms: m.Terms = TERMS, name: str = "a", past: m.Past = READY, **others: Any) -> m.Hello:
    return m.Hello(PROTOCOL, terms, "t0k3n", name, status(past=past, **others))


def decode(message: Any) -> Any:
    (found,) = Decoder(UPWARD | DOWNWARD | CAMPAIGN | STORED).feed(encode(message))
    return found


@pytest.mark.parametrize(
    "field, message",
    [
        *(("lease_s", m.Plan(4, lease_s)) for lease_s in (0.0, -5.0, 1e300)),
        *(("term", m.Plan(term, 5.0)) for term in (-1, TERM_MAX + 1, 2**62)),
        *(("master_addr", planned(assigned().replace(master_addr=text))) for text in ("", "a\0b", "a\nb", "a b", "x" * 40_000)),
        *(("master_port", planned(assigned().replace(master_port=port))) for port in (0, -1, 2**16, 2**40)),
        *(("group_rank", planned(assigned().replace(ranks=RANKS.replace(group_rank=rank)))) for rank in (-7, 3, 2**40)),
        *(("world_size", planned(assigned().replace(ranks=RANKS.replace(world_size=size)))) for size in (-2, 0, 1, 2**62)),
        *(("ranks", planned(assigned().replace(ranks=RANKS.replace(first_rank=rank)))) for rank in (-1, 5)),
        *(("local_world_size", planned(assigned().replace(ranks=RANKS.replace(local_world_size=size)))) for size in (0, -1)),
        *(("role", planned(assigned().replace(ranks=RANKS.replace(role_world_size=size)))) for size in (0, 1, 7)),
        ("store_server", planned(assigned().replace(store_server="rm -rf"))),
        ("round", planned(assigned(0))),
        ("round", planned(assigned(2**62))),
        ("restart_count", planned(interrupted(1, -1))),
        ("cause", planned(m.Ended(m.Outcome.FAILED, decided.refused(), None))),
        ("number", planned(m.Look(1, "x", -1))),
        ("renewals", m.Heartbeat(False, -1)),
        ("again_s", planned(r.Cordoned("x", -1.0))),
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
        ("host", status(NODE.replace(host="h" * 256))),
        ("local_world_size", status(NODE.replace(local_world_size=0))),
        ("preferred_rank", status(NODE.replace(preferred_rank=-1))),
        ("vote_port", status(NODE.replace(vote_port=2**16))),
        ("log_name", status(NODE.replace(log_name="a b"))),
        ("round", status(past=PAST.replace(round=-1))),
        ("round", status(past=PAST.replace(round=2**40))),
        ("term", status(past=PAST.replace(term=TERM_MAX + 1))),
        ("alone_s", status(past=PAST.replace(alone_s=-1.0))),
        ("past", status(past=PAST.replace(round=0))),
        ("failed", hello(past=PAST.replace(phase=m.NodePhase.FAILED))),
        ("name", hello(name="")),
        ("name", hello(name="a\nb")),
        ("min_nodes", hello(terms=m.Terms("job", 0, 2, 0, 5.0))),
        ("max_nodes is below", hello(terms=m.Terms("job", 3, 2, 0, 5.0))),
        *(("term", status(log=KNOWS.replace(term=term))) for term in (-1, TERM_MAX + 1)),
        ("name", status(log=KNOWS.replace(ended=(log.EndedLeader("a b", None),)))),
        *(("term", status(log=KNOWS.replace(accepted=Accepted(FIRST, term)))) for term in (-1, TERM_MAX + 1)),
        ("number", status(log=KNOWS.replace(committed=FIRST.id._replace(number=-1)))),
        ("number", PLAN.replace(log=log.Plan(4, True, FIRST.replace(number=2**40), None, None))),
        ("term", m.Campaign(-1, None, leader_at())),
        ("addresses", m.Campaign(5, None, leader_at().replace(addresses=("h\x1b[2J",)))),
        ("addresses", m.Campaign(5, None, leader_at().replace(addresses=("h", "h")))),
        ("addresses", m.Campaign(5, None, leader_at().replace(addresses=tuple(map(str, range(17)))))),
        ("token", m.Campaign(5, None, leader_at().replace(token=""))),
        ("term", m.Declined(TERM_MAX + 1, "", None)),
        ("port", m.Declined(5, "", leader_at().replace(port=0))),
        ("term", CELL.replace(cell=CELL.cell.replace(term=-1))),
        ("renewals", CELL.replace(cell=CELL.cell.replace(renewals=-1))),
        ("incarnation", CELL.replace(cell=CELL.cell.replace(incarnation="a b"))),
        ("node_id", CELL.replace(leader=leader_at().replace(node_id="a b"))),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_the_name_of_its_field(field: str, message: Any) -> None:
    with pytest.raises(WireError, match=rf"^{type(message).__name__}\b.*{field}"):
        decode(message)


@pytest.mark.parametrize(
    "field, state",
    [
        ("spent", JobState(ledger=Ledger(spent=(Spent(0, 1.0),) * (RULES_MAX * RESTARTS_MAX + 1)))),
        ("excluded", JobState(ledger=Ledger(excluded=(Excluded("h", 1.0, 1.0, "x"),) * 99))),
        *(("at", JobState(ledger=Ledger(spent=(Spent(0, at),)))) for at in (-1.0, 1e300)),
        ("restart_count", JobState(restart_count=-1)),
        ("departed", JobState(departed=(1, 1))),
        ("departed", JobState(departed=(-1,))),
        ("ask_id", JobState(asks=(ASK.replace(ask_id=""),))),
        ("cause", JobState(verdict=m.Ended(m.Outcome.FAILED, decided.refused(), None))),
        ("term", JobState(ROUND.replace(term=-1))),
        ("master_port", JobState(ROUND.replace(master_port=0))),
        ("leader_rank", JobState(ROUND.replace(leader_rank=-2))),
        ("vote_port", JobState(ROUND.replace(participants=(PARTICIPANT.replace(vote_port=2**16),)))),
        ("address", JobState(ROUND.replace(participants=(PARTICIPANT.replace(address="a b"),)))),
        ("local_world_size", JobState(ROUND.replace(participants=(PARTICIPANT.replace(local_world_size=0),)))),
    ],
)  # fmt: skip
def test_what_makes_no_sense_in_an_entry_is_refused_by_the_name_of_its_field(field: str, state: JobState) -> None:
    with pytest.raises(WireError, match=rf"^JobState\b.*{field}"):
        record_from_text(JobState, record_to_text(state))


def test_each_field_of_each_message_has_a_rule() -> None:
    """Except fields whose type alone rules out invalid values."""
    seen: set[Any] = set()
    without: list[str] = []

    def look(kind: Any) -> None:
        if kind in seen or not (isinstance(kind, type) and issubclass(kind, Record)):
            return
        seen.add(kind)
        hints = get_type_hints(kind)
        for name in SHARED_FIELDS if kind is ProcessFailure else kind.__match_args__:
            inner = {hints[name], *getattr(hints[name], "__args__", ())}
            if inner & {int, float, str} and rule_of(kind, name) is None:
                without.append(f"{kind.__name__}.{name}")
            for each in inner:
                look(each)

    for kind in (*{**UPWARD, **DOWNWARD, **CAMPAIGN, **STORED}.values(), JobState):
        look(kind)
    assert {NodeRanks, m.Past, m.LeaderAt, log.Status, Entry, Cell, Participant, ProcessFailure} <= seen
    assert not without


@pytest.mark.parametrize(
    "text", ["\x1b[2Jx", "\x1b]0;title\x07x", "x\naelastic: E forged line", "x\r\x00\u202ey", "\ud800"]
)
def test_texts_that_people_read_move_no_cursor_and_begin_no_line(text: str) -> None:
    for message in (
        m.Refused(text, True), m.Goodbye(text, True), m.Declined(1, text),
        planned(m.Waiting(text)), planned(m.Interrupted(1, decided.lost(text, text))), planned(m.Look(1, text)),
        planned(m.Ended(m.Outcome.SUCCEEDED, decided.SUCCEEDED.replace(error=text, rule=text, cordoned=text))),
        planned(r.Answer("a-1", True, text)), planned(r.Cordoned(text, 0.0)), planned(m.Compared(1, text, (), False)),
        status(NODE.replace(host=text, role=text)), status(left=m.Left("a", text)), status(question=m.Hangs("a", 1, text, 1.0, False)),
    ):  # fmt: skip
        body = str(decode(message))
        assert not any(sign in body for sign in ("\\x1b", "\\x07", "\\n", "\\r", "\\x00", "\\u202e", "\\ud800"))


# Checks that only one end can make.


@pytest.mark.parametrize(
    "message",
    [
        m.Plan(TERM, LEASE_S / 2),
        m.Plan(TERM + m.TERMS_AHEAD_MAX + 1, LEASE_S),
        assigned(1, 4),
        assigned(1).replace(ranks=RANKS.replace(local_world_size=1)),
        assigned(1).replace(ranks=RANKS.replace(group_world_size=4)),
        interrupted(1, 4),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_leader_that_contradicts_this_agent_is_not_followed_and_leaves_nothing_behind(message: Any) -> None:
    story = busy()
    before = story.core.state.past, story.core.term, story.node.term, story.node.committed
    disconnect, waiting = story.receive(message)
    assert disconnect == ev.Disconnect() and isinstance(waiting, ev.Deliver) and isinstance(waiting.message, m.Waiting)
    field = type(message).__name__  # for a plan, the part that is wrong
    assert waiting.message.text.startswith(
        "ignoring the leader at 10.0.0.1:4004, which sent an invalid message: " + field
    )
    assert (story.core.state.past, story.core.term, story.node.term, story.node.committed) == before


def follow_and_distrust(story: Story) -> float:
    """The leader welcomes this node and sends garbage; returns for how long the node then leaves it alone."""
    story.handle(ev.ConnectionLost(story.core.conn, "Plan.term is -1", is_garbage=True))
    began = story.now
    while ev.ReadCell() not in story.pass_deadline():
        pass
    story.handle(ev.CellAnswered(stored_cell(renewals=int(story.now))), ev.Connected(story.core.conn + 1))
    story.receive(m.Plan(TERM, LEASE_S))
    assert story.core.phase is Phase.FOLLOWING
    return story.now - began


def test_a_leader_that_sends_garbage_is_asked_later_each_time() -> None:
    story = following()
    pauses = [follow_and_distrust(story) for _ in range(7)]
    assert pauses == sorted(pauses) and pauses[0] < 0.5
    assert pauses[-1] == pauses[-2] == pytest.approx(BACK_OFF_MAX_S)
    story.wait(LEASE_S / 2)
    for _ in range(int(TRUST_AGAIN_S / LEASE_S) * 4):  # it now behaves well
        story.receive(m.Heartbeat())
        story.wait(LEASE_S / 4)
    assert follow_and_distrust(story) == pytest.approx(pauses[0])


def leading_alone() -> Leader:
    """A leader with an empty endpoint and no other connections."""
    at = leader_at("boss", TERM)
    core, connections = (
        Coordinator(RoundRules(1, 3), RestartPolicy(3), "boss"),
        Connections(TERMS, at.token, TERM, 60.0),
    )
    campaign = leading.campaign(Node("boss"), TERM, 1, has_listened=True)
    leader = Leader(core, connections, campaign, at, "host-boss", True, LeaderCell("1f", LEASE_S), 100.0)
    leader.handle(DeadlinePassed(), 100.0)
    actions: list[Any] = leader.handle(CellAnswered(None), 100.0)
    while written := [each for each in actions if isinstance(each, WriteCell)]:
        actions = leader.handle(CellAnswered(written[-1].stored), 100.0)
    return leader


def test_a_term_that_no_log_has_counted_to_is_refused() -> None:
    """Nobody would follow a leader in a term above it, not even its current followers."""
    leader = leading_alone()
    assert leader.phase == "leading"
    leader.handle(Opened(1, "10.0.0.2", "10.0.0.1"), 100.0)
    far = 10**15  # a wall clock shows it in 33,658
    greeting = hello(log=KNOWS.replace(term=far, committed=None)).replace(token=leader.at.token)
    answers = [each.message for each in leader.handle(Received(1, greeting), 100.0) if hasattr(each, "message")]
    assert leader.term < far
    assert [type(each) for each in answers] == [m.Refused]
