"""Announced interruptions, under the name that training scripts import: see `aelastic.training.notice`."""

from __future__ import annotations

from aelastic.training.notice.page import due, saved

__all__ = ["due", "lightning_callback", "saved", "trainer_callback"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def trainer_callback() -> Any:
    """See `aelastic.training.notice.trainer_callback`."""
    from aelastic.training.notice.callbacks import trainer_callback

    return trainer_callback()


def lightning_callback(path: str) -> Any:
    """See `aelastic.training.notice.lightning_callback`."""
    from aelastic.training.notice.callbacks import lightning_callback

    return lightning_callback(path)
