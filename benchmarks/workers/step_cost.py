"""A worker of `step_cost.py`: the same step in blocks, in turn with `round.steps` and with `range`.

Between two blocks nothing changes but the loop, and what recovery in place does in each step of the optimizer.
Rank 0 prints the seconds per step of each block, as JSON: of the main thread's processor time, in which forward and
backward pass run on a CPU as well.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from aelastic import in_place

KIND, PAIRS, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
WIDTH, BATCH, LAYERS = 128, 32, 4

torch.set_num_threads(1)
torch.manual_seed(0)
layers: list[nn.Module] = []
for _ in range(LAYERS):
    layers += [nn.Linear(WIDTH, WIDTH), *([nn.BatchNorm1d(WIDTH)] if KIND == "batchnorm" else []), nn.ReLU()]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)


@contextmanager
def without_recovery(round: Any) -> Iterator[None]:  # noqa: A002  as the pages have it
    """The optimizer's steps cost what they cost under torchrun."""
    kept = round._kept  # noqa: SLF001  only a benchmark needs it
    kept.close()
    try:
        yield
    finally:
        kept._hook = register_optimizer_step_pre_hook(kept._before_step)  # noqa: SLF001  as above


@in_place
def train(round: Any) -> None:  # noqa: A002  as above
    dist.init_process_group("gloo")
    round.share(model, optimizer)
    wrapped = DistributedDataParallel(model) if KIND == "ddp" else model
    x = torch.randn(BATCH, WIDTH)

    def seconds_per_step(steps: Iterable[int]) -> float:
        began = time.thread_time()
        for _ in steps:
            loss = wrapped(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return (time.thread_time() - began) / STEPS

    done = 0
    taken: dict[str, list[float]] = {"steps": [], "range": []}
    for pair in range(-5, PAIRS):  # the first ones warm up
        for way in ("steps", "range") if pair % 2 else ("range", "steps"):
            if way == "range":
                with without_recovery(round):
                    each = seconds_per_step(range(STEPS))
            else:
                each = seconds_per_step(round.steps(done, done + STEPS))
                done += STEPS
            if pair >= 0:
                taken[way].append(each)
    if dist.get_rank() == 0:
        print("taken", json.dumps(taken), flush=True)


train()
