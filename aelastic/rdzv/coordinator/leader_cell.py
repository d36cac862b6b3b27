"""The endpoint's cell, as one leader reads and writes it: what it says, what was asked, and since when it is silent.

What is written there, and when, is the leader's business.  One question to the endpoint is open at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from aelastic.core.record import Record
from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.log.cell import Cell
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.seen import NOTHING_SEEN, Seen

# A cell that could not be read, or that another leader has, is read again so soon.
READ_AGAIN_S = 0.25


class Asked(Record):
    """A question to the endpoint that has not been answered."""

    at: float
    written: m.StoredCell | None  # `None`: the cell is read


@dataclass(slots=True)
class LeaderCell:
    """The cell of one leader.

    Args:
        word: a random one, for an endpoint that remembers nothing.
        lease_s: of the job.
        seen: the cell, as this agent has seen it last.
    """

    word: str
    lease_s: float
    seen: Seen = NOTHING_SEEN

    stored: m.StoredCell | None = None  # as it was read or written last
    has_read: bool = False  # it was
    due: float = -math.inf  # when to read or renew it
    _asked: Asked | None = None
    _taken_at: float = -math.inf  # when the last write that the endpoint took was asked for
    _silent_since: float | None = None  # since when the endpoint owes an answer, or fails
    _words: int = 0  # incarnations that this leader has begun, or has asked for
    _lost_writes: list[Asked] = field(
        default_factory=list[Asked]
    )  # since the last answered one: some may be carried out

    @property
    def cell(self) -> Cell | None:
        return None if self.stored is None else self.stored.cell

    @property
    def is_asked(self) -> bool:
        """Whether an answer is open."""
        return self._asked is not None

    @property
    def has_failed(self) -> bool:
        """Whether the endpoint owes an answer, or has failed to give one."""
        return self._silent_since is not None

    def is_held_by(self, token: str, term: int) -> bool:
        return self.cell is not None and (self.cell.leader, self.cell.term) == (token, term)

    def silent_at(self, for_s: float) -> float | None:
        """When the endpoint will have been silent for so long; `None`: it owes no answer."""
        return None if self._silent_since is None else self._silent_since + for_s

    def is_silent(self, for_s: float, now: float) -> bool:
        at = self.silent_at(for_s)
        return at is not None and now >= at

    def has_taken(self, within_s: float, now: float) -> bool:
        """Whether the endpoint has taken a write that was asked for within this time."""
        return now - self._taken_at <= within_s

    def renew_by(self, at: float) -> None:
        """It is read or renewed by then, at the latest."""
        self.due = min(self.due, at)

    def put_off(self, now: float) -> None:
        """There is nothing to write now."""
        self.due = now + self.lease_s / 3

    def read(self, now: float) -> ev.ReadCell:
        self._ask(None, now, READ_AGAIN_S)
        return ev.ReadCell()

    def write(self, cell: Cell, at: m.LeaderAt, now: float) -> ev.WriteCell:
        # With lost writes counted as renewals, this text is none of theirs.
        written = m.StoredCell(cell.replace(renewals=cell.renewals + len(self._lost_writes)), at)
        self._ask(written, now, self.lease_s / 3)
        return ev.WriteCell(written)

    def _ask(self, written: m.StoredCell | None, now: float, due_s: float) -> None:
        self._asked, self.due = Asked(now, written), now + due_s
        if self._silent_since is None:
            self._silent_since = now

    def new_incarnation(self) -> str:
        self._words += 1
        return self.word if self._words == 1 else f"{self.word}.{self._words}"

    def on_said(self, stored: m.StoredCell | None, now: float) -> Asked | None:
        """Notes an answer; gives the question, or `None` if there was none."""
        asked, self._asked, self._silent_since = self._asked, None, None
        if asked is None:
            return None
        self.has_read, self.stored = True, stored
        self.seen = self.seen.after(self.cell, now)
        for write in (*self._lost_writes, asked):
            if write.written is not None and stored == write.written:
                self._taken_at = write.at
        if asked.written is not None and stored == asked.written:
            self._lost_writes = []
        return asked

    def on_failed(self, now: float, *, must_read: bool) -> None:
        """Notes that there is no answer."""
        asked, self._asked = self._asked, None
        if asked is not None:
            if asked.written is not None:
                self._lost_writes.append(asked)
            self._silent_since = asked.at if self._silent_since is None else self._silent_since
        self.has_read &= not must_read
        self.due = now + READ_AGAIN_S
