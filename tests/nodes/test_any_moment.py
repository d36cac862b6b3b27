"""Hosts of endpoints that die in the middle of a claim or while a job fails, and the loss of most of them.

The simulation kills them at each step (`test_quorum.py` and `test_simulated_endpoints.py` there); here the stores are
real.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from kit.agents import HASTY
from kit.effort import EFFORT
from kit.faults.chaos import LEASE_S, LONG_S, Battlefield, battlefield
from kit.launching import Launcher
from kit.waiting import wait_for

pytestmark = [pytest.mark.all, pytest.mark.timeout(300)]
ALL = (0, 1, 2)
CUT_S = {"soak": 60.0}.get(EFFORT, 4 * LEASE_S)

# In an agent: while a file names a number, a claim stops once that many of its writes to stores have begun.
# A claim locks stores and writes its vote to each: at least four writes, as a store that answers late is skipped.
HELD = f"""{HASTY}
import os
import pathlib

import anyio

from aelastic.rdzv.leader.leader import Phase
from aelastic.rdzv.leader_server import LeaderServer
from aelastic.rdzv.stores.register_events import Write
from aelastic.rdzv.stores.quorum import QuorumStore

replace, carry_out, hold = LeaderServer._replace_cell, QuorumStore._carry_out, pathlib.Path(os.environ["HOLD"])
writes = []


async def replace_noted(self, *args):
    writes.clear()
    if self.leader.phase is Phase.CANDIDATE:  # it locks the cell
        writes.append(None)
    try:
        return await replace(self, *args)
    finally:
        writes.clear()


async def carry_out_held(self, request):
    if isinstance(request, Write) and writes:
        writes.append(request)
        while hold.exists() and len(writes) > 1 + int(hold.read_text()):
            pathlib.Path("held").touch()
            await anyio.sleep(0.01)
    return await carry_out(self, request)


LeaderServer._replace_cell, QuorumStore._carry_out = replace_noted, carry_out_held
"""


def held(there: Battlefield, index: int) -> Path:
    return there.agents[index].folder / "held"


def test_a_host_may_go_in_the_middle_of_a_claim(launch: Launcher, tmp_path: Path) -> None:
    """The leader's agent was stopped for a lease, and is back when the agent that claims its place dies."""
    hold = tmp_path / "hold"
    with battlefield(launch, "c10d on three", tmp_path, wrapper=HELD, HOLD=str(hold)) as there:
        for fault, begun in (("agent_killed", 1), ("host_frozen", 2), ("cut_off", 3)):
            fence, coordinator = there.fence, there.coordinator
            (tmp_path / "hold.new").write_text(str(begun))
            (tmp_path / "hold.new").rename(hold)
            wake = there.agent_stopped(coordinator)
            victim = wait_for("an agent is held", lambda: [index for index in ALL if held(there, index).exists()])[0]
            since, undo = time.monotonic(), getattr(there, fault)(victim)
            hold.unlink()
            for index in ALL:
                held(there, index).unlink(missing_ok=True)
            wake()
            there.wait_progress(there.others(victim), since, above=fence)
            undo()
            there.wait_progress(ALL, time.monotonic())
        assert there.restart == 0
        there.assert_not_side_by_side()


def test_without_most_endpoints_workers_continue_and_what_fails_waits_for_them_and_without_most_hosts_one_is_left_waiting(
    launch: Launcher, tmp_path: Path
) -> None:
    with battlefield(launch, "c10d on three", tmp_path) as there:
        fence, since = there.fence, time.monotonic()
        undo = there.endpoints_silent()
        there.wait_progress(ALL, since + LONG_S)
        assert there.fence == fence, "no worker has noticed"
        there.worker_raises(0)
        for agent in there.agents:
            agent.wait_logged("aelastic: W rendezvous: no answer from the endpoint for .*")
        assert all(agent.has_logged("can start; rendezvous endpoints missing: .*, .*") for agent in there.agents)
        assert there.restart == 0
        undo()
        there.wait_progress(ALL, time.monotonic(), above=fence)
        assert there.restart == 1
        left = there.coordinator
        gone = there.others(left)
        undos = [there.agent_killed(index) for index in gone]
        names = ", ".join(rf"{re.escape(there.nodes[index].v4())}:29400 \(.*\)" for index in gone)
        there.agents[left].wait_logged(f"aelastic: W .*; rendezvous endpoints missing: {names}")
        for undo in undos:
            undo()
        there.wait_progress(ALL, time.monotonic())
        assert there.restart == 1
        there.assert_not_side_by_side()


def test_a_coordinator_that_is_cut_off_as_the_job_fails_ends_nothing_that_the_others_continue_with(
    launch: Launcher, tmp_path: Path
) -> None:
    """The last restart is used up 0.3 s after the failure, and by then the leader reaches no other node."""
    with battlefield(launch, "c10d", tmp_path, max_restarts=0, coordinator=0) as there:
        fence, began = there.fence, time.monotonic()
        undo = there.cut_off(0)
        there.worker_raises(0)
        there.agents[0].wait_logged("no contact with (the rendezvous endpoint|any other node)|there is no quorum")
        there.wait_progress(there.others(0), began, above=fence)
        time.sleep(max(began + CUT_S - time.monotonic(), 0.0))
        assert not any(agent.is_over for agent in there.agents), there.team.story
        undo()
        there.wait_progress(ALL, time.monotonic())
        there.assert_not_side_by_side()
