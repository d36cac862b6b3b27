"""Commands in a job of several nodes, from any node, about any node; and planned departures."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.agents import Agent, Round, Team, c10d, team_of
from kit.launching import Launcher, alive
from kit.verbs import Output, json_of, verb
from kit.waiting import DEADLINE_S, wait_for

from aelastic.base.host import control_sockets
from aelastic.cli.verbs import jobs
from aelastic.errors import EXIT_TRY_AGAIN

pytestmark = pytest.mark.usefixtures("warm_stores")

ENV = {"STAR_TICK_S": "0.02", "STAR_SAVES": "1"}
OPTIONS = "--max-restarts", "0"
# A node must leave by this deadline, which is longer than any test waits.
DRAIN_S = 120
# In an agent: on a busy machine others may need more than a few seconds to answer.
PATIENT = "from aelastic.agent.requests import queries\nqueries.ANSWER_S = 25.0\n"


@pytest.fixture(autouse=True)
def patient_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ANSWER_S", 30.0)


@contextmanager
def trio(launch: Launcher, *options: str, nnodes: str = "2:3", nodes: int = 3) -> Iterator[tuple[Team, list[Agent]]]:
    """A job with three nodes, and the folder of each node's control socket."""
    more: dict[str, Any] = {
        "conf": {"last_call_timeout": 1, "settle_time": 0.1},
        "options": (*OPTIONS, *options),
        "wrapper": PATIENT,
    }
    with team_of(launch, c10d(), nnodes, **more, env=ENV, nproc=2) as team:
        agents = team.start_many(nodes)
        team.wait_round(agents)
        yield team, agents


def node_id(agent: Agent) -> str:
    """Its id, as the others know it."""
    found = [each for each in json_of(agent.folder, "status")["nodes"] if each["run"]["pid"] == agent.pid]
    return str(found[0]["run"]["node_id"])


def phases(agent: Agent) -> list[str]:
    return sorted(each["phase"] for each in json_of(agent.folder, "status")["nodes"])


def test_each_node_tells_of_all_and_asks_for_any(launch: Launcher) -> None:
    with trio(launch) as (team, agents):
        for agent in agents:
            wait_for("all run", lambda agent=agent: phases(agent) == ["running"] * 3)  # type: ignore[misc]
            output = verb(agent.folder, "status")
            assert output.code == 0 and output.out.count(" running  ") == 4 and output.out.count(" * ") == 1, output
            stacks = json_of(agent.folder, "stacks")["stacks"]
            assert sorted(stacks, key=int) == [*map(str, range(6))], stacks.keys()
            assert logs_of(agent).code == 0
            logs = logs_of(agent, *agents)
            assert logs.code == 1 and "only if the job has a secret (--secret-file)" in logs.err, logs
            assert_refused_undisturbed(team, agent)
        # A restart requested on a node that does not lead.
        asker = next(agent for agent in agents if agent is not team.coordinator)
        round_ = team.wait_round(agents)
        output = verb(asker.folder, "restart", "--at-save", "--wait")
        assert output.code == 0 and "all ranks have saved" in output.out, team.story
        round_ = team.wait_round(agents, after=round_)
        assert round_.restart == 0, "it is not charged"
        # One node makes another leave.
        leaver = next(agent for agent in agents if agent is not asker)
        output = verb(asker.folder, "drain", node_id(leaver), "--deadline", str(DRAIN_S), "--wait")
        assert output.code == 0 and leaver.wait() == EXIT_TRY_AGAIN, team.story
        rest = [agent for agent in agents if agent is not leaver]
        assert team.wait_round(rest, after=round_).restart == 0, "nor is this one"
        assert all("of notice.due" in agent.stderr for agent in rest), team.story
        # The leader may have left and been replaced: a node that has not found the new one yet is missing.
        wait_for("both nodes answer", lambda: [len(json_of(asker.folder, "status")["nodes"])] == [2])
        status = json_of(asker.folder, "status")
        assert not status["silent"] and status["missing"] == 0, (status, team.story)
        assert verb(asker.folder, "stop", "--at-save").code == 0
        assert [agent.wait() for agent in rest] == [EXIT_TRY_AGAIN] * 2, team.story


UNREADABLE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("node", {"verb": "drain", "node": "x" * 300}),
    ("node", {"verb": "cordon", "node": "x" * 300}),
    ("deadline_s", {"verb": "drain", "deadline_s": 1e10}),
)


def assert_refused_undisturbed(team: Team, agent: Agent) -> None:
    """A request that no leader reads is answered, and does not affect the node."""
    folder, starts = control_sockets.folder_of({"XDG_RUNTIME_DIR": str(agent.folder)}), len(agent.starts)
    (name,) = control_sockets.names_in(folder)
    for field, asked in UNREADABLE:
        conn = control_sockets.connect(folder, name, DEADLINE_S)
        assert conn is not None
        with conn, conn.makefile("rb") as lines:
            conn.sendall(json.dumps(asked).encode() + b"\n")
            answer = json.loads(lines.readline())
        assert answer["code"] == "refused" and answer["text"].startswith(f"{field} is "), answer
    assert phases(agent) == ["running"] * 3 and len(agent.starts) == starts, team.story


def logs_of(agent: Agent, *agents: Agent) -> Output:
    """Output of a worker of the first node in `agents`, requested at another agent; without `agents`, of its own."""
    other = next((other for other in agents if other is not agent), agent)
    return verb(agent.folder, "logs", str(other.starts[0].rank), "--stderr")


def test_a_node_may_refuse_what_is_requested_on_others(launch: Launcher) -> None:
    with trio(launch, "--no-remote-requests", nnodes="2", nodes=2) as (team, agents):
        other = next(agent for agent in agents if agent is not team.coordinator)
        output = verb(other.folder, "restart")
        assert output.code == 1 and "refuses requests from other nodes (--no-remote-requests)" in output.err
        status = json_of(other.folder, "status")
        assert [len(status[kind]) for kind in ("nodes", "silent", "refused")] == [1, 0, 1]
        assert "  closed " in verb(other.folder, "status").out
        assert verb(team.coordinator.folder, "restart").code == 0, "it may request it itself"


@pytest.mark.all
def test_what_is_requested_while_the_coordinator_is_lost_is_answered_by_the_next(launch: Launcher) -> None:
    with trio(launch) as (team, agents):
        coordinator = team.coordinator
        asker, other = (agent for agent in agents if agent is not coordinator)
        wait_for("all run", lambda: phases(asker) == ["running"] * 3)
        round_ = team.wait_round(agents)
        coordinator.crash()
        answers = dict[str, Output]()
        asking = [
            threading.Thread(target=lambda *argv: answers.update({argv[0]: verb(asker.folder, *argv)}), args=argv)
            for argv in (("status",), ("restart", "--reason", "now"))
        ]
        for each in asking:
            each.start()
        for each in asking:
            each.join()
        assert {name: answer.code for name, answer in answers.items()} == {"status": 0, "restart": 0}, (
            answers,
            team.story,
        )
        team.wait_round([asker, other], after=round_)


def test_a_new_node_waits_until_all_have_saved_and_with_a_secret_logs_of_any_are_shown(
    launch: Launcher, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of the tests, in one line")
    with trio(launch, "--admit", f"saved:{DRAIN_S}", "--secret-file", str(secret), nodes=2) as (team, agents):
        for agent in agents:
            assert logs_of(agent).code == logs_of(agent, *agents).code == 0
        round_ = team.wait_round(agents)
        wait_steps(team, round_)
        late = team.start()
        team.wait_round([*agents, late], after=round_)
        assert_one_call(team, 4)
        assert any("joined; all ranks have saved" in agent.stderr for agent in agents), team.story


# Interruption notices of a host, here `HUP`.  `tests/simulation/test_simulated_drains.py` covers failures meanwhile.

DRAINS = (*OPTIONS, "--on-signal", f"HUP=drain:{DRAIN_S}")


def wait_steps(team: Team, round_: Round) -> None:
    """Waits until its ranks have taken some steps together."""

    def have() -> bool:
        lines = [(agent.folder / "progress") for agent in team.live]
        return all(path.exists() and path.read_text().count("\n") > 5 for path in lines)

    wait_for(lambda: f"steps of all\n{team.story}", have)
    assert all(alive(pid) for pid in round_.pids)


def drained(team: Team, agent: Agent) -> None:
    """Drains a node."""
    agent.signal(signal.SIGHUP)
    assert agent.wait() == EXIT_TRY_AGAIN, team.story


def assert_one_call(team: Team, ranks: int) -> None:
    """All ranks have saved once, at the same step, and none was killed."""
    json_of = [line.split()[1:] for agent in team.agents for line in agent.lines if line.startswith("saved ")]
    assert len({(fence, step) for fence, _, step in json_of}) == 1, team.story
    assert sorted(int(rank) for _, rank, _ in json_of) == [*range(ranks)], team.story
    assert not any("SIGKILL" in agent.stderr or "killed" in agent.stderr for agent in team.agents), team.story


@pytest.mark.all
def test_the_coordinators_node_leaves_ranks_end_once_they_have_saved_and_another_takes_its_place(
    launch: Launcher,
) -> None:
    ends, options = {**ENV, "STAR_SAVES": "exit"}, (*DRAINS, "--drain-wait", "60")
    with team_of(launch, c10d(), "2:2", conf={}, options=options, env=ends, nproc=2) as team:
        agents = team.start_many(2)
        round_ = team.wait_round(agents)
        wait_steps(team, round_)
        leaving = team.coordinator
        drained(team, leaving)
        assert_one_call(team, 4)
        (stays,) = (agent for agent in agents if agent is not leaving)
        assert team.wait_round([stays, team.start()], round_).restart == 0


@pytest.mark.all
def test_where_too_few_are_left_all_end_to_be_tried_again(launch: Launcher) -> None:
    with team_of(launch, c10d(), "3:3", conf={}, options=DRAINS, env=ENV) as team:
        agents = team.start_many(3)
        wait_steps(team, team.wait_round(agents))
        drained(team, agents[1])
        for agent in (agents[0], agents[2]):
            assert agent.wait() == EXIT_TRY_AGAIN, team.story
            assert "2 of at least 3 nodes are left" in agent.stderr
        assert_one_call(team, 3)
