"""A drain, decided: who holds, which call is named, when it ends, and what becomes of requests."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from aelastic.rdzv.coordinator.roster import RoundRules
from aelastic.rdzv.protocol.messages import Outcome
from aelastic.rdzv.protocol.requests import Answer, Ask, Frozen, Notice, Saved, Stage, Verb
from aelastic.rdzv.requests import drain as d
from aelastic.rdzv.requests.drain import Crew, Drain, Step

Told = tuple[str, Notice | Answer]


@dataclass
class Story:
    """A round of nodes a, b and c, on hosts of the same names."""

    nodes: tuple[str, ...] = ("a", "b", "c")
    epoch: int = 5
    now: float = 100.0
    runs: bool = True
    core: Drain[Told] = field(default_factory=lambda: Drain(lambda node_id, message: (node_id, message)))
    asked: int = 0

    def crew(self) -> Crew:
        hosts = {node_id: f"host-{node_id}" for node_id in self.nodes}
        return Crew(hosts, self.nodes if self.runs else (), 7, self.epoch)

    def tell(self, request: Ask | Frozen | Saved | None) -> list[Told]:
        told = self.core.handle(request, self.crew, self.now)
        self.core.validate()
        return told

    def ask(self, node: str, verb: Verb = Verb.DRAIN, deadline_s: float = 60.0, target: str = "") -> list[Told]:
        self.asked += 1
        return self.tell(Ask(node, f"ask-{self.asked}", verb, target, deadline_s, "spot"))

    def freeze(self, calls: dict[str, int], save_at: dict[str, int] | None = None) -> list[Told]:
        told = list[Told]()
        for node, count in calls.items():
            told += self.tell(Frozen(node, self.core.notice_id, count, int(count > 0), (save_at or {}).get(node, 0)))
        return told

    def save(self, *nodes: str) -> list[Told]:
        return [each for node in nodes for each in self.tell(Saved(node, self.core.notice_id))]


def stages(told: list[Told]) -> dict[str, Stage]:
    return {node: message.stage for node, message in told if isinstance(message, Notice)}


def answers(told: list[Told]) -> list[tuple[bool, str]]:
    return [(message.is_applied, message.text) for _, message in told if isinstance(message, Answer)]


def test_all_nodes_hold_then_save_at_the_call_after_the_foremost_then_it_is_over() -> None:
    story = Story()
    told = story.ask("b")
    assert answers(told) == [(True, "host-b leaves within 60 s (spot)")]
    assert stages(told) == dict.fromkeys("abc", Stage.FREEZE)
    assert story.freeze({"a": 7, "b": 9}) == []
    told = story.freeze({"c": 8})
    assert stages(told) == dict.fromkeys("abc", Stage.SAVE) and {m.save_at for _, m in told} == {10}  # type: ignore[union-attr]
    assert story.save("a", "a", "c") == [] and story.core.outcome == ""
    story.save("b")
    assert story.core.outcome == "host-b leaves within 60 s (spot); all ranks have saved"
    story.core.on_round_over()
    assert stages(story.core.let_go(story.nodes, story.now)) == {"b": Stage.LEAVE}
    assert story.core.let_go(story.nodes, story.now) == [], "it is told once"


def test_where_no_rank_has_come_by_the_first_call_is_named_and_workers_are_signalled() -> None:
    story = Story()
    story.ask("a")
    (_, notice), *_ = story.freeze(dict.fromkeys("abc", 0))
    assert isinstance(notice, Notice) and (notice.save_at, notice.is_signalled) == (1, True)


def test_a_call_that_was_named_before_is_named_again_unless_a_rank_may_have_passed_it() -> None:
    for calls, save_at, named in (
        ({"a": 9, "b": 10, "c": 8}, {"b": 10}, 10),  # b's ranks save at 10, nobody has come further
        ({"a": 10, "b": 10, "c": 8}, {"b": 10}, 11),  # a's ranks have gone by, before they heard of it
        ({"a": 10, "b": 10, "c": 10}, {"a": 10, "b": 10, "c": 10}, 10),
        ({"a": 12, "b": 10, "c": 9}, {"a": 10, "b": 10}, 13),  # a's script goes on after it has saved
    ):
        story = Story()
        story.ask("a")
        story.freeze(calls, save_at)
        assert story.core.save_at == named


def test_a_new_coordinator_freezes_again_once_it_is_asked_and_lets_ranks_go_where_nobody_asks() -> None:
    story = Story(epoch=6)
    assert story.tell(Frozen("a", 5_000, 7, 1, 0)) == [] and story.core.step is Step.HELD
    assert stages(story.ask("b")) == dict.fromkeys("abc", Stage.FREEZE) and story.core.notice_id == 6_000
    story = Story(epoch=5)
    story.tell(Frozen("a", 5_007, 7, 1, 0))
    story.now += d.ASKED_AGAIN_S
    told = story.tell(None)
    assert stages(told) == dict.fromkeys("abc", Stage.NONE) and story.core.notice_id == 5_008
    assert story.tell(None) == []


def test_what_is_said_of_an_earlier_notice_or_twice_changes_nothing() -> None:
    story = Story()
    story.ask("a")
    assert story.tell(Frozen("b", story.core.notice_id - 1, 99, 1, 0)) == []
    story.freeze({"a": 1, "b": 1})
    assert story.tell(Frozen("b", story.core.notice_id, 99, 1, 0)) == []
    story.freeze({"c": 1})
    assert story.core.save_at == 2
    story.tell(Saved("a", story.core.notice_id - 1))
    story.save("b", "c")
    assert not story.core.is_over


def test_an_agent_that_is_silent_holds_the_others_no_longer() -> None:
    story = Story()
    story.ask("a")
    story.freeze({"a": 1, "b": 1})
    assert story.core.deadline == story.now + d.FREEZE_S
    story.now += d.FREEZE_S
    told = story.tell(None)
    assert stages(told) == dict.fromkeys("abc", Stage.SAVE)
    assert {(m.save_at, m.is_signalled) for _, m in told if isinstance(m, Notice)} == {(0, True)}


def test_it_is_over_before_the_deadline_whoever_has_not_saved() -> None:
    story = Story()
    story.ask("a", deadline_s=20.0)
    story.freeze(dict.fromkeys("abc", 4))
    story.save("a")
    assert story.core.deadline == story.now + 20.0 - d.MARGIN_S
    story.now = story.core.deadline
    story.tell(None)
    assert story.core.is_over and "2 of 3 nodes have not saved in time" in story.core.outcome
    story.core.on_round_over()
    ((_, notice),) = story.core.let_go(story.nodes, story.now)
    assert isinstance(notice, Notice) and notice.reason.endswith("; 2 of 3 nodes have not saved in time")
    story = Story()
    story.ask("a", deadline_s=3.0)
    assert story.core.deadline == story.now + 2.0, "a third of a short one is kept"
    story.now = story.core.deadline
    story.tell(None)
    assert "no call to save at could be agreed in time" in story.core.outcome


def test_notices_merge_and_the_earliest_deadline_holds() -> None:
    story = Story()
    story.ask("a", deadline_s=60.0)
    story.freeze(dict.fromkeys("abc", 4))
    told = story.ask("c", deadline_s=20.0)
    assert stages(told) == dict.fromkeys("abc", Stage.SAVE) and story.core.save_at == 5
    assert {round(m.kill_s, 1) for _, m in told if isinstance(m, Notice)} == {18.5}
    assert stages(story.ask("b", deadline_s=90.0)) == {}, "a later one changes nothing for the ranks"
    story.save("a", "b", "c")
    story.core.on_round_over()
    assert stages(story.core.let_go(story.nodes, story.now)) == dict.fromkeys("abc", Stage.LEAVE)


def test_it_is_called_off_when_the_last_that_asked_does_so() -> None:
    story = Story()
    story.ask("a")
    story.ask("b")
    story.freeze(dict.fromkeys("abc", 4))
    assert stages(story.ask("a", Verb.CANCEL)) == {}
    before = story.core.notice_id
    told = story.ask("c", Verb.CANCEL, target="host-b")
    assert answers(told) == [(True, "host-b stays (spot)")] and stages(told) == dict.fromkeys("abc", Stage.NONE)
    assert story.core.step is Step.OFF and story.core.notice_id > before
    assert answers(story.ask("b", Verb.CANCEL)) == [(False, "host-b is not asked to leave")]


def test_requests_that_cannot_be_are_refused_and_each_is_decided_once() -> None:
    story = Story()
    assert answers(story.ask("a", target="host-x")) == [(False, "no node host-x")]
    refused = answers(story.ask("a", deadline_s=0.5))
    assert refused == [(False, "0.5 s is no time to save in: stop the node instead")] and not story.core.leaving
    ask = Ask("a", "once", Verb.CANCEL, "host-c", 0.0, "")
    story.ask("c")
    assert answers(story.tell(ask)) == answers(story.tell(ask)) == [(True, "host-c stays")]
    story.nodes = ()
    assert answers(story.ask("a")) == [(False, "the job has ended")]


def test_a_node_that_has_no_part_in_the_round_or_while_none_runs_leaves_at_once() -> None:
    story = Story()
    crew = Crew({"a": "host-a", "b": "host-b", "spare": "host-s"}, ("a", "b"), 7, 5)
    told = story.core.handle(Ask("spare", "1", Verb.DRAIN, "", 60.0, ""), lambda: crew, story.now)
    assert stages(told) == {"spare": Stage.LEAVE} and not story.core.is_on
    story = Story(runs=False)
    assert stages(story.ask("a")) == {}
    assert stages(story.core.let_go(story.nodes, story.now)) == {"a": Stage.LEAVE}


def test_a_node_that_was_lost_and_says_so_again_still_goes() -> None:
    story = Story()
    ask = Ask("a", "once", Verb.DRAIN, "", 60.0, "spot")
    story.tell(ask)
    story.core.on_gone("a")
    story.tell(ask)
    assert story.core.leaving.keys() == {"a"}


def test_a_node_that_has_finished_and_is_gone_is_not_waited_for() -> None:
    story = Story()
    story.ask("a")
    story.freeze({"a": 4, "b": 4})
    story.core.on_gone("c")
    story.nodes = ("a", "b")
    assert stages(story.tell(None)) == dict.fromkeys("ab", Stage.SAVE) and story.core.save_at == 5
    story.save("a")
    story.core.on_gone("b")
    story.nodes = ("a",)
    story.tell(None)
    assert story.core.is_over


def test_it_is_called_off_where_the_node_that_was_to_go_has_finished_and_is_gone() -> None:
    for calls in ({"b": 4}, dict.fromkeys("abc", 4)):
        story = Story()
        story.ask("a")
        story.freeze(calls)
        assert story.core.on_gone("a")
        story.nodes = ("b", "c")
        assert stages(story.tell(None)) == dict.fromkeys("bc", Stage.NONE)
        assert story.save("b", "c") == [] and story.core.step is Step.OFF


def test_answers_are_kept_for_so_many_requests() -> None:
    story = Story()
    for _ in range(d.ANSWERS_MAX + 5):
        story.ask("a", target="nobody")
    assert len(story.core._answers) == d.ANSWERS_MAX


@pytest.mark.parametrize("left, is_over", [(0, False), (1, True), (2, False)])
def test_the_job_ends_where_too_few_are_left(left: int, is_over: bool) -> None:
    verdict = RoundRules(2, 4).too_few("host-a leaves", ["host-b", "host-c"][:left])
    assert (verdict is not None) is is_over
    if verdict is not None:
        assert verdict.outcome is Outcome.TIMED_OUT
        assert verdict.reason == "host-a leaves; 1 of at least 2 nodes are left: host-b"


# The whole job.


@pytest.mark.parametrize("verb", [Verb.RESTART, Verb.STOP, Verb.KILL])
def test_what_is_asked_of_the_whole_job_is_done_at_once(verb: Verb) -> None:
    story = Story()
    assert answers(story.ask("b", verb)) == [(True, story.core.outcome)]
    assert story.core.is_over and story.core.outcome.endswith(" asked for on host-b (spot)")
    verdict = story.core.verdict
    story.core.on_round_over()
    if verb is Verb.RESTART:
        assert verdict is None and story.core.aim is None
    else:
        assert verdict is not None and verdict.outcome is (Outcome.STOPPED if verb is Verb.STOP else Outcome.KILLED)


def test_a_stop_that_waits_for_a_save_ends_the_job_as_saved_and_one_that_fails_as_stopped() -> None:
    for has_failed, outcome in ((False, Outcome.SAVED), (True, Outcome.STOPPED)):
        story = Story()
        told = story.tell(Ask("a", "x", Verb.STOP, "", 60.0, "", at_save=True))
        assert stages(told) == dict.fromkeys("abc", Stage.FREEZE)
        story.freeze(dict.fromkeys("abc", 4))
        if not has_failed:
            story.save(*"abc")
            assert story.core.is_over
        assert story.core.verdict is not None and story.core.verdict.outcome is outcome


def test_a_restart_that_has_been_done_is_not_done_again() -> None:
    story = Story()
    again = Ask("a", "x", Verb.RESTART, "", 0.0, "", round=6)
    assert answers(story.tell(again)) == [(True, "round 6 has ended already")]
    assert story.core.aim is None and not story.core.is_over
    story.tell(again.replace(ask_id="y", round=7))
    assert story.core.is_over


def test_a_stop_goes_before_a_restart_and_the_earlier_stop_before_a_later() -> None:
    story = Story()
    for ask_id, (verb, deadline_s, at_save) in enumerate(
        [(Verb.RESTART, 60.0, True), (Verb.STOP, 60.0, True), (Verb.RESTART, 10.0, True), (Verb.STOP, 90.0, True)]
    ):
        story.tell(Ask("a", str(ask_id), verb, "", deadline_s, "", at_save=at_save))
    assert story.core.aim is not None and story.core.aim.verb is Verb.STOP
    assert story.core.aim.end_at == story.now + 60.0
    story.tell(Ask("a", "now", Verb.STOP, "", 0.0, ""))
    assert story.core.is_over, "one that waits for nothing"


def test_too_short_a_time_to_save_in_is_refused() -> None:
    story = Story()
    told = story.tell(Ask("a", "x", Verb.RESTART, "", 0.5, "", at_save=True))
    assert answers(told) == [(False, "0.5 s is no time to save in: leave --at-save out")]
    assert story.core.aim is None
    story.nodes = ()
    assert answers(story.ask("a", Verb.STOP)) == [(False, "the job has ended")]
