"""Watches the leader: is the job's coordinator alive, and does it still lead?

Four signs, each with its own limit:

- **Silence.** A coordinator says something at least three times a lease.  One that is silent for a lease is lost; one
  that has yet to answer `Hello` may take some leases: thousands of nodes may greet it at once.
- **Renewals that stand still.** Heartbeats carry the coordinator's count of renewals.  While it stands still, the
  coordinator cannot reach the board, and another agent may have been elected: then the board is checked, beside the
  connection.  If the count on the board itself stands still for a lease, the coordinator is gone.  When a heartbeat is
  late the board is read, too: a renewal that was not heard counts from when it was seen.
- **A refused port.** A port that accepted this node before and refuses it now: the coordinator's process has ended, if
  its connection was closed just before, as the kernel of a process that ends does, or if this is its machine.  Else
  something in between may refuse in its name (a proxy, a firewall that resets connections): then it is a reason to
  doubt, and the count of renewals need not stand still for that long, until an attempt fails in another way.
- **Goodbye.** The coordinator says that it leads no longer; its agent leaves, or stays a node.

A coordinator that only this node cannot reach is not gone: it stays the leader, and this node keeps trying.

Leaders are told apart by their tokens, which are never the same twice: a board that has lost its data counts epochs
from the beginning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum, auto

from aelastic.rdzv.leader_record import LeaderRecord

# A coordinator is late with a heartbeat: the board is read.  It may have renewed since, and then its count must stand
# still for a lease from when this node has seen that, which is to be soon.
LATE_LEASES = 0.5
# Between two reads of the board, while there is no connection.
READ_AGAIN_S = 0.25
# A coordinator that thousands of nodes greet at once takes its time; a node that hangs up and comes back costs it more.
GREETING_LEASES = 3
# A coordinator renews three times a lease: one whose port refuses, too, has missed two renewals.
DOUBTED_LEASES = 2 / 3
# A coordinator whose count of renewals stands still for so long has lost the board, or the board is away.
CHECK_LEASES = 1.5

NOTHING_SEEN = (0, "", 0, 0.0)


class WatchPhase(StrEnum):
    AWAY = auto()  # not connected
    GREETING = auto()  # connected; the coordinator has not answered `Hello`
    FOLLOWING = auto()  # the coordinator has welcomed this node


@dataclass(slots=True)
class LeaderWatch:
    """What this node knows of its coordinator.

    Args:
        lease_s: seconds of silence after which a coordinator is lost.
    """

    lease_s: float

    phase: WatchPhase = WatchPhase.AWAY
    epoch: int = 0  # the newest that has welcomed this node
    is_takeover: bool = False  # the last coordinator went away, and did not say that its agent stays a node
    is_checking: bool = False  # the board was asked whether the coordinator still leads
    heard_at: float = 0.0  # the last message
    check_at: float = 0.0
    _check_s: float = 0.0
    _token: str = ""  # of the leader that welcomed this node last
    _is_refused: bool = False  # its port, which accepted this node before, refuses connections
    _is_closed: bool = False  # it has closed its connection with this node, without a goodbye
    _goodbye_token: str = ""  # it said that it leads no longer
    renewals: int = -1  # the last count heard from the coordinator
    _still: tuple[int, str, int, float] = NOTHING_SEEN  # epoch, token and renewals, as last read on the board; when
    _looked_at: float = 0.0  # when the board was last asked for that, in a silence

    @property
    def silent_at(self) -> float:
        """When silence will have lasted too long."""
        return self.heard_at + self.silence_s

    @property
    def silence_s(self) -> float:
        return self.lease_s * (GREETING_LEASES if self.phase is WatchPhase.GREETING else 1)

    @property
    def deadline(self) -> float | None:
        return None if self.phase is WatchPhase.AWAY else min(self.silent_at, self.check_at, self.late_at)

    @property
    def late_at(self) -> float:
        """When a heartbeat is missed, and the board has not been read since the last."""
        is_awaited = self.phase is WatchPhase.FOLLOWING and self._looked_at <= self.heard_at
        return self.heard_at + self.lease_s * LATE_LEASES if is_awaited else math.inf

    def validate(self) -> None:
        is_known = bool(self._token) or not (self._is_refused or self._is_closed)
        assert is_known, "only a leader that welcomed this node can refuse it"
        if self.phase is WatchPhase.FOLLOWING:
            assert self._token, "this node follows a leader that welcomed it"
            assert not self._is_refused, "a leader that this node is connected to does not refuse it"
            assert not self.is_takeover, "a leader that this node follows has not gone away"

    # The connection.

    def on_connected(self, now: float) -> None:
        """A connection is there, and `Hello` on its way."""
        self.phase, self.heard_at = WatchPhase.GREETING, now
        # The kernel accepts connections for a suspended process too: after a loss look soon.
        self._check_s = READ_AGAIN_S if self.is_takeover else self.lease_s
        self.check_at = now + self._check_s

    def on_connect_failed(self, token: str, *, is_refused: bool, is_here: bool) -> bool:
        """A leader cannot be reached; true if that says something new: that it is gone.

        A refusal is proof after a close of the connection, but only at once.  The story behind it: a switch lets
        nothing through to the leader, which gives this node up and hangs up.  This node's attempts to connect are not
        answered, and later something in between refuses in the leader's name.  Nor is a refusal a reason to doubt a
        leader that a later attempt could not reach for another reason.
        """
        if not is_refused:
            self._is_closed = self._is_refused = False
        if not is_refused or not token or token != self._token or self._is_refused:
            return False
        self._is_refused = True
        self._is_closed |= is_here
        return self.is_dead

    def on_heard(self, now: float) -> None:
        """A message has come."""
        self.heard_at = now

    def ask_board(self) -> bool:
        """The board is to be asked whether the coordinator still leads; false if that is under way."""
        was_checking, self.is_checking = self.is_checking, True
        return not was_checking

    def on_checked(self) -> None:
        """The board has answered, or cannot."""
        self.is_checking = False

    def forget_refusal(self) -> None:
        """A port that refused is asked again."""
        self._is_refused = False

    @property
    def is_dead(self) -> bool:
        """The process of the leader that this node followed last has ended."""
        return self._is_refused and self._is_closed

    def on_welcome(self, record: LeaderRecord, epoch: int, now: float) -> bool:
        """The coordinator has taken this node in, or goes on in a newer epoch.

        Args:
            record: of the leader, as the board has shown it.
            epoch: as the leader says it; newer than the record's if it was elected again meanwhile.
            now: the time.

        Returns:
            Whether it is another leader, or the same in another epoch.
        """
        token = record.candidate.token
        is_new = (epoch, token) != (self.epoch, self._token)
        if is_new:
            self.renewals = -1
        # It lives after what the board has shown of it, or after it was elected again.
        self.renewals = max(self.renewals, (record.renewals or 0) if epoch == record.epoch else 0)
        self.phase = WatchPhase.FOLLOWING
        self._check_s = CHECK_LEASES * self.lease_s
        self.check_at = now + self._check_s
        self.epoch, self._token = epoch, token
        self.is_takeover = self._is_refused = self._is_closed = False
        self._still = NOTHING_SEEN
        return is_new

    def on_heartbeat(self, renewals: int, now: float) -> None:
        if renewals != self.renewals:
            self.renewals, self.check_at = renewals, now + self._check_s
            self._still = NOTHING_SEEN

    def on_disconnected(self, *, is_lost: bool, is_closed: bool = False) -> None:
        """The connection is no more.

        Args:
            is_lost: it broke, or the coordinator was silent for too long or is dead.
            is_closed: the coordinator has closed it.
        """
        if is_closed and self.phase is WatchPhase.FOLLOWING:
            self._is_closed = True
        self.phase = WatchPhase.AWAY
        self.is_takeover |= is_lost

    def on_goodbye(self, token: str, *, is_gone: bool) -> None:
        """The coordinator leads no longer, and its agent leaves or stays a node."""
        self.phase, self.is_takeover, self._goodbye_token = WatchPhase.AWAY, is_gone, token

    def on_woken(self, due: float, now: float) -> bool:
        """True if a deadline passed long ago: this process was stopped (SIGSTOP, a frozen container).

        What the coordinator said meanwhile may be in the socket, so it gets a third of a lease to be heard.
        """
        if self.phase is not WatchPhase.FOLLOWING or now - due <= self.lease_s / 3:
            return False
        self.heard_at = max(self.heard_at, now - self.lease_s * 2 / 3)
        return True

    # The board.

    def begin_check(self, now: float) -> bool:
        """It is time to check the board; false while an earlier check is unanswered."""
        if self.phase is WatchPhase.GREETING:
            self._check_s = min(2 * self._check_s, self.lease_s)  # thousands of nodes may do the same
        self.check_at, self._looked_at = now + self._check_s, now
        return self.ask_board()

    def is_replaced(self, found: LeaderRecord | None, record: LeaderRecord, now: float) -> bool:
        """True if a check of the board shows that this node is connected to the wrong agent.

        A coordinator may be cut off from the board, and live on in a round that the board knows nothing of.  One that
        has accepted the connection and does not answer `Hello` may be suspended.

        Args:
            found: the leader record that was read.
            record: of the agent that this node is connected to.
            now: the time.
        """
        if self.phase is WatchPhase.FOLLOWING:
            if found is not None:
                self._still_since(found, now)
            return found is not None and found.epoch > self.epoch
        if found is None or found.candidate.token != record.candidate.token or self.is_gone(found, now):
            return True
        if not found.is_elected:  # looks again when its count has stood still for too long
            self.check_at = min(self.check_at, self._still_since(found, now) + self.lease_s)
        return False

    def is_gone(self, record: LeaderRecord, now: float) -> bool:
        """True if the coordinator is known to be dead: its port refuses, or its count of renewals stands still."""
        is_last = record.candidate.token == self._token  # that this node followed
        if is_last and self.is_dead:
            return True
        if record.is_elected:
            return False  # no store counts its renewals
        leases = DOUBTED_LEASES if is_last and self._is_refused else 1
        return now - self._still_since(record, now) >= self.lease_s * leases

    def _still_since(self, record: LeaderRecord, now: float) -> float:
        """Since when the count of renewals has stood still, for all that this node knows."""
        term, renewals = (record.epoch, record.candidate.token), record.renewals or 0
        if self._still[:3] != (*term, renewals):
            is_known = term == (self.epoch, self._token) and renewals == self.renewals
            # Of a renewal that this node has not heard of it does not know when it was asked for: a board that was
            # slow or away may have taken it just now.  It may count fewer than were heard: nodes elected that leader.
            self._still = (*term, renewals, self.heard_at if is_known else now)
        return self._still[3]

    def may_reconnect(self, record: LeaderRecord) -> bool:
        """True for the leader that this node knows, unless it said goodbye: no board is needed to connect to it."""
        return record.epoch == self.epoch and record.candidate.token != self._goodbye_token
