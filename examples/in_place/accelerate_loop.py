"""Trains in a loop of your own with accelerate; if a rank is lost, the others keep their processes and their state.

    pip install accelerate
    python -m aelastic --nproc-per-node 4 --max-restarts 3 --preload auto accelerate_loop.py

To see it recover, run `kill -9` with one of the process ids that it prints.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from aelastic import in_place
from aelastic.training import Round
from aelastic.training.frameworks.accelerate import reset_accelerate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--log-every", type=int, default=200, help="steps")
    options = parser.parse_args()

    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(network.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.9)
    train(network, optimizer, scheduler, options)


@in_place
def train(round: Round, network: nn.Module, optimizer: Any, scheduler: Any, options: argparse.Namespace) -> None:
    """Called in each round of the job.  What `prepare` makes belongs to the round; what it wraps does not."""
    reset_accelerate()  # otherwise it would take the process group of the last round for the present one
    accelerator = Accelerator(  # makes the process group
        cpu=not torch.cuda.is_available(),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1),
    )
    rank, world_size = accelerator.process_index, accelerator.num_processes
    step = round.share(network, optimizer, scheduler)  # before `prepare`, which wraps the model in DDP
    # In one piece, since all ranks print.
    print(f"rank {rank} is process {os.getpid()} and begins at step {step}\n", end="", flush=True)
    loader: Any = DataLoader(make_data(), batch_size=32, shuffle=True)
    model, prepared_optimizer, loader, prepared_scheduler = accelerator.prepare(network, optimizer, loader, scheduler)

    while step < options.steps:
        epoch, seen = divmod(step, len(loader))
        loader.set_epoch(epoch)
        for inputs, targets in accelerator.skip_first_batches(loader, seen):
            torch.manual_seed(step * world_size + rank)  # dropout
            loss = nn.functional.mse_loss(model(inputs), targets)
            prepared_optimizer.zero_grad()
            accelerator.backward(loss)
            prepared_optimizer.step()
            prepared_scheduler.step()
            step += 1
            round.commit(step)  # with accumulation: only if `accelerator.sync_gradients`
            if rank == 0 and step % options.log_every == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
            if step == options.steps:
                break


def make_data() -> TensorDataset:
    """Stands in for your data set."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(16384, 32, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


if __name__ == "__main__":
    main()
