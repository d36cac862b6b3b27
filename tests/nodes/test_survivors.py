"""One endpoint, on the coordinator's host, and that is gone: what is left of the round goes on, or stops."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from kit.agents import figure
from kit.effort import EFFORT
from kit.faults.chaos import LEASE_S, SLACK_S, Battlefield, battlefield
from kit.launching import Launcher

ALL, REST = (0, 1, 2), (1, 2)
# What a machine may add on which others work, too.
LOAD_S = 6.0
CUT_S = {"soak": 60.0}.get(EFFORT, 4 * LEASE_S)


def others_go_on(there: Battlefield, fault: str, within_s: float) -> None:
    """The coordinator is gone for a while, with an endpoint; the others go on, and take it in again."""
    gone = there.coordinator
    fence, began = there.fence, time.monotonic()
    undo = getattr(there, fault)(gone)
    took = there.wait_progress(there.others(gone), began, above=fence, limit_s=within_s + SLACK_S)
    figure(f"endpoint's and coordinator's host, {fault}: to the others at work", took)
    assert took < within_s + there.imports_s + LOAD_S, there.team.story
    time.sleep(max(began + 2 * LEASE_S - time.monotonic(), 0.0))
    undo()
    there.wait_progress(ALL, time.monotonic(), limit_s=2 * LEASE_S + SLACK_S)
    assert there.side_by_side_s() < LEASE_S + 1


@pytest.mark.parametrize("fault", [pytest.param("agent_killed", marks=pytest.mark.all), "cut_off"])
def test_two_of_three_nodes_go_on_without_the_host_of_endpoint_and_coordinator(
    launch: Launcher, tmp_path: Path, fault: str
) -> None:
    with battlefield(launch, "c10d", tmp_path) as there:
        there.make_coordinator(0)
        others_go_on(there, fault, 1.0 if fault == "agent_killed" else LEASE_S + 1.0)
        assert any(agent.has_said("elected coordinator by a majority") for agent in there.agents[1:])


@pytest.mark.all
def test_a_coordinator_that_is_cut_off_as_the_job_fails_ends_nothing_that_the_others_go_on_with(
    launch: Launcher, tmp_path: Path
) -> None:
    """The last restart is used up 0.3 s after the failure; by then the coordinator reaches no other node."""
    with battlefield(launch, "c10d", tmp_path, max_restarts=0) as there:
        there.make_coordinator(0)
        fence, began = there.fence, time.monotonic()
        undo = there.cut_off(0)
        there.worker_raises(0)
        there.agents[0].wait_said("the job's outcome is not known here|no contact with the endpoint", limit_s=SLACK_S)
        there.wait_progress(REST, began, above=fence, limit_s=LEASE_S + 1 + SLACK_S)
        time.sleep(max(began + CUT_S - time.monotonic(), 0.0))
        assert not any(agent.is_over for agent in there.agents), there.team.story
        undo()
        there.wait_progress(ALL, time.monotonic(), limit_s=2 * LEASE_S + SLACK_S)
        assert there.side_by_side_s() < LEASE_S + 1
