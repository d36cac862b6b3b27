"""Hosts of endpoints that go in the middle of a claim or of the verdict, and most of them that go.

The simulation has them go at each step (`tests/simulation/test_quorum.py`, `test_simulated_endpoints.py`): here are real stores.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from kit.agents import FAIL_CODE, HASTY, figure
from kit.effort import EFFORT
from kit.faults.chaos import LEASE_S, LONG_S, SLACK_S, Battlefield, battlefield
from kit.launching import Launcher, wait_for

pytestmark = [pytest.mark.all, pytest.mark.timeout(300)]
ALL = (0, 1, 2)
LIMIT_S = 2 * LEASE_S + SLACK_S
CUT_S = {"soak": 60.0}.get(EFFORT, 4 * LEASE_S)

# In an agent: an operation is held when so many of its writes to stores have begun, as long as a file names both.
# A claim locks stores and writes its vote to each; so does the verdict.  That is four writes at least: a store that
# answers late, or is just back, is left out.
HELD = f"""{HASTY}
import os
import pathlib

import anyio

from aelastic.rdzv.boards.quorum import QuorumBoard
from aelastic.rdzv.quorum.register_events import Write

carry_out, hold = QuorumBoard._carry_out, pathlib.Path(os.environ["HOLD"])
now = {{"what": "", "begun": 0}}


def noted(what):
    do = getattr(QuorumBoard, what)

    async def do_noted(self, *args):
        now.update(what=what, begun=0)
        try:
            return await do(self, *args)
        finally:
            now.update(what="")

    return do_noted


def held():
    try:
        return hold.read_text().split()
    except FileNotFoundError:  # there is none, or it has just gone
        return "", 0


async def carry_out_held(self, request):
    if isinstance(request, Write):
        what, begun = held()
        if what and what == now["what"]:
            now["begun"] += 1
            if now["begun"] > int(begun):
                pathlib.Path("held").touch()
                while hold.exists():
                    await anyio.sleep(0.01)
    return await carry_out(self, request)


QuorumBoard.campaign, QuorumBoard.publish = noted("campaign"), noted("publish")
QuorumBoard._carry_out = carry_out_held
"""


class Hold:
    """Holds agents in the middle of what they write."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "hold"

    def begin(self, what: str, begun: int) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(f"{what} {begun}")
        new.rename(self.path)

    def wait_held(self, there: Battlefield) -> int:
        """Until an agent is held; its node."""
        marks = {index: there.agents[index].folder / "held" for index in ALL}
        held: list[int] = wait_for("an agent is held", lambda: [i for i in ALL if marks[i].exists()])
        return held[0]

    def end(self, there: Battlefield) -> None:
        self.path.unlink()
        for agent in there.agents:
            (agent.folder / "held").unlink(missing_ok=True)


def test_a_host_may_go_in_the_middle_of_a_claim(launch: Launcher, tmp_path: Path) -> None:
    """The coordinator's agent was stopped for a lease, and is back when the one that claims its place goes."""
    hold = Hold(tmp_path)
    with battlefield(launch, "c10d on three", tmp_path, wrapper=HELD, HOLD=str(hold.path)) as there:
        for fault, begun in (("agent_killed", 1), ("host_frozen", 2), ("cut_off", 3)):
            fence = there.fence
            hold.begin("campaign", begun)
            wake = there.agent_stopped(there.coordinator)
            victim, since = hold.wait_held(there), time.monotonic()
            undo = getattr(there, fault)(victim)
            hold.end(there)
            wake()
            took = there.wait_progress(there.others(victim), since, above=fence, limit_s=LIMIT_S)
            figure(f"claim, {begun} writes, {fault}: to the others at work", took)
            undo()
            there.wait_progress(ALL, time.monotonic(), limit_s=LIMIT_S)
        assert there.restart == 0 and there.side_by_side_s() < LEASE_S + 1


def test_a_coordinator_may_go_in_the_middle_of_the_verdict(launch: Launcher, tmp_path: Path) -> None:
    """The others end with the same cause and code; or go on, for free, if what was lost counts for the first cause."""
    hold = Hold(tmp_path)
    hold.begin("publish", 2)
    with battlefield(launch, "c10d on three", tmp_path, max_restarts=0, wrapper=HELD, HOLD=str(hold.path)) as there:
        failing = there.others(there.coordinator)[0]
        rank, fence = there.agents[failing].starts[-1].rank, there.fence
        there.worker_raises(failing)
        coordinator, since = hold.wait_held(there), time.monotonic()
        there.agent_killed(coordinator)
        hold.end(there)
        ends = there.others(coordinator)

        def are_on() -> bool:
            steps = [there.last_step(index) for index in ends]
            return all(step is not None and step.fence > fence for step in steps)

        rest = [there.agents[index] for index in ends]
        wait_for("the others are over, or on", lambda: all(agent.is_over for agent in rest) or are_on(), LIMIT_S)
        if rest[0].is_over:
            assert [agent.wait() for agent in rest] == [FAIL_CODE] * len(rest), there.team.story
            assert all(re.search(rf"Root Cause[^=]*\n *rank +: {rank} ", agent.stderr) for agent in rest)
        else:
            assert there.restart == 0, there.team.story
        figure("coordinator killed in the middle of a verdict", time.monotonic() - since)


def test_without_most_endpoints_workers_go_on_and_what_fails_waits_for_them_and_without_most_hosts_one_is_left_waiting(
    launch: Launcher, tmp_path: Path
) -> None:
    with battlefield(launch, "c10d on three", tmp_path) as there:
        fence, since = there.fence, time.monotonic()
        undo = there.endpoints_silent()
        there.wait_progress(ALL, since + LONG_S, limit_s=SLACK_S)
        assert there.fence == fence, "no worker has noticed"
        there.worker_raises(0)
        for agent in there.agents:
            agent.wait_said("aelastic: W rendezvous: no answer from the endpoint for .*")
        assert all(agent.has_said("can start; rendezvous endpoints missing: .*, .*") for agent in there.agents)
        assert there.restart == 0
        undo()
        there.wait_progress(ALL, time.monotonic(), above=fence, limit_s=LIMIT_S)
        assert there.restart == 1
        left = there.coordinator
        gone = there.others(left)
        undos = [there.agent_killed(index) for index in gone]
        names = ", ".join(rf"{re.escape(there.nodes[index].v4())}:29400 \(.*\)" for index in gone)
        there.agents[left].wait_said(f"aelastic: W .*; rendezvous endpoints missing: {names}")
        for undo in undos:
            undo()
        there.wait_progress(ALL, time.monotonic(), limit_s=LIMIT_S)
        assert there.restart == 1 and there.side_by_side_s() < LEASE_S + 1


def test_a_coordinator_that_is_cut_off_as_the_job_fails_ends_nothing_that_the_others_go_on_with(
    launch: Launcher, tmp_path: Path
) -> None:
    """The last restart is used up 0.3 s after the failure; by then the coordinator, with the only endpoint, reaches no other node."""
    with battlefield(launch, "c10d", tmp_path, max_restarts=0) as there:
        there.make_coordinator(0)
        fence, began = there.fence, time.monotonic()
        undo = there.cut_off(0)
        there.worker_raises(0)
        there.agents[0].wait_said("the job's outcome is not known here|no contact with the endpoint", limit_s=SLACK_S)
        there.wait_progress(there.others(0), began, above=fence, limit_s=LEASE_S + 1 + SLACK_S)
        time.sleep(max(began + CUT_S - time.monotonic(), 0.0))
        assert not any(agent.is_over for agent in there.agents), there.team.story
        undo()
        there.wait_progress(ALL, time.monotonic(), limit_s=LIMIT_S)
        assert there.side_by_side_s() < LEASE_S + 1
