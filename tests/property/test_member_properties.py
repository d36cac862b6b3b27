"""Whatever happens, in whatever order, a member keeps its rules: counted by a model of its own."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.effort import examples
from kit.stories.member import FAILURE, LEASE_S, NODE, SUCCEEDED, Story, assigned, interrupted, record

from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.member_events import Phase
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import DOWNWARD, to_text

RECORDS = [record(4), record(5, node_id="boss2"), record(4, renewals=1), record(4, renewals=2), record(6, node_id="me")]
MESSAGES = [
    m.Welcome(4, LEASE_S), m.Welcome(4, LEASE_S), m.Welcome(6, LEASE_S), m.Refused("x", False), m.Refused("x", True), m.Heartbeat(1), m.Probe(),
    m.Goodbye("x", False), m.Goodbye("x", True), assigned(1), assigned(2, 1), assigned(3, 1), interrupted(1), interrupted(2),
    SUCCEEDED, m.Waiting("x"),
]  # fmt: skip
RANDOM_EVENTS = st.one_of(
    st.sampled_from(["answer"] * 4 + ["deadline"] * 4 + [0.1, 30.0]),
    st.builds(ev.Received, st.integers(1, 6), st.sampled_from(MESSAGES)),
    st.sampled_from(MESSAGES),
    st.sampled_from(MESSAGES),
    st.builds(ev.Connected, st.integers(1, 6)),
    st.builds(ev.ConnectFailed, st.integers(1, 6), st.booleans(), st.just("x")),
    st.builds(ev.ConnectionLost, st.integers(1, 6), st.just("x")),
    st.sampled_from(
        [
            ev.Submitted(m.Ready(NODE)),
            ev.Submitted(m.Failed("me", 1, FAILURE)),
            ev.Submitted(m.Succeeded("me", 2)),
            ev.Submitted(m.Prepared("me", m.Starts.WARM)),
            ev.LeadershipLost(),
        ]
    ),
    st.sampled_from([ev.Submitted(m.Ready(NODE)), ev.Submitted(m.Left("me", "x"))]),
)
ANSWERS_OF_BOARD = st.sampled_from(
    [
        ev.BoardRead(None),
        *(ev.BoardRead(each) for each in RECORDS),
        ev.BoardRead(record(4, verdict=to_text(SUCCEEDED))),
        ev.NotEligible(),
        ev.BoardFailed("x"),
    ]
)


class Witness:
    """A link, a board and a supervisor that answer what was asked, and count what the member does."""

    def __init__(self) -> None:
        self.story = Story()
        self.asked: deque[ev.Action] = deque()  # the board owes answers, in this order
        self.conn = 0
        self.is_connected = False
        self.is_over = False
        self.round = 0
        self.is_in_round = False
        self.may_report = False  # its workers run, and have neither failed nor succeeded
        self.opened: set[int] = set()  # connections that were there

    def tell(self, event: ev.Event) -> None:
        if isinstance(event, ev.Submitted):
            self.may_report = False
            self.is_in_round &= not isinstance(event.message, m.Ready)
        if isinstance(event, ev.Connected) and event.conn == self.conn:
            self.is_connected = True
            self.opened.add(self.conn)
        if isinstance(event, ev.ConnectionLost | ev.ConnectFailed) and event.conn == self.conn:
            self.is_connected = False
        phase = self.story.core.phase
        actions = self.story.tell(event)
        assert not (self.is_over and actions), "nothing after the end"
        for action in actions:
            self.look_at(action, phase)
        if isinstance(event, ev.Submitted) and isinstance(event.message, m.Left):
            self.is_over = True
        assert self.is_over == (self.story.core.phase is Phase.OVER)
        assert (self.story.core.deadline is None) <= (
            self.is_over or self.story.core.phase in {Phase.IDLE, Phase.READING, Phase.CAMPAIGNING, Phase.CONNECTING}
        ), "what waits is woken"

    def look_at(self, action: Any, phase: Phase) -> None:
        match action:
            case ev.ReadBoard() | ev.Campaign():
                # A check of the board may be unanswered when the leader is lost, and the board is read.
                assert len(self.asked) < 1 + isinstance(action, ev.ReadBoard), "one question at a time"
                self.asked.append(action)
            case ev.Connect(conn):
                assert conn > self.conn, "numbers are never used twice"
                self.conn, self.is_connected = conn, False
            case ev.Disconnect():
                self.is_connected = False
            case ev.Send(message):
                assert self.is_connected, "sent without a connection"
                assert isinstance(message, m.Hello) <= (phase is Phase.CONNECTING)
            case ev.Deliver(m.Assigned(round_)):
                assert not self.is_in_round and round_ > self.round, "rounds come in order, one at a time"
                self.round, self.is_in_round, self.may_report = round_, True, True
            case ev.Deliver(m.Interrupted(round_)):
                assert self.is_in_round and round_ == self.round
                self.is_in_round = False
            case ev.Deliver(m.Ended()) | ev.GiveUp():
                self.is_over = self.story.core.phase is Phase.OVER

    def answer(self, answer: ev.Event) -> None:
        """The link or the board answers what was asked first."""
        if self.story.core.phase is Phase.CONNECTING:
            self.tell(ev.Connected(self.conn))
        elif self.asked:
            is_campaign = isinstance(self.asked.popleft(), ev.Campaign)
            self.tell(ev.BoardRead(None) if isinstance(answer, ev.NotEligible) and not is_campaign else answer)

    def can_be(self, event: Any) -> bool:
        match event:
            case ev.Submitted(m.Failed() | m.Succeeded()):
                return self.may_report
            case ev.Submitted(m.Prepared()):
                return self.story.core.state.node is not None
            case ev.Submitted() | ev.LeadershipLost():
                return True
            case ev.Received(conn) | ev.ConnectionLost(conn):
                return conn != self.conn or conn in self.opened  # some are in the mailbox when this node hangs up
            case ev.Connected(conn) | ev.ConnectFailed(conn):
                return conn != self.conn or self.story.core.phase is Phase.CONNECTING
            case _:
                return False

    def pass_deadline(self) -> None:
        core = self.story.core
        if core.deadline is not None:
            self.story.now = max(self.story.now, core.deadline)
            self.tell(ev.DeadlinePassed())
            later = self.story.core.deadline
            assert later is None or later > self.story.now, "what is due is done at once"


def test_the_rules_are_checked_after_each_event() -> None:
    story = Story()
    story.tell(ev.Submitted(m.Ready(NODE)))
    story.core.search.end()
    with pytest.raises(AssertionError, match="without a coordinator there is a limit to the search"):
        story.tell(ev.DeadlinePassed())


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(st.tuples(RANDOM_EVENTS, ANSWERS_OF_BOARD), max_size=60), st.sampled_from([0, 3, 4]))
def test_whatever_happens_a_member_keeps_its_rules(events: list[Any], prefix: int) -> None:
    witness = Witness()
    witness.tell(ev.Submitted(m.Ready(NODE)))
    first = [
        ("answer", ev.BoardRead(record())),
        ("answer", ev.NotEligible()),
        (m.Welcome(4, LEASE_S), ev.NotEligible()),
        (assigned(), ev.NotEligible()),
    ]
    for event, answer in first[:prefix] + events:
        if event == "answer":
            witness.answer(answer)
        elif event == "deadline":
            witness.pass_deadline()
        elif isinstance(event, float):
            witness.story.now += event
        elif witness.can_be(event):
            witness.tell(event)
        elif witness.is_connected and type(event).__name__ in DOWNWARD:
            witness.tell(ev.Received(witness.conn, event))
