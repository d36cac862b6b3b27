"""Trains with Lightning; if a rank is lost, the others keep their processes and their state.

    pip install lightning
    python -m aelastic --nproc-per-node 4 --max-restarts 3 --preload auto lightning_trainer.py

To see it recover, run `kill -9` with one of the process ids that it prints.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from aelastic import in_place
from aelastic.training import Round, Value

BATCH = 64


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        torch.manual_seed(self.global_step * self.trainer.world_size + self.global_rank)  # dropout
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.network(inputs), targets)
        step = self.global_step + 1
        if self.global_rank == 0 and step % 64 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class InPlace(lightning.Callback):
    """Shares the state when Lightning has made optimizers and DDP, and tells the round about each step."""

    def __init__(self, round: Round, sampler: Sampler, loops: Value) -> None:
        self.round, self.sampler, self.loops = round, sampler, loops
        self.start = self.committed = 0
        self.is_at_end = False  # of an epoch

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.start = self.round.share(pl_module, *trainer.optimizers, *schedulers, self.loops)
        self.committed = self.start
        # In one piece, since all ranks print.
        line = f"rank {trainer.global_rank} is process {os.getpid()} and begins at step {self.start}\n"
        print(line, end="", flush=True)
        if self.start:
            trainer.fit_loop.load_state_dict(self.loops.value)
            batches = trainer.fit_loop.epoch_loop.batch_progress
            self.is_at_end = batches.is_last_batch
            self.sampler.seen = 0 if self.is_at_end else batches.current.processed * BATCH

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if self.is_at_end:  # otherwise Lightning counts one epoch too few
            trainer.fit_loop.reset_restart_stage()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self.committed:  # with accumulation, not after each batch
            self.committed = trainer.global_step
            self.loops.value = trainer.fit_loop.state_dict()
            self.round.commit(self.committed)


class Sampler(DistributedSampler[Any]):
    """Leaves out, in its first pass, what was seen before: Lightning counts from there, but skips nothing."""

    seen = 0

    def __iter__(self) -> Iterator[Any]:
        indices, self.seen = list(super().__iter__())[self.seen :], 0
        return iter(indices)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()

    lightning.seed_everything(1, verbose=False)
    train(Regression(), Value(), options)


@in_place
def train(round: Round, module: Regression, loops: Value, options: argparse.Namespace) -> None:
    """Called in each round of the job.  Trainer, strategy, sampler and loader belong to the round."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = make_data()
    sampler = Sampler(data, world_size, rank, seed=1)
    trainer = lightning.Trainer(
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=world_size // int(os.environ["LOCAL_WORLD_SIZE"]),
        # `init_sync=False`: DDP must not copy rank 0's weights to all ranks, since it is made before `share`.
        strategy=DDPStrategy(init_sync=False),
        max_epochs=options.epochs,
        callbacks=[InPlace(round, sampler, loops)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=BATCH, sampler=sampler))


def make_data() -> TensorDataset:
    """Stands in for your data set."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(16384, 32, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


if __name__ == "__main__":
    main()
