"""Recovery in place, the worker's side: real ranks with gloo, a scripted agent, and deaths at bad moments.

If runs with and without a death print the same last line, digit by digit, the state was neither lost nor wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.in_place_agent import ALARM, InPlaceAgent, Story
from kit.warm.interpreters import Warm

STEPS = 12

# `die(moment)` ends rank 1 in the first round, at step 5, if the test names that moment.
SCRIPT = (
    ALARM
    + """
import os, sys, threading
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from aelastic import in_place
from aelastic.training import Late, Value

STEPS, MOMENT = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
late, seen = Late(), Value()


def kill():
    os.kill(os.getpid(), 9)


@in_place
def train(round):
    first, rank = round.number == 1, int(os.environ["RANK"])

    def die(moment):
        if moment == MOMENT and first and rank == 1:
            kill()

    if MOMENT == "init" and 1 < round.number < 6 and rank == 1 + round.number % 2:
        threading.Timer(0.003 * round.number, kill).start()
    dist.init_process_group("gloo")
    if MOMENT == "share" and 1 < round.number < 4 and rank == 2:
        kill()
    if MOMENT == "wrapped before":
        DistributedDataParallel(model)
    start = round.share(model, optimizer, late, seen)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    round.attach(late, schedule)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    group = dist.new_group([0, 2]) if MOMENT == "subgroup" else None
    for step in round.steps(start, STEPS):
        torch.manual_seed(step * 3 + rank)
        x = torch.randn(8, 16)
        if step == 5:
            die("step")
            if MOMENT in {"init", "share"}:
                if first and rank == 1:
                    kill()
            if group is not None:
                die("subgroup")
        try:
            loss = nn.functional.mse_loss(ddp(x), x[:, :1])
            loss.backward()
            if group is not None and rank != 1:
                dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            if MOMENT == "wrapped":
                raise KeyError("a framework's own error") from error
            if MOMENT != "swallowed":
                raise
        if step == 5:
            for moment in ("wrapped", "swallowed", "update"):
                die(moment)
            if MOMENT == "own" and rank == 2 and first:
                raise ValueError("the script's own mistake")
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        seen.value = {"step": step}
        round.commit(step + 1)
        if step == 5 and MOMENT == "evaluation":
            model.eval()
            die("evaluation")
            dist.barrier()
        model.train()
    if MOMENT == "after" and first and rank == 1:
        kill()
    assert seen.value == {"step": STEPS - 1}, seen.value
    if rank == 0:
        weights = sum(p.double().sum() for p in model.parameters()).item()
        print(f"weights {weights:.15f} lr {optimizer.param_groups[0]['lr']:.9f}", flush=True)
    return rank


assert train() == int(os.environ["RANK"])
"""
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> str:
    """The last line of a run in which nobody dies."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "script.py").write_text(SCRIPT)
    story = run(folder, warm, folder / "script.py", "none")
    assert story.deaths == []
    (line,) = story.lines("weights")
    return line


def run(folder: Path, warm: Warm, script: Path, moment: str) -> Story:
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    with InPlaceAgent(folder, warm.python, script, str(STEPS), moment, env=env) as agent:
        return agent.run()


MOMENTS = ["step", "init", "share", "wrapped", "after"]
MOMENTS_IN_CI = ["update", "subgroup", "swallowed", "evaluation"]


@pytest.mark.parametrize(
    "moment",
    [*MOMENTS, *(pytest.param(each, marks=[pytest.mark.all, pytest.mark.ci]) for each in MOMENTS_IN_CI)],
)
def test_a_rank_dies_and_the_result_is_that_of_an_undisturbed_run(
    moment: str, tmp_path: Path, warm: Warm, script: Path, undisturbed: str
) -> None:
    story = run(tmp_path, warm, script, moment)
    assert story.lines("weights")[-1] == undisturbed, story
    assert 1 in story.deaths
    assert len(story.pids[0]) == 1, "rank 0 has kept its process"


def test_a_replacement_gets_the_step_of_a_survivor_and_says_from_whom(tmp_path: Path, warm: Warm, script: Path) -> None:
    story = run(tmp_path, warm, script, "step")
    assert [each["step"] for each in story.received_from(0, "ready")] == [-1, 5]
    shared = [story.received_from(rank, "shared")[-1] for rank in (0, 1, 2)]
    assert [(each["round"], each["step"], each["source"]) for each in shared] == [(2, 5, 0), (2, 5, 0), (2, 5, 2)]


def test_an_error_of_the_script_itself_ends_its_process(
    tmp_path: Path, warm: Warm, script: Path, undisturbed: str
) -> None:
    story = run(tmp_path, warm, script, "own")
    assert story.deaths == [2]
    assert "ValueError: the script's own mistake" in story.output
    assert story.lines("weights")[-1] == undisturbed


def test_a_rank_whose_parameters_changed_before_share_gives_its_state_to_nobody(
    tmp_path: Path, warm: Warm, script: Path
) -> None:
    script.write_text(SCRIPT.replace('die("step")', 'die("wrapped before")'))
    story = run(tmp_path, warm, script, "wrapped before")
    assert {each["kind"] for each in story.received if each["round"] == 2} >= {"lost"}
    assert "Is the model wrapped before round.share()?" in story.output
    assert story.lines("weights") == []


def test_workers_end_with_their_agent(tmp_path: Path, warm: Warm, script: Path) -> None:
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    with InPlaceAgent(tmp_path, warm.python, script, "1000000", "none", env=env) as agent:
        assert agent.disappear() == [1, 1, 1]
        assert agent.story.lines("aelastic: the agent is gone")


def test_under_plain_python_the_job_has_one_rank(script: Path, warm: Warm, environment: dict[str, str]) -> None:
    command = [warm.python, str(script), str(STEPS), "none"]
    env = {name: value for name, value in environment.items() if name not in {"RANK", "WORLD_SIZE"}}
    # The assertion at the end of the script compares the function's return value.
    ended = subprocess.run([*command], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("weights")


def test_importing_the_decorator_costs_neither_torch_nor_the_agent(environment: dict[str, str]) -> None:
    code = "import sys; from aelastic import in_place; from aelastic.training import Late, Value; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    ours = {name for name in modules if name.startswith("aelastic")}
    assert ours == {"aelastic", "aelastic.training", "aelastic.training.decorator", "aelastic.training.late"}
    assert not {"torch", "typing", "asyncio", "socket"} & set(modules)
