"""A single node's coordinator, compared with the general one in a job of one node: they send the same messages."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.reports import Job

from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.diagnose.failures.places import Place
from aelastic.rdzv.leader import coordinator_events as c
from aelastic.rdzv.leader.coordinator import Coordinator
from aelastic.rdzv.leader.roster import RoundRules
from aelastic.rdzv.ledger import Reached
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.restart_rules import parse
from aelastic.rdzv.single_node import SingleNode

ME = "me"
NODE = m.Node(ME, "host", "default", 2, "localhost", 29500, starts=m.Starts.PREPARING)
PLACES = (Place(0, "", 7, at="train.py:1", collective="all_reduce"), Place(1, "", 8, at="data.py:2", call="read"))


POLICIES = (
    RestartPolicy(0),
    RestartPolicy(1),
    RestartPolicy(2),
    RestartPolicy(1, parse("exit 1: restart 2/1m after 200ms..2s; same-error any: stop; no-progress 2: ignore")),
)
PROGRESS = (Reached(), Reached(7), Reached(8), Reached(-2), Reached(-1, 3, 90.0))


def failure(rank: int, *, is_final: bool, exitcode: int = 1, line: int = 0) -> ProcessFailure:
    text = (
        f'Traceback (most recent call last):\n  File "train.py", line {line}, in <module>\nKeyError: 1' if line else ""
    )
    found = ProcessFailure(rank, 1, exitcode, "", rank=rank, host="host", is_final=is_final)
    return found.replace(message="KeyError: 1", traceback=text) if line else found


@cache  # its contents are validated when it is first drawn from
def messages(last_round: int, last_notice: int) -> st.SearchStrategy[m.NodeMessage]:
    round_ = st.sampled_from([last_round, max(last_round - 1, 0)])
    notice_id = st.sampled_from([last_notice, max(last_notice - 1, 0)])
    failures = st.builds(
        failure, st.integers(0, 1), is_final=st.just(False) | st.booleans(), exitcode=st.sampled_from([1, 2]),
        line=st.sampled_from([0, 4, 4, 5]),
    )  # fmt: skip
    return st.one_of(
        st.builds(m.Failed, st.just(ME), round_, failures, st.just(0.0), st.sampled_from(PROGRESS)),
        st.builds(m.Succeeded, st.just(ME), round_),
        st.builds(m.Hangs, st.just(ME), round_, st.just("hang"), st.just(6.0), st.booleans(), st.booleans()),
        st.builds(m.Saw, st.just(ME), round_, st.lists(st.sampled_from(PLACES), unique=True).map(tuple)),
        st.builds(m.Prepared, st.just(ME), st.sampled_from(m.Starts)),
        st.builds(m.OptedIn, st.just(ME), round_),
        st.just(m.Ready(NODE)),  # its workers were started again
        st.builds(
            r.Ask, st.just(ME), st.sampled_from(["a", "b", "c"]), st.sampled_from(r.Verb), st.sampled_from(["", "else"]),
            st.sampled_from([0.0, 60.0]), st.just("spot"), round_, st.booleans(), st.booleans(),
        ),
        st.builds(r.Frozen, st.just(ME), notice_id, st.integers(0, 9), st.integers(0, 2), st.integers(0, 9)),
        st.builds(r.Saved, st.just(ME), notice_id),
        st.builds(r.Fetch, st.just(ME), st.just("f"), st.sampled_from(r.What)),
        st.builds(r.Fetched, st.just(ME), st.just(ME), st.just("f"), st.just(""), st.just("text")),
    )  # fmt: skip


def without_number(message: m.LeaderMessage) -> m.LeaderMessage:
    """Removes numbers: a remote node tells questions apart by them; here, only one question is open at a time."""
    return message.replace(number=0) if isinstance(message, m.Look | m.Compared) else message


@given(st.data(), st.sampled_from(POLICIES))
def test_one_node_receives_what_it_would_receive_from_the_coordinator_of_many(
    data: st.DataObject, policy: RestartPolicy
) -> None:
    many, one = Coordinator(RoundRules(1, 1), policy), SingleNode(policy, term=9)
    job = Job(many)
    many.roster.term = 9
    is_ready, now = True, 0.0
    for _ in range(data.draw(st.integers(1, 20), "messages")):
        now += 0.5
        if many.is_due(now):
            due = [send.message for send in job.handle(c.DeadlinePassed(), now)]
            assert one.on_deadline_passed(now) == due
        message = (
            m.Ready(NODE, data.draw(st.sampled_from(PROGRESS)) if many.round else None)
            if is_ready
            else data.draw(messages(many.round, many.drain.notice_id), "message")
        )
        if isinstance(message, r.Frozen) and not many.drain.is_on:
            continue  # it needs a node held by an earlier coordinator, and there is none here
        if many.is_closed and isinstance(message, m.Ready):
            job.nodes.goes(ME)  # it comes back on another connection, as it has read the verdict on this one
        if isinstance(message, r.Ask):
            job.handle(job.nodes.updated(ME), now)  # it has read all answers so far, so an id may be reused
        expected = [without_number(send.message) for send in job.handle(message, now)]
        if leaves := [
            i for i, each in enumerate(expected) if isinstance(each, r.Notice) and each.stage is r.Stage.LEAVE
        ]:
            assert one.handle(message, now) in (expected, expected[: leaves[0] + 1]), message
            return  # it has left, and gets no later messages
        assert one.handle(message, now) == expected, message
        is_ready = any(isinstance(each, m.Interrupted) for each in expected) or (
            many.is_closed and data.draw(st.booleans(), "it comes back")
        )


@pytest.mark.parametrize("max_restarts, outcome", [(0, m.Outcome.FAILED), (1, m.Outcome.STOPPED)])
def test_a_failure_that_ends_the_job_is_reported_though_it_was_to_stop_once_all_have_saved(
    max_restarts: int, outcome: m.Outcome
) -> None:
    policy = RestartPolicy(max_restarts)
    many, one = Job(Coordinator(RoundRules(1, 1), policy)), SingleNode(policy)
    for job, core in ((many, many.core), (one, one)):
        job.handle(m.Ready(NODE), 0.0)
        job.handle(r.Ask(ME, "a", r.Verb.STOP, "", 60.0, "enough", 1, True), 1.0)
        job.handle(m.Failed(ME, 1, failure(0, is_final=False)), 2.0)
        assert core.verdict is not None and core.verdict.outcome is outcome, core
