"""The coordinator: stories as text (`stories/`), and the cases they don't show."""

from __future__ import annotations

from typing import Any

import pytest
from kit import decided
from kit.reports import Job
from kit.stories.coordinator import failure, node

from aelastic.rdzv.decisions.cause import CauseKind, SaveOutcome
from aelastic.rdzv.leader.coordinator import Coordinator
from aelastic.rdzv.leader.coordinator_events import CutOff, DeadlinePassed, Lost, Phase, Reported
from aelastic.rdzv.leader.job_state import payload_of, state_in, voters_in
from aelastic.rdzv.leader.roster import RoundRules
from aelastic.rdzv.log.entries import first_entry
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.settings import JOIN_TIMEOUT_S


def coordinator(*nodes: m.Node, max_nodes: int, max_restarts: int = 3) -> tuple[Job, list[Any]]:
    """A coordinator, and the messages it sends once the last of these nodes is ready."""
    job = Job(Coordinator(RoundRules(1, max_nodes), RestartPolicy(max_restarts)))
    sends: list[Any] = []
    assert job.core.deadline is None, "nothing is due before the first node joins"
    for each in nodes:
        sends = job.handle(m.Ready(each), 100.0)
    return job, sends


def test_every_node_receives_its_own_ranks_and_the_same_round_and_master() -> None:
    nodes = [
        node("c").replace(role="reader", local_world_size=1),
        node("b").replace(role="trainer", local_world_size=4),
        node("a").replace(local_world_size=3, master_port=4242),
    ]
    _, sends = coordinator(*nodes, max_nodes=3)
    received: dict[str, Any] = {send.node_id: send.message for send in sends}
    assert {(each.round, each.restart_count, each.ranks.world_size) for each in received.values()} == {(1, 0, 8)}
    assert {(each.master_addr, each.master_port) for each in received.values()} == {("addr-a", 4242)}
    assert [received[name].ranks.group_rank for name in "abc"] == [0, 1, 2]
    assert [received[name].ranks.first_rank for name in "abc"] == [0, 3, 7]
    assert [received[name].ranks.first_role_rank for name in "abc"] == [0, 0, 0]


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


def test_its_last_events_are_reported_and_no_more_than_those() -> None:
    job, _ = coordinator(node("a"), node("b"), max_nodes=2)
    core = job.core
    job.handle(m.Failed("a", 1, failure("a")), 100.0)
    assert "NodePhase.FAILED" in core.trace[-1] and "running" in core.trace[-1] and "forming" in core.trace[-1]
    for _ in range(500):
        job.handle(DeadlinePassed(), 100.0)
    assert len(core.trace) == 64


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
    sends = job.handle(r.Ask("c", "2", r.Verb.DRAIN, "", 60.0, "spot"), 100.0)
    assert [each.message.stage for each in sends if isinstance(each.message, r.Notice)] == [r.Stage.LEAVE]
    job.handle(Lost("b", "silent"), 100.1)
    job.handle(m.Ready(node("a")), 100.2)
    assert core.phase is Phase.FORMING and [*core.roster.ready] == ["a"], "too few nodes without it"


def test_a_cordoned_node_takes_part_where_there_are_too_few_without_it() -> None:
    job = a_node_is_cordoned()
    core = job.core
    job.handle(Lost("b", "silent"), 100.1)
    job.handle(m.Ready(node("a")), 100.2)
    assert core.phase is Phase.RUNNING and [*core.roster.participants] == ["a", "c"]


def test_a_node_that_was_called_back_and_does_not_stop_its_workers_takes_part_in_no_round() -> None:
    job = a_node_is_cordoned()
    core = job.core
    job.handle(Lost("b", "silent"), 100.1)
    job.handle(m.Ready(node("a")), 100.2)
    job.handle(m.Failed("a", 3, failure("a")), 200.0)
    job.handle(m.Ready(node("a")), 200.0)
    assert core.deadline is not None
    job.handle(DeadlinePassed(), core.deadline)
    assert core.round == 3 and [*core.roster.ready] == ["a"], "too few nodes without it"


def test_of_nodes_that_are_gone_nothing_is_kept() -> None:
    job = a_node_is_cordoned()
    core = job.core
    job.handle(r.Ask("c", "2", r.Verb.DRAIN, "", 60.0, "spot"), 100.0)
    job.handle(m.Left("c", "drained"), 100.1)
    assert not core.drain._let_go and not core.drain.leaving
    for number in range(100):  # its host keeps coming back, each time as another node
        job.handle(m.Ready(node("c").replace(node_id=f"c{number}")), 101.0)
        assert [*core.forming.cordons._nodes] == [f"c{number}"]
        job.handle(m.Left(f"c{number}", "gave up"), 101.0)


def test_a_drain_ends_with_the_job() -> None:
    job, _ = coordinator(node("a"), node("b"), max_nodes=2)
    job.handle(r.Ask("b", "1", r.Verb.DRAIN, "", 60.0, "spot"), 100.0)
    for name in "ab":
        job.handle(m.Succeeded(name, 1), 100.0)
    for name in "ab":
        assert job.handle(r.Frozen(name, job.core.drain.notice_id, 7, 1, 0), 100.0) == [], "there is nothing to save"


def test_where_a_node_leaves_and_the_job_is_stopped_at_the_same_save_each_gets_its_own_reason() -> None:
    job, _ = coordinator(node("a"), node("b"), max_nodes=2)
    core = job.core
    job.handle(r.Ask("b", "1", r.Verb.DRAIN, "", 60.0, "spot"), 100.0)
    job.handle(r.Ask("a", "2", r.Verb.STOP, "", 120.0, "maintenance", at_save=True), 100.0)
    for name in "ab":
        job.handle(r.Frozen(name, core.drain.notice_id, 7, 1, 0), 100.0)
    job.handle(r.Saved("a", core.drain.notice_id), 100.0)
    sent: list[Any] = [(each.node_id, each.message) for each in job.handle(r.Saved("b", core.drain.notice_id), 100.0)]
    assert [(name, message.cause) for name, message in sent if isinstance(message, r.Notice)] == [
        ("b", decided.drain("host-b", 60.0, "spot"))
    ]
    stopped = decided.stopped("host-a", "maintenance")
    stopped = stopped.replace(cause=stopped.cause.replace(saved=SaveOutcome.ALL))
    assert {message for _, message in sent if isinstance(message, m.Ended)} == {m.Ended(m.Outcome.SAVED, stopped)}


# Repeated messages.


def test_a_status_that_still_has_a_request_asks_for_it_once() -> None:
    job, _ = coordinator(node("a"), node("b"), node("c"), max_nodes=3)
    asked = job.nodes.asked("a", r.Ask("a", "1", r.Verb.CORDON, "c", 0.0, ""))
    answers = [each.message for each in job.core.handle(asked, 100.0) if isinstance(each.message, r.Answer)]
    assert [each.is_applied for each in answers] == [True]
    again = job.nodes.updated("a", saved=r.Saved("a", 7))
    assert again.status.asks == asked.status.asks, "its answer is on the way"
    assert not [each for each in job.core.handle(again, 100.1) if isinstance(each.message, r.Answer)]
    assert len(job.core.forming.cordons.ledger.excluded) == 1


def test_a_status_that_still_has_a_question_asks_it_once() -> None:
    job, _ = coordinator(node("a"), node("b"), max_nodes=2)
    looks = job.handle(m.Hangs("a", 1, "no output", 60.0, False), 100.0)
    assert [type(each.message) for each in looks] == [m.Look, m.Look]
    job.handle(m.Saw("b", 1, ()), 100.0)
    sends = job.handle(m.Saw("a", 1, ()), 100.0)
    assert [type(each.message) for each in sends] == [m.Compared, m.Compared]
    assert job.core.handle(job.nodes.updated("a"), 100.1) == [], "already answered"
    looks = job.handle(m.Hangs("a", 1, "no output", 60.0, False), 200.0)
    assert [type(each.message) for each in looks] == [m.Look, m.Look], "it asks again"


def test_a_node_that_says_twice_that_it_is_ready_before_it_reads_of_its_round_does_not_end_it() -> None:
    job, _ = coordinator(node("a"), node("b"), max_nodes=2)
    before = job.nodes.earlier["a"]  # assigned since then
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
    sends = job.handle(Lost("b", "silent"), 104.0) + job.handle(DeadlinePassed(), 106.0)
    (count,) = {each.message.restart_count for each in sends if isinstance(each.message, m.Interrupted)}
    assert count == 1, "the loss is free, and the failure was already charged"


# State that the log keeps.


def test_the_log_says_of_which_node_the_leader_was() -> None:
    for own, rank in (("a", 0), ("b", 1), ("elsewhere", -1)):
        job = Job(Coordinator(RoundRules(1, 2), RestartPolicy(3), own))
        for name in "ab":
            job.handle(m.Ready(node(name)), 100.0)
        kept = job.core.state(100.0).last_round
        assert kept is not None and (kept.node_ids, kept.leader_rank) == (["a", "b"], rank)


def test_a_round_in_the_log_gives_each_node_what_it_received_when_it_began() -> None:
    job = Job(Coordinator(RoundRules(1, 2), RestartPolicy(3)))
    job.core.roster.begin_term(7)
    job.handle(m.Ready(node("b").replace(role="reader", local_world_size=4, vote_port=9, log_name="b~1")), 100.0)
    sends = job.handle(m.Ready(node("a").replace(master_port=4242)), 100.0)
    kept = job.core.state(100.0).last_round
    assert kept is not None and kept.assigned(0) == {send.node_id: send.message for send in sends}
    assert [(each.name, each.vote_port) for each in kept.participants] == [("a", 0), ("b~1", 9)]


def ask(name: str, verb: r.Verb, target: str = "", **others: Any) -> r.Ask:
    return r.Ask(name, f"{verb}", verb, target, 60.0, "spot", **others)


def applied(sends: list[Any]) -> list[bool]:
    return [each.message.is_applied for each in sends if isinstance(each.message, r.Answer)]


# Requests that outlive a leader, and their effects, also under the next leader.
LASTING = [ask("b", r.Verb.DRAIN), ask("a", r.Verb.STOP, at_save=True), ask("a", r.Verb.RESTART, at_save=True)]


@pytest.mark.parametrize("asked", LASTING, ids=lambda each: each.verb)
def test_a_request_that_is_accepted_is_kept_in_the_log_with_the_time_that_is_left(asked: r.Ask) -> None:
    job, _ = coordinator(node("a"), node("b"), node("c"), max_nodes=3)
    version = job.core.version
    assert applied(job.handle(asked, 100.0)) == [True]
    assert job.core.version > version
    assert job.core.state(145.0).asks == (asked.replace(deadline_s=15.0),)
    assert job.core.state(999.0).asks == (asked.replace(deadline_s=0.0),)
    version = job.core.version
    job.core.handle(job.nodes.updated(asked.node_id, saved=r.Saved(asked.node_id, 7)), 110.0)
    assert job.core.version == version, "stored once"


def continued(job: Job, now: float, gone: str = "") -> Job:
    """The job under a new leader, once all nodes of the round have reported to it."""
    other = Job(Coordinator(job.core.rules, job.core.policy), job.nodes)
    other.core.roster.begin_term(9)
    kept = job.core.state(now)
    other.core.resume(kept, gone, now)
    assert kept.last_round is not None
    other.nodes.known.clear()
    for name in kept.last_round.node_ids:
        if name not in gone:
            other.handle(other.nodes.connects(job.nodes.of[name].node, job.nodes.of[name].past), now)
    return other


def test_a_request_that_was_accepted_is_not_refused_by_the_next_leader_since_its_node_is_not_back_yet() -> None:
    job, _ = coordinator(node("a"), node("b"), node("c"), max_nodes=3)
    asked = ask("a", r.Verb.DRAIN, target="c")
    assert applied(job.handle(asked, 100.0)) == [True]
    other = Job(Coordinator(job.core.rules, job.core.policy), job.nodes)
    other.core.roster.begin_term(9)
    other.core.resume(job.core.state(100.0), "", 100.0)
    other.nodes.known.clear()
    for name in "abc":
        other.handle(other.nodes.connects(job.nodes.of[name].node, job.nodes.of[name].past), 100.1)
        if name == "a":
            assert applied(other.handle(asked, 100.1)) == [], "it repeats the request, and has no other answer yet"
    assert other.core.drain.is_on and other.core.drain.leaving.keys() == {"c"}


def test_a_coordinator_that_is_cut_off_begins_no_round() -> None:
    """The round could not be committed.  Nodes are ready for the next one because they lost their leader."""
    job, _ = coordinator(node("a"), node("b"), node("c"), max_nodes=3)
    other = Job(Coordinator(job.core.rules, job.core.policy), job.nodes)
    other.core.roster.begin_term(9)
    other.core.resume(job.core.state(100.0), "", 100.0)
    other.nodes.known.clear()
    for name in "ab":
        ready = job.nodes.of[name].past.replace(phase=m.NodePhase.READY)
        other.handle(other.nodes.connects(job.nodes.of[name].node, ready), 100.1)
    sent = other.core.handle(CutOff(), 100.2)
    assert [each for each in sent if isinstance(each.message, m.Assigned | m.Ended)] == []
    assert other.core.round == 1


def ends(job: Job) -> list[float]:
    """The latest time by which the round ends, for each pending request."""
    drain = job.core.drain
    return [aim.end_at for aim in (*drain.leaving.values(), drain.aim) if aim is not None]


@pytest.mark.parametrize("asked", LASTING, ids=lambda each: each.verb)
def test_a_new_leader_carries_on_with_what_was_asked_of_the_one_before(asked: r.Ask) -> None:
    job, _ = coordinator(node("a"), node("b"), node("c"), max_nodes=3)
    job.handle(asked, 100.0)
    other = continued(job, 130.0)
    assert other.core.phase is Phase.RUNNING and other.core.drain.is_on
    assert ends(other) == ends(job) and len(ends(job)) == 1
    assert other.core.drain.leaving.keys() == ({"b"} if asked.verb is r.Verb.DRAIN else set())
    assert other.core.state(130.0).asks == (asked.replace(deadline_s=30.0),), "and so does the one after it"


def test_a_restart_that_was_requested_and_not_begun_ends_the_round_under_the_next_leader() -> None:
    job, _ = coordinator(node("a"), node("b"), max_nodes=2)
    running = dict(job.nodes.of)
    job.handle(ask("a", r.Verb.RESTART), 100.0)
    job.nodes.of = running  # no node has been notified
    other = continued(job, 101.0)
    (cause,) = {each.past.phase for each in other.nodes.of.values()}
    assert other.core.phase is Phase.FORMING and cause is m.NodePhase.STOPPING


def test_a_lost_node_is_the_cause_also_if_its_round_is_restarted_on_request_by_the_next_leader() -> None:
    """Workers fail because the node is gone, so their failures are not charged."""
    job, _ = coordinator(node("a"), node("b"), max_nodes=2)
    past = job.nodes.of["b"].past
    job.handle(ask("b", r.Verb.RESTART), 100.0)
    other = Job(Coordinator(job.core.rules, job.core.policy))
    other.core.roster.begin_term(9)
    other.core.resume(job.core.state(100.0), "a", 101.0)
    failed = past.replace(phase=m.NodePhase.FAILED, failure=failure("b"), failure_age_s=0.1, alone_s=0.2)
    sends = other.handle(other.nodes.connects(node("b"), failed), 101.0)
    (interrupted,) = [each.message for each in sends if isinstance(each.message, m.Interrupted)]
    assert not interrupted.decision.is_charged
    assert interrupted.decision.cause.kind is CauseKind.NODES_MISSING


def test_a_restart_that_the_next_leader_carries_out_begins_one_round_though_a_node_is_missing() -> None:
    """The remaining node is ready, so the next round begins as soon as the current one ends."""
    job, _ = coordinator(node("a"), node("b"), max_nodes=2)
    past = job.nodes.of["b"].past.replace(phase=m.NodePhase.READY)
    job.handle(ask("b", r.Verb.RESTART), 100.0)
    other = Job(Coordinator(job.core.rules, job.core.policy))
    other.core.roster.begin_term(9)
    other.core.resume(job.core.state(100.0), "a", 101.0)
    other.handle(other.nodes.connects(node("b"), past), 101.0)
    assert (other.core.phase, other.core.round) == (Phase.RUNNING, 2)


def test_a_new_leader_that_learns_late_who_is_there_lets_newcomers_settle_from_then_on() -> None:
    """The bug: what is due at the time of the request is overdue, and its next round was looked at in the past."""
    job, _ = coordinator(node("a"), node("b"), node("d"), max_nodes=3)
    past = job.nodes.of["b"].past.replace(phase=m.NodePhase.READY)
    job.handle(ask("b", r.Verb.RESTART), 100.0)
    other = Job(Coordinator(job.core.rules, job.core.policy))
    other.core.roster.begin_term(9)
    other.core.resume(job.core.state(100.0), "a", 101.0)
    other.handle(m.Ready(node("c").replace(starts=m.Starts.PREPARING)), 101.0)
    other.handle(other.nodes.connects(node("b"), past), 101.0)
    other.handle(DeadlinePassed(), 105.0)
    assert (other.core.phase, other.core.round) == (Phase.RUNNING, 2)
    assert other.core.deadline is not None and other.core.deadline > 105.0


def test_what_was_asked_is_done_with_the_round_and_a_drain_once_its_node_has_left() -> None:
    job, _ = coordinator(node("a"), node("b"), node("c"), max_nodes=3)
    job.handle(ask("a", r.Verb.RESTART), 100.0)
    job.handle(ask("b", r.Verb.DRAIN), 100.0)
    job.handle(m.Left("b", "drained"), 101.0)
    for name in "ac":
        job.handle(m.Ready(node(name)), 102.0)
    assert job.core.round == 2 and job.core.state(102.0).asks == ()


def test_a_drain_that_is_called_off_is_kept_no_longer() -> None:
    job, _ = coordinator(node("a"), node("b"), node("c"), max_nodes=3)
    job.handle(ask("b", r.Verb.DRAIN), 100.0)
    version = job.core.version
    assert applied(job.handle(ask("b", r.Verb.CANCEL), 101.0)) == [True]
    assert job.core.version > version and job.core.state(101.0).asks == ()


def test_a_request_that_is_refused_is_not_kept() -> None:
    job, _ = coordinator(node("a"), node("b"), max_nodes=2)
    version = job.core.version
    assert applied(job.handle(ask("a", r.Verb.DRAIN, "no-such-host"), 100.0)) == [False]
    assert job.core.version == version and job.core.state(100.0).asks == ()


def test_a_cordon_is_kept_in_the_log_and_a_new_leader_keeps_it() -> None:
    job, _ = coordinator(node("a"), node("b"), node("c"), max_nodes=3)
    version = job.core.version
    assert applied(job.handle(r.Ask("a", "1", r.Verb.CORDON, "c", 0.0, "fans"), 100.0)) == [True]
    assert job.core.version > version
    other = continued(job, 130.0)
    assert [(each.host, each.at) for each in other.core.forming.cordons.ledger.excluded] == [("host-c", 100.0)]


def test_a_node_that_has_finished_and_left_is_missed_by_no_leader_after_that() -> None:
    job, _ = coordinator(node("a"), node("b"), node("c"), max_nodes=3)
    job.handle(m.Succeeded("a", 1), 100.0)
    version = job.core.version
    job.handle(m.Left("a", "done"), 100.0)
    assert job.core.version > version and job.core.state(100.0).departed == (0,)
    other = Job(Coordinator(job.core.rules, job.core.policy), job.nodes)
    other.core.resume(job.core.state(100.0), [], 100.0)
    for name in "bc":
        other.connect(node(name), m.Past(m.NodePhase.BUSY, 1), 100.0)
    assert other.core.phase is Phase.RUNNING


def test_a_new_leader_of_a_job_that_is_over_tells_the_verdict() -> None:
    job, _ = coordinator(node("a"), node("b"), max_nodes=2)
    for name in "ab":
        job.handle(m.Succeeded(name, 1), 100.0)
    other = Job(Coordinator(job.core.rules, job.core.policy))
    other.core.resume(job.core.state(100.0), ["a"], 100.0)
    assert other.core.is_closed and other.core.deadline is None
    sends = other.connect(node("b"), m.Past(m.NodePhase.FINISHED, 1), 100.0)
    assert [(each.node_id, each.message) for each in sends] == [("b", job.core.verdict)]


def test_a_new_leader_of_a_job_without_a_round_forms_the_first() -> None:
    job, _ = coordinator(node("a"), max_nodes=2)
    other = Job(Coordinator(job.core.rules, job.core.policy))
    other.core.resume(job.core.state(100.0), [], 100.0)
    assert other.core.phase is Phase.FORMING
    for name in "ab":
        other.connect(node(name), m.Past(m.NodePhase.READY), 100.0)
    assert other.core.round == 1


def test_the_leader_of_a_new_log_takes_the_count_of_restarts_from_nodes_of_the_lost_one() -> None:
    job = Job(Coordinator(RoundRules(2, 2), RestartPolicy(3)))
    sends: list[Any] = []
    for name, round_, count in (("a", 49, 3), ("b", 48, 2)):
        sends = job.connect(node(name), m.Past(m.NodePhase.READY, round_, 5, restart_count=count), 100.0)
    assert {(each.message.round, each.message.restart_count) for each in sends} == {(50, 3)}


@pytest.mark.parametrize("is_newer", [False, True])
def test_a_count_of_restarts_is_taken_from_a_node_only_if_the_log_lacks_its_round(*, is_newer: bool) -> None:
    job, _ = coordinator(node("a"), max_nodes=1)
    past = m.Past(m.NodePhase.READY, job.core.round + is_newer, job.core.roster.term, restart_count=3)
    job.connect(node("b"), past, 100.0)
    assert job.core.state(100.0).restart_count == (3 if is_newer else 0)


def test_what_the_log_keeps_of_a_job_can_be_read_again() -> None:
    job, _ = coordinator(node("a"), node("b"), node("c"), max_nodes=3)
    job.handle(ask("b", r.Verb.DRAIN), 100.0)
    job.handle(r.Ask("a", "1", r.Verb.CORDON, "c", 0.0, "fans"), 100.0)
    state = job.core.state(110.0)
    assert state.asks and state.ledger.excluded and state.last_round is not None
    entry = first_entry(7, (), ("a", "b"), ("w",), payload_of(state))
    assert state_in(entry) == state
    assert [each.node_id for each in voters_in(entry)] == [], "none of these agents is asked for a vote"
    asked = state.last_round.participants[1].replace(vote_port=9)
    state = state.replace(last_round=state.last_round.replace(participants=(asked, *state.last_round.participants[:1])))
    assert voters_in(first_entry(7, (), ("b",), ("w",), payload_of(state))) == (asked,)
    assert voters_in(first_entry(7, (), ("a",), ("w",), payload_of(state))) == (), "it cannot be asked"
    assert voters_in(first_entry(7, (), ("b",), ("w",))) == (), "nothing is known about it"
