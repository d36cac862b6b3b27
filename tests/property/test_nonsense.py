"""Any message of a peer with valid types is refused, or the cores continue by their own rules."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import decided
from kit.effort import examples
from kit.stories.leader_terms import FAILURE, TERM, Term, hello, node, running, voting
from kit.stories.member import (
    FIRST,
    LEASE_S,
    NODE,
    SUCCEEDED,
    TERMS,
    VOTERS,
    Story,
    after,
    assigned,
    busy,
    following,
    greeting,
    interrupted,
    of_log,
    stored,
)

from aelastic.rdzv.leader import leader_events as sev
from aelastic.rdzv.leader.leader_events import DeadlinePassed
from aelastic.rdzv.leader.plans import changed
from aelastic.rdzv.log import node as log
from aelastic.rdzv.log.entries import Accepted
from aelastic.rdzv.log.node import Close, Node
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.member_events import Phase
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import DOWNWARD, PROTOCOL, UPWARD, Decoder, WireError, encode

FENCE = m.fence_of(TERM, 1)
PAST = m.Past(m.NodePhase.FAILED, 1, TERM, FAILURE)
SECOND = after(FIRST, *VOTERS)
# One message of each kind, valid or nearly so; drawn messages differ from it in some places.
WELCOME = m.Plan(TERM, LEASE_S, of_log(committed=None))
DECISIONS: list[Any] = [
    assigned(1), assigned(2, 1), interrupted(1), SUCCEEDED, m.Waiting("x"), m.StartAhead(),
    m.Ended(m.Outcome.FAILED, decided.refused(), FAILURE), m.Settled(1, decided.restart()), m.Look(1, "a hang", 1),
    m.Compared(1, "rank 1", (1,), False, number=1), r.Notice(4001, 1, r.Stage.FREEZE, kill_s=60.0), r.Cordoned("x", 60.0, 1),
    r.Answer("me-1", True, "x"),
]  # fmt: skip
DOWN: list[Any] = [
    WELCOME, m.Refused("x", False), m.Heartbeat(True, 1), m.Probe(), m.Goodbye("x", False), m.Goodbye("x", True), m.GivenUp(),
    r.Answer("me-1", True, "x"), r.Show(r.Fetch("b", "b-1", r.What.STATUS)),
    r.Shown(r.Fetched("b", "me", "me-1", "0", "x")),
    *(changed(plan, each) for each in DECISIONS for plan in (WELCOME, changed(WELCOME, assigned(1)))),
    *(WELCOME.replace(log=each) for each in (
        of_log(), of_log(committed=FIRST.id), of_log(proposal=SECOND), of_log(is_leading=False),
        log.Plan(TERM, True, FIRST, SECOND.id, Accepted(FIRST, TERM)))),
]  # fmt: skip
WAITS = m.Status(node("a"), m.Past(m.NodePhase.READY), 1)
BUSY = m.Past(m.NodePhase.BUSY, 1, TERM)
ASK = r.Ask("a", "a-1", r.Verb.DRAIN, "", 60.0, "x")
UP: list[Any] = [
    hello("a", past=PAST), hello("d"), m.Alive(), m.HungUp(), WAITS, WAITS.replace(ready_count=2), WAITS.replace(past=BUSY),
    *(hello("a", past=BUSY, log=each) for each in (
        log.Status(TERM, None, None, (), (), ()), log.Status(TERM, FIRST, Accepted(SECOND, TERM), (), (), ()),
        log.Status(TERM, FIRST.id, None, (log.EndedLeader("b", None),), ("b",), ("a 1",)))),
    WAITS.replace(past=PAST), WAITS.replace(past=BUSY.replace(phase=m.NodePhase.FINISHED)),
    WAITS.replace(past=BUSY.replace(phase=m.NodePhase.STOPPING)), WAITS.replace(past=BUSY.replace(has_opted_in=True)),
    WAITS.replace(node=node("a").replace(starts=m.Starts.WARM), prepared_count=1), WAITS.replace(left=m.Left("a", "x")),
    *(WAITS.replace(past=BUSY, asks=(ASK.replace(verb=verb),)) for verb in r.Verb),
    WAITS.replace(past=BUSY, frozen=r.Frozen("a", 4001, 1, 1, 0), saved=r.Saved("a", 4001)),
    WAITS.replace(past=BUSY, question=m.Hangs("a", 1, "x", 60.0, True, number=1), places=m.Saw("a", 1, (), 1)),
    r.Fetch("a", "a-2", r.What.STATUS), r.Fetched("a", "a", "a-2", "0", "x"),
]  # fmt: skip
# A supervisor's messages, at any moment.
SUBMITTED: list[Any] = [
    m.Ready(NODE), m.Failed("me", 1, FAILURE), m.Succeeded("me", 1), m.Prepared("me", m.Starts.READY), m.OptedIn("me", 1),
    m.Hangs("me", 1, "x", 60.0, True), m.Hangs("me", 1, "x", 60.0, True, is_last=True), m.Saw("me", 1, ()),
    r.Ask("me", "me-1", r.Verb.DRAIN, "", 60.0, "x"), r.Ask("me", "me-2", r.Verb.CANCEL, "", 0.0, ""),
    r.Frozen("me", 4001, 1, 1, 0), r.Saved("me", 4001), r.Fetch("me", "me-3", r.What.STATUS),
    r.Fetched("me", "b", "b-1", "0", "x"),
]  # fmt: skip
ODD = st.sampled_from(
    [
        -(2**63), -7, -1, 0, 1, 2, 3, 4, 65536, 2**31, 2**40, 2**62, 2**63 - 1, FENCE, -5.0, 0.0, 1e-300, 1e300, None,
        "", "a", "me", "a\0b", "\x1b[2J", "a\nb", "x" * 300, "failed", "busy", "ready", True, False, [], [0, 0], [2**40],
    ]
)  # fmt: skip


@st.composite
def strange(draw: st.DrawFn, words: list[Any]) -> Any:
    """A message as it comes out of the decoder; `None` if the decoder refuses it."""
    value = json.loads(encode(draw(st.sampled_from(words)))[4:])
    for _ in range(draw(st.integers(0, 3))):
        where: Any = value[1]
        while isinstance(where, dict | list) and where:
            key = draw(st.sampled_from(sorted(where) if isinstance(where, dict) else range(len(where))))
            if isinstance(where[key], dict | list) and where[key] and draw(st.integers(0, 3)):
                where = where[key]
            else:
                where[key] = copy.deepcopy(draw(ODD))
                break
    body = json.dumps(value).encode()
    try:
        (message,) = Decoder(UPWARD | DOWNWARD).feed(len(body).to_bytes(4, "big") + body)
    except WireError:
        return None
    return message


@settings(max_examples=examples(1500), deadline=None)
@given(
    st.sampled_from([greeting, following, busy]),
    st.lists(
        st.one_of(strange(DOWN), st.sampled_from(["deadline", "answer", WELCOME, *map(ev.Submitted, SUBMITTED)])),
        max_size=25,
    ),
)
def test_a_member_bears_what_a_leader_says(make: Any, steps: list[Any]) -> None:
    story = make()
    core = story.core
    for what in steps:
        if core.phase is Phase.OVER:
            break
        if what == "deadline":
            if core.deadline is not None:
                story.pass_deadline()
        elif what == "answer":
            answer_for(story)
        elif isinstance(what, ev.Submitted):
            submit(story, what)
        elif what is not None and core.phase in {Phase.CONNECTING, Phase.FOLLOWING}:
            check(story.receive(what))
        assert core.state.restart_count <= TERMS.max_restarts
        assert core.term <= TERM + m.TERMS_AHEAD_MAX
        known = None if core.log is None else log.status_of(core.log)
        status = core.state.status_at(story.now).replace(log=known)
        check([ev.Send(m.Hello(PROTOCOL, TERMS, "t0k3n", "me", status))])


def check(actions: list[Any]) -> None:
    """Checks that another agent accepts the resulting messages."""
    for action in actions:
        if isinstance(action, ev.Send):
            (again,) = Decoder(UPWARD).feed(encode(action.message))
            assert again == action.message


def submit(story: Story, event: ev.Submitted) -> None:
    """Submits a supervisor's message where it is possible: workers have ended, or are running."""
    phase = story.core.state.phase
    if isinstance(event.message, m.Ready) and phase in {m.NodePhase.BUSY, m.NodePhase.FINISHED}:
        return
    check(story.handle(event))


@pytest.mark.parametrize("place", ["an attempt", "a greeting", "a leader"])
@pytest.mark.parametrize(
    "then", [m.Failed("me", 1, FAILURE), m.Hangs("me", 1, "x", 60.0, True, is_last=True)], ids=["failed", "last"]
)
def test_a_hang_may_be_reported_on_any_connection_before_anything_is_received_on_it(
    place: str, then: m.NodeMessage
) -> None:
    story = busy()
    if place != "a leader":
        story.lose_leader(Close.ABORTED)
    if place == "a greeting":
        story.handle(ev.Connected(story.core.conn))
    assert story.core.phase is (Phase.FOLLOWING if place == "a leader" else Phase.CONNECTING)
    for message in (m.Hangs("me", 1, "x", 60.0, True), then):
        check(story.handle(ev.Submitted(message)))
    status = story.core.state.status_at(story.now)
    assert status.question is not None and status.question.is_last == isinstance(then, m.Hangs)
    assert (status.past.failure is None) == isinstance(then, m.Hangs)


def answer_for(story: Story) -> None:
    """Answers pending questions."""
    core = story.core
    if core.sight.is_asked:
        cell = stored("other", TERM + 1, renewals=int(story.now))
        story.handle(ev.CellAnswered(cell) if core.conn % 2 else ev.CellFailed("no answer"))
    elif core.phase is Phase.CONNECTING:
        story.handle(ev.Connected(core.conn))
    elif core.phase is Phase.CAMPAIGNING:
        story.handle(ev.LeadershipLost(Node("me", TERM + 1, committed=FIRST), f"me-{story.now}", "too few nodes voted"))
    elif core.phase is Phase.FOLLOWING and core.state.phase is m.NodePhase.STOPPING:
        story.handle(ev.Submitted(m.Ready(NODE)))


@settings(max_examples=examples(1500), deadline=None)
@given(
    st.sampled_from([lambda: Term((2, 3)), lambda: running("ab"), lambda: voting("abc")]),
    st.lists(st.tuples(st.sampled_from("abs"), strange(UP)), max_size=25),
)
def test_a_leader_bears_what_a_node_says(make: Any, steps: list[Any]) -> None:
    term = make()
    term.open("s")
    for name, what in steps:
        conn = term.conns.get(name)
        if what is None or conn is None or not term.leader.connections.is_open(conn):
            term.open(name)
            continue
        answers = [each.message for each in term.handle(sev.Received(conn, what)) if isinstance(each, sev.SendTo)]
        for message in (*answers, *term.plans.values()):
            if type(message).__name__ in DOWNWARD:  # otherwise it is a part of a plan
                (again,) = Decoder(DOWNWARD).feed(encode(message))  # another agent accepts the result
                assert again == message
        if term.leader.deadline is not None:
            term.now = max(term.now, term.leader.deadline)
            term.handle(DeadlinePassed())
        assert term.coordinator.forming.restart_count <= 3
