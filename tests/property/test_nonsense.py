"""Whatever a peer says that is of the right types: it is refused, or the cores go on by their own rules."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kit import decided
from kit.effort import examples
from kit.stories.leader_terms import EPOCH, FAILURE, RENEWED, Term, hello, ready, running
from kit.stories.member import LEASE_S, NODE, SUCCEEDED, TERMS, Story, assigned, busy, greeting, interrupted, member

from aelastic.rdzv.coordinator import session_events as sev
from aelastic.rdzv.coordinator.session_events import DeadlinePassed
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.member_events import Phase
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import DOWNWARD, UPWARD, Decoder, WireError, encode

FENCE = m.fence_of(EPOCH, 1)
SEATS = m.Seats(FENCE, 1, "t0k3n", (m.Seat("me", "h", "a", 1), m.Seat("b", "h", "a", 2), m.Seat("c", "h", "a", 3)))
PAST = m.Past(m.Standing.FAILED, 1, 1, 0, 2, 0, FAILURE, epoch=EPOCH)
# One of each, true or nearly so; what is drawn differs from it in some places.
DOWN: list[Any] = [
    m.Welcome(4, LEASE_S), m.Refused("x", False), m.Heartbeat(1, True), m.Probe(), m.Goodbye("x", False),
    m.Departed(1, 0), SEATS, assigned(1), assigned(2, 1), interrupted(1), SUCCEEDED, m.Waiting("x"), m.StartAhead(),
    m.Ended(m.Outcome.FAILED, decided.refused(), FAILURE), m.Settled(1, decided.restart()),
]  # fmt: skip
UP: list[Any] = [
    hello("a", past=PAST), hello("a", past=PAST).replace(seats=SEATS, seen_epoch=EPOCH), hello("d"), m.Alive(FENCE),
    m.HungUp(), ready("a"), m.Failed("a", 1, FAILURE), m.Succeeded("a", 1), m.Prepared("a", m.Starts.WARM), m.Left("a", "x"),
]  # fmt: skip
ODD = st.sampled_from(
    [
        -(2**63), -7, -1, 0, 1, 2, 3, 4, 65536, 2**31, 2**40, 2**62, 2**63 - 1, FENCE, -5.0, 0.0, 1e-300, 1e300, None,
        "", "a", "me", "a\0b", "\x1b[2J", "a\nb", "x" * 300, "failed", "busy", "ready", True, False, [], [0, 0], [2**40],
    ]
)  # fmt: skip


@st.composite
def strange(draw: st.DrawFn, words: list[Any]) -> Any:
    """A message as it comes out of the decoder; `None` if that refuses it."""
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
    st.sampled_from([greeting, member, busy]),
    st.lists(st.one_of(strange(DOWN), st.sampled_from(["deadline", "answer", m.Welcome(4, LEASE_S)])), max_size=25),
)
def test_a_member_bears_what_a_coordinator_says(make: Any, said: list[Any]) -> None:
    story = make()
    core = story.core
    for what in said:
        if core.phase is Phase.OVER:
            break
        if what == "deadline":
            if core.deadline is not None:
                story.pass_deadline()
        elif what == "answer":
            answer_for(story)
        elif what is not None and core.phase in {Phase.GREETING, Phase.MEMBER}:
            story.hear(what)
        assert core.leader.lease_s == LEASE_S
        assert core.state.restart_count <= TERMS.max_restarts
        seats = core.state.seats
        assert seats is None or m.epoch_of(seats.fence, seats.round) <= max(core.leader.epoch, 4)
        greeted = core.outbox.greet(TERMS, core.record, core.state, core.leader.epoch, story.now)
        (again,) = Decoder(UPWARD).feed(encode(greeted))  # another agent takes what comes of it
        assert again == greeted


def answer_for(story: Story) -> None:
    match story.core.phase:
        case Phase.CONNECTING:
            story.tell(ev.Connected(story.core.conn))
        case Phase.READING | Phase.CAMPAIGNING:
            story.tell(ev.BoardRead(story.core.record))
        case Phase.MEMBER if story.core.state.standing is m.Standing.STOPPING:
            story.tell(ev.Submitted(m.Ready(NODE)))
        case _:
            pass


@settings(max_examples=examples(1500), deadline=None)
@given(st.booleans(), st.lists(st.tuples(st.sampled_from("abs"), strange(UP)), max_size=25), st.booleans())
def test_a_coordinator_bears_what_a_node_says(is_running: bool, said: list[Any], has_elections: bool) -> None:
    term = running("ab") if is_running else Term((2, 3))
    term.leader.sessions.electorate.is_on = has_elections
    term.open("s")
    for name, what in said:
        conn = term.conns.get(name)
        if what is None or conn not in term.leader.sessions._connections:
            term.open(name)
            continue
        told = term.tell(sev.Received(conn, what))
        for action in told:
            if isinstance(action, sev.Say):
                (again,) = Decoder(DOWNWARD).feed(encode(action.message))  # another agent takes what comes of it
                assert again == action.message
        if sev.Renew() in told and term.leader.lease.is_asked:
            term.tell(RENEWED)
        if term.leader.deadline is not None:
            term.now = max(term.now, term.leader.deadline)
            term.tell(DeadlinePassed())
        assert term.coordinator.forming.restart_count <= 3
