"""Trains with FSDP2 (`fully_shard`), and resumes from its last sharded checkpoint after a restart.

    python -m aelastic --nproc-per-node 2 --max-restarts 3 fsdp2.py

To see it resume, run `kill -9` with one of the process ids that it prints.  Each rank saves its own shards with
`torch.distributed.checkpoint`, which also loads them on another number of ranks.  Nothing here depends on aelastic: the
script runs under torchrun unchanged.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

KEPT = 2  # checkpoints


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    options = parser.parse_args()

    dist.init_process_group()  # NCCL for GPUs, gloo for CPUs
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    print(f"rank {rank} is process {os.getpid()}\n", end="", flush=True)  # in one piece, since all ranks print

    torch.manual_seed(1)
    blocks = [Block(64) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(64, 1)).to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    # Every start looks for a checkpoint, so a restart is not a special case.
    steps_done = 0
    if found := finished(options.checkpoints):
        steps_done = load(found[-1], model, optimizer)
    if rank == 0:
        print(f"resuming after step {steps_done}" if steps_done else "starting from scratch", flush=True)

    for step in range(steps_done + 1, options.steps + 1):
        inputs, targets = make_batch(step, rank, device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % options.save_every == 0:
            save(options.checkpoints, step, model, optimizer)
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step}: loss {loss.item() / world_size:.6f}", flush=True)

    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = inputs + self.layers(inputs)
        return outputs


def make_batch(step: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for your data: the batch of a step is the same before and after a restart."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    inputs = torch.randn(64, 64, generator=generator)
    return inputs.to(device), inputs.sin().mean(1, keepdim=True).to(device)


def finished(folder: Path) -> list[Path]:
    """The checkpoints that are complete, oldest first."""
    return sorted(folder.glob("step-*"))


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads this rank's shards, and returns the step at which they were saved."""
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    step: int = state["step"]
    return step


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Saves to another name first: a folder gets its name `step-…` when all ranks have saved."""
    weights, moments = get_state_dict(model, optimizer)
    unfinished = folder / "unfinished"
    dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        unfinished.rename(folder / f"step-{step:08}")
        for old in finished(folder)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier()  # no rank starts a step before the checkpoint is complete


if __name__ == "__main__":
    main()
