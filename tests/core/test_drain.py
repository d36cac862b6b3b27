"""Decisions about drains: stories as text (`stories/drains/`), and the cases they don't show."""

from __future__ import annotations

import pytest
from kit import decided
from kit.stories.drains import Playing

from aelastic.rdzv.decisions.decision import DecisionKind
from aelastic.rdzv.leader import drain as d
from aelastic.rdzv.leader.drain import Crew
from aelastic.rdzv.leader.roster import RoundRules
from aelastic.rdzv.protocol.messages import Outcome
from aelastic.rdzv.protocol.requests import Answer, Ask, Stage, Verb


@pytest.mark.parametrize("line", ["a asks drain", "a asks stop"])
def test_once_the_job_has_ended_nothing_is_asked_of_it(line: str) -> None:
    story = Playing("abc")
    story.nodes = ""
    ((_, answer),) = story.handle(line)
    assert isinstance(answer, Answer) and (answer.is_applied, answer.text) == (False, "the job has ended")


def test_a_node_that_has_no_part_in_the_round_leaves_at_once() -> None:
    story, crew = (
        Playing("ab"),
        Crew({"a": "host-a", "b": "host-b", "spare": "host-s"}, ("a", "b"), 7, 5, ("a", "b", "spare")),
    )
    notices = story.core.handle(Ask("spare", "1", Verb.DRAIN, "", 60.0, ""), lambda: crew, story.now)
    assert [(node, notice.stage) for node, notice in notices if not isinstance(notice, Answer)] == [
        ("spare", Stage.LEAVE)
    ]
    assert not story.core.is_on


def test_a_node_that_was_lost_and_reports_it_again_still_goes() -> None:
    story = Playing("abc")
    story.handle("a asks drain id=once")
    story.core.on_gone("a")
    story.handle("a asks drain id=once")
    assert story.core.leaving.keys() == {"a"}


def test_answers_are_kept_for_a_limited_number_of_requests() -> None:
    story = Playing("abc")
    for _ in range(d.ANSWERS_MAX + 5):
        story.handle("a asks drain of=nobody")
    assert len(story.core._answers) == d.ANSWERS_MAX


@pytest.mark.parametrize("left, is_over", [(0, False), (1, True), (2, False)])
def test_the_job_ends_where_too_few_are_left(left: int, is_over: bool) -> None:
    verdict = RoundRules(2, 4).too_few(decided.drain("host-a", 60.0, ""), ["host-b", "host-c"][:left])
    assert (verdict is not None) is is_over
    if verdict is not None:
        assert verdict.outcome is Outcome.TIMED_OUT
        decision = verdict.decision
        assert (decision.kind, decision.number, decision.most) == (DecisionKind.TOO_FEW_LEFT, 1, 2)
        assert decision.hosts == ("host-b",)


def test_a_name_of_all_nodes_is_refused_as_the_end_of_the_job_is() -> None:
    story, hosts = Playing("ab"), {"a": "vm", "b": "vm"}
    for spares_job in (True, False):
        ask = Ask("a", f"{spares_job}", Verb.DRAIN, "vm", 60.0, "", spares_job=spares_job)
        answer, *_ = story.core.handle(ask, lambda: Crew(hosts, ("a", "b"), 7, 5, ("a", "b")), story.now)
        assert isinstance(answer[1], Answer) and answer[1].is_applied is not spares_job
        assert answer[1].text.startswith("this ends the job: no node would be left; --force") is spares_job


def test_nodes_learn_what_they_save_for() -> None:
    story = Playing("abc")
    (_, (_, notice)) = story.handle("a asks restart at_save")
    assert notice.verb is Verb.RESTART
    (_, (_, notice)) = Playing("abc").handle("a asks stop at_save")
    assert notice.verb is Verb.STOP
    for name in "abc":
        story.handle(f"{name} holds at=7")
    notices = [message for _, message in story.handle("b asks drain in=20") if not isinstance(message, Answer)]
    assert [(notice.stage, notice.verb) for notice in notices] == [(Stage.SAVE, Verb.DRAIN)], "a node leaves as well"


@pytest.mark.parametrize("verb", [Verb.DRAIN, Verb.RESTART, Verb.STOP])
def test_what_is_asked_again_while_the_round_is_taken_over_is_done_however_long_that_takes(verb: Verb) -> None:
    story = Playing("abc idle")  # some of its nodes have not joined yet
    story.handle("a saved notice=4000")
    story.core.handle(Ask("b", "1", verb, "", 60.0, "", at_save=True), story.crew, story.now)
    assert story.core.deadline is not None
    story.now, story.participants = story.core.deadline + 1.0, "abc"
    notices = story.core.handle(None, story.crew, story.now)
    assert {(name, notice.stage, notice.verb) for name, notice in notices} == {
        (name, Stage.FREEZE, verb) for name in "abc"
    }


def test_a_drain_whose_time_has_passed_while_ranks_waited_is_over_at_once() -> None:
    """A deadline in the past must not stay armed: the leader treats it as a bug, and its agent exits."""
    story = Playing("abc idle")
    story.handle("a saved notice=4000")
    story.core.handle(Ask("b", "1", Verb.DRAIN, "", 1.2, ""), story.crew, story.now)
    assert story.core.deadline is not None
    story.now, story.participants = story.core.deadline, "abc"
    assert story.core.handle(None, story.crew, story.now) == []
    assert story.core.is_over and story.core.deadline is None
