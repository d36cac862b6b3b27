"""Trains with Lightning, and resumes from its last checkpoint after a restart.

    pip install lightning
    python -m aelastic --nproc-per-node 2 --max-restarts 3 lightning_trainer.py

To see it resume, run `kill -9` with one of the process ids that it prints.  Lightning recognizes the environment of
torchrun, which is also that of aelastic, and starts no processes of its own.
"""

from __future__ import annotations

import argparse
import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.network(inputs), targets)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def on_train_start(self) -> None:
        if self.trainer.is_global_zero:
            epoch = self.current_epoch
            print(f"resuming after epoch {epoch}" if epoch else "starting from scratch", flush=True)

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["loss"]
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch + 1}: loss {loss:.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--checkpoints", default="checkpoints")
    options = parser.parse_args()

    lightning.seed_everything(1, verbose=False)
    trainer = lightning.Trainer(
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=options.epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        # `save_last` writes `last.ckpt` at the end of each epoch.
        callbacks=[ModelCheckpoint(dirpath=options.checkpoints, save_last=True)],
    )
    print(
        f"rank {trainer.global_rank} is process {os.getpid()}\n", end="", flush=True
    )  # in one piece, since all ranks print
    loader = DataLoader(make_data(), batch_size=64, shuffle=True)  # Lightning gives each rank its share
    # "last" is the newest checkpoint, and nothing at the first start: a restart is not a special case.
    trainer.fit(Regression(), loader, ckpt_path="last")


def make_data() -> TensorDataset:
    """Stands in for your data set."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(16384, 32, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


if __name__ == "__main__":
    main()
