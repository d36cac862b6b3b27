"""Trains with Lightning; if a rank is lost, the others keep their processes and their state.

    pip install lightning
    python -m aelastic --nproc-per-node 4 --max-restarts 3 --preload auto lightning_trainer.py

To see it recover, run `kill -9` with one of the process ids that it prints.
"""

from __future__ import annotations

import argparse
import os

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from aelastic import in_place
from aelastic.training import ResumableSampler, Round
from aelastic.training.frameworks.lightning import InPlace


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.network(inputs), targets)
        step = self.global_step + 1
        if self.global_rank == 0 and step % 64 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()

    lightning.seed_everything(1, verbose=False)
    train(Regression(), options)


@in_place
def train(round: Round, module: Regression, options: argparse.Namespace) -> None:
    """Called in each round of the job.  Trainer, strategy, sampler and loader belong to the round."""
    # In one piece, since all ranks print.
    print(f"rank {os.environ['RANK']} is process {os.getpid()}\n", end="", flush=True)
    data = make_data()
    loader = DataLoader(data, batch_size=64, sampler=ResumableSampler(data, seed=1))
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(
        devices=local_world_size,
        num_nodes=int(os.environ["WORLD_SIZE"]) // local_world_size,
        # DDP must not copy rank 0's weights to all ranks, since it is made before `InPlace` shares the state.
        strategy=DDPStrategy(init_sync=False),
        max_epochs=options.epochs,
        callbacks=[InPlace(round, loader)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)


def make_data() -> TensorDataset:
    """Stands in for your data set."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(16384, 32, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


if __name__ == "__main__":
    main()
