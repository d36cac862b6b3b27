"""A member: how this node finds the job's leader, follows it, and campaigns when there is none.

It connects the supervisor to the leader, over one connection at a time.  `agent_link.py` carries out its actions.

- **Searching**: the endpoint's cell names the leader.  If it names none that lives, or is silent to a voter that has
  lost its leader, this node campaigns.  It also asks other voters who leads.
- **Campaigning**: this agent is a candidate, or leads; its leader core holds the log.
- **Connecting, following**: the whole status goes up, the whole plan comes down, and signs of life go both ways.
- A node **votes** by connecting to a candidate of a higher term, after a lease of silence from its leader, or once it
  has read its leader's end or goodbye.
- A node that has received nothing from a leader for a lease and a little more **stops its workers** on its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import assert_never
from zlib import crc32

from aelastic.base.machine import Machine, Trace
from aelastic.rdzv.decisions.cause import Cause, CauseKind
from aelastic.rdzv.log import node as following
from aelastic.rdzv.log.entries import Entry, log_of
from aelastic.rdzv.log.node import Close, Node
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.member_events import Action, Event, Phase
from aelastic.rdzv.member.node_state import NodeState
from aelastic.rdzv.member.search import Search
from aelastic.rdzv.member.sight import Sight
from aelastic.rdzv.member.trust import not_followed, objection, verdict_in
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import PROTOCOL
from aelastic.rdzv.protocol.codec import objection as unreadable
from aelastic.rdzv.protocol.sense import is_too_high, too_high_text

# After a lease without a message the leader has given this node up; this much later the node stops its workers.
MARGIN_S = 0.7
# Voters campaign one after the other, by rank, so that usually the first is elected before the second begins.
STAGGER_S = 0.05
# Between two looks at the cell while a node reconnects to a leader that it has lost.
LOOK_S = 0.5
# How many nodes of a round also look at the cell if the leader does not report that it has renewed it.
WATCHERS = 8
# A lost leader is gone if it has renewed nothing for this share of a lease, in which it renews three times.
SILENT_SHARE = 0.4
# Share of a lease for which a node that has lost its leader votes for no other: its connection may have been reset.
VOTES_AFTER = 0.5
# How much later than voters other nodes may campaign.
TURN_OF_VOTERS_S = 1.0
# Time after a lost candidacy before the next one.  It doubles with each in a row that found no quorum.
PAUSE_S, PAUSE_MAX_S = 0.3, 2.4
# An agent that accepts the connection but sends no plan may be suspended, or have lost; thousands may greet it at once.
GREETING_LEASES = 3
CANDIDATE_S = 2.0


@dataclass(slots=True)
class Member(Machine[Event, Action]):
    """One node's side of the rendezvous.

    Args:
        node_id: new each time an agent starts.
        terms: the user's settings for the job.
        search: how long to look for a leader.
        may_lead: whether this agent may be the leader.
        do_nodes_vote: otherwise the store alone decides.
    """

    node_id: str
    terms: m.Terms
    search: Search
    may_lead: bool = True
    do_nodes_vote: bool = True

    phase: Phase = Phase.SEARCHING
    state: NodeState = field(default_factory=NodeState)
    log: Node | None = None  # `None`: this agent's leader core has it
    sight: Sight = field(default_factory=Sight)  # of the endpoint's cell
    leader: m.LeaderAt | None = None  # the agent that this node connects to, or follows
    term: int = 0  # of that leader
    conn: int = 0  # the connection; numbers are never used twice
    received_at: float = 0.0  # when its last message came, or it was opened
    led_at: float | None = None  # when a leader last sent something; `None`: none has yet
    lost_at: float | None = None  # since when there is no leader; `None`: there is one, or none was looked for
    is_gone: bool = False  # the last one has ended, or has said goodbye
    gone: tuple[str, ...] = ()  # tokens of such leaders
    alive_at: float = 0.0  # when this node must next send the leader a sign of life, at the latest
    read_verdict: bool = False  # it has read the verdict in the cell
    _is_open: bool = False  # the connection is open, and `Hello` is sent
    _is_candidate: bool = False  # that agent seeks this node's vote
    _is_leading: bool = False  # the agent that this node is connected to leads
    _has_retried: bool = False  # this node has reconnected after a reset
    _campaign_at: float = 0.0  # not before
    _defeats: int = 0  # candidacies in a row that found no quorum
    _highest: int = 0  # term that this node knows of
    _silent: str = ""  # token of the last leader, if it was lost without proof that it has ended
    _job_before: str = ""  # the log of a job that is over, for example if a scheduler requeues one under its id
    _led_here: tuple[m.LeaderAt, int] | None = None  # the leader in this agent, and its term
    _names: int = 0  # how many times it has joined another log
    _trace: Trace = field(default_factory=Trace, compare=False)

    def __post_init__(self) -> None:
        self.log = Node(self.node_id)

    @property
    def name(self) -> str:
        """The name of its node in the log, which it changes whenever it joins another log."""
        return f"{self.node_id}~{self._names}" if self._names else self.node_id

    @property
    def lease_s(self) -> float:
        return self.terms.lease_s

    @property
    def is_leader(self) -> bool:
        """Whether this agent campaigns or leads."""
        return self.log is None

    @property
    def deadline(self) -> float | None:
        if self.phase is Phase.OVER or (self.search.since is None and self.phase is Phase.SEARCHING):
            return None
        times: list[float | None] = [self.search.deadline, self._stop_at]
        match self.phase:
            case Phase.SEARCHING:
                times += [self.search.read_at if not self.sight.is_asked else None, self._may_campaign_at]
            case Phase.CONNECTING:
                times += [self._greeted_by, self._look_at]
            case Phase.FOLLOWING:
                times += [self.alive_at, self.received_at + self.lease_s, self._look_at]
            case Phase.CAMPAIGNING:
                pass
            case _:
                assert_never(self.phase)
        return min((time for time in times if time is not None), default=None)

    @property
    def _greeted_by(self) -> float:
        """The time from which on a plan is late."""
        return self.received_at + (CANDIDATE_S if self._is_candidate else self.lease_s * GREETING_LEASES)

    @property
    def _look_at(self) -> float | None:
        """When to read the cell because a leader is silent: it may still renew the cell."""
        if self.sight.is_asked:
            return None
        if self.phase is Phase.CONNECTING and self.lost_at is not None:
            return max(self.received_at, self.sight.asked_at) + LOOK_S
        ranks = None if self.state.assigned is None else self.state.assigned.ranks
        is_watcher = self.phase is Phase.FOLLOWING and ranks is not None and ranks.group_rank < WATCHERS
        quiet_since = min(self.received_at, self.sight.seen.since) if is_watcher else self.received_at
        return max(quiet_since, self.sight.asked_at) + self.lease_s / 2

    @property
    def _stop_at(self) -> float | None:
        """The time when this node stops its workers on its own."""
        is_alone = self.phase is not Phase.FOLLOWING and self.state.phase is m.NodePhase.BUSY
        return self.led_at + self.lease_s + MARGIN_S if is_alone and self.led_at is not None else None

    def validate(self) -> None:
        assert (self.phase is Phase.CAMPAIGNING) <= self.is_leader, "a candidate's log is in other hands"
        assert self.log is None or self.log.name == self.name, "its node has one name at a time"
        if self.phase in {Phase.CONNECTING, Phase.FOLLOWING}:
            assert self.leader is not None, "a connection is to an agent that leads, or wants to"
        self.state.validate()
        self.search.validate()

    def _dispatch(self, event: Event, now: float) -> list[Action]:  # noqa: C901, PLR0912  one case for each event
        match self.phase:
            case Phase.OVER:
                return []  # this node has left, or the job has ended
            case Phase.SEARCHING | Phase.CAMPAIGNING | Phase.CONNECTING | Phase.FOLLOWING:
                pass
            case _:
                assert_never(self.phase)
        match event:
            case ev.Received(conn) | ev.Connected(conn) | ev.ConnectFailed(conn) if not self._is_on(conn):
                return []  # from an earlier connection, or this node has hung up
            case ev.ConnectionLost(conn) if not self._is_on(conn):
                return []  # as above
            case ev.Received(_, message):
                return self._on_received(message, now)
            case ev.Connected():
                return self._on_connected(now)
            case ev.ConnectFailed():
                return self._on_connect_failed(event, now)
            case ev.ConnectionLost():
                return self._on_connection_lost(event, now)
            case ev.Submitted():
                return self._on_submitted(event, now)
            case ev.CellAnswered(stored):
                return self._on_cell(stored, now)
            case ev.CellFailed():
                return self._on_cell_failed(event, now)
            case ev.Campaigned():
                return self._on_campaigned(event, now)
            case ev.Declined(term, leader):
                return self._on_declined(term, leader, now)
            case ev.Leading(at, term):
                self._led_here = at, term
                return self._connect(at, term, now)
            case ev.LeadershipLost():
                return self._on_leadership_lost(event, now)
            case ev.DeadlinePassed():
                return self._on_deadline_passed(now)
            case _:
                assert_never(event)

    @property
    def _is_connected(self) -> bool:
        return self.phase in {Phase.CONNECTING, Phase.FOLLOWING}

    def _is_on(self, conn: int) -> bool:
        """Returns whether this is the connection, and it is open."""
        return conn == self.conn and self._is_connected

    @property
    def _has_greeted(self) -> bool:
        return self._is_connected and self._is_open

    # What the supervisor submits.

    def _on_submitted(self, event: ev.Submitted, now: float) -> list[Action]:
        message = event.message
        if isinstance(message, m.Left):
            has_greeted, self.phase = self._has_greeted, Phase.OVER
            return [ev.Send(self._status(now, message))] if has_greeted else []
        if isinstance(message, r.Ask | r.Fetch) and (why := self._unreadable(message)):
            return [ev.Deliver(r.Answer(message.ask_id, False, why))]
        if isinstance(message, m.Ready) and message.is_before(self.state.round):
            return []  # its supervisor does not yet know the round that it was assigned to
        is_first = self.state.node is None
        if isinstance(message, m.Ready) and is_first and (why := self._unreadable(message)):
            self.phase = Phase.OVER
            return [ev.GiveUp(why, is_refused=True)]
        self.state.submit(message, now)
        if isinstance(message, r.Fetch | r.Fetched):
            return [ev.Send(message)] if self.phase is Phase.FOLLOWING else []  # or with the first plan
        if is_first and self.state.node is not None:
            self.search.begin(now)
            return self._read_cell(now)
        return self._report(now)

    def _status(self, now: float, left: m.Left | None = None) -> m.Status:
        log = None if self.log is None else following.status_of(self.log)
        return self.state.status_at(now, left, log)

    def _report(self, now: float) -> list[Action]:
        """Reports this node's state to the leader; `Hello` does so if there is no connection yet."""
        return [ev.Send(self._status(now))] if self._has_greeted else []

    def _unreadable(self, message: m.Ready | r.Ask | r.Fetch) -> str:
        """Returns why a leader would not accept what this node submits; empty if it would."""
        match message:
            case m.Ready(node):
                return unreadable(m.Status(node, m.Past(m.NodePhase.READY)))
            case r.Ask(node_id):
                node = self.state.node or m.Node(node_id, "", "", 1, "", 1)  # the rest of the status does not matter
                return unreadable(m.Status(node, m.Past(m.NodePhase.READY), asks=(message,)))
            case r.Fetch():
                return unreadable(message)

    # The cell.

    def _read_cell(self, now: float) -> list[Action]:
        self.search.pause(now)
        if self.sight.is_asked:
            return []
        self.sight.on_asked(now)
        return [ev.ReadCell()]

    def _on_cell(self, stored: m.StoredCell | None, now: float) -> list[Action]:
        self.sight.on_answered(stored, now)
        if self.log is None:
            return self._connect_here(now)
        if stored is not None:
            self._on_term_in_cell(stored.cell.term, stored.cell.leader)
        committed = None if stored is None else stored.cell.committed
        is_over = committed is not None and committed.is_verdict
        if committed is not None and is_over and committed.log in {log_of(self.log.committed), *self.sight.logs}:
            self.phase, self.read_verdict = Phase.OVER, True
            return [verdict_in(committed), ev.Disconnect()]
        if self.phase is Phase.CONNECTING:
            return self._on_cell_beside(stored, now)
        if self.phase is not Phase.SEARCHING:
            return []  # this node has found a leader in the meantime
        if committed is not None and is_over:
            self.sight.note_gone(is_gone=True)
            self._job_before = committed.log
            return self._campaign(now)
        leader = None if stored is None else stored.leader
        if leader is not None and leader.token == self._silent:
            self._note_renewal(leader, now)
        is_gone = leader is None or leader.token in self.gone or leader.node_id == self.node_id
        is_gone |= leader is not None and self._renews_nothing(leader, now)
        self.sight.note_gone(is_gone=is_gone or self.sight.still_s(now) >= self.lease_s)
        is_silent = self.lost_at is not None and now >= self.lost_at + self.lease_s and self._is_voter
        is_silent &= leader is not None and leader.token == self._silent
        if self.sight.names_no_leader or leader is None or stored is None or is_silent:
            return self._campaign(now)
        return self._connect(leader, stored.cell.term, now)

    def _on_term_in_cell(self, term: int, token: str) -> None:
        """A leader that has taken a higher term than any known before is alive, for example after it was suspended."""
        if term > self._highest_known:
            self._note_alive(token)
        self._highest = max(self._highest, term)

    @property
    def _highest_known(self) -> int:
        """The highest term that this node knows of, also from its log."""
        return max(self._highest, 0 if self.log is None else self.log.term)

    def _note_renewal(self, leader: m.LeaderAt, now: float) -> None:
        """A leader whose end was not seen renews the cell again: it was suspended, and nobody else leads meanwhile.

        With `static` nobody else can.
        """
        is_renewed = self.sight.still_s(now) < self.lease_s * SILENT_SHARE
        if is_renewed and leader.token in self.gone:
            self._note_alive(leader.token)
            self.is_gone = False

    def _renews_nothing(self, leader: m.LeaderAt, now: float) -> bool:
        """Returns whether a leader that this node has lost is gone, because it does not renew the cell either."""
        is_gone = leader.token == self._silent and self.sight.still_s(now) >= self.lease_s * SILENT_SHARE
        if is_gone:
            self._note_gone(leader.token)
            self.is_gone = True
        return is_gone

    def _on_cell_beside(self, stored: m.StoredCell | None, now: float) -> list[Action]:
        """Handles the content of the cell while this node waits for the first plan of a leader."""
        if stored is None or self.leader is None:
            return []
        leader, is_newer = stored.leader, stored.cell.term > self.term
        if leader is not None and leader.token not in self.gone and leader.token != self.leader.token:
            return self._connect(leader, stored.cell.term, now) if is_newer else []
        has_released = leader is None and stored.cell.term >= self.term
        is_gone = has_released or (leader is not None and self._renews_nothing(leader, now))
        if not is_gone and self.sight.still_s(now) < self.lease_s:
            return []
        self._lose_leader("the leader does not renew the cell", now)
        self.sight.note_gone(is_gone=True)
        return [ev.Disconnect(), *self._campaign(now)]

    def _on_cell_failed(self, event: ev.CellFailed, now: float) -> list[Action]:
        self.sight.on_failed()
        if self.phase is not Phase.SEARCHING:
            return []  # this node has a leader, or campaigns
        if self.log is None:
            return self._connect_here(now)  # once it leads
        self.search.blame(event.reason, is_of_endpoint=True)
        others = [name for name in self._voters if name != self.log.name]
        asks: list[Action] = [ev.AskWhoLeads()] if others else []
        return asks + self._campaign(now)  # once it is its turn

    # Campaigning.

    @property
    def _voters(self) -> tuple[str, ...]:
        """The nodes that decide on the next entry, as far as this node knows; none if the store alone decides."""
        committed = None if self.log is None else self.log.committed
        return committed.voters if isinstance(committed, Entry) else ()

    @property
    def _is_voter(self) -> bool:
        return self.log is not None and self.log.name in self._voters

    @property
    def _may_campaign_at(self) -> float | None:
        """When this node may campaign; `None`: not before the endpoint has answered, or silence has lasted."""
        if self.log is None or not self.may_lead:
            return None
        since = self.lost_at if self.lost_at is not None else self.search.since
        if since is None:
            return None
        silence_s = 0.0 if self.is_gone else self.lease_s
        voters = self._voters
        if self.log.name in voters:
            turn_s = voters.index(self.log.name) * STAGGER_S
            names_none = self.sight.names_no_leader
            return max(self._campaign_at, since + (0.0 if names_none else silence_s) + turn_s)
        if self.log.committed is not None and self.do_nodes_vote:  # voters must have their turn
            return max(self._campaign_at, since + self.lease_s + TURN_OF_VOTERS_S)
        return self._campaign_at if self.sight.names_no_leader else None

    def _campaign(self, now: float) -> list[Action]:
        """Campaigns, if it is this node's turn."""
        may_at = self._may_campaign_at
        if may_at is None or now < may_at or self.log is None:
            return []  # not its turn yet
        since = self.lost_at if self.lost_at is not None else self.search.since
        has_listened = self.log.committed is None or (since is not None and now >= since + self.lease_s)
        highest = self._highest_known
        node, self.log, self.phase = self.log, None, Phase.CAMPAIGNING
        return [ev.Campaign(node, highest, has_listened, self.gone, self.sight.seen, self._job_before, self._silent)]

    def _on_leadership_lost(self, event: ev.LeadershipLost, now: float) -> list[Action]:
        self.log, self._led_here = event.node, None
        self.sight.note_gone(is_gone=False)  # another agent may have written the cell since
        self._note_gone(event.token)
        self._defeats += event.lacks_quorum and self.phase is Phase.CAMPAIGNING
        self._silent = ""  # other nodes may still receive messages from it
        self._note_alive(event.alive)
        self._campaign_at = now + max(event.stand_back_s, self._pause_s())
        if self.phase is not Phase.CAMPAIGNING:
            return []  # the connection to it decides what follows
        self.phase = Phase.SEARCHING
        self.search.blame(event.reason, lacks_quorum=event.lacks_quorum)
        return self._read_cell(now) if event.stored is None else self._on_cell(event.stored, now)

    def _pause_s(self) -> float:
        """Returns how long this node waits before it campaigns again.

        The pause differs from node to node, so that candidates who split the votes don't do so forever.
        """
        if self._defeats == 0:
            return PAUSE_S
        share = crc32(f"{self.node_id} {self._defeats}".encode()) / 2**32
        return (1.0 + share) * min(math.ldexp(PAUSE_S, self._defeats - 1), PAUSE_MAX_S)

    def _on_campaigned(self, event: ev.Campaigned, now: float) -> list[Action]:
        """Another agent wants this node's vote, or asks whom it follows."""
        campaign, log = event.campaign, self.log
        leader = self.leader if self.phase is Phase.FOLLOWING else None
        if log is None:
            return [ev.Answer(event.conn, m.Declined(0, "this agent campaigns"))]
        if log.committed is None or log_of(campaign.committed) != log_of(log.committed):  # perhaps of another job
            return [ev.Answer(event.conn, m.Declined(log.term, "this node knows another log"))]
        why = self._objection_to(campaign, log, now)
        if why:
            return [ev.Answer(event.conn, m.Declined(log.term, why, leader))]
        self._highest = max(self._highest, campaign.term)
        hung_up: list[Action] = [ev.Disconnect()] if self._is_connected else []
        if self.phase is Phase.FOLLOWING:
            self._lose_leader("another agent campaigns", now)
        connect = self._connect(campaign.leader, campaign.term, now, is_candidate=True)
        return [ev.Answer(event.conn, None), *hung_up, *connect]

    def _objection_to(self, campaign: m.Campaign, log: Node, now: float) -> str:
        if not campaign.term:
            return "asked who leads"
        if is_too_high(campaign.term, self._highest_known):
            return too_high_text(campaign.term)
        if not following.may_follow(log, campaign.leader.name, campaign.term):
            return f"this node knows of term {log.term}"
        if self.phase is Phase.FOLLOWING and now < self.received_at + self.lease_s:
            return "this node has a leader"
        if self.lost_at is not None and not self.is_gone and now < self.lost_at + self.lease_s * VOTES_AFTER:
            return "this node has not lost its leader for long enough"
        return ""

    def _on_declined(self, term: int, leader: m.LeaderAt | None, now: float) -> list[Action]:
        if is_too_high(term, self._highest_known):
            return []  # no log has counted that far
        self._highest = max(self._highest, term)
        if self.phase is not Phase.SEARCHING or leader is None or leader.token in self.gone:
            return []
        return self._connect(leader, term, now)

    # The connection.

    def _connect_here(self, now: float) -> list[Action]:
        """Follows the leader in this agent if the connection to it was lost."""
        leader, term = self._led_here or (None, 0)
        if leader is None or leader.token in self.gone or self.phase is not Phase.SEARCHING:
            return []  # it does not lead yet, or no longer, or this node follows it
        return self._connect(leader, term, now)

    def _connect(self, leader: m.LeaderAt, term: int, now: float, *, is_candidate: bool = False) -> list[Action]:
        self.phase, self.leader, self.term, self.received_at, self._is_leading = (
            Phase.CONNECTING,
            leader,
            term,
            now,
            False,
        )
        self._is_open, self._is_candidate = False, is_candidate
        self.conn += 1
        if self.log is not None:
            if following.may_follow(self.log, leader.name, term):
                self.log = following.follow(self.log, leader.name, term)
            else:
                self.log = self.log.replace(leader=leader.name, has_read_plan=False, leader_accepted=None)
        return [ev.Connect(self.conn, leader)]

    def _on_connected(self, now: float) -> list[Action]:
        assert self.leader is not None
        self.received_at, self._is_open = now, True
        return [ev.Send(m.Hello(PROTOCOL, self.terms, self.leader.token, self.name, self._status(now)))]

    def _on_connect_failed(self, event: ev.ConnectFailed, now: float) -> list[Action]:
        self.search.blame(event.reason)
        self._close_log(Close.ABORTED)
        self.phase = Phase.SEARCHING
        self.search.pause(now)
        self.search.begin(now)
        if self.lost_at is None:
            self.lost_at = now
        return []

    def _on_connection_lost(self, event: ev.ConnectionLost, now: float) -> list[Action]:
        assert self.leader is not None
        if event.is_garbage:
            return self._distrust(event.reason, now)
        was_led, leader, term = self._is_leading, self.leader, self.term
        self._lose_leader(event.reason, now, close=event.close)
        if event.close is Close.ABORTED and was_led and not self._has_retried:
            self._has_retried = True
            return self._connect(leader, term, now)
        return self._read_cell(now) + self._campaign(now)

    def _on_received(self, message: m.Downward, now: float) -> list[Action]:
        assert self.leader is not None
        self.received_at = now
        if self._is_leading:
            self.led_at = now
        if why := objection(message, self.terms, self.state, self.term):
            return self._distrust(why, now)
        return self._on_message(message, now)

    def _on_message(self, message: m.Downward, now: float) -> list[Action]:
        assert self.leader is not None
        match message:
            case m.Plan():
                return self._on_plan(message, now)
            case m.Refused(reason, is_final=True):
                self.phase = Phase.OVER
                return [ev.Disconnect(), ev.GiveUp(reason, is_refused=True)]
            case m.Refused(reason):
                actions = (
                    [ev.Deliver(each) for each in self._on_unread(reason)] if self.phase is Phase.FOLLOWING else []
                )
                self._lose_leader(reason, now)
                return [*actions, ev.Disconnect()]
            case m.GivenUp():  # this node was suspended, or could not send
                leader, term = self.leader, self.term
                self._lose_leader("the leader gave up this node, which was silent", now)
                return [ev.Disconnect(), *self._connect(leader, term, now)]
            case m.Goodbye(reason, is_gone):  # an agent that leaves never votes again, so this is its end
                self._lose_leader(reason, now, close=Close.ORDERLY if is_gone else Close.GOODBYE)
                return [ev.Disconnect(), *self._read_cell(now), *self._campaign(now)]
            case m.Heartbeat(has_spares, renewals):
                self.state.on_spares(has_spares)
                self.sight.on_renewed(self.leader.token, self.term, renewals, now)
                return []
            case m.Probe():
                return [ev.Send(m.Alive())]
            case r.Answer(ask_id):
                self.state.on_fetch_answered(ask_id)
                return [ev.Deliver(message)]
            case r.Show() | r.Shown():
                return [ev.Deliver(message)]
            case _:
                assert_never(message)

    def _on_unread(self, reason: str) -> list[m.LeaderMessage]:
        """The leader does not accept a message of this node, so no request that may be the reason is repeated."""
        refused = [r.Answer(ask_id, False, reason) for ask_id in self.state.drop_unanswered()]
        text = f"the leader refused a message of this node: {reason}"
        return [m.Waiting(text, kind=m.WaitKind.LEADER), *refused]

    def _on_plan(self, plan: m.Plan, now: float) -> list[Action]:
        assert self.leader is not None
        self.term, must_report = max(self.term, plan.term), False
        if self.log is not None and plan.log is not None:
            if following.must_join_anew(self.log, plan.log):
                return self._join_anew(now)
            before, self.log = self.log, following.on_plan(self.log, plan.log)
            must_report = following.must_report(before, self.log)
        actions: list[Action] = []
        if plan.log is None or plan.log.is_leading:
            actions += self._on_led(now)
        starts = self.state.node and self.state.node.starts
        news = self.state.follow(plan, now) if self._is_leading else []
        actions += [ev.Deliver(each) for each in news]
        if plan.ended is not None and self._is_leading:
            self.phase = Phase.OVER
            return [*actions, ev.Disconnect()]
        must_report |= starts is not (self.state.node and self.state.node.starts)
        return actions + (self._report(now) if must_report else [])

    def _on_led(self, now: float) -> list[Action]:
        """The agent that this node is connected to leads."""
        if self._is_leading:
            return []
        self._is_leading, self._has_retried, self.phase, self._silent = True, False, Phase.FOLLOWING, ""
        self.lost_at, self.is_gone, self.led_at, self._defeats = None, False, now, 0
        self.state.on_welcome(is_new=True)
        self.search.end()
        self.alive_at = now + self.lease_s / 3
        return [ev.Send(each) for each in self.state.fetches.values()]

    def _join_anew(self, now: float) -> list[Action]:
        """Joins under a new name, because the leader leads another log than the one in which this node has voted."""
        assert self.leader is not None and self.log is not None
        leader, term = self.leader, self.term
        self._names += 1
        self.log = Node(self.name, replaces=(self.log.name,))
        return [ev.Disconnect(), *self._connect(leader, term, now)]

    # Time.

    def _on_deadline_passed(self, now: float) -> list[Action]:
        due = self.deadline
        if due is None or now < due:
            return []  # disarmed or moved while the event was in the mailbox
        if self.search.is_over(now):
            self.phase = Phase.OVER
            return [
                ev.Disconnect(),
                ev.GiveUp(self.search.outcome(now), is_refused=False, lacks_quorum=self.search.lacks_quorum),
            ]
        actions: list[Action] = [ev.Deliver(waiting)] if (waiting := self.search.note(now)) else []
        if self._stop_at is not None and now >= self._stop_at:
            actions += self._stop(Cause(CauseKind.LEADER_SILENT), now)
        match self.phase:
            case Phase.SEARCHING:
                read = self._read_cell(now) if now >= self.search.read_at and not self.sight.is_asked else []
                return actions + read + self._campaign(now)
            case Phase.CONNECTING | Phase.FOLLOWING if self._look_at is not None and now >= self._look_at:
                self.sight.on_asked(now)
                return [*actions, ev.ReadCell()]
            case Phase.CONNECTING if now >= self._greeted_by:
                self._lose_leader("the leader does not answer", now)
                return [*actions, ev.Disconnect(), *self._read_cell(now)]
            case Phase.FOLLOWING if now >= self.received_at + self.lease_s:
                return actions + self._on_silent(due, now)
            case Phase.FOLLOWING if now >= self.alive_at:
                self.alive_at = now + self.lease_s / 3
                return [*actions, ev.Send(m.Alive())]
            case Phase.CONNECTING | Phase.FOLLOWING | Phase.CAMPAIGNING | Phase.OVER:
                return actions
            case _:
                assert_never(self.phase)

    def _on_silent(self, due: float, now: float) -> list[Action]:
        """The leader was silent for a lease, or this process was stopped and messages may still be in the socket."""
        if now - due > self.lease_s / 3:
            self.received_at = now - self.lease_s * 2 / 3
            return []
        self._lose_leader(f"the leader was silent for {self.lease_s:g} s", now)
        return [ev.Disconnect(), *self._read_cell(now), *self._campaign(now)]

    def _stop(self, cause: Cause, now: float) -> list[Action]:
        """This node ends its round on its own."""
        stop = self.state.interrupt(cause)
        return [] if stop is None else [ev.Deliver(stop), *self._report(now)]

    # Moves.

    def _lose_leader(self, reason: str, now: float, *, close: Close = Close.ABORTED) -> None:
        """The connection has ended, or is about to be closed."""
        assert self.leader is not None
        since = min(now, self.received_at) if now >= self.received_at + self.lease_s else now
        if self._is_leading or self.lost_at is None:
            self.lost_at, self.is_gone = since, False
            self.state.on_alone(since)
        self._silent = self.leader.token if self._is_leading and close is Close.ABORTED else self._silent
        if close in {Close.ORDERLY, Close.GOODBYE}:
            self._note_gone(self.leader.token)
            self.is_gone = True
        self._close_log(close)
        self.phase, self._is_leading = Phase.SEARCHING, False
        self.search.blame(reason)
        self.search.begin(now)
        self.search.pause(now)

    def _note_gone(self, token: str) -> None:
        """A leader has ended, or no longer leads."""
        self.gone = (*(each for each in self.gone if each != token), token)[-ev.GONE_MAX :]

    def _note_alive(self, token: str) -> None:
        self.gone = tuple(each for each in self.gone if each != token)

    def _close_log(self, close: Close) -> None:
        if self.log is not None and self.log.leader:
            self.log = following.on_leader_closed(self.log, close)

    def _distrust(self, why: str, now: float) -> list[Action]:
        """The leader sends something that no leader can send: this node tries it again, later each time."""
        assert self.leader is not None
        text = not_followed(self.leader, why)
        self._lose_leader(text, now)
        waiting = ev.Deliver(m.Waiting(text, kind=m.WaitKind.LEADER))
        return [ev.Disconnect(), *([waiting] if self.search.back_off(now) else [])]
