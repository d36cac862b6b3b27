"""Several agents on one machine form a world, grow, keep spares, and end together."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kit.agents import COORDINATES, FAIL, FINISH, IS_SPARE, Agent, Meeting, c10d, listening_ports, team_of
from kit.launching import Launcher
from kit.ports import quiet_port
from kit.servers.etcd_servers import EtcdServers
from kit.servers.stores import external_store
from kit.waiting import wait_for

pytestmark = pytest.mark.usefixtures("warm_stores")

# The first round waits for optional nodes only this long.
AT_ONCE = {"last_call_timeout": 0.1, "settle_time": 0.1}
# How long to watch that nothing happens.
QUIET_S = 0.5


# Worlds.


def test_three_nodes_of_two_workers_are_one_world_and_end_as_one(launch: Launcher) -> None:
    with team_of(launch, c10d(), "3", nproc=2) as team:
        alone = team.start()
        alone.wait_logged(COORDINATES)
        alone.signal(signal.SIGTERM)  # while it waits
        assert alone.wait() == -signal.SIGTERM
        # No leader is left, but the next agents find each other anyway.
        agents = team.start_many(3)
        round_ = team.wait_round(agents)
        assert [start.world_size for start in round_.starts] == [6] * 6
        assert [start.restart for start in round_.starts] == [0] * 6
        assert sorted((s.group_rank, s.local_rank) for s in round_.starts) == [(g, n) for g in range(3) for n in (0, 1)]
        # The agent of group rank 0 listens where the workers meet.
        first = next(agent for agent in agents if agent.starts[-1].group_rank == 0)
        master_addr, master_port = round_.starts[0].master_addr, round_.starts[0].master_port
        socket.create_connection((master_addr, master_port), timeout=5).close()
        assert master_port in {port for pid in first.left() for port in listening_ports(pid)}
        team.finish(round_)


# `make test` runs `static` in `test_secret.py`, and c10d in other tests.
ENDPOINTS = ("etcd-v3", "etcd-v2", *(pytest.param(endpoint, marks=pytest.mark.all) for endpoint in ("static", "c10d")))


@pytest.fixture(params=ENDPOINTS)
def meeting(request: pytest.FixtureRequest) -> Iterator[Meeting]:
    """The endpoint outlives the agents, except with `static`."""
    if request.param in ("etcd-v3", "etcd-v2"):
        etcds: EtcdServers = request.getfixturevalue("etcds")
        yield Meeting(request.param, etcds.of("distro").endpoint)
    elif request.param == "static":
        yield Meeting("static", f"127.0.0.1:{quiet_port()}")
    else:
        with external_store() as endpoint:
            yield Meeting("c10d", endpoint)


def test_nodes_meet_on_each_endpoint_and_a_run_id_can_be_used_again_as_soon_as_its_job_is_over(
    launch: Launcher, meeting: Meeting, run_id: str
) -> None:
    """The second job does not wait for the first one's lease to expire."""
    for number in range(2):
        name = f"again-{number}"
        with team_of(launch, meeting, "2", run_id=run_id, name=name) as team:
            agents = [team.start("--node-rank", str(rank)) for rank in range(2)]
            round_ = team.wait_round(agents)
            assert round_.restart == 0 and [agent.starts[-1].group_rank for agent in agents] == [0, 1]
            team.finish(round_)


@pytest.mark.all
def test_a_run_id_can_be_used_again_a_lease_after_all_agents_of_its_job_were_killed(launch: Launcher) -> None:
    with external_store() as endpoint:
        for number in range(2):
            more: dict[str, Any] = {"run_id": "again", "name": f"again-{number}"}
            with team_of(launch, Meeting("c10d", endpoint), "2", conf={"lease": 2}, **more) as team:
                round_ = team.wait_round(team.start_many(2))
                assert round_.restart == 0
                if number == 0:
                    for agent in team.agents:
                        agent.crash()  # without a verdict
                else:
                    team.finish(round_)


# Growth.


@pytest.mark.all
@pytest.mark.cold
def test_a_node_whose_fork_server_imports_joins_when_it_has_imported(launch: Launcher) -> None:
    gate = launch.folder / "gate"
    launch.write(
        "site/slow.py", f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)", preamble=""
    )
    env = {"PYTHONPATH": os.pathsep.join([str(launch.folder / "site"), os.environ.get("PYTHONPATH", "")])}
    with team_of(launch, c10d(), "2:4", conf=AT_ONCE, options=("--preload", "slow"), env=env) as team:
        gate.touch()
        agents = team.start_many(2)
        two = team.wait_round(agents)
        ranks = [agent.starts[-1].rank for agent in agents]
        gate.unlink()
        agents.append(team.start())
        agents[2].wait_logged("after the fork servers of new nodes have imported")
        team.assert_untouched(two)
        gate.touch()
        three = team.wait_round(agents, after=two)
        assert [len(agent.starts) for agent in agents] == [2, 2, 1]
        assert [agent.starts[-1].rank for agent in agents] == [*ranks, 2], "the others keep theirs"
        assert three.restart == 0, "membership changes are free"
        assert not agents[2].has_logged("start cold"), team.story
        team.finish(three)


# On a busy machine a spare needs more than a second to find the next leader.
PATIENT = """
from aelastic.rdzv.leader import forming

forming.SPARES_TIMEOUT_S = 10.0
"""
# The next leader waits for spares that the round's nodes know of.
NOTES_SPARES = """
import sys

from aelastic.rdzv.member.node_state import NodeState

on_spares = NodeState.on_spares


def on_spares_and_tell(state, has_spares):
    on_spares(state, has_spares)
    print(f"spares wait: {has_spares}", file=sys.stderr, flush=True)


NodeState.on_spares = on_spares_and_tell
"""


def knows_of_spare(agent: Agent) -> bool:
    return re.findall(r"^spares wait: (\w+)", agent.stderr, re.MULTILINE)[-1:] == ["True"]


@pytest.mark.parametrize("losses", [1, pytest.param(2, marks=pytest.mark.all)])
def test_a_spare_takes_the_place_of_a_lost_node_again_and_again(launch: Launcher, losses: int) -> None:
    """The first loss hits the node with the endpoint.  The others notice at once, not a lease later."""
    with team_of(launch, c10d(), "2:3", conf=AT_ONCE, wrapper=PATIENT + NOTES_SPARES) as team:
        first = team.start()
        first.wait_logged(COORDINATES)
        members = [first, *team.start_many(2)]
        round_ = team.wait_round(members)
        spare = team.start()
        for number in range(losses):
            spare.wait_logged(IS_SPARE)
            wait_for("all know", lambda: all(map(knows_of_spare, members)))
            team.assert_untouched(round_)
            victim = members[number]
            victim.crash()
            members[number] = spare
            expected = [len(agent.starts) + 1 for agent in members]
            round_ = team.wait_round(members, after=round_)
            assert round_.restart == 0
            assert [len(agent.starts) for agent in members] == expected, "never fewer than three, not even for a moment"
            spare = team.start()
        spare.wait_logged(f"{IS_SPARE}.*; if this is to be a job of its own, give it another --rdzv-id")
        team.finish(round_)
        assert spare.process.returncode == 0
        assert not spare.starts


# Endings.


def finish_but_last(agents: list[Agent]) -> Agent:
    """Lets all workers succeed except the last rank's."""
    *finished, last = sorted(agents, key=lambda agent: agent.starts[-1].rank)
    for agent in finished:
        os.kill(agent.starts[-1].pid, FINISH)
        agent.wait_line("end ")
    return last


def test_nodes_that_have_finished_wait_for_the_last_and_start_again_if_it_fails(launch: Launcher) -> None:
    with team_of(launch, c10d(), "3", options=("--max-restarts", "1")) as team:
        agents = team.start_many(3)
        round_ = team.wait_round(agents)
        last = finish_but_last(agents)
        os.kill(last.starts[-1].pid, FAIL)
        again = team.wait_round(agents, after=round_)
        assert again.restart == 1
        last = finish_but_last(agents)
        time.sleep(QUIET_S)
        assert team.live == agents
        os.kill(last.starts[-1].pid, FINISH)
        assert [agent.wait() for agent in agents] == [0, 0, 0]
        assert [len(agent.starts) for agent in agents] == [2, 2, 2]


IMPATIENT = """
from aelastic.spec import WorkerSpec

WorkerSpec.__init__.__kwdefaults__["exit_barrier_timeout_s"] = 0.5
"""


def test_a_coordinator_that_has_finished_waits_no_longer_than_the_exit_barrier(launch: Launcher) -> None:
    # The successor serves the endpoint again with its next renewal, within a lease, and can then publish the verdict.
    with team_of(launch, c10d(), "2", conf={"lease": 5}) as team:
        early = team.start(wrapper=IMPATIENT)
        early.wait_logged(COORDINATES)
        late = team.start()
        team.wait_round([early, late])
        os.kill(early.starts[-1].pid, FINISH)
        assert early.wait() == 0
        late.wait_logged(COORDINATES)
        os.kill(late.starts[-1].pid, FINISH)
        assert late.wait() == 0
        assert len(late.starts) == 1, "no worker starts again because of a node that was done"
