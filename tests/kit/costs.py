"""Lives of jobs with any number of agents, and of nodes with any number of workers: the events whose cost is measured.

A life yields each such event with its name and the number of agents (or workers) that it concerns, one or all of them.  It
passes all other events to the core itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from aelastic.agent.group import events as g
from aelastic.agent.group.restart_grace import Looked, RestartGrace, Sample
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.diagnose.hangs import hang_rules, timer_rules
from aelastic.diagnose.hangs.options import HangRules
from aelastic.rdzv.leader import leader_events as ev
from aelastic.rdzv.leader.coordinator_events import CutOff, Phase
from aelastic.rdzv.leader.first_cause import GRACE_S
from aelastic.rdzv.leader.job_state import JobState, payload_of, round_of
from aelastic.rdzv.log.cell import Cell
from aelastic.rdzv.log.entries import Entry, first_entry, id_of
from aelastic.rdzv.log.node import Close, Node
from aelastic.rdzv.member import member_events as me
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.spec import WorkerSpec
from kit import decided
from kit.reports import news
from kit.stories import member
from kit.stories.leader_terms import FAILURE, LEASE_S, TERM, UPWARD, WORD, Term, busy, leader_at, node
from kit.visits import Act, Name

FEW = 5  # agents or workers that do the same, one after the other
VOTERS = 5  # of a round of any size
ONE, ALL = False, True
Measured: TypeAlias = tuple[str, bool, Act]
Life: TypeAlias = Callable[[int], Iterator[Measured]]


def names(count: int, start: int = 0) -> list[Name]:
    return [Name(f"n{number}") for number in range(start, start + count)]


class Job(Term):
    """A leader's term, and the events in it that are measured.

    The endpoint and the voters answer each measured event before the next one.
    """

    def act(self, event: Any) -> Act:
        self.settle()
        return Act(self.leader, event, self.now)

    def handle(self, *events: ev.Event) -> list[Any]:
        self.settle()
        return super().handle(*events)

    def is_pending(self) -> bool:
        """Whether an entry is not committed yet."""
        return self.leader.log.proposal is not None

    def settle(self) -> None:
        """Answers all open requests."""
        while not self.is_cell_silent and (asked := self.leader.cell._asked) is not None:
            for event in self.of_cell(ev.ReadCell() if asked.written is None else ev.WriteCell(asked.written)):
                super().handle(event)
        for conn, name in list(self.leader.followers._name_of.items()):
            if (log_plan := self.leader._log_plans()(name)) is not None and self.is_pending():
                super().handle(ev.Flushed(conn, self.leader.followers._sent[name]))
                for event in self.followed(conn, m.Plan(self.leader.term, LEASE_S, log=log_plan)):
                    super().handle(event)

    def sends(self, name: str, message: Any) -> Act:
        """A node's message arrives as its whole status, after the node has read its plan."""
        conn = self.conns[name]
        if isinstance(message, UPWARD):
            return self.act(ev.Received(conn, message))
        self.read(conn, name)
        return self.act(ev.Received(conn, self.reports.status_after(message)))

    def read(self, conn: int, name: str) -> None:
        plan = self.leader.connections.plans.of(name, self.now)
        for each in news(self.plans.get(conn), plan):
            self.reports.receives(name, each)
        self.plans[conn] = plan

    def greets(
        self, name: str, rank: int | None = None, starts: m.Starts = m.Starts.COLD, past: m.Past | None = None
    ) -> Act:
        """A node connects and sends its greeting."""
        self.open(name)
        greeting = self.greeting(name, rank, past=past)
        given = greeting.status.replace(node=greeting.status.node.replace(starts=starts))
        self.reports.connects(given.node, given.past)
        self.reports.of[name] = given
        return self.act(ev.Received(self.conns[name], greeting.replace(status=given)))

    def node(self, name: str, rank: int | None = None, **others: Any) -> m.Node:
        """A node; if nodes vote, the first few have a vote."""
        votes = self.leader.do_nodes_vote and int(name[1:]) < VOTERS
        return node(name, rank, **({"vote_port": 7} if votes else {}) | others)

    def breaking(self, name: str) -> Act:
        return self.act(ev.Closed(self.conns[name], Close.ABORTED))

    def due(self) -> Act:
        self.settle()
        assert self.leader.deadline is not None
        self.now = max(self.now, self.leader.deadline)
        return self.act(ev.DeadlinePassed())

    def do(self, acts: Iterator[Act]) -> None:
        for act in acts:
            self.handle(act.event)

    def gather(self, of: list[Name], **others: Any) -> None:
        self.do(self.greets(name, **others) for name in of)

    def live(self, of: list[Name]) -> None:
        self.do(self.sends(name, m.Alive()) for name in of)

    def pass_until(self, is_there: Callable[[], bool], alive: list[Name]) -> Act:
        """Lets time pass, with heartbeats from agents, until the next deadline is the one to measure."""
        while not is_there():
            self.live(alive)
            self.pass_deadline()
        return self.due()

    def each(self, name: str, of: list[Name], act_of: Callable[[Name], Act]) -> Iterator[Measured]:
        """Several agents do the same, one after the other."""
        return ((name, ONE, act_of(each)) for each in of)

    def all_send(self, name: str, of: list[Name], message_of: Callable[[Name], Any]) -> Iterator[Measured]:
        """All agents send a message; the last few are measured, and the very last one concerns all agents."""
        *others, last = of
        self.do(self.sends(each, message_of(each)) for each in others[:-FEW])
        yield from self.each(name, others[-FEW:], lambda each: self.sends(each, message_of(each)))
        yield f"{name}, the last of all", ALL, self.sends(last, message_of(last))


def running(count: int, room: int = 0, **others: Any) -> Job:
    """A job with a running round of `count` agents, and room for more."""
    job = Job((1, count + room), last_call_timeout_s=0.01, settle_time_s=0.02, **others)
    job.gather(names(count))
    if room:
        job.pass_until(lambda: job.coordinator.deadline in {None, job.leader.deadline}, [])
        job.handle(ev.DeadlinePassed())
    job.settle()
    assert job.coordinator.phase is Phase.RUNNING and len(job.coordinator.roster.participants) == count
    return job


def a_round_forms(count: int) -> Iterator[Measured]:
    job, all_names = Job((count + FEW, count + FEW)), names(count)
    first, second, third, fourth = (all_names[FEW * part : FEW * (part + 1)] for part in range(4))
    for number in range(FEW):
        yield "connects", ONE, job.act(ev.Opened(9000 + number, "10.0.0.9", "10.0.0.100"))
    job.gather(all_names[:-FEW])
    yield from job.each("greets", all_names[-FEW:], job.greets)
    yield from job.each("is alive", first, lambda name: job.sends(name, m.Alive()))
    yield from job.each("is ready", first, lambda name: job.sends(name, m.Ready(node(name))))
    yield from job.each("has prepared", first, lambda name: job.sends(name, m.Prepared(name, m.Starts.WARM)))
    yield "all read why the round waits", ALL, job.pass_until(
        lambda: job.leader.deadline == job.leader._waiting_text_at, all_names
    )  # fmt: skip
    job.live(all_names)
    yield "heartbeats, and a renewal", ALL, job.pass_until(lambda: job.leader.deadline == job.leader._heartbeat_at, [])
    for _ in range(FEW):
        job.is_cell_silent = True
        job.pass_until(lambda: job.leader.cell._asked is not None, all_names)
        yield "the endpoint fails", ONE, job.act(ev.CellFailed("no answer"))
        job.is_cell_silent = False
        job.pass_until(lambda: job.leader.cell._asked is None, all_names)
    yield from job.each("brings garbage", first, lambda name: job.act(ev.Garbled(job.conns[name], "no message", False)))
    yield from job.each("breaks off", second, job.breaking)
    yield from job.each("leaves", third, lambda name: job.sends(name, m.Left(name, "SIGTERM")))
    yield from job.each("hangs up", fourth, lambda name: job.sends(name, m.HungUp()))
    asked = m.Campaign(TERM + 3, id_of(job.leader.log.node.committed), leader_at("x", "token of x"))
    for number in range(FEW):
        yield "is asked who leads", ONE, job.act(ev.Campaigned(number, asked.replace(term=0)))
        yield "learns too late of a vote", ONE, job.act(ev.Declined(TERM))
    yield "a higher term", ALL, job.act(ev.Campaigned(9, asked))
    job.now += 60.0
    yield "wakes up", ALL, job.act(ev.DeadlinePassed())
    yield "resigns", ALL, job.act(ev.Resigned())


def agents_fall_silent(count: int) -> Iterator[Measured]:
    job, all_names = Job((count + FEW, count + FEW)), names(count)
    job.gather(all_names)
    for name in all_names[:FEW]:
        job.close(name)
        job.now += 1e-4
    yield from job.each("is not back in its grace", all_names[:FEW], lambda _: job.due())
    others = all_names[FEW:]
    for name in others:
        job.live([name])
        job.now += 1e-4
    silent = job.pass_until(lambda: (job.leader.connections.deadline or 0) <= (job.leader.deadline or 0), [])
    yield "the first is silent for a lease", ONE, silent
    yield from job.each("is silent for a lease", others[:FEW], lambda _: job.due())
    job.now += 1.0
    yield "all others are silent", ALL, job.due()


def a_round_begins_is_asked_and_drained(count: int) -> Iterator[Measured]:
    job, all_names = Job((1, count), last_call_timeout_s=0.01), names(count)
    first = all_names[0]
    job.gather(all_names[:-1])
    yield "the first round begins", ALL, job.greets(all_names[-1])
    few = all_names[FEW : 2 * FEW]
    yield from job.each("works", few, lambda name: job.sends(name, m.Alive()))
    for name in few:
        job.close(name)
    yield from job.each("is back", few, lambda name: job.greets(name, past=busy()))
    for name in few:
        job.close(name)
    yield from job.each("is back without its ranks", few, job.greets)
    spares = names(FEW, count)
    yield from job.each("is a spare", spares, job.greets)
    for name in spares:
        job.close(name)
        job.now += 1e-4
    yield from job.each("a spare is lost", spares, lambda _: job.due())
    job.gather(spares)
    ask = r.Fetch(first, "ask", r.What.LOG, all_names[1], 0)
    yield from job.each("asks to see a log", few, lambda name: job.sends(name, ask.replace(node_id=name)))
    shown = r.Fetched(first, first, "ask", "", "text")
    yield from job.each("shows a log", few, lambda name: job.sends(name, shown.replace(node_id=name)))
    hangs = m.Hangs(first, 1, "no output for 60 s", 60.0, is_stopped=True)
    yield "a hang", ALL, job.sends(first, hangs)
    yield from job.each("finds the same hang", few, lambda name: job.sends(name, hangs.replace(node_id=name)))
    yield from job.all_send("reports what its workers do", all_names, lambda name: m.Saw(name, 1, ()))
    yield "a drain", ALL, job.sends(first, r.Ask(first, "ask", r.Verb.DRAIN, "", 60.0, "spot"))
    notice = job.coordinator.drain.notice_id
    yield from job.all_send("holds its ranks", all_names, lambda name: r.Frozen(name, notice, 7, 2, 0))
    yield from job.each("has saved", all_names[:FEW], lambda name: job.sends(name, r.Saved(name, notice)))


def verdict_taken(job: Job) -> Act:
    """The endpoint confirms that it has stored the proposal."""
    asked = job.leader.cell._asked
    assert asked is not None and asked.written is not None and job.leader.log.proposal is not None
    job.stored = job._read = asked.written
    return Act(job.leader, ev.CellAnswered(asked.written), job.now)


def a_round_fails_the_next_succeeds(count: int) -> Iterator[Measured]:
    job, all_names = running(count), names(count)
    first, few, others = all_names[0], all_names[1 : 1 + FEW], all_names[1 + FEW : 1 + 2 * FEW]
    failure = FAILURE.replace(exitcode=1)
    yield "a failure that may be a victim's", ALL, job.sends(first, m.Failed(first, 1, failure))
    yield from job.each("fails before all know", few, lambda name: job.sends(name, m.Failed(name, 1, failure)))
    yield "all learn why the round is over", ALL, job.due()
    yield from job.each("fails as well", others, lambda name: job.sends(name, m.Failed(name, 1, failure)))
    job.now += 2 * GRACE_S
    job.live(all_names)
    yield from job.all_send("is ready again", all_names, lambda name: m.Ready(node(name)))
    while job.coordinator.phase is not Phase.RUNNING:
        job.pass_deadline()
    round_ = job.coordinator.round
    yield from job.each("opts in", few, lambda name: job.sends(name, m.OptedIn(name, round_)))
    yield from job.all_send("succeeds", all_names, lambda name: m.Succeeded(name, round_))
    yield "all receive the verdict", ALL, verdict_taken(job)
    yield from job.each("comes after the verdict", names(FEW, count), job.greets)
    yield from job.each("knows the verdict", few, lambda name: job.act(ev.Closed(job.conns[name], Close.ORDERLY)))
    yield "heartbeats after the verdict", ALL, job.due()


def ended(count: int, **others: Any) -> Job:
    """A job whose round is over: all agents stop their workers."""
    job = running(count, **others)
    job.fail(names(1)[0])
    assert job.coordinator.phase is Phase.FORMING and not job.coordinator.forming.end.unnotified
    job.now += 2 * GRACE_S
    job.live(names(count))
    return job


def a_round_that_is_over_loses_agents(count: int) -> Iterator[Measured]:
    job, all_names = ended(count), names(count)
    few, others, last = all_names[1 : 1 + FEW], all_names[1 + FEW : 1 + 2 * FEW], all_names[-1]
    yield from job.each("leaves", few, lambda name: job.sends(name, m.Left(name, "SIGTERM")))
    yield from job.each("breaks off", others, job.breaking)
    stopping = busy().replace(phase=m.NodePhase.STOPPING)
    yield from job.each("is back", others, lambda name: job.greets(name, past=stopping))
    for name in all_names[1 + FEW : -1]:
        job.handle(job.breaking(name).event)
        job.now += 1e-4
    yield "an earlier failure, and each loss is weighed", ALL, job.sends(last, m.Failed(last, 1, FAILURE, age_s=99.0))
    yield from job.each("is lost", few, lambda _: job.due())


def a_round_ends_in_other_ways(count: int) -> Iterator[Measured]:
    all_names, (first, second) = names(count), names(2)
    job = running(count)
    job.sends(first, m.Failed(first, 1, FAILURE.replace(exitcode=1)))
    job.pass_deadline()
    yield "the end costs nothing after all", ALL, job.sends(second, m.Left(second, "SIGTERM", age_s=9.0))
    job = ended(count, join_timeout_s=3.0)
    job.do(job.sends(name, m.Ready(node(name))) for name in all_names[: count // 2])
    yield "an agent that does not stop is given up", ALL, job.pass_until(
        lambda: job.coordinator.deadline in {None, job.leader.deadline}, all_names
    )  # fmt: skip


def the_job_fails(count: int) -> Iterator[Measured]:
    job, first = running(count, max_restarts=0), names(1)[0]
    yield "a failure", ALL, job.sends(first, m.Failed(first, 1, FAILURE))
    yield "the verdict is proposed", ALL, job.due()
    assert job.coordinator.is_closed and not job.leader.is_over
    yield "all receive it", ALL, verdict_taken(job)
    assert job.leader.is_over


def agents_finish_and_leave(count: int) -> Iterator[Measured]:
    job, all_names, first = running(count + 2), names(count), names(1)[0]
    job.do(job.sends(name, m.Succeeded(name, 1)) for name in all_names[: count // 2])
    yield "those that have finished read what is waited for", ALL, job.pass_until(
        lambda: job.leader.deadline == job.leader._waiting_text_at, names(count + 2)
    )  # fmt: skip
    yield "one that has finished leaves", ALL, job.sends(first, m.Left(first, "SIGTERM"))
    job.do(job.sends(name, m.Succeeded(name, 1)) for name in all_names[count // 2 :])
    job.do(job.sends(name, m.Left(name, "SIGTERM")) for name in all_names[1:FEW])  # the log keeps each
    (last,) = names(1, count + 1)
    job.close(last)
    for _ in range(FEW):
        yield "is back in a round that some have left", ONE, job.greets(last, past=busy())


def an_agent_receives_nothing(count: int) -> Iterator[Measured]:
    all_names = names(count)
    job = running(count, own=all_names[0], is_replaceable=True)
    silent_at = job.now + LEASE_S
    while (job.leader.deadline or 0.0) < silent_at:
        job.pass_deadline()
        job.live(all_names[:1])
    yield "it stands back", ALL, job.due()
    assert job.leader.has_stepped_down
    job = running(count)
    yield "a coordinator is cut off", ALL, Act(job.coordinator, CutOff(), job.now)


def few_of_many_vote(count: int) -> Iterator[Measured]:
    """A round of many agents of which a few vote: their reports about the log, and how entries are committed."""
    all_names = names(count)
    voters, (first, second, *_), others = all_names[:VOTERS], all_names, all_names[VOTERS : VOTERS + FEW]
    job = running(count, own=all_names[0], do_nodes_vote=True)
    entry = job.leader.log.node.committed
    assert isinstance(entry, Entry) and [*entry.voters] == voters
    yield from job.each("is alive", voters, lambda name: job.sends(name, m.Alive()))
    yield from job.each("reports", others, lambda name: job.sends(name, job.reports.of[name]))
    for _ in range(FEW):
        yield (
            "a plan is in the kernel's hands",
            ONE,
            job.act(ev.Flushed(job.conns[second], job.leader.followers._sent[second])),
        )
        yield "a campaign", ONE, job.act(ev.Campaigned(9, m.Campaign(1, entry.id, leader_at("x", "token of x"))))
    yield "a cordon is requested", ALL, job.sends(second, r.Ask(second, "ask", r.Verb.CORDON, "host-n9", 0.0, "fans"))
    assert job.is_pending()
    job.settle()
    assert not job.is_pending()
    yield "a higher term", ALL, job.act(ev.Campaigned(9, m.Campaign(TERM + 3, entry.id, leader_at("x", "token of x"))))
    yield "resigns", ALL, job.act(ev.Resigned())
    # A new leader, which reads that its own agent led before.
    kept = Node(first, TERM, first, committed=entry)
    stored = m.StoredCell(Cell(WORD, entry.log, TERM, "token of x", 3, entry), leader_at("x", "token of x"))
    others_: dict[str, Any] = {"own": first, "do_nodes_vote": True, "kept": kept, "stored": stored, "term": TERM + 1}
    job = Job((1, count), is_begun=False, has_listened=False, **others_)
    job.is_cell_silent = True
    yield "begins to campaign", ALL, Act(job.leader, ev.DeadlinePassed(), job.now)
    for _ in range(FEW):
        yield "learns of a higher term", ONE, Act(job.leader, ev.Declined(job.leader.term), job.now)
    for name in all_names[1:VOTERS]:
        job.logs[name] = Node(name, TERM, first, committed=entry)
    yield from job.each("votes", voters[1:2], lambda name: job.greets(name, past=busy()))
    yield "has enough votes", ALL, job.greets(voters[2], past=busy())
    assert job.coordinator.phase is Phase.GATHERING


def newcomers_come(count: int) -> Iterator[Measured]:
    job = running(count, room=count)
    newcomers = names(count, count)
    job.gather(newcomers[: -2 * FEW], starts=m.Starts.PREPARING)
    yield from job.each(
        "newcomer", newcomers[-2 * FEW : -FEW], lambda name: job.greets(name, starts=m.Starts.PREPARING)
    )
    yield from job.each(
        "newcomer has prepared", newcomers[:FEW], lambda name: job.sends(name, m.Prepared(name, m.Starts.WARM))
    )
    job.do(job.sends(name, m.Prepared(name, m.Starts.WARM)) for name in newcomers[FEW:-FEW])
    is_over = job.pass_until(lambda: job.coordinator.deadline in {None, job.leader.deadline}, names(2 * count - FEW))
    yield "newcomers end the round", ALL, is_over


def nothing_is_committed(count: int) -> Iterator[Measured]:
    """Reports of nodes wait while the endpoint is silent."""
    job, all_names = running(count, room=1), names(count)
    first, few = all_names[0], all_names[1 : 1 + FEW]
    job.is_cell_silent = True
    job.do([job.sends(first, r.Ask(first, "ask", r.Verb.CORDON, "host-n9", 0.0, "fans"))])  # type: ignore[arg-type]
    assert job.leader.log.proposal is not None
    for _ in range(2):
        job.do(job.greets(name, past=busy()) for name in few)
    yield from job.each("is back", few, lambda name: job.greets(name, past=busy()))
    job.do(job.sends(name, m.Succeeded(name, 1)) for name in all_names[:-1])
    yield "what has waited is decided", ALL, verdict_taken(job)


def kept(size: int, departed: int = 0) -> m.StoredCell:
    """The cell after a round of `size` nodes, the last of which had finished and left."""
    nodes = [node(name, address=f"10.0.{int(name[1:]) // 250}.1") for name in names(size)]
    ranks = tuple(range(size - departed, size))
    entry = first_entry(TERM, (), (), (WORD,), payload_of(JobState(round_of(7, TERM, nodes, "n0"), departed=ranks)))
    return m.StoredCell(Cell(WORD, entry.log, TERM, "", 3, entry))


def continuing(size: int, departed: int = 0) -> Job:
    return Job((1, size), stored=kept(size, departed), term=TERM + 1, has_listened=False)


def a_round_is_taken_over(count: int) -> Iterator[Measured]:
    size, past = 2 * count + FEW, busy(7)
    job, all_names = continuing(size, departed=count), names(count + FEW)
    assert job.coordinator.phase is Phase.GATHERING
    job.do(job.greets(name, past=past) for name in all_names[: -2 * FEW])
    yield from job.each("reports", all_names[-2 * FEW : -FEW], lambda name: job.greets(name, past=past))
    first, second, third, fourth = (all_names[FEW * part : FEW * (part + 1)] for part in range(4))
    yield from job.each("is ready", first, lambda name: job.sends(name, m.Ready(node(name))))
    yield from job.each("has succeeded", second, lambda name: job.sends(name, m.Succeeded(name, 7)))
    yield from job.each("fails", third, lambda name: job.sends(name, m.Failed(name, 7, FAILURE)))
    yield from job.each("leaves", fourth, lambda name: job.sends(name, m.Left(name, "SIGTERM")))
    yield "it continues without some", ALL, job.pass_until(
        lambda: job.coordinator.deadline in {None, job.leader.deadline}, all_names[: -FEW]
    )  # fmt: skip


def a_round_is_taken_over_whole(count: int) -> Iterator[Measured]:
    job, all_names = continuing(count), names(count)
    job.do(job.greets(name, past=busy(7)) for name in all_names[:-1])
    yield "the last one reports", ALL, job.greets(all_names[-1], past=busy(7))
    assert job.coordinator.phase is Phase.RUNNING
    job = Job((1, count), stored=kept(count), term=TERM + 1, has_listened=False, is_begun=False)
    yield "looks at the cell", ONE, job.act(ev.DeadlinePassed())
    yield "reads the cell", ALL, Act(job.leader, ev.CellAnswered(job.stored), job.now)


def agents_want_ranks(count: int) -> Iterator[Measured]:
    job = Job((count + FEW + 1, count + FEW + 1))
    for number, name in enumerate(names(count)):
        job.gather([name], rank=number)
    yield from job.each(
        "wants a rank that is taken", names(FEW, count), lambda name: job.greets(name, rank=int(name[1:]) % FEW)
    )
    job = Job((2, 2 * count))
    job.gather(names(count + 1), rank=0)
    yield "agents with one rank are distinguished", ALL, job.sends("n0", m.Alive())


# A node.

NOW, WALL, LATE = 100.0, 5000.0, 1100.0
HANGS = ProcessFailure.from_elsewhere("host", 4, 0, 77, 1, "ValueError", "", 1000)
STOPPED = m.Interrupted(1, decided.lost("n0", "silent for 5 s"))


def group_of(count: int, *events: Any) -> WorkerGroup:
    group = WorkerGroup(WorkerSpec(entrypoint="train.py", local_world_size=count))
    for event in events:
        group.handle(event, NOW)
    return group


def working(count: int, *events: Any) -> WorkerGroup:
    assigned = m.Assigned(1, 0, NodeRanks(0, 1, 0, count, 0, count, count), "host", 29500)
    return group_of(count, g.Start(), assigned, g.Spawned(1, {}), *events)


def workers_start_and_end(count: int) -> Iterator[Measured]:
    assigned = m.Assigned(1, 0, NodeRanks(0, 1, 0, count, 0, count, count), "host", 29500)
    group = group_of(count)
    yield "start", ALL, Act(group, g.Start(), NOW)
    yield "workers must be started", ALL, Act(group, assigned, NOW)
    yield "workers are started", ALL, Act(group, g.Spawned(1, dict.fromkeys(range(count), 7)), NOW)
    yield "workers are to save", ALL, Act(group, g.Drained(1, (0, 1), NOW + 60), NOW)
    for rank in range(FEW):
        yield "succeeds", ONE, Act(group, g.Exited(1, rank, failure=None), NOW)
    for rank in range(FEW):
        yield "is gone", ONE, Act(group, g.Cleared(1, rank), NOW)
    yield "one fails", ALL, Act(group, g.Exited(1, FEW, HANGS), NOW)
    for rank in range(FEW + 1, 2 * FEW):
        yield "ends since it is stopped", ONE, Act(group, g.Exited(1, rank, HANGS), NOW)
    for rank in range(FEW + 1, 2 * FEW):
        yield "that was stopped is gone", ONE, Act(group, g.Cleared(1, rank), NOW)
    group = working(count)
    for rank in range(count - FEW):
        group.handle(g.FoundUnhealthy(1, rank, HANGS, 15), NOW)
    for rank in range(count - FEW, count):
        yield "hangs as well", ONE, Act(group, g.FoundUnhealthy(1, rank, HANGS, 15), NOW)
    group = group_of(count, g.Start(), assigned, STOPPED)
    yield "no worker is started", ALL, Act(group, g.SpawnCancelled(1), NOW)
    yield "another round", ALL, Act(working(count), STOPPED, NOW)
    yield "to wait cannot help", ALL, Act(working(count, STOPPED), g.GraceOver(1, "idle"), NOW)
    yield "the verdict", ALL, Act(working(count), m.Ended(m.Outcome.FAILED, decided.refused(0, decided.failed(4))), NOW)
    yield from workers_recover_in_place(count)
    yield "workers must be started ahead", ALL, Act(group_of(count, g.Start()), m.StartAhead(), NOW)
    group = working(count)
    yield "the agent leaves", ALL, Act(group, g.StopRequested(), NOW)
    yield "workers are killed", ALL, Act(group, g.DeadlinePassed(), LATE)
    grace = RestartGrace({rank: rank for rank in range(count)}, NOW)
    yield "workers must be looked at", ALL, Act(grace, g.DeadlinePassed(), LATE)
    yield "workers are looked at", ALL, Act(grace, Looked({rank: Sample(0) for rank in range(count)}), LATE)


def workers_recover_in_place(count: int) -> Iterator[Measured]:
    """Each message of one worker makes the agent check whether the others of its node have sent theirs."""
    group, ranks = working(count), range(count)
    for rank in ranks[FEW:]:
        group.handle(g.Ready(1, rank, 0, -1), NOW)
    for rank in ranks[:FEW]:
        yield "opts in", ALL, Act(group, g.Ready(1, rank, 0, -1), NOW)
    yield "has the state", ALL, Act(group, g.Shared(1, 0, 0, 1, 9, 1), NOW)
    yield "is done", ALL, Act(group, g.Done(1, 0, 0, 1), NOW)
    group.handle(g.Exited(1, 0, HANGS), NOW)
    group.handle(STOPPED.replace(in_place=True), NOW)
    group.handle(g.Cleared(1, 0), NOW)
    yield "is replaced", ALL, Act(group, g.Replaced(1, 0, 7), NOW)
    for rank in ranks[1:]:
        yield "has left the round", ALL, Act(group, g.Ready(1, rank, 0, 1), NOW)
    yield (
        "no rank has a state",
        ALL,
        Act(working(count, *(g.Ready(1, rank, 0, -1) for rank in ranks)), g.StateLost(1, 0, 0, 1), NOW),
    )


def workers_are_watched(count: int) -> Iterator[Measured]:
    rules = hang_rules.HangDetector(HangRules(), stuck_timeout_s=60.0)
    yield "begin", ALL, Act(rules, hang_rules.Began(tuple(range(count))), NOW)
    samples = {rank: hang_rules.Sample(sleep=1) for rank in range(count)}
    yield "looked at", ALL, Act(rules, hang_rules.Looked(samples, LATE), LATE)
    for rank in range(FEW):
        yield "ends", ONE, Act(rules, hang_rules.Ended(rank), LATE)


def timer(number: int, at: float, pid: int = 7) -> timer_rules.DataReceived:
    text = f'{{"version": 1, "pid": {pid}, "scope_id": "{number}", "expiration_time": {at}, "signal": 9}}\n'
    return timer_rules.DataReceived(text.encode(), WALL)


def timers_run(count: int) -> Iterator[Measured]:
    timers = timer_rules.Timers()
    yield "begin", ALL, Act(timers, timer_rules.Started(1, {7: 0}), NOW)
    for number in range(count):
        timers.handle(timer(number, WALL + 60 + number), NOW)
    for number in range(FEW):
        yield "is set", ONE, Act(timers, timer(9000 + number, WALL + 3000), NOW)
    for number in range(FEW):
        yield "is cleared", ONE, Act(timers, timer(count - 1 - number, -1.0), NOW)
    for pid in range(100, 100 + FEW):
        timers.handle(timer(0, WALL + 60, pid), NOW)
        yield "is a worker's", ONE, Act(timers, timer_rules.Belongs(1, pid, 0), NOW)
    for number in range(FEW):
        yield "expires", ONE, Act(timers, timer_rules.DeadlinePassed(), NOW + 60 + number)
    yield "all expire", ALL, Act(timers, timer_rules.DeadlinePassed(), LATE + WALL)
    yield "a worker ends", ALL, Act(timers, timer_rules.Ended(1, 0), LATE + WALL)
    yield (
        "the next generation",
        ALL,
        Act(timers, timer_rules.Started(2, {pid: pid for pid in range(count)}), LATE + WALL),
    )


def in_a_large_job(count: int) -> member.Story:
    """An agent of a job with `count` more nodes: it votes, and knows the whole entry."""
    there, size = member.following(), count + 2
    there.core.terms = there.core.terms.replace(max_nodes=size)
    ranks = member.RANKS.replace(group_world_size=size, world_size=2 * size, role_world_size=2 * size)
    entry = member.after(member.FIRST, *member.VOTERS, payload=payload_of(JobState(round_of(2, 4, nodes_of(size), ""))))
    there.handle(me.Received(1, member.WELCOME.replace(log=member.of_log(proposal=entry))))
    assigned = member.assigned(2).replace(ranks=ranks)
    there.handle(me.Received(1, member.RUNS.replace(log=member.of_log(committed=entry), assigned=assigned)))
    assert there.node.committed == entry and there.core.state.round == 2
    return there


def nodes_of(size: int) -> list[m.Node]:
    return [node(name, address="10.0.0.1") for name in names(size)]


def an_agent_in_a_large_job(count: int) -> Iterator[Measured]:
    lost = me.ConnectionLost(1, "connection closed", Close.ABORTED)
    at = member.leader_at("other", 9)
    searches: list[tuple[str, me.Event]] = [
        ("reads the cell", me.CellAnswered(member.stored())),
        ("cannot read the cell", me.CellFailed("no answer")),
        ("learns who leads", me.Declined(9, at)),
        ("gets a request for its vote", me.Campaigned(7, member.campaign(term=9))),
    ]
    for name, event in searches:
        there = in_a_large_job(count)
        yield "a heartbeat", ONE, Act(there.core, me.Received(1, m.Heartbeat(True)), there.now)
        yield "its plan changes", ONE, Act(there.core, me.Received(1, there.planned(m.Waiting("x"))), there.now)
        yield "has succeeded", ONE, Act(there.core, me.Submitted(m.Succeeded("me", 2)), there.now)
        yield "is due", ONE, Act(there.core, me.DeadlinePassed(), there.core.deadline or there.now)
        yield "loses the leader", ONE, Act(there.core, lost, there.now)
        yield name, ONE, Act(there.core, event, there.now)
    there = in_a_large_job(count)
    there.handle(lost)
    conn = there.core.conn
    yield "is connected", ONE, Act(there.core, me.Connected(conn), there.now)
    there = in_a_large_job(count)
    there.handle(lost)
    yield "does not reach it", ONE, Act(there.core, me.ConnectFailed(there.core.conn, True, "refused"), there.now)
    there = member.campaigning()
    yield "leads", ONE, Act(there.core, me.Leading(member.leader_at("me", 9), 9), there.now)
    kept_ = Node("me", 9, committed=in_a_large_job(count).node.committed)
    yield "leads no longer", ONE, Act(there.core, me.LeadershipLost(kept_, "me-9", "it is displaced"), there.now)


LIVES: list[Life] = [
    a_round_forms, agents_fall_silent, an_agent_receives_nothing, a_round_begins_is_asked_and_drained,
    a_round_fails_the_next_succeeds, a_round_that_is_over_loses_agents, a_round_ends_in_other_ways, the_job_fails,
    agents_finish_and_leave, newcomers_come, nothing_is_committed, few_of_many_vote, a_round_is_taken_over,
    a_round_is_taken_over_whole, agents_want_ranks, workers_start_and_end, workers_are_watched, timers_run, an_agent_in_a_large_job,
]  # fmt: skip
