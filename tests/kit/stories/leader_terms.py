"""A leader under test: its clock, its connections by the names of nodes, and words for what is said and heard."""

from __future__ import annotations

from typing import Any

from aelastic.errors import ProcessFailure
from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.coordinator.coordinator import Coordinator
from aelastic.rdzv.coordinator.coordinator_events import Phase
from aelastic.rdzv.coordinator.first_cause import GRACE_S
from aelastic.rdzv.coordinator.leader import Leader
from aelastic.rdzv.coordinator.roster import RoundRules
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import PROTOCOL
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.term import begin_term
from kit import decided
from kit.reports import Reports, news

LEASE_S = 5.0
TOKEN = "t0k3n"
FAILURE = ProcessFailure.from_elsewhere("host-a", 0, 0, 77, -11, "Signal 11 (SIGSEGV)", "", 1000)  # of no victim
FIRST = decided.restart(1, 3, decided.failed(0, "host-a"))  # what follows from the first failure
START = 100.0
CANDIDATE = Candidate("boss", ("10.0.0.1",), 4000, TOKEN)
RENEWED = ev.Renewed(LeaderRecord(4, CANDIDATE))  # a board that does not count


UPWARD = m.Hello | m.Status | m.Alive | m.HungUp | r.Fetch | r.Fetched


def reclaimed(epoch: int) -> ev.Reclaimed:
    return ev.Reclaimed(LeaderRecord(epoch, CANDIDATE, 0))


def node(name: str, rank: int | None = None, *, address: str = "") -> m.Node:
    return m.Node(name, f"host-{name}", "default", 1, address, 29500, rank)


def hello(
    name: str, rank: int | None = None, *, past: m.Past | None = None, seen_epoch: int = 0, **others: Any
) -> m.Hello:
    terms, token = others.pop("terms", None), others.pop("token", TOKEN)
    given = node(name, rank, **others)
    status = m.Status(given, past or m.Past(m.Standing.READY))
    return m.Hello(PROTOCOL, terms or m.Terms("job", 1, 3, 3, LEASE_S), token, seen_epoch, status)


EPOCH = 4  # of a term, unless it is said


def busy(rank: int = 0, size: int = 2) -> m.Past:
    """Of the first round of a term."""
    return m.Past(m.Standing.BUSY, 1, 0, rank, size, epoch=EPOCH)


def ready(name: str) -> m.Ready:
    return m.Ready(node(name))


def failed(name: str) -> m.Failed:
    return m.Failed(name, 1, FAILURE)


def lost(name: str, why: str) -> m.Interrupted:
    return m.Interrupted(1, decided.lost(f"host-{name}", why), 0)


def refusal(conn: int, reason: str, *, is_final: bool = True) -> list[Any]:
    return [ev.Say(conn, m.Refused(reason, is_final)), ev.Drop(conn)]


def part(conn: int, what: Any) -> ev.Say:
    """What is new in a plan that is sent, or a text about it, as if it were a message."""
    return ev.Say(conn, what)


class Term:
    """A leader, the clock it is told, and connections by the nodes that came on them last."""

    def __init__(
        self, nodes: tuple[int, int] = (1, 3), *, max_restarts: int = 3, renewals: int = 0, epoch: int = EPOCH,
        has_fixed_ranks: bool = False, **timeouts: float,
    ) -> None:  # fmt: skip
        self.coordinator = Coordinator(RoundRules(*nodes, **timeouts), RestartPolicy(max_restarts))  # type: ignore[arg-type]
        self.terms = m.Terms("job", *nodes, max_restarts, LEASE_S)
        record = LeaderRecord(epoch, CANDIDATE, renewals)
        self.leader: Leader = begin_term(self.coordinator, self.terms, record, START, has_fixed_ranks=has_fixed_ranks)
        self.now = START
        self.conns: dict[str, int] = {}
        self.last_conn = 0
        self.reports = Reports()
        self.plans: dict[int, m.Plan] = {}  # the last on each connection

    def tell(self, *events: ev.Event) -> list[Any]:
        """What the last of the events is answered with."""
        actions: list[Any] = []
        for event in events:
            actions = [each for action in self.leader.handle(event, self.now) for each in self.parted(action)]
        return actions

    def parted(self, action: Any) -> list[Any]:
        """A plan that is sent as what is new in it."""
        if not (isinstance(action, ev.Say) and isinstance(action.message, m.Plan)):
            return [action]
        found = news(self.plans.get(action.conn), action.message)
        self.plans[action.conn] = action.message
        names = {conn: name for name, conn in self.conns.items()}
        for each in found:
            self.reports.hears(names.get(action.conn, ""), each)
        return [part(action.conn, each) for each in found]

    def open(self, name: str, peer: str = "") -> int:
        self.last_conn += 1
        self.conns[name] = self.last_conn
        assert self.tell(ev.Opened(self.last_conn, peer or f"10.0.0.{self.last_conn}", "10.0.0.100")) == []
        return self.last_conn

    def join(self, name: str, rank: int | None = None, **others: Any) -> list[Any]:
        """A node connects and says hello."""
        conn = self.open(name)
        greeting = hello(name, rank, terms=self.terms, **others)
        self.reports.connects(greeting.status.node, greeting.status.past)
        return self.tell(ev.Received(conn, greeting))

    def say(self, name: str, message: Any) -> list[Any]:
        said = message if isinstance(message, UPWARD) else self.reports.said(message)
        return self.tell(ev.Received(self.conns[name], said))

    def fail(self, name: str, failure: ProcessFailure = FAILURE) -> list[Any]:
        """A worker fails, and the grace passes in which that might turn out to be a victim's."""
        said = self.say(name, m.Failed(name, 1, failure))
        self.now += GRACE_S
        return said + self.tell(ev.DeadlinePassed())

    def close(self, name: str) -> list[Any]:
        return self.tell(ev.Closed(self.conns[name]))

    def pass_deadline(self) -> list[Any]:
        assert self.leader.deadline is not None
        self.now = max(self.now, self.leader.deadline)
        return self.tell(ev.DeadlinePassed())

    def pass_time_until_renewal(self) -> None:
        """The board is asked to renew the record."""
        while ev.Renew() not in self.pass_deadline():
            pass

    def live_until(self, time: float, *silent: str, is_board_up: bool = True) -> list[Any]:
        """Lets time pass; nodes that are not silent say `Alive` whenever something is due.  Gives all that is done."""
        done: list[Any] = []
        while self.leader.deadline is not None and self.leader.deadline <= time:
            before, leader = self.leader.deadline, self.leader
            for name in sorted(self.conns.keys() - set(silent)):
                done += self.say(name, m.Alive())
            actions = self.pass_deadline()
            if ev.Renew() in actions:
                actions += self.tell(RENEWED if is_board_up else ev.RenewFailed("no answer"))
            done += actions
            assert leader.has_stepped_down or leader.deadline > before, "time must go on"  # type: ignore[operator]
        self.now = max(self.now, time)
        return done

    def hears(self, actions: list[Any]) -> dict[str, list[Any]]:
        """What each node hears."""
        names = {conn: name for name, conn in self.conns.items()}
        heard: dict[str, list[Any]] = {}
        for action in actions:
            if isinstance(action, ev.Say):
                heard.setdefault(names[action.conn], []).append(action.message)
        return heard


def running(names: str = "ab", **others: Any) -> Term:
    """A round of these nodes is on."""
    term = Term((len(names), 3) if "nodes" not in others else others.pop("nodes"), last_call_timeout_s=0.01, **others)
    for name in names:
        term.join(name)
    term.live_until(START + 0.1)
    assert term.coordinator.phase is Phase.RUNNING and term.coordinator.round == 1
    return term


def of_kind(actions: list[Any], kind: type) -> list[Any]:
    """The messages of one kind that are said, or the actions of it."""
    said = [action.message for action in actions if isinstance(action, ev.Say)]
    return [each for each in (*actions, *said) if isinstance(each, kind)]
