"""The training of `train.py` with recovery in place: `train_in_place.py FOLDER STEP_SECONDS CHECKPOINT_EVERY UNTIL`.

Step, all_reduce, checkpoint, handler of SIGTERM and the lines in its file are the same.  Weights are kept when a rank
is lost, and the checkpoint is read only where no rank has them.
"""

import os
import signal
import sys
import time
from typing import Any

FOLDER = sys.argv[1]
path = os.path.join(FOLDER, f"steps-{os.environ['BENCH_POD']}-{os.getpid()}")
OUT = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.write(OUT, f"started {time.monotonic()!r}\n".encode())

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from aelastic import in_place  # noqa: E402

STEP_S, CHECKPOINT_EVERY, UNTIL = float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
CHECKPOINT = os.path.join(FOLDER, "checkpoint.pt")
RAISES = os.path.join(FOLDER, f"raise-{os.getpid()}")  # made by the harness
PARAMETERS = 10_000
STEPS_MAX = 10**9

stops = False


class Weights(torch.nn.Module):
    """The state; without an optimizer, which torch would import for a second."""

    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.zeros(PARAMETERS, dtype=torch.float64))


weights = Weights()


def stop_after_this_step(*_: object) -> None:
    global stops  # noqa: PLW0603 - what a handler of a script can do
    stops = True


def load() -> int | None:
    """Fills the weights; which step they are of."""
    if not os.path.exists(CHECKPOINT):
        return None
    kept = torch.load(CHECKPOINT, weights_only=True)
    weights.values.copy_(kept["weights"])
    return int(kept["step"])


def save(step: int) -> None:
    new = f"{CHECKPOINT}.{os.getpid()}"
    torch.save({"weights": weights.values, "step": step}, new)
    os.replace(new, CHECKPOINT)


@in_place
def train(round: Any) -> None:  # noqa: A002  as the pages have it
    dist.init_process_group("gloo")
    os.write(OUT, f"joined {time.monotonic()!r}\n".encode())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    number = torch.tensor([time.monotonic_ns()])  # the round's: the first rank's, on all of them
    dist.broadcast(number, 0)
    start = round.share(weights, load=load)
    due = time.monotonic()
    for steps_done in round.steps(start, STEPS_MAX):
        step = steps_done + 1
        if os.path.exists(RAISES):
            raise ValueError("the loss is not a number")
        gradient = torch.full_like(weights.values, 1e-3 * (rank + 1))
        dist.all_reduce(gradient)
        weights.values -= gradient / world_size
        # What is late by less than a step is made up for; a stall of the machine is not.
        due = max(due + STEP_S, time.monotonic() - STEP_S)
        time.sleep(max(0.0, due - time.monotonic()))
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            save(step)
        os.write(OUT, f"step {time.monotonic()!r} {step} {int(number)} {rank} {world_size}\n".encode())
        if stops or time.monotonic() > UNTIL:
            sys.exit(128 + signal.SIGTERM if stops else 0)


signal.signal(signal.SIGTERM, stop_after_this_step)
train()
