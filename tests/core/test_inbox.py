"""What waits for a coordinator whose leadership is not certain."""

from __future__ import annotations

from kit.stories.coordinator import failure, node

from aelastic.rdzv.coordinator.coordinator_events import Broken, Event, Registered
from aelastic.rdzv.coordinator.inbox import Inbox
from aelastic.rdzv.protocol import messages as m


def registration(name: str) -> Registered:
    return Registered(node(name), m.Past(m.Standing.READY))


def failed_registration(name: str) -> Registered:
    return Registered(node(name), m.Past(m.Standing.FAILED, 5, failure=failure(name)))


def heard(inbox: Inbox) -> list[Event]:
    found = []
    while (event := inbox.pop(0.0)) is not None:
        inbox.validate()
        found.append(event)
    return found


def test_what_a_node_said_before_it_reconnected_is_not_heard_but_that_it_left_is() -> None:
    inbox, ready, left = Inbox(), m.Ready(node("a")), m.Left("a", "asked to stop")
    for event in (registration("a"), ready, left, Broken("a"), registration("a"), ready):
        inbox.add("a", event, 0.0)
    assert heard(inbox) == [left, registration("a"), ready]
    assert not inbox.is_registering("a")


def test_a_failure_that_a_node_repeats_when_it_is_back_came_before_its_connection_broke() -> None:
    inbox, failed, older = Inbox(), m.Failed("a", 5, failure("a")), m.Failed("a", 4, failure("a"))
    other = m.Failed("a", 5, failure("a", exitcode=1))
    for event in (older, other, failed, Broken("a"), failed_registration("a"), Broken("a"), failed_registration("a")):
        inbox.add("a", event, 0.0)
    assert heard(inbox) == [failed, failed_registration("a")]


def test_however_often_a_node_reconnects_little_waits_while_the_board_is_away() -> None:
    inbox = Inbox()
    other = m.Ready(node("b"))
    inbox.add("b", other, 0.0)
    for _ in range(1000):
        for event in (registration("a"), m.Ready(node("a")), Broken("a")):
            inbox.add("a", event, 0.0)
        inbox.validate()
        assert inbox.is_registering("a")
    assert heard(inbox) == [other, registration("a"), m.Ready(node("a")), Broken("a")]
