"""Callbacks that save at the agreed step, for training loops of frameworks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from aelastic.training.notice.page import due, saved


def trainer_callback() -> Any:
    """For `transformers.Trainer`, which saves after `on_step_end` if that requests it."""
    base: Any = import_module("transformers").TrainerCallback

    class SaveOnNotice(base):  # type: ignore[misc]  # the package need not be installed
        is_due = False

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:  # noqa: ARG002
            self.is_due = due()
            control.should_save |= self.is_due
            return control

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> Any:  # noqa: ARG002
            if self.is_due:
                self.is_due = False
                saved()
            return control

    return SaveOnNotice()


def lightning_callback(path: str) -> Any:
    """For Lightning, under either of its names."""
    try:
        base: Any = import_module("lightning.pytorch").Callback
    except ImportError:
        base = import_module("pytorch_lightning").Callback

    class SaveOnNotice(base):  # type: ignore[misc]  # as above
        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            if due():
                trainer.save_checkpoint(path)
                saved()

    return SaveOnNotice()
