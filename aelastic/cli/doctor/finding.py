"""The result of one check."""

from __future__ import annotations

from typing import Literal

from aelastic.base.record import Record


class Finding(Record):
    """One line: the result, what was checked, and what to do if something is wrong."""

    level: Literal["ok", "warning", "error"]
    subject: str
    words: str

    def __str__(self) -> str:
        return f"{self.level:7}  {self.subject}: {' '.join(self.words.split())}"
