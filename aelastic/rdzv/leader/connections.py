"""Connections of the leader, and the nodes behind them: they open, say Hello, fall silent and break.

- A **node** outlives its connection for a short grace: one that reconnects in that time was never away.  A node that
  has left gets no grace, because its end is not a loss.
- If an agent joins with the **node rank** of a connected one, it replaces that one unless it answers a probe.  If it
  answers, two nodes were given the same rank.
- A **lease** ends through silence.  If this process slept, messages from others are still in its sockets, so each of
  them gets another lease, once.

`Refused` is the only message that a leader sends on a connection before the first `Plan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from enum import StrEnum, auto
from hmac import compare_digest
from itertools import islice, takewhile
from typing import assert_never

from aelastic.rdzv.leader.absent import Absent
from aelastic.rdzv.leader.coordinator_events import Broken, Lost, Reported
from aelastic.rdzv.leader.first_cause import GRACE_S
from aelastic.rdzv.leader.job_state import Participant
from aelastic.rdzv.leader.leader_events import Action, Drop, SendTo
from aelastic.rdzv.leader.pending_reports import PendingReports
from aelastic.rdzv.leader.plans import Plans
from aelastic.rdzv.leader.roster import some_of
from aelastic.rdzv.log import node as log
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.addresses import plain_address
from aelastic.rdzv.protocol.sense import is_too_high, objection_to

# A living agent answers within this time, however busy its machine is.
PROBE_TIMEOUT_S = 0.5
HOSTS_MIN = 16


class ConnectionState(StrEnum):
    OPEN = auto()  # it has not said Hello
    WAITING = auto()  # its node is not admitted yet, because the agent with its node rank may live
    MEMBER = auto()  # it speaks for its node
    HUNG_UP = auto()  # it follows another leader, or looks for one: nobody sends or reads here any more


@dataclass(slots=True)
class Connection:
    peer: str
    way: str  # our address, as the peer reached it
    active_at: float  # when it last sent something, or we woke up
    received_at: float  # when its last message came
    state: ConnectionState = ConnectionState.OPEN
    hello: m.Hello | None = None  # with the newest status, until its node is admitted
    node_id: str = ""
    host: str = ""  # of its node, as the node reports it
    address: str = ""
    name: str = ""  # of its node in the log
    log: log.Status | None = None  # what its node knows of the log
    preferred_rank: int | None = None
    has_left: bool = False  # its node has left, so it is not a loss when the connection closes

    @property
    def is_member(self) -> bool:
        return self.state is ConnectionState.MEMBER

    def locate(self, node: m.Node) -> m.Node:
        """Returns a node with the addresses that its connection shows, and the rank that it was admitted with."""
        return node.replace(
            master_addr=node.master_addr or self.peer,
            preferred_rank=self.preferred_rank,
            way_address=self.way,
            peer_address=self.peer,
            log_name=self.name,
        )


@dataclass(slots=True)
class Probed:
    """An agent that was asked whether it lives.  Connections with the same node rank wait for the answer."""

    until: float
    waiting: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class Connections:
    """Connections of one leader, and the nodes behind them.

    Args:
        terms: the settings that each agent must know.
        token: the token that each agent must have read in the cell, or in our campaign.
        term: the term of our leadership.
        looks_s: how long an agent looks for a leader before it gives up.
        has_fixed_ranks: the user sets node ranks, so a second node cannot do without the one that it came with.
    """

    terms: m.Terms
    token: str
    term: int
    looks_s: float
    has_fixed_ranks: bool = False
    is_over: bool = False  # every node receives the verdict
    pending: PendingReports = field(default_factory=PendingReports)
    plans: Plans = field(init=False)
    _woke_at: float = -math.inf  # when this process was last found to have slept
    _connections: dict[int, Connection] = field(default_factory=dict[int, Connection])  # longest silent first
    _conn_of: dict[str, int] = field(default_factory=dict[str, int])  # node to its connection
    _conn_of_rank: dict[int, int] = field(default_factory=dict[int, int])  # node rank to the last one that came with it
    _host_of: dict[str, str] = field(default_factory=dict[str, str])  # node to its host
    _nodes_on: dict[str, dict[str, None]] = field(default_factory=dict[str, dict[str, None]])  # host to nodes
    _hosts_limit: int = HOSTS_MIN
    _probed: dict[int, Probed] = field(default_factory=dict[int, Probed])  # by connection; the oldest first
    _graces: dict[str, float] = field(default_factory=dict[str, float])  # node to when its grace ends; the oldest first
    absent: Absent = field(init=False)

    def __post_init__(self) -> None:
        self.absent = Absent(self.terms.lease_s, self.looks_s)
        self.plans = Plans(self.term, self.terms.lease_s)

    @property
    def is_empty(self) -> bool:
        """Whether no connection is left and no node is in its grace."""
        return not self._connections and not self._graces

    @property
    def awaited_until(self) -> float:
        """The time until which a node may still need the verdict; an agent that has read it closes its connection."""
        return math.inf if self._conn_of or self._graces else self.absent.until

    @property
    def awaited_hosts(self) -> str:
        node_ids = {*self._conn_of, *self._graces, *self.absent.node_ids}
        return some_of([self._host_of[i] for i in node_ids])

    def is_connected(self, node_id: str) -> bool:
        return node_id in self._conn_of

    def nodes_at(self, host: str, addresses: set[str]) -> list[str]:
        """Returns the nodes that are connected from a host and can be reached at one of these addresses."""
        found = []
        for node_id in self._nodes_on.get(host, ()):
            connection = self._connections[self._conn_of[node_id]]
            if not addresses.isdisjoint((connection.address, connection.peer)):
                found.append(node_id)
        return found

    def is_open(self, conn: int) -> bool:
        return conn in self._connections

    def name_of(self, conn: int) -> str:
        """Returns the name in the log of the node behind a connection; empty before it is admitted."""
        connection = self._connections.get(conn)
        return connection.name if connection is not None and connection.is_member else ""

    def log_of(self, conn: int) -> log.Status | None:
        """Returns what the node behind a connection knows of the log, according to its last status."""
        return self._connections[conn].log if conn in self._connections else None

    def statuses(self) -> list[tuple[int, str, log.Status]]:
        """Returns what the connected nodes know of the log: connection, name and status."""
        found = ((conn, self._connections[conn]) for conn in self._conn_of.values())
        return [(conn, each.name, each.log) for conn, each in found if each.log is not None]

    def send_again(self, conn: int) -> None:
        """Makes sure that the node behind a connection is sent its plan."""
        if (connection := self._connections.get(conn)) is not None and connection.is_member:
            self.plans.send(connection.node_id)

    def are_all_silent(self, own_node_id: str, at_least: int) -> bool:
        """Returns whether no other node is in contact, and this many or more that may live were lost within a lease."""
        is_alone = not self._graces and self._conn_of.keys() <= {own_node_id}
        return is_alone and self.absent.count_unheard(own_node_id) >= at_least

    @property
    def deadline(self) -> float | None:
        times = [oldest.active_at + self.terms.lease_s for oldest in islice(self._connections.values(), 1)]
        times += [*islice(self._graces.values(), 1), *(each.until for each in islice(self._probed.values(), 1))]
        return min(times, default=None)

    def on_over(self, now: float) -> None:
        """Every node receives the verdict, so a connection that closes in order is not a loss."""
        if not self.is_over:
            self.is_over = True
            self.absent.on_time(now)

    def on_taken_over(self, nodes: Iterable[Participant], now: float) -> None:
        """These nodes of the round that another leader began may live: those that are not connected are absent."""
        for node in nodes:
            if node.node_id not in self._conn_of:
                self._note_host(node.node_id, node.host)
                self.absent.on_lost(node.node_id, now, is_unheard=False)

    # What happens to connections.

    def on_opened(self, conn: int, peer: str, way: str, now: float) -> None:
        self._connections[conn] = Connection(plain_address(peer), plain_address(way), now, now)

    def on_received(self, conn: int, message: m.Upward, now: float, *, is_leading: bool) -> list[Action]:
        connection = self._connections.pop(conn, None)
        if connection is None:
            return []  # dropped while this was on its way
        self._connections[conn] = connection  # moves it to the end
        connection.active_at = connection.received_at = now
        match connection.state:
            case _ if isinstance(message, m.HungUp):  # its last message: later decisions are made without it
                actions = self.on_closed(conn, now, has_hung_up=True, is_leading=is_leading)
                self.on_opened(conn, connection.peer, connection.way, now)  # until it closes, or is silent for a lease
                self._connections[conn].state = ConnectionState.HUNG_UP
                return actions
            case ConnectionState.HUNG_UP:
                return []
            case ConnectionState.OPEN if isinstance(message, m.Hello):
                return self._on_hello(conn, connection, message, now)
            case ConnectionState.OPEN:
                return self._refuse(conn, "protocol error: the first message must be Hello", now)
            case ConnectionState.WAITING:
                return self._on_early_message(conn, connection, message, now)
            case ConnectionState.MEMBER:
                alive = self._answer_rivals(conn, now, is_alive=True)
                return alive + self._on_message(conn, connection, message, now)
            case _:
                assert_never(connection.state)

    def on_garbled(self, conn: int, reason: str, now: float, *, is_other_protocol: bool) -> list[Action]:
        if conn not in self._connections:
            return []  # dropped while this was on its way
        return self._refuse(conn, reason, now, is_final=is_other_protocol)

    def on_closed(
        self, conn: int, now: float, *, is_reset: bool = False, has_hung_up: bool = False, is_leading: bool = False
    ) -> list[Action]:
        connection, may_live = self._forget(conn), is_reset or has_hung_up
        is_missed = connection is not None and connection.is_member and not connection.has_left
        if connection is not None and is_missed and (may_live or not self.is_over):
            node_id = connection.node_id
            if may_live:  # its connection was reset, or it has another leader
                self.absent.on_lost(node_id, now, is_unheard=is_leading and has_hung_up)
            self._graces[node_id] = now + GRACE_S
            self.pending.add(node_id, Broken(node_id, silent_s=now - connection.received_at), now)
        return self._answer_rivals(conn, now, is_alive=False)

    def on_deadline_passed(self, now: float, *, have_slept: bool) -> list[Action]:
        lease_s = self.terms.lease_s  # times must equal those of `deadline` to the last bit
        self.absent.on_time(now)
        if have_slept:
            self._extend_leases(now)
        actions: list[Action] = []
        for conn, silent in list(takewhile(lambda each: each[1].active_at + lease_s <= now, self._connections.items())):
            self._forget(conn)
            if silent.is_member and not silent.has_left:
                self.absent.on_lost(silent.node_id, now, is_unheard=True)
                lost = Lost(silent.node_id, f"silent for {lease_s:g} s", now - silent.received_at)
                self.pending.add(silent.node_id, lost, now)
                actions.append(SendTo(conn, m.GivenUp()))
            actions.append(Drop(conn))
        for node_id, until in list(takewhile(lambda each: each[1] <= now, self._graces.items())):
            del self._graces[node_id]
            self.pending.add(node_id, Lost(node_id, "connection closed", now - until + GRACE_S), now)
        for conn, _ in list(takewhile(lambda each: each[1].until <= now, self._probed.items())):
            actions += self._answer_rivals(conn, now, is_alive=False)
        return actions

    def _extend_leases(self, now: float) -> None:
        """We have slept: silent connections get a new lease, but only once before they say something.

        The story behind it: the loop lags and is late for each deadline, so a dead machine would never be given up.
        """
        for connection in self._connections.values():
            if connection.active_at > self._woke_at:
                connection.active_at = now
        for node_id, until in self._graces.items():
            if until > self._woke_at + GRACE_S:
                self._graces[node_id] = now + GRACE_S
        for probed in self._probed.values():
            if probed.until > self._woke_at + PROBE_TIMEOUT_S:
                probed.until = now + PROBE_TIMEOUT_S
        self._woke_at = now

    # What nodes send.

    def _on_early_message(self, conn: int, connection: Connection, message: m.Upward, now: float) -> list[Action]:
        """Handles a message on a connection whose node is not admitted yet: the node's state may change meanwhile."""
        assert connection.hello is not None
        match message:
            case m.Status(node) if node.node_id == connection.hello.status.node.node_id:
                connection.hello = connection.hello.replace(status=message)
                return []
            case m.Alive():
                return []
            case _:
                return self._refuse(conn, "protocol error: message before the first plan", now)

    def _on_message(self, conn: int, connection: Connection, message: m.Upward, now: float) -> list[Action]:
        node_id = connection.node_id
        match message:
            case m.Alive():
                return []
            case m.Status(node, log=log) if node.node_id == node_id and log and is_too_high(log.term, self.term):
                return self._refuse(conn, "protocol error: a term that no log has counted to", now)
            case m.Status(node) if node.node_id == node_id:
                connection.has_left, connection.log = message.left is not None, message.log
                self.pending.add(node_id, Reported(connection.locate(node), message), now)
                return []
            case r.Fetch(asker) | r.Fetched(asker) if asker == node_id:
                self.pending.add(node_id, message, now)
                return []
            case m.Status() | r.Fetch() | r.Fetched():
                return self._refuse(conn, "protocol error: message for another node_id", now)
            case m.Hello():
                return self._refuse(conn, "protocol error: second Hello", now)
            case m.HungUp():
                raise AssertionError("it is noted in any stage")
            case _:
                assert_never(message)

    def _on_hello(self, conn: int, connection: Connection, hello: m.Hello, now: float) -> list[Action]:
        # JSON can encode half a surrogate pair, and any peer can send one.
        if not compare_digest(hello.token.encode(errors="surrogatepass"), self.token.encode()):
            reason = "this agent read an outdated record of the leader; retrying"
            return self._refuse(conn, reason, now, is_final=False)
        if objection := objection_to(hello, self.terms, self.term):
            return self._refuse(conn, objection, now)
        connection.state, connection.hello = ConnectionState.WAITING, hello
        connection.preferred_rank = hello.status.node.preferred_rank
        return self._admit_unless_rivalled(conn, now)

    def _refuse(self, conn: int, reason: str, now: float, *, is_final: bool = True) -> list[Action]:
        connection = self._forget(conn)
        if connection is not None and connection.is_member and not connection.has_left and not self.is_over:
            self.pending.add(connection.node_id, Lost(connection.node_id, reason), now)
        return [SendTo(conn, m.Refused(reason, is_final)), Drop(conn, in_order=True)]

    # Two agents with one node rank.

    def _admit_unless_rivalled(self, conn: int, now: float, *, dead: int | None = None) -> list[Action]:
        connection = self._connections[conn]
        assert connection.hello is not None
        # The connection of another node with the same node rank.
        rank = connection.preferred_rank
        rival = -1 if rank is None else self._conn_of_rank.get(rank, -1)
        other = self._connections.get(rival)
        is_same = other is not None and other.node_id == connection.hello.status.node.node_id
        if other is None or not other.is_member or is_same or rival == dead:
            return self._take_in(conn, now)
        self._probed.setdefault(rival, Probed(now + PROBE_TIMEOUT_S)).waiting.append(conn)
        return [SendTo(rival, m.Probe())]

    def _answer_rivals(self, rival: int, now: float, *, is_alive: bool) -> list[Action]:
        """Admits the agents that waited for an answer of another one: instead of it, or beside it."""
        probed, silent = self._probed.pop(rival, None), self._connections.get(rival)
        actions: list[Action] = []
        for conn in probed.waiting if probed is not None else []:
            connection = self._connections.get(conn)
            if connection is None or connection.state is ConnectionState.HUNG_UP:
                continue  # gone in the meantime
            if not is_alive:
                if silent is not None and not silent.has_left:  # it is lost since its last message
                    self.pending.add(silent.node_id, Broken(silent.node_id, silent_s=now - silent.received_at), now)
                    silent = None
                actions += self._admit_unless_rivalled(conn, now, dead=rival)
                continue
            taken = f"--node-rank {connection.preferred_rank} is already in use by {self._connections[rival].peer}"
            if self.has_fixed_ranks:
                actions += self._refuse(conn, f"{taken}: give each node its own --node-rank", now)
                continue
            connection.preferred_rank = None
            actions += self._take_in(conn, now, notice=f"{taken}: this node takes part without it")
        return actions

    # Admitting nodes.

    def begin_term(self, term: int) -> None:
        """This leader has a newer term."""
        self.term = term
        self.plans.begin_term(term)
        for node_id in self._conn_of:
            self.plans.send_again(node_id)

    def _take_in(self, conn: int, now: float, notice: str = "") -> list[Action]:
        actions: list[Action] = []
        connection = self._connections[conn]
        hello, connection.hello = connection.hello, None
        assert hello is not None
        status = hello.status
        node_id = status.node.node_id
        old, silent_s = self._conn_of.get(node_id), 0.0
        if old is not None:
            silent_s = now - self._connections[old].received_at
            self._forget(old)
            actions.append(Drop(old))
        self._graces.pop(node_id, None)
        self.absent.on_back(node_id)
        connection.state, connection.node_id = ConnectionState.MEMBER, node_id
        self._conn_of[node_id] = conn
        if connection.preferred_rank is not None:
            self._conn_of_rank[connection.preferred_rank] = conn
        connection.name, connection.log = hello.name, status.log
        node = connection.locate(status.node)
        connection.host, connection.address = node.host, node.master_addr
        self._nodes_on.setdefault(node.host, {})[node_id] = None
        self._note_host(node_id, node.host)
        self.pending.add(node_id, Reported(node, status, True, silent_s=silent_s), now)
        self.plans.send_again(node_id)
        if notice:
            self.plans.change(node_id, m.Waiting(notice), now)
        if old is not None and old in self._probed:  # it can answer the probe only here
            self._probed[conn] = Probed(now + PROBE_TIMEOUT_S, self._probed.pop(old).waiting)
            actions.append(SendTo(conn, m.Probe()))
        return actions

    def _note_host(self, node_id: str, host: str) -> None:
        if len(self._host_of) >= self._hosts_limit:  # most may be of nodes that are gone
            known = {*self._conn_of, *self._graces, *self.absent.node_ids}
            self._host_of = {each: its for each, its in self._host_of.items() if each in known}
            self._hosts_limit = 2 * len(self._host_of) + HOSTS_MIN
        self._host_of[node_id] = host

    # What nodes receive.

    def send(self, node_id: str, message: r.Answer | r.Show | r.Shown) -> list[Action]:
        """Sends a node a message, if it is connected."""
        conn = self._conn_of.get(node_id)
        return [] if conn is None or node_id in self.pending.first_reports else [SendTo(conn, message)]

    def decide(self, node_id: str, decision: m.LeaderMessage, now: float) -> list[Action]:
        """The leader has decided something about a node, so the node's plan changes.

        A node that is not connected reports its status when it connects, and then reads its plan.
        """
        if not (isinstance(decision, m.Ended) and decision.outcome is m.Outcome.REPLACED):
            self.plans.change(node_id, decision, now)
            return []
        self.absent.on_back(node_id)
        conn = self._conn_of.get(node_id)
        if conn is None or node_id in self.pending.first_reports:
            return []
        self._forget(conn)  # its later messages must not harm the agent that has replaced it
        self.plans.forget(node_id)
        return [SendTo(conn, self.plans.empty.replace(ended=decision)), Drop(conn, in_order=True)]

    def send_plans(
        self, log_plan: Callable[[str], log.Plan | None], withheld: Container[str], now: float
    ) -> list[Action]:
        """Sends nodes their plans, if these have changed.

        A node whose first status waits for a decision only reads that it has a leader.  What it must do follows from
        that status.

        Args:
            log_plan: returns a node's plan for the log, by its name there.
            withheld: names of nodes whose plans must wait.
            now: the time.
        """
        actions: list[Action] = []
        for node_id in self.plans.take_changed():
            conn = self._conn_of.get(node_id)
            if conn is None:
                continue
            if self._connections[conn].name in withheld:
                self.plans.send(node_id)
                continue
            if node_id in self.pending.first_reports:
                plan = self.plans.empty
            else:
                plan = self.plans.of(node_id, now)
                self.plans.on_sent(node_id)
            actions.append(SendTo(conn, plan.replace(log=log_plan(self._connections[conn].name))))
        return actions

    def decide_for_all(self, decision: m.LeaderMessage, now: float) -> None:
        """Adds a decision to the plan of every connected node."""
        for node_id in self._conn_of:
            self.plans.change(node_id, decision, now)

    def send_to_all(self, message: m.Downward, active_after: float = -math.inf) -> list[Action]:
        return [SendTo(i, message) for i in self._conn_of.values() if self._connections[i].active_at > active_after]

    def dismiss(self, last_word: m.Goodbye) -> list[Action]:
        """This agent no longer leads."""
        actions = [*self.send_to_all(last_word), *(Drop(conn, in_order=True) for conn in self._connections)]
        self._connections, self._conn_of, self._nodes_on, self._graces, self._probed = {}, {}, {}, {}, {}
        return actions

    def _forget(self, conn: int) -> Connection | None:
        """A connection has ended."""
        connection = self._connections.pop(conn, None)
        if connection is not None and connection.is_member:
            del self._conn_of[connection.node_id]
            nodes = self._nodes_on[connection.host]
            del nodes[connection.node_id]
            if not nodes:
                del self._nodes_on[connection.host]
            if (rank := connection.preferred_rank) is not None and self._conn_of_rank.get(rank) == conn:
                del self._conn_of_rank[rank]
        return connection

    def validate(self) -> None:
        active = [connection.active_at for connection in self._connections.values()]
        received = [connection.received_at for connection in self._connections.values()]
        assert active == sorted(active) and received == sorted(received), "the longest silent connection is the first"
        assert list(self._graces.values()) == sorted(self._graces.values()), "graces end in their order"
        untils = [probed.until for probed in self._probed.values()]
        assert untils == sorted(untils), "probes end in their order"
        members = {each.node_id: conn for conn, each in self._connections.items() if each.is_member}
        assert members == self._conn_of, "a node has one connection"
        assert not self._graces.keys() & self._conn_of.keys(), "a node that is connected is in no grace"
        waiting = {conn for conn, each in self._connections.items() if each.state is ConnectionState.WAITING}
        rivalled = {conn for each in self._probed.values() for conn in each.waiting}
        assert waiting <= rivalled, "an agent waits for another"
        has_hello = {conn for conn, each in self._connections.items() if each.hello is not None}
        assert has_hello == waiting, "a greeting is kept until its node is taken in"
        self.pending.validate()
        self.absent.validate()
