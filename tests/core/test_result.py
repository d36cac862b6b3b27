"""How a run ended: every node reports the failure that ended the job first."""

from __future__ import annotations

import pytest
from kit import decided

from aelastic.agent.group import events as ev
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.agent.outcome import result_of
from aelastic.errors import ChildFailedError, InputError, InternalError, ProcessFailure, exit_code_of
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.result import RunResult
from aelastic.spec import WorkerSpec

CAUSE = ProcessFailure.from_elsewhere("host-a", 0, 0, 11, 3, "ValueError: batch is empty", "", 2000)
# On this node, whose clock is behind the other's.
VICTIM = ProcessFailure.from_elsewhere("host-b", 1, 0, 12, 4, "Connection reset by peer", "", 1000)


def ended(cause: ProcessFailure | None, *failures: ProcessFailure) -> RunResult:
    """The result of a node with ranks 1 and 2, some of which failed before the verdict arrived."""
    group = WorkerGroup(WorkerSpec(entrypoint="train.py", local_world_size=2, max_restarts=0))
    ranks = NodeRanks(1, 2, 1, 3, 1, 3, 2)
    group.handle(ev.Start(), 0.0)
    group.handle(m.Assigned(1, 0, ranks, "host-a", 1, "agent"), 0.0)
    group.handle(ev.Spawned(1, {0: 12, 1: 13}), 0.0)
    for local_rank, failure in enumerate(failures):
        group.handle(ev.Exited(1, local_rank, failure), 0.0)
    group.handle(m.Ended(m.Outcome.FAILED, decided.refused(0, decided.failed(0, "host-a")), cause), 0.0)
    for local_rank in range(2):
        group.handle(ev.Exited(1, local_rank, None), 0.0)
        group.handle(ev.Cleared(1, local_rank), 0.0)
    return result_of(group, {}, {}, str)


def test_the_cause_of_another_node_comes_before_what_followed_from_it_here() -> None:
    result = ended(CAUSE, VICTIM)
    failed = ChildFailedError("train.py", result.failures, result.victims, result.stacks, result.cause)
    assert list(result.failures.items()) == [(0, CAUSE), (1, VICTIM)] and result.cause == 0 and result.victims == (2,)
    assert failed.get_first_failure() == (0, CAUSE), "not the smallest timestamp, as clocks differ"
    assert exit_code_of(failed) == 3
    report = str(failed)
    assert report.index("rank      : 1 ") < report.index("Root Cause") < report.index("rank      : 0 ")


def test_a_node_without_failures_tells_the_cause_alone() -> None:
    result = ended(CAUSE)
    assert (dict(result.failures), result.cause, result.victims) == ({0: CAUSE}, 0, (1, 2))


def test_a_job_that_was_stopped_is_so_also_once_all_have_saved() -> None:
    for outcome in (m.Outcome.STOPPED, m.Outcome.SAVED):
        group = WorkerGroup(WorkerSpec(entrypoint="train.py"))
        group.handle(ev.Start(), 0.0)
        group.handle(m.Ended(outcome, decided.stopped("host-a")), 0.0)
        result = result_of(group, {}, {}, str)
        assert (result.is_stopped, result.is_drained) == (True, outcome is m.Outcome.SAVED)


def test_of_its_own_worker_a_node_tells_more_than_the_verdict_does() -> None:
    ours = VICTIM.replace(traceback="x" * 100_000, error_file="/logs/error.json")
    result = ended(ours.for_others(), ours)
    assert dict(result.failures) == {1: ours} and result.cause == 1


def test_without_a_cause_the_first_by_time_is_taken_as_torch_does() -> None:
    first = VICTIM.replace(rank=2, local_rank=1, timestamp=999)
    result = ended(None, VICTIM, first)
    failed = ChildFailedError("train.py", result.failures, cause=result.cause)
    assert result.cause is None and failed.get_first_failure() == (2, first)


def test_a_job_that_failed_without_any_failure_is_a_bug_with_its_story() -> None:
    with pytest.raises(InternalError, match="failed without a failure") as caught:
        ended(None)
    assert len(caught.value.trace) == 8


def test_a_cause_must_be_among_the_failures() -> None:
    with pytest.raises(InputError, match=r"cause is rank 3.*use one of \[0\]"):
        ChildFailedError("train.py", {0: CAUSE}, cause=3)
