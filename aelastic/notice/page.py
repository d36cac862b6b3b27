"""A worker's page, under its first name: see `aelastic.training.notice.page`."""

from __future__ import annotations

from aelastic.training.notice.page import due, saved

__all__ = ["due", "saved"]
