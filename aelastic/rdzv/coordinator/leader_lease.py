"""How long our reign is certain: until a lease after the last time the board said that it is ours.  Pure.

Once that is past, another may reign.  The story behind it: the coordinator's process is stopped, the others elect
another and go on; ours wakes up, sees that everybody is gone, and with `--nnodes 1:3` would start a second job of its
own on the same checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

# The share of a lease that we trust after the board has said that the reign is ours.  A board that forgets us by itself
# counts from later than we do, and so do those who watch our beat; the rest is for clocks that differ.
TENURE = 0.9


@dataclass(slots=True)
class Tenure:
    """Our reign, as far as we know.

    Args:
        epoch: of the reign.
        lease_s: seconds for which the board's word holds.
        started: when the claim was asked for.
        beat: how often the reign was kept: where the board counts that, as the board has it.
    """

    epoch: int
    lease_s: float
    started: float
    beat: int = 0
    is_reclaiming: bool = False  # the board is asked for a newer epoch: until it answers, nothing is certain
    certain_until: float = 0.0
    keep_at: float = 0.0  # when the board is to be told again that we live
    _asked_at: float | None = None  # since when the board owes us an answer

    def __post_init__(self) -> None:
        self.certain_until = self.started + self._trusted_s
        self.keep_at = self.started + self.lease_s / 3

    @property
    def _trusted_s(self) -> float:
        return self.lease_s * TENURE

    def is_certain(self, now: float) -> bool:
        return now <= self.certain_until and not self.is_reclaiming

    def keep(self, now: float) -> bool:
        """It is time to tell the board that we live; gives whether to: not while it owes us an answer."""
        self.keep_at = now + self.lease_s / 3
        if self._asked_at is not None:
            return False
        self._asked_at = now
        return True

    def on_kept(self, now: float, renewals: int | None) -> bool:
        """The board says that the reign is ours; gives whether that is news: a claim may have come between.

        Args:
            now: the time.
            renewals: as the board has them; `None` where it does not count.  The story behind it: a renewal takes
                effect and its answer is lost, so the board has one more than we.  Did we count by ourselves, members
                would hear less than the board says from then on, and take a dead coordinator's last renewal for one
                made just now: each later fail-over would take a lease more.
        """
        if self._asked_at is None or self.is_reclaiming:
            return False
        self.certain_until, self._asked_at = self._asked_at + self._trusted_s, None
        self.keep_at = min(self.keep_at, now + self.lease_s / 3)
        self.beat = self.beat + 1 if renewals is None else renewals
        return True

    def on_keep_failed(self) -> bool:
        """The board is away; gives whether that answers what it was asked last: likewise."""
        if self.is_reclaiming:
            return False
        self._asked_at = None
        return True

    def reclaim(self, now: float) -> None:
        """The board is asked for a newer epoch."""
        self.is_reclaiming, self._asked_at = True, now

    def on_reclaimed(self, epoch: int) -> None:
        """The reign is ours, in an epoch that may be the old one."""
        assert self._asked_at is not None
        if epoch > self.epoch:
            self.certain_until, self.beat = self._asked_at + self._trusted_s, 0
        self.epoch, self._asked_at, self.is_reclaiming = epoch, None, False
