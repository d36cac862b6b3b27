"""Lightning's `Trainer.fit` in a decorated function: the callback `InPlace`, and a `ResumableSampler` for the data."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from aelastic.training.late import Value
from aelastic.training.rounds import Round
from aelastic.training.sampler import ResumableSampler

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # Lightning under its other name
    from pytorch_lightning import Callback, LightningModule, Trainer


class InPlace(Callback):
    """Shares the state as `fit` begins, and commits each step.

        loader = DataLoader(data, batch_size=64, sampler=ResumableSampler(data))
        trainer = Trainer(strategy=DDPStrategy(init_sync=False), callbacks=[InPlace(round, loader)], ...)
        trainer.fit(module, loader)

    Make trainer, strategy and loader in the decorated function, and the module outside.  `init_sync=False` keeps DDP,
    which Lightning makes before this callback shares the state, from copying rank 0's weights to all ranks.
    """

    def __init__(
        self,
        round: Round,
        *loaders: DataLoader[Any],
        seed: int | None = 0,
        checkpoint: str | None = None,
        replicas: Callable[[Trainer], Any] | None = None,
    ) -> None:
        """Takes the training loaders, each with a `ResumableSampler`.

        Args:
            round: of the decorated function.
            seed: with the batch's number and the rank, it seeds torch before each batch, such as for dropout, because
                the random states of a lost rank are gone.  None: the module does it.
            checkpoint: a file that `ModelCheckpoint` has saved, or will save; loaded if no rank has the state.
            replicas: returns the group that `Round.share` needs if the parameters are sharded over ranks.

        Raises:
            TypeError: a loader has another sampler.
        """
        self.start = 0  # the step that this round began at
        self._round = round
        self._data: list[tuple[ResumableSampler, int]] = []  # with the size of a batch
        self._seed = seed
        self._checkpoint = checkpoint
        self._replicas = replicas
        self._loops = Value()
        self._is_at_end = False  # of an epoch
        self._committed = 0
        for loader in loaders:
            if not isinstance(loader.sampler, ResumableSampler):
                name = type(loader.sampler).__name__
                raise TypeError(f"InPlace: the loader's sampler is a {name}: give it a ResumableSampler")
            self._data.append((loader.sampler, loader.batch_size or 1))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shares the state: the optimizers exist, and so does DDP, which has copied nothing yet."""
        if trainer.ckpt_path:  # it was also loaded into survivors, and would be again after this
            raise ValueError("InPlace: fit(ckpt_path=...) replaces the state of survivors: use InPlace(checkpoint=...)")
        state = [pl_module, *trainer.optimizers, *(each.scheduler for each in trainer.lr_scheduler_configs)]
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # with "16-mixed"
        if scaler is not None:
            state.append(scaler)
        replicas = None if self._replicas is None else self._replicas(trainer)
        self.start = self._committed = self._round.share(
            *state, self._loops, load=lambda: self._load(trainer, pl_module), replicas=replicas
        )
        if self._loops.value is not None:
            trainer.fit_loop.load_state_dict(self._loops.value)
            self._resume_data(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_at_end:
            # Otherwise Lightning counts one epoch too few, and repeats its batches after another recovery (2.6).
            trainer.fit_loop.reset_restart_stage()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._seed is not None:
            number = trainer.fit_loop.total_batch_idx
            torch.manual_seed(self._seed + number * trainer.world_size + trainer.global_rank)

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step > self._committed:  # with accumulation, not after each batch
            self._committed = trainer.global_step
            self._loops.value = trainer.fit_loop.state_dict()
            self._round.commit(self._committed)

    def _load(self, trainer: Trainer, pl_module: LightningModule) -> int | None:
        if self._checkpoint is None or not os.path.exists(self._checkpoint):
            return None
        saved = trainer.strategy.load_checkpoint(self._checkpoint)
        pl_module.load_state_dict(saved["state_dict"])
        for optimizer, state in zip(trainer.optimizers, saved["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
        for config, state in zip(trainer.lr_scheduler_configs, saved["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        self._loops.value = saved["loops"]["fit_loop"]
        return int(saved["global_step"])

    def _resume_data(self, trainer: Trainer) -> None:
        """Makes samplers skip the seen batches: Lightning counts from the batch that it resumes at, but skips none.

        It sets a sampler's epoch after the workers of a loader have begun to fetch, which is too late (2.6).
        """
        batches = trainer.fit_loop.epoch_loop.batch_progress
        self._is_at_end = batches.is_last_batch
        epoch, seen = trainer.current_epoch, batches.current.processed
        for sampler, batch_size in self._data:
            sampler.set_epoch(epoch + 1 if self._is_at_end else epoch)
            sampler.skip(0 if self._is_at_end else seen * batch_size)
