"""The leader: connections, leases and leadership around the coordinator; events in, actions out."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from kit.stories.leader_terms import (
    CANDIDATE,
    EPOCH,
    FAILURE,
    LEASE_S,
    REASON,
    RENEWED,
    START,
    WELCOME,
    Term,
    busy,
    failed,
    hello,
    lost,
    node,
    of_kind,
    ready,
    reclaimed,
    refusal,
    running,
)

from aelastic.core.machine import InvalidTransition, check_invariants
from aelastic.errors import ProcessFailure
from aelastic.rdzv.board import Candidate, LeaderRecord
from aelastic.rdzv.boards.encoding import record_to_bytes
from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.coordinator.coordinator_events import ALONE, Phase
from aelastic.rdzv.coordinator.first_cause import GRACE_S
from aelastic.rdzv.coordinator.leader import RETRY_S, WAITING_TEXT_INTERVAL_S
from aelastic.rdzv.coordinator.leader import Phase as LeaderPhase
from aelastic.rdzv.coordinator.sessions import PROBE_TIMEOUT_S
from aelastic.rdzv.coordinator.verdict import PUBLISH_AGAIN_S, PUBLISH_TIMEOUT_S
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import from_text
from aelastic.rdzv.survivors import electorate
from aelastic.rdzv.survivors.absent import RETURN_S
from aelastic.rdzv.survivors.leadership import TRUSTED_SHARE

# The greeting.


def test_a_node_is_welcome_with_the_right_token_and_terms() -> None:
    term = Term()
    assert term.join("a") == [ev.Say(1, WELCOME)]


def test_the_first_message_must_be_hello() -> None:
    for message in (m.Alive(), ready("a"), m.Left("a", "x")):
        term = Term()
        conn = term.open("a")
        assert term.tell(ev.Received(conn, message)) == refusal(1, "protocol error: the first message must be Hello")
        assert term.leader.sessions.is_empty


@pytest.mark.parametrize("token", ["", "t0k3", "t0k3n ", "ü", "\ud800", "x" * 100_000])
def test_an_agent_that_has_not_read_the_board_may_try_again(token: str) -> None:
    term = Term()
    assert term.join("a", token=token) == refusal(
        1, "this agent read an outdated coordinator entry; retrying", is_final=False
    )
    assert term.coordinator.story == ()


@pytest.mark.parametrize(
    "terms, said",
    [
        (
            m.Terms("other", 1, 3, 3, 5.0),
            "the run id is 'other' here and 'job' in the job that runs: give all nodes the same --rdzv-id",
        ),
        (m.Terms("job", 2, 3, 3, 5.0), "--nnodes is 2:3 here and 1:3 in the job that runs: give all nodes the same"),
        (m.Terms("job", 1, 2, 3, 5.0), "--nnodes is 1:2 here and 1:3 in the job that runs: give all nodes the same"),
        (m.Terms("job", 1, 3, 0, 5.0), "--max-restarts is 0 here and 3 in the job that runs: give all nodes the same"),
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
    assert said.message == m.Refused("this agent read an outdated coordinator entry; retrying", False)


def test_hello_is_said_once() -> None:
    term = running()
    assert term.say("a", hello("a", terms=term.terms))[:2] == refusal(1, "protocol error: second Hello")


@pytest.mark.parametrize(
    "message", [ready("b"), failed("b"), m.Succeeded("b", 1), m.Left("b", "x"), m.Prepared("b", m.Starts.WARM)]
)
def test_a_node_speaks_for_itself_only(message: Any) -> None:
    term = running()
    reason = "protocol error: message for another node_id"
    assert term.say("a", message) == [
        ev.Say(1, m.Refused(reason, True)), ev.Drop(1),
        ev.Say(2, m.Interrupted(1, f"node host-a was lost: {reason}", 0)), ev.Renew(),
    ]  # fmt: skip


@pytest.mark.parametrize("is_other_protocol", [False, True])
def test_garbage_is_refused_for_good_if_it_is_another_version(is_other_protocol: bool) -> None:
    term = Term()
    conn = term.open("a")
    garbage = ev.Garbled(conn, "no message of ours", is_other_protocol)
    assert term.tell(garbage) == refusal(conn, "no message of ours", is_final=is_other_protocol)
    assert term.tell(garbage) == []
    assert term.tell(ev.Received(conn, m.Alive()), ev.Closed(conn)) == []


def test_garbage_of_a_member_is_the_end_of_its_part() -> None:
    term = running()
    actions = term.tell(ev.Garbled(term.conns["a"], "no message of ours", False))
    assert term.hears(actions)["b"] == [lost("a", "no message of ours")]


def test_a_connection_that_says_nothing_is_dropped_after_a_lease() -> None:
    term = Term()
    conn = term.open("a")
    assert ev.Drop(conn) not in term.live_until(START + LEASE_S - 0.01, "a")
    assert ev.Drop(conn) in term.live_until(START + LEASE_S, "a")
    assert term.leader.sessions.is_empty


@pytest.mark.parametrize("message", [m.Alive(), ready("n"), hello("n", 0)])
def test_an_agent_that_waits_for_its_welcome_says_nothing(message: Any) -> None:
    """Whether its rank is another's is to be found out, or the leader has yet to get a newer epoch."""
    term = Term()
    term.join("a", 0)
    assert term.join("n", 0) == [ev.Say(1, m.Probe())]
    assert of_kind(term.say("n", message), m.Refused)
    term.tell(ev.Closed(term.conns["n"]))
    assert term.live_until(term.now + 1) is not None
    term = Term()
    assert term.join("n", seen_epoch=9) == [ev.Reclaim(9)]
    assert of_kind(term.say("n", message), m.Refused)
    assert term.tell(reclaimed(10)) == []


@pytest.mark.parametrize("how", ["rival", "greeted"])
def test_an_agent_that_hangs_up_before_its_welcome_gets_none_and_lives(how: str) -> None:
    """It comes on another connection, also if the end of this one is not heard of."""
    term = Term()
    term.join("a", 0)
    term.join("n", 0 if how == "rival" else None, seen_epoch=9 if how == "greeted" else 0)
    assert term.say("n", m.HungUp()) == []
    actions = term.live_until(term.now + 2 * PROBE_TIMEOUT_S) if how == "rival" else term.tell(reclaimed(10))
    assert not [action for action in actions if isinstance(action, ev.Say) and action.conn == term.conns["n"]]
    assert term.close("n") == []
    assert not term.leader.sessions.electorate._dead


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


def test_a_node_that_is_ready_again_is_where_its_connection_comes_from_too() -> None:
    term = running("a", nodes=(1, 1))
    term.say("a", failed("a"))
    (assigned,) = of_kind(term.say("a", ready("a")), m.Assigned)
    assert (assigned.round, assigned.master_addr) == (2, "10.0.0.1")


# Connections that break.


def test_a_broken_connection_is_a_lost_node_after_a_grace() -> None:
    term = running()
    assert term.close("a") == []
    assert term.leader.deadline == pytest.approx(term.now + GRACE_S)
    assert term.hears(term.pass_deadline()) == {"b": [lost("a", "connection closed")]}
    assert term.tell(ev.DeadlinePassed()) == []


def test_a_node_that_reconnects_within_the_grace_was_never_away() -> None:
    term = running()
    term.close("a")
    term.now += GRACE_S / 2
    actions = term.join("a", past=busy())
    assert actions == [ev.Say(3, WELCOME)]
    assert of_kind(term.live_until(term.now + 1), m.Interrupted) == []
    assert term.coordinator.phase is Phase.RUNNING


def test_a_node_that_reconnects_before_its_old_connection_closes_takes_its_place() -> None:
    term = running()
    actions = term.join("a", past=busy())
    assert actions == [ev.Drop(1), ev.Say(3, WELCOME)]
    assert term.tell(ev.Received(1, m.Left("a", "what came late on the old one"))) == []
    assert term.tell(ev.Closed(1)) == []
    assert of_kind(term.live_until(term.now + 1), m.Interrupted) == []
    assert [conn for conn, _ in said_to(term.say("b", failed("b")))] == [3, 2]


def said_to(actions: list[Any]) -> list[tuple[int, Any]]:
    return [(action.conn, action.message) for action in actions if isinstance(action, ev.Say)]


def test_a_node_that_missed_a_decision_hears_it_when_it_reconnects() -> None:
    term = running()
    term.close("a")
    assert term.say("b", ready("b")) == [], "a is not connected"
    actions = term.join("a", past=busy())
    assert actions == [ev.Say(3, WELCOME), ev.Say(3, m.Interrupted(1, "round 1 has ended; rejoining", 0))]


def test_a_node_that_leaves_is_not_lost_again_when_its_connection_closes() -> None:
    term = running()
    assert term.hears(term.say("a", m.Left("a", "SIGTERM"))) == {
        "b": [m.Interrupted(1, "node host-a left: SIGTERM", 0)]
    }
    term.close("a")
    term.say("b", ready("b"))
    assert of_kind(term.live_until(term.now + 1, "a"), m.Interrupted) == []


def test_a_failure_waits_until_it_is_known_which_nodes_are_lost() -> None:
    """Workers fail when their peers on a node that dies are gone, and the loss of a node costs no restart."""
    term = running("abc")
    term.close("a")
    assert term.say("b", failed("b")) == []
    heard = term.hears(term.pass_deadline())
    assert heard == {name: [lost("a", "connection closed")] for name in "bc"}
    assert term.coordinator.forming.restart_count == 0


def test_a_failure_beside_a_connection_that_broke_is_the_networks_and_costs_nothing() -> None:
    """Something between the nodes resets their connections: the workers' and the agents' break at once."""
    term = running("abc", max_restarts=0)
    term.close("a")
    assert term.say("b", failed("b")) == []
    told = m.Interrupted(1, "the connection of host-a broke", 0)
    actions = term.join("a", past=busy(size=3))
    assert term.hears(actions) == {"a": [WELCOME, told], "b": [told], "c": [told]}


def test_a_failure_that_its_node_tells_as_it_reconnects_is_the_networks() -> None:
    """Its agent learns that its connection was reset when it tells of its worker, whose connections were reset before."""
    term = running("abc", max_restarts=0)
    past = m.Past(m.Standing.FAILED, 1, 0, 0, 3, failure=FAILURE, failure_age_s=0.01, epoch=EPOCH)
    told = m.Interrupted(1, "the connection of host-a broke", 0)
    assert term.hears(term.join("a", past=past))["b"] == [told]


def test_a_failure_of_a_node_whose_connection_broke_long_ago_counts() -> None:
    term = running("abc")
    term.join("a", past=busy(size=3))
    term.live_until(term.now + GRACE_S + 0.01)
    assert term.hears(term.say("b", failed("b")))["a"] == [m.Interrupted(1, REASON, 1)]


@pytest.mark.parametrize("fails_after_s, breaks_after_s", [(2.0, 0.02), (0.1, 1.0)])
def test_each_time_that_a_connection_breaks_counts(fails_after_s: float, breaks_after_s: float) -> None:
    """The failure is beside the second time, or beside the first."""
    term = running("abc", max_restarts=0)
    term.join("a", past=busy(size=3))
    term.live_until(term.now + fails_after_s)
    said = term.say("b", failed("b"))
    said += term.live_until(term.now + breaks_after_s)
    said += term.join("a", past=busy(size=3))
    assert of_kind(said + term.live_until(term.now + 1), ev.Publish) == []


def test_a_node_that_was_lost_came_back_and_leaves_takes_nothing_back() -> None:
    """That it was lost has ended the round, and its worker, which fails later, is a victim."""
    term = running("abc", nodes=(2, 3), max_restarts=0)
    term.close("c")
    told = of_kind(term.live_until(term.now + 2 * GRACE_S, "c"), m.Interrupted)
    assert {each.reason for each in told} == {lost("c", "connection closed").reason}
    term.join("c", past=m.Past(m.Standing.FAILED, 1, 0, 2, 3, failure=FAILURE, failure_age_s=0.01, epoch=EPOCH))
    term.say("c", ready("c"))
    term.say("c", m.Left("c", "SIGTERM"))
    term.say("a", ready("a"))
    assert of_kind(term.say("b", ready("b")) + term.live_until(term.now + 1), m.Assigned)
    assert term.coordinator.forming.restart_count == 0


def test_a_failure_is_heard_before_what_its_node_says_after_it() -> None:
    """Its agent is asked to stop 50 ms later: the failure ended the job, and that the node left costs nothing more."""
    term = running("abc", max_restarts=0)
    assert term.say("b", failed("b")) == []
    term.now += 0.05
    assert term.say("b", m.Left("b", "SIGTERM")) == []
    (told,) = of_kind(term.live_until(term.now + GRACE_S), ev.Publish)
    assert from_text(told.verdict).outcome is m.Outcome.FAILED


def test_a_failure_waits_for_no_connection_that_breaks_a_grace_after_it() -> None:
    """While one connection is in its grace another breaks, and so on: nothing else would be due then."""
    term = running("abc", max_restarts=0)
    assert term.say("b", failed("b")) == []
    failed_at = term.now
    term.now += GRACE_S
    term.close("c")
    assert of_kind(term.live_until(failed_at + 2 * GRACE_S), ev.Publish) == [], "c may be the cause"
    term = running("abc", max_restarts=0)
    assert term.say("b", failed("b")) == []
    term.now += GRACE_S + 0.001
    term.say("c", m.Alive())
    assert term.leader.coordinator.is_closed, "c was there when the grace was over"


def test_a_node_that_has_left_holds_no_failure_up() -> None:
    term = running("abc", nodes=(1, 3))
    term.say("a", m.Left("a", "SIGTERM"))
    for name in "bc":
        term.say(name, ready(name))
    term.close("a")
    actions = term.say("b", m.Failed("b", 2, FAILURE))
    assert [said.reason for said in of_kind(actions, m.Interrupted)] == [REASON] * 2


def test_a_node_that_is_refused_is_lost_at_once_whatever_else_is_in_its_grace() -> None:
    term = running("abc")
    term.close("a")
    actions = term.tell(ev.Garbled(term.conns["b"], "no message of ours", False))
    reason = "no message of ours"
    assert term.hears(actions) == {"b": [m.Refused(reason, False)], "c": [lost("b", reason)]}


# Leases.


def test_a_silent_node_is_lost_after_a_lease() -> None:
    term = running()
    heard_at = term.now
    term.say("a", m.Alive())
    assert of_kind(term.live_until(heard_at + LEASE_S - 0.001, "a"), m.Interrupted) == []
    actions = term.live_until(heard_at + LEASE_S, "a")
    assert lost("a", "silent for 5 s") in term.hears(actions)["b"]
    assert actions[:2] == [ev.Say(1, m.GivenUp()), ev.Drop(1)], "a dead one's closes without a word"
    assert term.tell(ev.Closed(1)) == [], "that it is lost is known"


def test_whatever_a_node_says_renews_its_lease() -> None:
    term = running()
    term.live_until(term.now + LEASE_S - 0.1, "a")
    term.say("a", ready("a"))
    assert of_kind(term.live_until(term.now + LEASE_S - 0.1, "a"), ev.Drop) == []


def test_if_we_slept_every_node_gets_another_lease() -> None:
    term = running(renewals=0)
    term.now += 3600
    assert term.tell(ev.DeadlinePassed()) == [ev.Renew()]
    term.tell(RENEWED)
    assert term.coordinator.phase is Phase.RUNNING
    term.now += LEASE_S / 2
    term.say("a", m.Alive())
    actions = term.live_until(term.now + LEASE_S / 2 + 0.1, "a", "b")
    assert [each.reason for each in of_kind(actions, m.Interrupted)] == ["node host-b was lost: silent for 5 s"]


def test_if_we_slept_a_grace_begins_anew() -> None:
    term = running()
    term.close("a")
    term.now += 3600
    term.tell(ev.DeadlinePassed(), RENEWED)
    assert term.join("a", past=busy()) == [ev.Say(3, WELCOME)]
    assert term.coordinator.phase is Phase.RUNNING


def test_if_we_slept_an_agent_that_was_probed_has_time_to_answer() -> None:
    term = Term()
    term.join("a", 0)
    term.join("n", 0)
    term.now += 3600
    term.tell(ev.DeadlinePassed(), RENEWED)
    assert of_kind(term.say("a", m.Alive()), m.Waiting), "it has answered, and the answer was in our socket"


def test_a_deadline_that_fires_early_changes_nothing() -> None:
    term = running()
    assert term.leader.deadline is not None
    term.now = term.leader.deadline - 1e-6
    assert term.tell(ev.DeadlinePassed()) == []


# Leadership.


def test_a_round_that_has_lost_nodes_begins_once_the_board_was_asked_after_the_loss() -> None:
    """A machine that was suspended, its clock too, finds its connections closed, and is sure of its lease."""
    term = running("abc", nodes=(1, 3))
    term.close("a")
    actions = term.pass_deadline()
    assert actions.count(ev.Renew()) == 1
    for name in "bc":
        assert term.say(name, ready(name)) == []
    assert len(of_kind(term.tell(RENEWED), m.Assigned)) == 2


def test_a_node_that_hangs_up_is_in_no_round_that_begins_before_its_connection_closes() -> None:
    """A machine that was suspended, its clock too, hears of a newcomer in between, and is sure of its lease."""
    term = running("abc", nodes=(3, 3))
    term.say("a", m.Left("a", "SIGTERM"))
    for name in "bc":
        term.say(name, ready(name))
    assert term.say("c", m.HungUp()) == []
    assert of_kind(term.join("d"), m.Assigned) == []
    assert term.close("c") == []
    assert ev.Renew() in term.join("c"), "it was back within the grace"
    assert len(of_kind(term.tell(RENEWED), m.Assigned)) == 3


def test_a_later_round_with_a_newcomer_begins_once_the_board_was_asked_after_the_last_node_was_ready() -> None:
    """A machine that was suspended, its clock too, may read both before it reads that the others have hung up."""
    term = running("abc", nodes=(3, 3))
    term.say("a", m.Left("a", "SIGTERM"))
    term.join("d")
    term.say("b", ready("b"))
    assert term.say("c", ready("c")) == [ev.Renew()]
    assert term.say("c", m.HungUp()) == []
    assert of_kind(term.tell(RENEWED), m.Assigned) == []
    assert len(of_kind(term.live_until(term.now + GRACE_S, "c"), m.Assigned)) == 0


def test_a_renewal_that_was_asked_for_before_the_loss_begins_no_round() -> None:
    term = running("abc", nodes=(1, 3))
    term.pass_time_until_renewal()
    term.close("a")
    assert ev.Renew() not in term.pass_deadline(), "one question at a time"
    for name in "bc":
        term.say(name, ready(name))
    actions = term.tell(RENEWED)
    assert of_kind(actions, m.Assigned) == []
    assert actions.count(ev.Renew()) == 1
    assert len(of_kind(term.tell(RENEWED), m.Assigned)) == 2


def after_a_loss() -> Term:
    """A round has lost a node; the others are ready for the next."""
    term = running("abc", nodes=(1, 3))
    term.close("a")
    term.pass_deadline()
    for name in "bc":
        term.say(name, ready(name))
    return term


def test_a_renewal_that_a_round_waits_for_is_asked_for_again_soon() -> None:
    term = after_a_loss()
    asked_at = term.now
    term.tell(ev.RenewFailed("no answer"))
    term.pass_time_until_renewal()
    assert term.now - asked_at == pytest.approx(RETRY_S)
    assert len(of_kind(term.tell(RENEWED), m.Assigned)) == 2


def test_no_round_begins_if_another_agent_leads_since_the_loss() -> None:
    term = after_a_loss()
    actions = term.tell(ev.Renewed(None))
    assert of_kind(actions, m.Assigned) == [] and term.leader.has_stepped_down


def test_a_board_that_comes_back_has_a_verdict_that_nodes_have_heard_already() -> None:
    term = closing()
    term.say("b", m.Succeeded("b", 1))
    term.tell(ev.PublishFailed())
    again = term.live_until(term.now + PUBLISH_AGAIN_S)
    assert len(of_kind(again, ev.Publish)) == 1
    term.tell(ev.PublishFailed())
    later = term.live_until(term.now + LEASE_S / 3 + 2 * PUBLISH_TIMEOUT_S)
    assert len(of_kind(later, ev.Publish)) == 1 and of_kind(later, m.Ended)
    term.tell(ev.Published(True))
    assert of_kind(term.live_until(term.now + 5), ev.Publish) == []


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


def test_one_renewal_at_a_time_is_asked_for_and_heartbeats_go_on_while_the_board_is_slow() -> None:
    term = running(renewals=0)
    actions: list[Any] = []
    while ev.Renew() not in actions:
        actions = term.pass_deadline()
    for name in "ab":
        term.say(name, m.Alive())
    late = term.pass_deadline()
    assert term.hears(late) == {"a": [m.Heartbeat(0)], "b": [m.Heartbeat(0)]}
    assert ev.Renew() not in late
    assert term.hears(term.tell(RENEWED)) == {"a": [m.Heartbeat(1)], "b": [m.Heartbeat(1)]}


def test_all_hear_at_once_when_a_node_begins_to_wait_for_a_place_and_when_none_does_any_more() -> None:
    term = running("abc", renewals=7)
    waiting = term.hears(term.join("d"))
    assert {name: said[-1] for name, said in waiting.items()} == dict.fromkeys("abcd", m.Heartbeat(7, True))
    assert of_kind(term.join("e"), m.Heartbeat) == [], "told already"
    term.close("d")
    assert of_kind(term.live_until(term.now + GRACE_S), m.Heartbeat) == [], "one is left"
    term.close("e")
    gone = term.hears(term.live_until(term.now + GRACE_S))
    assert gone == {name: [m.Heartbeat(7)] for name in "abc"}


def test_that_a_node_waits_is_not_unsaid_while_it_takes_its_place() -> None:
    term = running("abc", renewals=7)
    term.join("d")
    term.close("a")
    assert m.Heartbeat(8) not in of_kind(term.live_until(term.now + GRACE_S), m.Heartbeat)
    actions = [action for name in "bc" for action in term.say(name, ready(name))]
    assert actions == [ev.Renew()]
    actions = term.tell(RENEWED)
    assert len(of_kind(actions, m.Assigned)) == 3
    assert of_kind(actions, m.Heartbeat)[-3:] == [m.Heartbeat(9)] * 3


def test_the_count_of_renewals_is_that_of_the_board_also_after_an_answer_was_lost() -> None:
    term = running(renewals=3)
    term.pass_time_until_renewal()
    term.tell(ev.RenewFailed("no answer"))  # it took effect: the board has 4
    term.pass_time_until_renewal()
    heard = term.hears(term.tell(ev.Renewed(LeaderRecord(4, CANDIDATE, 5))))
    assert heard == {"a": [m.Heartbeat(5)], "b": [m.Heartbeat(5)]}


def test_heartbeats_go_on_while_the_board_is_away_and_it_is_asked_again() -> None:
    term = running(renewals=3)
    actions = term.live_until(START + 10 * LEASE_S, is_board_up=False)
    assert {each.renewals for each in of_kind(actions, m.Heartbeat)} == {3}
    assert 29 <= actions.count(ev.Renew()) <= 30
    assert of_kind(actions, ev.StepDown) == []


def test_decisions_wait_while_leadership_is_uncertain() -> None:
    term = running()
    term.live_until(START + LEASE_S * TRUSTED_SHARE, is_board_up=False)
    copied = copy.deepcopy(term)
    assert of_kind(copied.say("a", failed("a")), m.Interrupted), "it is certain to the last moment"
    term.now += 0.001
    assert term.say("a", failed("a")) == []
    assert of_kind(term.live_until(term.now + 3600, is_board_up=False), m.Interrupted) == []
    term.pass_time_until_renewal()
    actions = term.tell(RENEWED)
    assert [each.reason for each in of_kind(actions, m.Interrupted)] == [REASON] * 2


def test_all_that_was_heard_while_leadership_was_uncertain_counts_before_a_failure_ends_the_job() -> None:
    """The board is slow: a failure waits in the inbox, and behind it the loss of a node that it followed from."""
    term = running("abc", nodes=(1, 3), max_restarts=0)
    term.live_until(START + LEASE_S * TRUSTED_SHARE, is_board_up=False)
    term.now += 0.01
    assert term.say("b", failed("b")) == []
    assert term.close("c") == []
    term.live_until(term.now + 1, "c", is_board_up=False)
    term.pass_time_until_renewal()
    actions = term.tell(RENEWED)
    assert of_kind(actions, ev.Publish) == []
    assert {each.reason for each in of_kind(actions, m.Interrupted)} == {lost("c", "connection closed").reason}


def test_a_node_that_stopped_its_workers_without_contact_was_lost_since_then() -> None:
    """Its connection broke, the others' workers died of its own, and it was back before anything could be decided."""
    term = running("abc", nodes=(1, 3), max_restarts=0)
    term.live_until(START + LEASE_S * TRUSTED_SHARE, is_board_up=False)
    term.now += 0.01
    said = term.close("c") + term.live_until(term.now + 1, "c", is_board_up=False) + term.say("b", failed("b"))
    said += term.live_until(term.now + 1, "c", is_board_up=False)
    said += term.join("c", past=m.Past(m.Standing.READY, 1, 0, 2, 3, ended="no contact", alone_s=2.2, epoch=EPOCH))
    term.pass_time_until_renewal()
    said += term.tell(RENEWED)
    assert of_kind(said, ev.Publish) == []
    assert {each.reason for each in of_kind(said, m.Interrupted)} == {"the connection of host-c broke"}


def test_leadership_is_certain_from_when_the_board_was_asked_not_from_when_it_answered() -> None:
    term = running()
    term.pass_time_until_renewal()
    asked_at = term.now
    term.now += LEASE_S
    term.tell(RENEWED)
    assert asked_at + LEASE_S * TRUSTED_SHARE < term.now
    assert term.say("a", failed("a")) == []


def test_no_deadline_of_the_job_counts_while_leadership_is_uncertain() -> None:
    term = Term((2, 2), join_timeout_s=LEASE_S * 3)
    term.join("a")
    actions = term.live_until(START + LEASE_S * 4, is_board_up=False)
    assert of_kind(actions, ev.Publish) == []
    term.pass_time_until_renewal()
    assert of_kind(term.tell(RENEWED), ev.Publish), "now it is for us to say so"


def test_what_is_due_before_leadership_becomes_uncertain_and_noticed_later_waits() -> None:
    """The deadline of the coordinator passes while our process stands still: time must go on all the same."""
    term = Term((2, 2), join_timeout_s=LEASE_S * TRUSTED_SHARE - 0.1)
    term.join("a")
    term.now = START + LEASE_S * TRUSTED_SHARE + 0.1
    assert of_kind(term.tell(ev.DeadlinePassed()), ev.Publish) == []
    assert term.leader.deadline is not None and term.leader.deadline > term.now


@pytest.mark.parametrize("answer", [ev.Renewed(None), ev.Published(False)])
def test_a_leader_that_another_agent_has_displaced_steps_down_at_once(answer: ev.Event) -> None:
    term = running(max_restarts=0)
    term.pass_time_until_renewal()
    conn = term.open("stranger")
    reason = "another agent is coordinator now"
    term.fail("a")
    actions = term.tell(answer)
    assert term.hears(actions) == {name: [m.Goodbye(reason, False)] for name in "ab"}
    assert {action.conn for action in of_kind(actions, ev.Drop)} == {1, 2, conn}
    assert actions[-1] == ev.StepDown(reason)
    assert term.leader.has_stepped_down and term.leader.deadline is None and term.leader.sessions.is_empty


def test_an_agent_that_leaves_says_so() -> None:
    term = running()
    actions = term.tell(ev.Resigned())
    assert term.hears(actions) == {name: [m.Goodbye("the coordinator's agent is leaving", True)] for name in "ab"}
    assert actions[-1] == ev.StepDown("the coordinator's agent is leaving")


def every_event(term: Term) -> list[ev.Event]:
    conn = term.conns["a"]
    return [
        ev.Opened(99, "10.0.0.9", "10.0.0.100"),
        *(ev.Received(conn, message) for message in (m.Alive(), ready("a"), failed("a"), m.Left("a", "x"))),
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
    assert before.say("a", failed("a")) == [ev.Say(conn, m.Interrupted(1, REASON, 1)) for conn in (1, 2)]
    assert (term.leader.deadline, term.leader.lease) == (before.leader.deadline, before.leader.lease)


def test_nothing_is_decided_in_the_moment_of_leaving() -> None:
    term = Term((2, 2), join_timeout_s=1.0)
    term.join("a")
    term.now += 1.0
    assert term.tell(ev.Resigned())[-1] == ev.StepDown("the coordinator's agent is leaving")


# All other nodes fall silent.


def alone(names: str = "abc", **others: Any) -> Term:
    """Of a round of these nodes a coordinates, and the others are silent from now on."""
    term = running(names, **{"nodes": (1, 5), **others})
    term.coordinator.own_node_id, term.leader.is_replaceable = "a", True
    return term


def stands_back(actions: list[Any]) -> bool:
    return any(action.stand_back_s for action in actions if isinstance(action, ev.Reclaim))


def test_a_coordinator_that_hears_no_other_node_ends_its_round_and_stands_back() -> None:
    term = alone()
    actions = term.live_until(term.now + LEASE_S, "b", "c")
    assert stands_back(actions)
    assert m.Interrupted(1, ALONE, 0) in term.hears(actions)["a"]
    actions = term.live_until(term.now + 2 * LEASE_S)
    assert of_kind(actions, m.Heartbeat), "its own node is to know that it lives"
    assert not of_kind(actions, m.Assigned) and ev.Renew() not in actions


@pytest.mark.parametrize("is_elected", [False, True])
def test_a_coordinator_that_stood_back_goes_on_if_no_other_was_elected(is_elected: bool) -> None:
    term = alone()
    term.live_until(term.now + 2 * LEASE_S, "b", "c")
    term.say("a", ready("a"))
    actions = term.tell(ev.Reclaimed(None) if is_elected else reclaimed(5))
    actions += term.tell(RENEWED)
    assert bool(of_kind(actions, ev.StepDown)) == is_elected
    assert bool(of_kind(actions, m.Assigned)) != is_elected


def test_a_coordinator_that_stood_back_is_not_sure_of_a_record_that_the_board_still_had() -> None:
    term = alone()
    term.live_until(term.now + LEASE_S, "b", "c")
    term.tell(reclaimed(4))
    assert term.leader.phase is LeaderPhase.DOUBTFUL


@pytest.mark.parametrize("how", ["closed", "left", "replaceable", "few", "one", "apart", "closing"])
def test_a_coordinator_goes_on_where_the_silence_says_nothing_or_no_other_could_coordinate(how: str) -> None:
    term = alone("ab" if how == "one" else "abc", nodes=(3, 5) if how == "few" else (1, 5))
    silent = {"one": "b", "closed": "c", "left": "c"}.get(how, "bc")
    if how == "replaceable":
        term.leader.is_replaceable = False
    elif how == "left":
        term.say("b", m.Left("b", "SIGTERM"))
    elif how == "closing":
        for name in "abc":
            term.say(name, m.Succeeded(name, 1))
        assert term.coordinator.is_closed
    if how in {"closed", "left"}:
        term.close("b")
        del term.conns["b"]
    elif how == "apart":
        term.live_until(term.now + 2 * LEASE_S, "b")
    assert not stands_back(term.live_until(term.now + LEASE_S + 0.1, *silent))


@pytest.mark.parametrize("is_certain", [True, False])
def test_nodes_that_hang_up_do_not_hear_this_agent_or_have_another_coordinator(is_certain: bool) -> None:
    term = alone()
    if not is_certain:
        term.live_until(term.now + LEASE_S, is_board_up=False)
    for name in "bc":
        term.say(name, m.HungUp())
        term.close(name)
        del term.conns[name]
    assert stands_back(term.live_until(term.now + 1.0)) == is_certain


def test_while_the_board_is_silent_only_nodes_that_are_heard_hear_the_coordinator() -> None:
    """What it sends still arrives: nodes that it does not hear are to miss it."""
    term = running("abc")
    actions = term.live_until(term.now + LEASE_S * 0.9, "b", is_board_up=False)
    beats = [name for name, said in term.hears(actions).items() for each in said if isinstance(each, m.Heartbeat)]
    assert beats.count("b") < beats.count("a") == beats.count("c")


# A board that has lost what it knew.


def test_an_agent_that_knows_a_newer_epoch_makes_us_reclaim() -> None:
    term = running(renewals=5)
    assert term.join("c", seen_epoch=9) == [ev.Reclaim(9)]
    actions = term.tell(reclaimed(10))
    assert term.hears(actions) == {name: [m.Welcome(10, LEASE_S), m.Heartbeat(0, True)] for name in "abc"}
    assert term.join("d", seen_epoch=10) == [ev.Say(4, m.Welcome(10, LEASE_S))]
    assert (term.leader.lease.epoch, term.leader.lease.renewals) == (10, 0)


def test_agents_that_greet_meanwhile_wait_with_it_and_nothing_is_decided() -> None:
    term = running()
    assert term.join("c", seen_epoch=9) == [ev.Reclaim(9)]
    assert term.join("d") == []
    assert term.join("e", seen_epoch=8) == []
    assert term.say("a", failed("a")) == []
    term.close("d")
    actions = term.tell(reclaimed(10))
    assert term.hears(actions) == {
        "a": [m.Welcome(10, LEASE_S), m.Interrupted(1, REASON, 1)],
        "b": [m.Welcome(10, LEASE_S), m.Interrupted(1, REASON, 1)],
        "c": [m.Welcome(10, LEASE_S)],
        "e": [m.Welcome(10, LEASE_S)],
    }


def test_a_board_that_answers_with_the_old_record_is_asked_again_and_its_renewals_count() -> None:
    """The record was renewed on its way: the board has another than the one we campaigned with."""
    term = running(renewals=3)
    term.join("c", seen_epoch=9)
    assert ev.Reclaim(9) in term.tell(ev.Reclaimed(LeaderRecord(4, CANDIDATE, 7)))
    assert (term.leader.lease.epoch, term.leader.lease.renewals) == (4, 7)
    assert term.hears(term.tell(reclaimed(10)))["c"] == [m.Welcome(10, LEASE_S), m.Heartbeat(0, True)]


def test_a_leader_that_cannot_reclaim_steps_down() -> None:
    term = running()
    term.join("c", seen_epoch=9)
    assert term.tell(ev.Reclaimed(None))[-1] == ev.StepDown("no newer epoch could be had from the board")


def test_while_leadership_is_reclaimed_the_old_record_is_not_renewed() -> None:
    """It would be found to be another agent's: our own."""
    term = running(renewals=3)
    term.join("c", seen_epoch=9)
    actions = term.live_until(term.now + LEASE_S)
    assert ev.Renew() not in actions
    assert of_kind(actions, m.Heartbeat), "but we live"
    term.tell(reclaimed(10))
    assert ev.Renew() in term.live_until(term.now + LEASE_S)


def test_an_answer_about_the_epoch_before_changes_nothing() -> None:
    for late in (RENEWED, ev.RenewFailed("no answer")):
        term = running(renewals=3)
        term.pass_time_until_renewal()
        assert term.join("c", seen_epoch=9) == [ev.Reclaim(9)]
        assert term.tell(late) == []
        term.tell(reclaimed(10))
        assert (term.leader.has_stepped_down, term.leader.lease.renewals) == (False, 0)


def test_leadership_that_was_reclaimed_is_certain_from_when_it_was_asked_for() -> None:
    term = running()
    term.join("c", seen_epoch=9)
    term.now += LEASE_S
    term.tell(reclaimed(10))
    assert term.say("a", failed("a")) == []


def test_what_is_due_while_leadership_is_reclaimed_waits() -> None:
    term = Term((2, 2), join_timeout_s=1.0)
    term.join("a")
    term.join("b", seen_epoch=9)
    term.now += 1.5
    assert term.tell(ev.DeadlinePassed()) == []
    assert term.leader.deadline is not None and term.leader.deadline > term.now


# Two of one rank.


def test_an_agent_whose_rank_is_taken_makes_us_probe_the_other() -> None:
    term = Term()
    term.join("a", 0)
    assert term.join("n", 0) == [ev.Say(1, m.Probe())]
    assert term.leader.deadline == pytest.approx(term.now + PROBE_TIMEOUT_S)


def test_if_the_other_lives_the_newcomer_takes_part_without_the_rank() -> None:
    term = Term((3, 3))
    term.join("a", 0)
    term.join("n", 0)
    taken = "--node-rank 0 is already in use by 10.0.0.1: this node takes part without it"
    assert term.say("a", m.Alive()) == [ev.Say(2, WELCOME), ev.Say(2, m.Waiting(taken))]
    heard = term.hears(term.join("b", 1))
    assert {name: heard[name][-1].ranks.group_rank for name in heard} == {"a": 0, "b": 1, "n": 2}
    assert term.join("x", 0) == [ev.Say(1, m.Probe())], "the rank is still that of the first"
    assert term.hears(term.say("n", m.Ready(node("n", 0)))).keys() == {"a", "b"}, "nor is it taken by being ready again"


def test_nothing_is_said_to_a_newcomer_before_its_welcome() -> None:
    """Its rank is another's, and it knows a newer epoch than ours: first the board is asked for one above that."""
    term = Term((3, 3))
    term.join("a", 0)
    assert term.join("n", 0, seen_epoch=9) == [ev.Say(1, m.Probe())]
    assert term.say("a", m.Alive()) == [ev.Reclaim(9)]
    taken = "--node-rank 0 is already in use by 10.0.0.1: this node takes part without it"
    assert term.hears(term.tell(reclaimed(10))) == {
        "a": [m.Welcome(10, LEASE_S)],
        "n": [m.Welcome(10, LEASE_S), m.Waiting(taken)],
    }


def test_under_fixed_ranks_the_newcomer_is_refused_for_good() -> None:
    term = Term(has_fixed_ranks=True)
    term.join("a", 0)
    term.join("n", 0)
    taken = "--node-rank 0 is already in use by 10.0.0.1: give each node its own --node-rank"
    assert term.say("a", m.Alive()) == refusal(2, taken)


@pytest.mark.parametrize("how", ["silent", "closed"])
def test_if_the_other_is_dead_the_newcomer_takes_its_place_at_once(how: str) -> None:
    term = Term((2, 2))
    term.join("a", 0)
    term.join("b", 1)
    term.join("n", 0)
    actions = term.close("a") if how == "closed" else term.pass_deadline()
    reason = "node host-a was lost: another agent joined as node rank 0 (host-n)"
    heard = term.hears(actions)
    assert heard["n"] == [WELCOME]
    assert heard["b"] == [m.Interrupted(1, reason, 0)]
    assert term.now - START <= PROBE_TIMEOUT_S
    if how == "silent":
        assert heard["a"] == [m.Ended(m.Outcome.REPLACED, "another agent joined as node rank 0 (host-n)")]
    assert of_kind(term.live_until(term.now + 1, "a"), m.Interrupted) == [], "the other is not lost once more"


def test_an_agent_that_was_replaced_says_nothing_more() -> None:
    """It was suspended, and wakes up with a message unsent: the agent in its place must not pay for that."""
    term = Term((2, 2))
    term.join("a", 0)
    term.join("b", 1)
    term.join("n", 0)
    assert ev.Drop(1) in term.pass_deadline()
    assert term.say("a", m.Ready(node("a", 0))) == []
    assert term.say("b", m.Ready(node("b", 1))) == [], "the board was asked for the first time since a was lost"
    assert ev.Renew() in term.tell(RENEWED), "and is asked again, since b was read after that"
    assigned = of_kind(term.tell(RENEWED), m.Assigned)
    assert [each.ranks.group_rank for each in assigned] == [0, 1]


def test_a_node_whose_connection_is_broken_is_replaced_without_a_probe() -> None:
    term = Term((2, 2))
    term.join("a", 0)
    term.join("b", 1)
    term.close("a")
    assert term.hears(term.join("n", 0)) == {
        "n": [WELCOME],
        "b": [lost("a", "another agent joined as node rank 0 (host-n)")],
    }


def test_a_node_that_reconnects_is_not_its_own_rival() -> None:
    term = Term((2, 2))
    term.join("a", 0)
    term.join("b", 1)
    assert term.join("a", 0, past=busy()) == [ev.Drop(1), ev.Say(3, WELCOME)]


def test_a_node_that_leaves_may_close_later_than_the_one_that_has_its_rank_by_now() -> None:
    term = Term((2, 3))
    term.join("a", 0)
    term.join("b", 1)
    term.say("a", m.Left("a", "SIGTERM"))
    term.join("n", 0)
    assert term.hears(term.pass_deadline())["n"][0] == WELCOME
    term.close("n")
    assert of_kind(term.close("a"), m.Interrupted) == []


def test_two_newcomers_with_one_rank_are_rivals_of_each_other() -> None:
    term = Term((2, 3))
    term.join("a", 0)
    term.join("m", 0)
    term.join("n", 0)
    actions = term.pass_deadline()
    assert term.hears(actions)["m"] == [WELCOME, m.Probe()]
    assert "n" not in term.hears(actions)
    assert term.hears(term.say("m", m.Alive()))["n"][0] == WELCOME
    assert of_kind(term.live_until(term.now + 1), m.Ended) == []


def test_an_agent_that_reconnects_while_it_is_probed_lives() -> None:
    term = Term((2, 2))
    term.join("a", 0)
    term.join("b", 1)
    term.join("n", 0)
    actions = term.join("a", 0, past=busy())
    assert term.hears(actions)["a"] == [WELCOME, m.Probe()]
    term.tell(ev.Closed(1))
    actions = term.say("a", m.Alive())
    assert of_kind(actions, m.Ended) == [] and of_kind(actions, m.Waiting)
    assert term.coordinator.phase is Phase.RUNNING


def test_an_agent_that_goes_while_another_is_probed_is_not_admitted() -> None:
    for is_fixed in (False, True):
        term = Term(has_fixed_ranks=is_fixed)
        term.join("a", 0)
        term.join("n", 0)
        term.close("n")
        assert term.say("a", m.Alive()) == []
        assert len(term.coordinator.story) == 1


# The verdict.


def closing(**others: Any) -> Term:
    """The last worker has succeeded."""
    term = running(**others)
    term.say("a", m.Succeeded("a", 1))
    return term


VERDICT = m.Ended(m.Outcome.SUCCEEDED, "every worker succeeded")


def test_the_verdict_is_on_the_board_before_any_node_hears_it() -> None:
    term = closing()
    (publish,) = term.say("b", m.Succeeded("b", 1))
    assert from_text(publish.verdict) == VERDICT
    assert term.hears(term.tell(ev.Published(True))) == {name: [VERDICT] for name in "ab"}
    assert term.tell(ev.Published(True)) == []


def test_a_board_that_does_not_take_the_verdict_does_not_keep_it_from_nodes_that_are_all_heard() -> None:
    term = closing()
    term.say("b", m.Succeeded("b", 1))
    actions = term.live_until(term.now + LEASE_S / 3 + 2 * PUBLISH_TIMEOUT_S, is_board_up=False)
    assert of_kind(actions, m.Ended) == [VERDICT] * 2
    assert term.tell(ev.Published(True)) == []


@pytest.mark.parametrize("is_displaced", [False, True])
def test_a_verdict_that_the_board_does_not_take_waits_for_a_node_that_may_go_on_without_it(is_displaced: bool) -> None:
    term = closing()
    term.say("b", m.Succeeded("b", 1))
    until = term.now + LEASE_S + RETURN_S
    assert of_kind(term.live_until(until, "b", is_board_up=False), m.Ended) == [], "it may be heard until then"
    if is_displaced:
        assert of_kind(term.tell(ev.Published(False)), m.Ended) == [], "the others go on, and this node with them"
    else:
        told = term.live_until(until + LEASE_S + PUBLISH_TIMEOUT_S, "b", is_board_up=False)
        assert of_kind(told, m.Ended) == [VERDICT]


def test_what_nodes_had_said_before_the_coordinator_woke_up_lets_no_verdict_out() -> None:
    term = closing()
    term.say("b", m.Succeeded("b", 1))
    term.now += LEASE_S * 2 / 3
    for name in "ab":
        term.say(name, m.Alive())  # it waited in a socket
    assert of_kind(term.tell(ev.DeadlinePassed()), m.Ended) == []
    until = term.now + LEASE_S / 3 + 2 * PUBLISH_TIMEOUT_S
    assert of_kind(term.live_until(until, is_board_up=False), m.Ended) == [VERDICT] * 2


def test_of_what_was_heard_in_the_second_that_the_board_has_the_cut_may_have_come_after() -> None:
    term = closing()
    term.say("b", m.Succeeded("b", 1))
    term.now += PUBLISH_TIMEOUT_S / 2
    for name in "ab":
        term.say(name, m.Alive())
    assert of_kind(term.live_until(term.now + LEASE_S / 2, *"ab", is_board_up=False), m.Ended) == []


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


@pytest.mark.parametrize("in_contact", ["abc", "ab", "a"])
def test_a_coordinator_that_most_nodes_elected_displaces_one_that_the_board_got_knowing_nothing(
    in_contact: str,
) -> None:
    """The endpoint was served anew by an agent that is new, too; its epoch, from the wall clock, is the higher one."""
    term = running("abc")
    term.pass_time_until_renewal()
    elect(term, "abc")
    for name in sorted(set("abc") - set(in_contact)):
        term.tell(ev.Closed(term.conns.pop(name), is_reset=True))
    told = term.tell(ev.Renewed(LeaderRecord(4, CANDIDATE), is_assumed=True, rival_epoch=1000))
    if len(in_contact) == 1:
        assert of_kind(told, ev.StepDown), "most nodes may be with the other one"
        return
    assert of_kind(told, ev.Reclaim) == [ev.Reclaim(1000)]
    assert of_kind(term.tell(reclaimed(1001)), m.Welcome) == [m.Welcome(1001, LEASE_S)] * len(in_contact)


def test_two_nodes_elect_none_so_a_verdict_waits_for_the_other_one() -> None:
    term = closing()
    elect(term, "ab")
    term.say("b", m.Succeeded("b", 1))
    assert of_kind(term.live_until(term.now + LEASE_S + RETURN_S, "b", is_board_up=False), m.Ended) == []


KNOWS = m.Alive(1, EPOCH)  # the seats, and the verdict with them


def test_where_nodes_elect_most_of_them_know_the_verdict_before_the_board_does() -> None:
    """A coordinator after this one hears of it from one of them, and says the same."""
    term = closing()
    elect(term, "abc")
    asked = term.say("b", m.Succeeded("b", 1))
    heard = term.hears(asked)
    assert [type(each) for each in heard["a"]] == [m.Seats, m.Probe] == [type(each) for each in heard["b"]]
    assert heard["a"][0].closing == m.Closing(EPOCH, VERDICT)
    assert of_kind(asked, ev.Publish) == of_kind(term.say("a", KNOWS), ev.Publish) == []
    assert of_kind(term.say("b", KNOWS), ev.Publish)
    assert of_kind(term.tell(ev.Published(True)), m.Ended) == [VERDICT] * 2


def test_where_nodes_elect_and_most_know_the_verdict_the_board_has_a_second_to_take_it() -> None:
    term = closing()
    elect(term, "abc")
    term.say("b", m.Succeeded("b", 1))
    for name in "ab":
        term.say(name, KNOWS)
    assert of_kind(term.live_until(term.now + PUBLISH_TIMEOUT_S - 0.01, is_board_up=False), m.Ended) == []
    for name in "ab":
        term.say(name, KNOWS)
    assert of_kind(term.tell(ev.DeadlinePassed()), m.Ended) == []
    term.now += 0.02
    assert of_kind(term.tell(ev.DeadlinePassed()), m.Ended) == [VERDICT] * 2


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
    (stop,) = {each.reason for each in of_kind(said, m.Interrupted)}
    assert (
        stop
        == "the job's outcome is not known here: host-b, host-c have not confirmed it, and may go on; waiting for them"
    )
    while not of_kind(said, m.Ended):
        said = term.say("a", KNOWS) + term.pass_deadline()
        said += term.tell(RENEWED) if term.leader.lease.is_asked else []
    assert {each.outcome for each in of_kind(said, m.Ended)} == {m.Outcome.TIMED_OUT}
    assert term.now <= until + 4 * PUBLISH_TIMEOUT_S


def test_a_node_that_comes_before_the_verdict_is_on_the_board_hears_it_with_the_others_and_a_later_one_at_once() -> (
    None
):
    term = closing()
    term.say("b", m.Succeeded("b", 1))
    assert term.join("c") == [ev.Say(3, WELCOME)]
    term.close("b")
    assert term.hears(term.tell(ev.Published(True))) == {name: [VERDICT] for name in "ac"}
    assert term.join("b", past=m.Past(m.Standing.FINISHED, 1, 0, 1, 2, epoch=EPOCH)) == [
        ev.Say(4, WELCOME),
        ev.Say(4, VERDICT),
    ]
    term.live_until(term.now + 1)
    assert of_kind(term.join("d"), ev.Publish) == []


def test_a_job_that_all_nodes_have_left_is_closed_when_one_comes() -> None:
    term = Term((1, 3), join_timeout_s=1.0, last_call_timeout_s=30.0)
    term.join("a")
    term.close("a")
    assert of_kind(term.live_until(term.now + 5), ev.Publish) == []
    actions = term.join("b")
    (publish,) = of_kind(actions, ev.Publish)
    assert from_text(publish.verdict).outcome is m.Outcome.TIMED_OUT


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
        term.leader.sessions.say("c", m.Ended(m.Outcome.REPLACED, "another agent has its rank"))
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


def test_a_coordinator_whose_board_is_gone_still_tells_the_verdict_to_agents_that_come_back() -> None:
    term = running("ab", max_restarts=0)
    term.fail("b")
    term.tell(ev.Published(True))
    term.tell(ev.Closed(term.conns["a"], True))
    term.live_until(term.now + LEASE_S, is_board_up=False)
    assert of_kind(term.join("a", past=busy()), m.Ended)


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


# What waiting nodes read.


def test_nodes_that_wait_read_what_for_every_ten_seconds() -> None:
    term = Term((3, 3))
    term.join("a")
    term.join("b")
    actions = term.live_until(START + 3 * WAITING_TEXT_INTERVAL_S)
    texts = [each.text for each in of_kind(actions, m.Waiting)]
    assert texts == [
        f"rendezvous: 2 of 3 nodes joined after {seconds} s (host-a, host-b); waiting for 1 more"
        for seconds in (10, 10, 20, 20, 30, 30)
    ]


def test_while_the_board_does_not_answer_all_nodes_read_that_what_they_say_waits_for_it() -> None:
    term = running()
    term.live_until(START + WAITING_TEXT_INTERVAL_S + 1)
    silent = term.live_until(START + 2 * WAITING_TEXT_INTERVAL_S + 1, is_board_up=False)
    assert of_kind(silent, m.Waiting) == [], "workers run"
    term.say("b", failed("b"))
    heard = term.hears(term.live_until(START + 3 * WAITING_TEXT_INTERVAL_S + 1, is_board_up=False))
    text = "rendezvous: no answer from the endpoint for {} s: running workers continue, no new round can start"
    for name in "ab":
        (told,) = [each.text for each in heard[name] if isinstance(each, m.Waiting)]
        assert told == text.format(20)


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
@pytest.mark.parametrize("has_elections", [False, True])
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
