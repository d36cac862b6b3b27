"""The leader around the coordinator: stories as text (`stories/leader/`), and what these do not show."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from kit import decided
from kit.stories.leader_terms import (
    EPOCH,
    FAILURE,
    FIRST,
    LEASE_S,
    RENEWED,
    START,
    Term,
    busy,
    failed,
    hello,
    node,
    of_kind,
    part,
    ready,
    reclaimed,
    refusal,
    running,
)

from aelastic.core.machine import InvalidTransition, check_invariants
from aelastic.decisions.cause import CauseKind
from aelastic.errors import ProcessFailure
from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.coordinator.first_cause import GRACE_S
from aelastic.rdzv.coordinator.verdict import PUBLISH_TIMEOUT_S
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import from_text
from aelastic.rdzv.record_text import record_to_bytes
from aelastic.rdzv.survivors import electorate
from aelastic.rdzv.survivors.absent import RETURN_S

# The greeting.


@pytest.mark.parametrize("token", ["", "t0k3", "t0k3n ", "ü", "\ud800", "x" * 100_000])
def test_an_agent_that_has_not_read_the_board_may_try_again(token: str) -> None:
    term = Term()
    assert term.join("a", token=token) == refusal(
        1, "this agent read an outdated record of the leader; retrying", is_final=False
    )
    assert term.coordinator.story == ()


@pytest.mark.parametrize(
    "terms, said",
    [
        (
            m.Terms("other", 1, 3, 3, 5.0),
            "the run id is 'other' here and 'job' in the running job: use the same --rdzv-id on every node",
        ),
        (m.Terms("job", 2, 3, 3, 5.0), "--nnodes is 2:3 here and 1:3 in the running job: use the same on every node"),
        (m.Terms("job", 1, 2, 3, 5.0), "--nnodes is 1:2 here and 1:3 in the running job: use the same on every node"),
        (m.Terms("job", 1, 3, 0, 5.0), "--max-restarts is 0 here and 3 in the running job: use the same on every node"),
    ],
)
def test_an_agent_with_other_options_than_the_job_is_refused_for_good(terms: m.Terms, said: str) -> None:
    term = Term()
    conn = term.open("a")
    assert term.tell(ev.Received(conn, hello("a", terms=terms))) == refusal(1, said)
    assert term.coordinator.story == ()


def test_the_options_of_the_job_are_not_told_without_the_token() -> None:
    term = Term()
    conn = term.open("a")
    (said, _) = term.tell(ev.Received(conn, hello("a", token="x", terms=m.Terms("other", 9, 9, 9, 5.0))))
    assert said.message == m.Refused("this agent read an outdated record of the leader; retrying", False)


OF_B = m.Status(node("b"), m.Past(m.Standing.READY))


@pytest.mark.parametrize(
    "message",
    [
        OF_B,
        OF_B.replace(past=busy(1)),
        OF_B.replace(left=m.Left("b", "x")),
        r.Fetch("b", "b-1", r.What.STATUS),
        r.Fetched("b", "b", "b-1", "", "text"),
    ],
)
def test_a_node_speaks_for_itself_only(message: Any) -> None:
    term = running()
    reason = "protocol error: message for another node_id"
    assert term.say("a", message) == [
        part(2, m.Interrupted(1, decided.lost("host-a", reason), 0)),
        ev.Say(1, m.Refused(reason, True)), ev.Drop(1), ev.Renew(),
    ]  # fmt: skip


# Addresses.


def test_a_node_is_where_its_connection_comes_from_unless_it_says_otherwise() -> None:
    term = Term((2, 2))
    term.open("a", "::ffff:10.1.1.1")
    term.say("a", hello("a", terms=term.terms))
    term.open("b", "fd00::2")
    assert {each.master_addr for each in of_kind(term.say("b", hello("b", terms=term.terms)), m.Assigned)} == {
        "10.1.1.1"
    }
    term = Term((2, 2))
    term.join("a", address="node-a.example")
    assert {each.master_addr for each in of_kind(term.join("b"), m.Assigned)} == {"node-a.example"}


# Two agents with one node rank.


def rivalled() -> Term:
    """Agent c has come with the node rank of b, which is asked whether it lives."""
    term = Term((2, 3))
    term.join("a", 0)
    term.join("b", 1)
    assert term.join("c", 1) == [ev.Say(term.conns["b"], m.Probe())]
    return term


def test_what_a_node_says_while_it_waits_to_be_taken_in_counts() -> None:
    term = rivalled()
    moved = m.Status(node("c", 1).replace(master_port=4242), m.Past(m.Standing.READY))
    assert term.say("c", moved) == []
    term.pass_deadline()
    members = term.coordinator.roster.members
    assert members.keys() == {"a", "c"} and members["c"].node.master_port == 4242


@pytest.mark.parametrize("message", [hello("c", 1), r.Fetch("c", "1", r.What.WHY), m.Status(node("b"), busy())])
def test_a_node_that_waits_to_be_taken_in_says_nothing_but_its_own_status(message: Any) -> None:
    term = rivalled()
    assert term.say("c", message) == refusal(term.conns["c"], "protocol error: message before the first plan")
    assert term.coordinator.roster.members.keys() == {"a", "b"}


def test_a_node_rank_is_that_of_the_agent_that_took_it_over_though_the_one_before_goes_later() -> None:
    term = rivalled()
    term.pass_deadline()
    assert term.coordinator.roster.members.keys() == {"a", "c"}
    term.tell(ev.Closed(term.conns["b"]))
    assert term.join("d", 1) == [ev.Say(term.conns["c"], m.Probe())]


def test_of_a_node_that_has_left_the_connection_closes_without_a_grace() -> None:
    term = running()
    for name in "ab":
        term.say(name, m.Left(name, "SIGTERM"))
        term.close(name)
    assert term.leader.sessions.is_empty


# Leadership.


def test_the_record_is_renewed_three_times_a_lease_and_all_nodes_hear_a_heartbeat() -> None:
    term = running(renewals=7)
    actions = term.live_until(START + 10 * LEASE_S)
    assert 29 <= actions.count(ev.Renew()) <= 30
    assert [each.renewals for each in of_kind(actions, m.Heartbeat)][::2] == [*range(8, 8 + actions.count(ev.Renew()))]


def test_the_next_renewal_is_asked_for_when_a_third_of_a_lease_is_over_however_late_the_answer() -> None:
    term = Term()
    asked_at = START + LEASE_S / 3
    assert term.leader.deadline == asked_at
    assert term.pass_deadline() == [ev.Renew()]
    term.now += LEASE_S / 3 - 0.1
    term.tell(RENEWED)
    assert term.leader.deadline == pytest.approx(asked_at + LEASE_S / 3)
    assert term.pass_deadline() == [ev.Renew()]


def test_heartbeats_go_on_while_the_board_is_away_and_it_is_asked_again() -> None:
    term = running(renewals=3)
    actions = term.live_until(START + 10 * LEASE_S, is_board_up=False)
    assert {each.renewals for each in of_kind(actions, m.Heartbeat)} == {3}
    assert 29 <= actions.count(ev.Renew()) <= 30
    assert of_kind(actions, ev.StepDown) == []


def every_event(term: Term) -> list[ev.Event]:
    conn, past = term.conns["a"], busy().replace(standing=m.Standing.FAILED, failure=FAILURE)
    waiting = m.Status(node("a"), m.Past(m.Standing.READY))
    statuses = waiting, waiting.replace(past=past), waiting.replace(left=m.Left("a", "x"))
    return [
        ev.Opened(99, "10.0.0.9", "10.0.0.100"),
        *(ev.Received(conn, message) for message in (m.Alive(), m.HungUp(), *statuses)),
        ev.Received(conn, hello("a")),
        ev.Garbled(conn, "x", False),
        ev.Closed(conn),
        RENEWED,
        ev.Renewed(None),
        ev.RenewFailed("x"),
        reclaimed(9),
        ev.Reclaimed(None),
        ev.Published(True),
        ev.Published(False),
        ev.PublishFailed(),
        ev.Resigned(),
        ev.DeadlinePassed(),
    ]


def test_every_event_has_an_example_here() -> None:
    assert {type(event) for event in every_event(running())} == set(get_args(ev.Event))


def test_a_leader_that_has_stepped_down_does_nothing() -> None:
    for end in (ev.Renewed(None), ev.Published(False), ev.Resigned(), ev.Reclaimed(None)):
        term = running(max_restarts=0)
        term.pass_time_until_renewal()
        if isinstance(end, ev.Reclaimed):
            term.join("c", seen_epoch=9)
        if isinstance(end, ev.Published):
            term.fail("a")
        term.tell(end)
        for event in every_event(term):
            term.now += 1000
            assert term.tell(event) == []


@pytest.mark.parametrize(
    "event",
    [
        RENEWED,
        ev.Renewed(None),
        ev.RenewFailed("x"),
        reclaimed(9),
        ev.Reclaimed(None),
        ev.Published(True),
        ev.Published(False),
        ev.PublishFailed(),
    ],
)
def test_an_answer_that_was_not_asked_for_is_impossible_and_changes_nothing(event: ev.Event) -> None:
    term = running()
    before = copy.deepcopy(term)
    with pytest.raises(InvalidTransition):
        term.tell(event)
    assert of_kind(term.say("a", failed("a")), m.Interrupted)
    assert before.say("a", failed("a")) == [part(conn, m.Interrupted(1, FIRST, 1)) for conn in (1, 2)]
    assert (term.leader.deadline, term.leader.lease) == (before.leader.deadline, before.leader.lease)


def test_while_the_board_is_silent_only_nodes_that_are_heard_hear_the_coordinator() -> None:
    """What it sends still arrives: nodes that it does not hear are to miss it."""
    term = running("abc")
    actions = term.live_until(term.now + LEASE_S * 0.9, "b", is_board_up=False)
    beats = [name for name, said in term.hears(actions).items() for each in said if isinstance(each, m.Heartbeat)]
    assert beats.count("b") < beats.count("a") == beats.count("c")


# A board that has lost what it knew.


def test_while_leadership_is_reclaimed_the_old_record_is_not_renewed() -> None:
    """It would be found to be another agent's: our own."""
    term = running(renewals=3)
    term.join("c", seen_epoch=9)
    actions = term.live_until(term.now + LEASE_S)
    assert ev.Renew() not in actions
    assert of_kind(actions, m.Heartbeat), "but we live"
    term.tell(reclaimed(10))
    assert ev.Renew() in term.live_until(term.now + LEASE_S)


# The verdict.


def closing(**others: Any) -> Term:
    """The last worker has succeeded."""
    term = running(**others)
    term.say("a", m.Succeeded("a", 1))
    return term


def test_a_node_that_comes_and_goes_does_not_keep_the_verdict_for_ever() -> None:
    term = closing()
    term.say("b", m.Succeeded("b", 1))
    until = term.now + 2 * LEASE_S + RETURN_S + 2 * PUBLISH_TIMEOUT_S
    told = list[Any]()
    while term.now < until:  # a middlebox resets its connection before each look, and lets it back after it
        told += term.live_until(term.now + PUBLISH_TIMEOUT_S * 0.8, is_board_up=False)
        told += term.tell(ev.Closed(term.conns.pop("b"), is_reset=True))
        told += term.live_until(term.now + PUBLISH_TIMEOUT_S * 0.2, is_board_up=False)
        told += term.join("b")
    assert of_kind(told, m.Ended)


def elect(term: Term, names: str) -> None:
    """The nodes of the last round elect by majority."""
    seats = tuple(m.Seat(name, f"host-{name}", "10.0.0.1", 7) for name in names)
    term.leader.sessions.electorate.is_on = True
    term.leader.sessions.electorate.rounds[1] = m.Seats(1, 1, "secret", seats)


KNOWS = m.Alive(1, EPOCH)  # the seats, and the verdict with them


def test_a_coordinator_whose_verdict_too_few_know_has_workers_stopped_and_says_at_last_that_it_does_not_know() -> None:
    term = running("abc", nodes=(1, 3), max_restarts=0, join_timeout_s=60.0)
    elect(term, "abc")
    term.fail("a")
    said: list[Any] = []
    until = term.now + 60.0 - 2 * PUBLISH_TIMEOUT_S
    while term.leader.deadline is not None and term.leader.deadline < until:
        said += term.say("a", KNOWS)
        said += term.pass_deadline()
        said += term.tell(RENEWED) if term.leader.lease.is_asked else []
    assert of_kind(said, ev.Publish) == of_kind(said, m.Ended) == []
    (stop,) = {each.decision.cause for each in of_kind(said, m.Interrupted)}
    assert (stop.kind, stop.hosts) == (CauseKind.OUTCOME_UNKNOWN, ("host-b", "host-c"))
    while not of_kind(said, m.Ended):
        said = term.say("a", KNOWS) + term.pass_deadline()
        said += term.tell(RENEWED) if term.leader.lease.is_asked else []
    assert {each.outcome for each in of_kind(said, m.Ended)} == {m.Outcome.TIMED_OUT}
    assert term.now <= until + 4 * PUBLISH_TIMEOUT_S


def test_that_a_node_is_replaced_is_no_verdict() -> None:
    """Both are told at once: one node is replaced, and with it the job is over."""
    term = Term((1, 2), max_restarts=0)
    failed = m.Past(m.Standing.FAILED, 5, 0, 0, 2, -1, FAILURE)
    term.join("a", 0, past=failed)
    term.join("b", 1, past=m.Past(m.Standing.BUSY, 4, 0, 1, 2))
    term.join("c", 1, past=m.Past(m.Standing.BUSY, 5, 0, 1, 2))
    actions = term.pass_deadline()
    assert term.coordinator.is_closed
    (publish,) = of_kind(actions, ev.Publish)
    assert from_text(publish.verdict).outcome is m.Outcome.FAILED
    assert {each.outcome for each in of_kind(actions, m.Ended)} <= {m.Outcome.REPLACED}
    assert {each.outcome for each in of_kind(term.tell(ev.Published(True)), m.Ended)} == {m.Outcome.FAILED}


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_connection_that_is_reset_as_the_verdict_is_told_may_not_have_carried_it(is_reset: bool) -> None:
    """The record stays on the board for that node, or it is back at once and is told again."""
    term = running(max_restarts=0)
    term.fail("b")
    assert len(of_kind(term.tell(ev.Published(True)), m.Ended)) == 2
    term.close("b")
    term.tell(ev.Closed(term.conns["a"], is_reset))
    assert term.leader.has_told_all is not is_reset and term.leader.sessions.is_empty is not is_reset
    back = copy.deepcopy(term)
    term.live_until(term.now + 2 * GRACE_S)
    assert term.leader.has_told_all is not is_reset and term.leader.sessions.is_empty
    past = m.Past(m.Standing.FAILED, 1, 0, 0, 2, failure=FAILURE, failure_age_s=1.0, epoch=EPOCH)
    assert of_kind(back.join("a", past=past), m.Ended)
    back.close("a")
    assert back.leader.has_told_all


@pytest.mark.parametrize("how", ["silent", "reset", "hung up", "ended", "left", "back"])
def test_the_verdict_stays_on_the_board_for_a_node_that_was_lost_in_an_earlier_round_and_may_look_for_it(
    how: str,
) -> None:
    term = running("abc", nodes=(2, 3), join_timeout_s=60.0, max_restarts=0)
    lose(term, "reset" if how == "back" else how)
    until = term.now + LEASE_S + 60.0
    if term.leader.lease.is_asked:
        term.tell(RENEWED)
    term.say("a", ready("a"))
    term.say("b", ready("b"))
    term.live_until(term.now + 2 * RETURN_S, "c")  # it is not awaited any more
    assert term.coordinator.round == 2
    if how == "back":
        term.join("c")
    term.say("b", m.Failed("b", 2, FAILURE))
    term.live_until(term.now + 2 * GRACE_S)
    assert term.coordinator.is_closed
    told = of_kind(term.tell(ev.Published(True)), m.Ended)
    for name in sorted(term.conns.keys() - ({"c"} if how != "back" else set())):
        term.close(name)
    assert told and term.leader.sessions.is_empty
    may_look = how in {"silent", "reset", "hung up"}
    assert term.leader.has_told_all is not may_look
    term.conns.clear()
    term.live_until(until - 1.0)
    assert term.leader.has_told_all is not may_look
    term.live_until(until + 2 * LEASE_S)
    assert term.leader.has_told_all, "it has given up"


def lose(term: Term, how: str) -> None:
    """Node c is gone."""
    match how:
        case "silent":
            term.live_until(term.now + LEASE_S + 0.1, "c")
        case "reset" | "replaced":
            term.tell(ev.Closed(term.conns["c"], True))
        case "hung up" | "ended":
            _ = term.say("c", m.HungUp()) if how == "hung up" else None
            term.close("c")
        case "left":
            term.say("c", m.Left("c", "asked to"))
            term.close("c")
    term.now += GRACE_S
    term.tell(ev.DeadlinePassed())


@pytest.mark.parametrize("is_over", [False, True], ids=["before the verdict", "after it"])
@pytest.mark.parametrize(
    "how, is_awaited",
    [("silent", True), ("reset", True), ("hung up", True), ("ended", False), ("left", False), ("replaced", False)],
)
def test_agents_that_may_live_are_awaited_for_a_lease_after_they_were_lost(
    how: str, is_awaited: bool, is_over: bool
) -> None:
    term = running("ab", nodes=(2, 2), max_restarts=0)
    term.join("c")
    if not is_over:
        lose(term, how)
    term.fail("b")
    term.tell(ev.Published(True))
    if is_over:
        lose(term, how)
    if how == "replaced":
        term.leader.sessions.decide("c", m.Ended(m.Outcome.REPLACED, decided.refused()), term.now)
    assert term.leader.sessions.awaited_until == math.inf, "two are connected"
    for name in "ab":
        term.close(name)
    until = term.leader.sessions.awaited_until
    assert until > term.now if is_awaited else until == 0.0
    assert until <= term.now + LEASE_S + RETURN_S
    if is_awaited:
        assert term.leader.sessions.awaited_hosts == "host-c"
        assert of_kind(term.join("c"), m.Ended)
        term.close("c")
        assert term.leader.sessions.awaited_until == 0.0


def test_an_agent_that_was_lost_long_before_the_verdict_is_not_awaited() -> None:
    term = running("ab", nodes=(2, 2), max_restarts=0)
    term.join("c")
    lose(term, "silent")
    term.live_until(term.now + LEASE_S + RETURN_S, "c")
    term.fail("b")
    term.tell(ev.Published(True))
    for name in "ab":
        term.close(name)
    assert term.leader.sessions.awaited_until == 0.0


@pytest.mark.parametrize("letter", ["x", '"', "\n", "报", "💥", "\ud800"])
def test_a_verdict_always_fits_on_the_board(letter: str) -> None:
    failure = ProcessFailure.from_elsewhere("h" * 255, 0, 0, 77, 1, f"!{letter * (8 << 10)}", letter * (32 << 10), 1000)
    term = running(max_restarts=0)
    (publish,) = of_kind(term.fail("a", failure), ev.Publish)
    candidate = Candidate("n" * 64, tuple("a" * 255 for _ in range(4)), 29400, "t" * 32)
    assert record_to_bytes(LeaderRecord(1, candidate, 7, publish.verdict))
    told = from_text(publish.verdict)
    assert told.outcome is m.Outcome.FAILED and told.cause.message.startswith(failure.message[:100])
    heard = of_kind(term.tell(ev.Published(True)), m.Ended)
    assert [each.cause for each in heard] == [failure] * 2, "a connected node hears all of it"


# A loop that lags.


def be_late(term: Term, late_s: float) -> list[Any]:
    """The loop lags: what is due is done so much later."""
    assert term.leader.deadline is not None
    term.now = max(term.now, term.leader.deadline + late_s)
    done = term.tell(ev.DeadlinePassed())
    return done + (term.tell(RENEWED) if ev.Renew() in done else [])


def test_a_loop_that_lags_at_each_deadline_gives_up_a_dead_machine_all_the_same() -> None:
    term = running("ab", nodes=(1, 3))
    began, dropped = term.now, term.conns["b"]
    while ev.Drop(dropped) not in be_late(term, 0.4 * LEASE_S):
        term.say("a", m.Alive())
        assert term.now < began + 4 * LEASE_S, "b has said nothing since"


def test_a_loop_that_lags_gives_up_a_node_whose_connection_broke_all_the_same() -> None:
    term = running("ab", nodes=(1, 3))
    term.tell(ev.Closed(term.conns["b"], is_reset=True))
    for _ in range(3):
        be_late(term, 0.4 * LEASE_S)
        term.say("a", m.Alive())
    assert not term.leader.sessions._graces


# Books.


def entries(thing: Any, seen: set[int]) -> int:
    """How many entries all books have that a core holds."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        return len(thing) + sum(entries(each, seen) for each in thing.values())
    if isinstance(thing, list | set | deque | tuple):
        return len(thing) + sum(entries(each, seen) for each in thing)
    fields = getattr(type(thing), "__dataclass_fields__", {})
    return sum(entries(getattr(thing, name), seen) for name in fields)


@pytest.fixture
def no_invariants() -> Iterator[None]:
    """They look at everything, after each event."""
    check_invariants(False)
    yield
    check_invariants()


@pytest.mark.usefixtures("no_invariants")
@pytest.mark.parametrize("has_elections", [pytest.param(False, marks=pytest.mark.all), True])
@pytest.mark.parametrize("leave", ["close", "say Left", "reset"])
def test_the_books_of_a_coordinator_do_not_grow_with_agents_that_came_and_went(
    leave: str, has_elections: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(electorate, "REMEMBERED_MAX", 16)
    term = running("ab")
    term.leader.sessions.electorate.is_on = has_elections
    term.leader.sessions.electorate._forget_above = 2 * electorate.REMEMBERED_MAX
    sizes = list[int]()
    for number in range(1000):
        name = f"s{number}"
        term.join(name, number % 8)
        if leave == "say Left":
            term.say(name, m.Left(name, "done"))
        term.tell(ev.Closed(term.conns.pop(name), leave == "reset"))
        if number % 10 == 9:
            term.live_until(term.now + 0.5)
        if number % 100 == 99:
            term.live_until(term.now + 4 * LEASE_S)
            sizes.append(entries(term.leader, set()))
    assert max(sizes) < 700, sizes


def test_a_query_changes_no_books() -> None:
    term = running("abc", nodes=(3, 3))
    sessions = term.leader.sessions
    sessions.electorate.is_on = True
    seats = m.Seats(4_001, 1, "t0k3n", tuple(m.Seat(i, f"host-{i}", "10.0.0.1", 1) for i in "abc"))
    sessions.electorate.rounds[seats.fence] = seats
    for name in "abc":
        term.close(name)
        before = repr(sessions)
        assert [sessions.missing, sessions.missing] and repr(sessions) == before
