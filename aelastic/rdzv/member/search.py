"""The search for a leader: since when, why none is found, and when this node gives up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.settings import JOIN_TIMEOUT_S

# Between two looks at the cell.
READ_AGAIN_S = 0.25
# How often the user is shown what this node waits for.
NOTE_INTERVAL_S = 10.0
# The pause before a leader that cannot be followed is asked again doubles each time, up to this.
BACK_OFF_MAX_S = 4.0
# After this long without distrust, the next reason for it is the first again.
TRUST_AGAIN_S = 30.0


@dataclass(slots=True)
class Search:
    """Limits the time without a leader, and tells the user what happens meanwhile.

    Args:
        timeout_s: how many seconds without any leader pass before this node gives up.
        trouble: why there is no leader, in words for the user.
        hint: a note that is added for the user whenever the endpoint is the trouble.
    """

    timeout_s: float = JOIN_TIMEOUT_S
    trouble: str = "no answer from the rendezvous store yet"
    hint: str = ""
    since: float | None = None  # `None`: there is a leader, or the supervisor is not ready
    read_at: float = 0.0  # when the cell is read again
    _note_at: float = 0.0
    _back_off_s: float = 0.0
    _distrusted_at: float = -math.inf
    lacks_quorum: bool = False  # too few nodes that have a vote could be reached in this search
    _is_of_endpoint: bool = True  # the trouble: it has not answered yet, or has failed
    _has_failed: bool = False  # the endpoint: the trouble names it

    @property
    def deadline(self) -> float | None:
        return None if self.since is None else min(self._note_at, self.since + self.timeout_s)

    def begin(self, now: float) -> None:
        if self.since is None:
            self.since, self._note_at = now, now + NOTE_INTERVAL_S

    def blame(self, trouble: str, *, is_of_endpoint: bool = False, lacks_quorum: bool = False) -> None:
        if is_of_endpoint and self.lacks_quorum:
            return  # the missing nodes say more
        self.trouble, self._is_of_endpoint, self._has_failed = trouble, is_of_endpoint, is_of_endpoint
        self.lacks_quorum |= lacks_quorum

    def pause(self, now: float) -> None:
        self.read_at = now + READ_AGAIN_S

    def back_off(self, now: float) -> bool:
        """Notes that a leader cannot be followed; returns whether this is the first time in a while."""
        is_first = now >= self._distrusted_at + TRUST_AGAIN_S
        self._back_off_s = READ_AGAIN_S if is_first else min(2 * self._back_off_s, BACK_OFF_MAX_S)
        self._distrusted_at, self.read_at = now, now + self._back_off_s
        return is_first

    def end(self) -> None:
        self.since, self.lacks_quorum = None, False

    def is_over(self, now: float) -> bool:
        return self.since is not None and now >= self.since + self.timeout_s

    def outcome(self, now: float) -> str:
        return f"no leader for {self._waited_s(now):.0f} s: {self.trouble}"

    def note(self, now: float) -> m.Waiting | None:
        """Returns what this node waits for, whenever it is time to show that to the user; otherwise `None`."""
        if self.since is None or now < self._note_at:
            return None
        self._note_at = now + NOTE_INTERVAL_S
        hint = f" ({self.hint})" if self.hint and self._is_of_endpoint else ""
        text = f"looking for the leader ({self._waited_s(now):.0f} s): {self.trouble}{hint}"
        return m.Waiting(text, kind=m.WaitKind.ENDPOINT if self._has_failed else m.WaitKind.LEADER)

    def validate(self) -> None:
        assert self.since is None or self._note_at >= self.since + NOTE_INTERVAL_S, (
            "nothing is shown in the first seconds of a search"
        )

    def _waited_s(self, now: float) -> float:
        return 0.0 if self.since is None else now - self.since
