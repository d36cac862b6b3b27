"""A leader under test: its clock, the cell, its connections by node name, and wording for the messages that pass."""

from __future__ import annotations

from collections import deque
from typing import Any

from aelastic.errors import ProcessFailure
from aelastic.rdzv.leader import leader_events as ev
from aelastic.rdzv.leader.connections import Connections
from aelastic.rdzv.leader.coordinator import Coordinator
from aelastic.rdzv.leader.coordinator_events import Phase
from aelastic.rdzv.leader.first_cause import GRACE_S
from aelastic.rdzv.leader.job_state import JobState, payload_of, round_of
from aelastic.rdzv.leader.leader import Leader
from aelastic.rdzv.leader.leader_cell import LeaderCell
from aelastic.rdzv.leader.roster import RoundRules
from aelastic.rdzv.log import leader as leading
from aelastic.rdzv.log import node as log
from aelastic.rdzv.log.cell import Cell
from aelastic.rdzv.log.entries import Entry, first_entry
from aelastic.rdzv.log.node import Close, EndedLeader, Node
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import PROTOCOL
from aelastic.rdzv.restart_policy import RestartPolicy
from kit import decided
from kit.reports import Reports, news

LEASE_S = 5.0
TOKEN = "t0k3n"
FAILURE = ProcessFailure.from_elsewhere("host-a", 0, 0, 77, -11, "Signal 11 (SIGSEGV)", "", 1000)  # not a victim's
FIRST = decided.restart(1, 3, decided.failed(0, "host-a"))  # the decision after the first failure
START, A_MOMENT_S = 100.0, 0.001
TERM = 4  # unless specified
AT_ONCE_MAX = 10_000  # events that one event may lead to
WORD = "w"  # the word of a leader that finds the cell empty

UPWARD = m.Hello | m.Status | m.Alive | m.HungUp | r.Fetch | r.Fetched
OF_CELL = ev.ReadCell | ev.WriteCell


def leader_at(name: str = "boss", token: str = TOKEN) -> m.LeaderAt:
    return m.LeaderAt(name, name, ("10.0.0.100",), 4000, token)


def node(name: str, rank: int | None = None, *, address: str = "", vote_port: int = 0) -> m.Node:
    return m.Node(name, f"host-{name}", "default", 1, address, 29500, rank, vote_port=vote_port)


def hello(name: str, rank: int | None = None, *, past: m.Past | None = None, **others: Any) -> m.Hello:
    terms, token = others.pop("terms", None), others.pop("token", TOKEN)
    found = others.pop("log", None)
    status = m.Status(node(name, rank, **others), past or m.Past(m.NodePhase.READY), log=found)
    return m.Hello(PROTOCOL, terms or m.Terms("job", 1, 3, 3, LEASE_S), token, name, status)


def busy(round_: int = 1, term: int = TERM) -> m.Past:
    """The past of a busy node in the first round of a term."""
    return m.Past(m.NodePhase.BUSY, round_, term)


def ready(name: str) -> m.Ready:
    return m.Ready(node(name))


def failed(name: str) -> m.Failed:
    return m.Failed(name, 1, FAILURE)


def lost(name: str, why: str) -> m.Interrupted:
    return m.Interrupted(1, decided.lost(f"host-{name}", why), 0)


def refusal(conn: int, reason: str, *, is_final: bool = True) -> list[Any]:
    return [ev.SendTo(conn, m.Refused(reason, is_final)), ev.Drop(conn, in_order=True)]


def part(conn: int, what: Any) -> ev.SendTo:
    """A new part of a plan, or a text about it, in the form of a message."""
    return ev.SendTo(conn, what)


class Term:
    """A leader, its clock, the cell, and the connections by the node that last used each.

    The endpoint and the following nodes answer at once: the cell is as this leader writes it, plans are sent in full, and
    voters accept the entries that they read about.

    Args:
        nodes: the minimum and maximum size of a round.
        own: the node of the leader's agent; empty if it has none.
        do_nodes_vote: if false, only the store decides.
        kept: what the leader's agent has stored of the log.
        stored: the content of the cell.
        has_listened: the term is from the wall clock, after listening for a lease.
        is_begun: the leader has read the cell.
    """

    def __init__(
        self, nodes: tuple[int, int] = (1, 3), *, max_restarts: int = 3, term: int = TERM, own: str = "",
        do_nodes_vote: bool = False, kept: Node | None = None, stored: m.StoredCell | None = None,
        has_listened: bool = True, has_fixed_ranks: bool = False, is_begun: bool = True, looks_s: float = 60.0,
        at: m.LeaderAt | None = None, **leads: Any,
    ) -> None:  # fmt: skip
        timeouts = {key: leads.pop(key) for key in list(leads) if key.endswith("_s")}
        self.at = at or leader_at(own or "boss")
        self.coordinator = Coordinator(RoundRules(*nodes, **timeouts), RestartPolicy(max_restarts), own)
        self.coordinator.roster.begin_term(term)
        self.terms = m.Terms("job", *nodes, max_restarts, LEASE_S)
        looks_s = timeouts.get("join_timeout_s", looks_s)
        connections = Connections(self.terms, self.at.token, term, looks_s, has_fixed_ranks=has_fixed_ranks)
        campaign = leading.campaign(kept or Node(self.at.name), term, 1, has_listened=has_listened)
        host = f"host-{self.at.node_id}"
        self.now = START - A_MOMENT_S
        cell = LeaderCell(WORD, LEASE_S)
        self.leader = Leader(
            self.coordinator, connections, campaign, self.at, host, do_nodes_vote, cell, self.now, **leads
        )
        self.own = own
        self.conns: dict[str, int] = {}
        self.last_conn = 0
        self.reports = Reports()
        self.plans: dict[int, m.Plan] = {}  # the latest on each connection
        self.logs: dict[str, Node] = {}  # what nodes know of the log, the leader's own node included
        self.stored, self._read = stored, stored  # the cell, and its content when the leader last read or wrote it
        self.has_cell = True  # whether the endpoint can serve requests; if not, it answers with an error
        self.is_cell_silent = False  # whether the endpoint withholds its answers
        self._owed: list[Any] = []  # requests to answer once it is not silent any more
        self.shows_cell = False  # whether results include requests to the endpoint
        self.mute: set[str] = set()  # nodes that do not answer the plans that they read
        self.are_plans_flushed = True
        self.asked: list[Any] = []  # requests to the endpoint
        if is_begun:
            self.begin()

    def begin(self) -> list[Any]:
        """Starts the leader."""
        done = self.handle(ev.DeadlinePassed())
        self.now = START
        return done

    # What happens.

    def handle(self, *events: ev.Event) -> list[Any]:
        """The answer to the last event and its immediate consequences, without requests to the endpoint."""
        done: list[Any] = []
        for event in events:
            done, to_come, count = [], deque([event]), 0
            while to_come:
                count += 1
                assert count < AT_ONCE_MAX, "what follows at once ends"
                for action in self.leader.handle(to_come.popleft(), self.now):
                    to_come += self.answers(action)
                    done += self.parted(action)
        return done

    def answers(self, action: Any) -> list[ev.Event]:
        """The immediate consequences of an action."""
        match action:
            case ev.ReadCell() | ev.WriteCell():
                self.asked.append(action)
                return self.of_cell(action)
            case ev.SendTo(conn, m.Plan() as plan, serial):
                flushed: list[ev.Event] = [ev.Flushed(conn, serial)] if serial and self.are_plans_flushed else []
                return flushed + self.followed(conn, plan)
            case _:
                return []

    def of_cell(self, action: ev.ReadCell | ev.WriteCell) -> list[ev.Event]:
        """The endpoint's answer: it replaces the cell if that is unchanged since its leader read it."""
        if self.is_cell_silent:
            self._owed.append(action)
            return []
        if not self.has_cell:
            return [ev.CellFailed("no answer")]
        if isinstance(action, ev.WriteCell) and self._read == self.stored:
            self.stored = action.stored
        self._read = self.stored
        return [ev.CellAnswered(self.stored)]

    def break_silence(self) -> list[Any]:
        """The endpoint answers again, beginning with the requests that came meanwhile."""
        self.is_cell_silent, owed, self._owed = False, self._owed, []
        return [each for action in owed for answer in self.of_cell(action) for each in self.handle(answer)]

    def silence(self, name: str) -> list[Any]:
        """A node no longer answers what it reads about the log."""
        self.mute.add(name)
        return []

    def speak(self, name: str) -> list[Any]:
        """A node answers the plan that it read last."""
        self.mute.discard(name)
        conn = self.conns[name]
        plan = self.plans[conn]
        return [each for event in self.followed(conn, plan) for each in self.handle(event)]

    def followed(self, conn: int, plan: m.Plan) -> list[ev.Event]:
        """A following node reads about the log in its plan, and answers if it knows more then."""
        name = next((name for name, its in self.conns.items() if its == conn), "")
        if plan.log is None or name not in self.logs or name in self.mute:
            return []
        before = self.logs[name]
        self.logs[name] = log.on_plan(before, plan.log)
        known = log.status_of(self.logs[name])
        if known == log.status_of(before):
            return []
        status = self.reports.of[name] = self.reports.of[name].replace(log=known)
        return [ev.Received(conn, status)]

    def parted(self, action: Any) -> list[Any]:
        """Splits a plan into the parts that are new in it."""
        if isinstance(action, OF_CELL):
            return [action] if self.shows_cell else []
        if not (isinstance(action, ev.SendTo) and isinstance(action.message, m.Plan)):
            return [action]
        found = news(self.plans.get(action.conn), action.message)
        self.plans[action.conn] = action.message
        names = {conn: name for name, conn in self.conns.items()}
        for each in found:
            self.reports.receives(names.get(action.conn, ""), each)
        return [part(action.conn, each) for each in found]

    # What nodes do.

    def node(self, name: str, rank: int | None = None, **others: Any) -> m.Node:
        """A node, which can vote if nodes vote."""
        return node(name, rank, **({"vote_port": 7} if self.leader.do_nodes_vote else {}) | others)

    def open(self, name: str, peer: str = "") -> int:
        self.last_conn += 1
        self.conns[name] = self.last_conn
        assert self.handle(ev.Opened(self.last_conn, peer or f"10.0.0.{self.last_conn}", "10.0.0.100")) == []
        return self.last_conn

    def join(self, name: str, rank: int | None = None, **others: Any) -> list[Any]:
        """A node connects and sends its greeting."""
        conn = self.open(name)
        greeting = self.greeting(name, rank, **others)
        self.reports.connects(greeting.status.node, greeting.status.past)
        self.reports.of[name] = greeting.status
        return self.handle(ev.Received(conn, greeting))

    def greeting(self, name: str, rank: int | None = None, **others: Any) -> m.Hello:
        """The first message of a node, which follows this leader from then on."""
        token, terms = others.pop("token", self.at.token), others.pop("terms", self.terms)
        before = self.reports.of.get(name)
        past = others.pop("past", None) or m.Past(m.NodePhase.READY)
        status = m.Status(self.node(name, rank, **others), past)
        found = m.Hello(PROTOCOL, terms, token, name, status)
        if before is not None:
            counts = {"ready_count": before.ready_count, "prepared_count": before.prepared_count}
            found = found.replace(status=status.replace(**counts))
        if name == self.own:
            return found.replace(name=self.at.name)
        known = self.logs.get(name, Node(name))
        if log.may_follow(known, self.at.name, self.leader.term):
            known = log.follow(known, self.at.name, self.leader.term)
        self.logs[name] = known
        return found.replace(status=found.status.replace(log=log.status_of(known)))

    def send(self, name: str, message: Any) -> list[Any]:
        if isinstance(message, m.Status) and name in self.logs and message.log is None:
            message = message.replace(log=log.status_of(self.logs[name]))
        upward = message if isinstance(message, UPWARD) else self.reports.status_after(message)
        return self.handle(ev.Received(self.conns[name], upward))

    def fail(self, name: str, failure: ProcessFailure = FAILURE) -> list[Any]:
        """A worker fails, and the grace period passes in which it might turn out to be a victim."""
        done = self.send(name, m.Failed(name, 1, failure))
        self.now += GRACE_S
        return done + self.handle(ev.DeadlinePassed())

    def close(self, name: str, how: Close = Close.ORDERLY) -> list[Any]:
        return self.handle(ev.Closed(self.conns[name], how))

    # Time.

    def pass_deadline(self) -> list[Any]:
        assert self.leader.deadline is not None
        self.now = max(self.now, self.leader.deadline)
        return self.handle(ev.DeadlinePassed())

    def live_until(self, time: float, *silent: str, has_cell: bool | None = None) -> list[Any]:
        """Lets time pass; nodes that are not silent say `Alive` whenever something is due.  Gives all that is done."""
        done: list[Any] = []
        if has_cell is not None:
            self.has_cell = has_cell
        while self.leader.deadline is not None and self.leader.deadline <= time:
            before, leader = self.leader.deadline, self.leader
            for name in sorted(self.conns.keys() - set(silent)):
                done += self.send(name, m.Alive())
            if leader.deadline is not None and leader.deadline <= time:
                done += self.pass_deadline()
            assert leader.has_stepped_down or leader.deadline > before, "time must advance"  # type: ignore[operator]
        self.now = max(self.now, time)
        return done

    def received_by(self, actions: list[Any]) -> dict[str, list[Any]]:
        """The messages that each node receives."""
        names = {conn: name for name, conn in self.conns.items()}
        received: dict[str, list[Any]] = {}
        for action in actions:
            if isinstance(action, ev.SendTo):
                received.setdefault(names[action.conn], []).append(action.message)
        return received

    @property
    def written(self) -> list[m.StoredCell]:
        """The cells that the endpoint was asked to store."""
        return [each.stored for each in self.asked if isinstance(each, ev.WriteCell)]


def running(names: str = "ab", **others: Any) -> Term:
    """A leader with a running round of these nodes."""
    term = Term((len(names), 3) if "nodes" not in others else others.pop("nodes"), last_call_timeout_s=0.01, **others)
    for name in names:
        term.join(name)
    term.live_until(START + 0.1)
    assert term.coordinator.phase is Phase.RUNNING and term.coordinator.round == 1
    return term


def voting(names: str = "abc", **others: Any) -> Term:
    """The leader of a running round of these nodes, all of which vote; it belongs to the first node's agent."""
    return running(names, own=names[0], do_nodes_vote=True, **others)


def participants(names: str) -> list[m.Node]:
    return [node(name, vote_port=7, address=f"10.0.0.{place}") for place, name in enumerate(names, start=1)]


def first_round(names: str = "abc", *, term: int = TERM, state: JobState | None = None) -> Entry:
    """The entry with the first round of these nodes, all of which vote; the first node's agent was the leader."""
    kept = state or JobState(round_of(1, term, participants(names), names[0]))
    return first_entry(term, [*names], [*names], (WORD,), payload_of(kept))


def campaigning(names: str = "abc", *, kept: Entry | None = None, by: str = "", **others: Any) -> Term:
    """The second node's agent campaigns: it has read that the leader, the first node's agent, has ended."""
    entry = kept or first_round(names)
    own = by or names[1]
    ended = () if own == names[0] else (EndedLeader(names[0], None),)
    before = Node(own, TERM, names[0], committed=entry, ended=ended)
    cell = Cell(WORD, entry.log, TERM, f"token of {names[0]}", 3, entry)
    stored = m.StoredCell(cell, leader_at(names[0], cell.leader))
    given: dict[str, Any] = {"nodes": (len(names), 3), "term": TERM + 1, "gone": frozenset({cell.leader})}
    given |= {"has_listened": False} | others
    term = Term(kept=before, stored=stored, own=own, do_nodes_vote=True, is_begun=False, **given)
    for name in names:
        term.reports.connects(node(name, vote_port=7), busy())
        if name != own:
            term.logs[name] = Node(name, TERM, names[0], committed=entry, ended=ended)
    return term


def of_kind(actions: list[Any], kind: type) -> list[Any]:
    """The sent messages of one kind, or the actions of that kind."""
    sent = [action.message for action in actions if isinstance(action, ev.SendTo)]
    return [each for each in (*actions, *sent) if isinstance(each, kind)]
