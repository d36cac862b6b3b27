"""The leader: one agent's term as coordinator, from its election until it steps down.

It composes `connections.py` (connections, and nodes behind them), `leadership.py` (until when this agent may decide),
`coordinator.py` (decides) and `verdict.py` (lets the verdict out).  Pure: `coordinator_server.py` carries it out.

- While leadership is **not certain** decisions wait for the board's answer; connections, leases and heartbeats go on.
- A decision is only for nodes that are connected to this agent; any other says where it stands when it reconnects.
- All other nodes fall silent **at once**: they may have lost this agent, not it them.  It ends its round, and stands
  back from the board for a while, so that one of them can coordinate; if none does, it goes on.
- `Ended` with `REPLACED` is for one node; every other is the verdict, for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import assert_never

from aelastic.core.machine import Machine, Story
from aelastic.decisions.cause import CauseKind
from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.coordinator.connections import Connections
from aelastic.rdzv.coordinator.coordinator import Coordinator
from aelastic.rdzv.coordinator.coordinator_events import Confirmed, CutOff, Lost, Reported, Send
from aelastic.rdzv.coordinator.coordinator_events import Event as CoordinatorEvent
from aelastic.rdzv.coordinator.coordinator_events import Phase as CoordinatorPhase
from aelastic.rdzv.coordinator.verdict import VerdictGate
from aelastic.rdzv.coordinator.waiting_text import doubt_text, ended_in_vain, waiting_texts
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.survivors.leadership import LeaderLease

# So often nodes that wait read what for.
WAITING_TEXT_INTERVAL_S = 10.0
# A renewal that a round waits for is asked for again so soon.
RETRY_S = 0.25
DISPLACED = "another agent leads the job now"


class Phase(StrEnum):
    LEADING = auto()  # leadership is certain: the coordinator decides
    DOUBTFUL = auto()  # the board has not answered for a lease: decisions wait
    RECLAIMING = auto()  # the board is asked for a newer epoch: decisions and welcomes wait
    STEPPED_DOWN = auto()  # another agent leads, or this one is leaving


@dataclass(slots=True)
class Leader(Machine[ev.Event, ev.Action]):
    """One term of one coordinator.

    Args:
        coordinator: decides.
        sessions: of this term; its lease is the silence after which an agent is lost.
        lease: of our leadership.
    """

    coordinator: Coordinator
    sessions: Connections
    lease: LeaderLease
    is_replaceable: bool = False  # another agent can coordinate, and reach the board without this one

    phase: Phase = Phase.LEADING
    verdict: VerdictGate = field(default_factory=VerdictGate)
    _waiting_text_at: float = field(init=False)
    _has_spares: bool = False  # as all nodes have heard
    _nodes_asked_at: float | None = None  # since when they are to say that they are here: the board is silent
    _story: Story = field(default_factory=Story)

    def __post_init__(self) -> None:
        self._waiting_text_at = self.lease.started + WAITING_TEXT_INTERVAL_S

    @property
    def has_stepped_down(self) -> bool:
        return self.phase is Phase.STEPPED_DOWN

    @property
    def is_blocked(self) -> bool:
        """Whether other nodes may have elected a coordinator: no round begins, and no verdict is said."""
        return bool(self.sessions.missing)

    @property
    def _has_round(self) -> bool:
        """Whether workers may run in a round of this coordinator's, or in one that it is taking over."""
        return self.coordinator.phase in {CoordinatorPhase.RUNNING, CoordinatorPhase.TAKING_OVER}

    @property
    def has_own_node(self) -> bool:
        """Whether the node of this very agent is connected."""
        return self.sessions.is_connected(self.coordinator.own_node_id)

    @property
    def has_told_all(self) -> bool:
        """Whether every node that is known has heard how the job ended, or has ended before."""
        sessions = self.sessions
        is_lost = self.coordinator.roster.lost_hosts or sessions.electorate.unmet or sessions.absent.may_look
        return self.verdict.is_released and sessions.is_empty and not is_lost

    @property
    def deadline(self) -> float | None:
        if self.phase is Phase.STEPPED_DOWN:
            return None
        times = [self.lease.renew_at, self._waiting_text_at, self.sessions.deadline, self.verdict.deadline]
        due = self.coordinator.deadline
        if self.phase is Phase.LEADING and due is not None and self.lease.is_certain(due):
            times.append(due)  # else decisions wait for the board
        return min(time for time in times if time is not None)

    def _dispatch(self, event: ev.Event, now: float) -> list[ev.Action]:  # noqa: C901, PLR0912  one case for each event
        match self.phase:
            case Phase.STEPPED_DOWN:
                return []  # it came late: another agent leads, and hears it
            case Phase.LEADING | Phase.DOUBTFUL | Phase.RECLAIMING:
                pass
            case _:
                assert_never(self.phase)
        if self.phase is Phase.LEADING and not self.lease.is_certain(now):
            self.phase = Phase.DOUBTFUL
        match event:
            case ev.Opened(conn, peer, way):  # it is to say Hello within a lease
                self.sessions.on_opened(conn, peer, way, now)
                actions = []
            case ev.Received():
                actions = self._on_received(event, now)
            case ev.Garbled(conn, reason, is_other):
                actions = self.sessions.on_garbled(conn, reason, now, is_other_protocol=is_other)
            case ev.Closed(conn, is_reset):  # its node may connect again
                actions = self.sessions.on_closed(conn, now, is_reset=is_reset) + self._reclaim_if_needed(now)
            case ev.Renewed() | ev.RenewFailed() if self.phase is not Phase.RECLAIMING and not self.lease.is_asked:
                raise self._impossible(event)
            case ev.Renewed():
                actions = self._on_renewed(event, now)
            case ev.RenewFailed():
                actions = self._on_renew_failed(now)
            case ev.Reclaimed():
                actions = self._on_reclaimed(event, now)
            case ev.Published() | ev.PublishFailed() if not self.verdict.is_asked:
                raise self._impossible(event)
            case ev.Published(is_ours=True):  # all nodes hear the verdict
                actions = self._let_out(self.verdict.release(), now)
            case ev.Published():  # another agent leads
                actions = self._step_down(DISPLACED)
            case ev.PublishFailed():  # the board is asked again soon
                self.verdict.on_failed(now)
                actions = []
            case ev.Resigned():
                actions = self._step_down("the leader's agent is leaving", is_gone=True)
            case ev.DeadlinePassed():
                actions = self._on_deadline_passed(now)
            case _:
                assert_never(event)
        actions += self._decide(now)
        # The plans come first: they are the first that is said on a connection.
        return actions if self.has_stepped_down else [*self.sessions.send_plans(now), *actions]

    # Connections.

    def _on_received(self, event: ev.Received, now: float) -> list[ev.Action]:
        is_leading = self.phase is Phase.LEADING  # for its session, or it is refused
        actions = self.sessions.on_received(event.conn, event.message, now, is_leading=is_leading)
        if isinstance(event.message, m.Hello) and not is_leading:
            self._tell_returned(event.message, now)
        actions += self.verdict.on_heard(now, self.sessions, self.coordinator)
        return actions + self._reclaim_if_needed(now)

    # The board.

    def _on_renewed(self, event: ev.Renewed, now: float) -> list[ev.Action]:
        if event.record is None:
            return self._step_down(DISPLACED)  # another agent leads
        if self.phase is Phase.RECLAIMING:
            return []  # it answers about the epoch before
        losses = self.lease.on_renewed(event.record, now)
        self.sessions.electorate.on_board(has_answered=not event.is_assumed)
        self._lead(now)
        if event.rival_epoch and self.is_blocked:
            return self._step_down(DISPLACED)  # most nodes may be there
        told = self._heartbeat()
        if self.lease.is_certain(now) and not self.is_blocked:
            # A round that has lost nodes may begin, if that was known when the board was asked.
            told += self._tell_coordinator(Confirmed(losses), now)
        return told + self._reclaim_if_needed(now, event.rival_epoch)  # certain again, unless it took too long

    def _on_renew_failed(self, now: float) -> list[ev.Action]:
        if self.phase is Phase.RECLAIMING:
            return []  # it answers about the epoch before
        self.lease.on_renew_failed()
        self.sessions.electorate.on_board(has_answered=False)
        if self.coordinator.forming.is_unconfirmed:
            self.lease.renew_by(now + RETRY_S)
        return self._heartbeat(now - self.lease.lease_s / 2)  # the board is away, but this agent lives, and says so

    def _on_reclaimed(self, event: ev.Reclaimed, now: float) -> list[ev.Action]:
        if self.phase is not Phase.RECLAIMING:
            raise self._impossible(event)
        if event.record is None:
            return self._step_down("no newer epoch could be had from the board")  # another agent leads
        self.lease.on_reclaimed(event.record)  # it may be our old one, which had been renewed meanwhile
        self.coordinator.roster.begin_epoch(event.record.epoch)
        self._lead(now)
        told = self.sessions.begin_epoch(event.record.epoch, now)
        return told + self._reclaim_if_needed(now)  # agents that have waited for the epoch are taken in

    # Time.

    def _on_deadline_passed(self, now: float) -> list[ev.Action]:
        if self.deadline is None or now < self.deadline:
            return []  # disarmed or moved while the event was on its way
        have_slept = now - self.deadline > self.lease.lease_s / 3
        actions = self.sessions.on_deadline_passed(now, have_slept=have_slept) + self._reclaim_if_needed(now)
        actions += self._stand_back_if_alone(now)
        if now >= self.lease.renew_at:
            actions += self._renew(now) or self._heartbeat(now - self.lease.lease_s / 2)
        if now >= self._waiting_text_at:
            self._waiting_text_at = now + WAITING_TEXT_INTERVAL_S
            if (
                self.phase is not Phase.LEADING and not self.sessions.unheard.is_empty
            ):  # the board, whatever comes of it
                doubt = m.Waiting(doubt_text(self.lease.unconfirmed_s(now)))
                self.sessions.decide_for_all(doubt, now)
            else:
                actions += self._deliver(waiting_texts(self.coordinator, now, self.sessions.missing), now)
        if have_slept:
            self.verdict.on_woken(now)
        if self.verdict.is_due(now):
            actions += self._let_out(self.verdict.on_deadline_passed(now, self.sessions), now)
        return actions + self.verdict.publish_again(now, self.sessions, self.coordinator)

    # Moves.

    def _heartbeat(self, heard_after: float = -math.inf) -> list[ev.Action]:
        """Without the board's answer not for nodes that are late: if this agent hears nothing, it is to be missed."""
        return self.sessions.say_all(m.Heartbeat(self.lease.renewals, self._has_spares), heard_after)

    def _tell_coordinator(self, event: CoordinatorEvent, now: float) -> list[ev.Action]:
        self.coordinator.forming.on_heard(is_all=self.phase is not Phase.LEADING or self.sessions.unheard.is_empty)
        return self._deliver(self.coordinator.handle(event, now), now)

    def _reclaim_if_needed(self, now: float, newest: int = 0) -> list[ev.Action]:
        """Asks for a newer epoch if the board, or an agent that greets, knows of one above ours."""
        newest = max(newest, self.sessions.newest_epoch)
        if newest <= self.lease.epoch or self.phase in {Phase.RECLAIMING, Phase.STEPPED_DOWN}:
            return []  # or asked for already
        self.phase = Phase.RECLAIMING
        self.lease.reclaim(now)
        return [ev.Reclaim(newest)]

    def _stand_back_if_alone(self, now: float) -> list[ev.Action]:
        """Lets another agent coordinate if this one may be cut off: of two nodes, either may be."""
        core, at_least = self.coordinator, max(2, self.coordinator.rules.min_nodes)
        if not self.is_replaceable or core.is_closed or self.phase is Phase.RECLAIMING:
            return []
        if not self.sessions.are_all_silent(core.own_node_id, at_least):
            return []
        self.phase = Phase.RECLAIMING
        told = self._cut_off(CutOff(CauseKind.NODES_SILENT), now) if self._has_round else []
        return [ev.Reclaim(self.lease.epoch, self.lease.stand_back(now)), *told]

    def _cut_off(self, event: CutOff, now: float) -> list[ev.Action]:
        """Ends the round: other nodes may continue without this side.

        A node that has reconnected is notified as well, even if the coordinator core does not know it yet.  The story
        behind it: the connection of this agent's own node breaks, and is made again while the board is silent; its
        workers would keep running beside the next round of the others, for as long as the cut lasts.
        """
        told = self._tell_coordinator(event, now)
        for reported in self.sessions.first_reports():
            self._tell_missed(reported.node, reported.status.past, now)
        return told

    def _tell_returned(self, hello: m.Hello, now: float) -> None:
        """A node that was not connected when its round ended hears so now: the board may be away for long."""
        node = hello.status.node
        is_ours = self.sessions.is_connected(node.node_id) and hello.seen_epoch <= self.lease.epoch
        if is_ours:  # else another coordinator may have taken its round over
            self._tell_missed(node, hello.status.past, now)

    def _tell_missed(self, node: m.Node, past: m.Past, now: float) -> None:
        """Notifies a node that the coordinator core does not know yet: its round is over, or continued without it."""
        core, forming = self.coordinator, self.coordinator.forming
        if past.standing is not m.Standing.BUSY:
            return
        if past.fence < core.roster.fence:
            self.sessions.stop(node.node_id, forming.went_on(past.round), now)
            return
        is_over = core.phase is CoordinatorPhase.FORMING and core.round and not forming.end.untold
        if is_over and past.fence == core.roster.fence:
            self.sessions.stop(node.node_id, forming.ended(past.round), now)

    def _ask_nodes(self, now: float) -> list[ev.Action]:
        """While the board is silent the word of most nodes counts: without them no round begins (ADR 24)."""
        known, forming = self.sessions.electorate, self.coordinator.forming
        is_needed = self.phase is Phase.DOUBTFUL or (self.phase is Phase.LEADING and forming.is_unconfirmed)
        if not is_needed or not self.lease.is_by_nodes(now) or not known.can_elect:
            self._nodes_asked_at = None
            return []
        if self._nodes_asked_at is None:
            self._nodes_asked_at = now
            return self.sessions.say_all(m.Probe())
        if self.sessions.missing_since(self._nodes_asked_at):
            return []
        self._nodes_asked_at, self.phase = None, Phase.LEADING
        known.on_board(has_answered=False)
        self.lease.on_confirmed_by_nodes(now)
        return self._tell_coordinator(Confirmed(forming.losses), now)

    def _lead(self, now: float) -> None:
        """The board has answered that this agent leads."""
        self.phase = Phase.LEADING if self.lease.is_certain(now) else Phase.DOUBTFUL

    def _step_down(self, reason: str, *, is_gone: bool = False, ended: m.Ended | None = None) -> list[ev.Action]:
        self.phase = Phase.STEPPED_DOWN
        return [*self.sessions.dismiss(ended or m.Goodbye(reason, is_gone)), ev.StepDown(reason)]

    def _decide(self, now: float) -> list[ev.Action]:
        """Lets the coordinator decide what there is to decide, if it is certain that this agent leads."""
        unheard, core = self.sessions.unheard, self.coordinator
        actions = self._ask_nodes(now)
        # Others may go on, without this side: its round is over.
        if self.phase is Phase.DOUBTFUL and self._has_round and self.is_blocked:
            actions += self._cut_off(CutOff(), now)
        while self.phase is Phase.LEADING or (self.phase is Phase.DOUBTFUL and self.sessions.is_over):
            if (event := unheard.pop(now)) is not None:
                actions += self._tell_coordinator(event, now)
                self._note_read(event)
            elif ended := ended_in_vain(core, self.sessions.unaccounted, now):
                return actions + self._step_down("nodes that may run the job cannot be reached", ended=ended)
            elif core.is_due(now):
                actions += self._tell_coordinator(ev.DeadlinePassed(), now)
                assert not core.is_due(now), "what is due is done at once"
            else:
                break
        if core.phase is CoordinatorPhase.RUNNING and bool(core.roster.ready) != self._has_spares:
            self._has_spares = bool(core.roster.ready)
            actions += self._heartbeat()  # the coordinator after this one is to know it, however soon that is
        forming, fence = core.forming, self.sessions.electorate.newest_fence
        if self.phase is Phase.LEADING and self.lease.is_behind(forming.losses, forming.confirmed, fence):
            actions += self._renew(now)
        return actions

    def _renew(self, now: float) -> list[ev.Action]:
        known, losses = self.sessions.electorate, self.coordinator.forming.losses
        return [ev.Renew(known.newest_for_board)] if self.lease.renew(now, losses, known.newest_fence) else []

    def _note_read(self, event: CoordinatorEvent) -> None:
        """What the coordinator has heard of a node: that it is gone, or has read answers."""
        plans = self.sessions.plans
        if isinstance(event, Lost):
            plans.forget(event.node_id)
        elif isinstance(event, Reported) and event.status.left is not None:
            plans.forget(event.node.node_id)
        elif isinstance(event, Reported):
            plans.on_read(event.node.node_id, [each.ask_id for each in event.status.asks])
            if event.is_new:  # it may have read so far that it has a leader, and no more
                is_waiting = event.node.node_id in self.coordinator.roster.ready
                plans.send_again(event.node.node_id, is_waiting=is_waiting)

    def _deliver(self, sends: Iterable[Send], now: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        assigned: dict[str, m.Assigned] = {}
        for node_id, message in ((send.node_id, send.message) for send in sends):
            match message:
                case m.Ended(outcome) if outcome is not m.Outcome.REPLACED and not self.verdict.is_released:
                    actions += self.verdict.hold(Send(node_id, message), now, self.sessions, self.coordinator)
                case m.Departed() | r.Show() | r.Shown():
                    actions += self.sessions.say(node_id, message)
                case r.Answer(ask_id) if not self.coordinator.roster.has_asked(node_id, ask_id):
                    actions += self.sessions.say(node_id, message)  # it wants to see something of others
                case _:
                    actions += self.sessions.decide(node_id, message, now)
                    if isinstance(message, m.Assigned):
                        assigned[node_id] = message
        return actions + self.sessions.seat(assigned, self.coordinator.roster)

    def _let_out(self, held: list[Send], now: float) -> list[ev.Action]:
        if self.verdict.is_released:
            self.sessions.on_over(now)
        return self._deliver(held, now)

    def validate(self) -> None:
        for part in (self.sessions, self.verdict, self.lease):
            part.validate()
        assert self.sessions.epoch == self.lease.epoch, "Welcome names the epoch of the record"
        assert self.phase is not Phase.RECLAIMING or self.lease.is_asked, "the board is asked for the epoch"
        assert self.phase is Phase.STEPPED_DOWN or self.deadline is not None, "a leader renews its lease"
        assert not self.verdict.is_released or self.coordinator.is_closed, "the verdict is the coordinator's"
