"""What one check has found."""

from __future__ import annotations

from typing import Literal

from aelastic.core.record import Record


class Finding(Record):
    """One line: how it is, what was looked at, and what to do where something is wrong."""

    level: Literal["ok", "warning", "error"]
    subject: str
    words: str

    def __str__(self) -> str:
        return f"{self.level:7}  {self.subject}: {' '.join(self.words.split())}"
