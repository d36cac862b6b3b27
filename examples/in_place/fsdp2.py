"""Trains with `fully_shard` on a mesh of replicas and shards; if a rank is lost, its replica gives its shard.

    python -m aelastic --nproc-per-node 4 --max-restarts 3 --preload auto fsdp2.py

To see it recover, run `kill -9` with one of the process ids that it prints.  With `--replicas 1`, each shard is in one
rank only: if that is lost, all ranks load the last checkpoint, and still keep their processes.
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from aelastic import in_place
from aelastic.training import Round

KEPT = 2  # checkpoints


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=200, help="steps")
    parser.add_argument("--replicas", type=int, default=2, help="ranks that hold the same shard")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    options = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    train(device, options)
    dist.destroy_process_group()


@in_place
def train(round: Round, device: torch.device, options: argparse.Namespace) -> None:
    """Called in each round of the job.  Sharded modules belong to a mesh, so each round makes new ones."""
    dist.init_process_group()  # NCCL for GPUs, gloo for CPUs
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shape = (options.replicas, world_size // options.replicas)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(mesh, device)

    def load() -> int | None:
        """Called if a shard is in no rank: at the start, or after all of its ranks were lost."""
        found = finished(options.checkpoints)
        return load_from(found[-1], model, optimizer) if found else None

    # Moves the shards that this process has kept into the new modules, or gets them from a replica.
    start = round.share(model, optimizer, load=load, replicas=mesh["replicate"].get_group())
    # In one piece, since all ranks print.
    print(f"rank {rank} is process {os.getpid()} and begins at step {start}\n", end="", flush=True)

    for step in round.steps(start, options.steps):
        inputs, targets = make_batch(step, rank, world_size, device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps_done = step + 1
        if steps_done % options.save_every == 0:
            round.commit(steps_done)  # before the collectives below: a rank that waits in them has a complete step
            save(options.checkpoints, steps_done, model, optimizer)
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {steps_done}: loss {loss.item() / world_size:.4f}", flush=True)


def build(mesh: DeviceMesh, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)  # the same first weights on all ranks
    blocks = [Block(64) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(64, 1)).to(device)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = inputs + self.layers(inputs)
        return outputs


def make_batch(step: int, rank: int, world_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for your data: a batch depends on its step and its rank alone, so a step can be made again."""
    generator = torch.Generator().manual_seed(step * world_size + rank)
    inputs = torch.randn(64, 64, generator=generator)
    return inputs.to(device), inputs.sin().mean(1, keepdim=True).to(device)


def finished(folder: Path) -> list[Path]:
    """The checkpoints that are complete, oldest first."""
    return sorted(folder.glob("step-*"))


def load_from(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
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
