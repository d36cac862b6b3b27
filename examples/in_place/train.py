"""Trains with DistributedDataParallel; if a rank is lost, the others keep their processes and their state.

    python -m aelastic --nproc-per-node 4 --max-restarts 3 --preload auto train.py

To see it recover, run `kill -9` with one of the process ids that it prints.  Under torchrun the script runs unchanged,
and a failure restarts all ranks from the checkpoint.  `python train.py` trains on one rank.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from aelastic import in_place
from aelastic.training import Round


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--save-every", type=int, default=1000, help="steps")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    options = parser.parse_args()

    # What is kept is made once in each process: the model, the optimizer, a scheduler.
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.AdamW(network.parameters())

    train(network, optimizer, device, options)
    dist.destroy_process_group()


@in_place
def train(
    round: Round,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    options: argparse.Namespace,
) -> None:
    """Called in each round of the job.  What belongs to a process group is made here: the group itself, and DDP."""
    dist.init_process_group()  # NCCL for GPUs, gloo for CPUs
    rank, world_size = dist.get_rank(), dist.get_world_size()  # the next round may have others

    def load() -> int | None:
        """Called if no rank has the state: at the start, or after all ranks were lost."""
        if not options.checkpoint.exists():
            return None
        saved = torch.load(options.checkpoint, map_location=device, weights_only=True)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        steps_done: int = saved["steps_done"]
        return steps_done

    start = round.share(network, optimizer, load=load)  # before DDP, which copies rank 0's weights to all ranks
    # In one piece, since all ranks print.
    print(f"rank {rank} is process {os.getpid()} and begins at step {start}\n", end="", flush=True)
    model = DistributedDataParallel(network)

    for step in round.steps(start, options.steps):
        inputs, targets = make_batch(step, rank, world_size, device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps_done = step + 1
        if rank == 0 and steps_done % options.save_every == 0:
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "steps_done": steps_done}
            save(state, options.checkpoint)
            print(f"step {steps_done}: loss {loss.item():.4f}", flush=True)


def make_batch(step: int, rank: int, world_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for your data: a batch depends on its step and its rank alone, so a step can be made again."""
    generator = torch.Generator().manual_seed(step * world_size + rank)
    inputs = torch.randn(64, 32, generator=generator)
    return inputs.to(device), inputs.sin().sum(1, keepdim=True).to(device)


def save(state: dict[str, object], path: Path) -> None:
    """Replaces the checkpoint atomically: a kill at any moment leaves the old one or the new one."""
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(path)


if __name__ == "__main__":
    main()
