"""Answers of the endpoint about its cell, as the cores of the leader and of the member receive them."""

from __future__ import annotations

from aelastic.base.record import Record
from aelastic.rdzv.protocol import messages as m


class CellAnswered(Record):
    """Answers `ReadCell`, or `WriteCell` of the leader, with the present content of the cell; `None` if it is empty."""

    stored: m.StoredCell | None


class CellFailed(Record):
    """Answers `ReadCell`, or `WriteCell` of the leader: the endpoint does not answer now."""

    reason: str
