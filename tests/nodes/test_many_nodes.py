"""Several agents on one machine: they form a world, grow, keep spares, and end as one."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
from kit.agents import COORDINATES, FAIL, FINISH, IS_SPARE, Agent, c10d, listening_ports, team_of
from kit.launching import Launcher

from aelastic.errors import EXIT_TRY_AGAIN

pytestmark = pytest.mark.usefixtures("warm_stores")

# The first round waits no longer for more nodes than it needs.
AT_ONCE = {"last_call_timeout": 0.1}
# As long as it is seen that nothing happens.
QUIET_S = 0.5


# A world.


@pytest.mark.cold
def test_three_nodes_of_two_workers_are_one_world_and_end_as_one(launch: Launcher) -> None:
    with team_of(launch, c10d(), "3", nproc=2) as team:
        alone = team.start()
        alone.wait_said(COORDINATES)
        alone.signal(signal.SIGTERM)  # while it waits
        assert alone.wait() == -signal.SIGTERM
        # No coordinator is left: the next agents find each other all the same.
        agents = team.start_many(3)
        round_ = team.wait_round(agents)
        assert [start.world_size for start in round_.starts] == [6] * 6
        assert [start.restart for start in round_.starts] == [0] * 6
        assert sorted((s.group_rank, s.local_rank) for s in round_.starts) == [(g, n) for g in range(3) for n in (0, 1)]
        # Where the workers meet, the agent of group rank 0 listens.
        first = next(agent for agent in agents if agent.starts[-1].group_rank == 0)
        master_addr, master_port = round_.starts[0].master_addr, round_.starts[0].master_port
        socket.create_connection((master_addr, master_port), timeout=5).close()
        assert master_port in {port for pid in first.left() for port in listening_ports(pid)}
        team.finish(round_)


# Growing.


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
        agents[2].wait_said("after the fork servers of new nodes have imported")
        team.assert_untouched(two)
        gate.touch()
        three = team.wait_round(agents, after=two)
        assert [len(agent.starts) for agent in agents] == [2, 2, 1]
        assert [agent.starts[-1].rank for agent in agents] == [*ranks, 2], "the others keep theirs"
        assert three.restart == 0, "membership changes are free"
        assert not agents[2].has_said("start cold"), team.story
        team.finish(three)


# On a busy machine a spare needs more than a second to find the next coordinator.
PATIENT = """
from aelastic.rdzv.coordinator import forming

forming.SPARES_TIMEOUT_S = 10.0
"""


def test_a_spare_takes_the_place_of_a_lost_node_again_and_again(launch: Launcher) -> None:
    with team_of(launch, c10d(), "2:4", conf=AT_ONCE, wrapper=PATIENT) as team:
        members = team.start_many(4)
        round_ = team.wait_round(members)
        spare = team.start()
        for number in range(2):
            spare.wait_said(IS_SPARE)
            team.assert_untouched(round_)
            victim = members[number]
            victim.crash()
            members[number] = spare
            expected = [len(agent.starts) + 1 for agent in members]
            round_ = team.wait_round(members, after=round_)
            assert round_.restart == 0
            assert [len(agent.starts) for agent in members] == expected, "never fewer than four, not for a moment"
            spare = team.start()
        spare.wait_said(IS_SPARE)
        team.finish(round_)
        assert spare.process.returncode == 0
        assert not spare.starts


# Ending.


def finish_but_last(agents: list[Agent]) -> Agent:
    """All workers succeed but that of the last rank."""
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
    with team_of(launch, c10d(), "2") as team:
        early = team.start(wrapper=IMPATIENT)
        early.wait_said(COORDINATES)
        late = team.start()
        team.wait_round([early, late])
        os.kill(early.starts[-1].pid, FINISH)
        assert early.wait() == 0
        late.wait_said(COORDINATES)
        os.kill(late.starts[-1].pid, FINISH)
        assert late.wait() == 0
        assert len(late.starts) == 1, "no worker starts again because of a node that was done"


# Waiting in vain.

# In an agent: what is waited for is said well before it is given up.
TELLS_OFTEN = "from aelastic.rdzv.coordinator import leader\nleader.WAITING_TEXT_INTERVAL_S = 1.0\n"


def test_too_few_nodes_learn_which_came_and_exit_with_the_code_for_trying_again(launch: Launcher) -> None:
    with team_of(launch, c10d(), "3", conf={"join_timeout": 8}, wrapper=TELLS_OFTEN) as team:
        agents = team.start_many(2)
        host = socket.gethostname()
        for agent in agents:
            assert agent.wait() == EXIT_TRY_AGAIN
            (line,) = [line for line in agent.stderr.splitlines() if "error" in line]
            assert f"2 of at least 3 nodes joined within 8 s: {host}, {host}" in line
            assert agent.has_said(rf"2 of 3 nodes joined after \d+ s \({host}, {host}\); waiting for 1 more")
            assert not agent.starts
