"""A worker that trains: `train.py FOLDER STEP_SECONDS CHECKPOINT_EVERY UNTIL`.

It has a step of fixed length, an all_reduce in each, a checkpoint by atomic rename every so many of them, and a handler
that ends it after the step when SIGTERM comes, as training scripts have.  Its own file gets a line before the imports,
and one for each step: when it was finished, step, round, rank, world size.  It ends at UNTIL (CLOCK_MONOTONIC),
whatever becomes of the harness.
"""

import os
import signal
import sys
import time

FOLDER = sys.argv[1]
path = os.path.join(FOLDER, f"steps-{os.environ['BENCH_POD']}-{os.getpid()}")
OUT = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.write(OUT, f"started {time.monotonic()!r}\n".encode())

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from aelastic import notice  # noqa: E402  under torchrun nothing is ever due

STEP_S, CHECKPOINT_EVERY, UNTIL = float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
CHECKPOINT = os.path.join(FOLDER, "checkpoint.pt")
RAISES = os.path.join(FOLDER, f"raise-{os.getpid()}")  # made by the harness
PARAMETERS = 10_000

stops = False


def stop_after_this_step(*_: object) -> None:
    global stops  # noqa: PLW0603 - what a handler of a script can do
    stops = True


def load(weights: torch.Tensor) -> int:
    """Fills the weights; which step they are of.  The first rank reads, so that all have the same."""
    state = torch.zeros(PARAMETERS + 1, dtype=torch.float64)
    if dist.get_rank() == 0 and os.path.exists(CHECKPOINT):
        kept = torch.load(CHECKPOINT, weights_only=True)
        state[:PARAMETERS], state[PARAMETERS] = kept["weights"], kept["step"]
    dist.broadcast(state, 0)
    weights.copy_(state[:PARAMETERS])
    return int(state[PARAMETERS])


def save(weights: torch.Tensor, step: int) -> None:
    new = f"{CHECKPOINT}.{os.getpid()}"
    torch.save({"weights": weights, "step": step}, new)
    os.replace(new, CHECKPOINT)


def main() -> None:
    signal.signal(signal.SIGTERM, stop_after_this_step)
    dist.init_process_group("gloo")
    os.write(OUT, f"joined {time.monotonic()!r}\n".encode())
    train()
    dist.destroy_process_group()


def train() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    weights = torch.zeros(PARAMETERS, dtype=torch.float64)
    number = torch.tensor([time.monotonic_ns()])  # the round's: the first rank's, on all of them
    dist.broadcast(number, 0)
    step = load(weights)
    due = time.monotonic()
    while not stops and time.monotonic() < UNTIL:
        step += 1
        if os.path.exists(RAISES):
            raise ValueError("the loss is not a number")
        gradient = torch.full_like(weights, 1e-3 * (rank + 1))
        dist.all_reduce(gradient)
        weights -= gradient / world_size
        # What is late by less than a step is made up for; a stall of the machine is not.
        due = max(due + STEP_S, time.monotonic() - STEP_S)
        time.sleep(max(0.0, due - time.monotonic()))
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            save(weights, step)
        is_due = notice.due()
        if is_due and rank == 0:
            save(weights, step)
        os.write(OUT, f"step {time.monotonic()!r} {step} {int(number)} {rank} {world_size}\n".encode())
        if is_due:
            notice.saved()
    sys.exit(128 + signal.SIGTERM if stops else 0)


main()
