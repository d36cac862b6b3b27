"""Plans of nodes: everything decided about each node."""

from __future__ import annotations

from typing import Any

import pytest
from kit import decided

from aelastic.rdzv.leader.plans import ANSWERS_MAX, Plans, changed
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.ranks import assign_ranks

EMPTY = m.Plan(4, 5.0)
RANKS = assign_ranks([("", 2)])[0]
ASSIGNED = m.Assigned(1, 0, RANKS, "host", 29500)
LOST = decided.lost("n2", "silent for 5 s")
STOPPED = m.Interrupted(1, decided.restart(1, 3, decided.failed(4)), 1)
NOTICE = r.Notice(4001, 1, r.Stage.FREEZE, kill_s=60.0)
CORDON = r.Cordoned("row 3", 3600.0, 1)
ANSWER = r.Answer("a-1", True, "cordoned")
# Each decision, and its effect on an empty plan.
DECISIONS: list[tuple[m.LeaderMessage, dict[str, Any]]] = [
    (ASSIGNED, {"assigned": ASSIGNED}),
    (STOPPED, {"interrupted": STOPPED}),
    (m.Ended(m.Outcome.SUCCEEDED, decided.SUCCEEDED), {"ended": m.Ended(m.Outcome.SUCCEEDED, decided.SUCCEEDED)}),
    (m.Settled(1, LOST), {"settled": m.Settled(1, LOST)}),
    (m.Waiting("for others"), {"waiting": m.Waiting("for others")}),
    (m.StartAhead(3), {"starts_ahead": 3}),
    (m.Look(1, "x", 1), {"look": m.Look(1, "x", 1)}),
    (m.Compared(1, "x", (), False), {"compared": m.Compared(1, "x", (), False)}),
    (NOTICE, {"notice": NOTICE}),
    (CORDON, {"cordoned": CORDON}),
    (ANSWER, {"answers": (ANSWER,)}),
]
WHOLE = EMPTY.replace(**{name: value for _, made in DECISIONS for name, value in made.items()})


def plans() -> Plans:
    return Plans(4, 5.0)


def test_each_field_of_a_plan_has_a_decision_here() -> None:
    assert {"term", "lease_s", "log"} | {name for _, made in DECISIONS for name in made} == set(m.Plan.__match_args__)


@pytest.mark.parametrize("decision, made", DECISIONS, ids=lambda each: type(each).__name__)
def test_a_decision_is_part_of_the_plan_from_then_on(decision: m.LeaderMessage, made: dict[str, Any]) -> None:
    assert changed(EMPTY, decision) == EMPTY.replace(**made)
    assert changed(changed(EMPTY, decision), decision) == EMPTY.replace(**made), "applying it twice changes nothing"


@pytest.mark.parametrize(
    "decision",
    [each for each, _ in DECISIONS if not isinstance(each, m.Assigned | m.Interrupted | m.Compared)],
    ids=lambda each: type(each).__name__,
)
def test_a_decision_leaves_alone_what_else_was_decided(decision: m.LeaderMessage) -> None:
    assert changed(WHOLE, decision) == WHOLE


@pytest.mark.parametrize(
    "passed_on", [r.Show(r.Fetch("a", "1", r.What.WHY)), r.Shown(r.Fetched("a", "a", "1", "", ""))]
)
def test_what_one_node_shows_another_is_not_part_of_a_plan(passed_on: Any) -> None:
    with pytest.raises(AssertionError, match="passed on"):
        changed(EMPTY, passed_on)


def test_with_a_round_all_decisions_about_the_one_before_are_void_but_answers_and_what_its_end_cost() -> None:
    second = ASSIGNED.replace(round=2)
    kept = {"settled": WHOLE.settled, "answers": WHOLE.answers}
    assert changed(WHOLE, second) == EMPTY.replace(assigned=second, **kept)


def test_with_the_end_of_a_round_the_next_is_waited_for_and_an_interruption_stays_announced() -> None:
    ended = STOPPED.replace(round=2)
    # A node that came back may have been told to start workers before it learned why its round had ended.
    kept = {"notice": NOTICE, "answers": WHOLE.answers, "starts_ahead": WHOLE.starts_ahead}
    assert changed(WHOLE, ended) == EMPTY.replace(interrupted=ended, **kept)


def test_a_round_that_ends_before_a_node_has_read_that_it_began_is_in_the_plan_with_its_end() -> None:
    both = changed(changed(EMPTY, ASSIGNED), STOPPED)
    assert both == EMPTY.replace(assigned=ASSIGNED, interrupted=STOPPED)


def test_the_end_of_a_round_may_have_another_cause_after_all() -> None:
    free = m.Interrupted(1, LOST, 0)
    assert changed(WHOLE, free) == WHOLE.replace(interrupted=free), "later decisions stay"


def test_a_question_is_over_once_it_is_answered() -> None:
    compared = m.Compared(1, "all wait", (), False)
    assert changed(WHOLE, compared) == WHOLE.replace(look=None, compared=compared)


def test_an_answer_that_changes_is_sent_once_and_the_last_answers_are_kept() -> None:
    plan = changed(EMPTY, ANSWER)
    assert changed(plan, ANSWER.replace(text="no")).answers == (ANSWER.replace(text="no"),)
    for number in range(2 * ANSWERS_MAX):
        plan = changed(plan, r.Answer(f"b-{number}", True, "x"))
    assert len(plan.answers) == ANSWERS_MAX and plan.answers[-1].ask_id == f"b-{2 * ANSWERS_MAX - 1}"


# Several nodes.


def test_plans_that_have_changed_are_sent_once_in_the_order_of_their_changes() -> None:
    of = plans()
    for name in ("b", "a"):
        of.change(name, m.Waiting("x"), 0.0)
    of.change("b", m.Waiting("y"), 0.0)
    assert of.take_changed() == ["b", "a"] and of.take_changed() == []
    of.change("a", m.Waiting("x"), 0.0)
    assert of.take_changed() == [], "nothing new"
    of.send_again("a")
    assert of.take_changed() == ["a"], "on another connection everything is new"
    assert of.of("a", 0.0).waiting == m.Waiting("x")


def test_a_node_of_which_nothing_is_decided_waits() -> None:
    of = plans()
    assert of.of("a", 0.0) == of.empty == EMPTY
    of.send_again("a")
    assert of.take_changed() == ["a"] and of.of("a", 0.0) == EMPTY


def test_how_long_an_interruption_and_a_cordon_take_is_counted_from_now() -> None:
    of = plans()
    of.change("a", NOTICE, 100.0)
    of.change("a", CORDON, 110.0)
    plan = of.of("a", 120.0)
    assert plan.notice is not None and plan.cordoned is not None
    assert (plan.notice.kill_s, plan.cordoned.again_s) == (40.0, 3590.0)
    plan = of.of("a", 10_000.0)
    assert plan.notice is not None and plan.cordoned is not None
    assert (plan.notice.kill_s, plan.cordoned.again_s) == (0.0, 0.0), "the time is over"
    of.change("a", m.Waiting("x"), 130.0)
    plan = of.of("a", 130.0)
    assert plan.notice is not None and plan.notice.kill_s == 30.0, "another decision does not extend it"
    of.change("a", NOTICE.replace(stage=r.Stage.SAVE, kill_s=20.0), 140.0)
    plan = of.of("a", 150.0)
    assert plan.notice is not None and plan.notice.kill_s == 10.0


def test_an_answer_stays_until_the_node_shows_that_it_has_read_it() -> None:
    of = plans()
    of.change("a", ANSWER, 0.0)
    of.change("a", r.Answer("a-2", False, "no"), 0.0)
    of.take_changed()
    of.on_read("a", ["a-1", "a-2"])
    assert len(of.of("a", 0.0).answers) == 2
    of.on_read("a", ["a-2"])
    assert of.of("a", 0.0).answers == (r.Answer("a-2", False, "no"),)
    assert of.take_changed() == [], "the node knows"
    of.on_read("a", [])
    of.on_read("b", [])
    assert of.of("a", 0.0).answers == ()


def test_of_a_node_that_is_gone_nothing_is_kept() -> None:
    of = plans()
    for decision in (NOTICE, CORDON, ASSIGNED):
        of.change("a", decision, 0.0)
    of.forget("a")
    assert of.take_changed() == [] and of.of("a", 1.0) == EMPTY
    assert not any((of._plans, of._notice_at, of._cordoned_at))
    of.forget("a")


def test_another_term_is_in_all_plans() -> None:
    of = plans()
    of.change("a", ASSIGNED, 0.0)
    of.begin_term(9)
    assert of.of("a", 0.0) == EMPTY.replace(term=9, assigned=ASSIGNED) and of.of("b", 0.0).term == 9
    assert of.empty.term == 9


def test_a_plan_that_must_be_sent_once_more_is_the_same() -> None:
    of = plans()
    of.change("a", ASSIGNED, 0.0)
    of.take_changed()
    of.on_sent("a")
    of.change("a", STOPPED, 1.0)
    before = of.of("a", 1.0)
    of.take_changed()
    of.send("a")
    assert of.take_changed() == ["a"] and of.of("a", 1.0) == before, "it has read about its round"


def test_a_plan_shows_which_round_has_ended_only_to_a_node_that_has_yet_to_read_of_it() -> None:
    of = plans()
    of.change("a", ASSIGNED, 1.0)
    of.change("a", STOPPED, 1.0)
    assert of.of("a", 1.0).assigned == ASSIGNED, "the round ended as soon as it had begun"
    of.on_sent("a")
    of.change("a", ASSIGNED.replace(round=2), 2.0)
    of.on_sent("a")
    of.change("a", STOPPED.replace(round=2), 3.0)
    assert of.of("a", 3.0).assigned is None


def test_a_node_that_waits_is_in_no_round() -> None:
    """It came back without knowing the round it had been assigned to, and would start workers for it."""
    of = plans()
    of.change("a", ASSIGNED, 1.0)
    of.send_again("a")
    assert of.of("a", 1.0).assigned == ASSIGNED
    of.send_again("a", is_waiting=True)
    assert of.of("a", 1.0).assigned is None
