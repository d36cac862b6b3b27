"""A worker in a rehearsal notes where its script violates the contract of recovery in place."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, ran

pytestmark = [pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S), pytest.mark.all]

# A correct script; each case replaces lines of it.
SCRIPT = """
import os, random, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from aelastic import in_place

STEPS = 70
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pass  # outside


@in_place
def train(round):
    int(os.environ["RANK"])
    dist.init_process_group("gloo")
    pass  # first
    start = round.share(model, optimizer)
    ddp = DistributedDataParallel(model)
    for step in round.steps(start, STEPS):
        loss = ddp(torch.ones(2, 4)).sum()
        dist.all_reduce(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pass  # last
    dist.destroy_process_group()


train()
"""
RIGHT = {
    "nothing is replaced": {},
    "it commits before an evaluation": {"pass  # last": "round.commit(step + 1); dist.barrier()"},
    "it makes two updates in a step": {"pass  # last": "optimizer.step()"},
    "its gradients overflow": {"        optimizer.step()": "        model.weight.grad.fill_(float('inf'))"},
    "another model is wrapped first": {"pass  # first": "other = DistributedDataParallel(nn.Linear(2, 2))"},
    "the local rank is read outside": {"pass  # outside": "os.environ.get('LOCAL_RANK')"},
}
ADDRESS = "os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='0', RANK='0', WORLD_SIZE='1')"
# Replacements; the habit, the reported line of the script, and the details.
WRONG: dict[str, tuple[dict[str, str], str, str, str]] = {
    "the group is made outside": (
        {"pass  # outside": f"{ADDRESS}; dist.init_process_group('gloo')", '    dist.init_process_group("gloo")\n': "\n"},
        "group outside", "", "",
    ),
    "DDP comes before share": (
        {"pass  # first": "ddp = DistributedDataParallel(model)"}, "wrapped first", "ddp = ", "DistributedDataParallel",
    ),
    "a loss is averaged after the update": (
        {"pass  # last": "dist.all_reduce(loss.detach())  # it"}, "collective after update", "# it", "all_reduce",
    ),
    "all ranks gather objects after the update": (
        {"pass  # last": "dist.all_gather_object([None], 1)  # it"}, "collective after update", "# it", "all_gather_object",
    ),
    "the rank is read outside": (
        {"pass  # outside": "rank = os.environ.get('RANK', '0')"}, "read outside", "rank = ", "RANK",
    ),
    "nothing is committed": (
        {"round.steps(start, STEPS)": "range(STEPS)"}, "no commit", "        optimizer.step()", "",
    ),
    "micro-batches are committed": (
        {"        optimizer.zero_grad()\n": "", "        optimizer.step()": "        if step % 4 == 3: optimizer.step(); optimizer.zero_grad()"},
        "commit without update", "for step in", "",
    ),
}  # fmt: skip


def notes_of(folder: Path, replaced: dict[str, str]) -> tuple[str, list[dict[str, Any]]]:
    """Runs the script as a job of one rank; returns its text and its notes."""
    text = SCRIPT
    for old, new in replaced.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "train.py").write_text(text)
    (folder / "notes").mkdir()
    env = {**os.environ, "AELASTIC_REHEARSAL": str(folder / "notes"), "OMP_NUM_THREADS": "1"}
    done = ran(sys.executable, "train.py", cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    (file,) = (folder / "notes").iterdir()
    return text, [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found_in_a_right_script(name: str, tmp_path: Path) -> None:
    _, notes = notes_of(tmp_path, RIGHT[name])
    assert [each for each in notes if each["kind"] == "habit"] == []
    steps = [each for each in notes if each["kind"] == "step"]
    assert [each["step"] for each in steps] == [*range(1, 65), 66, 68, 70]
    assert all(len(each["parameters"]) == 5 for each in steps), "four weights and a bias"


@pytest.mark.parametrize("name", WRONG)
def test_a_habit_is_found_where_it_is(name: str, tmp_path: Path) -> None:
    replaced, habit, line, what = WRONG[name]
    text, notes = notes_of(tmp_path, replaced)
    (found,) = [each for each in notes if each["kind"] == "habit"]
    assert (found["habit"], found["what"]) == (habit, what)
    if line:
        file, _, number = found["where"].partition(":")
        assert file == "train.py" and line in text.splitlines()[int(number) - 1]
    else:
        assert not found["where"]
