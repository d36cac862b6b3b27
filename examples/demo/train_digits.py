"""Learns to read handwritten digits, on as many workers as it is given, and survives being stopped at any time.

A usual data-parallel training script.  It knows nothing of what starts it:

    python -m aelastic --standalone --nproc-per-node 2 --max-restarts 3 train_digits.py --checkpoint digits.pt
    torchrun           --standalone --nproc-per-node 2 --max-restarts 3 train_digits.py --checkpoint digits.pt

Two habits make it elastic.  It saves a checkpoint after each epoch, and it starts by looking for one.  So when a
worker dies, the launcher starts all of them again and they go on from the last epoch, also when there are more or fewer
of them than before.  The digits come with scikit-learn; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

GLOBAL_BATCH_SIZE = 64  # of all workers together, so that a step means the same with 1 worker or 8
HELD_OUT = 360  # pictures that no worker trains on
SEED = 1797  # the number of pictures; any would do


def main() -> int:
    options = parse_arguments()
    dist.init_process_group("gloo")
    try:
        accuracy = train(options)
    finally:
        dist.destroy_process_group()
    if accuracy < options.min_accuracy:
        print(f"accuracy {accuracy:.3f} is below --min-accuracy {options.min_accuracy}", file=sys.stderr, flush=True)
        return 1
    return 0


def train(options: argparse.Namespace) -> float:
    """Trains from the checkpoint, or from scratch without one; the accuracy on pictures not seen in training."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    say(f"worker rank={rank} pid={os.getpid()} world_size={world_size} restart={restart}")

    torch.manual_seed(SEED)
    training, held_out = load_data()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(training, seed=SEED)
    loader = DataLoader(training, batch_size=max(1, GLOBAL_BATCH_SIZE // world_size), sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    epochs_done = load_checkpoint(options.checkpoint, model, optimizer)
    if rank == 0:
        say(f"resuming after epoch {epochs_done}" if epochs_done else "starting from scratch")
    parallel = DistributedDataParallel(model)

    for epoch in range(epochs_done + 1, options.epochs + 1):
        crash_if_asked(options, epoch, rank, restart)
        sampler.set_epoch(epoch)  # another order in each epoch, the same one on each worker
        loss = train_epoch(parallel, optimizer, loader)
        if rank == 0:
            save_checkpoint(options.checkpoint, model, optimizer, epoch)
            say(f"epoch {epoch}/{options.epochs} loss={loss:.4f} world_size={world_size} restart={restart}")
        dist.barrier()  # no worker is further than one epoch beyond what is on disk

    accuracy = evaluate(model, held_out)
    if rank == 0:
        say(f"accuracy {accuracy:.3f} on {len(held_out)} pictures not seen in training")
    return accuracy


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The pictures (8 × 8 numbers) and their digits, split the same way by every worker: to train on, and held out."""
    # The file that `sklearn.datasets.load_digits` reads.  Importing that takes each worker 2 s.
    found = find_spec("sklearn")
    assert found is not None and found.origin is not None
    table = torch.from_numpy(
        np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    )
    inputs, targets = table[:, :-1].float() / 16.0, table[:, -1].long()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(SEED))
    inputs, targets = inputs[order], targets[order]
    return (
        TensorDataset(inputs[HELD_OUT:], targets[HELD_OUT:]),
        TensorDataset(inputs[:HELD_OUT], targets[:HELD_OUT]),
    )


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """One pass over this worker's share; the mean loss of its steps."""
    losses = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # DistributedDataParallel averages the gradients of all workers here
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def evaluate(model: nn.Module, held_out: TensorDataset) -> float:
    """The share of held-out pictures read correctly: each worker reads some, all return the same number."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets = (tensor[rank::world_size] for tensor in held_out.tensors)
    with torch.no_grad():
        correct = (model(inputs).argmax(dim=1) == targets).sum()
    dist.all_reduce(correct)
    return int(correct) / len(held_out)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Takes over model and optimizer from the checkpoint; the number of epochs done, 0 without a checkpoint.

    All workers read the same file: it changes only after an epoch, which no worker finishes before all have begun it.
    """
    if not path.exists():
        return 0
    checkpoint = torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    epochs_done: int = checkpoint["epoch"]
    return epochs_done


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Puts a whole checkpoint in the place of the last one: whenever we are killed, one of the two is there to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
    os.replace(unfinished, path)


def crash_if_asked(options: argparse.Namespace, epoch: int, rank: int, restart: int) -> None:
    """Fails on request (`--crash-at-epoch`), to show what a launcher makes of it; never after a restart."""
    if restart > 0 or epoch != options.crash_at_epoch or rank != options.crash_rank:
        return
    say(f"worker rank={rank} fails on request: {options.crash_how}")
    match options.crash_how:
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            raise RuntimeError(f"asked to fail in epoch {epoch}")


def say(line: str) -> None:
    """Prints at once, and in one piece however many workers share the console."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn to read handwritten digits.")
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FILE", help="where progress is kept")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--min-accuracy", type=float, default=0.95, help="fail below this (default: %(default)s)")
    parser.add_argument("--crash-at-epoch", type=int, metavar="N", help="fail once, at the start of this epoch")
    parser.add_argument("--crash-rank", type=int, default=1, metavar="R", help="which worker (default: %(default)s)")
    parser.add_argument("--crash-how", choices=["exit", "raise", "kill"], default="raise")
    return parser.parse_args()


if __name__ == "__main__":
    code = main()
    # Leaves without the interpreter's clean-up: after DistributedDataParallel, gloo's threads outlive
    # destroy_process_group (torch 2.13), and a thread that drops a tensor during that clean-up aborts the process
    # (pytorch#179291): 4 of 60 runs ended so, after all the work was done, without any launcher.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
