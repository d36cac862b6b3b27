"""Callbacks of training loops, under their first name: see `aelastic.training.notice.callbacks`."""

from __future__ import annotations

from aelastic.training.notice.callbacks import lightning_callback, trainer_callback

__all__ = ["lightning_callback", "trainer_callback"]
