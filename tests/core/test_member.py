"""A member: stories as text (`stories/member/`), each phase with each event, and what these do not show."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.stories import member as phases
from kit.stories.member import NODE, TERMS, Story, busy, record

from aelastic.core.machine import InvalidTransition
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.member_events import Phase
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import PROTOCOL, UPWARD, Decoder, encode, to_text

STORIES: dict[Phase, Callable[[], Story]] = {phase: getattr(phases, phase) for phase in Phase}


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


@pytest.mark.parametrize("text", ["x", "null", '["Heartbeat",{"renewals":1}]', to_text(m.Waiting("x")), "\ud800"])
def test_a_verdict_that_no_agent_wrote_is_unreadable(text: str) -> None:
    story = busy()
    story.hear(m.Goodbye("x", True))
    assert story.tell(ev.BoardRead(record(verdict=text))) == [
        ev.GiveUp("the job has ended, but its result in the rendezvous store is unreadable", False)
    ]
    assert (story.core.phase, story.core.deadline) == (Phase.OVER, None)


def test_the_rules_are_checked_after_each_event() -> None:
    story = phases.reading()
    story.core.search.end()
    with pytest.raises(AssertionError, match="without a coordinator there is a limit to the search"):
        story.tell(ev.DeadlinePassed())


# What no coordinator would read.

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
def test_a_request_that_no_coordinator_would_read_is_refused_at_once(phase: Phase, wrong: dict[str, Any]) -> None:
    story = STORIES[phase]()
    (answered,) = story.tell(ev.Submitted(DRAIN.replace(**wrong)))
    assert isinstance(answered, ev.Deliver) and isinstance(answered.message, r.Answer)
    assert (answered.message.ask_id, answered.message.is_applied) == ("me-1", False)
    assert next(iter(wrong)) in answered.message.text
    assert story.core.phase is phase and not story.core.state.requests(story.now)


@given(
    target=st.text(max_size=300), deadline_s=st.floats(), reason=st.text(), ask_id=st.text(max_size=5) | st.just("me-1"),
    verb=st.sampled_from(r.Verb), round_=st.integers(), at_save=st.booleans(),
)  # fmt: skip
def test_what_is_sent_of_a_request_is_read_and_the_rest_is_refused(
    target: str, deadline_s: float, reason: str, ask_id: str, verb: r.Verb, round_: int, at_save: bool
) -> None:
    story, ask = busy(), r.Ask("me", ask_id, verb, target, deadline_s, reason, round_, at_save)
    (action,) = story.tell(ev.Submitted(ask))
    if isinstance(action, ev.Send):
        assert list(Decoder(UPWARD).feed(encode(action.message)))
        return
    assert isinstance(action.message, r.Answer) and action.message.ask_id == ask_id and not action.message.is_applied
    assert not story.core.state.requests(story.now)


def test_a_node_that_no_coordinator_would_read_gives_up_before_it_looks_for_one() -> None:
    story = STORIES[Phase.IDLE]()
    (action,) = story.tell(ev.Submitted(m.Ready(NODE.replace(role="x" * 256))))
    assert isinstance(action, ev.GiveUp) and action.is_refused
    assert "role is" in action.reason and "at most 255 characters" in action.reason
    assert story.core.phase is Phase.OVER


def test_a_request_that_was_refused_with_the_connection_is_answered_and_not_repeated() -> None:
    story = busy()
    story.tell(ev.Submitted(DRAIN), ev.Submitted(DRAIN.replace(ask_id="me-2")))
    story.hear(r.Answer("me-1", True, "drain of host-me within 60 s"))
    told = story.hear(m.Refused("Ask.target is odd", is_final=False))
    waiting, answer = [each.message for each in told if isinstance(each, ev.Deliver)]
    assert waiting == m.Waiting("the leader refused a message of this node: Ask.target is odd", kind=m.WaitKind.LEADER)
    assert answer == r.Answer("me-2", False, "Ask.target is odd")
    assert [each.ask_id for each in story.core.state.requests(story.now) if isinstance(each, r.Ask)] == ["me-1"]


def test_of_coordinators_that_have_ended_the_last_are_kept_that_can_have_a_vote() -> None:
    state = busy().core.state
    for number in range(1000):
        state.on_coordinator_ended(f"n{number}")
    state.on_coordinator_ended("n990")
    assert len(state.ended_nodes) == m.SEATS_MAX and state.ended_nodes[-2:] == ("n999", "n990")
    state.on_coordinator_lives("n999")
    assert "n999" not in state.ended_nodes


def test_all_that_is_submitted_between_hello_and_welcome_follows_the_welcome() -> None:
    """A worker that hung fails while its agent greets the leader: both were said to nobody yet."""
    story = phases.busy()
    story.tell(ev.ConnectionLost(story.core.conn, "its connection closed"))
    story.tell(ev.Connected(story.core.conn))
    assert story.core.phase is Phase.GREETING
    hangs, saw = m.Hangs("me", 1, "no output", 60.0, is_stopped=False), m.Saw("me", 1, ())
    assert story.tell(ev.Submitted(hangs), ev.Submitted(saw)) == []
    assert story.hear(m.Welcome(4, phases.LEASE_S)) == [ev.Send(hangs), ev.Send(saw)]
