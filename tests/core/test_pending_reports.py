"""Reports from nodes wait while an entry is not committed."""

from __future__ import annotations

from typing import Any

from kit.stories.coordinator import failure, node

from aelastic.rdzv.leader.coordinator_events import Broken, Lost, Reported
from aelastic.rdzv.leader.pending_reports import Event, PendingReports
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r

READY, BUSY = m.Past(m.NodePhase.READY), m.Past(m.NodePhase.BUSY, 5)
FAILED = m.Past(m.NodePhase.FAILED, 5, failure=failure("a"))
FETCH = r.Fetch("a", "a-1", r.What.STATUS)


def reported(name: str, past: m.Past = READY, **status: Any) -> Reported:
    """A report on an existing connection."""
    return Reported(node(name), m.Status(node(name), past, **status))


def connected(name: str, past: m.Past = READY, **others: Any) -> Reported:
    """The first report on a new connection."""
    return reported(name, past).replace(is_new=True, **others)


def pending(*events: Event) -> PendingReports:
    queue = PendingReports()
    for event in events:
        add(queue, event)
    return queue


def add(queue: PendingReports, event: Event, now: float = 0.0) -> None:
    queue.add(event.node.node_id if isinstance(event, Reported) else event.node_id, event, now)
    queue.validate()


def taken(queue: PendingReports, now: float = 0.0) -> list[Event]:
    found = []
    while (event := queue.pop(now)) is not None:
        queue.validate()
        found.append(event)
    assert queue.is_empty and not queue.first_reports
    return found


def test_the_newest_status_of_a_node_is_taken_at_the_place_of_the_first() -> None:
    queue = pending(reported("a", BUSY), reported("b"), reported("a", FAILED))
    assert taken(queue) == [reported("a", FAILED), reported("b")]


def test_what_a_node_sent_before_it_reconnected_is_not_taken() -> None:
    left = reported("a", left=m.Left("a", "asked to stop"))
    events = connected("a", BUSY), reported("a", FAILED), FETCH, left, Broken("a"), connected("a"), reported("b")
    queue = pending(*events)
    assert queue.first_reports.keys() == {"a"}
    assert taken(queue) == [connected("a"), reported("b")]


def test_what_a_node_forgets_as_it_is_welcomed_is_taken_from_its_first_status() -> None:
    alone = BUSY.replace(alone_s=0.5, has_spares=True)
    queue = pending(connected("a", alone))
    add(queue, reported("a", FAILED), 2.0)
    (event,) = taken(queue, 2.0)
    assert isinstance(event, Reported)
    assert event.status.past == FAILED.replace(alone_s=2.5, has_spares=True)
    queue = pending(connected("a", alone), reported("a", BUSY.replace(round=6)))
    assert taken(queue) == [connected("a", BUSY.replace(round=6))], "that was another round"


def test_the_loss_of_a_node_is_not_taken_once_it_is_back() -> None:
    queue = pending(Broken("a"), Lost("a", "silent for 5 s"), Broken("b"), connected("a"))
    assert taken(queue) == [Broken("b"), connected("a")]


def test_what_becomes_of_a_node_after_its_last_status_is_taken_after_it() -> None:
    queue = pending(connected("a"), reported("a", FAILED), Broken("a"), Lost("a", "connection closed"))
    first = connected("a", FAILED)
    assert queue.first_reports == {"a": first}
    assert taken(queue) == [first, Broken("a"), Lost("a", "connection closed")]


def test_the_newest_status_of_a_new_connection_keeps_what_the_first_brought() -> None:
    queue = pending(connected("a", BUSY, silent_s=3.0), reported("a", FAILED))
    assert queue.first_reports == {"a": connected("a", FAILED, silent_s=3.0)}
    assert taken(queue) == [connected("a", FAILED, silent_s=3.0)]


def test_a_failure_that_was_reported_before_the_connection_broke_keeps_the_age_of_that_report() -> None:
    """Otherwise the break, which came later, would be blamed for the end of the round, and nothing would be charged."""
    others = FAILED.replace(failure=failure("a", exitcode=3))
    for before, failed_s in [(FAILED, 7.0), (BUSY, None), (others, None), (FAILED.replace(round=4), None)]:
        queue = PendingReports()
        add(queue, reported("a", before.replace(failure_age_s=2.0)), 100.0)
        add(queue, Broken("a"), 101.0)
        add(queue, connected("a", FAILED), 105.0)
        assert taken(queue, 105.0) == [connected("a", FAILED, failed_s=failed_s)]


def test_a_failure_that_was_reported_is_as_old_as_it_was_however_often_its_node_reconnects() -> None:
    queue = PendingReports()
    add(queue, reported("a", FAILED.replace(failure_age_s=2.0)), 100.0)
    for now in (105.0, 106.0):
        add(queue, connected("a", FAILED.replace(failure_age_s=50.0)), now)
    add(queue, reported("a", FAILED.replace(phase=m.NodePhase.READY)), 108.0)
    (event,) = taken(queue, 110.0)
    assert isinstance(event, Reported) and event.failed_s is not None
    assert 110.0 - event.age_s - event.failed_s == 98.0


def test_a_node_that_reports_again_before_its_report_is_taken_was_back_and_silent_since_the_same_moments() -> None:
    """While a quorum is missing for a long time, the earliest event still determines what ended the round.

    A failure long after the node was back has nothing to do with the break of its connection.
    """
    queue = PendingReports()
    add(queue, connected("a", BUSY, silent_s=3.0), 100.0)
    add(queue, reported("a", FAILED), 160.0)
    (event,) = taken(queue, 170.0)
    assert isinstance(event, Reported)
    back_at = 170.0 - event.age_s - event.back_s
    assert (back_at, back_at - event.silent_s) == (100.0, 97.0)


def test_a_connection_whose_first_status_is_taken_is_no_longer_new() -> None:
    queue = pending(connected("a", BUSY))
    assert taken(queue) == [connected("a", BUSY)]
    add(queue, reported("a", FAILED))
    assert not queue.first_reports
    assert taken(queue) == [reported("a", FAILED)]


def test_a_status_is_as_old_as_the_last_that_replaced_it_and_all_else_as_when_it_came() -> None:
    queue = PendingReports()
    add(queue, reported("a", BUSY), 100.0)
    add(queue, Broken("b", age_s=1.0), 101.0)
    add(queue, Lost("c", "silent for 5 s"), 102.0)
    add(queue, FETCH, 103.0)
    add(queue, reported("a", FAILED), 104.0)
    assert taken(queue, 110.0) == [
        reported("a", FAILED).replace(age_s=6.0), Broken("b", 10.0), Lost("c", "silent for 5 s", 8.0), FETCH,
    ]  # fmt: skip


def test_requests_for_information_are_all_taken_in_their_order() -> None:
    shown = r.Fetched("a", "a", "a-1", "", "text")
    queue = pending(reported("a", BUSY), FETCH, shown, FETCH.replace(ask_id="a-2"), reported("a", FAILED))
    assert taken(queue) == [reported("a", FAILED), FETCH, shown, FETCH.replace(ask_id="a-2")]


def test_however_often_a_node_reconnects_little_waits_while_nothing_is_committed() -> None:
    queue = pending(reported("b"))
    for _ in range(1000):
        for event in (connected("a"), reported("a", BUSY), Broken("a")):
            add(queue, event)
        assert queue.first_reports.keys() == {"a"}
    assert taken(queue) == [reported("b"), connected("a", BUSY), Broken("a")]
