"""The endpoint's cell, as one leader reads and writes it: its content, the open question, and its silence.

The leader decides what is written there, and when.  One question to the endpoint is open at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from aelastic.base.record import Record
from aelastic.rdzv.leader import leader_events as ev
from aelastic.rdzv.log.cell import Cell
from aelastic.rdzv.log.seen import NOTHING_SEEN, Seen
from aelastic.rdzv.protocol import messages as m

# How soon a cell is read again if reading it failed, or if another leader has it.
READ_AGAIN_S = 0.25


class CellRequest(Record):
    """A request that the endpoint has not answered."""

    at: float
    written: m.StoredCell | None  # `None`: the cell is read


@dataclass(slots=True)
class LeaderCell:
    """The cell of one leader.

    Args:
        word: a random word, for an endpoint that remembers nothing.
        lease_s: the job's lease.
        seen: the cell, as this agent last saw it.
    """

    word: str
    lease_s: float
    seen: Seen = NOTHING_SEEN

    stored: m.StoredCell | None = None  # as it was last read or written
    has_read: bool = False  # whether it was
    due: float = -math.inf  # when to read or renew it
    taken_at: float = -math.inf  # when this leader requested the last write that the endpoint took
    _asked: CellRequest | None = None
    _silent_since: float | None = None  # since when the endpoint owes an answer, or fails
    _words: int = 0  # incarnations that this leader has begun, or requested
    # Since the last write that was answered.
    _lost_writes: list[CellRequest] = field(default_factory=list[CellRequest])

    @property
    def cell(self) -> Cell | None:
        return None if self.stored is None else self.stored.cell

    @property
    def is_asked(self) -> bool:
        """Whether a question is open."""
        return self._asked is not None

    @property
    def has_failed(self) -> bool:
        """Whether the endpoint owes an answer, or has failed to give one."""
        return self._silent_since is not None

    def is_held_by(self, token: str, term: int) -> bool:
        return self.cell is not None and (self.cell.leader, self.cell.term) == (token, term)

    def silent_at(self, for_s: float) -> float | None:
        """Returns when the endpoint will have been silent for this long; `None` if it owes no answer."""
        return None if self._silent_since is None else self._silent_since + for_s

    def is_silent(self, for_s: float, now: float) -> bool:
        at = self.silent_at(for_s)
        return at is not None and now >= at

    def silent_s(self, now: float) -> float:
        """Returns for how long the endpoint has owed an answer."""
        return 0.0 if self._silent_since is None else now - self._silent_since

    def has_taken(self, within_s: float, now: float) -> bool:
        """Returns whether the endpoint has taken a write that this leader requested within this time."""
        return now - self.taken_at <= within_s

    def renew_by(self, at: float) -> None:
        """Makes sure that the cell is read or renewed by then."""
        self.due = min(self.due, at)

    def put_off(self, now: float) -> None:
        """There is nothing to write now."""
        self.due = now + self.lease_s / 3

    def read(self, now: float) -> ev.ReadCell:
        self._ask(None, now, READ_AGAIN_S)
        return ev.ReadCell()

    def write(self, cell: Cell, at: m.LeaderAt, now: float) -> ev.WriteCell:
        # Lost writes are counted as renewals, so this text differs from each of theirs.
        written = m.StoredCell(cell.replace(renewals=cell.renewals + len(self._lost_writes)), at)
        self._ask(written, now, self.lease_s / 3)
        return ev.WriteCell(written)

    def _ask(self, written: m.StoredCell | None, now: float, due_s: float) -> None:
        self._asked, self.due = CellRequest(now, written), now + due_s
        if self._silent_since is None:
            self._silent_since = now

    def new_incarnation(self) -> str:
        self._words += 1
        return self.word if self._words == 1 else f"{self.word}.{self._words}"

    def on_answered(self, stored: m.StoredCell | None, now: float) -> CellRequest | None:
        """Notes an answer; returns the question, or `None` if there was none."""
        asked, self._asked, self._silent_since = self._asked, None, None
        if asked is None:
            return None
        self.has_read, self.stored = True, stored
        self.seen = self.seen.after(self.cell, now)
        for write in (*self._lost_writes, asked):
            if write.written is not None and stored == write.written:
                self.taken_at = write.at
        if asked.written is not None and stored == asked.written:
            self._lost_writes = []
        return asked

    def on_failed(self, now: float, *, must_read: bool) -> None:
        """Notes the lack of an answer."""
        asked, self._asked = self._asked, None
        if asked is not None:
            if asked.written is not None:
                self._lost_writes.append(asked)
            self._silent_since = asked.at if self._silent_since is None else self._silent_since
        self.has_read &= not must_read
        self.due = now + READ_AGAIN_S
