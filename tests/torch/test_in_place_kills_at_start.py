"""A rank is killed repeatedly while the others wait for it in `init_process_group`.

They have no connection to it that could be cut, so a survivor could stay there until the grace is over, and lose its
state.  Every second round is killed in one of its first steps instead: after four rounds without the state all restart.
"""

from __future__ import annotations

import sys

import pytest
from kit.effort import KILLS_AT_START
from kit.launching import LAUNCH_TIMEOUT_S, Launcher
from kit.workers.in_place_training import RANKS, course, script, start

STEPS = 3 * KILLS_AT_START
LIMIT_S = LAUNCH_TIMEOUT_S + 3 * KILLS_AT_START
CASE = f"""
KILLS = {2 * KILLS_AT_START}
LONGEST_S = 0.04  # that ranks take to make their group


def victim():
    # Not rank 0, whose running statistics of BatchNorm are those of the job.
    return random.Random(restarts()).randrange(1, {RANKS})


def form(round):
    say("forms", restarts(), os.environ["RANK"], os.getpid())
    is_victim = int(os.environ["RANK"]) == victim()
    if restarts() < KILLS and restarts() % 2 and is_victim:
        die_after(random.uniform(0, LONGEST_S))
        dist.init_process_group("gloo")
        time.sleep(100)  # it took less
    dist.init_process_group("gloo")


def steps(round, start):
    for step in round.steps(start, STEPS):
        if restarts() < KILLS and not restarts() % 2 and step == start + 1:
            dist.barrier()  # otherwise rank 0 may be a step behind, and gets the statistics of another rank
            if dist.get_rank() == victim():
                die()
        yield step


def on_batch(step):
    pass
"""


@pytest.mark.all
@pytest.mark.ci
@pytest.mark.timeout(2 * LIMIT_S)
def test_kills_while_groups_are_made_cost_nobody_else_a_process_or_a_step(launch: Launcher) -> None:
    undisturbed = course(
        start(launch, script(CASE.replace("KILLS = ", "KILLS = 0 and "), STEPS), name="undisturbed"), LIMIT_S
    )
    options = "--preload=torch,torch._dynamo,aelastic.training.rounds", f"--max-restarts={2 * KILLS_AT_START}"
    # The agent's own fork server forks the workers: a process in between would replace the exit code.
    job = start(launch, script(CASE, STEPS), *options, env={"PYTHON_EXEC": sys.executable})
    found = course(job, LIMIT_S)
    processes = {line.split()[3] for line in job.lines if line.startswith("forms ")}
    assert found.restarts == 2 * KILLS_AT_START, job.story
    assert len(processes) == RANKS + found.restarts, job.story
    assert found.end == undisturbed.end, job.story
