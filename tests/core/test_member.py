"""A member: stories as text (`stories/member/`), each phase with each event, and the cases stories don't show."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.stories import member as phases
from kit.stories.member import (
    FAILURE,
    FIRST,
    LEASE_S,
    NODE,
    RUNS,
    SUCCEEDED,
    TERM,
    TERMS,
    WELCOME,
    Story,
    after,
    alone,
    assigned,
    busy,
    campaign,
    interrupted,
    leader_at,
    of_log,
    spare,
    stored,
    verdict_after,
)

from aelastic.rdzv.decisions.cause import CauseKind
from aelastic.rdzv.log.entries import Accepted, Payload, first_entry
from aelastic.rdzv.log.node import Close, EndedLeader, Node, status_of
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.member import (
    CANDIDATE_S,
    LOOK_S,
    MARGIN_S,
    PAUSE_MAX_S,
    PAUSE_S,
    STAGGER_S,
    TURN_OF_VOTERS_S,
    VOTES_AFTER,
)
from aelastic.rdzv.member.member_events import Phase
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import PROTOCOL, UPWARD, Decoder, encode

BOSS, OTHER = leader_at(), leader_at("other", TERM + 1)
STORIES: dict[Phase, Callable[[], Story]] = {
    Phase.SEARCHING: phases.searching,
    Phase.CAMPAIGNING: phases.campaigning,
    Phase.CONNECTING: phases.connecting,
    Phase.FOLLOWING: phases.following,
    Phase.OVER: phases.over,
}
SECOND = after(FIRST, *phases.VOTERS)
ELSEWHERE = first_entry(9, "xy", "xy", ("2f",))  # from another log


def of_kind(actions: list[Any], kind: type) -> list[Any]:
    return [each for each in actions if isinstance(each, kind)]


def statuses(actions: list[Any]) -> list[m.Status]:
    """The statuses sent to the leader."""
    sent = [each.message for each in of_kind(actions, ev.Send)]
    return [each.status if isinstance(each, m.Hello) else each for each in sent if isinstance(each, m.Hello | m.Status)]


def stops(actions: list[Any]) -> list[CauseKind]:
    """The reasons given for stopping the workers."""
    delivered = [each.message for each in of_kind(actions, ev.Deliver)]
    return [each.decision.cause.kind for each in delivered if isinstance(each, m.Interrupted)]


def test_each_phase_has_a_story_here() -> None:
    assert {phase: build().core.phase for phase, build in STORIES.items()} == {phase: phase for phase in Phase}


# Each phase and each event.

LOST = ev.LeadershipLost(Node("me", 5), "me-5", "too few nodes voted for this one")
EVENTS: list[ev.Event] = [
    ev.Submitted(m.Ready(NODE)),
    ev.Submitted(m.Left("me", "SIGTERM")),
    ev.CellAnswered(None),
    ev.CellFailed("no answer"),
    ev.Campaigned(7, campaign(term=0, committed=None)),
    ev.Declined(TERM + 1, OTHER),
    ev.Leading(leader_at("me", 5), 5),
    LOST,
    ev.Connected(1),
    ev.ConnectFailed(1, True, "refused"),
    ev.Received(1, m.Probe()),
    ev.ConnectionLost(1, "its connection closed", Close.ORDERLY),
    ev.DeadlinePassed(),
]


def status_after(story: Story, ready_count: int, left: m.Left | None = None) -> m.Status:
    """The status of a node that has been ready `ready_count` times and has not been in a round yet."""
    known = None if story.core.log is None else status_of(story.core.log)
    return m.Status(NODE, m.Past(m.NodePhase.READY), ready_count, left=left, log=known)


def answers(phase: Phase, story: Story) -> dict[type, list[Any]]:
    """The actions after each event, without events that have none."""
    log, other = story.core.log, "this node knows another log"
    declined = m.Declined(0, "this agent campaigns") if log is None else m.Declined(log.term, other)
    found: dict[type, list[Any]] = {ev.Campaigned: [ev.Answer(7, declined)]}
    match phase:
        case Phase.SEARCHING:
            seen = story.core.sight.seen.after(None, story.now)
            found[ev.CellAnswered] = [ev.Campaign(Node("me"), 0, True, (), seen)]
            found[ev.Declined] = [ev.Connect(1, OTHER)]
        case Phase.CAMPAIGNING:
            found[ev.Leading] = [ev.Connect(1, leader_at("me", 5))]
            found[ev.LeadershipLost] = [ev.ReadCell()]
        case Phase.CONNECTING:
            found[ev.Connected] = [ev.Send(m.Hello(PROTOCOL, TERMS, BOSS.token, "me", status_after(story, 1)))]
            found[ev.Received] = [ev.Send(m.Alive())]
            found[ev.ConnectionLost] = [ev.ReadCell()]
        case Phase.FOLLOWING:
            found[ev.Submitted] = [ev.Send(status_after(story, 2))]
            found[ev.Received] = [ev.Send(m.Alive())]
            found[ev.ConnectionLost] = [ev.ReadCell()]
        case Phase.OVER:
            found = {}
    return found


# Each of these answers a request made in one phase; any answer may still arrive after the end.
ASKED_IN: dict[type, set[Phase]] = {
    ev.Leading: {Phase.CAMPAIGNING, Phase.OVER},
    ev.LeadershipLost: {Phase.CAMPAIGNING, Phase.OVER},
    ev.Connected: set(Phase) - {Phase.FOLLOWING},
    ev.ConnectFailed: set(Phase) - {Phase.FOLLOWING},
}
PAIRS = [(phase, event) for phase in Phase for event in EVENTS if phase in ASKED_IN.get(type(event), set(Phase))]


def test_every_event_has_an_example_here() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(ev.Event))


@pytest.mark.parametrize("phase, event", PAIRS, ids=lambda each: each if isinstance(each, str) else type(each).__name__)
def test_each_event_is_decided_in_each_phase(phase: Phase, event: ev.Event) -> None:
    story = STORIES[phase]()
    expected = answers(phase, story)
    if phase is Phase.OVER:
        story.now += 10_000
    leaves = event == ev.Submitted(m.Left("me", "SIGTERM"))
    actions = story.handle(event)
    if leaves:
        is_sent = phase is Phase.FOLLOWING
        assert actions == [ev.Send(status_after(story, 1, m.Left("me", "SIGTERM")))] * is_sent
    else:
        assert actions == expected.get(type(event), [])
    if leaves or phase is Phase.OVER:
        assert (story.core.phase, story.core.deadline) == (Phase.OVER, None)


@pytest.mark.parametrize("phase", Phase)
def test_a_deadline_that_fires_early_changes_nothing(phase: Phase) -> None:
    story = STORIES[phase]()
    before = copy.deepcopy(story.core)
    assert story.handle(ev.DeadlinePassed()) == []
    assert story.core == before


def test_the_rules_are_checked_after_each_event() -> None:
    story = phases.searching()
    story.core.log = None
    story.core.phase = Phase.FOLLOWING
    with pytest.raises(AssertionError, match="a connection is to an agent that leads, or wants to"):
        story.handle(ev.CellFailed("no answer"))


def test_what_is_submitted_before_there_is_a_connection_is_first_said_in_its_greeting() -> None:
    """The connection is up, but the member does not know yet: a leader rejects anything sent before `Hello`."""
    story = phases.connecting()
    assert story.handle(ev.Submitted(m.Ready(NODE))) == []
    (hello,) = statuses(story.handle(ev.Connected(1)))
    assert hello.ready_count == 2


# The cell, and campaigns.


def test_an_agent_campaigns_where_the_cell_names_nobody() -> None:
    for cell, highest in ((None, 0), (stored("", TERM), TERM)):
        story = phases.searching()
        (action,) = story.handle(ev.CellAnswered(cell))
        seen = story.core.sight.seen
        assert action == ev.Campaign(Node("me"), highest, True, (), seen) and story.core.phase is Phase.CAMPAIGNING


def test_an_agent_connects_to_the_leader_that_the_cell_names_and_campaigns_against_itself() -> None:
    """It was elected, and either its leadership has ended since or it never learned that it was elected."""
    assert phases.searching().handle(ev.CellAnswered(stored())) == [ev.Connect(1, BOSS)]
    (action,) = phases.searching().handle(ev.CellAnswered(stored("me", TERM)))
    assert isinstance(action, ev.Campaign) and action.highest == TERM


def until_campaign(story: Story, cell: m.StoredCell | None, actions: list[Any]) -> ev.Campaign:
    """Lets time pass, with the same answer from the endpoint, until the agent campaigns."""
    while not of_kind(actions, ev.Campaign):
        actions = story.pass_deadline()
        if ev.ReadCell() in actions:
            actions += story.handle(ev.CellAnswered(cell))
    (campaign,) = of_kind(actions, ev.Campaign)
    assert isinstance(campaign, ev.Campaign)
    return campaign


def looks(story: Story, renewals: Callable[[], int]) -> float:
    """Returns how long an agent that cannot reach the cell's leader rereads the cell before it campaigns."""
    began = story.now
    actions = story.handle(ev.CellAnswered(stored(renewals=renewals())))
    while not of_kind(actions, ev.Campaign):
        assert story.now - began < 10 * LEASE_S, "it never campaigns"
        if story.core.phase is Phase.CONNECTING:
            actions = story.handle(ev.ConnectFailed(story.core.conn, False, "timed out"))
        actions = story.pass_deadline()
        if ev.ReadCell() in actions:
            actions = story.handle(ev.CellAnswered(stored(renewals=renewals())))
    return story.now - began


def test_a_leader_that_renews_nothing_for_a_lease_is_gone() -> None:
    story = phases.searching()
    assert LEASE_S <= looks(story, lambda: 7) < LEASE_S + 0.5


def test_a_leader_that_renews_lives_until_it_has_stopped_for_a_lease() -> None:
    story = phases.searching()
    began = story.now
    assert 5 + LEASE_S <= looks(story, lambda: int(min(story.now - began, 5))) < 5 + LEASE_S + 0.5


@pytest.mark.parametrize("voters", [("me", "other", "third"), ("boss", "me", "other"), ("a", "b", "me")])
def test_voters_campaign_one_after_the_other_once_the_leader_has_ended(voters: tuple[str, ...]) -> None:
    story = busy()
    story.core.log = story.node.replace(committed=first_entry(TERM, voters, voters, ("1f",)))
    action = until_campaign(story, stored(), story.lose_leader())
    assert story.now - 100.0 == pytest.approx(voters.index("me") * STAGGER_S)
    assert (action.highest, action.has_listened, action.gone) == (TERM, False, (BOSS.token,))


def test_a_leader_that_has_ended_is_not_connected_to_again_though_the_cell_names_it() -> None:
    story = alone()
    assert story.handle(ev.CellAnswered(stored(renewals=9))) == []
    (action,) = story.pass_deadline()
    assert isinstance(action, ev.Campaign) and action.seen.leader == BOSS.token


def test_a_voter_waits_a_lease_for_a_leader_whose_connection_broke_and_whose_cell_does_not_answer() -> None:
    story = alone(Close.ABORTED)  # it reconnects once
    story.handle(ev.ConnectFailed(story.core.conn, False, "timed out"))
    began, done = story.now, list[Any]()
    while not of_kind(done, ev.Campaign):
        done = story.pass_deadline()
        if ev.ReadCell() in done:
            done += story.handle(ev.CellFailed("no answer"))
    assert story.now - began == pytest.approx(LEASE_S + STAGGER_S)
    assert of_kind(done, ev.Campaign)[0].has_listened


def test_a_cell_that_names_another_leader_ends_the_wait() -> None:
    story = alone(Close.ABORTED)
    story.handle(ev.ConnectFailed(story.core.conn, False, "timed out"))
    while ev.ReadCell() not in story.pass_deadline():
        pass
    assert story.handle(ev.CellAnswered(stored("other", TERM + 1))) == [ev.Connect(story.core.conn, OTHER)]


@pytest.mark.parametrize("knows", ["the entry", "its id"])
def test_a_node_without_a_vote_leaves_the_voters_their_turn(knows: str) -> None:
    story = spare() if knows == "its id" else busy()
    if knows == "the entry":
        story.core.log = story.node.replace(committed=after(FIRST, "boss", "other"))
    story.lose_leader()
    resigned = stored("", TERM)
    until_campaign(story, resigned, story.handle(ev.CellAnswered(resigned)))
    assert story.now - 100.0 == pytest.approx(LEASE_S + TURN_OF_VOTERS_S)


def test_where_the_store_alone_decides_any_node_campaigns_at_once() -> None:
    story = spare()
    story.core.do_nodes_vote = False
    story.lose_leader()
    assert of_kind(story.handle(ev.CellAnswered(stored("", TERM))), ev.Campaign)


def test_an_agent_that_may_not_lead_asks_the_cell_forever() -> None:
    story = Story(may_lead=False)
    story.handle(phases.READY)
    for _ in range(20):
        assert story.handle(ev.CellAnswered(None)) == []
        while ev.ReadCell() not in story.pass_deadline():
            pass
    assert story.core.phase is Phase.SEARCHING


@pytest.mark.parametrize("stand_back_s", [0.0, 3.5])
def test_after_a_campaign_that_was_lost_an_agent_pauses(stand_back_s: float) -> None:
    story = phases.campaigning()
    began = story.now
    node = Node("me", 5, voted_for="me")
    assert story.handle(ev.LeadershipLost(node, "me-5", "lost all other nodes at once", stand_back_s)) == [
        ev.ReadCell()
    ]
    assert story.node is node
    cell = stored("me", 5)
    action = until_campaign(story, cell, story.handle(ev.CellAnswered(cell)))
    assert story.now - began == pytest.approx(max(PAUSE_S, stand_back_s)) and action.highest == 5


def test_what_the_endpoint_said_before_it_fell_silent_is_not_a_reason_to_campaign() -> None:
    story = phases.campaigning()
    lost = ev.LeadershipLost(Node("me", 5), "me-5", "another agent leads the job now")
    assert of_kind(story.handle(lost, ev.CellAnswered(stored("me", 5))), ev.Campaign) == [], "it pauses first"
    actions, until = story.handle(ev.CellFailed("no answer")), story.now + 4 * PAUSE_S
    while story.now < until:
        assert of_kind(actions, ev.Campaign) == []
        actions = story.pass_deadline()
        if ev.ReadCell() in actions:
            actions = story.handle(ev.CellFailed("no answer"))


def pauses(node_id: str, candidacies: int) -> list[float]:
    """How long an agent waits after each of several candidacies without a quorum."""
    story, cell, found = phases.campaigning(), stored("", 5), list[float]()
    story.core.node_id = node_id
    for _ in range(candidacies):
        began = story.now
        lost = ev.LeadershipLost(Node(node_id, 5), "me-5", "there is no quorum", lacks_quorum=True)
        until_campaign(story, cell, story.handle(lost, ev.CellAnswered(cell)))
        found.append(story.now - began)
    return found


def test_agents_that_find_no_quorum_pause_longer_each_time_and_each_for_another_time() -> None:
    one, other = pauses("one", 6), pauses("other", 6)
    assert one[0] < 2 * PAUSE_S and one[-1] >= PAUSE_MAX_S
    assert max(one + other) <= 2 * PAUSE_MAX_S
    assert sum(abs(mine - its) > STAGGER_S for mine, its in zip(one, other, strict=True)) >= 4


def test_a_leader_that_was_gone_is_followed_again_in_a_higher_term() -> None:
    """The leader's machine was suspended, and nobody else was elected meanwhile."""
    for later, is_followed in ((0, False), (2, True)):
        story, cell = phases.following(), stored()
        story.receive(m.Goodbye("another agent leads the job now", False))
        story.handle(ev.CellAnswered(cell))  # it campaigns itself, without success
        story.handle(ev.LeadershipLost(Node("me", TERM + 1), "me-5", "there is no quorum", lacks_quorum=True))
        actions = story.handle(ev.CellAnswered(cell.replace(cell=cell.cell.replace(term=TERM + later))))
        assert [each.leader for each in of_kind(actions, ev.Connect)] == [cell.leader] * is_followed


def test_a_silent_leader_is_followed_again_once_it_renews_the_cell() -> None:
    """With `static` nobody else can lead, so its term stays the same after its machine was suspended."""
    story = phases.following()
    story.core.may_lead = False
    while BOSS.token not in story.core.gone:
        if ev.ReadCell() in story.pass_deadline():
            story.handle(ev.CellAnswered(stored(renewals=7)))
    assert story.handle(ev.CellAnswered(stored(renewals=7))) == []
    assert of_kind(story.handle(ev.CellAnswered(stored(renewals=8))), ev.Connect)


@pytest.mark.parametrize("lacks_quorum", [True, False])
def test_a_node_that_gives_up_reports_it_if_too_few_nodes_that_vote_could_be_reached(*, lacks_quorum: bool) -> None:
    story = phases.campaigning()
    node, why = Node("me", 5, voted_for="me"), "there is no quorum: host-b cannot be reached"
    story.handle(ev.LeadershipLost(node, "me-5", why, lacks_quorum=lacks_quorum), ev.CellFailed("no answer"))
    (given_up,) = of_kind(until_given_up(story), ev.GiveUp)
    trouble = why if lacks_quorum else "no answer"
    assert given_up == ev.GiveUp(f"no leader for 60 s: {trouble}", is_refused=False, lacks_quorum=lacks_quorum)


def without_quorum(*events: ev.Event) -> Story:
    """A candidate without enough votes, after which the cell names a leader."""
    story = phases.campaigning()
    lost = ev.LeadershipLost(Node("me", 5), "me-5", "there is no quorum", lacks_quorum=True)
    story.handle(lost, ev.CellAnswered(stored("other", 6)), *events)
    return story


def test_that_a_connection_fails_does_not_hide_that_too_few_nodes_that_vote_could_be_reached() -> None:
    story = without_quorum(ev.ConnectFailed(1, False, "timed out"))
    (given_up,) = of_kind(until_given_up(story), ev.GiveUp)
    assert given_up.lacks_quorum


def test_that_too_few_nodes_that_vote_could_be_reached_is_over_once_there_is_a_leader() -> None:
    story = without_quorum(ev.Connected(1), ev.Received(1, m.Plan(6, LEASE_S, of_log(6, committed=None))))
    assert story.core.phase is Phase.FOLLOWING
    story.lose_leader()
    (given_up,) = of_kind(until_given_up(story), ev.GiveUp)
    assert not given_up.lacks_quorum


def until_given_up(story: Story) -> list[ev.Action]:
    """Lets time pass, without an answer from the endpoint, until the agent gives up."""
    actions: list[ev.Action] = []
    while not of_kind(actions, ev.GiveUp):
        actions = story.pass_deadline()
        if ev.ReadCell() in actions:
            actions += story.handle(ev.CellFailed("no answer"))
        if of_kind(actions, ev.Campaign):
            actions += story.handle(LOST)
    return actions


def test_a_candidate_that_lost_to_another_connects_to_the_leader_that_it_has_read_of() -> None:
    story = phases.campaigning()
    lost = ev.LeadershipLost(Node("me", 5), "me-5", "another agent leads the job now", stored=stored("boss", 6))
    assert story.handle(lost) == [ev.Connect(1, leader_at("boss", 6))]


def test_a_candidate_that_lost_reads_the_cell_before_it_campaigns_again() -> None:
    """The cell's earlier content, without a leader, is stale if the candidate lost to another."""
    story = phases.campaigning()
    assert story.handle(ev.LeadershipLost(Node("me", 5), "me-5", "another agent leads the job now")) == [ev.ReadCell()]
    story.now += 2 * PAUSE_S
    assert of_kind(story.handle(ev.DeadlinePassed()), ev.Campaign) == []
    assert story.handle(ev.CellAnswered(stored("boss", 6))) == [ev.Connect(1, leader_at("boss", 6))]


def test_a_candidate_that_stops_leading_gives_its_log_back_and_its_own_connection_shows_what_follows() -> None:
    story = phases.campaigning()
    story.handle(ev.Leading(leader_at("me", 5), 5), ev.Connected(1), ev.Received(1, m.Plan(5, LEASE_S)))
    assert (story.core.phase, story.core.is_leader) == (Phase.FOLLOWING, True)
    node = Node("me", 5, voted_for="me", committed=FIRST)
    assert story.handle(ev.LeadershipLost(node, "me-5", "another agent leads the job now")) == []
    assert story.node is node and story.core.phase is Phase.FOLLOWING
    assert story.receive(m.Goodbye("another agent leads the job now", False)) == [ev.Disconnect(), ev.ReadCell()]
    assert story.handle(ev.CellAnswered(stored("me", 5))) == [], "it no longer leads"


@pytest.mark.parametrize("answer", [ev.CellAnswered(stored("me", 5)), ev.CellFailed("no answer")])
@pytest.mark.parametrize("lost", [ev.ConnectionLost(1, "reset", Close.ABORTED), ev.ConnectFailed(1, False, "no way")])
def test_a_node_whose_own_agent_leads_connects_to_it_again(lost: ev.Event, answer: ev.Event) -> None:
    """Its first connection broke before it read a plan from it."""
    story = phases.campaigning()
    story.handle(ev.Leading(leader_at("me", 5), 5))
    if isinstance(lost, ev.ConnectionLost):
        story.handle(ev.Connected(1))
    actions = story.handle(lost)
    while ev.ReadCell() not in actions:
        actions = story.pass_deadline()
    assert story.handle(answer) == [ev.Connect(2, leader_at("me", 5))]


def test_the_highest_term_that_a_node_has_learned_of_is_campaigned_above() -> None:
    story = alone()
    story.handle(ev.Campaigned(7, campaign(term=TERM + 9, committed=ELSEWHERE)), ev.Declined(TERM + 20, None))
    (action,) = of_kind(story.wait(1.0), ev.Campaign)
    assert action.highest == TERM + 20


def test_voters_are_asked_who_leads_while_the_cell_is_silent() -> None:
    story = alone(Close.ABORTED)
    story.handle(ev.ConnectFailed(story.core.conn, False, "timed out"))
    while ev.ReadCell() not in story.pass_deadline():
        pass
    assert story.handle(ev.CellFailed("no answer")) == [ev.AskWhoLeads()]
    assert story.handle(ev.Declined(TERM + 1, None), ev.Declined(TERM, BOSS)) == [ev.Connect(story.core.conn, BOSS)]
    newcomer = phases.searching()
    assert newcomer.handle(ev.CellFailed("no answer")) == [], "it knows no voters"


def test_a_leader_that_has_ended_is_not_believed_to_lead() -> None:
    story = alone()
    assert story.handle(ev.Declined(TERM, BOSS)) == [], "the voter that answered has yet to see it"
    assert story.handle(ev.Declined(TERM + 1, OTHER)) == [ev.Connect(2, OTHER)]


# Votes.


@pytest.mark.parametrize("close", [Close.ORDERLY, Close.GOODBYE])
def test_a_node_votes_by_connecting_and_its_greeting_is_its_promise(close: Close) -> None:
    story = busy()
    if close is Close.GOODBYE:
        story.receive(m.Goodbye("the leader's agent is leaving", False))
    else:
        story.lose_leader(close)
    assert story.handle(ev.Campaigned(7, campaign())) == [ev.Answer(7, None), ev.Connect(2, OTHER)]
    (action,) = story.handle(ev.Connected(2))
    assert (action.message.token, action.message.name) == (OTHER.token, "me")
    promise = action.message.status.log
    assert promise is not None and (promise.term, promise.committed) == (TERM + 1, FIRST)
    assert [each.name for each in promise.ended] == ["boss"] * (close is Close.ORDERLY)


OBJECTIONS: dict[str, tuple[Callable[[], Story], m.Campaign]] = {
    "asked who leads": (busy, campaign(term=0)),
    "this node knows another log": (alone, campaign(committed=ELSEWHERE)),
    "this node has a leader": (busy, campaign()),
    "this node has not lost its leader for long enough": (lambda: alone(Close.ABORTED), campaign()),
    "this node knows of term 4": (alone, campaign(term=TERM)),
}


@pytest.mark.parametrize("why", OBJECTIONS)
def test_a_vote_that_is_not_given_has_a_reason(why: str) -> None:
    make, asks = OBJECTIONS[why]
    story = make()
    leader = BOSS if story.core.phase is Phase.FOLLOWING else None
    before = story.core.phase, story.core.conn, story.node
    assert story.handle(ev.Campaigned(7, asks)) == [ev.Answer(7, m.Declined(TERM, why, leader))]
    assert (story.core.phase, story.core.conn, story.node) == before


def test_a_node_votes_for_one_candidate_in_a_term_and_for_the_same_one_again() -> None:
    story = alone()
    story.handle(ev.Campaigned(7, campaign("other")))
    (answer,) = story.handle(ev.Campaigned(8, campaign("third")))
    assert answer == ev.Answer(8, m.Declined(TERM + 1, f"this node knows of term {TERM + 1}"))
    assert story.handle(ev.Campaigned(9, campaign("other")))[0] == ev.Answer(9, None), (
        "the answer was lost, and it asks again"
    )
    assert story.handle(ev.Campaigned(10, campaign("third", TERM + 2)))[0] == ev.Answer(10, None)


def test_a_node_that_has_received_nothing_for_a_lease_votes_though_its_timer_is_late() -> None:
    story = busy()
    story.now += LEASE_S
    answered, hung_up, connect = story.handle(ev.Campaigned(7, campaign()))
    assert (answered, hung_up, connect) == (ev.Answer(7, None), ev.Disconnect(), ev.Connect(2, OTHER))


def test_a_node_that_has_lost_a_leader_that_may_live_votes_after_a_while() -> None:
    """Its connection may only have been reset, and it may find the leader again."""
    story = alone(Close.ABORTED)
    story.handle(ev.ConnectFailed(story.core.conn, False, "timed out"))
    story.now += LEASE_S * VOTES_AFTER - 0.01
    assert story.handle(ev.Campaigned(7, campaign()))[0].declined is not None
    story.now += 0.01
    assert story.handle(ev.Campaigned(7, campaign()))[0] == ev.Answer(7, None)


def voting() -> Story:
    """A member that has connected to a candidate."""
    story = alone()
    story.handle(ev.CellAnswered(stored()), ev.Campaigned(7, campaign()), ev.Connected(2))
    return story


def test_the_plan_of_a_candidate_is_not_a_leaders_yet() -> None:
    story, second = voting(), assigned(2).replace(term=TERM + 1)
    candidates = m.Plan(TERM + 1, LEASE_S, of_log(TERM + 1, is_leading=False))
    assert story.receive(candidates.replace(interrupted=interrupted())) == []
    assert (story.core.phase, story.core.state.phase) == (Phase.CONNECTING, m.NodePhase.BUSY)
    story.receive(candidates.replace(log=of_log(TERM + 1), interrupted=interrupted()))
    assert (story.core.phase, story.core.state.phase) == (Phase.FOLLOWING, m.NodePhase.STOPPING)
    assert story.core.deadline is not None and second.fence > assigned().fence


def test_a_voter_says_at_once_that_it_has_accepted_what_is_proposed() -> None:
    story = busy()
    (status,) = statuses(story.receive(RUNS.replace(log=of_log(proposal=SECOND))))
    assert status.log is not None and status.log.accepted == Accepted(SECOND, TERM)
    assert story.receive(RUNS.replace(log=of_log(proposal=SECOND))) == [], "it has already reported that"
    (status,) = statuses(story.receive(RUNS.replace(log=of_log(committed=SECOND.id))))
    assert status.log is not None and (status.log.committed, status.log.accepted) == (SECOND, None)


def test_a_candidate_that_says_nothing_is_left_soon() -> None:
    """All voters of a round may have voted for a candidate that froze."""
    story = voting()
    while story.core.phase is Phase.CONNECTING:
        actions = story.pass_deadline()
    assert story.now == pytest.approx(100.0 + CANDIDATE_S) and ev.Disconnect() in actions


def test_a_candidate_that_lost_is_left_when_it_reports_it() -> None:
    story = voting()
    assert story.receive(m.Goodbye("too few nodes voted for this one", False)) == [ev.Disconnect(), ev.ReadCell()]
    assert of_kind(story.wait(1.0), ev.Campaign)[0].gone == (BOSS.token, OTHER.token)


# A look at the cell while the leader is silent.


def looking() -> Story:
    """Its connection was reset, and the leader has not answered on the new one yet."""
    story = alone(Close.ABORTED)
    story.handle(ev.Connected(2))
    assert story.pass_deadline() == [ev.ReadCell()] and story.now == pytest.approx(100.0 + LOOK_S)
    return story


def test_a_node_that_waits_for_a_plan_goes_where_the_cell_names_a_newer_leader() -> None:
    assert looking().handle(ev.CellAnswered(stored("other", TERM + 1))) == [ev.Connect(3, OTHER)]
    assert looking().handle(ev.CellAnswered(stored("other", TERM))) == [], "that leader is not newer"


def test_a_node_that_waits_for_a_plan_leaves_a_leader_that_has_resigned() -> None:
    actions = looking().handle(ev.CellAnswered(stored("", TERM)))
    assert actions[0] == ev.Disconnect() and of_kind(actions, ev.Campaign)


def test_a_node_that_waits_for_a_plan_continues_while_the_leader_renews_the_cell() -> None:
    story = looking()
    for renewals in range(1, 20):
        assert story.handle(ev.CellAnswered(stored(renewals=renewals))) == []
        while ev.ReadCell() not in story.pass_deadline():
            pass
        assert story.core.phase is Phase.CONNECTING


def test_a_node_does_not_look_at_the_cell_while_its_leader_says_that_it_renews_it() -> None:
    story = busy()
    for renewals in range(1, 5):
        assert ev.ReadCell() not in story.wait(LEASE_S / 3)
        story.receive(m.Heartbeat(renewals=renewals))


# The end of a leader, and of a connection to it.


def test_the_end_of_a_leader_is_noted_and_a_goodbye_of_an_agent_that_leaves_is_its_end() -> None:
    ends: list[Callable[[Story], Any]] = [
        lambda story: story.lose_leader(Close.ORDERLY),
        lambda story: story.receive(m.Goodbye("the leader's agent is leaving", True)),
    ]
    for end in ends:
        story = busy()
        end(story)
        assert story.node.ended == (EndedLeader("boss", None),) and story.core.gone == (BOSS.token,)


@pytest.mark.parametrize("close", [Close.GOODBYE, Close.ABORTED, Close.HUNG_UP])
def test_nothing_else_is_an_end(close: Close) -> None:
    story = busy()
    if close is Close.GOODBYE:
        story.receive(m.Goodbye("another agent leads the job now", False))
    else:
        story.lose_leader(close)
    assert story.node.ended == ()
    assert story.core.gone == ((BOSS.token,) if close is Close.GOODBYE else ())


def test_of_leaders_that_are_gone_the_last_are_remembered() -> None:
    story = phases.campaigning()
    story.core.search.timeout_s = math.inf
    for number in range(1000):
        story.handle(ev.LeadershipLost(Node("me", number), f"me-{number}", "too few nodes voted for this one"))
        until_campaign(story, None, story.handle(ev.CellAnswered(None)))
    assert len(story.core.gone) == ev.GONE_MAX and story.core.gone[-1] == "me-999"


def test_a_connection_that_was_reset_is_made_again_once() -> None:
    story = busy()
    for _ in range(2):
        conn = story.core.conn
        assert story.lose_leader(Close.ABORTED) == [ev.Connect(conn + 1, BOSS)]
        story.handle(ev.Connected(conn + 1))
        assert story.lose_leader(Close.ABORTED) == [ev.ReadCell()], "the new connection was reset as well"
        story.handle(ev.CellAnswered(stored(renewals=1)), ev.Connected(conn + 2))
        story.receive(RUNS)
        assert story.core.phase is Phase.FOLLOWING, "so it may reconnect the next time"


def test_a_node_that_was_given_up_connects_again_at_once() -> None:
    story = busy()
    assert story.receive(m.GivenUp()) == [ev.Disconnect(), ev.Connect(2, BOSS)]
    assert story.core.gone == () and story.node.ended == ()


@pytest.mark.parametrize("message", [m.Heartbeat(), m.Probe(), RUNS, r.Show(r.Fetch("b", "b-1", r.What.STATUS))])
def test_each_message_of_a_leader_is_valid_for_a_lease(message: m.Downward) -> None:
    story = busy()
    story.wait(LEASE_S - 0.01)
    story.receive(message)
    received_at = story.now
    while story.core.phase is Phase.FOLLOWING:
        actions = story.pass_deadline()
        if ev.ReadCell() in actions and story.core.phase is Phase.FOLLOWING:
            story.handle(ev.CellFailed("no answer"))
    assert story.now == pytest.approx(received_at + LEASE_S) and story.core.lost_at == received_at
    assert actions == [ev.Disconnect(), ev.ReadCell()]


def test_after_this_process_was_stopped_the_leader_has_time_to_send_something() -> None:
    story = busy()
    story.now += 3600
    story.wait(0)
    assert story.core.phase is Phase.FOLLOWING
    story.receive(m.Heartbeat())
    story.now += 3600
    story.wait(0)
    assert story.core.phase is Phase.FOLLOWING
    assert ev.Disconnect() in story.wait(LEASE_S / 3)


# Its own workers.


def cut_off(story: Story, until: float) -> list[tuple[float, CauseKind]]:
    """Lets time pass without any messages; returns when and why workers must stop."""
    stopped: list[tuple[float, CauseKind]] = []
    candidate_until, actions = math.inf, list[Any]()
    while True:
        if ev.ReadCell() in actions:
            actions = story.handle(ev.CellFailed("no answer"))
        elif story.core.phase is Phase.CAMPAIGNING and candidate_until == math.inf:
            candidate_until, actions = story.now + 1.5, []
        elif story.core.deadline is None or min(story.core.deadline, candidate_until) > until:
            return stopped
        elif candidate_until <= story.core.deadline:
            story.now, candidate_until = candidate_until, math.inf
            actions = story.handle(LOST.replace(node=Node("me", 5, committed=FIRST)))
        else:
            actions = story.pass_deadline()
        stopped += [(story.now, kind) for kind in stops(actions)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_is_cut_off_stops_its_workers_by_itself(rank: int) -> None:
    """Voters of each rank campaign meanwhile: the others may have begun another round without it."""
    story = busy()
    voters = ["me", "other", "third"] if rank == 0 else ["boss", "me", "other"]
    story.core.log = story.node.replace(committed=first_entry(TERM, voters, voters, ("1f",)))
    began = story.now
    ((at, why),) = cut_off(story, began + 3 * LEASE_S)
    assert at == pytest.approx(began + LEASE_S + MARGIN_S) and why is CauseKind.LEADER_SILENT
    assert story.core.state.phase is m.NodePhase.STOPPING


def test_a_node_that_may_not_campaign_stops_its_workers_by_itself() -> None:
    story = busy()
    story.core.may_lead = False
    story.lose_leader()
    ((at, why),) = cut_off(story, story.now + 3 * LEASE_S)
    assert at == pytest.approx(100.0 + LEASE_S + MARGIN_S) and why is CauseKind.LEADER_SILENT


@pytest.mark.parametrize("is_candidate", [True, False])
def test_what_is_not_a_message_of_a_leader_does_not_keep_the_workers(is_candidate: bool) -> None:
    """A candidate that does not lead yet, or a port that accepts connections, as a suspended process's does."""
    story = alone()
    story.handle(ev.Campaigned(7, campaign()), ev.Connected(2))
    candidates = m.Plan(TERM + 1, LEASE_S, of_log(TERM + 1, is_leading=False))
    done: list[Any] = []
    while story.now < 100.0 + LEASE_S + MARGIN_S:
        done += story.wait(0.1)
        if is_candidate and story.core.phase is Phase.CONNECTING:
            done += story.receive(candidates)
    assert stops(done) == [CauseKind.LEADER_SILENT]


def test_a_leader_that_is_found_in_time_keeps_the_workers() -> None:
    story = alone()
    story.now += LEASE_S + MARGIN_S - 0.1
    story.handle(ev.Campaigned(7, campaign()), ev.Connected(2))
    story.receive(m.Plan(TERM + 1, LEASE_S, of_log(TERM + 1)))
    assert stops(story.wait(LEASE_S - 0.1)) == [] and story.core.state.phase is m.NodePhase.BUSY


def test_a_node_without_workers_has_none_to_stop() -> None:
    story = spare()
    story.lose_leader()
    assert stops(story.wait(3 * LEASE_S)) == []


# The verdict in the cell.


def test_a_cell_with_the_verdict_of_its_own_job_ends_it() -> None:
    story = alone()
    actions = story.handle(ev.CellAnswered(stored(committed=verdict_after(FIRST))))
    assert actions == [ev.Deliver(SUCCEEDED), ev.Disconnect()]
    assert (story.core.phase, story.core.deadline, story.core.read_verdict) == (Phase.OVER, None, True)


def test_a_job_that_was_seen_in_the_cell_before_its_verdict_is_this_nodes() -> None:
    """It has never reached the leader."""
    story = phases.searching()
    story.handle(ev.CellAnswered(stored(committed=FIRST)), ev.ConnectFailed(1, False, "timed out"))
    while ev.ReadCell() not in story.pass_deadline():
        pass
    story.handle(ev.CellAnswered(stored(committed=verdict_after(FIRST))))
    assert (story.core.phase, story.core.read_verdict) == (Phase.OVER, True)


def test_a_verdict_of_a_job_before_this_one_is_campaigned_against() -> None:
    """A scheduler has requeued the job under the same id."""
    story, cell = phases.searching(), stored(committed=verdict_after(FIRST))
    (action,) = story.handle(ev.CellAnswered(cell))
    assert action == ev.Campaign(Node("me"), TERM, True, (), story.core.sight.seen, FIRST.log)
    of_another = alone()
    assert of_another.handle(ev.CellAnswered(stored(committed=verdict_after(ELSEWHERE)))) == [], (
        "its turn comes in 50 ms"
    )
    assert of_kind(of_another.pass_deadline(), ev.Campaign)[0].job_before == ELSEWHERE.log


@pytest.mark.parametrize("text", ["", "x", "null", "{}", '{"verdict":{}}', "c$}b*0RR", "\ud800"])
def test_a_verdict_that_no_leader_wrote_is_unreadable(text: str) -> None:
    story = alone()
    actions = story.handle(ev.CellAnswered(stored(committed=verdict_after(FIRST, None, Payload(text)))))
    unreadable = "the job has ended, but its result in the rendezvous store is unreadable"
    assert actions == [ev.GiveUp(unreadable, False), ev.Disconnect()]
    assert (story.core.phase, story.core.deadline) == (Phase.OVER, None)


# Two logs.


def test_a_node_that_has_joined_another_log_keeps_its_new_name_as_it_leads() -> None:
    story = alone()
    story.handle(ev.CellAnswered(stored("other", TERM + 1)), ev.Connected(story.core.conn))
    story.receive(m.Plan(TERM + 9, LEASE_S, of_log(TERM + 9, committed=ELSEWHERE)))
    gone = ev.ConnectionLost(story.core.conn, "connection closed", Close.ORDERLY)
    cell = stored("", TERM + 9)
    story.handle(ev.Connected(story.core.conn), gone)
    action = until_campaign(story, cell, story.handle(ev.CellAnswered(cell)))
    assert action.node.name == "me~1"
    (connect,) = story.handle(ev.Leading(leader_at("me", TERM + 10), TERM + 10))
    (sent,) = story.handle(ev.Connected(connect.conn))
    assert sent.message.name == "me~1", "its vote counts under that name"


def test_a_node_joins_a_leader_of_another_log_under_a_new_name() -> None:
    story = alone()
    story.handle(ev.CellAnswered(stored("other", TERM + 1)), ev.Connected(story.core.conn))
    names, first = ["me", "me~1", "me~2"], story.core.conn
    for number, log in enumerate((ELSEWHERE, first_entry(99, "pq", "pq", ("3f",))), 1):
        conn = story.core.conn
        other = m.Plan(TERM + 9 * number, LEASE_S, of_log(TERM + 9 * number, committed=log))
        assert story.receive(other) == [ev.Disconnect(), ev.Connect(conn + 1, OTHER)]
        (action,) = story.handle(ev.Connected(conn + 1))
        hello = action.message
        assert (hello.name, hello.status.node.node_id) == (names[number], "me")
        assert hello.status.log is not None and hello.status.log.committed is None
        assert hello.status.log.replaces == (names[number - 1],)
        story.receive(other)
        assert story.core.phase is Phase.FOLLOWING and story.core.conn == conn + 1
    assert story.core.conn == first + 2


def test_a_node_does_not_go_over_to_the_log_of_a_candidate() -> None:
    """It connects to the candidate named in the cell, which may never lead: its promises in its own log stay valid."""
    story = alone()
    story.handle(ev.CellAnswered(stored("other", TERM + 1)), ev.Connected(story.core.conn))
    story.receive(m.Plan(TERM + 1, LEASE_S, of_log(TERM + 1, is_leading=False, committed=ELSEWHERE)))
    assert (story.node.name, story.node.committed) == ("me", FIRST) and story.core.phase is Phase.CONNECTING


# Messages that a leader would reject.

DRAIN = r.Ask("me", "me-1", r.Verb.DRAIN, "", 60.0, "spot")


@pytest.mark.parametrize("phase", [each for each in Phase if each is not Phase.OVER])
@pytest.mark.parametrize(
    "wrong",
    [
        {"target": "x" * 256},
        {"deadline_s": 1e10},
        {"deadline_s": -1.0},
        {"deadline_s": math.nan},
        {"reason": "x" * 50_000},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_request_that_no_leader_would_read_is_refused_at_once(phase: Phase, wrong: dict[str, Any]) -> None:
    story = STORIES[phase]()
    (answered,) = story.handle(ev.Submitted(DRAIN.replace(**wrong)))
    assert isinstance(answered, ev.Deliver) and isinstance(answered.message, r.Answer)
    assert (answered.message.ask_id, answered.message.is_applied) == ("me-1", False)
    assert next(iter(wrong)) in answered.message.text
    assert story.core.phase is phase and not story.core.state.asked


@given(
    target=st.text(max_size=300), deadline_s=st.floats(), reason=st.text(), ask_id=st.text(max_size=5) | st.just("me-1"),
    verb=st.sampled_from(r.Verb), round_=st.integers(), at_save=st.booleans(),
)  # fmt: skip
def test_what_is_sent_of_a_request_is_read_and_the_rest_is_refused(
    target: str, deadline_s: float, reason: str, ask_id: str, verb: r.Verb, round_: int, at_save: bool
) -> None:
    story, ask = busy(), r.Ask("me", ask_id, verb, target, deadline_s, reason, round_, at_save)
    (action,) = story.handle(ev.Submitted(ask))
    if isinstance(action, ev.Send):
        assert list(Decoder(UPWARD).feed(encode(action.message)))
        return
    assert isinstance(action.message, r.Answer) and action.message.ask_id == ask_id and not action.message.is_applied
    assert not story.core.state.asked


def test_a_node_that_no_leader_would_read_gives_up_before_it_looks_for_one() -> None:
    story = phases.idle()
    (action,) = story.handle(ev.Submitted(m.Ready(NODE.replace(role="x" * 256))))
    assert isinstance(action, ev.GiveUp) and action.is_refused
    assert "role is" in action.reason and "at most 255 characters" in action.reason
    assert story.core.phase is Phase.OVER


def test_a_request_that_was_refused_with_the_connection_is_answered_and_not_repeated() -> None:
    story = busy()
    story.handle(ev.Submitted(DRAIN), ev.Submitted(DRAIN.replace(ask_id="me-2")))
    story.receive(r.Answer("me-1", True, "drain of host-me within 60 s"))
    actions = story.receive(m.Refused("Ask.target is odd", is_final=False))
    waiting, answer = [each.message for each in actions if isinstance(each, ev.Deliver)]
    assert waiting == m.Waiting("the leader refused a message of this node: Ask.target is odd", kind=m.WaitKind.LEADER)
    assert answer == r.Answer("me-2", False, "Ask.target is odd")
    assert [each.ask_id for each in story.core.state.status_at(story.now).asks] == ["me-1"]


# Requests.


def test_a_request_is_repeated_until_it_is_answered() -> None:
    story, ask = busy(), DRAIN.replace(verb=r.Verb.CORDON, target="host-x")
    assert [each.asks for each in statuses(story.handle(ev.Submitted(ask)))] == [(ask,)]
    story.lose_leader()
    story.handle(ev.CellAnswered(stored("other", TERM + 1)))
    assert [each.asks for each in statuses(story.handle(ev.Connected(2)))] == [(ask,)]
    answer = r.Answer("me-1", True, "cordoned")
    led = m.Plan(TERM + 1, LEASE_S, of_log(TERM + 1), answers=(answer,))
    assert of_kind(story.receive(led), ev.Deliver) == [ev.Deliver(answer)]
    assert [each.asks for each in statuses(story.handle(ev.Submitted(m.Succeeded("me", 1))))] == [()]


def test_what_a_node_wants_to_see_is_requested_with_the_first_plan_and_again_until_it_is_answered() -> None:
    story, fetch = phases.greeting(), r.Fetch("me", "me-3", r.What.STATUS)
    assert story.handle(ev.Submitted(fetch)) == []
    assert story.receive(WELCOME) == [ev.Send(fetch)]
    story.lose_leader(Close.ABORTED)
    story.handle(ev.Connected(story.core.conn))
    assert story.receive(WELCOME) == [ev.Send(fetch)]
    answer = r.Answer("me-3", True, "asked 2 nodes", ("a", "b"))
    assert story.receive(answer) == [ev.Deliver(answer)]
    story.lose_leader(Close.ABORTED)
    story.handle(ev.Connected(story.core.conn))
    assert story.receive(WELCOME) == []


def test_a_node_that_is_ready_for_a_round_that_was_assigned_meanwhile_is_not() -> None:
    """The messages crossed: its supervisor has not read of the round yet."""
    story = busy()
    assert story.handle(ev.Submitted(m.Ready(NODE, after=0))) == []
    assert story.core.state.phase is m.NodePhase.BUSY
    story.receive(interrupted())
    (status,) = statuses(story.handle(ev.Submitted(m.Ready(NODE, after=1))))
    assert status.past.phase is m.NodePhase.READY


def test_a_failure_that_nobody_has_received_is_in_the_next_greeting() -> None:
    story = alone()
    assert story.handle(ev.Submitted(m.Failed("me", 1, FAILURE))) == []
    story.handle(ev.Campaigned(7, campaign()))
    (status,) = statuses(story.handle(ev.Connected(2)))
    assert (status.past.phase, status.past.failure) == (m.NodePhase.FAILED, FAILURE)
