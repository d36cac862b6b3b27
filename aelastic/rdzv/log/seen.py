"""An agent's view of the endpoint's cell: a living leader renews it."""

from __future__ import annotations

import math

from aelastic.base.record import Record
from aelastic.rdzv.log.cell import Cell


class Seen(Record):
    """The cell as last seen, and since when its leader has renewed nothing, as far as this agent knows."""

    leader: str
    term: int
    renewals: int
    since: float

    def after(self, cell: Cell | None, now: float) -> Seen:
        leader, term, renewals = ("", 0, 0) if cell is None else (cell.leader, cell.term, cell.renewals)
        return self.with_(leader, term, renewals, now)

    def with_(self, leader: str, term: int, renewals: int, now: float) -> Seen:
        is_same = (leader, term, renewals) == (self.leader, self.term, self.renewals)
        return self if is_same else Seen(leader, term, renewals, now)


NOTHING_SEEN = Seen("", 0, -1, math.inf)
