"""A member: how this node finds the job's coordinator, stays with it, and becomes it when it is lost.

Between the supervisor, which tells of the workers, and one connection to whoever coordinates.  Pure:
`agent_link.py` carries out what is asked for.

- **Looking**: ask the board.  Nobody coordinates: claim it.  Somebody does: connect, and say where we stand.
- **Member**: what the supervisor tells goes up, what the coordinator decides goes down, both know that the other lives.
- A coordinator whose beat stands still is cut off from the board, as far as we can tell; then we look there whether
  another reigns by now.
- **Coordinator lost**: a broken connection is tried again at once; then the board is asked.  We claim the reign of one
  who is certainly gone: its port refuses us though it took us before, or its beat on the board has stood still for a
  lease.  One whom only we cannot reach keeps its reign, and we keep trying.

Nothing that was said is kept to be said again: with each connection the node says where it stands (`Past`), and that
is all a coordinator needs, be it the same or another.  A reign is fenced by its epoch: word from one older than the
newest we have known is not heard.  The story behind it: a coordinator is suspended, another is elected, the first
wakes up and answers a node that still has its address.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto
from typing import assert_never

from aelastic.failures.failure import ProcessFailure
from aelastic.rdzv.board import LeaderRecord
from aelastic.rdzv.member.member_events import (
    Action,
    BoardFailed,
    BoardRead,
    Campaign,
    Connect,
    Connected,
    ConnectFailed,
    ConnectionLost,
    DeadlinePassed,
    Deliver,
    Disconnect,
    Event,
    GiveUp,
    Lead,
    LeadershipLost,
    NotEligible,
    ReadBoard,
    Received,
    Send,
    Submitted,
)
from aelastic.rdzv.protocol.codec import PROTOCOL, WireError, from_text
from aelastic.rdzv.protocol.messages import (
    Alive,
    Assigned,
    CoordinatorMessage,
    Departed,
    Downward,
    Ended,
    Failed,
    Goodbye,
    Heartbeat,
    Hello,
    Interrupted,
    Left,
    Node,
    NodeMessage,
    Past,
    Probe,
    Ready,
    Refused,
    Standing,
    Succeeded,
    Terms,
    Waiting,
    Welcome,
)
from aelastic.rdzv.settings import JOIN_TIMEOUT_S, LEASE_S

# Between two looks at the board, while there is nobody to be connected to.
LOOK_AGAIN_S = 0.25
# A coordinator that thousands greet at once takes its time; who hangs up and comes back costs it more.
GREETING_LEASES = 3
# A coordinator whose beat stands still for so long has lost the board, or the board is away.
GLANCE_LEASES = 1.5
# So often people are told what we wait for.
NOTE_INTERVAL_S = 10.0


class Phase(StrEnum):
    IDLE = auto()  # the supervisor has not asked for anything
    READING = auto()  # the board has been asked
    CAMPAIGNING = auto()  # likewise
    PAUSING = auto()  # until we look again
    CONNECTING = auto()
    GREETING = auto()  # said hello
    MEMBER = auto()
    OVER = auto()  # we have left, or the job has ended


@dataclass(slots=True)
class Member:
    """One node's side of the rendezvous.

    Args:
        node_id: new each time an agent starts.
        terms: what the user told this agent about the job.
        lease_s: seconds of silence after which a coordinator is lost.
        join_timeout_s: seconds without any coordinator after which this node gives up.
    """

    node_id: str
    terms: Terms
    lease_s: float = LEASE_S
    join_timeout_s: float = JOIN_TIMEOUT_S

    phase: Phase = Phase.IDLE
    is_leader: bool = False
    # Where we stand.
    node: Node | None = None
    standing: Standing = Standing.READY
    assigned: Assigned | None = None  # of the last round we took part in
    restart_count: int = 0
    failure: ProcessFailure | None = None
    departed: frozenset[int] = frozenset()  # group ranks of this round that finished, and have left
    has_spares: bool = False  # nodes wait for a place, as far as we have heard
    # Whom we know.
    seen_epoch: int = 0  # the newest reign that has welcomed us
    record: LeaderRecord | None = None  # the last that the board has shown us
    conn: int = 0
    _is_orphan: bool = False  # our coordinator went away, and did not say that it stays a node
    # By their tokens, which are never the same twice; a board that has lost all it knew counts epochs anew.
    _welcomed_by: str = ""  # the coordinator that took us in last
    _refused_by: str = ""  # its port, which took us before, refuses us
    _dismissed_by: str = ""  # it coordinates no longer
    _unsaid: NodeMessage | None = None  # since our last `Hello`
    _beat: int = -1  # the last we have heard from our coordinator
    _is_glancing: bool = False  # at the board, to see who reigns there
    _glance_at: float = 0.0
    _glance_s: float = 0.0
    _still: tuple[int, str, int] = (0, "", 0)  # epoch, token and beat as last read
    _still_since: float = 0.0
    _heard_at: float = 0.0
    _alive_at: float = 0.0
    _look_at: float = 0.0
    _alone_since: float | None = None
    _note_at: float = 0.0
    _trouble: str = "the board has not answered yet"

    @property
    def round(self) -> int:
        return 0 if self.assigned is None else self.assigned.round

    @property
    def past(self) -> Past:
        """Where this node stands, as a coordinator needs to know it."""
        if self.assigned is None:
            return Past(self.standing, 0, self.restart_count)
        ranks = self.assigned.ranks
        return Past(
            standing=self.standing,
            round=self.assigned.round,
            restart_count=self.restart_count,
            group_rank=ranks.group_rank,
            group_world_size=ranks.group_world_size,
            coordinator_rank=self.assigned.coordinator_rank,
            failure=self.failure,
            departed=tuple(sorted(self.departed)),
            has_spares=self.has_spares,
        )

    @property
    def _patience_s(self) -> float:
        """How long a coordinator may be silent."""
        return self.lease_s * (GREETING_LEASES if self.phase is Phase.GREETING else 1)

    @property
    def deadline(self) -> float | None:
        times = []
        match self.phase:
            case Phase.IDLE | Phase.OVER:
                return None
            case Phase.READING | Phase.CAMPAIGNING | Phase.CONNECTING:
                pass  # bounded where it is done
            case Phase.PAUSING:
                times.append(self._look_at)
            case Phase.GREETING:
                times += [self._heard_at + self._patience_s, self._glance_at]
            case Phase.MEMBER:
                times += [self._heard_at + self._patience_s, self._alive_at, self._glance_at]
            case _:
                assert_never(self.phase)
        if self._alone_since is not None:
            times += [self._note_at, self._alone_since + self.join_timeout_s]
        return min(times, default=None)

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case Submitted(message):
                return self._on_told(message, now)
            case LeadershipLost():
                self.is_leader = False
                return []  # our own connection to it says what follows
            case DeadlinePassed():
                return self._on_deadline_passed(now)
            case BoardRead() | NotEligible() | BoardFailed() if self._is_glancing:
                return self._on_glance(event, now)  # answers come in the order of the questions
            case BoardRead() | NotEligible() | BoardFailed():
                return self._on_board(event, now) if self.phase in {Phase.READING, Phase.CAMPAIGNING} else []
            case Connected() | ConnectFailed() | Received() | ConnectionLost():
                if event.conn != self.conn:
                    return []  # of an earlier connection
                return self._on_connection(event, now)
            case _:
                assert_never(event)

    # What the supervisor tells.

    def _on_told(self, message: NodeMessage, now: float) -> list[Action]:
        match message:
            case Ready(node):
                self.node, self.standing, self.failure = node, Standing.READY, None
            case Failed(_, round_, failure):
                if round_ == self.round and self.standing is Standing.BUSY:
                    self.standing, self.failure = Standing.FAILED, failure
            case Succeeded(_, round_):
                if round_ == self.round and self.standing is Standing.BUSY:
                    self.standing = Standing.FINISHED
            case Left():
                was_member, self.phase = self.phase is Phase.MEMBER, Phase.OVER
                return [Send(message)] if was_member else []
            case _:
                assert_never(message)
        match self.phase:
            case Phase.IDLE:
                self._begin_to_be_alone(now)
                return self._look()
            case Phase.MEMBER:
                return [Send(message)]
            case Phase.GREETING:
                self._unsaid = message  # our `Hello` is on its way, and says what was before
                return []
            case _:
                return []  # the next `Hello` says it

    # What the board says.

    def _on_board(self, event: BoardRead | NotEligible | BoardFailed, now: float) -> list[Action]:
        match event:
            case BoardFailed(reason):
                self._trouble = reason
                record = self.record
                if record and record.epoch == self.seen_epoch and record.candidate.token != self._dismissed_by:
                    return self._connect(record)  # we know where it was: no board is needed for that
                return self._pause(now)
            case NotEligible():
                self._trouble = "its coordinator has not come yet"
                return self._pause(now)
            case BoardRead(record):
                return self._on_reign(record, now)
            case _:
                assert_never(event)

    def _on_reign(self, record: LeaderRecord | None, now: float) -> list[Action]:
        was_campaigning, self.record = self.phase is Phase.CAMPAIGNING, record
        if record is None:
            return self._campaign(None)
        if record.verdict and self.seen_epoch:
            return self._end(record.verdict)
        if record.candidate.node_id == self.node_id and not self.is_leader:
            if not was_campaigning:
                return self._campaign(record)  # we had it once, or did not hear that we got it
            self.is_leader = True
            return [Lead(record, self._is_orphan), *self._connect(record)]
        if self._is_gone(record, now):
            self._is_orphan = True
            return self._campaign(record)
        return self._connect(record)

    def _glance(self, now: float) -> list[Action]:
        """Looks at the board beside the connection."""
        if self.phase is Phase.GREETING:
            self._glance_s *= 2  # thousands may do as we do
        self._glance_at = now + self._glance_s
        if self._is_glancing:
            return []
        self._is_glancing = True
        return [ReadBoard()]

    def _on_glance(self, event: BoardRead | NotEligible | BoardFailed, now: float) -> list[Action]:
        """Our coordinator may be cut off from the board, and live on in a round that the board knows nothing of.

        One that has taken our connection and does not greet us may be suspended.
        """
        self._is_glancing = False
        if not isinstance(event, BoardRead) or self.record is None:
            return []
        record = event.record
        match self.phase:
            case Phase.MEMBER:
                is_over = record is not None and record.epoch > self.seen_epoch
            case Phase.GREETING:
                is_over = (
                    record is None
                    or record.candidate.token != self.record.candidate.token
                    or self._is_gone(record, now)
                )
            case _:
                return []  # we look as it is
        if not is_over:
            return []
        self._trouble = "another agent coordinates by now, or none"
        self._begin_to_be_alone(now)
        return [Disconnect(), *self._on_reign(record, now)]

    def _is_gone(self, record: LeaderRecord, now: float) -> bool:
        """Whether who coordinates is certainly no more."""
        if record.candidate.token == self._refused_by:
            return True
        if record.renewals is None:
            return False  # the board would not show it
        if self._still != (record.epoch, record.candidate.token, record.renewals):
            self._still = (record.epoch, record.candidate.token, record.renewals)
            is_known = (record.epoch, record.candidate.token) == (self.seen_epoch, self._welcomed_by)
            # Of a `keep` that we have not heard of nobody here knows when it was asked for: a board that was slow or
            # away may have taken it just now.
            self._still_since = self._heard_at if is_known and record.renewals <= self._beat else now
        return now - self._still_since >= self.lease_s

    def _campaign(self, seen: LeaderRecord | None) -> list[Action]:
        self.phase = Phase.CAMPAIGNING
        return [Campaign(seen, self.seen_epoch)]

    def _look(self) -> list[Action]:
        self.phase = Phase.READING
        return [ReadBoard()]

    def _pause(self, now: float) -> list[Action]:
        self.phase, self._look_at = Phase.PAUSING, now + LOOK_AGAIN_S
        return []

    def _end(self, verdict: str) -> list[Action]:
        try:
            ended = from_text(verdict)
        except WireError:
            ended = None
        self.phase = Phase.OVER
        if not isinstance(ended, Ended):
            return [GiveUp("the board says that the job is over, but not how", is_refused=False)]
        return [Deliver(ended)]

    # What happens on the connection.

    def _connect(self, record: LeaderRecord) -> list[Action]:
        self.phase = Phase.CONNECTING
        self.conn += 1
        return [Connect(self.conn, record)]

    def _on_connection(self, event: Connected | ConnectFailed | Received | ConnectionLost, now: float) -> list[Action]:
        match event:
            case Connected() if self.phase is Phase.CONNECTING:
                assert self.record is not None and self.node is not None
                self.phase, self._heard_at, self._unsaid = Phase.GREETING, now, None
                self._glance_s = LOOK_AGAIN_S if self._is_orphan else self.lease_s
                self._glance_at = now + self._glance_s
                token = self.record.candidate.token
                return [Send(Hello(PROTOCOL, self.terms, token, self.node, self.past, self.seen_epoch))]
            case ConnectFailed(_, is_refused, reason) if self.phase is Phase.CONNECTING:
                return self._on_connect_failed(reason, now, is_refused=is_refused)
            case Received(_, message) if self.phase in {Phase.GREETING, Phase.MEMBER}:
                self._heard_at = now
                return self._on_heard(message, now)
            case ConnectionLost(_, reason) if self.phase in {Phase.GREETING, Phase.MEMBER}:
                return self._on_broken(reason, now)
            case _:
                return []  # over, or of no use any more

    def _on_connect_failed(self, reason: str, now: float, *, is_refused: bool) -> list[Action]:
        assert self.record is not None
        self._trouble = reason
        token = self.record.candidate.token
        if is_refused and token == self._welcomed_by != self._refused_by:
            self._refused_by = token
            return self._look()
        return self._pause(now)

    def _on_broken(self, reason: str, now: float) -> list[Action]:
        assert self.record is not None
        was_member, self._trouble = self.phase is Phase.MEMBER, reason
        self._begin_to_be_alone(now)
        self._is_orphan = True
        # A coordinator that has cut us off says why, so this was the network, or the end of it.
        return self._connect(self.record) if was_member else self._pause(now)

    def _on_heard(self, message: Downward, now: float) -> list[Action]:  # noqa: C901  flat: a line for each word
        match message:
            case Welcome(epoch, lease_s):
                return self._on_welcome(epoch, lease_s, now)
            case Refused(reason, is_final):
                if is_final:
                    self.phase = Phase.OVER
                    return [Disconnect(), GiveUp(reason, is_refused=True)]
                self._trouble = reason
                self._begin_to_be_alone(now)
                return [Disconnect(), *self._pause(now)]
            case Goodbye(reason, is_gone):
                self._trouble, self._is_orphan = reason, is_gone
                self._dismissed_by = "" if self.record is None else self.record.candidate.token
                self._begin_to_be_alone(now)
                return [Disconnect(), *self._look()]
            case Heartbeat(renewals, has_spares):
                self.has_spares = has_spares
                if renewals != self._beat:
                    self._beat, self._glance_at = renewals, now + self._glance_s
                return []
            case Probe():
                return [Send(Alive())]
            case Departed(round_, group_rank):
                if round_ == self.round:
                    self.departed |= {group_rank}
                return []
            case Assigned() | Interrupted() | Ended() | Waiting():
                return self._on_decision(message) if self.phase is Phase.MEMBER else []
            case _:
                assert_never(message)

    def _on_welcome(self, epoch: int, lease_s: float, now: float) -> list[Action]:
        assert self.record is not None
        if epoch < self.seen_epoch:
            self._trouble = "a coordinator of an older reign answered"
            self._begin_to_be_alone(now)
            return [Disconnect(), *self._pause(now)]
        if (epoch, self.record.candidate.token) != (self.seen_epoch, self._welcomed_by):
            self._beat, self.has_spares = -1, False
        # It lives after what the board has shown of it, or after it has claimed its reign anew.
        self._beat = max(self._beat, (self.record.renewals or 0) if epoch == self.record.epoch else 0)
        self._glance_s = GLANCE_LEASES * lease_s
        self._glance_at = now + self._glance_s
        # Who was connected may hear of a new epoch by this message only.
        self.record = LeaderRecord(epoch, self.record.candidate, self.record.renewals, self.record.verdict)
        self.seen_epoch, self.lease_s = epoch, lease_s
        self.phase = Phase.MEMBER
        self._alive_at = now + lease_s / 3
        self._welcomed_by, self._refused_by = self.record.candidate.token, ""
        self._is_orphan, self._still = False, (0, "", 0)
        self._alone_since = None
        unsaid, self._unsaid = self._unsaid, None
        return [] if unsaid is None else [Send(unsaid)]

    def _on_decision(self, message: CoordinatorMessage) -> list[Action]:
        match message:
            case Assigned():
                if self.standing is not Standing.READY or message.round <= self.round:
                    return []  # told twice
                self.assigned, self.standing, self.departed = message, Standing.BUSY, frozenset()
                self.restart_count = max(self.restart_count, message.restart_count)
            case Interrupted():
                if message.round != self.round or self.standing in {Standing.READY, Standing.STOPPING}:
                    return []  # told twice
                self.standing, self.failure = Standing.STOPPING, None
                self.restart_count = max(self.restart_count, message.restart_count)
            case Ended():
                self.phase = Phase.OVER
                return [Deliver(message), Disconnect()]
            case Waiting():
                pass
            case _:
                assert_never(message)
        return [Deliver(message)]

    # Time.

    def _begin_to_be_alone(self, now: float) -> None:
        if self._alone_since is None:
            self._alone_since, self._note_at = now, now + NOTE_INTERVAL_S

    def _on_deadline_passed(self, now: float) -> list[Action]:
        due = self.deadline
        if due is None or now < due:
            return []  # disarmed or moved while the event was on its way
        if self._alone_since is not None and now >= self._alone_since + self.join_timeout_s:
            self.phase = Phase.OVER
            waited_s = now - self._alone_since
            return [Disconnect(), GiveUp(f"no coordinator for {waited_s:.0f} s: {self._trouble}", is_refused=False)]
        actions: list[Action] = []
        if self._alone_since is not None and now >= self._note_at:
            self._note_at = now + NOTE_INTERVAL_S
            waited_s = now - self._alone_since
            actions.append(Deliver(Waiting(f"looking for the coordinator ({waited_s:.0f} s): {self._trouble}")))
        if self.phase is Phase.PAUSING and now >= self._look_at:
            return actions + self._look()
        if self.phase not in {Phase.GREETING, Phase.MEMBER}:
            return actions
        if self.phase is Phase.MEMBER and now - due > self.lease_s / 3:
            # We slept (SIGSTOP, a frozen container): what it said meanwhile may be in our socket yet.
            self._heard_at = max(self._heard_at, now - self.lease_s * 2 / 3)
        if now >= self._heard_at + self._patience_s:
            self._trouble = f"the coordinator was silent for {self._patience_s:g} s"
            self._begin_to_be_alone(now)
            self._is_orphan = True
            return [*actions, Disconnect(), *self._look()]
        if self.phase is Phase.MEMBER and now >= self._alive_at:
            self._alive_at = now + self.lease_s / 3
            actions.append(Send(Alive()))
        if now >= self._glance_at:
            actions += self._glance(now)
        return actions
