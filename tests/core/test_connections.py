"""A leader's connections and what nodes send on them: stories as text (`stories/leader/`), and other cases."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from kit import decided
from kit.stories.leader_terms import (
    FAILURE,
    LEASE_S,
    Term,
    busy,
    hello,
    node,
    of_kind,
    part,
    ready,
    refusal,
    running,
    voting,
)

from aelastic.base.machine import check_invariants
from aelastic.rdzv.leader import leader_events as ev
from aelastic.rdzv.leader.absent import RETURN_S
from aelastic.rdzv.leader.first_cause import GRACE_S
from aelastic.rdzv.log.node import Close
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r

# The greeting.


@pytest.mark.parametrize("token", ["", "t0k3", "t0k3n ", "ü", "\ud800", "x" * 100_000])
def test_an_agent_that_has_not_read_the_cell_may_try_again(token: str) -> None:
    term = Term()
    assert term.join("a", token=token) == refusal(
        1, "this agent read an outdated record of the leader; retrying", is_final=False
    )
    assert term.coordinator.trace == ()


@pytest.mark.parametrize(
    "terms, reason",
    [
        (
            m.Terms("other", 1, 3, 3, 5.0),
            "the run id is 'other' here and 'job' in the running job: use the same --rdzv-id on every node",
        ),
        (m.Terms("job", 2, 3, 3, 5.0), "--nnodes is 2:3 here and 1:3 in the running job: use the same on every node"),
        (m.Terms("job", 1, 2, 3, 5.0), "--nnodes is 1:2 here and 1:3 in the running job: use the same on every node"),
        (m.Terms("job", 1, 3, 0, 5.0), "--max-restarts is 0 here and 3 in the running job: use the same on every node"),
        (
            m.Terms("job", 1, 3, 3, 5.0, "oom: stop"),
            "--restart-policy is 'oom: stop' here and '' in the running job: use the same on every node",
        ),
    ],
)
def test_an_agent_with_other_options_than_the_job_is_refused_for_good(terms: m.Terms, reason: str) -> None:
    term = Term()
    conn = term.open("a")
    assert term.handle(ev.Received(conn, hello("a", terms=terms))) == refusal(1, reason)
    assert term.coordinator.trace == ()


def test_the_options_of_the_job_are_not_told_without_the_token() -> None:
    term = Term()
    conn = term.open("a")
    (answer, _) = term.handle(ev.Received(conn, hello("a", token="x", terms=m.Terms("other", 9, 9, 9, 5.0))))
    assert answer.message == m.Refused("this agent read an outdated record of the leader; retrying", False)


OF_B = m.Status(node("b"), m.Past(m.NodePhase.READY))


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
    assert term.send("a", message) == [
        part(2, m.Interrupted(1, decided.lost("host-a", reason), 0)),
        ev.SendTo(1, m.Refused(reason, True)), ev.Drop(1, in_order=True),
    ]  # fmt: skip


# Addresses.


def test_a_node_is_where_its_connection_comes_from_unless_it_says_otherwise() -> None:
    term = Term((2, 2))
    term.open("a", "::ffff:10.1.1.1")
    term.send("a", hello("a", terms=term.terms))
    term.open("b", "fd00::2")
    assert {each.master_addr for each in of_kind(term.send("b", hello("b", terms=term.terms)), m.Assigned)} == {
        "10.1.1.1"
    }
    term = Term((2, 2))
    term.join("a", address="node-a.example")
    assert {each.master_addr for each in of_kind(term.join("b"), m.Assigned)} == {"node-a.example"}


# Two agents with one node rank.


def rivalled() -> Term:
    """Agent c has joined with b's node rank, so the leader checks whether b is alive."""
    term = Term((2, 3))
    term.join("a", 0)
    term.join("b", 1)
    assert term.join("c", 1) == [ev.SendTo(term.conns["b"], m.Probe())]
    return term


def test_what_a_node_says_while_it_waits_to_be_taken_in_counts() -> None:
    term = rivalled()
    moved = m.Status(node("c", 1).replace(master_port=4242), m.Past(m.NodePhase.READY))
    assert term.send("c", moved) == []
    term.pass_deadline()
    members = term.coordinator.roster.members
    assert members.keys() == {"a", "c"} and members["c"].node.master_port == 4242


@pytest.mark.parametrize("message", [hello("c", 1), r.Fetch("c", "1", r.What.WHY), m.Status(node("b"), busy())])
def test_a_node_that_waits_to_be_taken_in_says_nothing_but_its_own_status(message: Any) -> None:
    term = rivalled()
    assert term.send("c", message) == refusal(term.conns["c"], "protocol error: message before the first plan")
    assert term.coordinator.roster.members.keys() == {"a", "b"}


def test_a_node_rank_is_that_of_the_agent_that_took_it_over_though_the_one_before_goes_later() -> None:
    term = rivalled()
    term.pass_deadline()
    assert term.coordinator.roster.members.keys() == {"a", "c"}
    term.close("b")
    assert term.join("d", 1) == [ev.SendTo(term.conns["c"], m.Probe())]


def test_of_a_node_that_has_left_the_connection_closes_without_a_grace() -> None:
    term = running()
    for name in "ab":
        term.send(name, m.Left(name, "SIGTERM"))
        term.close(name)
    assert term.leader.connections.is_empty


# The verdict.


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_connection_that_is_reset_as_the_verdict_is_sent_may_not_have_carried_it(is_reset: bool) -> None:
    """Either the cell keeps the verdict for that node, or the node reconnects at once and gets it again."""
    term = running(max_restarts=0)
    term.fail("b")
    assert term.leader.is_over and term.leader.connections.is_over
    term.close("b")
    term.close("a", Close.ABORTED if is_reset else Close.ORDERLY)
    assert term.leader.is_known_to_all is not is_reset and term.leader.connections.is_empty is not is_reset
    back = copy.deepcopy(term)
    term.live_until(term.now + 2 * GRACE_S)
    assert term.leader.is_known_to_all is not is_reset and term.leader.connections.is_empty
    past = busy().replace(phase=m.NodePhase.FAILED, failure=FAILURE, failure_age_s=1.0)
    assert of_kind(back.join("a", past=past), m.Ended)
    back.close("a")
    assert back.leader.is_known_to_all


def test_a_node_that_ends_once_its_work_is_done_is_not_waited_for_when_the_job_is_over() -> None:
    term = running()
    term.send("a", m.Succeeded("a", 1))
    term.close("a")
    term.live_until(term.now + 2 * GRACE_S, "a")
    term.send("b", m.Succeeded("b", 1))
    term.close("b")
    assert term.leader.is_over and term.leader.is_known_to_all


@pytest.mark.parametrize("how", ["silent", "reset", "hung up", "ended", "left", "back"])
def test_the_verdict_stays_in_the_cell_for_a_node_that_was_lost_in_an_earlier_round_and_may_look_for_it(
    how: str,
) -> None:
    term = running("abc", nodes=(2, 3), join_timeout_s=60.0, max_restarts=0)
    lose(term, "reset" if how == "back" else how)
    until = term.now + LEASE_S + 60.0
    term.send("a", ready("a"))
    term.send("b", ready("b"))
    term.live_until(term.now + 2 * RETURN_S, "c")  # no longer awaited
    assert term.coordinator.round == 2
    if how == "back":
        term.join("c")
    verdicts = of_kind(term.send("b", m.Failed("b", 2, FAILURE)) + term.live_until(term.now + 2 * GRACE_S), m.Ended)
    assert term.leader.is_over
    for name in sorted(term.conns.keys() - ({"c"} if how != "back" else set())):
        term.close(name)
    assert verdicts and term.leader.connections.is_empty
    may_look = how in {"silent", "reset", "hung up"}
    assert term.leader.is_known_to_all is not may_look
    term.conns.clear()
    term.live_until(until - 1.0)
    assert term.leader.is_known_to_all is not may_look
    term.live_until(until + 2 * LEASE_S)
    assert term.leader.is_known_to_all, "it has given up"


def lose(term: Term, how: str) -> None:
    """Loses node c."""
    match how:
        case "silent":
            term.live_until(term.now + LEASE_S + 0.1, "c")
        case "reset" | "replaced":
            term.close("c", Close.ABORTED)
        case "hung up" | "ended":
            _ = term.send("c", m.HungUp()) if how == "hung up" else None
            term.close("c", Close.HUNG_UP if how == "hung up" else Close.ORDERLY)
        case "left":
            term.send("c", m.Left("c", "asked to"))
            term.close("c")
    term.now += GRACE_S
    term.handle(ev.DeadlinePassed())


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
    assert term.leader.is_over
    if is_over:
        lose(term, how)
    if how == "replaced":
        term.leader.connections.decide("c", m.Ended(m.Outcome.REPLACED, decided.refused()), term.now)
    assert term.leader.connections.awaited_until == math.inf, "two are connected"
    for name in "ab":
        term.close(name)
    until = term.leader.connections.awaited_until
    assert until > term.now if is_awaited else until == 0.0
    assert until <= term.now + LEASE_S + RETURN_S
    if is_awaited:
        assert term.leader.connections.awaited_hosts == "host-c"
        assert of_kind(term.join("c"), m.Ended)
        term.close("c")
        assert term.leader.connections.awaited_until == 0.0


def test_an_agent_that_was_lost_long_before_the_verdict_is_not_awaited() -> None:
    term = running("ab", nodes=(2, 2), max_restarts=0)
    term.join("c")
    lose(term, "silent")
    term.live_until(term.now + LEASE_S + RETURN_S, "c")
    term.fail("b")
    assert term.leader.is_over
    for name in "ab":
        term.close(name)
    assert term.leader.connections.awaited_until == 0.0


# A loop that lags.


def be_late(term: Term, late_s: float) -> list[Any]:
    """Delays everything that is due, as a lagging loop does."""
    assert term.leader.deadline is not None
    term.now = max(term.now, term.leader.deadline + late_s)
    return term.handle(ev.DeadlinePassed())


def test_a_loop_that_lags_at_each_deadline_gives_up_a_dead_machine_anyway() -> None:
    term = running("ab", nodes=(1, 3))
    began, dropped = term.now, term.conns["b"]
    while ev.Drop(dropped) not in be_late(term, 0.4 * LEASE_S):
        term.send("a", m.Alive())
        assert term.now < began + 4 * LEASE_S, "b has sent nothing since"


def test_a_loop_that_lags_gives_up_a_node_whose_connection_broke_anyway() -> None:
    term = running("ab", nodes=(1, 3))
    term.close("b", Close.ABORTED)
    for _ in range(3):
        be_late(term, 0.4 * LEASE_S)
        term.send("a", m.Alive())
    assert not term.leader.connections._graces


# Bookkeeping.


def entries(thing: Any, seen: set[int]) -> int:
    """Counts the entries in all containers that a core holds."""
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
    """Disables invariants: they visit everything after each event."""
    check_invariants(False)
    yield
    check_invariants()


@pytest.mark.usefixtures("no_invariants")
@pytest.mark.parametrize("make", [running, voting])
@pytest.mark.parametrize("leave", ["close", "say Left", "reset"])
def test_the_books_of_a_leader_do_not_grow_with_agents_that_came_and_went(leave: str, make: Any) -> None:
    term = make("ab")
    sizes = list[int]()
    for number in range(1000):
        name = f"s{number}"
        term.join(name, number % 8)
        if leave == "say Left":
            term.send(name, m.Left(name, "done"))
        term.handle(ev.Closed(term.conns.pop(name), Close.ABORTED if leave == "reset" else Close.ORDERLY))
        if number % 10 == 9:
            term.live_until(term.now + 0.5)
        if number % 100 == 99:
            term.live_until(term.now + 4 * LEASE_S)
            sizes.append(entries(term.leader, set()))
    assert max(sizes) < 700, sizes
