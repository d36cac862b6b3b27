"""Nodes under fire: single faults in their time, random pairs of faults, and what takes long; on each board.

Workers step together and die of each other.  `TEST_EFFORT=soak` runs more pairs; a pair is told again by its board and
its number.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from kit.agents import FINISH, figure
from kit.effort import EFFORT
from kit.faults.chaos import (
    BOARDS,
    FAULTS,
    LEASE_S,
    LONG_FAULTS,
    LONG_S,
    SLACK_S,
    Battlefield,
    Fault,
    Undo,
    battlefield,
)
from kit.faults.chaos_charges import Done, check_charges
from kit.launching import Launcher

pytestmark = pytest.mark.long
PAIRS = {"quick": 1, "all": 3, "soak": 60}[EFFORT]
FAULTS_OF_PAIRS = FAULTS + (LONG_FAULTS if EFFORT == "soak" else [])
# In CI one board for each way in which a coordinator is known to be gone; a soak has them all.
BOARDS_OF_PAIRS = {"quick": ["c10d"], "all": ["c10d", "c10d on three", "etcd-v3"], "soak": BOARDS}[EFFORT]
# Nodes 1 and 2 can go on without node 0, whichever of them coordinates.
BOARDS_OF_THEIR_OWN = [
    "c10d on three",
    *{"quick": [], "all": ["etcd-v3"]}.get(EFFORT, ["etcd-v3", "c10d apart", "etcd-v2", "three etcds"]),
]
ALL = (0, 1, 2)


def finish(there: Battlefield) -> None:
    """The job ends well, and no two rounds have run side by side."""
    there.wait_progress(ALL, time.monotonic(), limit_s=SLACK_S)
    for agent in there.agents:
        os.kill(agent.starts[-1].pid, FINISH)
    assert [agent.wait() for agent in there.agents] == [0, 0, 0], there.team.story
    assert there.side_by_side_s() < LEASE_S + 1


# One fault, and how soon the others go on.

AT_ONCE_S = 1.0
AFTER_A_LEASE_S = LEASE_S + 1.0
# What a machine may add on which others work, too.
LOAD_S = 3.0


EVERY = {"worker_killed", "agent_killed", "agent_terminated", "agent_stopped", "cut_off", "mute", "deaf"}
VICTIMS = {
    "quick": {"member": {"worker_killed", "agent_killed"}, "coordinator": {"agent_killed", "cut_off"}},
    "all": {"member": {"worker_killed", "agent_killed", "cut_off"}, "coordinator": EVERY},
}.get(EFFORT, {"member": EVERY, "coordinator": EVERY})


def recovery(there: Battlefield, name: str, victim: int, within_s: float, *, hold_s: float = 0.0) -> None:
    """A fault, the others' next round, and that of all."""
    is_coordinator = "coordinator" if victim == there.coordinator else "member"
    before, fence, began = there.restart, there.fence, time.monotonic()
    undo = Fault(name).do(there, victim)
    is_workers = name.startswith("worker")
    took = there.wait_progress(
        ALL if is_workers else there.others(victim), began, above=fence, limit_s=within_s + SLACK_S
    )
    figure(f"{there.board}: {name}, {is_coordinator}: to all others at work", took)
    assert took < within_s + there.imports_s + LOAD_S, there.team.story
    time.sleep(max(began + hold_s - time.monotonic(), 0.0))
    undo()
    there.wait_progress(ALL, time.monotonic(), limit_s=LEASE_S + SLACK_S)
    assert there.restart == before + is_workers, there.team.story


@pytest.mark.timeout(300)
@pytest.mark.parametrize("board", BOARDS_OF_THEIR_OWN)
def test_after_a_fault_the_others_go_on_in_its_time(launch: Launcher, tmp_path: Path, board: str) -> None:
    with battlefield(launch, board, tmp_path) as there:
        for victim, names in VICTIMS.items():
            for name, within_s, hold_s in (
                ("worker_killed", 0.3, 0.0),
                ("agent_killed", AT_ONCE_S, 0.0),
                ("agent_terminated", AT_ONCE_S, 0.0),
                ("agent_stopped", AFTER_A_LEASE_S, 60.0 if EFFORT == "soak" else LONG_S),
                ("cut_off", AFTER_A_LEASE_S, LONG_S),
                ("mute", AFTER_A_LEASE_S, LONG_S),
                # What it sends once still arrives, a renewal of its leadership, too; etcd looks twice a second for what ended.
                ("deaf", LEASE_S * 4 / 3 + 1.0, 2 * LEASE_S),
            ):
                if name not in names:
                    continue
                index = there.coordinator if victim == "coordinator" else there.others(there.coordinator)[0]
                recovery(there, name, index, within_s, hold_s=hold_s)
        finish(there)


@pytest.mark.all
@pytest.mark.timeout(300)
def test_a_coordinator_that_reaches_the_board_and_no_other_node_is_replaced(launch: Launcher, tmp_path: Path) -> None:
    with battlefield(launch, "c10d apart", tmp_path) as there:
        for name in ("cut_off_from_nodes", "deaf_to_nodes"):
            recovery(there, name, there.coordinator, AFTER_A_LEASE_S, hold_s=2 * LEASE_S)
        finish(there)


# Pairs.


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("board", BOARDS_OF_PAIRS)
def test_whatever_two_faults_come_together_the_job_goes_on_and_pays_by_the_rule(
    launch: Launcher, tmp_path: Path, board: str
) -> None:
    with battlefield(launch, board, tmp_path) as there:
        for number in range(PAIRS):
            run_pair(there, random.Random(f"{board} {number}"), number)
        finish(there)


def run_pair(there: Battlefield, luck: random.Random, number: int) -> None:
    pair = luck.choices([fault for fault in FAULTS_OF_PAIRS if fault.is_for(there.board)], k=2)
    began, undos, done = time.monotonic(), list[tuple[float, int]](), list[Done]()
    doing = list[Undo]()
    for fault in pair:
        index, since = luck.randrange(3), time.monotonic()
        doing.append(fault.do(there, index))
        undos.append((time.monotonic() + fault.hold_s, len(undos)))
        done.append(Done(fault, index, since, since))
        time.sleep(luck.choice((0.0, 0.02, 0.3, 1.5)))
    for at, which in sorted(undos):
        time.sleep(max(at - time.monotonic(), 0.0))
        doing[which]()
        done[which] = replace(done[which], until=time.monotonic())
    told = ", then ".join(f"{each.fault.name} of node {each.index} for {each.fault.hold_s:g} s" for each in done)
    what = f"pair {number} on {there.board}: {told}"
    took = there.wait_progress(ALL, time.monotonic(), limit_s=LEASE_S + 2 * SLACK_S)
    figure(f"{what}; {check_charges(there, done, began, what)}", took)


@pytest.mark.all
@pytest.mark.timeout(1200)
def test_workers_that_die_of_what_gloo_raises_cost_no_more(launch: Launcher, tmp_path: Path) -> None:
    with battlefield(launch, "c10d", tmp_path, STAR_GLOO="1", GLOO_SOCKET_IFNAME="net1") as there:
        for number in range(PAIRS // 3):
            run_pair(there, random.Random(f"gloo on c10d {number}"), number)


# What takes long.


@pytest.mark.all
@pytest.mark.timeout(300)
def test_a_job_that_loses_its_coordinator_with_the_endpoint_waits_for_that_node_and_pays_nothing(
    launch: Launcher, tmp_path: Path
) -> None:
    with battlefield(launch, "static", tmp_path) as there:  # on c10d the others elect another one
        there.make_coordinator(0)
        come_back = there.agent_killed(0)
        for index in there.others(0):
            there.agents[index].wait_said("looking for the coordinator", limit_s=LEASE_S + SLACK_S)
        fence, began = there.fence, time.monotonic()
        come_back()
        took = there.wait_progress(ALL, began, above=fence, limit_s=LEASE_S + SLACK_S)
        figure("static: coordinator and endpoint are back: to all at work", took)
        assert there.restart == 0, there.team.story
        finish(there)


@pytest.mark.all
def test_a_node_that_is_cut_off_from_the_coordinator_only_stops_its_workers(launch: Launcher, tmp_path: Path) -> None:
    """Its workers need no peer, so that they would write for as long as the cut."""
    with battlefield(launch, "c10d apart", tmp_path, STAR_SOLO="1") as there:
        outsider = there.others(there.coordinator)[0]
        rest, fence, began = there.others(outsider), there.fence, time.monotonic()
        undo = there.cut_off_from_coordinator(outsider)
        there.wait_progress(rest, began, above=fence, limit_s=AFTER_A_LEASE_S + SLACK_S)
        agent = there.agents[outsider]
        agent.wait_said(
            "no message from the coordinator for .* s, but it renews its lease: this node was removed", limit_s=SLACK_S
        )
        time.sleep(LEASE_S)
        undo()
        there.wait_progress(ALL, time.monotonic(), limit_s=LEASE_S + SLACK_S)
        last = max(step.at for step in there.steps(agent) if step.fence == fence)
        figure("cut off from the coordinator only: to the last step", last - began)
        assert there.side_by_side_s() < LEASE_S + 1
        assert there.restart == 0


def test_a_middlebox_that_resets_the_connections_of_an_agent_costs_no_restart(launch: Launcher, tmp_path: Path) -> None:
    with battlefield(launch, "c10d apart", tmp_path) as there:
        for victim, hold_s in (("coordinator", 0.5), ("member", LEASE_S / 2)):
            undo = there.agents_reset(
                there.coordinator if victim == "coordinator" else there.others(there.coordinator)[0]
            )
            time.sleep(hold_s)
            undo()
            there.wait_progress(ALL, time.monotonic(), limit_s=LEASE_S + SLACK_S)
        assert there.restart == 0, there.team.story
        finish(there)


@pytest.mark.all
def test_etcd_may_move_to_another_address_under_its_name(launch: Launcher, tmp_path: Path) -> None:
    with battlefield(launch, "etcd-v3", tmp_path, has_name=True) as there:
        fence = there.fence
        there.move_etcd()
        there.wait_progress(ALL, time.monotonic() + 3 * LEASE_S, limit_s=SLACK_S)
        assert there.fence == fence, "no worker has noticed"
        recovery(there, "agent_killed", there.coordinator, AFTER_A_LEASE_S)
        finish(there)
