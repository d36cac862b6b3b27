"""A member: stories as text (`stories/member/`), each phase with each event, and what these do not show."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, get_args

import pytest
from kit.stories import member as phases
from kit.stories.member import NODE, TERMS, Story, busy, record

from aelastic.core.machine import InvalidTransition
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.member_events import Phase
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import PROTOCOL, to_text

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
