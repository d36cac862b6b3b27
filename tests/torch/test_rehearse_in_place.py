"""A rehearsal of scripts that recover in place: ranks are killed, and habits that break recovery are reported."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, ran

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.timeout(8 * LAUNCH_TIMEOUT_S), pytest.mark.all]
# A replacement's imports are already in the process that forks it.
WARM = ("--preload", "torch,aelastic.training.rounds,aelastic.training.rehearsed.watch")

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from aelastic import in_place

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters())
kept = []


@in_place
def train(round):
    dist.init_process_group("gloo")
    pass  # first
    start = round.share(model, optimizer)
    ddp = DistributedDataParallel(model)
    pass  # wrapped
    for step in round.steps(start, 90):
        torch.manual_seed(2 * step + dist.get_rank())
        loss = ddp(torch.randn(16, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pass  # last
    del ddp
    dist.destroy_process_group()


train()
"""


def rehearse(folder: Path, script: str, *options: str) -> tuple[int, dict[str, Any]]:
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "aelastic", "rehearse", "--json", "--output", "out", *options, "train.py"]
    done = ran(*command, cwd=folder, timeout=7 * LAUNCH_TIMEOUT_S, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def without(*lines: str) -> str:
    return "".join(line for line in SCRIPT.splitlines(keepends=True) if not any(each in line for each in lines))


@pytest.mark.ci
def test_a_right_script_recovers_in_place_and_ends_as_undisturbed(tmp_path: Path) -> None:
    code, result = rehearse(tmp_path, SCRIPT, "--only", "in place", "--nproc-per-node", "2", *WARM)
    assert code == 0 and result["habits"] == [], result
    _, killed, again = result["rehearsals"]
    assert "1 of 2 processes kept, " in killed["text"] and "parameters to step 90 the same" in killed["text"]
    assert (killed["numbers"], again["numbers"]) == ("same", "same") and killed["lost"] <= 1, result


def test_the_example_recovers_in_place_and_needs_no_pattern_for_its_steps(tmp_path: Path) -> None:
    """Its checkpoints are also rehearsed, without recovery in place."""
    script = (ROOT / "examples/in_place/train.py").read_text().replace("default=5000", "default=300")
    script = script.replace("default=1000", "default=50")
    code, result = rehearse(tmp_path, script, "--only", "killed", "--nproc-per-node", "3", *WARM)
    assert code == 0 and result["habits"] == [], result
    found = {each["name"]: each for each in result["rehearsals"]}
    assert found["in place: a second rank killed"]["text"].startswith("recovered in "), result
    assert "1 of 3 processes kept" in found["in place: a second rank killed"]["text"], result
    assert found["a rank killed"]["checkpoint"] == "whole" and found["a rank killed"]["resumed_at"] % 50 == 0, result


BROKEN: dict[str, tuple[str, str, str]] = {
    "DDP comes before share": (
        SCRIPT.replace("pass  # first", "ddp = DistributedDataParallel(model)").replace("    ddp = Dis", "    model and Dis", 1),
        "restarted instead, resumed at 0", "wrapped first",
    ),
    "nothing is seeded in a step": (without("2 * step"), "parameters of step", "random"),
    "data depend on what is counted": (
        SCRIPT.replace("(2 * step", "(2 * len(kept)").replace("pass  # last", "kept.append(0)"), "parameters of step", "random",
    ),
    "the group is made once": (
        SCRIPT.replace('    dist.init_process_group("gloo")', '    kept or kept.append(dist.init_process_group("gloo"))').replace("    dist.destroy", "    pass; dist.destroy"),
        "restarted instead", "no group",
    ),
    "an error is caught that ends the loop": (
        SCRIPT.replace("        loss.backward()", "        try:\n            loss.backward()\n        except BaseException:\n            import time; time.sleep(60)"),
        "rank 1 did not leave its round in time", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_script_that_does_not_recover_gets_the_reason(name: str, tmp_path: Path) -> None:
    script, words, habit = BROKEN[name]
    code, result = rehearse(tmp_path, script, "--only", "in place: rank 0", "--nproc-per-node", "2", *WARM)
    assert code == 1 and words in result["rehearsals"][1]["text"], result
    assert [each["habit"] for each in result["habits"] if each["breaks"]] == ([habit] if habit else []), result


def test_a_model_that_outlives_its_round_is_named_and_does_no_harm_at_once(tmp_path: Path) -> None:
    script = SCRIPT.replace("pass  # wrapped", "kept.append(ddp)")
    code, result = rehearse(tmp_path, script, "--only", "in place: rank 0", "--nproc-per-node", "2", *WARM)
    (habit,) = [each for each in result["habits"] if each["what"] == "DistributedDataParallel"]
    assert code == 0 and habit["habit"] == "still referenced" and not habit["breaks"], result
    assert habit["where"].startswith("train.py:"), result


def test_a_collective_after_the_update_fails_a_rehearsal_whose_kills_did_not_hit_it(tmp_path: Path) -> None:
    script = SCRIPT.replace("pass  # last", "dist.all_reduce(loss.detach())")
    code, result = rehearse(tmp_path, script, "--only", "in place: rank 0", "--nproc-per-node", "2", *WARM)
    (habit,) = result["habits"]
    assert code == 1 and habit["habit"] == "collective after update" and habit["breaks"], result
    assert "rule 3: train.py:" in result["text"], result


@pytest.mark.parametrize("how", ["it has no decorator", "--recovery=restart"])
def test_a_script_that_does_not_opt_in_is_rehearsed_as_ever(how: str, tmp_path: Path) -> None:
    script = "import time\nfor step in range(20):\n    print('step', step, flush=True)\n    time.sleep(0.02)\n"
    options = ["--nproc-per-node", "2", "--progress", r"step (\d+)", "--only", "in place"]
    if how.startswith("--"):
        script, options = SCRIPT, [*options[:2], how, *options[4:]]
    code, result = rehearse(tmp_path, script, *options)
    assert code == 3 and "nothing could be tested: the script does not use @in_place" in result["text"], result
