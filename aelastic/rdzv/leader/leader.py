"""The leader: one agent's candidacy, and its leadership until it steps down.

It composes `connections.py` (connections, and the nodes behind them), `rdzv.log` (how agents agree) and
`coordinator.py` (on what).  Pure: `leader_server.py` carries out its actions.

- **One entry at a time.**  When the coordinator changes what the log keeps, an entry with that is proposed.  What
  follows is sent to nodes once it is committed; what they report meanwhile waits.
- **The cell** of the endpoint is read first, then locked for this term, and renewed three times a lease.
- **Lease.**  A leader without contact to a quorum for a lease steps down, and its side stops its workers.
- A leader that discovers a **higher term** and has a quorum takes a term above it, and keeps its followers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import assert_never

from aelastic.base.machine import Machine, Trace
from aelastic.rdzv.decisions.cause import CauseKind
from aelastic.rdzv.leader import leader_events as ev
from aelastic.rdzv.leader.connections import Connections
from aelastic.rdzv.leader.coordinator import Coordinator
from aelastic.rdzv.leader.coordinator_events import CutOff, Lost, Reported, Send
from aelastic.rdzv.leader.coordinator_events import Event as CoordinatorEvent
from aelastic.rdzv.leader.coordinator_events import Phase as CoordinatorPhase
from aelastic.rdzv.leader.followers import Followers
from aelastic.rdzv.leader.job_state import JobState, Participant, payload_of, state_in, voters_in
from aelastic.rdzv.leader.leader_cell import READ_AGAIN_S, LeaderCell
from aelastic.rdzv.leader.roster import some_of
from aelastic.rdzv.leader.waiting_text import silent_text, votes_text, waiting_texts
from aelastic.rdzv.log import cell as cells
from aelastic.rdzv.log import leader as leading
from aelastic.rdzv.log import votes
from aelastic.rdzv.log.cell import Cell
from aelastic.rdzv.log.entries import NO_PAYLOAD, Entry, EntryId, Payload, id_of, log_of, order
from aelastic.rdzv.log.node import Close, votes_in
from aelastic.rdzv.log.node import Plan as LogPlan
from aelastic.rdzv.log.node import Status as LogStatus
from aelastic.rdzv.log.votes import Mandate, Votes
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.sense import is_too_high, too_high_text

# How often waiting nodes are sent what they wait for.
WAITING_TEXT_INTERVAL_S = 10.0
# A candidate without a quorum by then has lost.
CANDIDACY_S = 1.5
# A proposal that must be in the cell first is repeated without new voters if the endpoint is silent for this long.
SILENT_CELL_S = 1.0
ASK_AGAIN_S = 0.1
NOT_PROPOSED = -1
# How long a leader does not campaign after it was cut off from all others: one of them may reach the store.
STAND_BACK_LEASES, STAND_BACK_S = 0.5, 0.5
OTHER_LEADS = "another agent leads the job now"


class Phase(StrEnum):
    CANDIDATE = auto()  # it seeks the votes of a quorum
    LEADING = auto()  # it decides for the job
    STEPPED_DOWN = auto()  # another agent leads, or none


@dataclass(slots=True)
class Leader(Machine[ev.Event, ev.Action]):
    """One term, or several in a row, of one leader.

    Args:
        coordinator: decides what to agree on.
        connections: with nodes and other agents; their lease is the silence after which an agent is lost.
        log: how it agrees.
        at: where other agents reach it.
        host: this agent's host.
        do_nodes_vote: otherwise the store alone decides.
        cell: the endpoint's cell.
        started: when it began to campaign.
        gone: tokens of leaders that have ended, or have said goodbye.
        silent: the token of a leader that has sent this agent nothing for a lease.
        job_before: the log of a job that is over; what that job left in the cell is ignored.
        is_replaceable: another agent can lead, and reach the store without this one.
    """

    coordinator: Coordinator
    connections: Connections
    log: leading.Leader
    at: m.LeaderAt
    host: str
    do_nodes_vote: bool
    cell: LeaderCell
    started: float
    gone: frozenset[str] = frozenset()
    job_before: str = ""
    silent: str = ""
    is_replaceable: bool = False

    phase: Phase = Phase.CANDIDATE
    _ask_at: float = -math.inf  # when voters are asked next
    _seeks_since: float = 0.0  # since when it seeks the votes of a quorum, if it has none
    _heartbeat_at: float = 0.0
    _waiting_text_at: float = 0.0
    followers: Followers = field(default_factory=Followers)
    _is_resumed: bool = False  # the coordinator knows what the log keeps
    _version: int = 0  # of the coordinator's state, as last agreed on
    _payload: Payload = NO_PAYLOAD  # of that proposal
    _highest: int = 0  # the highest term that a node has reported
    _given_up: Entry | None = None  # the last entry of a log that cannot continue, if this leader founds another
    _payload_version: int = NOT_PROPOSED
    _agreed: EntryId | None = None  # the last entry that the coordinator's state is based on
    _withheld: list[Send] = field(default_factory=list[Send])  # what follows from the proposal
    _has_spares: bool = False  # as sent to all nodes
    _trace: Trace = field(default_factory=Trace)

    def __post_init__(self) -> None:
        self._heartbeat_at = self._seeks_since = self.started
        self._waiting_text_at = self.started + WAITING_TEXT_INTERVAL_S

    @property
    def term(self) -> int:
        return self.log.node.term

    @property
    def name(self) -> str:
        """The name of this agent's node in the log."""
        return self.log.node.name

    @property
    def lease_s(self) -> float:
        return self.connections.terms.lease_s

    @property
    def has_stepped_down(self) -> bool:
        return self.phase is Phase.STEPPED_DOWN

    @property
    def has_own_node(self) -> bool:
        """Whether this agent's own node is connected."""
        return self.connections.is_connected(self.coordinator.own_node_id)

    @property
    def is_over(self) -> bool:
        """Whether the verdict is agreed on."""
        return isinstance(self.log.node.committed, Entry) and self.log.node.committed.is_verdict

    @property
    def is_known_to_all(self) -> bool:
        """Whether every known node knows how the job ended, or has ended before."""
        is_lost = self.coordinator.roster.lost_hosts or self.connections.absent.may_look
        return self.is_over and self.connections.is_empty and not is_lost

    @property
    def deadline(self) -> float | None:
        if self.phase is Phase.STEPPED_DOWN:
            return None
        times = [self._heartbeat_at, self._waiting_text_at, self.connections.deadline]
        if self.phase is Phase.CANDIDATE:
            times.append(self._ask_at if self._ask_at > 0 else None)
        if not self._has_mandate:
            times.append(self._has_lost_at)
        if not self.cell.is_asked:
            times.append(self.cell.due)
        if self._may_decide:
            times.append(self.coordinator.deadline)
        if leading.is_withheld(self.log):
            times.append(self.cell.silent_at(SILENT_CELL_S))
        return min(time for time in times if time is not None)

    @property
    def _has_mandate(self) -> bool:
        return bool(self.log.mandate) or self.is_over

    @property
    def _has_lost_at(self) -> float:
        """The time when it steps down, if no quorum has voted for it by then."""
        is_short = self.phase is Phase.CANDIDATE and self.do_nodes_vote
        return self._seeks_since + (CANDIDACY_S if is_short else self.lease_s)

    @property
    def _missing_hosts(self) -> list[str]:
        """Hosts of voters that have not answered, and may live."""
        found = leading.phase_1_votes(self.log)
        return [each.host for each in self._deciding if each.name not in found.known | found.replaced]

    @property
    def _deciding(self) -> tuple[Participant, ...]:
        """The voters that decide on the next entry, as far as this agent knows."""
        entry = leading.last_whole(self.log)
        return () if entry is None else voters_in(entry)

    def _why_lost(self) -> str:
        if not self._deciding:
            return "too few nodes voted for this one"
        if not self._missing_hosts:
            return "there is no quorum: the endpoint has given its vote to another agent, or cannot be reached"
        return (
            f"there is no quorum: {some_of(self._missing_hosts)} cannot be reached, and may be running without this "
            "node; restart an agent on each, or all agents with --rdzv-conf survivor=endpoint"
        )

    @property
    def _may_decide(self) -> bool:
        is_free = self.is_over or (bool(self.log.mandate) and self.log.proposal is None)
        return self.phase is Phase.LEADING and self._is_resumed and is_free

    def _dispatch(self, event: ev.Event, now: float) -> list[ev.Action]:  # noqa: C901, PLR0912  one case for each event
        match self.phase:
            case Phase.STEPPED_DOWN:
                return []  # it came late: another agent leads, and handles it
            case Phase.CANDIDATE | Phase.LEADING:
                pass
            case _:
                assert_never(self.phase)
        match event:
            case ev.Opened(conn, peer, way):
                self.connections.on_opened(conn, peer, way, now)
                return []  # it must say Hello within a lease
            case ev.Received(conn, message, has_next):
                actions = self._on_received(conn, message, now)
                if has_next and not actions:
                    return []  # thousands of statuses may come at once, and most of them decide nothing
            case ev.Garbled(conn, reason, is_other):
                actions = self.connections.on_garbled(conn, reason, now, is_other_protocol=is_other)
                self._on_followers_gone()
            case ev.Closed(conn, close):
                actions = self._on_closed(conn, close, now)
            case ev.Flushed(conn, serial):
                self._on_flushed(conn, serial)
                actions = []
            case ev.CellAnswered(stored):
                actions = self._on_cell(stored, now)
            case ev.CellFailed():
                self.cell.on_failed(now, must_read=not self.is_cell_ours)
                actions = []
            case ev.Campaigned(conn, campaign):
                actions = self._on_campaigned(conn, campaign, now)
            case ev.Declined():
                actions = self._on_declined(event, now)
            case ev.Resigned():
                return self._step_down("the leader's agent is leaving", now, is_gone=True)
            case ev.DeadlinePassed():
                actions = self._on_deadline_passed(now)
            case _:
                assert_never(event)
        return actions if self.has_stepped_down else self._carry_on(actions, now)

    def _carry_on(self, actions: list[ev.Action], now: float) -> list[ev.Action]:
        """Agrees on what it can, decides what is due, and returns what follows."""
        actions = [*actions, *self._agree(now)]
        if not self.has_stepped_down:
            self._outbid(now)  # before a round begins
            actions += self._decide(now)
        if self.has_stepped_down:
            return actions
        return [*self._send_plans(now), *actions, *self._ask_votes(now), *self._ask_cell(now)]

    # Connections.

    def _on_received(self, conn: int, message: m.Upward, now: float) -> list[ev.Action]:
        actions = self.connections.on_received(conn, message, now, is_leading=self.phase is Phase.LEADING)
        if isinstance(message, m.HungUp):
            self._on_follower_closed(conn, Close.HUNG_UP)
        if (name := self.connections.name_of(conn)) and name != self.name:
            self.followers.on_received(name, now, self.lease_s)
            if (status := self.connections.log_of(conn)) is not None:
                self._on_status(conn, name, status, now)
        return actions

    def _on_status(self, conn: int, name: str, status: LogStatus, now: float) -> None:
        """Notes what a node knows of the log, if that may matter."""
        self._highest = max(self._highest, status.term)
        self._outbid(now)
        if self.followers.name_of(conn) == name:
            if self.log.followers[name].status != status:
                self.log = leading.on_status(self.log, name, status)
            return
        committed, proposal = self.log.node.committed, self.log.proposal
        speaks_for = name, *status.replaces
        has_vote = any(votes_in(committed, each) or votes_in(proposal, each) for each in speaks_for)
        has_news = order(status.committed) > order(committed) or status.accepted is not None
        if has_vote or has_news:
            self._on_voter(conn, name, status)

    def _on_voter(self, conn: int, name: str, status: LogStatus) -> None:
        """A node has a vote, or knows more of the log than this leader: its statuses count from now on."""
        self.followers.add(conn, name)
        self.log = leading.on_connected(self.log, name, status)
        self.connections.send_again(conn)

    def _on_closed(self, conn: int, close: Close, now: float) -> list[ev.Action]:
        self._on_follower_closed(conn, close)
        return self.connections.on_closed(conn, now, is_reset=close is Close.ABORTED)

    def _on_follower_closed(self, conn: int, close: Close) -> None:
        if (name := self.followers.remove(conn)) is not None:
            self.log = leading.on_follower_closed(self.log, name, close)

    def _on_followers_gone(self) -> None:
        """Connections were dropped here, which proves nothing."""
        for conn in self.followers.conns:
            if not self.connections.is_open(conn):
                self._on_follower_closed(conn, Close.ABORTED)

    def _on_flushed(self, conn: int, serial: int) -> None:
        name = self.followers.name_of(conn)
        if name is not None and self.followers.was_last(conn, serial):
            self.log = leading.on_plan_sent(self.log, name)

    def _send_plans(self, now: float) -> list[ev.Action]:
        withheld = set(self.followers.names) if leading.is_withheld(self.log) else set[str]()
        actions = self.connections.send_plans(self._log_plans(), withheld, now)
        return [self._numbered(action) for action in actions]

    def _numbered(self, action: ev.Action) -> ev.Action:
        """Returns a plan for a follower with a number, which `Flushed` names."""
        serial = self.followers.on_sent(action.conn) if isinstance(action, ev.SendTo) else 0
        return action.replace(serial=serial) if serial else action

    def _log_plans(self) -> Callable[[str], LogPlan | None]:
        """Returns what a node must know of the log, by its name.  All nodes that do not follow share one plan."""
        log, own_name, followers = self.log, self.name, self.followers.names
        of_others = LogPlan(self.term, self._has_mandate, id_of(log.node.committed))

        def log_plan(name: str) -> LogPlan | None:
            if name == own_name:
                return None
            return leading.plan_for(log, name) if name in followers else of_others

        return log_plan

    def _notify_voters(self) -> None:
        """The log has changed, so followers that vote are sent their plans."""
        for conn in self.followers.conns:
            self.connections.send_again(conn)

    # The log.

    def _agree(self, now: float) -> list[ev.Action]:
        """Completes phases as far as the votes allow."""
        if self._is_resumed and self.log.mandate and self.log.proposal is None:
            return []  # phase 1 is complete, and nothing is proposed
        before, actions = self._known_to_voters, list[ev.Action]()
        if not self._has_mandate:
            self._note_replaced()
        has_changed = True
        while has_changed and not self.is_over:
            if not self.log.mandate:
                has_changed = self._establish(now)
            elif self.log.proposal is not None:
                has_changed, more = self._commit(now)
                actions += more
            else:
                has_changed = False
        if self.is_over and not self._is_resumed:  # nobody decides any more, and all are sent the verdict
            self.phase = Phase.LEADING
            self._resume(now)
            self.connections.on_over(now)
        if self._known_to_voters != before:
            self._notify_voters()
        if self._is_resumed and self.log.node.committed is None and self._agreed is not None:  # it founds another log
            self._agreed, self._version = None, NOT_PROPOSED
        if self._is_resumed and id_of(self.log.node.committed) != self._agreed:
            return actions + self._step_down(OTHER_LEADS, now)  # an entry that another leader has proposed
        return actions

    @property
    def _known_to_voters(self) -> tuple[object, ...]:
        """Returns the parts of a plan that tell a voter about the log."""
        log, node = self.log, self.log.node
        return node.term, log.mandate, node.committed, log.proposal, node.accepted

    def _establish(self, now: float) -> bool:
        """Completes phase 1, or a step of it, if possible."""
        before, established = self.log.node.committed, leading.establish(self.log)
        if established is None:
            return False
        if established.given_up is not None and isinstance(before, Entry):
            self._given_up = before
        self.log = established
        if established.mandate:
            self.phase = Phase.LEADING
            if established.proposal is None:
                self._resume(now)
        return True

    def _commit(self, now: float) -> tuple[bool, list[ev.Action]]:
        """Completes phase 2 if possible, and returns what is sent to nodes then."""
        proposal, committed = self.log.proposal, leading.commit(self.log)
        if committed is None or proposal is None:
            return False, []
        self.log = committed
        self._resume(now)
        if self.is_over:
            self.connections.on_over(now)
        if proposal.payload != self._payload:  # one that was adopted
            return True, []
        self._agreed, self._version = id_of(committed.node.committed), self._payload_version
        return True, self._release(now)

    def _note_replaced(self) -> None:
        """Recovery: a voter is gone if another agent has replaced it, on the same host with the same address."""
        node, voters = self.log.node, self._deciding
        taken, replaced = {each.node_id for each in voters}, set(node.replaces)
        for each in voters:
            is_here = self.connections.is_connected(each.node_id) or each.node_id == self.coordinator.own_node_id
            if is_here or each.name in replaced:
                continue
            newcomer = next((node_id for node_id in self._nodes_at(each) if node_id not in taken), None)
            if newcomer is not None:
                taken.add(newcomer)
                replaced.add(each.name)
        self.log = self.log.replace(node=node.replace(replaces=tuple(sorted(replaced))))

    def _nodes_at(self, voter: Participant) -> list[str]:
        """Returns the nodes connected from the place of a voter, including this agent's if it has that place."""
        addresses = {voter.address, voter.peer_address}
        found = self.connections.nodes_at(voter.host, addresses)
        if not self.has_own_node and self.host == voter.host and addresses & {*self.at.addresses}:
            found.append(self.coordinator.own_node_id)
        return found

    def _resume(self, now: float) -> None:
        """Lets the coordinator continue from what the log keeps, once."""
        if self._is_resumed:
            return
        self._is_resumed = True
        self.coordinator.roster.begin_term(self.term)
        node, committed = self.log.node, self.log.node.committed
        known = committed if isinstance(committed, Entry) else self._given_up
        if known is not None and known.payload:
            names = [*(each.name for each in node.ended), *(each.name for each in node.ended_followers)]
            state, gone = state_in(known), [name.partition("~")[0] for name in names]
            self.coordinator.resume(state, gone, now)
            if state.last_round is not None:
                not_missed = {self.name, *names, *leading.replaced(self.log)}
                may_live = [each for each in state.last_round.participants if each.name not in not_missed]
                self.connections.on_taken_over(may_live, now)
        self._version, self._agreed = self.coordinator.version, id_of(committed)
        if known is not committed:  # what is known of the job goes into the first entry of the new log
            self._version = NOT_PROPOSED

    def _release(self, now: float) -> list[ev.Action]:
        """Sends nodes what follows from a proposal that was agreed on."""
        withheld, self._withheld = self._withheld, []
        return self._deliver(withheld, now)

    def _propose(self, now: float) -> None:
        """Turns what the coordinator has decided into an entry."""
        core = self.coordinator
        state = core.state(now)
        payload, is_verdict = payload_of(state), state.verdict is not None
        voters = self._voters(state, now)
        self.log = leading.propose(self.log, voters, voters, is_verdict=is_verdict, payload=payload)
        new_voters = set(voters) - set(self.followers.names)
        for conn, name, status in self.connections.statuses() if new_voters else ():
            if name in new_voters:
                self._on_voter(conn, name, status)
        self._payload, self._payload_version = payload, core.version
        self._notify_voters()

    def _voters(self, state: JobState, now: float) -> tuple[str, ...]:
        """Returns who must decide on the next entry."""
        committed = self.log.node.committed
        before = committed.voters if isinstance(committed, Entry) else ()
        if not self.do_nodes_vote or state.last_round is None:
            return ()
        # A voter of another log keeps its promises there until it joins under another name.
        statuses = [(name, log_of(status.committed)) for _, name, status in self.connections.statuses()]
        promised = {name for name, log in statuses if log not in {None, log_of(committed)}}
        if committed is None and self._given_up is not None:
            promised |= set(self._given_up.voters)
        hosts: dict[str, str] = {}
        for each in state.last_round.participants:
            if each.name not in promised and (each.vote_port or each.name in before):
                hosts[each.name] = each.host
        if before and self.cell.is_silent(SILENT_CELL_S, now):  # new voters go to the endpoint first
            hosts = {name: host for name, host in hosts.items() if name in before}
        return votes.choose_voters(hosts, before) if hosts else before

    def _outbid(self, now: float) -> None:
        """Takes a term above that of each node, as soon as it can.

        The story behind it: three agents begin at once, and one leads.  The others have campaigned in higher terms by
        then.  The first of them to connect makes the leader campaign again.  The second one connects before the store
        has answered, and its term was noticed only with its next status, when workers had started.  Then the store fell
        silent: the leader had given up its mandate, which only the store can renew, and had to step down.
        """
        waits_for_store = self._decides_alone and self.cell.has_failed
        can_outbid = self.phase is Phase.CANDIDATE or (bool(self.log.mandate) and not waits_for_store)
        if self._highest > self.term and can_outbid:
            self._campaign_again(self._highest, now)

    def _campaign_again(self, highest: int, now: float, *, has_listened: bool = False) -> None:
        """Campaigns in a term above every other.  Followers stay, and the proposal is proposed again."""
        term = leading.next_term(max(highest, self.term))
        self.log = leading.campaign_again(self.log, term, has_listened=has_listened or self.log.has_listened)
        if self.phase is Phase.LEADING:  # a candidate's time is not extended: two could outbid each other forever
            self._seeks_since = now
        self.coordinator.roster.begin_term(self.term)
        self.connections.begin_term(self.term)
        self.followers.keep(self.log.followers.keys())
        self.cell.renew_by(-math.inf)

    def _ask_votes(self, now: float) -> list[ev.Action]:
        """Asks the voters that have not answered, from time to time."""
        committed = id_of(self.log.node.committed)
        if self.phase is not Phase.CANDIDATE or now < self._ask_at or committed is None:
            return []
        self._ask_at = now + ASK_AGAIN_S
        known = {*self.followers.names, self.name, *(each.name for each in self.log.node.ended_followers)}
        known |= {each.name for each in self.log.node.ended}
        asked = tuple(each for each in self._deciding if each.name not in known)
        return [ev.AskVotes(asked, m.Campaign(self.term, committed, self.at))] if asked else []

    def _on_campaigned(self, conn: int, campaign: m.Campaign, now: float) -> list[ev.Action]:
        """Another agent seeks this one's vote, or asks who leads."""
        is_leading, ours = self.phase is Phase.LEADING, log_of(self.log.node.committed)
        if ours is None or log_of(campaign.committed) != ours:  # perhaps of another job
            return [ev.Answer(conn, m.Declined(self.term, "this node knows another log"))]
        if is_too_high(campaign.term, self.term):
            return [ev.Answer(conn, m.Declined(self.term, too_high_text(campaign.term), None, is_leading))]
        if campaign.term > self.term:
            if not is_leading:
                return [*self._step_down(OTHER_LEADS, now), ev.PassOn(conn, campaign)]
            self._campaign_again(campaign.term, now)
        reason = "this node leads" if is_leading else "this node seeks votes itself"
        return [ev.Answer(conn, m.Declined(self.term, reason, self.at if is_leading else None, is_leading))]

    def _on_declined(self, event: ev.Declined, now: float) -> list[ev.Action]:
        """A node does not vote for this one: it may know a higher term, or follow a leader that lives."""
        if self.phase is not Phase.CANDIDATE:
            return []
        if event.leader and event.is_own:
            return self._step_down(OTHER_LEADS, now, alive=event.leader)
        if event.leader not in {"", self.silent, *self.gone}:
            return self._step_down(OTHER_LEADS, now)
        if event.term > self.term and not is_too_high(event.term, self.term):
            self._campaign_again(event.term, now)
        return []

    # The cell.

    @property
    def is_cell_ours(self) -> bool:
        return self.cell.is_held_by(self.at.token, self.term)

    @property
    def _cell_of_this_job(self) -> Cell | None:
        cell = self.cell.cell
        is_of_job_before = cell is not None and self.job_before != "" and _verdict_in(cell) == self.job_before
        return None if is_of_job_before else cell

    def _ask_cell(self, now: float) -> list[ev.Action]:
        """Reads the cell, locks it for this term, or renews it."""
        if self.cell.is_asked or (self.cell.has_failed and now < self.cell.due):
            return []
        if not self.cell.has_read:
            return [self.cell.read(now)] if now >= self.cell.due else []
        if self.is_cell_ours:
            return self._write_cell(now)
        cell = self._cell_of_this_job
        is_gone = self._is_leader_gone(cell, now)
        has_quorum = self._decides_without(cell)
        if cells.may_lock(cell, self.at.token, self.term, is_leader_gone=is_gone, has_quorum_without=has_quorum):
            ours = log_of(self.log.node.committed) if self.log.mandate is Mandate.QUORUM else None
            locked = cells.lock(cell, self.at.token, self.term, ours, self.cell.new_incarnation())
            return [self.cell.write(locked, self.at, now)]
        return [self.cell.read(now)] if now >= self.cell.due else []

    def _write_cell(self, now: float) -> list[ev.Action]:
        """Renews the cell, at once if it is behind."""
        cell, view = self.cell.cell, self.log.views[0]
        assert cell is not None
        if view is not None and leading.must_begin_again(self.log, view):
            begun = cells.begin_again(cell, log_of(self.log.node.committed), self.cell.new_incarnation())
            return [self.cell.write(begun, self.at, now)]
        if view is None or not leading.may_write(self.log, 0):
            self.cell.put_off(now)
            return []
        has_news = self.log.proposal is not None and bool(self.log.mandate) and not view.has_proposal
        is_behind = order(self.log.node.committed) > order(cell.committed)
        if not (has_news or is_behind or now >= self.cell.due):
            return []
        return [self.cell.write(leading.cell_for(self.log, cell), self.at, now)]

    def _is_leader_gone(self, cell: Cell | None, now: float) -> bool:
        if cell is None or cell.leader in {"", self.at.token} or cell.leader in self.gone:
            return True  # or it is this one, in an earlier term
        return now - self.cell.seen.since >= self.lease_s

    def _has_quorum_without(self) -> bool:
        """Returns whether this agent does not need the endpoint's vote."""
        committed = self.log.node.committed
        if not isinstance(committed, Entry) or not committed.voters:
            return False
        found = leading.phase_1_votes(self.log).replace(endpoints=0)
        return votes.mandate(committed.configuration, found) is Mandate.QUORUM

    def _decides_without(self, cell: Cell | None) -> bool:
        """Returns whether it may take the cell from another: it does not need its vote, or has the verdict of its log.

        Another leader of this log can only find the same verdict.  If it is not in the cell, that leader learns it from
        nobody once the nodes that know it have ended.
        """
        is_same_log = cell is not None and cell.log == log_of(self.log.node.committed)
        return self._has_quorum_without() or (self.is_over and is_same_log)

    def _on_cell(self, stored: m.StoredCell | None, now: float) -> list[ev.Action]:
        was_ours, asked = self.is_cell_ours, self.cell.on_answered(stored, now)
        if asked is None:
            return []  # nothing was asked
        cell = self.cell.cell
        has_no_log = self.phase is Phase.CANDIDATE or self.log.node.committed is None
        if has_no_log and cell is not None and _verdict_in(cell) not in {"", self.job_before}:
            return self._step_down("the job is over", now)  # this agent's node reads that too
        if cell is None or not self.is_cell_ours:
            return self._on_other_cell(now)
        change = leading.on_cell_written if was_ours else leading.on_locked
        self.log = change(self.log, 0, cell)
        if stored != asked.written:  # a write was carried out though its answer was lost: it is renewed
            self.cell.renew_by(now)
        return []

    def _on_other_cell(self, now: float) -> list[ev.Action]:
        """The endpoint's cell is not what this leader has written."""
        cell = self._cell_of_this_job
        is_others = cell is not None and cell.leader not in {"", self.at.token} and cell.leader not in self.gone
        if cell is None or not is_others or self._is_leader_gone(cell, now):  # it is locked again
            forgets_founding = cell is None and self.log.node.committed is None and self.log.proposal is not None
            if forgets_founding:  # the first entry is named after what the endpoint has forgotten
                self._campaign_again(self.term, now)
            elif cell is not None and cell.term >= self.term:
                self._campaign_again(cell.term, now)
            return []
        is_renewed = self.cell.seen.since == now
        other = cell.committed
        if other is None and cell.accepted is not None:
            other = cell.accepted.entry
        if leading.must_give_up_log(self.log, other, has_other_quorum=is_renewed):
            return self._step_down(OTHER_LEADS, now, stored=self.cell.stored)
        if self._decides_without(cell) or leading.is_of_other_log(self.log, other):
            if cell.term >= self.term:
                self._campaign_again(cell.term, now)
            return []
        ours = self.log.node.committed
        if self.phase is Phase.CANDIDATE and isinstance(ours, Entry) and self.name in ours.voters:
            return []  # a quorum of voters does not need the endpoint's vote
        return self._step_down(OTHER_LEADS, now, stored=self.cell.stored)

    # Time.

    def _on_deadline_passed(self, now: float) -> list[ev.Action]:
        if self.deadline is None or now < self.deadline:
            return []  # disarmed or moved while the event was on its way
        have_slept = now - self.deadline > self.lease_s / 3
        actions = self.connections.on_deadline_passed(now, have_slept=have_slept)
        self._on_followers_gone()
        if not self._has_mandate and now >= self._has_lost_at:
            return actions + self._lose_quorum(self._why_lost(), now)
        stand_back_s = self.lease_s * STAND_BACK_LEASES + STAND_BACK_S
        if self._is_alone:
            return actions + self._step_down("lost all other nodes at once", now, stand_back_s=stand_back_s)
        if self.phase is Phase.LEADING and not self._has_contact(now):
            return actions + self._step_down("no contact with a quorum", now, stand_back_s=stand_back_s)
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self.lease_s / 3
            self._name_endpoint(now)
            actions += self.connections.send_to_all(self._heartbeat)
        if now >= self._waiting_text_at:
            self._waiting_text_at = now + WAITING_TEXT_INTERVAL_S
            if self.log.proposal is None:
                actions += self._deliver(waiting_texts(self.coordinator, now), now)
            else:
                self._notify_undecided(self.log.proposal, now)
        is_silent = self.cell.is_silent(SILENT_CELL_S, now)
        if is_silent and leading.is_withheld(self.log) and self._has_quorum_without():
            self._campaign_again(self.term, now)  # the proposal is repeated without new voters
        return actions

    def _notify_undecided(self, proposal: Entry, now: float) -> None:
        """All nodes read which vote the next entry waits for."""
        known = leading.phase_2_votes(self.log, proposal).known
        missing = [each.host for each in self._deciding if each.name not in known]
        text = votes_text(missing) if missing else silent_text(self.cell.silent_s(now))
        self.connections.decide_for_all(m.Waiting(text), now)

    def _name_endpoint(self, now: float) -> None:
        """Names an endpoint that has lost its memory in the next entry; if it decides alone, in another log."""
        committed, view = self.log.node.committed, self.log.views[0]
        if self.phase is not Phase.LEADING or self.is_over or not isinstance(committed, Entry) or view is None:
            return
        if votes.is_named(committed.configuration, 0, view.incarnation):
            return
        if committed.voters:
            self._version = NOT_PROPOSED
        else:
            self._campaign_again(self.term, now, has_listened=True)

    def _has_contact(self, now: float) -> bool:
        """Returns whether this leader had contact to a quorum within a lease."""
        committed, node = self.log.node.committed, self.log.node
        if not isinstance(committed, Entry) or self.is_over:
            return True  # no round runs
        if not committed.voters:
            return self._has_cell(committed, now) or self._are_all_here
        recent = self.followers.recent(committed.voters, now, self.lease_s)
        ended = frozenset(each.name for each in node.ended_followers), frozenset(each.name for each in node.ended)
        endpoints = int(self._has_cell(committed, now))
        found = Votes(frozenset({*recent, self.name}), *ended, leading.replaced(self.log), endpoints)
        now_has = votes.mandate(committed.configuration, found)
        if not self.log.mandate:
            return now_has is not Mandate.NONE
        return votes.is_within(now_has, self.log.mandate)  # else nothing more can be committed on this mandate

    @property
    def _are_all_here(self) -> bool:
        """Whether all nodes of the round are connected, and no spare fell silent together with the endpoint.

        A spare that this agent cannot reach may reach the endpoint, and begin the next round without this one.
        """
        are_connected = all(map(self.connections.is_connected, self.coordinator.roster.participants))
        return are_connected and not self.connections.absent.has_silent_one(since=self.cell.taken_at)

    @property
    def _heartbeat(self) -> m.Heartbeat:
        cell = self.cell.cell
        return m.Heartbeat(self._has_spares, cell.renewals if cell is not None and self.is_cell_ours else 0)

    def _has_cell(self, committed: Entry, now: float) -> bool:
        """Returns whether the endpoint that the committed entry names votes for this leader."""
        view = self.log.views[0]
        is_named = view is not None and votes.is_named(committed.configuration, 0, view.incarnation)
        return is_named and self.cell.has_taken(self.lease_s, now)

    @property
    def _is_alone(self) -> bool:
        """Whether this agent may be the one that is cut off: of two nodes, either may be."""
        core = self.coordinator
        if self.phase is not Phase.LEADING or not self.is_replaceable or self.is_over or self.do_nodes_vote:
            return False
        return self.connections.are_all_silent(core.own_node_id, max(2, core.rules.min_nodes))

    def _lose_quorum(self, reason: str, now: float) -> list[ev.Action]:
        return self._step_down(reason, now, lacks_quorum=bool(self._missing_hosts))

    def _step_down(
        self,
        reason: str,
        now: float,
        *,
        is_gone: bool = False,
        stand_back_s: float = 0.0,
        alive: str = "",
        lacks_quorum: bool = False,
        stored: m.StoredCell | None = None,
    ) -> list[ev.Action]:
        actions: list[ev.Action] = []
        runs = self.coordinator.phase in {CoordinatorPhase.RUNNING, CoordinatorPhase.GATHERING}
        has_newer_round = self._has_newer_round(stored)
        if self._is_resumed and runs and not is_gone and (reason != OTHER_LEADS or has_newer_round):
            self._withheld = []
            is_of_store = self._decides_alone and not self._is_alone
            kind = CauseKind.ENDPOINT_SILENT if is_of_store else CauseKind.NODES_SILENT
            cut_off = CutOff(CauseKind.CONTINUED_WITHOUT if has_newer_round else kind)
            actions += self._deliver(self.coordinator.handle(cut_off, now), now)
            actions += self._send_plans(now)
        node = leading.step_down(self.log)
        self.phase = Phase.STEPPED_DOWN
        return [
            *actions,
            *self.connections.dismiss(m.Goodbye(reason, is_gone)),
            ev.StepDown(reason, node, stand_back_s, alive, lacks_quorum, stored),
        ]

    def _has_newer_round(self, stored: m.StoredCell | None) -> bool:
        """Returns whether another leader has begun a round after the one that this leader knows, as the cell shows."""
        committed = None if stored is None else stored.cell.committed
        if not isinstance(committed, Entry) or log_of(committed) != log_of(self.log.node.committed):
            return False
        last_round = state_in(committed).last_round
        return last_round is not None and last_round.number > self.coordinator.round

    # Decisions.

    def _decide(self, now: float) -> list[ev.Action]:
        """Lets the coordinator decide what is due."""
        pending, core, actions = self.connections.pending, self.coordinator, list[ev.Action]()
        while self._may_decide:
            if core.version != self._version and not self.is_over:
                self._propose(now)
                actions += self._agree(now)  # at once, if this agent decides alone
            elif (event := pending.pop(now)) is not None:
                self._look_at_store(event, now)
                actions += self._pass_to_coordinator(event, now)
                self._note_read(event)
            elif core.is_due(now) and core.looks_at_newcomers and self._is_next_round_out_of_reach(now):
                core.put_off(now + READ_AGAIN_S)
            elif core.is_due(now):
                actions += self._pass_to_coordinator(ev.DeadlinePassed(), now)
                assert not core.is_due(now), "what is due is done at once"
            else:
                break
        runs_as_agreed = core.phase is CoordinatorPhase.RUNNING and self.log.proposal is None
        if runs_as_agreed and bool(core.roster.ready) != self._has_spares:
            self._has_spares = bool(core.roster.ready)
            actions += self.connections.send_to_all(self._heartbeat)
        return actions

    def _look_at_store(self, event: CoordinatorEvent, now: float) -> None:
        """A node has come: before that ends a round, this agent must know whether the store can begin the next one."""
        is_newcomer = isinstance(event, Reported) and event.is_new and self.coordinator.looks_at_newcomers
        if is_newcomer and self._decides_alone and not self.cell.has_taken(SILENT_CELL_S, now):
            self.cell.renew_by(now)

    def _is_next_round_out_of_reach(self, now: float) -> bool:
        """Returns whether the store alone decides, and is silent, so that no round could follow the present one."""
        return self._decides_alone and self.cell.is_silent(ASK_AGAIN_S, now)

    @property
    def _decides_alone(self) -> bool:
        """Whether the store decides, and no node votes."""
        committed = self.log.node.committed
        return isinstance(committed, Entry) and not committed.voters

    def _pass_to_coordinator(self, event: CoordinatorEvent, now: float) -> list[ev.Action]:
        core = self.coordinator
        core.forming.note_handled(is_all=self.connections.pending.is_empty)
        sends = core.handle(event, now)
        if core.version != self._version and not self.is_over:
            self._withheld += sends
            return []
        return self._deliver(sends, now)

    def _note_read(self, event: CoordinatorEvent) -> None:
        """Notes what an event of the coordinator shows about a node: that it is gone, or has read answers."""
        plans = self.connections.plans
        if isinstance(event, Lost):
            plans.forget(event.node_id)
        elif isinstance(event, Reported) and event.status.left is not None:
            plans.forget(event.node.node_id)
        elif isinstance(event, Reported):
            plans.on_read(event.node.node_id, [each.ask_id for each in event.status.asks])
            if event.is_new:  # it may only have read that it has a leader
                is_waiting = event.node.node_id in self.coordinator.roster.ready
                plans.send_again(event.node.node_id, is_waiting=is_waiting)

    def _deliver(self, sends: Iterable[Send], now: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        for node_id, message in ((send.node_id, send.message) for send in sends):
            match message:
                case r.Show() | r.Shown():
                    actions += self.connections.send(node_id, message)
                case r.Answer(ask_id) if not self.coordinator.roster.has_asked(node_id, ask_id):
                    actions += self.connections.send(node_id, message)  # it queries other nodes
                case _:
                    actions += self.connections.decide(node_id, message, now)
        return actions

    def validate(self) -> None:
        self.connections.validate()
        assert self.connections.term == self.term, "plans are of this term"
        assert self.phase is Phase.STEPPED_DOWN or self.deadline is not None, "a leader renews its lease"
        assert set(self.followers.names) <= self.log.followers.keys(), "a follower is one of the log's"


def _verdict_in(cell: Cell) -> str:
    """Returns the log of a job that is over, according to the cell; empty if it is not over."""
    return cell.committed.log if cell.committed is not None and cell.committed.is_verdict else ""
