"""The coordinator's chair: connections, leases and tenure around the coordinator.

The coordinator speaks of nodes; here they are connections that open, say who they are, fall silent and break.
Everything a node says goes through three gates: its connection has been greeted (token, run id, terms), it speaks for
itself, and our reign is certain.  Pure: `server.py` carries out what is asked for.

- A **session** outlives its connection for a short grace: who comes back within it was never away.
- A new agent with the **node rank** of one that is here is its next self if the old one does not answer a probe; if it
  does, somebody gave two nodes the same rank.
- A **lease** ends by silence.  If we were the ones who slept (SIGSTOP, a frozen container), what the
  others said meanwhile is still in our sockets, so everybody gets another lease first.
- **Tenure** (`tenure.py`): while our reign is not certain, decisions wait until the board has answered.
- A **failure** waits while a connection is in its grace: workers whose peers are on a node that dies fail within
  milliseconds, and the loss of a node costs no restart.
- A **verdict** is on the board before anybody hears it, so that a coordinator that dies while telling
  it leaves no node without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Any, assert_never

from aelastic.rdzv.coordinator.coordinator import Coordinator, Phase
from aelastic.rdzv.coordinator.coordinator_events import DeadlinePassed as CoordinatorDeadlinePassed
from aelastic.rdzv.coordinator.coordinator_events import Event as CoordinatorEvent
from aelastic.rdzv.coordinator.coordinator_events import Lost, Registered, Send
from aelastic.rdzv.coordinator.leader_lease import Tenure
from aelastic.rdzv.coordinator.session_events import (
    Action,
    Closed,
    DeadlinePassed,
    Drop,
    Event,
    Garbled,
    Keep,
    KeepFailed,
    Kept,
    Opened,
    Publish,
    Published,
    Received,
    Reclaim,
    Reclaimed,
    Resigned,
    Say,
    Vacate,
)
from aelastic.rdzv.coordinator.waiting_text import waiting_texts
from aelastic.rdzv.protocol.addresses import plain_address
from aelastic.rdzv.protocol.codec import to_text
from aelastic.rdzv.protocol.messages import (
    Alive,
    Beat,
    Ended,
    Failed,
    Goodbye,
    Hello,
    Left,
    Node,
    Outcome,
    Probe,
    Ready,
    Refused,
    Succeeded,
    Terms,
    Upward,
    Waiting,
    Welcome,
)

# A connection that breaks is mostly the end of its agent; one that a switch has cut comes back at once.
GRACE_S = 0.3
# An agent that lives answers within this, on a machine however busy.
PROBE_TIMEOUT_S = 0.5
# So often whoever waits is told what for.
ROLL_CALL_INTERVAL_S = 10.0
# A board that does not take the verdict must not keep everybody from it.
PUBLISH_TIMEOUT_S = 1.0


@dataclass(slots=True)
class _Session:
    node_id: str
    peer: str
    way: str
    preferred_rank: int | None


@dataclass(slots=True)
class _Doubt:
    """Whether who has a node rank is alive; until that is known, who comes with the same one waits."""

    until: float
    hellos: list[tuple[int, Hello]] = field(default_factory=list[tuple[int, Hello]])


@dataclass(slots=True)
class Chair:
    """The coordinator of one reign.

    Args:
        terms: what each agent must have been told.
        token: what each agent must have read on the board.
        tenure: of our reign; its lease is also the silence after which an agent is lost.
        coordinator: who decides.
        has_fixed_ranks: a node rank is a command, so a second node can't do without the one it came with.
    """

    terms: Terms
    token: str
    tenure: Tenure
    coordinator: Coordinator
    has_fixed_ranks: bool = False
    is_vacated: bool = False

    _ways: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])  # of who has not said hello
    _waiting: set[int] = field(default_factory=set[int])  # who has said it, and has no session yet
    _sessions: dict[int, _Session] = field(default_factory=dict[int, _Session])
    _conn_of: dict[str, int] = field(default_factory=dict[str, int])  # node to its connection
    _conn_of_rank: dict[int, int] = field(default_factory=dict[int, int])  # preferred rank to who came with it last
    _doubts: dict[int, _Doubt] = field(default_factory=dict[int, _Doubt])  # by connection; the oldest first
    _heard: dict[int, float] = field(default_factory=dict[int, float])  # connection to when; the oldest first
    _broken: dict[str, float] = field(default_factory=dict[str, float])  # node to when its grace ends; likewise
    # Until we know who is lost, and no longer than a grace.
    _suspended: deque[tuple[float, Failed]] = field(default_factory=deque[tuple[float, Failed]])
    _pending: deque[CoordinatorEvent] = field(default_factory=deque[CoordinatorEvent])  # until the reign is certain
    # Of those, by node, the last word about where it stands, which it said with its present connection.
    _arriving: dict[str, Registered] = field(default_factory=dict[str, Registered])
    _may_decide: bool = True  # our reign was certain when we last looked
    _greeting: list[tuple[int, Hello]] = field(default_factory=list[tuple[int, Hello]])  # until it has a newer epoch
    _roll_call_at: float = 0.0
    _publish_by: float | None = None
    _publish_last: float = 0.0
    _has_spares: bool = False  # as everybody has been told
    _held: list[Send] = field(default_factory=list[Send])  # until the verdict is on the board
    _is_published: bool = False

    def __post_init__(self) -> None:
        self._roll_call_at = self.tenure.started + ROLL_CALL_INTERVAL_S

    @property
    def lease_s(self) -> float:
        return self.tenure.lease_s

    @property
    def is_empty(self) -> bool:
        """Whether no connection is left."""
        return not self._heard

    @property
    def has_own_node(self) -> bool:
        """Whether the node of this very agent is connected."""
        return self.coordinator.own_node_id in self._conn_of

    @property
    def has_told_all(self) -> bool:
        """Whether everybody whom we know of has heard how the job ended."""
        return self._is_published and not (self._heard or self._broken or self.coordinator.roster.lost_hosts)

    @property
    def deadline(self) -> float | None:
        if self.is_vacated:
            return None
        times = [self.tenure.keep_at, self._roll_call_at]
        if self._heard:
            times.append(next(iter(self._heard.values())) + self.lease_s)
        if self._broken:
            times.append(next(iter(self._broken.values())))
        if self._doubts:
            times.append(next(iter(self._doubts.values())).until)
        if self._publish_by is not None:
            times.append(self._publish_by)
        due = self.coordinator.deadline
        if due is not None and due <= self.tenure.certain_until and self._may_decide:  # else it waits for the board
            times.append(due)
        return min(times)

    def handle(self, event: Event, now: float) -> list[Action]:
        if self.is_vacated:
            return []
        return self._dispatch(event, now) + self._decide(now)

    def _dispatch(self, event: Event, now: float) -> list[Action]:  # noqa: C901  flat: a line for each event
        match event:
            case Opened(conn, peer, way):
                self._heard[conn] = now
                self._ways[conn] = plain_address(peer), plain_address(way)
                return []
            case Received(conn, message):
                return self._on_received(conn, message, now)
            case Garbled():
                return self._on_garbled(event, now)
            case Closed(conn):
                self._forget(conn, now + GRACE_S)
                return self._resolve(conn, now, is_alive=False)
            case Kept(record):
                if record is not None:
                    return self._beat() if self.tenure.on_kept(now, record.renewals) else []
                return self._vacate("another agent coordinates by now")
            case KeepFailed():
                return self._beat() if self.tenure.on_keep_failed() else []  # the board is away, but we live
            case Reclaimed(epoch):
                return self._on_reclaimed(epoch, now)
            case Published(is_ours):
                return self._release(now) if is_ours else self._vacate("another agent coordinates by now")
            case Resigned():
                return self._vacate("its agent leaves", is_gone=True)
            case DeadlinePassed():
                return self._on_deadline_passed(now)
            case _:
                assert_never(event)

    # Sessions.

    def _on_received(self, conn: int, message: Upward, now: float) -> list[Action]:
        if conn not in self._heard:
            return []  # dropped while this was on its way
        del self._heard[conn]
        self._heard[conn] = now  # the last of all
        session = self._sessions.get(conn)
        if session is None:
            if conn in self._waiting:
                return self._refuse(conn, "Hello is to be answered first", now, is_final=True)
            if isinstance(message, Hello):
                return self._on_hello(conn, message, now)
            return self._refuse(conn, "the first word must be Hello", now, is_final=True)
        return self._resolve(conn, now, is_alive=True) + self._on_said(conn, session, message, now)

    def _on_said(self, conn: int, session: _Session, message: Upward, now: float) -> list[Action]:
        match message:
            case Alive():
                return []
            case Hello():
                return self._refuse(conn, "Hello was said already", now, is_final=True)
            case Ready(node) if node.node_id == session.node_id:
                self._pending.append(Ready(_located(node, session)))
                return []
            case Failed() if message.node_id == session.node_id and self._broken:
                self._suspended.append((now + GRACE_S, message))
                return []
            case Failed() | Succeeded() | Left() if message.node_id == session.node_id:
                self._pending.append(message)
                return []
            case _:
                return self._refuse(conn, "a node speaks for itself only", now, is_final=True)

    def _on_hello(self, conn: int, hello: Hello, now: float) -> list[Action]:
        # JSON can spell half a surrogate pair, and anybody can send it.
        if not compare_digest(hello.token.encode(errors="surrogatepass"), self.token.encode()):
            return self._refuse(conn, "this is the token of another reign", now, is_final=False)
        if difference := _difference(hello.terms, self.terms):
            return self._refuse(conn, difference, now, is_final=True)
        self._waiting.add(conn)
        return self._admit_unless_rivalled(conn, hello, now)

    def _admit_unless_rivalled(self, conn: int, hello: Hello, now: float, *, dead: int | None = None) -> list[Action]:
        rival = self._rival_of(hello.node)
        if rival is None or rival == dead:
            return self._admit(conn, hello, now)
        doubt = self._doubts.setdefault(rival, _Doubt(now + PROBE_TIMEOUT_S))
        doubt.hellos.append((conn, hello))
        return [Say(rival, Probe())]

    def _rival_of(self, node: Node) -> int | None:
        """The connection of another node that came with the same node rank."""
        if node.preferred_rank is None:
            return None
        rival = self._conn_of_rank.get(node.preferred_rank, -1)
        session = self._sessions.get(rival)
        return rival if session is not None and session.node_id != node.node_id else None

    def _resolve(self, rival: int, now: float, *, is_alive: bool) -> list[Action]:
        """Who waited for word of a connection is admitted: in its place, or beside it."""
        doubt = self._doubts.pop(rival, None)
        actions: list[Action] = []
        for conn, hello in doubt.hellos if doubt is not None else []:
            if conn not in self._heard:
                continue  # closed meanwhile
            if not is_alive:
                actions += self._admit_unless_rivalled(conn, hello, now, dead=rival)
                continue
            rank, peer = hello.node.preferred_rank, self._sessions[rival].peer
            taken = f"node rank {rank} is that of another agent already, at {peer}"
            if self.has_fixed_ranks:
                actions += self._refuse(conn, f"{taken}: give each node its own --node-rank", now, is_final=True)
                continue
            without = hello.node.replace(preferred_rank=None)
            actions += self._admit(conn, hello.replace(node=without), now)
            actions.append(Say(conn, Waiting(f"{taken}: this one takes part without it")))
        return actions

    def _admit(self, conn: int, hello: Hello, now: float) -> list[Action]:
        self._greeting.append((conn, hello))
        return [] if self.tenure.is_reclaiming else self._reclaim_or_welcome(now)

    def _reclaim_or_welcome(self, now: float) -> list[Action]:
        newest = max(hello.seen_epoch for _, hello in self._greeting)
        if newest <= self.tenure.epoch:
            return self._welcome(now)
        # The board has lost what it knew, and we were elected with an epoch that the others take for an old one.
        self.tenure.reclaim(now)
        return [Reclaim(newest)]

    def _welcome(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for conn, hello in self._greeting:
            if conn not in self._heard:
                continue  # closed meanwhile
            node_id = hello.node.node_id
            old = self._conn_of.get(node_id)
            if old is not None:
                self._sessions.pop(old, None)
                self._heard.pop(old, None)
                actions.append(Drop(old))
            self._broken.pop(node_id, None)
            session = _Session(node_id, *self._ways.pop(conn), hello.node.preferred_rank)
            if session.preferred_rank is not None:
                self._conn_of_rank[session.preferred_rank] = conn
            self._sessions[conn], self._conn_of[node_id] = session, conn
            self._waiting.discard(conn)
            knew_another = 0 < hello.seen_epoch < self.tenure.epoch
            self._arriving[node_id] = Registered(_located(hello.node, session), hello.past, knew_another)
            self._pending.append(self._arriving[node_id])
            actions.append(Say(conn, Welcome(self.tenure.epoch, self.lease_s)))
            if old is not None and old in self._doubts:  # whether it lives: it can say so here only
                self._doubts[conn] = _Doubt(now + PROBE_TIMEOUT_S, self._doubts.pop(old).hellos)
                actions.append(Say(conn, Probe()))
        self._greeting = []
        return actions

    def _refuse(self, conn: int, reason: str, now: float, *, is_final: bool) -> list[Action]:
        self._forget(conn, now)
        return [Say(conn, Refused(reason, is_final)), Drop(conn)]

    def _on_garbled(self, event: Garbled, now: float) -> list[Action]:
        if event.conn not in self._heard:
            return []
        return self._refuse(event.conn, event.reason, now, is_final=event.is_other_protocol)

    def _forget(self, conn: int, grace_ends: float) -> None:
        """Of a connection that is no more."""
        self._heard.pop(conn, None)
        self._ways.pop(conn, None)
        self._waiting.discard(conn)
        session = self._sessions.pop(conn, None)
        if session is not None and self._conn_of.get(session.node_id) == conn:
            del self._conn_of[session.node_id]
            if not self._is_published:  # else it has heard all there is to hear
                self._broken[session.node_id] = grace_ends

    # Leases and tenure.

    def _on_deadline_passed(self, now: float) -> list[Action]:
        if self.deadline is None or now < self.deadline:
            return []  # disarmed or moved while the event was on its way
        if now - self.deadline > self.lease_s / 3:  # we slept: see above
            self._heard = dict.fromkeys(self._heard, now)
            self._broken = dict.fromkeys(self._broken, now + GRACE_S)
            self._doubts = {conn: _Doubt(now + PROBE_TIMEOUT_S, doubt.hellos) for conn, doubt in self._doubts.items()}
        actions: list[Action] = []
        for conn in list(_due(self._heard, now, self.lease_s)):
            session = self._sessions.get(conn)
            self._forget(conn, now)
            if session is not None:
                self._broken.pop(session.node_id, None)
                self._pending.append(Lost(session.node_id, f"silent for {self.lease_s:g} s"))
            actions.append(Drop(conn))
        for node_id in list(_due(self._broken, now)):
            del self._broken[node_id]
            self._pending.append(Lost(node_id, "its connection closed"))
        for conn in [conn for conn, doubt in self._doubts.items() if doubt.until <= now]:
            actions += self._resolve(conn, now, is_alive=False)
        if now >= self.tenure.keep_at:
            actions += [Keep()] if self.tenure.keep(now) else self._beat()
        if now >= self._roll_call_at:
            self._roll_call_at = now + ROLL_CALL_INTERVAL_S
            actions += self._said(waiting_texts(self.coordinator, now), now)
        if self._publish_by is not None and now >= self._publish_by:
            actions += self._release_if_certain(now)
        return actions

    def _beat(self) -> list[Action]:
        beat = Beat(self.tenure.beat, self._has_spares)
        return [Say(conn, beat) for conn in self._sessions]

    def _on_reclaimed(self, epoch: int | None, now: float) -> list[Action]:
        if epoch is None:
            return self._vacate("its epoch was too old")
        self.tenure.on_reclaimed(epoch)
        again: list[Action] = [Say(conn, Welcome(epoch, self.lease_s)) for conn in self._sessions]
        # The board may have answered with our old reign: its beat was another than the claim knew.
        return again + self._reclaim_or_welcome(now)

    def _vacate(self, reason: str, *, is_gone: bool = False) -> list[Action]:
        goodbye = Goodbye(reason, is_gone)
        actions: list[Action] = [Say(conn, goodbye) for conn in self._sessions]
        actions += [Drop(conn) for conn in self._heard]
        self.is_vacated = True
        self._heard, self._sessions, self._conn_of, self._broken = {}, {}, {}, {}
        return [*actions, Vacate(reason)]

    # Decisions.

    def _decide(self, now: float) -> list[Action]:
        """Lets the coordinator decide what there is to decide, if we are certain that it is for us to do so."""
        actions: list[Action] = []
        while self._suspended and (not self._broken or self._suspended[0][0] <= now):
            self._pending.append(self._suspended.popleft()[1])
        self._may_decide = self.tenure.is_certain(now) and not self.is_vacated
        while self._may_decide:
            deadline = self.coordinator.deadline
            if self._pending:
                event = self._pending.popleft()
                if self._is_outdated(event):
                    continue
            elif deadline is not None and now >= deadline:
                event = CoordinatorDeadlinePassed()
            else:
                break
            actions += self._said(self.coordinator.handle(event, now), now)
        if self.coordinator.phase is Phase.RUNNING and self.coordinator.has_spares != self._has_spares:
            self._has_spares = self.coordinator.has_spares
            actions += self._beat()  # who coordinates after us is to know it, however soon that is
        return actions

    def _is_outdated(self, event: CoordinatorEvent) -> bool:
        """Whether its node has been away since, and come back.

        The story behind it: the board is slow, and node A is silent, is lost, and comes back ready, all before the
        board has answered.  Then a round begins that A is told of, A is lost to it, and last comes A's word that it is
        ready, which it was before it was told.
        """
        if isinstance(event, CoordinatorDeadlinePassed | Left):
            return False
        node_id = event.node.node_id if isinstance(event, Registered | Ready) else event.node_id
        newest = self._arriving.get(node_id)
        if event is newest:
            del self._arriving[node_id]
        return newest is not None and event is not newest

    def _said(self, sends: Iterable[Send], now: float) -> list[Action]:
        """Who is not connected hears it when it comes back: it says where it stands, and is told what it missed."""
        actions: list[Action] = []
        for send in sends:
            if self._is_verdict(send.message) and not self._is_published:
                if not self._held:
                    self._publish_by = now + PUBLISH_TIMEOUT_S
                    self._publish_last = now + max(PUBLISH_TIMEOUT_S, self.lease_s)
                    actions.append(Publish(to_text(_shortened(send.message))))
                self._held.append(send)
            elif (conn := self._conn_of.get(send.node_id)) is not None and send.node_id not in self._arriving:
                actions.append(Say(conn, send.message))
                if _is_replacement(send.message):  # what it has yet to say must not harm its next self
                    self._forget(conn, now)
                    self._broken.pop(send.node_id, None)
                    actions.append(Drop(conn))
        return actions

    def _is_verdict(self, message: Any) -> bool:
        is_final = isinstance(message, Ended) and not _is_replacement(message)
        return is_final and self.coordinator.phase is Phase.CLOSED

    def _release_if_certain(self, now: float) -> list[Action]:
        """The board does not answer.  While others may have gone on without us the verdict waits, but not for ever."""
        if now <= self.tenure.certain_until or now >= self._publish_last:
            return self._release(now)
        self._publish_by = min(now + PUBLISH_TIMEOUT_S, self._publish_last)
        return []

    def _release(self, now: float) -> list[Action]:
        self._is_published, self._publish_by = True, None
        held, self._held = self._held, []
        return self._said(held, now)


def _located(node: Node, session: _Session) -> Node:
    """A node with the addresses that its connection shows, and the rank it was admitted with."""
    return node.replace(
        master_addr=node.master_addr or session.peer, preferred_rank=session.preferred_rank, way_address=session.way
    )


def _shortened(verdict: Any) -> Ended:
    """A verdict that fits on every board: these are for small things, and JSON in JSON may take 14 bytes a letter."""
    cause = verdict.cause
    if cause is not None:
        shorter = {"message": cause.message[:1024], "traceback": cause.traceback[-2048:]}
        cause = cause.replace(**shorter)
    return Ended(verdict.outcome, verdict.reason[:1024], cause)


def _is_replacement(message: Any) -> bool:
    return isinstance(message, Ended) and message.outcome is Outcome.REPLACED


def _difference(theirs: Terms, ours: Terms) -> str:
    """What an agent was told otherwise than the job's others, and what to do; empty if nothing."""
    if theirs.run_id != ours.run_id:
        return f"run id {theirs.run_id!r} came to the agents of run {ours.run_id!r}: give all nodes the same --rdzv-id"
    nodes = (theirs.min_nodes, theirs.max_nodes), (ours.min_nodes, ours.max_nodes)
    if nodes[0] != nodes[1]:
        here, there = (f"{fewest}:{most}" for fewest, most in nodes)
        return f"--nnodes is {here} here and {there} in the job that runs: give all nodes the same"
    if theirs.max_restarts != ours.max_restarts:
        return (
            f"--max-restarts is {theirs.max_restarts} here and {ours.max_restarts} in the job that runs: "
            "give all nodes the same"
        )
    if theirs.lease_s != ours.lease_s:
        return (
            f"the lease is {theirs.lease_s:g} s here and {ours.lease_s:g} s in the job that runs: "
            "give all nodes the same --rdzv-conf"
        )
    return ""


def _due(times: dict[Any, float], now: float, after_s: float = 0.0) -> Iterable[Any]:
    """Keys of the oldest entries, for which so much time has passed; reckoned as `deadline` does, to the last bit."""
    for key, time in times.items():
        if time + after_s > now:
            return
        yield key
