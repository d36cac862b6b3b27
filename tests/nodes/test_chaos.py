"""Nodes under fire: single faults, random pairs of faults, and long faults, on each endpoint.

`benchmarks/many_nodes.py` measures how soon the other nodes continue.

Workers step together and fail with each other.  `TEST_EFFORT=soak` runs more pairs; a pair's endpoint and number
reproduce it.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from kit.agents import COORDINATES, FINISH
from kit.effort import EFFORT
from kit.faults.chaos import (
    ENDPOINTS,
    FAULTS,
    LEASE_S,
    LONG_FAULTS,
    LONG_S,
    Battlefield,
    Fault,
    Undo,
    battlefield,
)
from kit.faults.chaos_charges import Done, check_charges
from kit.launching import Launcher

pytestmark = pytest.mark.long
PAIRS = {"quick": 0, "all": 2, "soak": 60}[EFFORT]
FAULTS_OF_PAIRS = FAULTS + (LONG_FAULTS if EFFORT == "soak" else [])
ALL = (0, 1, 2)


def finish(there: Battlefield) -> None:
    """Ends the job successfully, and checks that no two rounds ran side by side."""
    there.wait_progress(ALL, time.monotonic())
    there.assert_not_side_by_side()
    for agent in there.agents:
        os.kill(agent.starts[-1].pid, FINISH)
    assert [agent.wait() for agent in there.agents] == [0, 0, 0], there.team.story


# A single fault, after which the other nodes continue.


@dataclass(frozen=True)
class Single:
    """A fault of a node that comes back after the other nodes have continued.

    Args:
        fault: its name.
        hold_s: minimum duration.
        is_missed: whether the others continue without the node.
        is_coordinators: whether it hits the leader's node instead of another one.
        is_quick: whether `make test` runs it as well.
    """

    fault: str
    hold_s: float = 0.0
    is_missed: bool = True
    is_coordinators: bool = True
    is_quick: bool = False


def of_member(fault: str, hold_s: float = 0.0, **more: bool) -> Single:
    return Single(fault, hold_s, is_coordinators=False, **more)


FROZEN_S = 60.0 if EFFORT == "soak" else LONG_S
EVERY = [
    of_member("worker_killed"),
    of_member("agent_killed"),
    of_member("cut_off", LONG_S),
    Single("agent_killed"),
    Single("agent_terminated"),
    Single("agent_stopped", FROZEN_S),
    Single("cut_off", LONG_S),
    Single("mute", LONG_S),
    Single("deaf", 2 * LEASE_S),
]
# Each fault runs only on endpoints where it behaves differently.  Lost workers and connections look the same on all.  A
# lost leader does not: with most endpoints the others vote, but the leader's host may have the only endpoint, or an
# external store, a TCPStore or etcd, may still name the leader.
SINGLES = {
    "c10d on three": EVERY,
    "c10d": [  # and killed: below, with gloo
        Single("cut_off", 2 * LEASE_S),
        Single("cut_off", is_quick=True),
        of_member("agent_stopped", is_quick=True),
    ],
    "c10d apart": [
        of_member("agents_reset", LEASE_S / 2, is_missed=False),  # by a middlebox
        Single("agents_reset", 0.5, is_missed=False),
        of_member("unreachable", LONG_S),  # its sockets report errors
        Single("unplugged", LONG_S),
        Single("cut_off_from_nodes", 2 * LEASE_S),  # but it still reaches the endpoint
        Single("deaf_to_nodes", 2 * LEASE_S),
    ],
    "static": [Single("agent_stopped", LONG_S, is_missed=False)],  # nobody else can lead
    "etcd-v3": [Single("agent_killed"), Single("cut_off", LONG_S), Single("deaf", 2 * LEASE_S)],
}
if EFFORT == "soak":
    SINGLES |= {"etcd-v3": EVERY, "etcd-v2": EVERY, "three etcds": EVERY, "c10d apart": SINGLES["c10d apart"] + EVERY}
# CI runs one endpoint for each way of detecting a lost leader; a soak runs them all.
PAIRS_ON = {"quick": [], "all": ["c10d", "c10d on three", "etcd-v3"], "soak": ENDPOINTS}[EFFORT]
ON = {"quick": ["c10d"], "all": [*SINGLES], "soak": [*dict.fromkeys((*SINGLES, *ENDPOINTS))]}[EFFORT]


def have_elected(there: Battlefield) -> bool:
    """Whether the agents that do not serve the endpoint have elected one of themselves."""
    return any(agent.has_logged("this agent leads the job now") for agent in there.team.agents[1:])


def recovery(there: Battlefield, single: Single) -> None:
    """A fault, the others' next round while it lasts, and then a round of all."""
    coordinator = there.coordinator
    victim = coordinator if single.is_coordinators else there.others(coordinator)[0]
    before, fence, began = there.restart, there.fence, time.monotonic()
    undo = Fault(single.fault).do(there, victim)
    is_workers = single.fault.startswith("worker")
    if single.is_missed:
        there.wait_progress(ALL if is_workers else there.others(victim), began, above=fence)
    time.sleep(max(began + single.hold_s - time.monotonic(), 0.0))
    undo()
    there.wait_progress(ALL, time.monotonic())
    assert there.restart == before + is_workers, there.team.story


@pytest.mark.ci
@pytest.mark.all
@pytest.mark.timeout(3600 if EFFORT == "soak" else 400)
@pytest.mark.parametrize("endpoint", ON)
def test_after_a_fault_the_others_continue_and_two_at_once_are_paid_by_the_rule(
    launch: Launcher, tmp_path: Path, endpoint: str
) -> None:
    coordinator = 0 if endpoint == "c10d" else None  # the one with the endpoint
    with battlefield(launch, endpoint, tmp_path, coordinator=coordinator) as there:
        for single in SINGLES.get(endpoint, ()):
            if single.is_quick or EFFORT != "quick":
                recovery(there, single)
        assert have_elected(there) or endpoint != "c10d", there.team.story
        if endpoint == "c10d apart":  # a restart has to work on a lossy network
            undo = there.all_leaky(0, percent=5)
            recovery(there, of_member("worker_killed"))
            undo()
        for number in range(PAIRS if endpoint in PAIRS_ON else 0):
            run_pair(there, random.Random(f"{endpoint} {number}"), number)
        finish(there)


# Pairs.


def run_pair(there: Battlefield, luck: random.Random, number: int) -> None:
    pair = luck.choices([fault for fault in FAULTS_OF_PAIRS if fault.is_for(there.endpoint)], k=2)
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
    there.wait_progress(ALL, time.monotonic())
    check_charges(there, done, began, f"pair {number} on {there.endpoint}")


@pytest.mark.all
@pytest.mark.timeout(1200)
def test_workers_that_die_of_what_gloo_raises_as_coordinator_and_endpoint_are_killed_cost_nothing(
    launch: Launcher, tmp_path: Path
) -> None:
    with battlefield(launch, "c10d", tmp_path, coordinator=0, STAR_GLOO="1", GLOO_SOCKET_IFNAME="net1") as there:
        recovery(there, Single("agent_killed"))
        assert have_elected(there), there.team.story
        for number in range(PAIRS // 3):
            run_pair(there, random.Random(f"gloo on c10d {number}"), number)


# Long faults.


@pytest.mark.all
@pytest.mark.timeout(300)
def test_a_job_that_loses_its_coordinator_with_the_endpoint_waits_for_that_node_and_pays_nothing(
    launch: Launcher, tmp_path: Path
) -> None:
    with battlefield(launch, "static", tmp_path, coordinator=0) as there:  # on c10d the others would elect another
        come_back = there.agent_killed(0)
        for index in there.others(0):
            there.agents[index].wait_logged("looking for the leader")
        fence, began = there.fence, time.monotonic()
        come_back()
        there.wait_progress(ALL, began, above=fence)
        assert there.restart == 0, there.team.story
        finish(there)


@pytest.mark.all
def test_a_node_that_is_cut_off_from_the_coordinator_only_stops_its_workers_and_disturbs_no_other(
    launch: Launcher, tmp_path: Path
) -> None:
    """Its workers need no peer, and would otherwise write throughout the cut."""
    with battlefield(launch, "c10d apart", tmp_path, STAR_SOLO="1") as there:
        outsider = there.others(there.coordinator)[0]
        rest, fence, began = there.others(outsider), there.fence, time.monotonic()
        undo = there.cut_off_from_coordinator(outsider)
        there.wait_progress(rest, began, above=fence)
        without = there.fence
        agent = there.agents[outsider]
        agent.wait_logged("no contact with the leader")
        time.sleep(LEASE_S)
        assert there.fence == without, there.team.story
        undo()
        there.wait_progress(ALL, time.monotonic())
        there.assert_not_side_by_side()
        assert there.restart == 0
        assert sum(agent.has_logged(COORDINATES) for agent in there.agents) == 1, there.team.story
