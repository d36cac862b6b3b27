"""Verbs in a job of several nodes: from any of them, about each, whatever becomes of the coordinator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.agents import Agent, Team, c10d, team_of
from kit.launching import Launcher, wait_for
from kit.verbs import Said, told, verb

from aelastic.cli.verbs import asking as asking_agents
from aelastic.errors import EXIT_TRY_AGAIN

pytestmark = pytest.mark.usefixtures("warm_stores")

ENV = {"STAR_TICK_S": "0.02", "STAR_SAVES": "1"}
OPTIONS = "--max-restarts", "0"
# What one answer may take on two busy cores.
ANSWER_S = 3.0
# In an agent: on a busy machine the next coordinator may need more than a few seconds.
PATIENT = "from aelastic.agent.requests import enquiries\nenquiries.ANSWER_S = 25.0\n"


@contextmanager
def trio(
    launch: Launcher, *options: str, nnodes: str = "2:3", nodes: int = 3, wrapper: str = ""
) -> Iterator[tuple[Team, list[Agent]]]:
    """Three nodes of a job, and of each the folder where it can be spoken to."""
    more: dict[str, Any] = {"conf": {"last_call_timeout": 1}, "options": (*OPTIONS, *options), "wrapper": wrapper}
    with team_of(launch, c10d(), nnodes, **more, env=ENV, nproc=2) as team:
        agents = team.start_many(nodes)
        team.wait_round(agents)
        yield team, agents


def node_id(agent: Agent) -> str:
    """As the others know it."""
    found = [each for each in told(agent.folder, "status")["nodes"] if each["run"]["pid"] == agent.pid]
    return str(found[0]["run"]["node_id"])


def phases(agent: Agent) -> list[str]:
    return sorted(each["phase"] for each in told(agent.folder, "status")["nodes"])


def test_each_node_tells_of_all_and_asks_for_any(launch: Launcher) -> None:
    with trio(launch) as (team, agents):
        for agent in agents:
            wait_for("all run", lambda agent=agent: phases(agent) == ["running"] * 3)  # type: ignore[misc]
            said = verb(agent.folder, "status")
            assert said.code == 0 and said.out.count(" running  ") == 4 and said.out.count(" * ") == 1, said
            stacks = told(agent.folder, "stacks")["stacks"]
            assert sorted(stacks, key=int) == [*map(str, range(6))], stacks.keys()
            assert logs_of(agent).code == 0
            logs = logs_of(agent, *agents)
            assert logs.code == 1 and "only where the job has a secret (--secret-file)" in logs.err, logs
        # A restart that is asked for on a node that does not coordinate.
        asker = next(agent for agent in agents if agent is not team.coordinator)
        round_ = team.wait_round(agents)
        said = verb(asker.folder, "restart", "--at-save", "--wait")
        assert said.code == 0 and "all ranks have saved" in said.out, team.story
        round_ = team.wait_round(agents, after=round_)
        assert round_.restart == 0, "it is not charged"
        # One node has another leave.
        leaver = next(agent for agent in agents if agent is not asker)
        said = verb(asker.folder, "drain", node_id(leaver), "--deadline", "20", "--wait")
        assert said.code == 0 and leaver.wait() == EXIT_TRY_AGAIN, team.story
        rest = [agent for agent in agents if agent is not leaver]
        team.wait_round(rest, after=round_)
        status = told(asker.folder, "status")
        assert len(status["nodes"]) == 2 and not status["silent"], (status["silent"], team.story)
        assert verb(asker.folder, "stop", "--at-save").code == 0
        assert [agent.wait() for agent in rest] == [EXIT_TRY_AGAIN] * 2, team.story


def logs_of(agent: Agent, *agents: Agent) -> Said:
    """What an agent shows of a worker of the first of some nodes that is not its own; of none: of its own."""
    other = next((other for other in agents if other is not agent), agent)
    return verb(agent.folder, "logs", str(other.starts[0].rank), "--stderr")


def test_a_node_may_refuse_what_is_asked_for_on_others(launch: Launcher) -> None:
    with trio(launch, "--no-remote-verbs", nnodes="2", nodes=2) as (team, agents):
        other = next(agent for agent in agents if agent is not team.coordinator)
        said = verb(other.folder, "restart")
        assert said.code == 1 and "refuses it to others (--no-remote-verbs)" in said.err
        status = told(other.folder, "status")
        assert [len(status[kind]) for kind in ("nodes", "silent", "refused")] == [1, 0, 1]
        assert "  closed " in verb(other.folder, "status").out
        assert verb(team.coordinator.folder, "restart").code == 0, "it may ask for it itself"


def test_what_is_asked_for_while_the_coordinator_is_lost_is_answered_by_the_next(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking_agents, "ANSWER_S", 30.0)
    with trio(launch, wrapper=PATIENT) as (team, agents):
        coordinator = team.coordinator
        asker, other = (agent for agent in agents if agent is not coordinator)
        wait_for("all run", lambda: phases(asker) == ["running"] * 3)
        round_ = team.wait_round(agents)
        coordinator.crash()
        answers = dict[str, Said]()
        asking = [
            threading.Thread(target=lambda *argv: answers.update({argv[0]: verb(asker.folder, *argv)}), args=argv)
            for argv in (("status",), ("restart", "--reason", "now"))
        ]
        for each in asking:
            each.start()
        for each in asking:
            each.join()
        assert {name: said.code for name, said in answers.items()} == {"status": 0, "restart": 0}, (answers, team.story)
        team.wait_round([asker, other], after=round_)


def test_a_new_node_waits_until_all_have_saved_and_with_a_secret_logs_of_any_are_shown(
    launch: Launcher, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of the tests, in one line")
    with trio(launch, "--admit", "saved:20", "--secret-file", str(secret), nodes=2) as (team, agents):
        for agent in agents:
            assert logs_of(agent).code == logs_of(agent, *agents).code == 0
        round_ = team.wait_round(agents)
        for agent in agents:
            wait_for("steps", lambda agent=agent: _steps(agent) > 3)  # type: ignore[misc]
        late = team.start()
        team.wait_round([*agents, late], after=round_)
        saves = [line.split() for agent in agents for line in agent.lines if line.startswith("saved ")]
        assert len(saves) == 4 and len({(fence, step) for _, fence, _, step in saves}) == 1, team.story
        assert any("joined; all ranks have saved" in agent.stderr for agent in agents), team.story


def _steps(agent: Any) -> int:
    path = agent.folder / "progress"
    return path.read_text().count("\n") if path.exists() else 0
