"""Trains with DistributedDataParallel, and resumes from its last checkpoint after a restart.

    python -m aelastic --nproc-per-node 2 --max-restarts 3 ddp.py

To see it resume, run `kill -9` with one of the process ids that it prints.  Nothing here depends on aelastic: the
script runs under torchrun unchanged.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    options = parser.parse_args()

    dist.init_process_group()  # NCCL for GPUs, gloo for CPUs
    rank = dist.get_rank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    print(f"rank {rank} is process {os.getpid()}\n", end="", flush=True)  # in one piece, since all ranks print

    torch.manual_seed(1)  # the same first weights on all ranks
    network = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.AdamW(network.parameters())

    # Every start looks for a checkpoint, so a restart is not a special case.
    epochs_done = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device, weights_only=True)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        epochs_done = saved["epochs_done"]
    if rank == 0:
        print(f"resuming after epoch {epochs_done}" if epochs_done else "starting from scratch", flush=True)

    model = DistributedDataParallel(network)
    data = make_data()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=64, sampler=sampler)

    for epoch in range(epochs_done + 1, options.epochs + 1):
        sampler.set_epoch(epoch)  # a new order in each epoch, also after a restart
        total = 0.0
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        if rank == 0:
            state = {
                "network": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epochs_done": epoch,
            }
            save(state, options.checkpoint)
            print(f"epoch {epoch}: loss {total / len(loader):.6f}", flush=True)
        dist.barrier()  # no rank starts an epoch before the last one is saved

    del model  # torch 2.13 may hang at the end if DistributedDataParallel outlives its process group
    dist.destroy_process_group()


def make_data() -> TensorDataset:
    """Stands in for your data set."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(16384, 32, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def save(state: dict[str, object], path: Path) -> None:
    """Replaces the checkpoint atomically: a kill at any moment leaves the old one or the new one."""
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(path)


if __name__ == "__main__":
    main()
