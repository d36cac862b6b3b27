"""A real training on three agents that loses one and gains one: the demo, run as users run it."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
from kit.launching import Job, Launcher
from kit.waiting import wait_for

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "demo_elastic.py"
LIMIT_S = 270.0  # above the demo's own limit, so that a hanging demo reports where

pytestmark = pytest.mark.timeout(300)


def run_demo(launch: Launcher, *options: str) -> Job:
    job = Job(launch.folder / "demo", [sys.executable, str(DEMO), *options], env=launch.warm.env)
    launch.jobs.append(job)
    return job


@pytest.mark.all
@pytest.mark.parametrize("options, fault", [((), "with SIGKILL"), (("--any-host",), "with SIGSTOP")])
def test_a_training_loses_a_node_in_mid_epoch_and_gains_another_and_reaches_its_accuracy(
    launch: Launcher, options: tuple[str, ...], fault: str
) -> None:
    """With `--any-host`, it is the host of the first of three endpoints, which freezes and dies."""
    demo = run_demo(launch, *options)
    assert demo.wait(LIMIT_S) == 0, demo.story
    assert fault in demo.stdout and "demo: It worked: epochs with 6, 4, 6 workers" in demo.stdout
    done = [int(epoch) for epoch in re.findall(r"epoch (\d+)/40 loss", demo.stdout)]
    assert done == sorted(set(done)) and done[-1] == 40, "an epoch that was saved is not repeated"
    demo.assert_nothing_left()


@pytest.mark.all
def test_ctrl_c_ends_all_nodes_of_the_demo_and_the_etcd_that_it_has_started(launch: Launcher) -> None:
    demo = run_demo(launch, "--backend", "etcd-v3")
    wait_for(f"workers\n{demo.story}", lambda: "worker rank=" in demo.stdout, LIMIT_S)
    demo.signal(signal.SIGINT)
    assert demo.wait() == 130, demo.story
    assert "stopped; nothing is left running" in demo.stdout
    demo.assert_nothing_left()
