"""What a node tells a leader that may know nothing about it, and which parts of a plan are new to it."""

from __future__ import annotations

from typing import Any

import pytest
from kit import decided
from kit.stories.coordinator import failure

from aelastic.rdzv.decisions.cause import Cause, CauseKind
from aelastic.rdzv.leader.plans import changed
from aelastic.rdzv.log import node as log
from aelastic.rdzv.log.entries import first_entry
from aelastic.rdzv.member.node_state import ASKED_MAX, EARLIER_S, NodeState
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.ranks import assign_ranks

NODE = m.Node("me", "host", "", 2, "", 29500)
EMPTY = m.Plan(4, 5.0)
RANKS = assign_ranks([("", 2)] * 3)


def assigned(round_: int = 1, term: int = 4) -> m.Assigned:
    return m.Assigned(round_, 0, RANKS[0], "host", 29500, term=term)


def ready(**others: Any) -> NodeState:
    """A node waiting for its first round."""
    state = NodeState()
    state.submit(m.Ready(NODE.replace(**others)), 0.0)
    return state


def plan(*decisions: m.LeaderMessage, term: int = 4) -> m.Plan:
    """A node's plan after these decisions."""
    found = m.Plan(term, 5.0)
    for each in decisions:
        found = changed(found, each)
    return found


RUNS = plan(assigned())


def busy() -> NodeState:
    state = ready()
    assert state.follow(RUNS, 0.0) == [assigned()]
    return state


@pytest.mark.parametrize("starts", m.Starts)
def test_workers_that_waited_for_a_round_have_opted_in_to_it(starts: m.Starts) -> None:
    state = ready()
    state.submit(m.Prepared("me", starts), 0.0)
    (ranks,) = assign_ranks([("", 2)])
    for round_ in (1, 2):
        state.follow(EMPTY.replace(assigned=m.Assigned(round_, 0, ranks, "host", 29500)), 0.0)
        assert state.past.has_opted_in == (round_ == 1 and starts is m.Starts.READY)
        state.submit(m.Ready(NODE), 0.0)


# Following a plan.

STOPPED = m.Interrupted(1, decided.lost("n2", "silent for 5 s"), 0)
NOTICE = r.Notice(4001, 1, r.Stage.FREEZE, kill_s=60.0)
DRAIN = r.Ask("me", "me-1", r.Verb.DRAIN, "", 60.0, "spot")
# Each decision, and a node that it applies to.
DECISIONS: list[tuple[Any, m.LeaderMessage]] = [
    (ready, assigned()),
    (ready, m.Waiting("1 of 2 nodes are ready")),
    (ready, m.StartAhead(1)),
    (ready, r.Cordoned("row 3", 3600.0, 1)),
    (ready, m.Settled(0, decided.lost("n2", "silent for 5 s"))),
    (ready, m.Ended(m.Outcome.SUCCEEDED, decided.SUCCEEDED)),
    (busy, STOPPED),
    (busy, m.Look(1, "no output for 60 s", 1)),
    (busy, m.Compared(1, "hang: 1 of 6 ranks", (5,), True, number=1)),
    (busy, NOTICE),
]


def test_each_field_of_a_plan_that_reaches_a_supervisor_has_an_example_here() -> None:
    known = {name for _, decision in DECISIONS for name, value in plan(decision).__dict__.items() if value}
    assert known | {"answers", "log"} == set(m.Plan.__match_args__)


@pytest.mark.parametrize("make, decision", DECISIONS, ids=lambda each: type(each).__name__)
def test_a_decision_is_delivered_once_however_often_its_plan_comes(make: Any, decision: m.LeaderMessage) -> None:
    state = make()
    now = changed(state.plan or EMPTY, decision)
    assert state.follow(now, 1.0) == [decision]
    assert state.follow(now, 1.0) == [] or now.ended, "but the end of the job is the last plan anyway"
    state.validate()


@pytest.mark.parametrize("make, decision", DECISIONS, ids=lambda each: type(each).__name__)
def test_a_plan_that_comes_again_changes_nothing_in_the_status(make: Any, decision: m.LeaderMessage) -> None:
    state = make()
    now = changed(state.plan or EMPTY, decision)
    state.follow(now, 1.0)
    before = state.status_at(2.0)
    state.follow(now, 2.0)
    assert state.status_at(2.0) == before


def test_all_that_is_new_in_one_plan_is_delivered_in_the_right_order() -> None:
    state = busy()
    state.submit(DRAIN, 0.0)
    settled, answer = m.Settled(1, STOPPED.decision), r.Answer("me-1", True, "drain of host within 60 s")
    waiting, notice = m.Waiting("for others"), NOTICE.replace(stage=r.Stage.LEAVE)
    whole = RUNS.replace(
        notice=notice, waiting=waiting, settled=settled, interrupted=STOPPED, answers=(answer,), cordoned=None
    )
    assert state.follow(whole, 1.0) == [answer, STOPPED, settled, waiting, notice]


def test_the_round_of_an_older_plan_is_not_taken_part_in_again() -> None:
    state = busy()
    assert state.follow(RUNS.replace(interrupted=STOPPED), 1.0) == [STOPPED]
    state.submit(m.Ready(NODE), 2.0)
    assert state.follow(RUNS.replace(interrupted=STOPPED), 2.0) == [], "its status was on the way"
    assert state.past.phase is m.NodePhase.READY
    second = assigned(2)
    assert state.follow(plan(second), 3.0) == [second] and state.round == 2
    assert state.follow(RUNS, 3.0) == [] and state.round == 2


def test_a_restart_is_charged_to_the_round_however_many_were_charged_in_a_log_before() -> None:
    """The bug: a new log counts from 0, while a node remembered a restart charged in the previous log."""
    state = ready()
    state.follow(plan(assigned().replace(restart_count=1)), 0.0)
    state.submit(m.Ready(NODE), 0.0)
    state.follow(plan(assigned(2, term=9), term=9), 0.0)
    state.follow(plan(m.Interrupted(2, decided.restart(1, 3), 1), term=9), 0.0)
    assert state.past.is_charged and state.past.ended is None


def test_the_end_of_another_round_is_not_news() -> None:
    state = busy()
    assert state.follow(RUNS.replace(interrupted=STOPPED.replace(round=2)), 1.0) == []
    assert state.phase is m.NodePhase.BUSY


def test_an_end_that_costs_nothing_after_all_is_noted_but_stops_nothing_twice() -> None:
    state = busy()
    charged = m.Interrupted(1, decided.restart(1, 3, decided.failed(4)), 1)
    assert state.follow(RUNS.replace(interrupted=charged), 1.0) == [charged]
    assert (state.past.is_charged, state.past.ended) == (True, None)
    assert state.follow(RUNS.replace(interrupted=STOPPED), 2.0) == []
    assert (state.past.is_charged, state.past.ended) == (False, STOPPED.decision.cause)


@pytest.mark.parametrize(
    "name, what",
    [("look", m.Look(2, "no output", 1)), ("compared", m.Compared(2, "hang", (), False)),
     ("notice", NOTICE.replace(round=2))],
)  # fmt: skip
def test_a_node_receives_nothing_about_another_round(name: str, what: Any) -> None:
    assert busy().follow(RUNS.replace(**{name: what}), 1.0) == []


def test_a_notice_to_leave_is_for_a_node_without_a_round_as_well() -> None:
    leave = NOTICE.replace(stage=r.Stage.LEAVE, round=0)
    assert busy().follow(RUNS.replace(notice=leave), 1.0) == [leave]


def test_how_long_a_cordon_lasts_is_not_news_and_another_cordon_is() -> None:
    state, cordon = ready(), r.Cordoned("row 3", 3600.0, 1)
    assert state.follow(plan(cordon), 0.0) == [cordon]
    assert state.follow(plan(cordon.replace(again_s=3000.0)), 600.0) == []
    again = cordon.replace(number=2)
    assert state.follow(plan(again), 700.0) == [again]


def test_another_leader_counts_cordons_and_questions_again() -> None:
    state, cordon = ready(), r.Cordoned("row 3", 3600.0, 1)
    state.follow(plan(cordon), 0.0)
    assert state.follow(plan(cordon, term=5), 1.0) == [cordon], "the first cordon by the next leader"
    state, look = busy(), m.Look(1, "no output", 1)
    state.follow(RUNS.replace(look=look), 0.0)
    assert state.follow(RUNS.replace(look=look, term=5), 1.0) == [look]


def test_a_notice_that_leaves_less_time_is_news_and_the_same_one_is_not() -> None:
    state = busy()
    assert state.follow(RUNS.replace(notice=NOTICE), 100.0) == [NOTICE]  # killed at 160
    assert state.follow(RUNS.replace(notice=NOTICE.replace(kill_s=50.0)), 110.0) == []
    assert state.follow(RUNS.replace(notice=NOTICE.replace(kill_s=90.0)), 110.0) == [], "a later time changes nothing"
    just_now = NOTICE.replace(kill_s=50.0 - EARLIER_S / 2)
    assert state.follow(RUNS.replace(notice=just_now), 110.0) == [], "it differs only by the transit time"
    sooner = NOTICE.replace(kill_s=20.0)
    assert state.follow(RUNS.replace(notice=sooner), 110.0) == [sooner]
    assert state.follow(RUNS.replace(notice=sooner.replace(kill_s=10.0)), 120.0) == []


def test_the_next_stage_of_a_notice_is_news() -> None:
    state, save = busy(), NOTICE.replace(stage=r.Stage.SAVE, save_at=82)
    state.follow(RUNS.replace(notice=NOTICE), 100.0)
    state.submit(r.Frozen("me", 4001, 81, 2, 0), 101.0)
    assert state.follow(RUNS.replace(notice=save), 101.0) == [save]
    state.submit(r.Saved("me", 4001), 102.0)
    status = state.status_at(102.0)
    assert status.frozen is not None and status.saved is not None
    none = NOTICE.replace(stage=r.Stage.NONE)
    assert state.follow(RUNS.replace(notice=none), 103.0) == [none]
    status = state.status_at(103.0)
    assert (status.frozen, status.saved) == (None, None), "it was cancelled"


def test_an_answer_is_read_once_and_its_request_is_not_said_again() -> None:
    state = busy()
    state.submit(ask := DRAIN.replace(verb=r.Verb.CORDON, target="n2"), 0.0)
    assert state.status_at(0.0).asks == (ask,)
    answered = RUNS.replace(answers=(r.Answer("me-1", True, "cordoned"),))
    assert state.follow(answered, 1.0) == [r.Answer("me-1", True, "cordoned")]
    assert state.status_at(1.0).asks == ()
    assert state.follow(answered, 2.0) == []


def test_a_request_that_lasts_is_repeated_until_it_is_done_and_its_answer_is_read_once() -> None:
    state = busy()
    state.submit(DRAIN, 0.0)
    answered = RUNS.replace(answers=(r.Answer("me-1", True, "drain"),))
    assert len(state.follow(answered, 1.0)) == 1 and state.follow(answered.replace(term=5), 2.0) == []
    (again,) = state.status_at(10.0).asks
    assert (again.ask_id, again.deadline_s) == ("me-1", 50.0)
    refused = RUNS.replace(term=5, answers=(r.Answer("me-1", False, "too late"),))
    assert state.follow(refused, 11.0) == [], "no other leader refuses a request that one has accepted"
    state.follow(plan(STOPPED), 12.0)
    state.submit(m.Ready(NODE), 13.0)
    state.follow(plan(assigned(2)), 14.0)
    assert state.status_at(14.0).asks == (), "the next round began without it, so it was carried out"


def test_a_refusal_ends_a_request_that_would_last() -> None:
    state = busy()
    state.submit(DRAIN, 0.0)
    assert len(state.follow(RUNS.replace(answers=(r.Answer("me-1", False, "no"),)), 1.0)) == 1
    assert state.status_at(2.0).asks == ()


def test_a_cancelled_drain_is_not_said_again() -> None:
    state = busy()
    state.submit(DRAIN, 0.0)
    state.submit(cancel := DRAIN.replace(ask_id="me-2", verb=r.Verb.CANCEL), 1.0)
    assert [each.ask_id for each in state.status_at(1.0).asks] == [cancel.ask_id]


def test_of_very_many_requests_the_last_are_sent() -> None:
    state = busy()
    for number in range(2 * ASKED_MAX):
        state.submit(DRAIN.replace(ask_id=f"me-{number}", verb=r.Verb.CORDON), 0.0)
    asks = [each.ask_id for each in state.status_at(0.0).asks]
    assert len(asks) == ASKED_MAX and asks[-1] == f"me-{2 * ASKED_MAX - 1}"


def test_a_round_of_a_later_term_is_newer_though_its_number_is_not() -> None:
    """The log may have been founded again, and then counts from the beginning."""
    state = busy()
    state.follow(plan(STOPPED), 1.0)
    state.submit(m.Ready(NODE), 2.0)
    again = assigned(1, term=5)
    assert state.follow(plan(again, term=5), 3.0) == [again] and state.past.fence == m.fence_of(5, 1)


def test_what_a_plan_says_about_the_log_is_not_news_for_a_supervisor() -> None:
    first = first_entry(4, ["me"], ["me"], ("1f",))
    assert busy().follow(RUNS.replace(log=log.Plan(4, True, first, None, None)), 1.0) == []


def test_a_node_that_must_start_workers_ahead_prepares_and_one_that_has_a_round_does_not() -> None:
    state = ready()
    state.follow(EMPTY.replace(starts_ahead=1), 1.0)
    assert state.status_at(1.0).node.starts is m.Starts.PREPARING
    state.submit(m.Prepared("me", m.Starts.READY), 2.0)
    status = state.status_at(2.0)
    assert (status.node.starts, status.prepared_count) == (m.Starts.READY, 1)
    assert state.follow(EMPTY.replace(starts_ahead=1), 3.0) == []
    assert state.status_at(3.0).node.starts is m.Starts.READY, "it has started them"
    assert busy().follow(RUNS.replace(starts_ahead=1), 1.0) == []


def test_a_node_whose_workers_ended_that_were_started_ahead_starts_others_once_it_is_asked_again() -> None:
    state = ready()
    state.follow(EMPTY.replace(starts_ahead=1), 1.0)
    state.submit(m.Ready(NODE), 2.0)
    assert state.follow(EMPTY.replace(starts_ahead=1, waiting=m.Waiting("x")), 3.0) == [m.Waiting("x")]
    assert state.follow(EMPTY.replace(starts_ahead=2, waiting=m.Waiting("x")), 4.0) == [m.StartAhead(2)]
    assert state.status_at(4.0).node.starts is m.Starts.PREPARING


def test_a_node_that_could_not_start_workers_ahead_reports_it_again_where_it_is_asked_again() -> None:
    """A new connection or a new leader waits for its answer."""
    state = ready()
    state.follow(EMPTY.replace(starts_ahead=1), 1.0)
    state.submit(m.Prepared("me", m.Starts.COLD), 2.0)
    assert state.status_at(2.0).starts == 2
    assert state.follow(EMPTY.replace(term=5, starts_ahead=1), 3.0) == []
    assert state.follow(EMPTY.replace(term=5, starts_ahead=2), 4.0) == [m.StartAhead(2)]


def test_a_node_reads_at_once_that_a_round_began_and_that_it_is_over() -> None:
    state = ready()
    both = plan(assigned()).replace(interrupted=STOPPED)
    assert state.follow(both, 1.0) == [assigned(), STOPPED]
    state.submit(m.Ready(NODE), 2.0)
    assert state.follow(both, 3.0) == [], "it has done both"


# The status.


def test_a_node_that_hangs_asks_by_number_and_answers_by_the_number_of_the_question() -> None:
    state, hangs = busy(), m.Hangs("me", 1, "no output", 60.0, True)
    for number in (1, 2):
        state.submit(hangs, 1.0)
        assert state.status_at(1.0).question == hangs.replace(number=number)
    state.follow(RUNS.replace(look=m.Look(1, "no output", 7)), 2.0)
    state.submit(m.Saw("me", 1, ()), 3.0)
    assert state.status_at(3.0).places == m.Saw("me", 1, (), 7)
    state.follow(RUNS.replace(interrupted=STOPPED), 4.0)
    state.submit(m.Ready(NODE), 5.0)
    state.follow(plan(assigned(2)), 6.0)
    status = state.status_at(6.0)
    assert (status.question, status.places) == (None, None), "they belonged to the round before"


def test_a_node_counts_how_often_it_was_ready() -> None:
    state = ready()
    assert state.status_at(0.0).ready_count == 1
    state.submit(m.Ready(NODE), 1.0)
    assert state.status_at(1.0).ready_count == 2


def test_the_age_of_a_failure_grows_until_it_is_sent() -> None:
    state = ready()
    state.follow(plan(assigned()), 100.0)
    state.submit(m.Failed("me", 1, failure("a"), age_s=2.0), 110.0)
    assert state.status_at(115.0).past.failure_age_s == 7.0


def test_a_node_says_in_which_term_its_round_began() -> None:
    past = busy().past
    assert (past.round, past.term, past.fence) == (1, 4, assigned().fence)


def test_a_node_says_for_how_long_it_has_been_without_a_leader() -> None:
    state = busy()
    assert state.past_at(10.0).alone_s == 0.0
    state.on_alone(10.0)
    state.on_alone(12.0)
    assert state.past_at(15.0).alone_s == 5.0, "since it lost the last leader"
    state.on_welcome(is_new=True)
    assert state.past_at(20.0).alone_s == 0.0


def test_a_node_that_ended_its_round_by_itself_says_since_when_it_was_alone_then() -> None:
    state = busy()
    state.on_alone(10.0)
    stop = state.interrupt(Cause(CauseKind.LEADER_SILENT))
    assert stop is not None and stop.round == 1 and state.past.phase is m.NodePhase.STOPPING
    assert state.interrupt(Cause(CauseKind.LEADER_SILENT)) is None, "it stops once"
    state.on_welcome(is_new=True)
    assert state.past_at(30.0).alone_s == 20.0
    state.submit(m.Ready(NODE), 31.0)
    state.follow(plan(assigned(2)), 32.0)
    assert state.past_at(40.0).alone_s == 0.0


def test_nodes_that_wait_for_a_place_are_known_until_another_leader_counts_them() -> None:
    state = busy()
    state.on_spares(True)
    state.on_welcome(is_new=False)
    assert state.past.has_spares
    state.on_welcome(is_new=True)
    assert not state.past.has_spares
