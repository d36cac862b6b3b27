"""The endpoint's cell, as a node that seeks a leader sees it."""

from __future__ import annotations

from dataclasses import dataclass

from aelastic.rdzv.log.seen import NOTHING_SEEN, Seen
from aelastic.rdzv.protocol import messages as m


@dataclass(slots=True)
class Sight:
    """The cell as last read, and what follows from it."""

    stored: m.StoredCell | None = None
    seen: Seen = NOTHING_SEEN
    is_asked: bool = False  # the endpoint owes an answer
    asked_at: float = 0.0
    names_no_leader: bool = False  # its last answer named no leader that may live
    logs: frozenset[str] = frozenset()  # those seen in it before their verdict: this node belongs to these jobs

    def on_asked(self, now: float) -> None:
        self.is_asked, self.asked_at = True, now

    def on_answered(self, stored: m.StoredCell | None, now: float) -> None:
        """The endpoint has answered."""
        self.is_asked, self.stored = False, stored
        cell = None if stored is None else stored.cell
        self.seen = self.seen.after(cell, now)
        if cell is not None and cell.log is not None and not (cell.committed is not None and cell.committed.is_verdict):
            self.logs |= {cell.log}

    def on_renewed(self, leader: str, term: int, renewals: int, now: float) -> None:
        """The leader reports how often it has renewed the cell."""
        seen = self.seen
        if (leader, term) != (seen.leader, seen.term) or renewals > seen.renewals:
            self.seen = seen.with_(leader, term, renewals, now)

    def note_gone(self, *, is_gone: bool) -> None:
        """Notes whether its last answer named no leader that may live."""
        self.names_no_leader = is_gone

    def on_failed(self) -> None:
        """The endpoint does not answer: its earlier answers are not a reason to campaign."""
        self.is_asked, self.names_no_leader = False, False

    def still_s(self, now: float) -> float:
        """Returns how long the leader in the cell has not renewed it."""
        return now - self.seen.since
