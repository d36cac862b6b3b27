"""Nodes that die, hang, are cut off and come back: the others go on, and nothing is left of what is gone.

Every agent is a real one; the victims are in turn each node, with that which serves the store and that which
coordinates.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.agents import (
    COORDINATES,
    FAIL,
    FAIL_CODE,
    HASTY,
    IS_SPARE,
    LATE,
    Meeting,
    c10d,
    external_store,
    figure,
    team_of,
)
from kit.effort import EFFORT, REPETITIONS
from kit.launching import Launcher, wait_for
from kit.servers.etcd_servers import EtcdServers

pytestmark = pytest.mark.usefixtures("warm_stores")

# Short, and long enough for two cores that others use too.
LEASE_S = 2.0
# What a machine may add on which others work, too.
LOAD_S = 3.0
QUICK = {"lease": LEASE_S, "settle_time": 0.1}
# A lease that is lost by mistake costs another round, and nothing else.
QUICKER = {"lease": 1, "settle_time": 0.1}


# Workers.


def test_a_crash_on_any_node_restarts_all_as_one_until_the_budget_ends_the_job(launch: Launcher) -> None:
    with team_of(launch, c10d(), "3") as team:
        agents = team.start_many(3)
        round_ = team.wait_round(agents)
        rank_of = {agent: agent.starts[-1].rank for agent in agents}
        for restart, rank in enumerate(range(3), start=1):
            began = time.monotonic()
            round_.tell(FAIL, rank)
            round_ = team.wait_round(agents, after=round_)
            figure(f"worker crash on node {rank} of 3 to all restarted", round_.at - began)
            assert round_.restart == restart
            assert {agent: agent.starts[-1].rank for agent in agents} == rank_of
        assert [len(agent.starts) for agent in agents] == [4, 4, 4]
        began = time.monotonic()
        round_.tell(FAIL, 1)
        codes = [agent.wait() for agent in agents]
        figure("last worker crash to all agents gone", time.monotonic() - began)
        assert codes == [FAIL_CODE] * 3
        assert time.monotonic() - began < 2 + LOAD_S
        for agent in agents:
            assert re.search(r"Root Cause[^=]*\n *rank +: 1 ", agent.stderr), team.story
            assert len(agent.starts) == 4


def test_the_worker_that_was_killed_is_every_agents_cause_and_its_signal_their_exit_code(launch: Launcher) -> None:
    """The others fail of it, each with a code of its own."""
    for rank in {"quick": [2], "all": [0, 1, 2]}.get(EFFORT, [0, 1, 2] * 5):
        with team_of(launch, c10d(), "3", options=()) as team:
            agents = team.start_many(3)
            team.wait_round(agents).tell(signal.SIGKILL, rank)
            assert [agent.wait() for agent in agents] == [128 + signal.SIGKILL] * 3, team.story
            for agent in agents:
                assert re.search(rf"Root Cause[^=]*\n *rank +: {rank} ", agent.stderr), team.story


# Agents.


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["c10d", pytest.param("etcd-v3", marks=pytest.mark.all)])
def test_any_node_may_go_and_come_back_again_and_again(launch: Launcher, backend: str, etcds: EtcdServers) -> None:
    """Killed; what is terminated, suspended or cut off is met in `test_chaos.py`."""
    meeting = c10d() if backend == "c10d" else Meeting(backend, etcds.of("distro").endpoint)
    with team_of(launch, meeting, "1:3", conf=QUICKER, wrapper=HASTY) as team:
        members = team.start_many(3)
        round_ = team.wait_round(members)
        for number in range(REPETITIONS):
            victim = members.pop(0) if number % 2 else team.coordinator
            members = [agent for agent in members if agent is not victim]
            began = time.monotonic()
            victim.crash()
            round_ = team.wait_round(members, after=round_)
            figure("kill to survivors running", round_.at - began)
            victim.wait_nothing_left()
            assert len(round_.starts) == 2
            members.append(team.start())
            began = time.monotonic()
            round_ = team.wait_round(members, after=round_)
            figure("kill: back to all running", round_.at - began)
            assert round_.restart == 0
        team.finish(round_)


def test_an_agent_that_comes_back_under_its_node_rank_replaces_its_old_self_at_once(launch: Launcher) -> None:
    with team_of(launch, c10d(), "3", conf={"lease": 60}) as team:
        agents = [team.start("--node-rank", str(rank)) for rank in range(3)]
        three = team.wait_round(agents)
        old = next(agent for agent in agents[1:] if agent is not team.coordinator)
        rank = agents.index(old)
        old.stop()
        began = time.monotonic()
        agents[rank] = team.start("--node-rank", str(rank))
        again = team.wait_round(agents, after=three)
        figure("the same node rank came back: to all running", again.at - began)
        assert agents[rank].starts[-1].rank == rank
        old.signal(signal.SIGCONT)
        assert old.wait() == 1
        assert f"another agent joined as node rank {rank}" in old.stderr
        old.assert_nothing_left()
        team.assert_untouched(again)
        team.finish(again)


# The coordinator, while the board lives.


@pytest.fixture(params=["c10d", pytest.param("etcd-v3", marks=pytest.mark.all)])
def lasting(request: pytest.FixtureRequest, etcds: EtcdServers) -> Iterator[Meeting]:
    if request.param == "c10d":
        with external_store() as meeting:
            yield meeting
    else:
        yield Meeting(request.param, etcds.of("distro").endpoint)


def test_a_round_goes_on_untouched_if_its_coordinator_was_a_spare(launch: Launcher, lasting: Meeting) -> None:
    with team_of(launch, lasting, "2", conf=QUICK) as team:
        spare = team.start(wrapper=LATE)
        spare.wait_said(COORDINATES)
        agents = team.start_many(2)
        round_ = team.wait_round(agents)
        spare.go()
        spare.wait_said(IS_SPARE)
        began = time.monotonic()
        spare.crash()
        successor = team.coordinator
        figure("coordinator killed: to the next", time.monotonic() - began)
        assert successor is not spare
        team.assert_untouched(round_)
        # It knows the round: a failure restarts both workers.
        os.kill(agents[0].starts[-1].pid, FAIL)
        again = team.wait_round(agents, after=round_)
        assert again.restart == 1
        assert [len(agent.starts) for agent in agents] == [2, 2]
        team.finish(again)


def test_a_coordinator_that_wakes_up_changes_nothing_and_comes_back_as_a_newcomer(
    launch: Launcher, lasting: Meeting
) -> None:
    with team_of(launch, lasting, "2:3", conf=QUICK) as team:
        agents = team.start_many(3)
        three = team.wait_round(agents)
        sleeper = team.coordinator
        sleeper.stop()
        others = [agent for agent in agents if agent is not sleeper]
        began = time.monotonic()
        two = team.wait_round(others, after=three)
        figure("coordinator suspended: to survivors running", two.at - began)
        # By then its beat has been seen to stand still for a lease, and a moment is for a machine that is busy.
        assert two.at - began < 2 * LEASE_S + LOAD_S
        members = [*others, team.start()]
        full = team.wait_round(members, after=two)
        sleeper.signal(signal.SIGCONT)
        sleeper.wait_said(IS_SPARE)
        sleeper.wait_said("is no longer coordinator")  # its lease is answered for later than its search finds another
        team.assert_untouched(full)
        assert team.coordinator is not sleeper
        members[0].crash()
        members[0] = sleeper
        team.finish(team.wait_round(members, after=full))


# The board.

# An agent that serves the store, and leaves it to others to coordinate until it is told to try.
MODEST = """
import os

import anyio

from aelastic.rdzv.agent_link import AgentLink

campaign = AgentLink._campaign


async def campaign_late(self, seen, above):
    while not os.path.exists("go"):
        await anyio.sleep(0.01)
    await campaign(self, seen, above)


AgentLink._campaign = campaign_late
"""


def test_a_newcomer_that_finds_an_empty_store_does_not_disturb_nodes_that_go_on(launch: Launcher) -> None:
    # So long a lease that the newcomer is mostly the first to write into the store that it serves.
    with team_of(launch, c10d(), "2:3", conf={"lease": 9}) as team:
        host = team.start(wrapper=MODEST)
        wait_for("the store is served", lambda: is_open(team.meeting))
        members = team.start_many(2)
        coordinator = team.coordinator
        host.go()
        three = team.wait_round([host, *members])
        spare = team.start()
        spare.wait_said(IS_SPARE)
        host.crash()
        newcomer = team.start()
        members.append(spare)
        again = team.wait_round(members, after=three)
        coordinator.wait_said("another agent is coordinator now|the TCPStore of .* was restarted and is empty")
        # The newcomer is a spare, with any coordinator, and no worker was interrupted for that.
        newcomer.wait_said(IS_SPARE)
        team.assert_untouched(again)
        members[0].crash()
        members[0] = newcomer
        last = team.wait_round(members, after=again)
        assert [len(agent.starts) for agent in members] == [1, 3, 2]
        assert last.restart == 0
        team.finish(last)


def is_open(meeting: Meeting) -> bool:
    host, _, port = meeting.endpoint.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def test_two_jobs_on_one_etcd_do_not_disturb_each_other(launch: Launcher, etcds: EtcdServers) -> None:
    meeting = Meeting("etcd-v3", etcds.of("distro").endpoint)
    with team_of(launch, meeting, "2:3", conf=QUICK) as one, team_of(launch, meeting, "2") as other:
        agents, others = one.start_many(3), other.start_many(2)
        round_, calm = one.wait_round(agents), other.wait_round(others)
        for signum in (signal.SIGKILL, signal.SIGTERM):
            victim = one.coordinator
            victim.signal(signum)
            assert victim.wait() == -signum
            agents.remove(victim)
            round_ = one.wait_round(agents, after=round_)
            agents.append(one.start())
            round_ = one.wait_round(agents, after=round_)
        round_.tell(FAIL, 0)
        one.finish(one.wait_round(agents, after=round_))
        other.assert_untouched(calm)
        assert [len(agent.starts) for agent in others] == [1, 1]
        other.finish(calm)


BLOCKED = """
import ctypes

signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if restart:
    say("again", time.monotonic())
    os._exit(0)
if rank == 0:
    wait_for(os.environ["GO"])
    say("fails", time.monotonic())
    os._exit(3)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(128)
libc.pthread_mutex_init(lock, None)
libc.pthread_mutex_lock(lock)
say("blocked")
libc.pthread_mutex_lock(lock)  # no signal ends it, and no Python handler runs
"""


def test_a_blocked_worker_of_another_node_holds_a_restart_for_three_seconds_at_most(
    launch: Launcher, tmp_path: Path
) -> None:
    with team_of(launch, c10d(), "2", worker=BLOCKED, env={"GO": str(tmp_path / "go")}) as team:
        agents = team.start_many(2)
        wait_for("rank 1 is blocked", lambda: any("blocked" in agent.lines for agent in agents))
        (tmp_path / "go").touch()
        assert [agent.wait() for agent in agents] == [0, 0], team.story
        times = [line.split() for agent in agents for line in agent.lines if " " in line]
        failed_at = next(float(at) for word, at in times if word == "fails")
        took = max(float(at) for word, at in times if word == "again") - failed_at
        figure("failure to all restarted, with a blocked worker on another node", took)
        assert took < 3.0 + LOAD_S, team.story
        said = [agent.stderr for agent in agents if agent.has_said("rank 1 neither wrote nor computed for 2 s")]
        assert len(said) == 1, team.story
