"""A member: how a node finds the coordinator, stays with it, and becomes it; events in, actions out."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any, get_args

import pytest
from kit.stories.member import (
    FAILURE,
    JOIN_S,
    LEASE_S,
    NODE,
    SUCCEEDED,
    TERMS,
    Story,
    assigned,
    busy,
    campaigning,
    connecting,
    greeting,
    idle,
    interrupted,
    member,
    over,
    pausing,
    reading,
    record,
)

from aelastic.core.machine import InvalidTransition
from aelastic.rdzv.board import Candidate, LeaderRecord
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.contact import MARGIN_S
from aelastic.rdzv.member.leader_watch import CHECK_LEASES, DOUBTED_LEASES, GREETING_LEASES, LATE_LEASES, READ_AGAIN_S
from aelastic.rdzv.member.member_events import Phase
from aelastic.rdzv.member.search import NOTE_INTERVAL_S
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import PROTOCOL, to_text

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

EVENTS: list[ev.Event] = [
    ev.Submitted(m.Ready(NODE)),
    ev.Submitted(m.Left("me", "SIGTERM")),
    ev.BoardRead(None),
    ev.NotEligible(),
    ev.BoardFailed("no answer"),
    ev.Connected(1),
    ev.ConnectFailed(1, True, "refused"),
    ev.Received(1, m.Heartbeat(1)),
    ev.ConnectionLost(1, "its connection closed"),
    ev.LeadershipLost(),
    ev.DeadlinePassed(),
]
# What is done; nothing where nothing is said.
ANSWERS: dict[tuple[Phase, type], list[Any]] = {
    (Phase.IDLE, ev.Submitted): [ev.ReadBoard()],
    (Phase.READING, ev.BoardRead): [ev.Campaign(None, 0)],
    (Phase.CAMPAIGNING, ev.BoardRead): [ev.Campaign(None, 0)],
    (Phase.CONNECTING, ev.Connected): [ev.Send(m.Hello(PROTOCOL, TERMS, "boss-4", NODE, m.Past(m.Standing.READY), 0))],
    (Phase.MEMBER, ev.Submitted): [ev.Send(m.Ready(NODE))],
    (Phase.MEMBER, ev.ConnectionLost): [ev.Connect(2, record())],
}
NOT_ASKING = set(Phase) - {Phase.READING, Phase.CAMPAIGNING, Phase.OVER}
NOT_CONNECTING = {Phase.IDLE, Phase.GREETING, Phase.MEMBER}
# Where a bug in the link is the only way that an event can come.
IMPOSSIBLE: dict[type, set[Phase]] = {
    ev.BoardRead: NOT_ASKING,
    ev.BoardFailed: NOT_ASKING,
    ev.NotEligible: NOT_ASKING,
    ev.Connected: NOT_CONNECTING,
    ev.ConnectFailed: NOT_CONNECTING,
    ev.Received: {Phase.IDLE, Phase.CONNECTING},
    ev.ConnectionLost: {Phase.IDLE, Phase.CONNECTING},
    ev.LeadershipLost: {Phase.IDLE},
}


def test_every_event_has_an_example_here() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(ev.Event))


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_each_event_is_decided_in_each_phase(phase: Phase, event: ev.Event) -> None:
    story = STORIES[phase]()
    if "conn" in event.__match_args__:
        event = event.replace(conn=story.core.conn)
    if phase is Phase.OVER:
        story.now += 10_000
    if phase in IMPOSSIBLE.get(type(event), set()):
        before = copy.deepcopy(story.core)
        with pytest.raises(InvalidTransition, match=rf"{type(event).__name__}\(.* in phase {phase}") as caught:
            story.tell(event)
        assert (story.core, caught.value.story) == (before, story.core.story)
        return
    actions = story.tell(event)
    if event == ev.Submitted(m.Left("me", "SIGTERM")):
        assert actions == ([ev.Send(m.Left("me", "SIGTERM"))] if phase is Phase.MEMBER else [])
        assert story.core.phase is Phase.OVER
    else:
        assert actions == ANSWERS.get((phase, type(event)), [])
    if phase is Phase.OVER:
        assert (story.core.phase, story.core.deadline) == (Phase.OVER, None)


@pytest.mark.parametrize("phase", Phase)
def test_a_deadline_that_fires_early_changes_nothing(phase: Phase) -> None:
    story = STORIES[phase]()
    before = copy.deepcopy(story.core)
    assert story.tell(ev.DeadlinePassed()) == []
    assert story.core == before


# Searching.


def test_the_board_is_read_when_the_supervisor_is_ready() -> None:
    story = idle()
    assert story.core.deadline is None
    assert story.tell(ev.Submitted(m.Ready(NODE))) == [ev.ReadBoard()]
    assert story.tell(ev.Submitted(m.Ready(NODE))) == []


def test_a_node_that_campaigns_second_connects_to_the_first() -> None:
    story = campaigning()
    assert story.tell(ev.BoardRead(record(1))) == [ev.Connect(1, record(1))]
    assert not story.core.is_leader


@pytest.mark.parametrize(
    "answer, trouble, hint",
    [
        (ev.BoardFailed("no process answers at n:1"), "no process answers at n:1", " (the endpoint is from PET_X)"),
        (ev.NotEligible(), "the coordinator has not started yet", ""),
    ],
)
def test_while_there_is_no_coordinator_the_user_is_told_why_and_the_endpoint_only_if_that_is_the_trouble(
    answer: ev.Event, trouble: str, hint: str
) -> None:
    story = reading()
    story.core.search.hint = "the endpoint is from PET_X"
    told: list[ev.Action] = []
    while story.core.phase is not Phase.OVER:
        assert story.tell(answer) == []
        while story.core.phase is Phase.PAUSING:
            told += [action for action in story.pass_deadline() if action != ev.ReadBoard()]
    notes = [
        ev.Deliver(m.Waiting(f"looking for the coordinator ({s} s): {trouble}{hint}")) for s in (10, 20, 30, 40, 50)
    ]
    assert told == [*notes, ev.Disconnect(), ev.GiveUp(f"no coordinator for 60 s: {trouble}", False)]


@pytest.mark.parametrize("phase", [Phase.READING, Phase.CAMPAIGNING, Phase.PAUSING, Phase.CONNECTING, Phase.GREETING])
def test_without_a_coordinator_the_join_timeout_ends_it(phase: Phase) -> None:
    story = STORIES[phase]()
    story.now = 100.0 + JOIN_S
    actions = story.tell(ev.DeadlinePassed())
    assert actions[0] == ev.Disconnect() and isinstance(actions[1], ev.GiveUp) and not actions[1].is_refused
    assert (story.core.phase, story.core.deadline) == (Phase.OVER, None)


def test_the_join_timeout_begins_anew_when_a_coordinator_is_lost() -> None:
    story = member()
    story.now += 1000
    story.hear(m.Goodbye("its agent leaves", True))
    assert story.left_s == NOTE_INTERVAL_S
    story.tell(ev.BoardFailed("no answer"))
    story.now += JOIN_S
    assert any(isinstance(action, ev.GiveUp) for action in story.pass_deadline())


OUTDATED = m.Refused("this agent read an outdated coordinator entry; retrying", False)


@pytest.mark.parametrize(
    "build, event, then",
    [
        (campaigning, ev.NotEligible(), []),
        (reading, ev.BoardFailed("no answer"), []),
        (campaigning, ev.BoardFailed("no answer"), []),
        (connecting, ev.ConnectFailed(1, True, "refused"), []),
        (connecting, ev.ConnectFailed(1, False, "no route"), []),
        (greeting, ev.ConnectionLost(1, "reset"), []),
        (greeting, ev.Received(1, OUTDATED), [ev.Disconnect()]),
        (busy, ev.Received(1, OUTDATED), [ev.Disconnect()]),
    ],
)
def test_what_did_not_work_out_is_tried_again_after_a_read(
    build: Callable[[], Story], event: ev.Event, then: list[Any]
) -> None:
    story = build()
    assert story.tell(event) == then
    assert story.left_s == READ_AGAIN_S
    assert story.pass_deadline() == [ev.ReadBoard()]
    conn = story.core.conn + 1
    assert story.tell(ev.BoardRead(record())) == [ev.Connect(conn, record())], "others may reach it"


# Connecting.


def test_hello_says_where_the_node_stands() -> None:
    story = busy()
    story.tell(ev.Submitted(m.Failed("me", 1, FAILURE)), ev.ConnectionLost(1, "reset"))
    assert story.hello == m.Hello(
        PROTOCOL, TERMS, "boss-4", NODE, m.Past(m.Standing.FAILED, 1, 0, 1, 3, 0, FAILURE), seen_epoch=4
    )


def test_a_coordinator_that_does_not_answer_hello_is_looked_up_after_some_leases() -> None:
    story = greeting()
    story.core.search.timeout_s = 1e6
    actions = story.be_silent_until(story.now + GREETING_LEASES * LEASE_S - 0.01)
    assert ev.Disconnect() not in actions, "many may greet it at once"
    assert actions.count(ev.ReadBoard()) == 1
    assert story.pass_deadline() == [ev.Disconnect(), ev.ReadBoard()]


def not_greeted_again(renewals: int | None = None) -> Story:
    """Its coordinator fell silent, is on the board yet, and takes connections, as the kernel does for a suspended one."""
    story = member(renewals)
    story.be_silent_until(story.now + LEASE_S)
    story.tell(ev.BoardRead(record(renewals=None if renewals is None else renewals + 1)), ev.Connected(2))
    assert story.core.phase is Phase.GREETING
    return story


def test_a_node_that_lost_its_leader_checks_the_board_soon_then_less_and_less_often() -> None:
    story = not_greeted_again()
    looks: list[float] = []
    since = story.now
    while len(looks) < 3:
        if ev.ReadBoard() in story.pass_deadline():
            looks.append(story.now - since)
            assert story.tell(ev.BoardRead(record())) == []
    assert looks == [READ_AGAIN_S, 3 * READ_AGAIN_S, 7 * READ_AGAIN_S]


@pytest.mark.parametrize(
    "seen, then",
    [
        (None, ev.Campaign(None, 4)),
        (record(5, node_id="boss2"), ev.Connect(3, record(5, node_id="boss2"))),
    ],
)
def test_a_coordinator_that_accepts_connections_and_leads_no_longer_is_left(
    seen: LeaderRecord | None, then: Any
) -> None:
    story = not_greeted_again()
    assert story.pass_deadline() == [ev.ReadBoard()]
    assert story.tell(ev.BoardRead(seen)) == [ev.Disconnect(), then]


def test_a_coordinator_that_accepts_connections_and_does_not_renew_is_gone_after_a_lease() -> None:
    story = not_greeted_again(renewals=7)
    since, still = story.now, record(renewals=8)
    while True:
        if ev.ReadBoard() in story.pass_deadline() and (actions := story.tell(ev.BoardRead(still))):
            break
    assert actions == [ev.Disconnect(), ev.Campaign(still, 4)]
    assert LEASE_S <= story.now - since < 2 * LEASE_S


def test_events_of_an_earlier_connection_change_nothing() -> None:
    story = member()
    story.tell(ev.ConnectionLost(1, "reset"))
    for event in (
        ev.Connected(1),
        ev.ConnectFailed(1, True, "x"),
        ev.Received(1, m.Welcome(9, 1.0)),
        ev.Received(1, SUCCEEDED),
        ev.ConnectionLost(1, "x"),
    ):
        assert story.tell(event) == []
    assert (story.core.phase, story.core.leader.epoch) == (Phase.CONNECTING, 4)


def test_a_final_refusal_ends_the_search() -> None:
    for story in (greeting(), busy()):
        actions = story.hear(m.Refused("--nnodes is 2:3 here", True))
        assert actions == [ev.Disconnect(), ev.GiveUp("--nnodes is 2:3 here", True)]
        assert story.core.phase is Phase.OVER


def test_a_member_that_is_refused_again_and_again_gives_up_like_any_other() -> None:
    story = busy()
    refused_at = story.now
    story.hear(OUTDATED)
    while story.core.phase is not Phase.OVER:
        if ev.ReadBoard() in story.pass_deadline():
            story.tell(ev.BoardRead(record()), ev.Connected(story.core.conn + 1))
            story.hear(OUTDATED)
    assert story.now == refused_at + JOIN_S


def test_nothing_is_decided_for_a_node_before_the_welcome() -> None:
    story = greeting()
    for message in (assigned(), interrupted(), SUCCEEDED, m.Waiting("x")):
        assert story.hear(message) == []
    assert (story.core.phase, story.core.state.standing, story.core.state.round) == (
        Phase.GREETING,
        m.Standing.READY,
        0,
    )


def test_a_probe_is_answered_at_once() -> None:
    assert greeting().hear(m.Probe()) == [ev.Send(m.Alive())]
    assert member().hear(m.Probe()) == [ev.Send(m.Alive())]


def test_what_is_submitted_between_hello_and_welcome_is_sent_with_the_welcome() -> None:
    story = busy()
    story.tell(ev.ConnectionLost(1, "reset"))
    assert story.hello.past == m.Past(m.Standing.BUSY, 1, 0, 1, 3, 0)
    assert story.tell(ev.Submitted(m.Failed("me", 1, FAILURE))) == []
    assert story.hear(m.Welcome(4, LEASE_S)) == [ev.Send(m.Failed("me", 1, FAILURE))]
    story.tell(ev.ConnectionLost(2, "reset"))
    assert story.hello.past == m.Past(m.Standing.FAILED, 1, 0, 1, 3, 0, FAILURE)
    assert story.hear(m.Welcome(4, LEASE_S)) == [], "hello has said it"


def test_what_is_submitted_before_a_welcome_that_never_comes_is_in_the_next_hello() -> None:
    story = busy()
    story.tell(
        ev.ConnectionLost(1, "reset"),
        ev.Connected(2),
        ev.Submitted(m.Failed("me", 1, FAILURE)),
        ev.ConnectionLost(2, "reset"),
    )
    story.pass_deadline()
    story.tell(ev.BoardRead(record()))
    assert story.hello.past.standing is m.Standing.FAILED
    assert story.hear(m.Welcome(4, LEASE_S)) == []


def test_what_is_submitted_without_a_connection_is_in_the_next_hello() -> None:
    story = busy()
    story.tell(ev.ConnectionLost(1, "reset"))
    assert story.tell(ev.Submitted(m.Succeeded("me", 1))) == []
    assert story.hello.past.standing is m.Standing.FINISHED
    assert story.hear(m.Welcome(4, LEASE_S)) == []


# Member.


def test_a_member_sends_three_heartbeats_a_lease() -> None:
    story = member()
    said = 0
    for _ in range(30):
        assert story.left_s == pytest.approx(LEASE_S / 3)
        said += story.pass_deadline() == [ev.Send(m.Alive())]
        story.hear(m.Heartbeat(said))
    assert said == 30


def test_spares_are_known_to_the_next_coordinator_and_forgotten_then() -> None:
    story = busy()
    for has_spares in (False, True):
        story.hear(m.Heartbeat(1, has_spares))
        assert story.core.state.past.has_spares is has_spares
    story.tell(ev.ConnectionLost(1, "reset"), ev.ConnectFailed(2, True, "refused"))
    story.tell(ev.BoardRead(record(5, node_id="boss2")))
    (said,) = story.tell(ev.Connected(3))
    assert said.message.past.has_spares
    story.tell(ev.Received(3, m.Welcome(5, LEASE_S)))
    assert not story.core.state.past.has_spares


def test_a_silent_coordinator_is_lost_after_a_lease() -> None:
    story = member()
    assert story.be_silent_until(100.0 + LEASE_S - 0.01) == [ev.Send(m.Alive())] * 2
    assert story.be_silent_until(100.0 + LEASE_S) == [ev.Disconnect(), ev.ReadBoard()]


def test_any_message_of_the_coordinator_renews_its_lease() -> None:
    for message in (m.Heartbeat(1), m.Waiting("x"), m.Probe(), m.Welcome(4, LEASE_S), assigned()):
        story = member()
        story.be_silent_until(100.0 + LEASE_S - 0.01)
        story.hear(message)
        assert ev.Disconnect() not in story.be_silent_until(100.0 + 2 * LEASE_S - 0.02)


def test_after_this_process_was_stopped_the_coordinator_gets_time_to_be_heard() -> None:
    story = member()
    story.now += 3600
    assert story.tell(ev.DeadlinePassed()) == [ev.Send(m.Alive()), ev.ReadBoard()], "another agent may lead"
    assert story.core.deadline == pytest.approx(story.now + LEASE_S / 3)
    copied = copy.deepcopy(story)
    story.hear(m.Heartbeat(700))
    assert story.pass_deadline() == [ev.Send(m.Alive())]
    assert copied.pass_deadline() == [ev.Disconnect(), ev.ReadBoard()]


def checking() -> Story:
    """Its coordinator is alive, and its count of renewals stands still."""
    story = busy()
    story.hear(m.Heartbeat(0))
    while ev.ReadBoard() not in story.pass_deadline():
        story.hear(m.Heartbeat(0))
    assert story.now == 100.0 + CHECK_LEASES * LEASE_S
    return story


def test_a_member_whose_coordinator_does_not_renew_looks_for_another_leader() -> None:
    story = checking()
    assert story.core.phase is Phase.MEMBER
    assert story.tell(ev.BoardRead(record(5, node_id="boss2"))) == [
        ev.Disconnect(),
        ev.Connect(2, record(5, node_id="boss2")),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        ev.BoardRead(record()),
        ev.BoardRead(None),
        ev.BoardRead(record(3)),
        ev.NotEligible(),
        ev.BoardFailed("no answer"),
    ],
)
def test_a_member_stays_while_no_other_agent_leads(answer: ev.Event) -> None:
    story = checking()
    assert story.tell(answer) == []
    assert story.core.phase is Phase.MEMBER
    since = story.now
    while ev.ReadBoard() not in story.pass_deadline():
        story.hear(m.Heartbeat(0))
    assert story.now == since + CHECK_LEASES * LEASE_S


def test_a_member_checks_the_board_once_at_a_time() -> None:
    story = checking()
    for _ in range(20):
        story.hear(m.Heartbeat(0))
        assert ev.ReadBoard() not in story.pass_deadline()


def test_while_the_renewals_rise_the_board_is_not_checked() -> None:
    story = busy()
    for renewals in range(100):
        story.hear(m.Heartbeat(renewals))
        assert story.pass_deadline() == [ev.Send(m.Alive())]


def test_a_check_that_is_answered_after_the_coordinator_is_lost_changes_nothing() -> None:
    story = checking()
    assert story.hear(m.Goodbye("deposed", False)) == [ev.Disconnect(), ev.ReadBoard()]
    assert story.tell(ev.BoardRead(record(5, node_id="boss2"))) == [], "the answer to the first question"
    assert story.tell(ev.BoardRead(record(5, node_id="boss2"))) == [ev.Connect(2, record(5, node_id="boss2"))]


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_new_leader_knows_whether_the_one_before_is_gone(is_gone: bool) -> None:
    story = busy()
    story.hear(m.Goodbye("why", is_gone))
    assert story.tell(ev.BoardRead(None)) == [ev.Campaign(None, 4)]
    ours = record(5, node_id="me")
    assert story.tell(ev.BoardRead(ours)) == [ev.Lead(ours, is_gone), ev.Connect(2, ours)]


def test_a_leader_that_fell_silent_is_gone_for_the_next_one() -> None:
    story = busy()
    story.be_silent_until(100.0 + LEASE_S)
    story.tell(ev.BoardRead(None))
    ours = record(5, node_id="me")
    assert story.tell(ev.BoardRead(ours))[0] == ev.Lead(ours, True)


def test_after_a_welcome_the_leader_before_does_not_matter() -> None:
    story = busy()
    story.tell(ev.ConnectionLost(1, "reset"), ev.Connected(2), ev.Received(2, m.Welcome(4, LEASE_S)))
    story.hear(m.Goodbye("deposed", False))
    story.tell(ev.BoardRead(None))
    ours = record(5, node_id="me")
    assert story.tell(ev.BoardRead(ours))[0] == ev.Lead(ours, False)


def test_what_the_coordinator_decides_reaches_the_supervisor_in_order() -> None:
    story = member()
    for message in (m.Waiting("for others"), assigned(1), interrupted(1)):
        assert story.hear(message) == [ev.Deliver(message)]
    assert story.tell(ev.Submitted(m.Ready(NODE))) == [ev.Send(m.Ready(NODE))]
    assert story.hear(assigned(2, 1)) == [ev.Deliver(assigned(2, 1))]
    assert story.hear(SUCCEEDED) == [ev.Deliver(SUCCEEDED), ev.Disconnect()]
    assert story.core.phase is Phase.OVER


def test_a_node_that_is_prepared_says_so_once_and_each_hello_from_then_on() -> None:
    prepared = m.Prepared("me", m.Starts.WARM)
    story = member()
    assert story.tell(ev.Submitted(prepared)) == [ev.Send(prepared)]
    assert story.core.state.node == NODE.replace(starts=m.Starts.WARM)
    early = greeting()
    assert early.tell(ev.Submitted(prepared)) == []
    assert early.hear(m.Welcome(4, LEASE_S)) == [ev.Send(prepared)]


def test_a_decision_that_comes_twice_is_delivered_once() -> None:
    story = member()
    story.hear(assigned(1))
    assert story.hear(assigned(1)) == []
    story.hear(interrupted(1))
    assert story.hear(interrupted(1)) == []
    story.tell(ev.Submitted(m.Ready(NODE)))
    assert story.hear(assigned(1)) == []
    assert story.hear(interrupted(1)) == []
    assert story.core.state.standing is m.Standing.READY


def test_a_decision_about_another_round_changes_nothing() -> None:
    story = busy()
    for message in (interrupted(2), interrupted(0), assigned(2)):
        assert story.hear(message) == []
    assert (story.core.state.standing, story.core.state.round) == (m.Standing.BUSY, 1)


@pytest.mark.parametrize("told", [m.Failed("me", 1, FAILURE), m.Succeeded("me", 1)])
def test_an_interruption_ends_whatever_a_round_came_to(told: Any) -> None:
    story = busy()
    assert story.tell(ev.Submitted(told)) == [ev.Send(told)]
    assert story.hear(interrupted(1)) == [ev.Deliver(interrupted(1))]
    past = story.core.state.past
    assert (past.standing, past.round) == (m.Standing.STOPPING, 1)
    assert (past.failure is not None) == isinstance(told, m.Failed), "a coordinator after this one is to know it"


# Where we stand.


def test_where_a_node_stands_follows_the_messages() -> None:
    story = reading()
    assert story.core.state.past == m.Past(m.Standing.READY, 0, 0)
    story = busy()
    assert story.core.state.past == m.Past(m.Standing.BUSY, 1, 0, 1, 3, 0)
    failed, finished, stopping = (copy.deepcopy(story) for _ in range(3))
    failed.tell(ev.Submitted(m.Failed("me", 1, FAILURE)))
    assert failed.core.state.past == m.Past(m.Standing.FAILED, 1, 0, 1, 3, 0, FAILURE)
    finished.tell(ev.Submitted(m.Succeeded("me", 1)))
    assert finished.core.state.past == m.Past(m.Standing.FINISHED, 1, 0, 1, 3, 0)
    stopping.hear(interrupted(1, 1))
    told = m.Past(m.Standing.STOPPING, 1, 0, 1, 3, 0, is_charged=True)
    assert stopping.core.state.past == told, "it is paid when the next begins"
    for each in (failed, finished, stopping):
        each.tell(ev.Submitted(m.Ready(NODE)))
        failure = FAILURE if each is failed else None
        assert each.core.state.past == m.Past(m.Standing.READY, 1, 0, 1, 3, 0, failure, is_charged=each is stopping)
        each.hear(assigned(2))
        assert each.core.state.past.failure is None


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_node_hears_that_the_end_of_its_round_costs_nothing_after_all(is_ready: bool) -> None:
    story = busy()
    story.hear(interrupted(1, 1))
    if is_ready:
        story.tell(ev.Submitted(m.Ready(NODE)))
    excuse = interrupted(1, 0)
    assert story.hear(excuse) == [], "its workers are told to stop once"
    standing = m.Standing.READY if is_ready else m.Standing.STOPPING
    assert story.core.state.past == m.Past(standing, 1, 0, 1, 3, 0, ended=excuse.reason)


def test_a_node_says_how_long_ago_things_were() -> None:
    """The next coordinator orders them by that: clocks of machines differ."""
    story = busy()
    story.now += 1.0
    story.tell(ev.Submitted(m.Failed("me", 1, FAILURE, age_s=0.25)))
    story.now += 2.0
    story.tell(ev.ConnectionLost(1, "reset"))
    story.now += 0.5
    (said,) = story.tell(ev.Connected(2))
    assert (said.message.past.failure_age_s, said.message.past.alone_s) == (2.75, 0.5)


def test_a_node_says_since_when_a_silent_coordinator_was_not_heard() -> None:
    story = busy()
    heard_at = story.now
    while story.core.phase is Phase.MEMBER:
        story.pass_deadline()
    while story.core.phase is not Phase.CONNECTING:
        story.tell(ev.BoardRead(record(5, node_id="boss2")))
    (said,) = story.tell(ev.Connected(story.core.conn))
    assert said.message.past.alone_s == pytest.approx(story.now - heard_at)


def test_a_node_says_what_has_ended_its_round_for_free() -> None:
    story = busy()
    free = m.Interrupted(1, "node host-b was lost: connection closed", 0)
    story.hear(free)
    assert story.core.state.past.ended == free.reason
    story = busy()
    story.hear(m.Interrupted(1, "rank 1 failed on host-b; restart 1 of 3", 1))
    assert story.core.state.past.ended == ""


@pytest.mark.parametrize("is_charged", [False, True])
def test_a_round_that_went_on_without_this_node_charges_and_excuses_nothing(is_charged: bool) -> None:
    """Restarts that another side has paid are not this round's; and what was charged before remains."""
    story = busy()
    if is_charged:
        story.hear(m.Interrupted(1, "rank 1 failed on host-b; restart 1 of 3", 1))
    story.hear(m.Interrupted(1, "round 1 went on without this node; rejoining", 1 - is_charged, went_on=True))
    assert story.core.state.past.is_charged == is_charged
    assert bool(story.core.state.past.ended) != is_charged


def test_a_report_of_another_round_changes_nothing() -> None:
    story = busy()
    story.tell(ev.Submitted(m.Failed("me", 7, FAILURE)), ev.Submitted(m.Succeeded("me", 0)))
    assert story.core.state.past == m.Past(m.Standing.BUSY, 1, 0, 1, 3, 0)


def test_a_failure_after_the_interruption_changes_nothing() -> None:
    story = busy()
    story.hear(interrupted(1))
    assert story.tell(ev.Submitted(m.Failed("me", 1, FAILURE))) == [ev.Send(m.Failed("me", 1, FAILURE))]
    assert story.core.state.past.standing is m.Standing.STOPPING


def test_the_restart_count_never_falls() -> None:
    story = busy()
    for round_, count in ((2, 2), (3, 1)):
        story.hear(interrupted(round_ - 1, count))
        story.tell(ev.Submitted(m.Ready(NODE)))
        story.hear(assigned(round_, count))
    assert story.core.state.past.restart_count == 2


# Leaders that are gone.


@pytest.mark.parametrize("epoch", [4, 5])
def test_an_agent_that_was_elected_meanwhile_is_connected_to_even_with_the_epoch_of_the_dead_one(epoch: int) -> None:
    story = busy()
    story.tell(ev.ConnectionLost(1, "reset"), ev.ConnectFailed(2, True, "refused"))
    other = record(epoch, node_id="boss2")
    assert story.tell(ev.BoardRead(other)) == [ev.Connect(3, other)]


def test_a_coordinator_whose_port_refuses_its_member_is_gone() -> None:
    story = busy()
    story.tell(ev.ConnectionLost(1, "reset"))
    assert story.tell(ev.ConnectFailed(2, True, "refused")) == [ev.ReadBoard()]
    assert story.tell(ev.BoardRead(record())) == [ev.Campaign(record(), 4)]
    ours = record(5, node_id="me")
    assert story.tell(ev.BoardRead(ours))[0] == ev.Lead(ours, True)


def test_a_coordinator_that_only_this_node_cannot_reach_stays_the_leader() -> None:
    story = busy()
    story.tell(ev.ConnectionLost(1, "reset"))
    for _ in range(20):
        assert story.tell(ev.ConnectFailed(story.core.conn, False, "timed out")) == []
        assert story.pass_deadline()[-1] == ev.ReadBoard()
        assert story.tell(ev.BoardRead(record())) == [ev.Connect(story.core.conn, record())]


def refused(story: Story, *, is_reset: bool, is_here: bool = False) -> list[Any]:
    """The connection ends, and the port refuses another."""
    story.tell(ev.ConnectionLost(story.core.conn, "it is gone", is_reset))
    return story.tell(ev.ConnectFailed(story.core.conn, True, "refused", is_here))


def test_a_port_that_refuses_after_a_reset_proves_nothing_unless_it_is_of_this_machine() -> None:
    """A firewall resets connections, and refuses new ones, in the name of a coordinator that lives."""
    assert refused(busy(), is_reset=True) == []
    assert refused(busy(), is_reset=True, is_here=True) == [ev.ReadBoard()]
    assert refused(busy(), is_reset=False) == [ev.ReadBoard()]
    story = busy()
    refused(story, is_reset=True)
    for _ in range(20):
        assert story.pass_deadline()[-1] == ev.ReadBoard()
        assert story.tell(ev.BoardRead(record()))[-1] == ev.Connect(story.core.conn, record())
        assert story.tell(ev.ConnectFailed(story.core.conn, True, "refused")) == []


@pytest.mark.parametrize("how", ["its process ended", "it left", "cut off", "deposed"])
def test_the_next_coordinator_hears_that_the_agent_of_the_last_one_has_ended(how: str) -> None:
    story = busy()
    seats = tuple(m.Seat(each, f"host-{each}", "10.0.0.1", 7) for each in ("boss", "me", "other"))
    story.hear(m.Seats(4_001, 1, "secret", seats))
    if how in {"its process ended", "cut off"}:
        refused(story, is_reset=how == "cut off")
    else:
        story.hear(m.Goodbye(how, how == "it left"))
    has_ended = how in {"its process ended", "it left"}
    if how == "cut off":
        story.pass_deadline()  # the board is read again
    for heir in ("heir", "second heir"):  # the first one goes before a round begins
        next_ = record(story.core.leader.epoch + 1, node_id=heir)
        story.tell(ev.BoardRead(next_))
        assert story.hello.ended == (("boss",) if has_ended else ())
        story.hear(m.Welcome(next_.epoch, LEASE_S), m.Goodbye("another leads", False))
    story.tell(ev.BoardRead(record(9)))
    assert story.hello.ended == (), "it lives: it listens"


def test_a_refusal_long_after_the_connection_was_closed_proves_nothing() -> None:
    """A coordinator hangs up on a node that it does not hear; later something in between refuses in its name."""
    story = busy()
    story.tell(ev.ConnectionLost(story.core.conn, "closed"), ev.ConnectFailed(2, False, "timed out"))
    story.pass_deadline()
    story.tell(ev.BoardRead(record()))
    assert story.tell(ev.ConnectFailed(3, True, "refused")) == []


def test_a_refusal_after_a_last_word_proves_nothing() -> None:
    """This node was suspended, and was given up: it finds the close of its connection late, as one of just now."""
    story = busy()
    assert story.hear(m.GivenUp()) == [ev.Disconnect(), ev.Connect(2, record())]
    assert story.tell(ev.ConnectFailed(2, True, "refused")) == []


def test_a_coordinator_that_refuses_and_misses_two_renewals_is_gone() -> None:
    story = busy_at(renewals=7)
    heard_at = story.now
    refused(story, is_reset=True)
    while True:
        story.pass_deadline()
        actions = story.tell(ev.BoardRead(record(renewals=7)))
        if isinstance(actions[-1], ev.Campaign):
            break
        story.tell(ev.ConnectFailed(story.core.conn, True, "refused"))
    assert LEASE_S * DOUBTED_LEASES <= story.now - heard_at < LEASE_S * DOUBTED_LEASES + 2 * READ_AGAIN_S


def test_a_refused_leader_whose_place_the_board_does_not_give_away_is_asked_again() -> None:
    """It has renewed meanwhile; or, with static, no other agent may lead."""
    story = busy()
    refused(story, is_reset=False)
    assert story.tell(ev.BoardRead(record())) == [ev.Campaign(record(), 4)]
    assert story.tell(ev.BoardRead(record())) == []
    assert story.pass_deadline() == [ev.ReadBoard()]
    assert story.tell(ev.BoardRead(record())) == [ev.Connect(3, record())]


def test_of_a_late_coordinator_a_renewal_that_was_not_heard_is_seen_soon() -> None:
    """What it sends arrives once, and nothing comes to it: its last renewal has counted, and it could not be told."""
    story = busy_at(7)
    late_at = story.now + LEASE_S * LATE_LEASES
    while (actions := story.pass_deadline()) == [ev.Send(m.Alive())]:
        pass
    assert (story.now, actions) == (late_at, [ev.ReadBoard()])
    assert story.tell(ev.BoardRead(record(renewals=8))) == []
    story.be_silent_until(late_at + LEASE_S * LATE_LEASES)
    assert story.core.phase is Phase.READING
    assert story.tell(ev.BoardRead(record(renewals=8))) == [ev.Connect(2, record(renewals=8))]
    # The attempt to connect hangs; the count has stood still since it was seen first.
    story.now = late_at + LEASE_S
    story.tell(ev.DeadlinePassed())
    assert story.tell(ev.BoardRead(record(renewals=8))) == [ev.Disconnect(), ev.Campaign(record(renewals=8), 4)]


def test_a_coordinator_that_is_heard_again_is_not_late() -> None:
    story = busy_at(7)
    story.now += LEASE_S * LATE_LEASES
    assert ev.ReadBoard() in story.tell(ev.DeadlinePassed())
    story.tell(ev.BoardRead(record(renewals=8)))
    story.hear(m.Heartbeat(8))
    heard_at = story.now
    story.be_silent_until(heard_at + LEASE_S)
    assert story.tell(ev.BoardRead(record(renewals=8)))[-1] == ev.Campaign(record(renewals=8), 4)


def test_a_board_that_has_forgotten_the_leader_ends_an_attempt_to_connect_to_it() -> None:
    story = busy()
    story.tell(ev.ConnectionLost(1, "reset", is_reset=True))
    story.now = story.core.contact.look_at
    assert story.tell(ev.DeadlinePassed()) == [ev.ReadBoard()]
    assert story.tell(ev.BoardRead(None)) == [ev.Disconnect(), ev.Campaign(None, 4)]


# Given up by a leader that lives.


def busy_at(renewals: int | None) -> Story:
    """A node of a round, whose coordinator has renewed so often."""
    story = member(renewals)
    story.hear(assigned())
    if renewals is not None:
        story.hear(m.Heartbeat(renewals))
    return story


def silent_until(story: Story, after_s: float, renewals: Callable[[], int | None]) -> list[m.Interrupted]:
    """The coordinator is silent, cannot be connected to, and renews on the board; what the workers are told."""
    began, told = story.now, list[m.Interrupted]()
    story.core.search.timeout_s = 1e6
    attempt_until = 0.0
    while story.now < began + after_s:
        story.now += 0.05
        actions = story.tell(ev.DeadlinePassed())
        if story.core.phase is Phase.CONNECTING and story.now > attempt_until:
            actions += story.tell(ev.ConnectFailed(story.core.conn, False, "timed out"))
        while any(isinstance(action, ev.ReadBoard) for action in actions):
            told += [a.message for a in actions if isinstance(a, ev.Deliver) and isinstance(a.message, m.Interrupted)]
            if any(isinstance(action, ev.Connect) for action in actions):
                attempt_until = story.now + 2.5
            actions = story.tell(ev.BoardRead(record(renewals=renewals())))
        if any(isinstance(action, ev.Connect) for action in actions):
            attempt_until = story.now + 2.5
        told += [a.message for a in actions if isinstance(a, ev.Deliver) and isinstance(a.message, m.Interrupted)]
    return told


@pytest.mark.parametrize("is_leased", [False, True], ids=["counting board", "leased board"])
def test_a_node_that_a_living_coordinator_has_given_up_stops_its_workers_within_a_lease_and_a_second(
    is_leased: bool,
) -> None:
    story = busy_at(None if is_leased else 7)
    began = story.now

    def renewals() -> int | None:
        return None if is_leased else 7 + int((story.now - began) / (LEASE_S / 3))

    assert silent_until(story, LEASE_S, renewals) == []
    (told,) = silent_until(story, 1.0, renewals)
    assert told.round == 1 and told.restart_count == 0
    text = "no message from the coordinator for 6.7 s, but it renews its lease: this node was removed"
    assert told.reason == text
    assert story.core.state.standing is m.Standing.STOPPING
    assert silent_until(story, 60.0, renewals) == [], "once is enough"


@pytest.mark.parametrize("renewed", [7, 8])
def test_a_node_whose_coordinator_may_be_dead_keeps_its_workers(renewed: int) -> None:
    """The last renewal may have been made just before its host fell silent."""
    story = busy_at(7)
    story.core.leader.lease_s = 1e6  # nothing is said of the election here
    story.tell(ev.ConnectionLost(1, "reset", is_reset=True))
    assert silent_until(story, 3 * LEASE_S, lambda: renewed) == []


def test_another_leader_than_before_has_a_lease_to_be_heard() -> None:
    story = busy_at(None)
    silent_until(story, LEASE_S + 0.5, lambda: None)
    story.tell(ev.ConnectFailed(story.core.conn, False, "timed out"))
    story.pass_deadline()
    story.tell(ev.BoardRead(record(5, node_id="boss2")))
    seen_at = story.now
    assert story.core.contact.since == seen_at
    assert story.core.contact.look_at == seen_at + LEASE_S + MARGIN_S


def watch(story: Story, counts: list[int], step_s: float) -> list[Any]:
    """Reads the board again and again; the leader there cannot be reached."""
    assert step_s >= READ_AGAIN_S
    story.core.search.timeout_s = 1e6
    actions: list[Any] = []
    for renewals in counts:
        if story.core.phase is Phase.CONNECTING:
            story.tell(ev.ConnectFailed(story.core.conn, False, "timed out"))
        story.now += step_s
        story.tell(ev.DeadlinePassed())
        actions = story.tell(ev.BoardRead(record(renewals=renewals)))
    return actions


def test_a_coordinator_whose_renewals_stand_still_for_a_lease_is_gone() -> None:
    story = reading()
    assert watch(story, [7] * 6, LEASE_S / 5 - 0.1) == [ev.Connect(6, record(renewals=7))]
    assert watch(story, [7], 0.6) == [ev.Campaign(record(renewals=7), 0)]


def test_a_coordinator_whose_renewals_rise_is_alive() -> None:
    story = reading()
    assert isinstance(watch(story, list(range(100)), LEASE_S / 2)[0], ev.Connect)


def test_renewals_stand_still_since_they_were_first_read() -> None:
    story = reading()
    watch(story, [7, 7, 8], LEASE_S / 2 - 0.1)
    assert isinstance(watch(story, [8, 8], LEASE_S / 2 - 0.1)[0], ev.Connect)
    assert isinstance(watch(story, [8], 0.3)[0], ev.Campaign)


def test_another_leader_with_the_same_renewals_is_another() -> None:
    story = reading()
    watch(story, [7], 1.0)
    story.tell(ev.ConnectFailed(1, False, "x"))
    story.now += LEASE_S
    story.tell(ev.DeadlinePassed())
    other = record(5, node_id="boss2", renewals=7)
    assert story.tell(ev.BoardRead(other)) == [ev.Connect(2, other)]


def test_renewals_that_were_heard_stand_still_since_they_were_heard() -> None:
    story = member(renewals=0)
    story.now += 1.0
    story.hear(m.Heartbeat(3))
    assert story.be_silent_until(101.0 + LEASE_S)[-2:] == [ev.Disconnect(), ev.ReadBoard()]
    assert story.tell(ev.BoardRead(record(renewals=3))) == [ev.Campaign(record(renewals=3), 4)]


def test_renewals_that_were_not_heard_stand_still_since_they_were_read() -> None:
    """A renewal that this node has not heard of may have been made just now."""
    story = member(renewals=0)
    story.hear(m.Heartbeat(3))
    story.be_silent_until(100.0 + LEASE_S)
    assert story.tell(ev.BoardRead(record(renewals=4))) == [ev.Connect(2, record(renewals=4))]
    story.tell(ev.ConnectFailed(2, False, "timed out"))
    assert isinstance(watch(story, [4], LEASE_S)[0], ev.Campaign)


@pytest.mark.parametrize("answer", [ev.Connected(2), ev.ConnectFailed(2, False, "timed out")])
def test_an_attempt_that_was_given_up_may_have_been_answered_already(answer: ev.Event) -> None:
    """The agent was suspended, and finds both in its mailbox: what the board says, and how the attempt ended."""
    story = checking()
    connect = story.tell(ev.ConnectionLost(1, "reset"))[-1]
    assert isinstance(connect, ev.Connect)
    assert connect.conn == 2
    ours = record(5, node_id="me")  # of an earlier term
    assert story.tell(ev.BoardRead(ours)) == [ev.Disconnect(), ev.Campaign(ours, 4)]
    assert story.tell(answer) == []
    assert story.core.phase is Phase.CAMPAIGNING


def test_a_board_that_forgets_dead_leaders_itself_is_believed() -> None:
    story = member()
    story.core.search.timeout_s = 1e6
    story.tell(ev.ConnectionLost(1, "reset"))
    for _ in range(10):
        story.tell(ev.ConnectFailed(story.core.conn, False, "timed out"))
        story.now += LEASE_S
        story.tell(ev.DeadlinePassed())
        assert isinstance(story.tell(ev.BoardRead(record()))[-1], ev.Connect)


# Elected.


def test_a_record_of_an_earlier_term_of_this_node_is_campaigned_against() -> None:
    """The answer to the campaign was lost; or the term has ended."""
    story = reading()
    ours = record(3, node_id="me")
    assert story.tell(ev.BoardRead(ours)) == [ev.Campaign(ours, 0)]
    newer = record(4, node_id="me")
    assert story.tell(ev.BoardRead(newer)) == [ev.Lead(newer, False), ev.Connect(1, newer)]


def test_a_node_leads_once_in_a_term() -> None:
    story = campaigning()
    ours = record(1, node_id="me")
    story.tell(ev.BoardRead(ours), ev.ConnectFailed(1, False, "x"))
    story.pass_deadline()
    assert story.tell(ev.BoardRead(ours)) == [ev.Connect(2, ours)]


def test_a_node_whose_coordinator_has_not_stepped_down_yet_does_not_campaign() -> None:
    """Else it would be elected, and begin no term beside the old one: the others would wait for it for a lease."""
    story = campaigning()
    ours = record(1, node_id="me")
    story.tell(ev.BoardRead(ours), ev.Connected(1), ev.Received(1, m.Welcome(1, LEASE_S)))
    story.hear(m.Goodbye("another agent is coordinator now", False))
    assert story.tell(ev.BoardRead(None)) == []
    story.tell(ev.LeadershipLost())
    assert ev.ReadBoard() in story.pass_deadline()
    assert story.tell(ev.BoardRead(None)) == [ev.Campaign(None, 1)]


def test_a_node_that_lost_the_leadership_leads_again_only_after_an_election() -> None:
    story = campaigning()
    ours = record(1, node_id="me")
    story.tell(ev.BoardRead(ours), ev.Connected(1), ev.Received(1, m.Welcome(1, LEASE_S)))
    assert story.tell(ev.LeadershipLost()) == []
    assert story.hear(m.Goodbye("another agent is coordinator now", False)) == [ev.Disconnect(), ev.ReadBoard()]
    assert story.tell(ev.BoardRead(record(2))) == [ev.Connect(2, record(2))]
    assert not story.core.is_leader


# Epochs.


def test_a_coordinator_of_an_older_epoch_is_not_followed() -> None:
    story = busy()
    story.tell(ev.ConnectionLost(1, "reset"), ev.Connected(2))
    assert story.hear(m.Welcome(3, LEASE_S)) == [ev.Disconnect()]
    assert story.pass_deadline() == [ev.ReadBoard()]
    assert story.core.leader.epoch == 4


def test_a_leader_may_get_a_newer_epoch_and_stays_the_same() -> None:
    story = busy()
    assert story.hear(m.Welcome(9, LEASE_S)) == []
    assert (story.core.leader.epoch, story.core.phase) == (9, Phase.MEMBER)
    story.tell(ev.ConnectionLost(1, "reset"))
    assert story.tell(ev.ConnectFailed(2, True, "refused")) == [ev.ReadBoard()]
    assert story.tell(ev.BoardRead(LeaderRecord(9, record().candidate))) == [
        ev.Campaign(LeaderRecord(9, record().candidate), 9)
    ]


def test_without_a_board_a_node_goes_back_to_its_coordinator() -> None:
    story = busy()
    story.tell(ev.ConnectionLost(1, "reset"), ev.ConnectFailed(2, False, "timed out"))
    story.pass_deadline()
    assert story.tell(ev.BoardFailed("no answer")) == [ev.Connect(3, record())]
    story.tell(ev.ConnectFailed(3, False, "timed out"))
    assert story.left_s == READ_AGAIN_S


def test_without_a_board_a_coordinator_that_refuses_is_tried_again_and_not_all_the_time() -> None:
    story = busy()
    story.tell(ev.ConnectionLost(1, "reset"))
    assert story.tell(ev.ConnectFailed(2, True, "refused")) == [ev.ReadBoard()]
    assert story.tell(ev.BoardFailed("no answer")) == [ev.Connect(3, record())]
    assert story.tell(ev.ConnectFailed(3, True, "refused")) == []
    assert story.left_s == READ_AGAIN_S


def test_without_a_board_a_coordinator_that_has_said_goodbye_is_not_tried_again() -> None:
    story = busy()
    story.hear(m.Goodbye("another agent is coordinator now", False))
    assert story.tell(ev.BoardFailed("no answer")) == []
    assert story.left_s == READ_AGAIN_S
    assert story.pass_deadline() == [ev.ReadBoard()]


# The end.


def test_a_verdict_on_the_board_is_delivered_to_a_node_that_was_a_member() -> None:
    for story in (member(), busy()):
        story.tell(ev.ConnectionLost(1, "reset"), ev.ConnectFailed(2, True, "refused"))
        assert story.tell(ev.BoardRead(record(verdict=to_text(SUCCEEDED)))) == [ev.Deliver(SUCCEEDED)]
        assert (story.core.phase, story.core.deadline) == (Phase.OVER, None)


def test_a_verdict_in_a_record_of_this_node_is_delivered_too() -> None:
    story = campaigning()
    ours = record(1, node_id="me")
    story.tell(ev.BoardRead(ours), ev.Connected(1), ev.Received(1, m.Welcome(1, LEASE_S)), ev.LeadershipLost())
    story.hear(m.Goodbye("x", False))
    assert story.tell(ev.BoardRead(record(1, node_id="me", verdict=to_text(SUCCEEDED)))) == [ev.Deliver(SUCCEEDED)]


def test_a_verdict_from_before_this_agent_started_is_not_its_own() -> None:
    old = record(verdict=to_text(SUCCEEDED))
    assert reading().tell(ev.BoardRead(old)) == [ev.Connect(1, old)]


@pytest.mark.parametrize("text", ["x", "null", '["Heartbeat",{"renewals":1}]', to_text(m.Waiting("x")), "\ud800"])
def test_a_verdict_that_no_agent_wrote_is_unreadable(text: str) -> None:
    story = busy()
    story.hear(m.Goodbye("x", True))
    assert story.tell(ev.BoardRead(record(verdict=text))) == [
        ev.GiveUp("the job has ended, but its result in the rendezvous store is unreadable", False)
    ]
    assert (story.core.phase, story.core.deadline) == (Phase.OVER, None)


def test_a_node_alone_finds_itself() -> None:
    """The whole way, with a board that does what boards do."""
    story = reading()
    (candidate,) = story.tell(ev.BoardRead(None))
    ours = LeaderRecord(candidate.above + 1, Candidate("me", ("127.0.0.1",), 4000, "t"), 0)
    assert story.tell(ev.BoardRead(ours)) == [ev.Lead(ours, False), ev.Connect(1, ours)]
    assert json.loads(to_text(m.Waiting("x"))) and story.hello.seen_epoch == 0
    story.hear(m.Welcome(1, LEASE_S))
    assert story.hear(assigned()) == [ev.Deliver(assigned())]
    assert story.core.deadline == story.now + LEASE_S / 3
