"""The `Trainer` of transformers in a decorated function: `train_in_place` instead of `trainer.train()`."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import transformers
from transformers import Trainer, TrainerCallback, TrainerState

from aelastic.training.late import Late, Value
from aelastic.training.rounds import Round

# Private: what `Trainer.train(resume_from_checkpoint=…)` calls to read the weights from the folder.
_LOAD_WEIGHTS = "_load_from_checkpoint"
_STATE_FILE = "trainer_state.json"  # in the folder


def train_in_place(round: Round, trainer: Trainer, resume_from_checkpoint: str | bool | None = None) -> Any:
    """Shares the trainer's state, and trains from the step that all ranks have; each step is committed.

    Make the trainer and its arguments in the decorated function, and the model outside.

    Args:
        round: of the decorated function.
        trainer: of any class, on each rank.
        resume_from_checkpoint: as in `Trainer.train`; used if no rank has the state.

    Returns:
        The result of `Trainer.train`; None if the training has ended, and only another rank was lost after it.
    """
    optimizer, scheduler, progress = Late(), Late(), Value()
    state = [trainer.model, optimizer, scheduler, progress]
    scaler = getattr(trainer.accelerator, "scaler", None)  # with fp16
    start = round.share(*state) if scaler is None else round.share(*state, scaler)
    commits = _Commits(round, optimizer, scheduler, progress)
    trainer.add_callback(commits)
    if progress.value is None:
        return trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    assert progress.value["state"]["global_step"] == start, progress.value
    trainer.state = _trainer_state(progress.value["state"])
    if progress.value["is_last_step"]:
        return None
    setattr(trainer, _LOAD_WEIGHTS, _load_nothing)
    with tempfile.TemporaryDirectory() as folder:  # the trainer takes the step to resume at from a file only
        trainer.state.save_to_json(os.path.join(folder, _STATE_FILE))
        return trainer.train(resume_from_checkpoint=folder)


class _Commits(TrainerCallback):
    def __init__(self, round: Round, optimizer: Late, scheduler: Late, progress: Value) -> None:
        self._round = round
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._progress = progress

    def on_train_begin(self, args: Any, state: Any, control: Any, **made: Any) -> None:
        optimizer = made["optimizer"]
        self._round.attach(self._optimizer, getattr(optimizer, "optimizer", optimizer))  # accelerate has wrapped it
        self._round.attach(self._scheduler, made["lr_scheduler"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Gives each step random states of its own, such as for dropout: those of a lost rank are gone."""
        transformers.set_seed(args.seed + state.global_step * args.world_size + args.process_index)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The scheduler has moved, and the collectives of logging, evaluation and saving come later.
        self._progress.value = {"state": vars(state).copy(), "is_last_step": control.should_training_stop}
        self._round.commit(state.global_step)


def _trainer_state(fields: dict[str, Any]) -> TrainerState:
    state = TrainerState()
    vars(state).update(fields)
    return state


def _load_nothing(*_: Any, **__: Any) -> None:
    """Replaces the trainer's own loading: `share` has brought the weights."""
