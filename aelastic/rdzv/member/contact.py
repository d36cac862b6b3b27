"""Contact with the coordinator: when a coordinator that lives must have given this node up.

The story behind it: a switch cuts this node off from the coordinator alone.  The coordinator has not heard of the node
for a lease, and begins the next round without it; this node cannot be told, and its workers go on writing checkpoints
beside those of that round.  But the board can be read, and shows that the leader still renews.  So a node that has not
heard from such a leader for a lease and a little more stops its workers by itself.

A leader that does not renew either may be dead: then no round goes on, and there is nothing to stop for.
"""

from __future__ import annotations

from dataclasses import dataclass

from aelastic.decisions.cause import Cause, CauseKind
from aelastic.rdzv.leader_record import LeaderRecord
from aelastic.rdzv.survivors.election import CHOSEN_S

# After a lease without a message.
MARGIN_S = 0.7
# A renewal may have been the last thing that the leader did before its host fell silent; it renews three times a lease.
RENEWALS_OF_A_LIVING_LEADER = 2
# Between two looks at the board, while its renewals do not say yet whether the leader lives.
LOOK_AGAIN_S = 0.25


@dataclass(slots=True)
class Contact:
    """Since when this node has heard nothing from the leader.

    Args:
        lease_s: seconds of silence after which a coordinator gives up a node.
    """

    lease_s: float
    since: float = 0.0  # the last message of the leader, or when the board first showed it
    board_at: float = 0.0  # the board's last answer
    look_at: float = 0.0  # when the board is read next, to see whether the leader lives, or another leads
    _term: tuple[int, str] = (0, "")  # epoch and token of the leader
    _renewals: int = 0  # of it, as the board counted them by then
    _awaits_elected: bool = False  # one that nodes have elected since

    def begin(self, record: LeaderRecord, renewals: int, now: float) -> None:
        """A leader is there: it has welcomed this node, or the board shows it; with so many renewals."""
        self._term = record.epoch, record.candidate.token
        self.on_heartbeat(renewals, now)

    def on_heartbeat(self, renewals: int, now: float) -> None:
        """The leader that this node follows lives, and has renewed so often."""
        self.since, self._renewals, self._awaits_elected = now, renewals, False
        self.look_at = self.given_up_at

    def on_elected(self, now: float) -> None:
        """Nodes have elected a leader, or this node has voted for one: the first one gets time to start.

        The story behind it: among nodes that are cut off nobody wins, and each votes for one candidate after another.
        If every candidate got a lease, workers would run beside the next round of the others until the cut is over.
        """
        if not self._awaits_elected:
            self._awaits_elected = True
            self.since = max(self.since, now + CHOSEN_S - self.lease_s - MARGIN_S)
            self.look_at = self.given_up_at

    def on_board(self, now: float) -> None:
        """The board has answered."""
        self.board_at = now

    def on_woken(self, now: float) -> None:
        """This process was stopped: the leader gets a third of a lease to be heard."""
        self.since = max(self.since, now - self.lease_s * 2 / 3)
        self.look_at = self.given_up_at

    def given_up(self, record: LeaderRecord, now: float) -> Cause | None:
        """The cause, if the board shows a leader that lives, and that this node has not heard from for too long.

        Another leader than before waits for the nodes of the round: it gets as long to be heard.
        """
        if (record.epoch, record.candidate.token) != self._term:
            self.begin(record, record.renewals or 0, now)
        renewals = record.renewals or 0
        # Where nodes have elected the leader, the board counts from when it knew of that.
        self._renewals = min(self._renewals, renewals)
        if now < self.given_up_at or renewals < self._renewals + RENEWALS_OF_A_LIVING_LEADER:
            return None
        return Cause(CauseKind.REMOVED, within_s=now - self.since)

    @property
    def given_up_at(self) -> float:
        """From when on a leader that lives has given this node up."""
        return self.since + self.lease_s + MARGIN_S

    def is_cut_off(self, now: float) -> bool:
        """Neither the leader nor the board is heard: the others may have elected another leader."""
        return now >= self.given_up_at and now >= self.board_at + self.lease_s / 2

    def look_again(self, now: float) -> None:
        self.look_at = now + LOOK_AGAIN_S
        if now < self.given_up_at < self.look_at:
            self.look_at = self.given_up_at
