"""A member: how a node finds the coordinator, stays with it, and becomes it; events in, actions out."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.effort import examples

from aelastic.errors import ProcessFailure
from aelastic.rdzv import board
from aelastic.rdzv.board import LeaderRecord
from aelastic.rdzv.member import member_events
from aelastic.rdzv.member.member import GLANCE_LEASES, GREETING_LEASES, LOOK_AGAIN_S, NOTE_INTERVAL_S, Member, Phase
from aelastic.rdzv.member.member_events import (
    BoardFailed,
    BoardRead,
    Campaign,
    Connect,
    Connected,
    ConnectFailed,
    ConnectionLost,
    DeadlinePassed,
    Deliver,
    Disconnect,
    Event,
    GiveUp,
    Lead,
    LeadershipLost,
    NotEligible,
    ReadBoard,
    Received,
    Send,
    Submitted,
)
from aelastic.rdzv.protocol.codec import DOWNWARD, PROTOCOL, to_text
from aelastic.rdzv.protocol.messages import (
    Alive,
    Assigned,
    Ended,
    Failed,
    Goodbye,
    Heartbeat,
    Hello,
    Interrupted,
    Left,
    Node,
    Outcome,
    Past,
    Probe,
    Ready,
    Refused,
    Standing,
    Succeeded,
    Terms,
    Waiting,
    Welcome,
)
from aelastic.rdzv.protocol.ranks import NodeRanks

LEASE_S = 6.0
JOIN_S = 60.0
TERMS = Terms("job", 1, 3, 3)
NODE = Node("me", "host-me", "default", 2, "", 29500)
FAILURE = ProcessFailure.from_elsewhere("host-me", 2, 0, 77, 1, "ValueError: batch is empty", "", 1000)
RANKS = NodeRanks(
    group_rank=1,
    group_world_size=3,
    first_rank=2,
    world_size=6,
    first_role_rank=2,
    role_world_size=6,
    local_world_size=2,
)
SUCCEEDED = Ended(Outcome.SUCCEEDED, "every worker succeeded")


def record(
    epoch: int = 4, *, node_id: str = "boss", renewals: int | None = None, verdict: str = "", token: str = ""
) -> LeaderRecord:
    candidate = board.Candidate(node_id, ("10.0.0.1",), 4000 + epoch, token or f"{node_id} {epoch}")
    return LeaderRecord(epoch, candidate, renewals, verdict)


def assigned(round_: int = 1, restart_count: int = 0) -> Assigned:
    return Assigned(round_, restart_count, RANKS, "10.0.0.1", 29500, 0)


def interrupted(round_: int = 1, restart_count: int = 1) -> Interrupted:
    return Interrupted(round_, "rank 0 failed on host-x", restart_count)


class Story:
    """A member, and the clock it is told."""

    def __init__(self) -> None:
        self.core = Member("me", TERMS, LEASE_S, JOIN_S)
        self.now = 100.0

    def tell(self, *events: Event) -> list[Any]:
        """What the last of the events is answered with."""
        actions: list[Any] = []
        for event in events:
            actions = self.core.handle(event, self.now)
        return actions

    def hear(self, *messages: Any) -> list[Any]:
        return self.tell(*(Received(self.core.conn, message) for message in messages))

    def pass_deadline(self) -> list[Any]:
        assert self.core.deadline is not None
        self.now = max(self.now, self.core.deadline)
        return self.tell(DeadlinePassed())

    def be_silent_until(self, time: float) -> list[Any]:
        """Lets time pass, and the coordinator say nothing; all that is done."""
        done: list[Any] = []
        while self.core.deadline is not None and self.core.deadline <= time:
            done += self.pass_deadline()
        self.now = max(self.now, time)
        return done

    @property
    def hello(self) -> Hello:
        """What it says when it is connected."""
        (said,) = self.tell(Connected(self.core.conn))
        assert isinstance(said, Send) and isinstance(said.message, Hello)
        return said.message

    @property
    def left_s(self) -> float:
        assert self.core.deadline is not None
        return self.core.deadline - self.now


def idle() -> Story:
    return Story()


def reading() -> Story:
    story = Story()
    story.tell(Submitted(Ready(NODE)))
    return story


def campaigning() -> Story:
    story = reading()
    story.tell(BoardRead(None))
    return story


def pausing() -> Story:
    story = reading()
    story.tell(BoardFailed("no answer"))
    return story


def connecting() -> Story:
    story = reading()
    story.tell(BoardRead(record()))
    return story


def greeting() -> Story:
    story = connecting()
    story.tell(Connected(1))
    return story


def member(renewals: int | None = None) -> Story:
    story = reading()
    story.tell(BoardRead(record(renewals=renewals)), Connected(1), Received(1, Welcome(4, LEASE_S)))
    return story


def busy() -> Story:
    story = member()
    story.hear(assigned())
    return story


def over() -> Story:
    story = member()
    story.hear(SUCCEEDED)
    return story


STORIES: dict[Phase, Callable[[], Story]] = {
    Phase.IDLE: idle,
    Phase.READING: reading,
    Phase.CAMPAIGNING: campaigning,
    Phase.PAUSING: pausing,
    Phase.CONNECTING: connecting,
    Phase.GREETING: greeting,
    Phase.MEMBER: member,
    Phase.OVER: over,
}


def test_each_phase_has_a_story_here() -> None:
    assert {phase: build().core.phase for phase, build in STORIES.items()} == {phase: phase for phase in Phase}


# Each phase and each event.

EVENTS: list[Event] = [
    Submitted(Ready(NODE)),
    Submitted(Left("me", "SIGTERM")),
    BoardRead(None),
    NotEligible(),
    BoardFailed("no answer"),
    Connected(1),
    ConnectFailed(1, True, "refused"),
    Received(1, Heartbeat(1)),
    ConnectionLost(1, "its connection closed"),
    LeadershipLost(),
    DeadlinePassed(),
]
# What is done; nothing where nothing is said.
ANSWERS: dict[tuple[Phase, type], list[Any]] = {
    (Phase.IDLE, Submitted): [ReadBoard()],
    (Phase.READING, BoardRead): [Campaign(None, 0)],
    (Phase.CAMPAIGNING, BoardRead): [Campaign(None, 0)],
    (Phase.CONNECTING, Connected): [Send(Hello(PROTOCOL, TERMS, "boss 4", NODE, Past(Standing.READY), 0))],
    (Phase.MEMBER, Submitted): [Send(Ready(NODE))],
    (Phase.MEMBER, ConnectionLost): [Connect(2, record())],
}


def test_every_event_has_an_example_here() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(member_events.Event))


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_each_event_is_decided_in_each_phase(phase: Phase, event: Event) -> None:
    story = STORIES[phase]()
    actions = story.tell(event)
    if event == Submitted(Left("me", "SIGTERM")):
        assert actions == ([Send(Left("me", "SIGTERM"))] if phase is Phase.MEMBER else [])
        assert story.core.phase is Phase.OVER
    else:
        assert actions == ANSWERS.get((phase, type(event)), [])


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_when_it_is_over_nothing_is_done(event: Event) -> None:
    story = over()
    story.now += 10_000
    assert story.tell(event) == []
    assert (story.core.phase, story.core.deadline) == (Phase.OVER, None)


@pytest.mark.parametrize("phase", Phase)
def test_a_deadline_that_fires_early_changes_nothing(phase: Phase) -> None:
    story = STORIES[phase]()
    before = copy.deepcopy(story.core)
    assert story.tell(DeadlinePassed()) == []
    assert story.core == before


# Looking.


def test_the_board_is_asked_when_the_supervisor_is_ready() -> None:
    story = idle()
    assert story.core.deadline is None
    assert story.tell(Submitted(Ready(NODE))) == [ReadBoard()]
    assert story.tell(Submitted(Ready(NODE))) == []


def test_a_board_that_names_nobody_is_claimed() -> None:
    assert reading().tell(BoardRead(None)) == [Campaign(None, 0)]


def test_a_claim_that_succeeds_is_a_chair_and_a_connection_to_it() -> None:
    story = campaigning()
    ours = record(1, node_id="me")
    assert story.tell(BoardRead(ours)) == [Lead(ours, False), Connect(1, ours)]
    assert story.core.is_leader
    assert story.hello.token == "me 1"


def test_a_claim_that_comes_second_is_a_connection_to_who_came_first() -> None:
    story = campaigning()
    assert story.tell(BoardRead(record(1))) == [Connect(1, record(1))]
    assert not story.core.is_leader


def test_a_board_that_gives_the_reign_to_another_is_looked_at_again() -> None:
    story = campaigning()
    assert story.tell(NotEligible()) == []
    assert story.left_s == LOOK_AGAIN_S
    assert story.pass_deadline() == [ReadBoard()]


def test_a_board_that_does_not_answer_is_asked_again() -> None:
    for story in (reading(), campaigning()):
        assert story.tell(BoardFailed("no answer")) == []
        assert story.left_s == LOOK_AGAIN_S
        assert story.pass_deadline() == [ReadBoard()]


def test_while_there_is_no_coordinator_people_are_told_what_we_wait_for() -> None:
    story = reading()
    trouble, told = "nobody answers at node0:29400", []
    while story.core.phase is not Phase.OVER:
        assert story.tell(BoardFailed(trouble)) == []
        while story.core.phase is Phase.PAUSING:
            told += [action for action in story.pass_deadline() if action != ReadBoard()]
    notes = [Deliver(Waiting(f"looking for the coordinator ({s} s): {trouble}")) for s in (10, 20, 30, 40, 50)]
    assert told == [*notes, Disconnect(), GiveUp(f"no coordinator for 60 s: {trouble}", False)]


@pytest.mark.parametrize("phase", [Phase.READING, Phase.CAMPAIGNING, Phase.PAUSING, Phase.CONNECTING, Phase.GREETING])
def test_without_a_coordinator_the_join_timeout_ends_it(phase: Phase) -> None:
    story = STORIES[phase]()
    story.now = 100.0 + JOIN_S
    actions = story.tell(DeadlinePassed())
    assert actions[0] == Disconnect() and isinstance(actions[1], GiveUp) and not actions[1].is_refused
    assert (story.core.phase, story.core.deadline) == (Phase.OVER, None)


def test_the_join_timeout_begins_anew_when_a_coordinator_is_lost() -> None:
    story = member()
    story.now += 1000
    story.hear(Goodbye("its agent leaves", True))
    assert story.left_s == NOTE_INTERVAL_S
    story.tell(BoardFailed("no answer"))
    story.now += JOIN_S
    assert any(isinstance(action, GiveUp) for action in story.pass_deadline())


# Connecting.


def test_hello_says_where_the_node_stands() -> None:
    story = busy()
    story.tell(Submitted(Failed("me", 1, FAILURE)), ConnectionLost(1, "reset"))
    assert story.hello == Hello(
        PROTOCOL, TERMS, "boss 4", NODE, Past(Standing.FAILED, 1, 0, 1, 3, 0, FAILURE), seen_epoch=4
    )


def test_a_connection_that_fails_is_tried_again_after_a_look() -> None:
    for is_refused in (False, True):
        story = connecting()
        assert story.tell(ConnectFailed(1, is_refused, "no route")) == []
        assert story.left_s == LOOK_AGAIN_S
        assert story.pass_deadline() == [ReadBoard()]
        assert story.tell(BoardRead(record())) == [Connect(2, record())], (
            "we have never been its member: others may reach it"
        )


def test_a_coordinator_that_does_not_greet_us_is_looked_up_again_after_some_leases() -> None:
    story = greeting()
    story.core.join_timeout_s = 1e6
    actions = story.be_silent_until(story.now + GREETING_LEASES * LEASE_S - 0.01)
    assert Disconnect() not in actions, "many may greet it at once"
    assert actions.count(ReadBoard()) == 1
    assert story.pass_deadline() == [Disconnect(), ReadBoard()]


def not_greeted_again(renewals: int | None = None) -> Story:
    """Its coordinator fell silent, is on the board yet, and takes connections, as the kernel does for a suspended one."""
    story = member(renewals)
    story.be_silent_until(story.now + LEASE_S)
    story.tell(BoardRead(record(renewals=None if renewals is None else renewals + 1)), Connected(2))
    assert story.core.phase is Phase.GREETING
    return story


def test_who_had_a_coordinator_looks_soon_whether_it_reigns_yet_and_less_and_less_often() -> None:
    story = not_greeted_again()
    looks: list[float] = []
    since = story.now
    while len(looks) < 3:
        if ReadBoard() in story.pass_deadline():
            looks.append(story.now - since)
            assert story.tell(BoardRead(record())) == []
    assert looks == [LOOK_AGAIN_S, 3 * LOOK_AGAIN_S, 7 * LOOK_AGAIN_S]


@pytest.mark.parametrize(
    "seen, then",
    [
        (None, Campaign(None, 4)),
        (record(5, node_id="boss2"), Connect(3, record(5, node_id="boss2"))),
    ],
)
def test_a_coordinator_that_takes_connections_and_reigns_no_more_is_left(seen: LeaderRecord | None, then: Any) -> None:
    story = not_greeted_again()
    assert story.pass_deadline() == [ReadBoard()]
    assert story.tell(BoardRead(seen)) == [Disconnect(), then]


def test_a_coordinator_that_takes_connections_and_whose_beat_stands_still_is_gone_after_a_lease() -> None:
    story = not_greeted_again(renewals=7)
    since, still = story.now, record(renewals=8)
    while True:
        if ReadBoard() in story.pass_deadline() and (actions := story.tell(BoardRead(still))):
            break
    assert actions == [Disconnect(), Campaign(still, 4)]
    assert LEASE_S <= story.now - since < 2 * LEASE_S


def test_a_connection_that_breaks_before_the_welcome_is_tried_again_after_a_look() -> None:
    story = greeting()
    assert story.tell(ConnectionLost(1, "reset")) == []
    assert story.left_s == LOOK_AGAIN_S
    assert story.pass_deadline() == [ReadBoard()]


def test_what_is_left_of_an_earlier_connection_changes_nothing() -> None:
    story = member()
    story.tell(ConnectionLost(1, "reset"))
    for event in (
        Connected(1),
        ConnectFailed(1, True, "x"),
        Received(1, Welcome(9, 1.0)),
        Received(1, SUCCEEDED),
        ConnectionLost(1, "x"),
    ):
        assert story.tell(event) == []
    assert (story.core.phase, story.core.seen_epoch) == (Phase.CONNECTING, 4)


def test_who_refuses_us_for_good_is_believed() -> None:
    for story in (greeting(), busy()):
        actions = story.hear(Refused("--nnodes is 2:3 here", True))
        assert actions == [Disconnect(), GiveUp("--nnodes is 2:3 here", True)]
        assert story.core.phase is Phase.OVER


def test_who_refuses_us_for_now_is_asked_again_after_a_look() -> None:
    for story in (greeting(), busy()):
        assert story.hear(Refused("this is the token of another reign", False)) == [Disconnect()]
        assert story.left_s == LOOK_AGAIN_S
        assert story.pass_deadline() == [ReadBoard()]


def test_a_member_that_is_refused_again_and_again_gives_up_like_any_other() -> None:
    story = busy()
    refused_at = story.now
    story.hear(Refused("this is the token of another reign", False))
    while story.core.phase is not Phase.OVER:
        if ReadBoard() in story.pass_deadline():
            story.tell(BoardRead(record()), Connected(story.core.conn + 1))
            story.hear(Refused("this is the token of another reign", False))
    assert story.now == refused_at + JOIN_S


def test_nothing_is_decided_for_us_before_the_welcome() -> None:
    story = greeting()
    for message in (assigned(), interrupted(), SUCCEEDED, Waiting("x")):
        assert story.hear(message) == []
    assert (story.core.phase, story.core.standing, story.core.round) == (Phase.GREETING, Standing.READY, 0)


def test_who_asks_whether_we_live_is_told() -> None:
    assert greeting().hear(Probe()) == [Send(Alive())]
    assert member().hear(Probe()) == [Send(Alive())]


def test_what_the_supervisor_says_between_hello_and_welcome_is_said_with_the_welcome() -> None:
    story = busy()
    story.tell(ConnectionLost(1, "reset"))
    assert story.hello.past == Past(Standing.BUSY, 1, 0, 1, 3, 0)
    assert story.tell(Submitted(Failed("me", 1, FAILURE))) == []
    assert story.hear(Welcome(4, LEASE_S)) == [Send(Failed("me", 1, FAILURE))]
    story.tell(ConnectionLost(2, "reset"))
    assert story.hello.past == Past(Standing.FAILED, 1, 0, 1, 3, 0, FAILURE)
    assert story.hear(Welcome(4, LEASE_S)) == [], "hello has said it"


def test_what_the_supervisor_says_before_a_welcome_that_never_comes_is_said_by_the_next_hello() -> None:
    story = busy()
    story.tell(
        ConnectionLost(1, "reset"), Connected(2), Submitted(Failed("me", 1, FAILURE)), ConnectionLost(2, "reset")
    )
    story.pass_deadline()
    story.tell(BoardRead(record()))
    assert story.hello.past.standing is Standing.FAILED
    assert story.hear(Welcome(4, LEASE_S)) == []


def test_what_the_supervisor_says_without_a_connection_is_said_by_hello() -> None:
    story = busy()
    story.tell(ConnectionLost(1, "reset"))
    assert story.tell(Submitted(Succeeded("me", 1))) == []
    assert story.hello.past.standing is Standing.FINISHED
    assert story.hear(Welcome(4, LEASE_S)) == []


# Member.


def test_a_member_says_that_it_lives_three_times_a_lease() -> None:
    story = member()
    said = 0
    for _ in range(30):
        assert story.left_s == pytest.approx(LEASE_S / 3)
        said += story.pass_deadline() == [Send(Alive())]
        story.hear(Heartbeat(said))
    assert said == 30


def test_whether_nodes_wait_for_a_place_is_told_to_the_next_coordinator_and_forgotten_then() -> None:
    story = busy()
    for has_spares in (False, True):
        story.hear(Heartbeat(1, has_spares))
        assert story.core.past.has_spares is has_spares
    story.tell(ConnectionLost(1, "reset"), ConnectFailed(2, True, "refused"))
    story.tell(BoardRead(record(5, node_id="boss2")))
    (said,) = story.tell(Connected(3))
    assert said.message.past.has_spares
    story.tell(Received(3, Welcome(5, LEASE_S)))
    assert not story.core.past.has_spares


def test_the_lease_is_the_coordinators() -> None:
    story = greeting()
    story.hear(Welcome(4, 30.0))
    assert story.left_s == 10.0


def test_a_silent_coordinator_is_lost_after_a_lease() -> None:
    story = member()
    assert story.be_silent_until(100.0 + LEASE_S - 0.01) == [Send(Alive())] * 2
    assert story.be_silent_until(100.0 + LEASE_S) == [Disconnect(), ReadBoard()]


def test_whatever_a_coordinator_says_renews_its_lease() -> None:
    for message in (Heartbeat(1), Waiting("x"), Probe(), Welcome(4, LEASE_S), assigned()):
        story = member()
        story.be_silent_until(100.0 + LEASE_S - 0.01)
        story.hear(message)
        assert Disconnect() not in story.be_silent_until(100.0 + 2 * LEASE_S - 0.02)


def test_if_we_slept_the_coordinator_gets_time_to_be_heard() -> None:
    story = member()
    story.now += 3600
    assert story.tell(DeadlinePassed()) == [Send(Alive()), ReadBoard()], "another may reign by now"
    assert story.core.deadline == pytest.approx(story.now + LEASE_S / 3)
    copied = copy.deepcopy(story)
    story.hear(Heartbeat(700))
    assert story.pass_deadline() == [Send(Alive())]
    assert copied.pass_deadline() == [Disconnect(), ReadBoard()]


def glancing() -> Story:
    """Its coordinator lives, and its beat stands still."""
    story = busy()
    story.hear(Heartbeat(0))
    while ReadBoard() not in story.pass_deadline():
        story.hear(Heartbeat(0))
    assert story.now == 100.0 + GLANCE_LEASES * LEASE_S
    return story


def test_a_member_whose_coordinator_does_not_keep_its_reign_looks_whether_another_reigns() -> None:
    story = glancing()
    assert story.core.phase is Phase.MEMBER
    assert story.tell(BoardRead(record(5, node_id="boss2"))) == [Disconnect(), Connect(2, record(5, node_id="boss2"))]


@pytest.mark.parametrize(
    "answer", [BoardRead(record()), BoardRead(None), BoardRead(record(3)), NotEligible(), BoardFailed("no answer")]
)
def test_as_long_as_nobody_else_reigns_a_member_stays(answer: Event) -> None:
    story = glancing()
    assert story.tell(answer) == []
    assert story.core.phase is Phase.MEMBER
    since = story.now
    while ReadBoard() not in story.pass_deadline():
        story.hear(Heartbeat(0))
    assert story.now == since + GLANCE_LEASES * LEASE_S


def test_a_member_glances_at_the_board_one_look_at_a_time() -> None:
    story = glancing()
    for _ in range(20):
        story.hear(Heartbeat(0))
        assert ReadBoard() not in story.pass_deadline()


def test_a_beat_that_rises_needs_no_glance() -> None:
    story = busy()
    for renewals in range(100):
        story.hear(Heartbeat(renewals))
        assert story.pass_deadline() == [Send(Alive())]


def test_a_glance_that_is_answered_when_the_coordinator_is_lost_is_one_no_more() -> None:
    story = glancing()
    assert story.hear(Goodbye("deposed", False)) == [Disconnect(), ReadBoard()]
    assert story.tell(BoardRead(record(5, node_id="boss2"))) == [], "the answer to the first question"
    assert story.tell(BoardRead(record(5, node_id="boss2"))) == [Connect(2, record(5, node_id="boss2"))]


def test_a_connection_that_breaks_is_tried_again_at_once() -> None:
    assert member().tell(ConnectionLost(1, "reset")) == [Connect(2, record())]


def test_a_coordinator_that_says_goodbye_is_looked_up_on_the_board() -> None:
    assert member().hear(Goodbye("its agent leaves", True)) == [Disconnect(), ReadBoard()]


@pytest.mark.parametrize("is_gone", [False, True])
def test_who_takes_over_knows_whether_the_coordinator_before_is_gone(is_gone: bool) -> None:
    story = busy()
    story.hear(Goodbye("why", is_gone))
    assert story.tell(BoardRead(None)) == [Campaign(None, 4)]
    ours = record(5, node_id="me")
    assert story.tell(BoardRead(ours)) == [Lead(ours, is_gone), Connect(2, ours)]


def test_who_takes_over_from_one_that_fell_silent_takes_it_for_gone() -> None:
    story = busy()
    story.be_silent_until(100.0 + LEASE_S)
    story.tell(BoardRead(None))
    ours = record(5, node_id="me")
    assert story.tell(BoardRead(ours))[0] == Lead(ours, True)


def test_a_welcome_ends_the_mourning() -> None:
    story = busy()
    story.tell(ConnectionLost(1, "reset"), Connected(2), Received(2, Welcome(4, LEASE_S)))
    story.hear(Goodbye("deposed", False))
    story.tell(BoardRead(None))
    ours = record(5, node_id="me")
    assert story.tell(BoardRead(ours))[0] == Lead(ours, False)


def test_what_the_coordinator_decides_reaches_the_supervisor_in_order() -> None:
    story = member()
    for message in (Waiting("for others"), assigned(1), interrupted(1)):
        assert story.hear(message) == [Deliver(message)]
    assert story.tell(Submitted(Ready(NODE))) == [Send(Ready(NODE))]
    assert story.hear(assigned(2, 1)) == [Deliver(assigned(2, 1))]
    assert story.hear(SUCCEEDED) == [Deliver(SUCCEEDED), Disconnect()]
    assert story.core.phase is Phase.OVER


def test_what_is_told_twice_is_delivered_once() -> None:
    story = member()
    story.hear(assigned(1))
    assert story.hear(assigned(1)) == []
    story.hear(interrupted(1))
    assert story.hear(interrupted(1)) == []
    story.tell(Submitted(Ready(NODE)))
    assert story.hear(assigned(1)) == []
    assert story.hear(interrupted(1)) == []
    assert story.core.standing is Standing.READY


def test_a_decision_about_another_round_changes_nothing() -> None:
    story = busy()
    for message in (interrupted(2), interrupted(0), assigned(2)):
        assert story.hear(message) == []
    assert (story.core.standing, story.core.round) == (Standing.BUSY, 1)


@pytest.mark.parametrize("told", [Failed("me", 1, FAILURE), Succeeded("me", 1)])
def test_an_interruption_ends_whatever_a_round_came_to(told: Any) -> None:
    story = busy()
    assert story.tell(Submitted(told)) == [Send(told)]
    assert story.hear(interrupted(1)) == [Deliver(interrupted(1))]
    assert story.core.past == Past(Standing.STOPPING, 1, 1, 1, 3, 0, None)


# Where we stand.


def test_where_a_node_stands_follows_what_is_said() -> None:
    story = reading()
    assert story.core.past == Past(Standing.READY, 0, 0)
    story = busy()
    assert story.core.past == Past(Standing.BUSY, 1, 0, 1, 3, 0)
    failed, finished, stopping = (copy.deepcopy(story) for _ in range(3))
    failed.tell(Submitted(Failed("me", 1, FAILURE)))
    assert failed.core.past == Past(Standing.FAILED, 1, 0, 1, 3, 0, FAILURE)
    finished.tell(Submitted(Succeeded("me", 1)))
    assert finished.core.past == Past(Standing.FINISHED, 1, 0, 1, 3, 0)
    stopping.hear(interrupted(1, 1))
    assert stopping.core.past == Past(Standing.STOPPING, 1, 1, 1, 3, 0)
    for each in (failed, finished, stopping):
        each.tell(Submitted(Ready(NODE)))
        assert each.core.past == Past(Standing.READY, 1, each.core.restart_count, 1, 3, 0)


def test_what_is_said_of_another_round_is_not_where_we_stand() -> None:
    story = busy()
    story.tell(Submitted(Failed("me", 7, FAILURE)), Submitted(Succeeded("me", 0)))
    assert story.core.past == Past(Standing.BUSY, 1, 0, 1, 3, 0)


def test_a_failure_after_the_interruption_is_not_where_we_stand() -> None:
    story = busy()
    story.hear(interrupted(1))
    assert story.tell(Submitted(Failed("me", 1, FAILURE))) == [Send(Failed("me", 1, FAILURE))]
    assert story.core.past.standing is Standing.STOPPING


def test_the_restart_count_never_falls() -> None:
    story = busy()
    story.hear(interrupted(1, 2))
    story.tell(Submitted(Ready(NODE)))
    story.hear(assigned(2, 1))
    assert story.core.past.restart_count == 2


# Who coordinates no more.


def test_a_coordinator_whose_port_refuses_its_member_is_gone() -> None:
    story = busy()
    story.tell(ConnectionLost(1, "reset"))
    assert story.tell(ConnectFailed(2, True, "refused")) == [ReadBoard()]
    assert story.tell(BoardRead(record())) == [Campaign(record(), 4)]
    ours = record(5, node_id="me")
    assert story.tell(BoardRead(ours))[0] == Lead(ours, True)


def test_one_that_comes_back_meanwhile_is_another() -> None:
    story = busy()
    story.tell(ConnectionLost(1, "reset"), ConnectFailed(2, True, "refused"))
    assert story.tell(BoardRead(record(5, node_id="boss2"))) == [Connect(3, record(5, node_id="boss2"))]


def test_a_coordinator_that_only_we_cannot_reach_keeps_its_reign() -> None:
    story = busy()
    story.tell(ConnectionLost(1, "reset"))
    for _ in range(20):
        assert story.tell(ConnectFailed(story.core.conn, False, "timed out")) == []
        assert story.pass_deadline()[-1] == ReadBoard()
        assert story.tell(BoardRead(record())) == [Connect(story.core.conn, record())]


def test_a_board_that_lost_all_it_knew_counts_anew_and_its_first_reign_is_not_the_one_that_refused_us() -> None:
    story = busy()
    story.tell(ConnectionLost(1, "reset"), ConnectFailed(2, True, "refused"))
    other = record(4, node_id="boss2")
    assert story.tell(BoardRead(other)) == [Connect(3, other)]


def watch(story: Story, counts: list[int], step_s: float) -> list[Any]:
    """The board is looked at time and again, whose reign nobody can be reached at."""
    assert step_s >= LOOK_AGAIN_S
    story.core.join_timeout_s = 1e6
    actions: list[Any] = []
    for renewals in counts:
        story.tell(ConnectFailed(story.core.conn, False, "timed out"))
        story.now += step_s
        story.tell(DeadlinePassed())
        actions = story.tell(BoardRead(record(renewals=renewals)))
    return actions


def test_a_coordinator_whose_beat_stands_still_for_a_lease_is_gone() -> None:
    story = reading()
    assert watch(story, [7] * 6, LEASE_S / 5 - 0.1) == [Connect(6, record(renewals=7))]
    assert watch(story, [7], 0.6) == [Campaign(record(renewals=7), 0)]


def test_a_beat_that_rises_is_a_life() -> None:
    story = reading()
    assert isinstance(watch(story, list(range(100)), LEASE_S / 2)[0], Connect)


def test_a_beat_that_stands_still_counts_from_when_it_was_first_seen_to() -> None:
    story = reading()
    watch(story, [7, 7, 8], LEASE_S / 2 - 0.1)
    assert isinstance(watch(story, [8, 8], LEASE_S / 2 - 0.1)[0], Connect)
    assert isinstance(watch(story, [8], 0.3)[0], Campaign)


def test_another_reign_with_the_same_beat_is_another() -> None:
    story = reading()
    watch(story, [7], 1.0)
    story.tell(ConnectFailed(1, False, "x"))
    story.now += LEASE_S
    story.tell(DeadlinePassed())
    other = record(5, node_id="boss2", renewals=7)
    assert story.tell(BoardRead(other)) == [Connect(2, other)]


def test_a_beat_that_we_have_heard_stands_still_since_we_heard_it() -> None:
    story = member(renewals=0)
    story.now += 1.0
    story.hear(Heartbeat(3))
    assert story.be_silent_until(101.0 + LEASE_S)[-2:] == [Disconnect(), ReadBoard()]
    assert story.tell(BoardRead(record(renewals=3))) == [Campaign(record(renewals=3), 4)]


def test_a_beat_that_we_have_not_heard_stands_still_since_we_saw_it() -> None:
    """A `keep` that nobody told us of may have been made just now."""
    story = member(renewals=0)
    story.hear(Heartbeat(3))
    story.be_silent_until(100.0 + LEASE_S)
    assert story.tell(BoardRead(record(renewals=4))) == [Connect(2, record(renewals=4))]
    story.tell(ConnectFailed(2, False, "timed out"))
    assert isinstance(watch(story, [4], LEASE_S)[0], Campaign)


def test_a_board_that_forgets_the_dead_by_itself_is_not_second_guessed() -> None:
    story = busy()
    story.core.join_timeout_s = 1e6
    story.tell(ConnectionLost(1, "reset"))
    for _ in range(10):
        story.tell(ConnectFailed(story.core.conn, False, "timed out"))
        story.now += LEASE_S
        story.tell(DeadlinePassed())
        assert isinstance(story.tell(BoardRead(record()))[0], Connect)


# Our own reign.


def test_our_own_claim_without_a_chair_is_made_anew() -> None:
    """We did not hear that we got it; or it is from a chair that we have lost."""
    story = reading()
    ours = record(3, node_id="me")
    assert story.tell(BoardRead(ours)) == [Campaign(ours, 0)]
    newer = record(4, node_id="me")
    assert story.tell(BoardRead(newer)) == [Lead(newer, False), Connect(1, newer)]


def test_a_chair_is_taken_once() -> None:
    story = campaigning()
    ours = record(1, node_id="me")
    story.tell(BoardRead(ours), ConnectFailed(1, False, "x"))
    story.pass_deadline()
    assert story.tell(BoardRead(ours)) == [Connect(2, ours)]


def test_a_lost_chair_is_taken_again_only_by_another_claim() -> None:
    story = campaigning()
    ours = record(1, node_id="me")
    story.tell(BoardRead(ours), Connected(1), Received(1, Welcome(1, LEASE_S)))
    assert story.tell(LeadershipLost()) == []
    assert story.hear(Goodbye("another agent coordinates by now", False)) == [Disconnect(), ReadBoard()]
    assert story.tell(BoardRead(record(2))) == [Connect(2, record(2))]
    assert not story.core.is_leader


# Epochs.


def test_a_coordinator_of_an_older_reign_is_not_heard() -> None:
    story = busy()
    story.tell(ConnectionLost(1, "reset"), Connected(2))
    assert story.hear(Welcome(3, LEASE_S)) == [Disconnect()]
    assert story.pass_deadline() == [ReadBoard()]
    assert story.core.seen_epoch == 4


def test_a_reign_may_get_a_newer_epoch_and_stays_the_same() -> None:
    story = busy()
    assert story.hear(Welcome(9, LEASE_S)) == []
    assert (story.core.seen_epoch, story.core.phase) == (9, Phase.MEMBER)
    story.tell(ConnectionLost(1, "reset"))
    assert story.tell(ConnectFailed(2, True, "refused")) == [ReadBoard()]
    assert story.tell(BoardRead(LeaderRecord(9, record().candidate))) == [
        Campaign(LeaderRecord(9, record().candidate), 9)
    ]


def test_a_new_claim_is_above_what_we_have_known() -> None:
    story = busy()
    story.hear(Goodbye("its agent leaves", True))
    assert story.tell(BoardRead(None)) == [Campaign(None, 4)]


def test_without_a_board_we_go_back_to_the_coordinator_we_know() -> None:
    story = busy()
    story.tell(ConnectionLost(1, "reset"), ConnectFailed(2, False, "timed out"))
    story.pass_deadline()
    assert story.tell(BoardFailed("no answer")) == [Connect(3, record())]
    story.tell(ConnectFailed(3, False, "timed out"))
    assert story.left_s == LOOK_AGAIN_S


def test_without_a_board_a_coordinator_that_refuses_us_is_tried_again_and_not_all_the_time() -> None:
    story = busy()
    story.tell(ConnectionLost(1, "reset"))
    assert story.tell(ConnectFailed(2, True, "refused")) == [ReadBoard()]
    assert story.tell(BoardFailed("no answer")) == [Connect(3, record())]
    assert story.tell(ConnectFailed(3, True, "refused")) == []
    assert story.left_s == LOOK_AGAIN_S


def test_without_a_board_a_coordinator_that_has_said_goodbye_is_not_tried_again() -> None:
    story = busy()
    story.hear(Goodbye("another agent coordinates by now", False))
    assert story.tell(BoardFailed("no answer")) == []
    assert story.left_s == LOOK_AGAIN_S
    assert story.pass_deadline() == [ReadBoard()]


# The end.


def test_who_leaves_says_so_if_it_can() -> None:
    assert busy().tell(Submitted(Left("me", "SIGTERM"))) == [Send(Left("me", "SIGTERM"))]
    assert greeting().tell(Submitted(Left("me", "SIGTERM"))) == []
    assert idle().tell(Submitted(Left("me", "SIGTERM"))) == []


def test_a_verdict_on_the_board_is_delivered_to_who_was_a_member() -> None:
    for story in (member(), busy()):
        story.tell(ConnectionLost(1, "reset"), ConnectFailed(2, True, "refused"))
        assert story.tell(BoardRead(record(verdict=to_text(SUCCEEDED)))) == [Deliver(SUCCEEDED)]
        assert (story.core.phase, story.core.deadline) == (Phase.OVER, None)


def test_a_verdict_in_our_own_claim_is_one_too() -> None:
    story = campaigning()
    ours = record(1, node_id="me")
    story.tell(BoardRead(ours), Connected(1), Received(1, Welcome(1, LEASE_S)), LeadershipLost())
    story.hear(Goodbye("x", False))
    assert story.tell(BoardRead(record(1, node_id="me", verdict=to_text(SUCCEEDED)))) == [Deliver(SUCCEEDED)]


def test_a_verdict_from_before_our_time_is_not_ours() -> None:
    old = record(verdict=to_text(SUCCEEDED))
    assert reading().tell(BoardRead(old)) == [Connect(1, old)]


@pytest.mark.parametrize("text", ["x", "null", '["Heartbeat",{"renewals":1}]', to_text(Waiting("x")), "\ud800"])
def test_a_verdict_that_no_agent_wrote_is_the_end_without_one(text: str) -> None:
    story = busy()
    story.hear(Goodbye("x", True))
    assert story.tell(BoardRead(record(verdict=text))) == [
        GiveUp("the board says that the job is over, but not how", False)
    ]
    assert (story.core.phase, story.core.deadline) == (Phase.OVER, None)


# Whatever happens, in whatever order.

REIGNS = [record(4), record(5, node_id="boss2"), record(4, renewals=1), record(4, renewals=2), record(6, node_id="me")]
MESSAGES = [
    Welcome(4, LEASE_S), Welcome(4, LEASE_S), Welcome(6, LEASE_S), Refused("x", False), Refused("x", True), Heartbeat(1), Probe(),
    Goodbye("x", False), Goodbye("x", True), assigned(1), assigned(2, 1), assigned(3, 1), interrupted(1), interrupted(2),
    SUCCEEDED, Waiting("x"),
]  # fmt: skip
RANDOM_EVENTS = st.one_of(
    st.sampled_from(["answer"] * 4 + ["deadline"] * 4 + [0.1, 30.0]),
    st.builds(Received, st.integers(1, 6), st.sampled_from(MESSAGES)),
    st.sampled_from(MESSAGES),
    st.sampled_from(MESSAGES),
    st.builds(Connected, st.integers(1, 6)),
    st.builds(ConnectFailed, st.integers(1, 6), st.booleans(), st.just("x")),
    st.builds(ConnectionLost, st.integers(1, 6), st.just("x")),
    st.sampled_from(
        [Submitted(Ready(NODE)), Submitted(Failed("me", 1, FAILURE)), Submitted(Succeeded("me", 2)), LeadershipLost()]
    ),
    st.sampled_from([Submitted(Ready(NODE)), Submitted(Left("me", "x"))]),
)
ANSWERS_OF_BOARD = st.sampled_from(
    [
        BoardRead(None),
        *(BoardRead(each) for each in REIGNS),
        BoardRead(record(4, verdict=to_text(SUCCEEDED))),
        NotEligible(),
        BoardFailed("x"),
    ]
)


class Witness:
    """Looks at what a member does, with books of its own."""

    def __init__(self) -> None:
        self.story = Story()
        self.asks = 0  # answers that the board owes
        self.conn = 0
        self.is_connected = False
        self.is_over = False
        self.round = 0
        self.is_in_round = False

    def tell(self, event: Event) -> None:
        if isinstance(event, Submitted) and isinstance(event.message, Ready):
            self.is_in_round = False
        if isinstance(event, Connected) and event.conn == self.conn:
            self.is_connected = True
        if isinstance(event, ConnectionLost | ConnectFailed) and event.conn == self.conn:
            self.is_connected = False
        phase = self.story.core.phase
        actions = self.story.tell(event)
        assert not (self.is_over and actions), "nothing after the end"
        for action in actions:
            self.look_at(action, phase)
        if isinstance(event, Submitted) and isinstance(event.message, Left):
            self.is_over = True
        assert self.is_over == (self.story.core.phase is Phase.OVER)
        assert (self.story.core.deadline is None) <= (
            self.is_over or self.story.core.phase in {Phase.IDLE, Phase.READING, Phase.CAMPAIGNING, Phase.CONNECTING}
        ), "somebody waits, and nobody wakes it"

    def look_at(self, action: Any, phase: Phase) -> None:
        match action:
            case ReadBoard() | Campaign():
                # A member's glance at the board may be unanswered yet when it needs another.
                assert self.asks < 1 + isinstance(action, ReadBoard), "one question at a time"
                self.asks += 1
            case Connect(conn):
                assert conn > self.conn, "numbers are never used twice"
                self.conn, self.is_connected = conn, False
            case Disconnect():
                self.is_connected = False
            case Send(message):
                assert self.is_connected, "said to nobody"
                assert isinstance(message, Hello) <= (phase is Phase.CONNECTING)
            case Deliver(Assigned(round_)):
                assert not self.is_in_round and round_ > self.round, "rounds come in order, one at a time"
                self.round, self.is_in_round = round_, True
            case Deliver(Interrupted(round_)):
                assert self.is_in_round and round_ == self.round
                self.is_in_round = False
            case Deliver(Ended()) | GiveUp():
                self.is_over = self.story.core.phase is Phase.OVER

    def answer(self, answer: Event) -> None:
        """Whoever owes an answer gives it."""
        if self.story.core.phase is Phase.CONNECTING:
            self.tell(Connected(self.conn))
        elif self.asks:
            self.asks -= 1
            self.tell(answer)

    def can_be(self, event: Any) -> bool:
        match event:
            case Submitted(Failed() | Succeeded()):
                return self.is_in_round
            case Submitted() | LeadershipLost():
                return True
            case Received(conn) | ConnectionLost(conn):
                return conn != self.conn or self.is_connected
            case Connected(conn) | ConnectFailed(conn):
                return conn != self.conn or self.story.core.phase is Phase.CONNECTING
            case _:
                return False

    def pass_deadline(self) -> None:
        core = self.story.core
        if core.deadline is not None:
            self.story.now = max(self.story.now, core.deadline)
            self.tell(DeadlinePassed())
            later = self.story.core.deadline
            assert later is None or later > self.story.now, "what is due is done at once"


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(st.tuples(RANDOM_EVENTS, ANSWERS_OF_BOARD), max_size=60), st.sampled_from([0, 3, 4]))
def test_whatever_happens_a_member_keeps_its_rules(events: list[Any], prefix: int) -> None:
    witness = Witness()
    witness.tell(Submitted(Ready(NODE)))
    first = [
        ("answer", BoardRead(record())),
        ("answer", NotEligible()),
        (Welcome(4, LEASE_S), NotEligible()),
        (assigned(), NotEligible()),
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
            witness.tell(Received(witness.conn, event))


def test_a_node_alone_finds_itself() -> None:
    """The whole way, with a board that does what boards do."""
    story = reading()
    (candidate,) = story.tell(BoardRead(None))
    ours = LeaderRecord(candidate.above + 1, board.Candidate("me", ("127.0.0.1",), 4000, "t"), 0)
    assert story.tell(BoardRead(ours)) == [Lead(ours, False), Connect(1, ours)]
    assert json.loads(to_text(Waiting("x"))) and story.hello.seen_epoch == 0
    story.hear(Welcome(1, LEASE_S))
    assert story.hear(assigned()) == [Deliver(assigned())]
    assert story.core.deadline == story.now + LEASE_S / 3
