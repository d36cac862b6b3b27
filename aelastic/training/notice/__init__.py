"""An announced interruption, in the training script: `due()` is True on every rank at the same call, or on none.

    from aelastic import notice

    for step, batch in enumerate(loader):
        train(batch)
        if notice.due():  # not a collective: it reads 64 bytes of memory shared with the agent
            save(step)
            notice.saved()

The agents hold all ranks at their next call, take the largest count, name a call that no rank has reached, and let them
continue (`rdzv/leader/drain.py`).  Under torchrun, or plain Python, `due()` is False.
"""

from __future__ import annotations

from aelastic.training.notice.page import due as due
from aelastic.training.notice.page import saved as saved

__all__ = ["callbacks", "due", "lightning_callback", "page", "saved", "trainer_callback"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def trainer_callback() -> Any:
    """Returns a callback for Hugging Face's `Trainer`: all ranks save a checkpoint at one step, and wait."""
    from aelastic.training.notice.callbacks import trainer_callback

    return trainer_callback()


def lightning_callback(path: str) -> Any:
    """Returns a callback for Lightning's `Trainer`: all ranks save to `path` after one batch, and wait.

    Args:
        path: of the checkpoint, to pass as `ckpt_path` when the training resumes.
    """
    from aelastic.training.notice.callbacks import lightning_callback

    return lightning_callback(path)
