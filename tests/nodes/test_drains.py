"""Nodes that are about to go: all ranks of the job save at one step, the node leaves in order, the others go on.

Whatever fails meanwhile: `tests/simulation/test_simulated_drains.py`.
"""

from __future__ import annotations

import signal
import time

import pytest
from kit.agents import Agent, Round, Team, c10d, team_of
from kit.launching import Launcher, alive, wait_for

from aelastic.errors import EXIT_TRY_AGAIN

pytestmark = pytest.mark.usefixtures("warm_stores")

DRAIN = signal.SIGHUP
OPTIONS = "--max-restarts", "0", "--on-signal", "HUP=drain:20"
ENV = {"STAR_TICK_S": "0.02", "STAR_SAVES": "1"}


def saves(team: Team) -> list[list[str]]:
    return [line.split()[1:] for agent in team.agents for line in agent.lines if line.startswith("saved ")]


def wait_steps(team: Team, round_: Round) -> None:
    """Its ranks have taken some steps together."""

    def have() -> bool:
        lines = [(agent.folder / "progress") for agent in team.live]
        return all(path.exists() and path.read_text().count("\n") > 5 for path in lines)

    wait_for(lambda: f"steps of all\n{team.story}", have)
    assert all(alive(pid) for pid in round_.pids)


def drained(team: Team, agent: Agent) -> float:
    """Has a node leave; gives how long that took."""
    began = time.monotonic()
    agent.signal(DRAIN)
    assert agent.wait() == EXIT_TRY_AGAIN, team.story
    return time.monotonic() - began


def assert_one_call(team: Team, ranks: int) -> None:
    told = saves(team)
    assert len({(fence, step) for fence, _, step in told}) == 1, team.story
    assert sorted(int(rank) for _, rank, _ in told) == [*range(ranks)], team.story
    assert not any("SIGKILL" in agent.stderr or "killed" in agent.stderr for agent in team.agents), team.story


def test_all_ranks_save_at_one_step_and_the_others_go_on_for_free(launch: Launcher) -> None:
    with team_of(launch, c10d(), "1:3", conf={"last_call_timeout": 1}, options=OPTIONS, env=ENV, nproc=2) as team:
        first, second, third = team.start_many(3)
        round_ = team.wait_round([first, second, third])
        wait_steps(team, round_)
        took_s = drained(team, second)
        assert_one_call(team, 6)
        after = team.wait_round([first, third], round_)
        assert took_s < 15.0, "it does not wait for the deadline"
        assert after.starts[0].restart == 0, "no restart is charged"
        for agent in (first, third):
            assert "all ranks have saved" in agent.stderr and "of notice.due" in agent.stderr, agent.stderr


def test_the_coordinators_node_leaves_ranks_end_once_they_have_saved_and_another_takes_its_place(
    launch: Launcher,
) -> None:
    ends, options = {**ENV, "STAR_SAVES": "exit"}, (*OPTIONS, "--drain-wait", "60")
    with team_of(launch, c10d(), "2:2", conf={}, options=options, env=ends, nproc=2) as team:
        agents = team.start_many(2)
        round_ = team.wait_round(agents)
        wait_steps(team, round_)
        leaving = team.coordinator
        drained(team, leaving)
        assert_one_call(team, 4)
        (stays,) = (agent for agent in agents if agent is not leaving)
        assert team.wait_round([stays, team.start()], round_).restart == 0


def test_where_too_few_are_left_all_end_to_be_tried_again(launch: Launcher) -> None:
    with team_of(launch, c10d(), "3:3", conf={}, options=OPTIONS, env=ENV) as team:
        agents = team.start_many(3)
        wait_steps(team, team.wait_round(agents))
        drained(team, agents[1])
        for agent in (agents[0], agents[2]):
            assert agent.wait() == EXIT_TRY_AGAIN, team.story
            assert "2 of at least 3 nodes are left" in agent.stderr
        assert_one_call(team, 3)
