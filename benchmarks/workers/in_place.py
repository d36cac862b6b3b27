"""A worker of `in_place.py`: sums in a loop, and says when it is past a collective, and when it has the state."""

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from aelastic import in_place

STEP_S = 0.001
LIMIT_S = 600  # nothing is left for longer, whatever becomes of the harness


class Weights(torch.nn.Module):
    """A state that shows the steps that it has made, and needs no optimizer: torch imports that for a second."""

    sum: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(256))


weights, began = Weights(), time.monotonic()


def say(what: str, step: int) -> None:
    fifo = os.open(sys.argv[1], os.O_WRONLY)
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    line = f"{what} {os.environ['RANK']} {count} {os.getpid()} {time.monotonic()!r} {step}\n"
    os.write(fifo, line.encode())
    os.close(fifo)


@in_place
def train(round: Any) -> None:  # noqa: A002  as the pages have it
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    say("past", 0)
    start = round.share(weights)
    say("state", start)
    for step in round.steps(start, 10**9):
        ones = torch.full((256,), 2.0 ** dist.get_rank())
        dist.all_reduce(ones)
        if ones[0].item() != 2 ** dist.get_world_size() - 1:
            say("wrong", step)
        weights.sum += 1
        if weights.sum[0].item() != step + 1:
            say("wrong", step)
        time.sleep(STEP_S)
        if time.monotonic() > began + LIMIT_S:
            break


train()
