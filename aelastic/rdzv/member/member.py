"""A member: how this node finds the job's coordinator, stays with it, and becomes it when the coordinator is lost.

It stands between the supervisor and one connection to the coordinator.  `agent_link.py` carries out its actions.

- **Searching** (reading, campaigning, pausing, connecting, greeting): the board is read.  No leader: this node
  campaigns.  A leader: it connects, and says where it stands.  After `join_timeout` without a leader it gives up.
- **Member**: what the supervisor submits goes up, what the coordinator decides comes down, heartbeats both ways.
- **Leader lost**: a broken connection is tried again at once; then the board is read.  This node campaigns against a
  leader that is certainly gone, and only then: `leader_watch.py` says when.
- **Given up**: a leader that lives, but is silent, has given this node up: its workers are stopped (`contact.py`).

Its status says where the node stands, whole (`node_state.py`), so no message is sent again.  Epochs fence leaders: one
is suspended, another is elected, the first wakes up and answers a node that still has its address.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from aelastic.core.machine import Machine, Story
from aelastic.decisions.cause import Cause, CauseKind
from aelastic.rdzv.leader_record import LeaderRecord
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.contact import Contact
from aelastic.rdzv.member.leader_watch import LeaderWatch, WatchPhase
from aelastic.rdzv.member.member_events import Action, Event, Phase
from aelastic.rdzv.member.node_state import NodeState
from aelastic.rdzv.member.search import Search
from aelastic.rdzv.member.trust import last_word, not_followed, objection
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import PROTOCOL
from aelastic.rdzv.protocol.codec import objection as unreadable


@dataclass(slots=True)
class Member(Machine[Event, Action]):
    """One node's side of the rendezvous."""

    node_id: str  # new each time an agent starts
    terms: m.Terms  # what the user told this agent about the job
    search: Search  # how long to look for a coordinator

    phase: Phase = Phase.IDLE
    state: NodeState = field(default_factory=NodeState)
    leader: LeaderWatch = field(init=False)
    contact: Contact = field(init=False)
    record: LeaderRecord | None = None  # the last that the board has shown; of the leader that this node connects to
    conn: int = 0  # the connection; numbers are never used twice
    alive_at: float = 0.0  # when the leader is to hear from this node again, at the latest
    is_leader: bool = False  # this agent hosts the coordinator
    _story: Story = field(default_factory=Story, compare=False)

    def __post_init__(self) -> None:
        self.leader, self.contact = LeaderWatch(self.terms.lease_s), Contact(self.terms.lease_s)

    @property
    def deadline(self) -> float | None:
        if self.phase is Phase.OVER:
            return None
        own = {Phase.PAUSING: self.search.read_at, Phase.MEMBER: self.alive_at}.get(self.phase)
        times = self.search.deadline, self.leader.deadline, own, self._look_at
        return min((time for time in times if time is not None), default=None)

    @property
    def _may_be_given_up(self) -> bool:
        """Workers run, and the coordinator is not there to say whether they should."""
        return self.phase is not Phase.MEMBER and self.state.standing is m.Standing.BUSY and not self.is_leader

    @property
    def _look_at(self) -> float | None:
        """When the board is read beside what this node waits for: to connect takes longer than to read of another."""
        if self.phase is Phase.CONNECTING and self.leader.epoch > 0 and not self.is_leader:
            return self.contact.look_at
        return max(self.contact.look_at, self.contact.given_up_at) if self._may_be_given_up else None

    def validate(self) -> None:
        watched = {Phase.GREETING: WatchPhase.GREETING, Phase.MEMBER: WatchPhase.FOLLOWING}
        if self.phase is not Phase.OVER:
            assert self.leader.phase is watched.get(self.phase, WatchPhase.AWAY), "the watch follows the connection"
            is_searching, has_limit = self.phase not in {Phase.IDLE, Phase.MEMBER}, self.search.since is not None
            assert has_limit == is_searching, "without a coordinator there is a limit to the search"
        if self.phase in {Phase.CONNECTING, Phase.GREETING, Phase.MEMBER}:
            assert self.record is not None, "a connection is to a leader that the board has shown"
        self.state.validate()
        self.leader.validate()
        self.search.validate()

    def _dispatch(self, event: Event, now: float) -> list[Action]:  # noqa: C901, PLR0912  one case for each event
        match self.phase:
            case Phase.OVER:
                return []  # this node has left, or the job has ended
            case Phase.IDLE | Phase.READING | Phase.CAMPAIGNING | Phase.PAUSING:
                pass
            case Phase.CONNECTING | Phase.GREETING | Phase.MEMBER:
                pass
            case _:
                assert_never(self.phase)
        match event:
            case ev.Submitted():
                return self._on_submitted(event, now)
            case ev.BoardRead() | ev.NotEligible() | ev.BoardFailed() if (
                self.leader.is_checking and self.phase is not Phase.IDLE
            ):
                return self._on_checked(event, now)  # answers come in the order of the questions
            case ev.BoardRead() | ev.NotEligible() | ev.BoardFailed() if self._is_asking:
                return self._on_answer(event, now)
            case ev.Connected() | ev.ConnectFailed() | ev.Received() | ev.ConnectionLost() if event.conn != self.conn:
                return []  # an earlier connection's
            case ev.Connected() | ev.ConnectFailed() | ev.Received() | ev.ConnectionLost() if self._has_hung_up:
                return []  # this node has hung up, or has given the attempt up
            case ev.Connected() if self.phase is Phase.CONNECTING:
                return self._on_connected(now)
            case ev.ConnectFailed() if self.phase is Phase.CONNECTING:
                return self._on_connect_failed(event, now)
            case ev.Received() if self.phase in {Phase.GREETING, Phase.MEMBER}:
                return self._on_received(event, now)
            case ev.ConnectionLost() if self.phase in {Phase.GREETING, Phase.MEMBER}:
                return self._on_connection_lost(event, now)
            case ev.LeadershipLost() if self.phase is not Phase.IDLE:
                self.is_leader = False
                return []  # this node's own connection to the coordinator says what follows
            case ev.DeadlinePassed():
                return self._on_deadline_passed(now)
            case ev.BoardRead() | ev.NotEligible() | ev.BoardFailed() | ev.LeadershipLost():
                raise self._impossible(event)
            case ev.Connected() | ev.ConnectFailed() | ev.Received() | ev.ConnectionLost():
                raise self._impossible(event)
            case _:
                assert_never(event)

    @property
    def _is_asking(self) -> bool:
        """The board owes an answer that this node waits for."""
        return self.phase in {Phase.READING, Phase.CAMPAIGNING}

    @property
    def _has_hung_up(self) -> bool:
        """There is no connection, and none is on its way."""
        return self.phase in {Phase.READING, Phase.CAMPAIGNING, Phase.PAUSING}

    # What the supervisor submits.

    def _on_submitted(self, event: ev.Submitted, now: float) -> list[Action]:
        message = event.message
        if isinstance(message, m.Left):
            is_connected, self.phase = self._is_connected, Phase.OVER
            return [ev.Send(self.state.status_at(now, message))] if is_connected else []
        if isinstance(message, r.Ask | r.Fetch) and (why := self._unreadable(message)):
            return [ev.Deliver(r.Answer(message.ask_id, False, why))]
        if isinstance(message, m.Ready) and message.is_before(self.state.round):
            return []  # its supervisor has yet to read of the round that it was assigned to
        if isinstance(message, m.Ready) and self.phase is Phase.IDLE and (why := self._unreadable(message)):
            self.phase = Phase.OVER
            return [ev.GiveUp(why, is_refused=True)]
        self.state.submit(message, now)
        if isinstance(message, r.Fetch | r.Fetched):
            return [ev.Send(message)] if self.phase is Phase.MEMBER else []  # else sent with the first plan
        if self.phase is Phase.IDLE and self.state.node is not None:
            self.search.begin(now)
            return self._read_board()
        return self._report(now)

    @property
    def _is_connected(self) -> bool:
        return self.phase in {Phase.GREETING, Phase.MEMBER}

    def _report(self, now: float) -> list[Action]:
        """The leader is to hear where this node stands; `Hello` says so where there is no connection yet."""
        return [ev.Send(self.state.status_at(now))] if self._is_connected else []

    def _unreadable(self, message: m.Ready | r.Ask | r.Fetch) -> str:
        """Why a leader would not read what this node submits; empty if it would."""
        match message:
            case m.Ready(node):
                return unreadable(m.Status(node, m.Past(m.Standing.READY)))
            case r.Ask(node_id):
                node = self.state.node or m.Node(node_id, "", "", 1, "", 1)  # the rest of the status is no matter
                return unreadable(m.Status(node, m.Past(m.Standing.READY), asks=(message,)))
            case r.Fetch():
                return unreadable(message)

    # What the board says.

    def _on_answer(self, event: ev.OfBoard, now: float) -> list[Action]:
        match event:
            case ev.BoardRead(record):
                return self._stop_if_given_up(record, now) + self._on_record(record, now)
            case ev.NotEligible():
                self.search.blame("the leader has not started yet")
            case ev.BoardFailed(reason):
                self.search.blame(reason, is_of_board=True)
                if self.record is not None and self.leader.may_reconnect(self.record):
                    return self._connect(self.record, now)
            case _:
                assert_never(event)
        return self._pause(now)

    def _on_checked(self, event: ev.OfBoard, now: float) -> list[Action]:
        self.leader.on_checked()
        if not isinstance(event, ev.BoardRead):
            return []  # no answer: the board is checked again when it is due
        if self._has_hung_up:
            return self._stop_if_given_up(event.record, now)  # the connection that was checked may be closed
        assert self.record is not None  # another agent may have been elected, or has to be
        if not self.leader.is_replaced(event.record, self.record, now):
            return self._stop_if_given_up(event.record, now)  # the leader is the same
        self._lose_leader("the leader has changed", now)
        return [ev.Disconnect(), *self._on_record(event.record, now)]

    def _on_record(self, record: LeaderRecord | None, now: float) -> list[Action]:
        was_campaigning, before, self.record = self.phase is Phase.CAMPAIGNING, self.record, record
        if record is None:
            return self._campaign(None, now)
        if record.verdict and self.leader.epoch:  # else of a job before, as where a scheduler requeues one under its id
            self.phase = Phase.OVER
            return [last_word(record.verdict)]
        if record.candidate.node_id == self.node_id and not self.is_leader:
            if not was_campaigning:
                return self._campaign(record, now)  # of an earlier term, or the answer to the campaign was lost
            self.is_leader = True
            return [ev.Lead(record, self.leader.is_takeover, record.seat_before(before)), *self._connect(record, now)]
        if was_campaigning and record.is_same_term(before):
            self.leader.forget_refusal()  # the leader has renewed meanwhile, or the board lets no other agent lead
            return self._pause(now)
        if self.leader.is_gone(record, now):
            self.leader.on_disconnected(is_lost=True)
            return self._campaign(record, now)
        return self._connect(record, now)

    def _stop_if_given_up(self, record: LeaderRecord | None, now: float) -> list[Action]:
        """Ends the round here, as the coordinator would: the board shows that it lives, and cannot reach this node."""
        if record is not None and record.is_elected:  # that is the nodes' word, not the board's
            self.contact.on_elected(now)
            return []
        self.contact.on_board(now)
        if record is None or record.verdict or not self._may_be_given_up or self.leader.is_gone(record, now):
            return []
        cause = self.contact.given_up(record, now) or self.state.left_behind(record.seats)
        return self._stop(cause, now)

    def _stop(self, cause: Cause | None, now: float) -> list[Action]:
        """This node ends its round by itself, if there is a cause."""
        stop = self.state.interrupt(cause)
        return [] if stop is None else [ev.Deliver(stop), *self._report(now)]

    # What happens on the connection.

    def _on_connected(self, now: float) -> list[Action]:
        assert self.record is not None
        self.phase = Phase.GREETING
        self.leader.on_connected(now)
        candidate = self.record.candidate
        self.state.on_coordinator_lives(candidate.node_id)  # it listens
        status, kept = self.state.status_at(now), self.state.kept_at(now)
        return [ev.Send(m.Hello(PROTOCOL, self.terms, candidate.token, self.leader.epoch, status, kept))]

    def _on_connect_failed(self, event: ev.ConnectFailed, now: float) -> list[Action]:
        assert self.record is not None
        self.search.blame(event.reason)
        token = self.record.candidate.token
        if self.leader.on_connect_failed(token, is_refused=event.is_refused, is_here=event.is_here):
            self.state.on_coordinator_ended(self.record.candidate.node_id)
            return self._read_board()
        return self._pause(now)

    def _on_connection_lost(self, event: ev.ConnectionLost, now: float) -> list[Action]:
        if event.is_garbage:
            return self._distrust(event.reason, now)
        if self.phase is Phase.GREETING:
            self._lose_leader(event.reason, now, is_lost=True)
            return self._pause(now)
        assert self.record is not None
        self._lose_leader(event.reason, now, is_lost=True, is_closed=not event.is_reset)
        return self._connect(self.record, now)

    def _on_received(self, event: ev.Received, now: float) -> list[Action]:
        assert self.record is not None
        self.leader.on_heard(now)
        why = objection(event.message, self.terms, self.state, self.record.epoch, self.leader.epoch)
        return self._distrust(why, now) if why else self._on_message(event.message, self.record, now)

    def _on_message(  # noqa: C901, PLR0912  one case for each message
        self, message: m.Downward, record: LeaderRecord, now: float
    ) -> list[Action]:
        match message:
            case m.Plan():
                return self._on_plan(message, record, now)
            case m.Refused(reason, is_final=True):
                self.phase = Phase.OVER
                return [ev.Disconnect(), ev.GiveUp(reason, is_refused=True)]
            case m.Refused(reason):
                told = [ev.Deliver(each) for each in self._on_unread(reason)] if self.phase is Phase.MEMBER else []
                self._lose_leader(reason, now)
                return [*told, ev.Disconnect(), *self._pause(now)]
            case m.GivenUp():  # this node was suspended, or mute
                self._lose_leader("the leader gave up this node, which was silent", now, is_lost=True)
                return [ev.Disconnect(), *self._connect(record, now)]
            case m.Goodbye(reason, is_gone):
                self._lose_leader(reason, now)
                self.leader.on_goodbye(record.candidate.token, is_gone=is_gone)
                if is_gone:
                    self.state.on_coordinator_ended(record.candidate.node_id)
                return [ev.Disconnect(), *self._read_board()]
            case m.Heartbeat(renewals, has_spares):
                self.state.on_spares(has_spares)
                self.leader.on_heartbeat(renewals, now)
                self.contact.on_heartbeat(renewals, now)
                return []
            case m.Probe():
                return [ev.Send(self.state.alive)]
            case m.Departed():
                self.state.on_departed(message)
                return []
            case m.Seats():
                self.state.on_seats(message)
                return []
            case r.Answer(ask_id):
                self.state.on_fetch_answered(ask_id)
                return [ev.Deliver(message)]
            case r.Show() | r.Shown():
                return [ev.Deliver(message)]
            case _:
                assert_never(message)

    def _on_unread(self, reason: str) -> list[m.CoordinatorMessage]:
        """The coordinator does not read what this node has said: no request is repeated that may be the one."""
        refused = [r.Answer(ask_id, False, reason) for ask_id in self.state.drop_unanswered()]
        text = f"the leader refused a message of this node: {reason}"
        return [m.Waiting(text, kind=m.WaitKind.LEADER), *refused]

    def _on_plan(self, plan: m.Plan, record: LeaderRecord, now: float) -> list[Action]:
        if plan.epoch < self.leader.epoch:
            self._lose_leader("a leader of an older epoch answered", now)
            return [ev.Disconnect(), *self._pause(now)]
        told: list[Action] = []
        if self.phase is Phase.GREETING or plan.epoch != self.leader.epoch:
            told += self._on_welcome(plan, record, now)
        starts = self.state.node and self.state.node.starts
        news = self.state.follow(plan, now)
        told += [ev.Deliver(each) for each in news]
        if plan.ended is not None:
            self.phase = Phase.OVER
            return [*told, ev.Disconnect()]
        has_changed = starts is not (self.state.node and self.state.node.starts)
        return told + (self._report(now) if has_changed else [])

    def _on_welcome(self, plan: m.Plan, record: LeaderRecord, now: float) -> list[Action]:
        """The leader has taken this node in, or continues in a newer epoch."""
        self.state.on_welcome(is_new=self.leader.on_welcome(record, plan.epoch, now))
        self.record = record.replace(epoch=plan.epoch)  # a connected node hears of a new epoch only here
        was_greeting, self.phase = self.phase is Phase.GREETING, Phase.MEMBER
        self.contact.begin(self.record, self.leader.renewals, now)
        self.search.end()
        if not was_greeting:
            return []
        self.alive_at = now + self.terms.lease_s / 3
        return [ev.Send(each) for each in self.state.fetches.values()]

    # Time.

    def _on_deadline_passed(self, now: float) -> list[Action]:
        due = self.deadline
        if self.phase is Phase.IDLE or due is None or now < due:
            return []  # disarmed or moved while the event was in the mailbox
        if self.phase is Phase.MEMBER:
            if self.leader.on_woken(due, now):
                self.contact.on_woken(now)
            return self._watch_leader(now)
        if self.search.is_over(now):
            self.phase = Phase.OVER
            return [ev.Disconnect(), ev.GiveUp(self.search.outcome(now), is_refused=False)]
        told = self._wait(now)  # what this node waits for
        if self.phase is Phase.PAUSING and now >= self.search.read_at:
            return told + self._read_board()
        return told + (self._watch_leader(now) if self.phase is Phase.GREETING else [])

    def _watch_leader(self, now: float) -> list[Action]:
        if now >= self.leader.silent_at:
            self._lose_leader(f"the leader was silent for {self.leader.silence_s:g} s", now, is_lost=True)
            return [ev.Disconnect(), *self._read_board()]
        actions: list[Action] = []
        if self.phase is Phase.MEMBER and now >= self.alive_at:
            self.alive_at = now + self.terms.lease_s / 3
            actions.append(ev.Send(self.state.alive))
        if now >= min(self.leader.check_at, self.leader.late_at) and self.leader.begin_check(now):
            actions.append(ev.ReadBoard())
        return actions

    def _wait(self, now: float) -> list[Action]:
        """Says what this node waits for, and looks at the board meanwhile: has the coordinator given it up?"""
        actions: list[Action] = [ev.Deliver(waiting)] if (waiting := self.search.note(now)) else []
        if self._look_at is not None and now >= self._look_at:
            self.contact.look_again(now)
            actions += [ev.ReadBoard()] if self.leader.ask_board() else []
            is_cut_off = self._may_be_given_up and self.state.can_others_elect and self.contact.is_cut_off(now)
            if is_cut_off:
                actions += self._stop(Cause(CauseKind.LEADER_SILENT), now)
        return actions

    # Moves.

    def _lose_leader(self, reason: str, now: float, *, is_lost: bool = False, is_closed: bool = False) -> None:
        """The connection is no more, or about to be closed; `is_lost`: not by this node's own choice."""
        self.state.on_alone(self.leader.heard_at if now >= self.leader.silent_at else now)
        self.search.blame(reason)
        self.search.begin(now)
        self.leader.on_disconnected(is_lost=is_lost, is_closed=is_closed)

    def _distrust(self, why: str, now: float) -> list[Action]:
        """The coordinator says what none can say: it is asked again, later each time."""
        assert self.record is not None
        self._lose_leader(told := not_followed(self.record, why), now)
        self.phase = Phase.PAUSING
        waiting = ev.Deliver(m.Waiting(told, kind=m.WaitKind.LEADER))
        return [ev.Disconnect(), *([waiting] if self.search.back_off(now) else [])]

    def _read_board(self) -> list[Action]:
        self.phase = Phase.READING
        return [ev.ReadBoard()]

    def _campaign(self, seen: LeaderRecord | None, now: float) -> list[Action]:
        if self.is_leader:  # a coordinator of an earlier term, which does not know yet that another one took its place
            return self._pause(now)
        self.phase = Phase.CAMPAIGNING
        return [ev.Campaign(seen, self.leader.epoch)]

    def _pause(self, now: float) -> list[Action]:
        self.phase = Phase.PAUSING
        self.search.pause(now)
        return []

    def _connect(self, record: LeaderRecord, now: float) -> list[Action]:
        self.phase = Phase.CONNECTING
        self.contact.look_again(now)
        self.conn += 1
        return [ev.Connect(self.conn, record)]
