"""Workers that fail, and nodes that restart or sleep; `test_chaos.py` has nodes that die or are cut off."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from kit.agents import COORDINATES, FAIL, IS_SPARE, LATE, WORKER, Meeting, c10d, team_of
from kit.launching import Launcher, alive
from kit.servers.stores import external_store
from kit.waiting import wait_for

pytestmark = pytest.mark.usefixtures("warm_stores")


# Workers.


def test_a_crash_on_any_node_restarts_all_as_one_until_the_budget_ends_the_job(launch: Launcher) -> None:
    """In the end, every agent blames the killed worker and exits with its signal; the others fail because of it."""
    with team_of(launch, c10d(), "3") as team:
        agents = team.start_many(3)
        round_ = team.wait_round(agents)
        rank_of = {agent: agent.starts[-1].rank for agent in agents}
        for restart, rank in enumerate(range(3), start=1):
            round_.send_signal(FAIL, rank)
            round_ = team.wait_round(agents, after=round_)
            assert round_.restart == restart
            assert {agent: agent.starts[-1].rank for agent in agents} == rank_of
        round_.send_signal(signal.SIGKILL, 1)
        codes = [agent.wait() for agent in agents]
        assert codes == [128 + signal.SIGKILL] * 3, team.story
        for agent in agents:
            assert re.search(r"Root Cause[^=]*\n *rank +: 1 ", agent.stderr), team.story
            assert len(agent.starts) == 4


# Agents.


@pytest.mark.all
def test_an_agent_that_comes_back_under_its_node_rank_replaces_its_old_self_at_once(launch: Launcher) -> None:
    with team_of(launch, c10d(), "3", conf={"settle_time": 0.1}) as team:
        agents = [team.start("--node-rank", str(rank)) for rank in range(3)]
        three = team.wait_round(agents)
        old = next(agent for agent in agents[1:] if agent is not team.coordinator)
        rank = agents.index(old)
        old.stop()
        agents[rank] = team.start("--node-rank", str(rank))
        again = team.wait_round(agents, after=three)
        assert agents[rank].starts[-1].rank == rank
        old.signal(signal.SIGCONT)
        assert old.wait() == 1
        assert f"another agent joined as node rank {rank}" in old.stderr
        old.assert_nothing_left()
        team.assert_untouched(again)
        team.finish(again)


# The leader, while the endpoint is up.


@pytest.mark.all
def test_a_round_continues_untouched_if_its_coordinator_is_a_spare_that_sleeps_and_comes_back(launch: Launcher) -> None:
    with (
        external_store() as endpoint,
        team_of(launch, Meeting("c10d", endpoint), "2", conf={"lease": 5, "settle_time": 0.1}) as team,
    ):
        sleeper = team.start(wrapper=LATE)
        sleeper.wait_logged(COORDINATES)
        agents = team.start_many(2)
        round_ = team.wait_round(agents)
        sleeper.go()
        sleeper.wait_logged(IS_SPARE)
        sleeper.stop()
        wait_for("another coordinates", lambda: any(agent.has_logged(COORDINATES) for agent in agents))
        sleeper.signal(signal.SIGCONT)
        sleeper.wait_logged("no longer leads the job|lost all other nodes at once")  # depending on which it reads first
        sleeper.wait_logged(IS_SPARE, 2)
        assert team.coordinator is not sleeper
        team.assert_untouched(round_)
        # The successor knows the round: a failure restarts both workers.
        os.kill(agents[0].starts[-1].pid, FAIL)
        again = team.wait_round(agents, after=round_)
        assert again.restart == 1
        assert [len(agent.starts) for agent in agents] == [2, 2]
        agents[0].crash()
        team.finish(team.wait_round([sleeper, agents[1]], after=again))


# For a while it does not notice that peers are gone, like a worker that computes or writes.
DEAF = WORKER.replace("begin_talk()\n", "")
assert DEAF != WORKER


def test_workers_of_an_agent_that_stands_still_are_killed_once_another_round_may_run_and_it_comes_back_for_free(
    launch: Launcher,
) -> None:
    with team_of(launch, c10d(), "1:2", conf={"lease": 2, "settle_time": 0.1}, worker=DEAF) as team:
        agents = team.start_many(2)
        both = team.wait_round(agents)
        frozen = team.coordinator
        other = next(agent for agent in agents if agent is not frozen)
        frozen.stop()
        alone = team.wait_round([other], after=both)
        wait_for("its worker is gone", lambda: not alive(frozen.starts[-1].pid))
        assert re.search(
            r"aelastic: agent \d+ has given no sign of life for 3 s: its workers are killed", frozen.stderr
        )
        frozen.signal(signal.SIGCONT)
        again = team.wait_round(agents, after=alone)
        assert again.restart == 0, "nothing has failed"
        assert "killed by signal" not in frozen.stderr, team.story
        team.finish(again)


BLOCKED = """
import ctypes

signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if restart:
    os._exit(0)
if rank == 0:
    wait_for(os.environ["GO"])
    os._exit(3)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(128)
libc.pthread_mutex_init(lock, None)
libc.pthread_mutex_lock(lock)
say("blocked")
libc.pthread_mutex_lock(lock)  # no signal ends it, and no Python handler runs
"""


def test_a_blocked_worker_of_another_node_does_not_hold_a_restart_for_as_long_as_a_stop_may_take(
    launch: Launcher, tmp_path: Path
) -> None:
    """That limit is longer than this test."""
    options = ("--max-restarts", "3", "--shutdown-timeout", "120")
    with team_of(launch, c10d(), "2", worker=BLOCKED, options=options, env={"GO": str(tmp_path / "go")}) as team:
        agents = team.start_many(2)
        wait_for("rank 1 is blocked", lambda: any("blocked" in agent.lines for agent in agents))
        (tmp_path / "go").touch()
        assert [agent.wait() for agent in agents] == [0, 0], team.story
        stderrs = [
            agent.stderr for agent in agents if agent.has_logged("rank 1 neither wrote nor used the CPU for 2 s")
        ]
        assert len(stderrs) == 1, team.story
