"""Jobs in other environments: packages in training images, the oldest supported versions, interpreters with hooks."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import pytest
from kit.agents import FAIL, FINISH, Meeting, Team
from kit.crowded import ENVIRONMENTS, Environment
from kit.launching import LAUNCH_TIMEOUT_S, Launcher
from kit.ports import quiet_port
from kit.waiting import wait_for
from kit.workers.in_place_examples import LIMIT_S, OF_FRAMEWORKS, InPlaceExample, check_recovers

pytestmark = [pytest.mark.all, pytest.mark.cold]

HEALTH = "TORCHELASTIC_HEALTH_CHECK_PORT"
ENDPOINTS = ("c10d", "three endpoints")
# CI's environment: the versions that a change is most likely to break, and small to install.
IN_CI = "oldest"


def marks(environment: Environment, endpoint: str = "c10d") -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.ci,) if (environment.name, endpoint) == (IN_CI, "c10d") else ()


@pytest.fixture
def crowded(launch: Launcher, environment: Environment, tmp_path: Path) -> dict[str, str]:
    """Runs agents in the environment; returns its variables."""
    launch.python = launch.store_python = environment.python
    folder = tmp_path / "environment"
    folder.mkdir()
    return environment.variables(folder)


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=LAUNCH_TIMEOUT_S) as answer:
        return str(answer.read(), "utf-8")


@pytest.mark.parametrize(
    "environment, endpoint",
    [
        pytest.param(environment, endpoint, id=f"{environment.name}-{endpoint}", marks=marks(environment, endpoint))
        for environment in ENVIRONMENTS
        for endpoint in ENDPOINTS
    ],
)
def test_two_nodes_form_and_live_through_the_end_of_a_worker_and_of_a_node(
    launch: Launcher, crowded: dict[str, str], endpoint: str
) -> None:
    port, health = quiet_port(), quiet_port()
    hosts = ["127.0.0.1"] if endpoint == "c10d" else ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    env = {**crowded, HEALTH: str(health)}
    endpoints = ",".join(f"{host}:{port}" for host in hosts)
    team = Team(launch, Meeting("c10d", endpoints), "2:3", {"lease": 3, "last_call_timeout": 0.5}, env=env)
    agents = [team.start()]
    del env[HEALTH]  # only one agent per host serves it
    agents += team.start_many(2)
    round_ = team.wait_round(agents)
    assert '"world_size": 3' in get(health, "/status").replace('":3', '": 3')
    assert "aelastic_" in get(health, "/metrics")
    round_.send_signal(FAIL, 1)
    round_ = team.wait_round(agents, round_)
    assert round_.restart == 1, team.story
    victim = next(agent for agent in agents[1:] if agent is not team.coordinator)
    victim.crash()
    left = [agent for agent in agents if agent is not victim]
    round_ = team.wait_round(left, round_)
    assert round_.restart == 1, team.story
    round_.send_signal(FINISH)
    assert [agent.wait() for agent in left] == [0, 0], team.story


@pytest.mark.parametrize("environment", [pytest.param(each, id=each.name, marks=marks(each)) for each in ENVIRONMENTS])
def test_warm_workers_start_again(launch: Launcher, crowded: dict[str, str]) -> None:
    worker = """
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    say("start", restart, "colorsys" in sys.modules)
    if restart == "0":
        raise SystemExit(3)
    """
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--preload", "colorsys")
    job = launch(worker, *options, env=crowded)
    assert job.wait() == 0, job.story
    starts = [line for line in job.lines if line.startswith("start")]
    assert starts[-2:] == ["start 1 True"] * 2, job.story
    # the first one to fail may end the other before that has printed anything
    assert set(starts[:-2]) == {"start 0 True"}, job.story
    assert "start cold" not in job.stderr, job.story
    job.assert_nothing_left()
    wait_for("the folder is empty", lambda: not os.listdir(job.tmp))


WITH_FRAMEWORKS = "image"  # it has the packages of training images


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize(
    "environment", [each for each in ENVIRONMENTS if each.name == WITH_FRAMEWORKS], ids=[WITH_FRAMEWORKS]
)
@pytest.mark.parametrize("example", OF_FRAMEWORKS, ids=lambda example: example.name)
def test_a_training_of_a_framework_recovers_in_place(
    launch: Launcher, environment: Environment, crowded: dict[str, str], example: InPlaceExample
) -> None:
    check_recovers(launch, example, environment.python, crowded)
