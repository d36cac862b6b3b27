"""The coordinator: stories as text (`stories/`), and what these do not show."""

from __future__ import annotations

from typing import Any

from kit import decided
from kit.reports import Job
from kit.stories.coordinator import failure, node

from aelastic.decisions.cause import SaveOutcome
from aelastic.rdzv.coordinator.coordinator import Coordinator
from aelastic.rdzv.coordinator.coordinator_events import Confirmed, DeadlinePassed, Lost, Phase, Reported
from aelastic.rdzv.coordinator.roster import RoundRules
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.settings import JOIN_TIMEOUT_S


def coordinator(*nodes: m.Node, max_nodes: int, max_restarts: int = 3) -> tuple[Job, list[Any]]:
    """A coordinator, and what it sends when the last of these nodes is ready."""
    job = Job(Coordinator(RoundRules(1, max_nodes), RestartPolicy(max_restarts)))
    sends: list[Any] = []
    assert job.core.deadline is None, "nothing is due before a node comes"
    for each in nodes:
        sends = job.handle(m.Ready(each), 100.0)
    return job, sends


def test_every_node_hears_its_own_ranks_and_the_same_round_and_master() -> None:
    nodes = [
        node("c").replace(role="reader", local_world_size=1),
        node("b").replace(role="trainer", local_world_size=4),
        node("a").replace(local_world_size=3, master_port=4242),
    ]
    _, sends = coordinator(*nodes, max_nodes=3)
    heard: dict[str, Any] = {send.node_id: send.message for send in sends}
    assert {(each.round, each.restart_count, each.ranks.world_size) for each in heard.values()} == {(1, 0, 8)}
    assert {(each.master_addr, each.master_port) for each in heard.values()} == {("addr-a", 4242)}
    assert [heard[name].ranks.group_rank for name in "abc"] == [0, 1, 2]
    assert [heard[name].ranks.first_rank for name in "abc"] == [0, 3, 7]
    assert [heard[name].ranks.first_role_rank for name in "abc"] == [0, 0, 0]


def test_a_node_that_comes_again_brings_its_new_port() -> None:
    job, _ = coordinator(node("a"), node("b"), max_nodes=2)
    job.handle(m.Failed("a", 1, failure("a")), 100.0)
    job.handle(m.Ready(node("b")), 100.0)
    sends: list[Any] = [*job.handle(m.Ready(node("a").replace(master_port=4242)), 100.0)]
    assert {send.message.master_port for send in sends} == {4242}


def test_a_timeout_names_a_few_of_the_nodes_that_joined() -> None:
    core = Coordinator(RoundRules(100, 200), RestartPolicy(0))
    job = Job(core)
    for number in range(50):
        job.handle(m.Ready(node(f"n{number}")), 100.0)
    assert core.deadline == 100.0 + JOIN_TIMEOUT_S
    verdict: Any
    (verdict,) = {send.message for send in job.handle(DeadlinePassed(), core.deadline)}
    assert core.is_closed and (verdict.decision.number, len(verdict.decision.hosts)) == (50, 16)


def test_its_last_events_are_told_and_no_more_than_those() -> None:
    job, _ = coordinator(node("a"), node("b"), max_nodes=2)
    core = job.core
    job.handle(m.Failed("a", 1, failure("a")), 100.0)
    assert "Standing.FAILED" in core.story[-1] and "running" in core.story[-1] and "forming" in core.story[-1]
    for _ in range(500):
        job.handle(DeadlinePassed(), 100.0)
    assert len(core.story) == 64


def test_messages_for_one_node_come_in_the_order_of_the_decisions() -> None:
    job, _ = coordinator(node("a"), max_nodes=1, max_restarts=1)
    sends = job.handle(m.Failed("a", 1, failure("a")), 100.0) + job.handle(m.Ready(node("a")), 100.0)
    assert [type(send.message) for send in sends] == [m.Interrupted, m.Assigned]


def a_node_is_cordoned() -> Job:
    """`a` and `b` take part in round 2; `c` is cordoned."""
    job, _ = coordinator(node("a"), node("b"), node("c"), max_nodes=3)
    core = job.core
    core.rules = core.forming.rules = core.rules.replace(min_nodes=2)
    job.handle(r.Ask("a", "1", r.Verb.CORDON, "c", 0.0, ""), 100.0)
    for name in "abc":
        job.handle(m.Ready(node(name)), 100.0)
    assert core.round == 2 and [*core.roster.participants] == ["a", "b"]
    return job


def test_a_cordoned_node_that_has_been_told_to_leave_takes_part_in_no_round_though_it_is_slow_to_go() -> None:
    job = a_node_is_cordoned()
    core = job.core
    told = job.handle(r.Ask("c", "2", r.Verb.DRAIN, "", 60.0, "spot"), 100.0)
    assert [each.message.stage for each in told if isinstance(each.message, r.Notice)] == [r.Stage.LEAVE]
    job.handle(Lost("b", "silent"), 100.1)
    job.handle(m.Ready(node("a")), 100.2)
    job.handle(Confirmed(core.forming.losses), 100.2)
    assert core.phase is Phase.FORMING and [*core.roster.ready] == ["a"], "there are too few without it"


def test_a_cordoned_node_takes_part_where_there_are_too_few_without_it() -> None:
    job = a_node_is_cordoned()
    core = job.core
    job.handle(Lost("b", "silent"), 100.1)
    job.handle(m.Ready(node("a")), 100.2)
    job.handle(Confirmed(core.forming.losses), 100.2)
    assert core.phase is Phase.RUNNING and [*core.roster.participants] == ["a", "c"]


def test_of_nodes_that_are_gone_nothing_is_kept() -> None:
    job = a_node_is_cordoned()
    core = job.core
    job.handle(r.Ask("c", "2", r.Verb.DRAIN, "", 60.0, "spot"), 100.0)
    job.handle(m.Left("c", "drained"), 100.1)
    assert not core.drain._let_go and not core.drain.leaving
    for number in range(100):  # its host comes again and again, each time as another node
        job.handle(m.Ready(node("c").replace(node_id=f"c{number}")), 101.0)
        assert [*core.forming.bench._nodes] == [f"c{number}"]
        job.handle(m.Left(f"c{number}", "gave up"), 101.0)


def test_where_a_node_leaves_and_the_job_is_stopped_at_the_same_save_each_is_told_what_is_true() -> None:
    job, _ = coordinator(node("a"), node("b"), max_nodes=2)
    core = job.core
    job.handle(r.Ask("b", "1", r.Verb.DRAIN, "", 60.0, "spot"), 100.0)
    job.handle(r.Ask("a", "2", r.Verb.STOP, "", 120.0, "maintenance", at_save=True), 100.0)
    for name in "ab":
        job.handle(r.Frozen(name, core.drain.notice_id, 7, 1, 0), 100.0)
    job.handle(r.Saved("a", core.drain.notice_id), 100.0)
    told: list[Any] = [(each.node_id, each.message) for each in job.handle(r.Saved("b", core.drain.notice_id), 100.0)]
    assert [(name, message.cause) for name, message in told if isinstance(message, r.Notice)] == [
        ("b", decided.drain("host-b", 60.0, "spot"))
    ]
    stopped = decided.stopped("host-a", "maintenance")
    stopped = stopped.replace(cause=stopped.cause.replace(saved=SaveOutcome.ALL))
    assert {message for _, message in told if isinstance(message, m.Ended)} == {m.Ended(m.Outcome.SAVED, stopped)}


# What is said once more.


def test_a_status_that_still_has_a_request_asks_for_it_once() -> None:
    job, _ = coordinator(node("a"), node("b"), node("c"), max_nodes=3)
    asked = job.nodes.asked("a", r.Ask("a", "1", r.Verb.CORDON, "c", 0.0, ""))
    answers = [each.message for each in job.core.handle(asked, 100.0) if isinstance(each.message, r.Answer)]
    assert [each.is_applied for each in answers] == [True]
    again = job.nodes.says("a", saved=r.Saved("a", 7))
    assert again.status.asks == asked.status.asks, "its answer is on its way"
    assert not [each for each in job.core.handle(again, 100.1) if isinstance(each.message, r.Answer)]
    assert len(job.core.forming.bench.ledger.excluded) == 1


def test_a_status_that_still_has_a_question_asks_it_once() -> None:
    job, _ = coordinator(node("a"), node("b"), max_nodes=2)
    looks = job.handle(m.Hangs("a", 1, "no output", 60.0, False), 100.0)
    assert [type(each.message) for each in looks] == [m.Look, m.Look]
    job.handle(m.Saw("b", 1, ()), 100.0)
    told = job.handle(m.Saw("a", 1, ()), 100.0)
    assert [type(each.message) for each in told] == [m.Compared, m.Compared]
    assert job.core.handle(job.nodes.says("a"), 100.1) == [], "that was answered"
    looks = job.handle(m.Hangs("a", 1, "no output", 60.0, False), 200.0)
    assert [type(each.message) for each in looks] == [m.Look, m.Look], "it asks once more"


def test_a_node_that_says_twice_that_it_is_ready_before_it_reads_of_its_round_does_not_end_it() -> None:
    job, _ = coordinator(node("a"), node("b"), max_nodes=2)
    before = job.nodes.earlier["a"]  # it was assigned since
    twice = Reported(before.node, before.replace(ready_count=before.ready_count + 1))
    assert job.core.handle(twice, 100.1) == [] and job.core.phase is Phase.RUNNING


def test_a_failure_of_the_round_before_that_a_node_still_tells_of_does_not_count_in_this_one() -> None:
    job, _ = coordinator(node("a"), node("b"), node("c"), max_nodes=3)
    job.handle(m.Failed("a", 1, failure("a")), 100.0)
    job.handle(DeadlinePassed(), 101.0)
    for name in "abc":
        job.handle(m.Ready(node(name)), 102.0)
    assert job.core.round == 2 and job.nodes.earlier["a"].past.failure is not None
    assert job.core.handle(job.nodes.repeats("a"), 103.0) == []
    told = job.handle(Lost("b", "silent"), 104.0) + job.handle(DeadlinePassed(), 106.0)
    (count,) = {each.message.restart_count for each in told if isinstance(each.message, m.Interrupted)}
    assert count == 1, "the loss is free, and the failure was paid for"
