"""Runs the examples that recover in place, with frameworks that own the training loop; kills ranks, and compares results.

Each example runs with the command at its top.  In the copy that runs, each rank prints when it has made its first step of
a round, and at its end a digest of its parameters and its optimizer's state, to be compared bit by bit.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from aelastic.agent.run_event_source import HAVE_RETURNED
from kit.launching import LAUNCH_TIMEOUT_S, Job, Launcher
from kit.waiting import wait_for
from kit.workers.examples import add, copy_examples, kill_rank_1, shown_command

RANKS = 4
LIMIT_S = 2 * LAUNCH_TIMEOUT_S  # for a job: a replacement imports its framework while others wait


class InPlaceExample(NamedTuple):
    name: str  # the framework's import name
    script: str
    options: tuple[str, ...]
    killed_at: tuple[int, ...]  # steps of the optimizer, each in its own run


OF_FRAMEWORKS = (
    InPlaceExample("accelerate", "in_place/accelerate_loop.py", ("--steps", "400", "--log-every", "100"), (250,)),
    # An epoch has 64 steps.  At its end, Lightning's own counters may be wrong.
    InPlaceExample("lightning", "in_place/lightning_trainer.py", ("--epochs", "4"), (150, 128)),
    InPlaceExample("transformers", "in_place/transformers_trainer.py", ("--steps", "80", "--log-every", "20"), (50,)),
)
BY_NAME = {each.name: each for each in OF_FRAMEWORKS}

# With the option, DDP adds gradients in the same order in each step, including the first one of a round.
_EXACT = """\
def _be_exact():
    import atexit, hashlib
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.optimizer import register_optimizer_step_post_hook

    optimizers = {}
    new_rounds = []
    make = DistributedDataParallel.__init__

    def make_exact(self, *args, **options):
        make(self, *args, **{**options, "find_unused_parameters": True})
        new_rounds.append(True)

    def keep(optimizer, *_):
        optimizers.update(last=optimizer)
        if new_rounds:
            new_rounds.clear()
            os.write(1, f"rank {os.environ['RANK']} trains in {os.getpid()}\\n".encode())

    def tell():
        if not optimizers:  # a replacement that came when all was done
            return
        optimizer = optimizers["last"]
        digest = hashlib.sha256()
        for group in optimizer.param_groups:
            digest.update(str(group["lr"]).encode())
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                for tensor in [parameter.detach(), *(state[name] for name in sorted(state))]:
                    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        os.write(1, f"ends with {digest.hexdigest()}\\n".encode())

    DistributedDataParallel.__init__ = make_exact
    register_optimizer_step_post_hook(keep)
    atexit.register(tell)


_be_exact()


"""


def start(
    launch: Launcher,
    name: str,
    example: InPlaceExample,
    python: str,
    *,
    options: tuple[str, ...] = (),
    killed_at: int | None = None,
    max_restarts: int | None = None,
    env: dict[str, str] | None = None,
) -> Job:
    """Runs a copy of the example.

    Args:
        name: the name of the folder that is made for it.
        options: options of the script, instead of the example's own.
        killed_at: rank 1 kills itself after this step of its optimizer.
        max_restarts: replaces that of the command.
    """
    folder = launch.folder / name
    copy_examples(folder)
    add(folder / example.script, _EXACT)
    if killed_at is not None:
        kill_rank_1(folder / example.script, killed_at)
    command = shown_command(example.script)
    if max_restarts is not None:
        command[command.index("--max-restarts") + 1] = str(max_restarts)
    job = Job(folder, [python, *command, *(options or example.options)], {"OMP_NUM_THREADS": "1", **(env or {})})
    launch.jobs.append(job)
    return job


def end_of(job: Job, limit_s: float = LIMIT_S) -> str:
    """Waits until the job has succeeded; returns what all ranks printed at their end."""
    assert job.wait(limit_s) == 0, job.story
    ends = set(re.findall(r"^ends with (\w+)$", job.stdout, re.MULTILINE))
    assert len(ends) == 1, job.story
    assert not job.left(), job.left_described()
    return str(ends.pop())


def check_recovers(
    launch: Launcher, example: InPlaceExample, python: str, env: dict[str, str] | None = None
) -> list[Job]:
    """Kills rank 1 in all runs of the example but the first; returns the jobs."""
    undisturbed = start(launch, "undisturbed", example, python, env=env)
    end, jobs = end_of(undisturbed), [undisturbed]
    for step in example.killed_at:
        killed = start(launch, f"killed-at-{step}", example, python, killed_at=step, env=env)
        assert end_of(killed) == end, killed.story
        assert re.search(r"aelastic: W rank 1 failed on .*SIGKILL", killed.stderr), killed.story
        assert "round 2 continues in place: 3 of 4 workers kept, state of step " in killed.stderr, killed.story
        assert len(pids(killed)) == 2 * RANKS and len(set(pids(killed))) == RANKS + 1, killed.story
        jobs.append(killed)
    return jobs


def pids(job: Job) -> list[tuple[int, int]]:
    """Rank and process of each call of the decorated function."""
    return [(int(rank), int(pid)) for rank, pid in re.findall(r"rank (\d) is process (\d+)", job.stdout)]


@dataclass
class Kills:
    """The results of a number of kills."""

    kills: int = 0
    doubled: int = 0  # a second rank was killed within 60 ms
    rounds: int = 0
    replaced: int = 0  # new processes; if there are more of them than kills, survivors lost theirs
    at_end: int = 0  # kills after the functions had returned, so that all ranks restarted
    problems: list[str] = field(default_factory=list)  # lines of the log

    def __str__(self) -> str:
        return (
            f"{self.kills} kills ({self.doubled} of them second ones), {self.rounds} rounds in place, "
            f"{self.replaced} processes replaced, {self.at_end} kills at the end, problems: {self.problems}"
        )


_PROBLEM = re.compile(r"no rank has a whole state|not continuing in place.*|restarting all workers|did not leave.*")


def kill_often(job: Job, kills: Kills, wanted: int, seed: int, longest_s: float = 1.0) -> None:
    """Kills ranks at random moments, until there were `wanted` kills or the job has ended; doubles a fifth of them."""
    chance = random.Random(seed)
    killed: set[int] = set()
    seen = 0
    while kills.kills < wanted:
        current = _when_all_train(job, seen, killed)
        time.sleep(chance.uniform(0, longest_s))
        if job.process.poll() is not None:
            break
        first, second = chance.sample(range(RANKS), 2)
        _kill(current[first], killed, kills)
        if chance.random() < 0.25:  # a fifth of all kills are second ones
            time.sleep(chance.uniform(0, 0.06))
            _kill(current[second], killed, kills)
            kills.doubled += 1
        seen = len(_training(job))


def note(job: Job, kills: Kills) -> None:
    """Adds the results from the log of a job that has ended."""
    kills.rounds += job.stderr.count(" continues in place: ")
    kills.replaced += len({pid for _, pid in pids(job)}) - RANKS
    lines = [line for line in job.stderr.splitlines() if _PROBLEM.search(line)]
    at_end = [line for line in lines if HAVE_RETURNED in line]  # the kill came after the last step
    kills.at_end += len(at_end)
    kills.problems += [line for line in lines if line not in at_end]


def _training(job: Job) -> list[tuple[int, int]]:
    """Rank and process of each first step of a round."""
    return [(int(rank), int(pid)) for rank, pid in re.findall(r"rank (\d) trains in (\d+)", job.stdout)]


def _when_all_train(job: Job, seen: int, killed: set[int]) -> dict[int, int]:
    """The processes of all ranks, once each has made a step since the last kill; may be incomplete if the job has ended."""

    def training() -> dict[int, int]:
        return {rank: pid for rank, pid in _training(job)[seen:] if pid not in killed}

    def have_begun() -> bool:
        return len(training()) == RANKS or job.process.poll() is not None

    wait_for(lambda: f"all ranks train\n{job.story}", have_begun, LIMIT_S)
    return training()


def _kill(pid: int, killed: set[int], kills: Kills) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has finished
        return
    killed.add(pid)
    kills.kills += 1
