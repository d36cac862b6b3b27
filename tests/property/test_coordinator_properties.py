"""The coordinator, with nodes that follow the protocol, crash, come back, and have slow connections."""

from __future__ import annotations

import copy
import re
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kit.effort import examples

from aelastic.errors import ProcessFailure
from aelastic.rdzv.leader.coordinator import Coordinator
from aelastic.rdzv.leader.coordinator_events import DeadlinePassed, Event, Lost, Reported, Send
from aelastic.rdzv.leader.first_cause import GRACE_S
from aelastic.rdzv.leader.roster import RoundRules
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.restart_policy import RestartPolicy

NODES = 6
# Settle time, further waiting for newcomers, then the last call or the join timeout.
DEADLINES_TO_AGREE = 4
FAILURE = ProcessFailure.from_elsewhere("host", 0, 0, 77, 1, "ValueError", "", 1000)


PHASES = {
    "ready": m.NodePhase.READY, "busy": m.NodePhase.BUSY, "failed": m.NodePhase.FAILED, "awaiting": m.NodePhase.FAILED,
    "stopping": m.NodePhase.STOPPING, "finished": m.NodePhase.FINISHED,
}  # fmt: skip


@dataclass
class FakeNode:
    """An agent that follows the protocol, written without looking at ours: it reports all its state on every change."""

    node_id: str
    host: str
    size: int
    preferred: int | None
    starts: m.Starts = m.Starts.COLD
    # ready, busy, failed (its workers are being stopped), stopping (likewise, for the next round), awaiting (the
    # answer to a failure), finished, ended; away: crashed or left
    phase: str = "ready"
    is_given_up: bool = False  # its workers were not stopped in time
    is_replaced: bool = False  # another agent took its name: its workers must end, and no node waits for that
    round: int = 0
    assigned: m.Assigned | None = None  # in that round
    has_failed: bool = False  # in that round
    is_in_place: bool = False  # its workers leave that round, and keep their processes
    shown_starts: m.Starts = m.Starts.COLD  # as in its status
    ready_count: int = 0
    prepared_count: int = 0
    is_known: bool = False  # it has reported something
    notified_count: int = 0  # restart count, when it learned that its round had ended
    up: deque[Event] = field(default_factory=deque)
    down: deque[m.LeaderMessage] = field(default_factory=deque)

    def report_ready(self) -> None:
        self.phase = "ready"
        if self.round and self.starts is m.Starts.PREPARING:
            self.starts = m.Starts.COLD  # it had enough time
        self.shown_starts, self.is_in_place = m.Starts.READY if self.is_in_place else self.starts, False
        self.ready_count += 1
        self.report()

    def report_prepared(self, starts: m.Starts) -> None:
        self.shown_starts = starts
        self.prepared_count += 1
        self.report()

    def report(self, left: m.Left | None = None) -> None:
        node = m.Node(
            self.node_id, self.host, "default", self.size, self.node_id, 29500, self.preferred, starts=self.shown_starts
        )
        past = m.Past(m.NodePhase.READY)
        if self.assigned is not None:
            failure = FAILURE if self.has_failed else None
            past = m.Past(PHASES[self.phase], self.round, self.assigned.term, failure)
        status = m.Status(node, past, self.ready_count, self.prepared_count, left=left)
        self.up.append(Reported(node, status, is_new=not self.is_known))
        self.is_known = True

    def leave(self) -> None:
        self.report(m.Left(self.node_id, "asked to"))
        self.phase = "away"

    def fail(self) -> None:
        self.phase, self.has_failed = "failed", True
        self.report()

    def finish(self) -> None:
        self.phase = "finished"
        self.report()

    @property
    def lives(self) -> bool:
        return self.phase not in {"away", "ended"}

    @property
    def has_workers(self) -> bool:
        return self.phase in {"busy", "failed", "stopping"}

    def receive(self, message: m.LeaderMessage) -> None:
        if self.phase == "away" or (self.phase == "ended" and self.is_given_up):  # its Ready crossed the verdict
            return
        assert self.phase != "ended", f"{message} after the end"
        match message:
            case m.Assigned():
                assert self.phase == "ready", f"assigned while {self.phase}"
                assert message.round > self.round
                self.phase, self.round, self.assigned, self.has_failed = "busy", message.round, message, False
            case m.Interrupted():
                assert message.round == self.round, "interruptions come in order"
                self.is_in_place = message.in_place and self.phase in {"busy", "failed", "stopping"}
                if self.phase in {"busy", "failed"}:
                    self.phase = "stopping"
                elif self.phase in {"stopping", "ready"}:  # again, if it is not charged after all
                    assert self.is_given_up or message.restart_count < self.notified_count, (
                        f"interrupted while {self.phase}"
                    )
                else:
                    assert self.phase in {"awaiting", "finished"}, f"interrupted while {self.phase}"
                    self.report_ready()
                self.notified_count = message.restart_count
            case m.Ended():
                self.phase = "ended"
            case m.Waiting():
                assert self.phase == "ready", f"told to wait while {self.phase}"
            case m.StartAhead():
                assert self.phase == "ready", f"told to start ahead while {self.phase}"
                self.report_prepared(m.Starts.READY)

    def workers_gone(self) -> None:
        if self.phase == "failed":
            self.phase = "awaiting"
        else:
            self.report_ready()


class Word(StrEnum):
    """The news in a status: its node sends one whenever something changes."""

    READY = auto()
    PREPARED = auto()
    FAILED = auto()
    SUCCEEDED = auto()
    LEFT = auto()
    LOST = auto()  # not reported, but noticed
    NOTHING = auto()


def word_of(event: Event, before: m.Status | None) -> Word:
    if isinstance(event, Lost):
        return Word.LOST
    if not isinstance(event, Reported):
        return Word.NOTHING
    status, past = event.status, event.status.past
    if status.left is not None:
        return Word.LEFT
    if before is None or status.ready_count != before.ready_count:
        return Word.READY
    if status.prepared_count != before.prepared_count:
        return Word.PREPARED
    if past == before.past:
        return Word.NOTHING
    words = {m.NodePhase.FAILED: Word.FAILED, m.NodePhase.FINISHED: Word.SUCCEEDED}
    return words.get(past.phase, Word.NOTHING)


@dataclass
class World:
    """A coordinator, nodes and connections, with independent bookkeeping."""

    core: Coordinator
    nodes: dict[str, FakeNode] = field(default_factory=dict)
    now: float = 0.0
    round: int = 0
    participants: tuple[str, ...] = ()
    paid: int = 0
    failures: dict[str, float] = field(default_factory=dict)  # this round's: when each node's first one arrived
    losses: list[tuple[float, str, str, bool]] = field(default_factory=list)  # when, node, how, had it work to do
    free_at: float | None = None  # when something else ended the round
    done: set[str] = field(default_factory=set)  # finished nodes
    known_ready: set[str] = field(default_factory=set)  # nodes whose last report to the coordinator was Ready
    ahead: set[str] = field(
        default_factory=set
    )  # of these, those that were asked to start ahead, and have not answered
    members: set[str] = field(default_factory=set)  # known nodes
    holders: dict[int, str] = field(default_factory=dict)  # rank to the node that requested it last
    verdict: m.Ended | None = None
    last_reports: dict[str, m.Status] = field(default_factory=dict)  # each node's last report, without ages
    failed_at: dict[tuple[str, int], float] = field(default_factory=dict)  # by node and round
    word: Word = Word.NOTHING  # the news in the current event

    def handle(self, event: Event) -> None:
        self.check_fence(event)
        self.word = word_of(event, self.last_reports.get(event.node.node_id) if isinstance(event, Reported) else None)
        replaced = self.replaced_by(event)
        self.note(event)
        was_running = self.core.phase == "running"
        before, version = self.core.state(self.now), self.core.version
        sends = self.core.handle(event, self.now)
        assert self.core.version > version or self.core.state(self.now) == before, "the log learns of each change"
        if (
            was_running
            and self.core.phase == "forming"
            and (isinstance(event, DeadlinePassed) or self.word is Word.READY)
        ):
            self.free_at = self.now
        if replaced is not None:
            assert any(send.node_id == replaced and isinstance(send.message, m.Ended) for send in sends)
            self.nodes[replaced].is_replaced = True
        self.check_sends(sends, event, replaced)
        is_enough = len(self.members - self.ahead) >= self.core.rules.min_nodes
        if self.round and self.members == self.known_ready and is_enough:
            assert self.core.phase != "forming", "a later round waits for no other node"

    def check_sends(self, sends: list[Send], event: Event, replaced: str | None) -> None:
        for send in sends:
            if isinstance(send.message, m.Interrupted) and send.message.went_on:
                assert isinstance(event, DeadlinePassed)
                self.nodes[send.node_id].is_given_up = True
        self.ahead |= {send.node_id for send in sends if isinstance(send.message, m.StartAhead)}
        closed_before = self.verdict
        if assigned := {s.node_id: s.message for s in sends if isinstance(s.message, m.Assigned)}:
            self.check_round(assigned)
        for send in sends:
            if closed_before:
                is_new = isinstance(event, Reported) and event.is_new
                assert isinstance(send.message, m.Ended) and is_new, "closed stays closed"
            self.check_send(send, sends, event, replaced)
            assert not isinstance(send.message, r.Answer | r.Show | r.Shown), "nobody has asked"
            self.nodes[send.node_id].down.append(send.message)

    def check_send(self, send: Send, sends: list[Send], event: Event, replaced: str | None) -> None:
        message = send.message
        match message:
            case m.Interrupted() if self.nodes[send.node_id].is_given_up:
                assert message.round in {self.round, self.round - 1}
            case m.Interrupted():
                assert message.round == self.round
                assert message.restart_count - self.paid in {0, 1}
                assert send.node_id in self.participants
            case m.Settled() | m.Waiting(kind=m.WaitKind.GIVEN_UP):
                assert send.node_id in self.known_ready | set(self.participants), "as it begins, or just before"
            case m.Waiting():
                self.check_waiting(send, sends, event, is_spare=message.kind is m.WaitKind.SPARE)
            case m.Ended(outcome=m.Outcome.REPLACED):
                assert self.word is Word.READY and send.node_id == replaced
                self.nodes[send.node_id].up.clear()  # its connection is closed, and pending messages are lost
            case m.Ended():
                if message.outcome is m.Outcome.FAILED and self.verdict is None:
                    assert self.is_charged and self.paid == self.core.policy.max_restarts
                self.verdict = self.verdict or message
                assert message == self.verdict, "two verdicts"
            case m.Assigned():
                pass  # `check_round` has checked them all

    def check_waiting(self, send: Send, sends: list[Send], event: Event, *, is_spare: bool) -> None:
        # Once when it arrives, and once for each round without it.
        comes = self.word is Word.READY and node_of(event) == send.node_id
        assert not is_spare or comes or any(isinstance(other.message, m.Assigned) for other in sends)
        assert sum(send == other for other in sends) == 1, "told once"
        assert send.node_id in self.known_ready and send.node_id not in self.participants
        assert is_spare == (len(self.participants) == self.core.rules.max_nodes or bool(self.done))

    @property
    def is_charged(self) -> bool:
        """Whether a failure and not a loss ended the round: the rule, in a few lines."""
        if not self.failures:
            return False
        node, first = min(self.failures.items(), key=lambda each: each[1])
        for at, gone, how, had_work in self.losses:
            is_own_leaving = how == "left" and gone == node
            if not is_own_leaving and at <= first + GRACE_S and (had_work or first <= at + GRACE_S):
                return False
        return self.free_at is None or first < self.free_at

    def replaced_by(self, event: Event) -> str | None:
        """The node that an agent replaces, because both request the same rank."""
        if not isinstance(event, Reported) or not event.is_new or self.verdict is not None:
            return None
        if event.node.preferred_rank is None:
            return None
        old = self.holders.get(event.node.preferred_rank)
        self.holders[event.node.preferred_rank] = event.node.node_id
        if old is None or old == event.node.node_id or old not in self.members:
            return None
        self.note_gone(old, "lost")
        return old

    def note_gone(self, node_id: str, how: str) -> None:
        if node_id in self.members and node_id in self.participants:
            self.losses.append((self.now, node_id, how, node_id not in self.done))
        self.members.discard(node_id)
        self.last_reports.pop(node_id, None)
        self.known_ready.discard(node_id)
        self.ahead.discard(node_id)

    def note(self, event: Event) -> None:
        node_id, round_ = node_of(event), 0
        if isinstance(event, Reported):
            self.last_reports[node_id], round_ = ageless(event.status), event.status.past.round
        match self.word:
            case Word.READY:
                self.known_ready.add(node_id)
                self.members.add(node_id)
                self.ahead.discard(node_id)
            case Word.PREPARED:
                self.ahead.discard(node_id)
            case Word.LEFT | Word.LOST:
                self.note_gone(node_id, "left" if self.word is Word.LEFT else "lost")
            case Word.FAILED if round_ == self.round and node_id in self.members & set(self.participants):
                self.failures.setdefault(node_id, self.now)
            case Word.SUCCEEDED if round_ == self.round and self.core.phase == "running":
                self.done.add(node_id)
            case _:
                pass

    def check_fence(self, event: Event) -> None:
        stale = isinstance(event, Reported) and self.last_reports.get(event.node.node_id) == ageless(event.status)
        early = isinstance(event, DeadlinePassed) and (self.core.deadline is None or self.now < self.core.deadline)
        if stale or early:
            before, trial = copy.deepcopy(self.core), copy.deepcopy(self.core)
            assert trial.handle(event, self.now) == []
            for core in (before, trial):
                core.roster.reported = {node_id: ageless(each) for node_id, each in core.roster.reported.items()}
            is_same = everything(trial) == everything(before) or rounded(trial) == rounded(before)
            assert is_same, f"{event} changed something"

    def check_round(self, received: dict[str, m.Assigned]) -> None:
        messages = list(received.values())
        self.round += 1
        self.paid += self.is_charged
        self.failures, self.losses, self.free_at, self.done = {}, [], None, set()
        assert {each.round for each in messages} == {self.round}
        assert {each.restart_count for each in messages} == {self.paid}
        assert self.core.rules.min_nodes <= len(received) <= self.core.rules.max_nodes
        assert set(received) <= self.known_ready
        for node in self.nodes.values():
            is_awaited = node.has_workers and not node.is_given_up
            assert not is_awaited or node.is_replaced, "two rounds alive at once"
        by_rank = sorted(received, key=lambda node_id: received[node_id].ranks.group_rank)
        assert [received[i].ranks.group_rank for i in by_rank] == list(range(len(received)))
        assert {each.ranks.group_world_size for each in messages} == {len(received)}
        ranks = [
            r
            for i in by_rank
            for r in range(received[i].ranks.first_rank, received[i].ranks.first_rank + self.nodes[i].size)
        ]
        assert ranks == list(range(len(ranks)))
        assert {each.ranks.world_size for each in messages} == {len(ranks)}
        assert {each.master_addr for each in messages} == {by_rank[0]}
        for rank, node_id in enumerate(self.participants):
            if node_id in received and rank < len(received):
                assert by_rank[rank] == node_id, "a survivor lost its rank"
        survivors = set(self.participants) & self.known_ready
        assert survivors <= set(received), "a survivor lost its place"
        self.participants = tuple(by_rank)
        self.known_ready -= set(received)
        self.ahead -= set(received)

    def deliver_up(self, node: FakeNode) -> None:
        event = node.up.popleft()
        if not node.is_replaced:  # its connection is closed
            self.handle(self.aged(event))

    def aged(self, event: Event) -> Event:
        """A node's report, with the age of its failure at the time of arrival."""
        if not isinstance(event, Reported) or event.status.past.failure is None:
            return event
        past = event.status.past
        failed_at = self.failed_at.setdefault((event.node.node_id, past.round), self.now)
        past = past.replace(failure_age_s=self.now - failed_at)
        return event.replace(status=event.status.replace(past=past))

    def deliver_all(self) -> None:
        while busy := [node for node in self.nodes.values() if node.up or node.down]:
            for node in busy:
                if node.down:
                    node.receive(node.down.popleft())
                if node.up:
                    self.deliver_up(node)

    @property
    def is_agreed(self) -> bool:
        """Every live node is in the round, is a spare, or knows the verdict."""
        living = [node for node in self.nodes.values() if node.lives]
        spares = [node for node in living if node.phase == "ready"]
        taking_part = [node for node in living if node.phase in {"busy", "finished"} and node.round == self.round]
        if len(spares) + len(taking_part) < len(living):
            return False
        if spares and len(self.participants) < self.core.rules.max_nodes and not self.done:
            return False
        return not living or any(node.phase == "busy" for node in living)


def node_of(event: Event) -> str:
    """The node of an event; empty for a timer's."""
    return event.node.node_id if isinstance(event, Reported) else getattr(event, "node_id", "")


class Cluster(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @initialize(
        low=st.integers(1, 3), more=st.integers(0, 3), max_restarts=st.integers(0, 2), early=st.integers(0, NODES)
    )
    def begin(self, low: int, more: int, max_restarts: int, early: int) -> None:
        self.max_restarts = max_restarts
        self.world = World(Coordinator(RoundRules(low, low + more), RestartPolicy(max_restarts)))
        for _ in range(early):
            self.come(1, None)

    def come(self, size: int, preferred: int | None, starts: m.Starts = m.Starts.COLD) -> None:
        self.count += 1
        used = {node.host for node in self.nodes}
        host = next(f"node{i}" for i in range(NODES) if f"node{i}" not in used)
        node = FakeNode(f"{host}-{self.count}", host, size, preferred, starts)
        self.world.nodes[node.node_id] = node
        node.report_ready()

    @property
    def nodes(self) -> list[FakeNode]:
        return [node for node in self.world.nodes.values() if node.lives]

    def some(self, data: Any, *phases: str) -> FakeNode | None:
        nodes = [node for node in self.nodes if not phases or node.phase in phases]
        return data.draw(st.sampled_from(nodes)) if nodes else None

    # Nodes.

    @precondition(lambda self: len(self.nodes) < NODES)
    @rule(size=st.integers(1, 3), preferred=st.none() | st.integers(0, 3), starts=st.sampled_from(m.Starts))
    def node_comes(self, size: int, preferred: int | None, starts: m.Starts) -> None:
        self.come(size, preferred, starts)

    @precondition(lambda self: any(node.starts is m.Starts.PREPARING for node in self.nodes))
    @rule(data=st.data())
    def node_is_prepared(self, data: Any) -> None:
        node = data.draw(st.sampled_from([node for node in self.nodes if node.starts is m.Starts.PREPARING]))
        node.starts = m.Starts.WARM
        node.report_prepared(node.starts)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), how=st.sampled_from(["crash", "leave"]))
    def node_goes(self, data: Any, how: str) -> None:
        node = self.some(data)
        assert node is not None
        if how == "leave":
            node.leave()
        else:
            node.phase = "away"
            node.up.append(Lost(node.node_id, "gone"))

    @precondition(lambda self: any(node.phase == "busy" for node in self.nodes))
    @rule(data=st.data())
    def worker_fails(self, data: Any) -> None:
        node = self.some(data, "busy")
        assert node is not None
        node.fail()

    @precondition(lambda self: any(node.phase == "busy" for node in self.nodes))
    @rule(data=st.data())
    def workers_succeed(self, data: Any) -> None:
        node = self.some(data, "busy")
        assert node is not None
        node.finish()

    @precondition(lambda self: any(node.phase in {"failed", "stopping"} for node in self.nodes))
    @rule(data=st.data())
    def workers_are_gone(self, data: Any) -> None:
        node = self.some(data, "failed", "stopping")
        assert node is not None
        node.workers_gone()

    @rule()
    def all_stopping_workers_are_gone(self) -> None:
        for node in self.nodes:
            if node.phase in {"failed", "stopping"}:
                node.workers_gone()

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def node_sends_its_status_again(self, data: Any) -> None:
        """As happens whenever something changes that does not affect rounds."""
        node = self.some(data)
        assert node is not None
        node.report()

    @precondition(lambda self: self.world.last_reports)
    @rule(data=st.data())
    def a_status_that_is_known_changes_nothing(self, data: Any) -> None:
        status = self.world.last_reports[data.draw(st.sampled_from(sorted(self.world.last_reports)))]
        self.world.check_fence(self.world.aged(Reported(status.node, status)))

    # Connections and clocks.

    @precondition(lambda self: any(node.up for node in self.world.nodes.values()))
    @rule(data=st.data())
    def message_goes_up(self, data: Any) -> None:
        self.world.deliver_up(data.draw(st.sampled_from([n for n in self.world.nodes.values() if n.up])))

    @precondition(lambda self: any(node.down for node in self.world.nodes.values()))
    @rule(data=st.data())
    def message_comes_down(self, data: Any) -> None:
        node = data.draw(st.sampled_from([n for n in self.world.nodes.values() if n.down]))
        node.receive(node.down.popleft())

    @rule()
    def all_messages_arrive(self) -> None:
        self.world.deliver_all()

    @precondition(lambda self: self.world.core.deadline is not None)
    @rule()
    def deadline_passes(self) -> None:
        deadline = self.world.core.deadline
        assert deadline is not None
        self.world.now = max(self.world.now, deadline)
        self.world.handle(DeadlinePassed())

    @rule(dt=st.floats(0, 10))
    def time_passes(self, dt: float) -> None:
        limit = self.world.core.deadline
        self.world.now = (
            self.world.now + dt if limit is None else max(self.world.now, min(self.world.now + dt, limit - 0.01))
        )
        self.world.handle(DeadlinePassed())

    # Invariants.

    @invariant()
    def the_budget_is_kept(self) -> None:
        assert self.world.paid <= self.max_restarts

    @invariant()
    def the_coordinator_waits_for_a_deadline_or_for_nodes(self) -> None:
        core = self.world.core
        if core.phase == "closed":
            assert core.deadline is None
            assert self.world.verdict is not None or not self.world.known_ready

    @invariant()
    def when_faults_stop_all_that_live_agree_within_some_deadlines(self) -> None:
        world = copy.deepcopy(self.world)
        for _ in range(DEADLINES_TO_AGREE):
            world.deliver_all()
            while stopping := [n for n in world.nodes.values() if n.phase in {"failed", "stopping"}]:
                for node in stopping:
                    node.workers_gone()
                world.deliver_all()
            if world.is_agreed:
                return
            deadline = world.core.deadline
            assert deadline is not None, "no agreement, and nothing that would lead to one"
            world.now = max(world.now, deadline)
            world.handle(DeadlinePassed())
        raise AssertionError(f"no agreement after {DEADLINES_TO_AGREE} deadlines")


def ageless(status: m.Status) -> m.Status:
    return status.replace(past=status.past.replace(failure_age_s=0.0))


def rounded(core: Coordinator) -> str:
    """Its whole state as text: times computed in another way differ in their last digits."""
    return re.sub(r"\d+\.\d+(e-\d+)?", lambda found: f"{float(found[0]):.6f}", repr(everything(core)))


def everything(core: Coordinator) -> dict[str, Any]:
    return {name: getattr(core, name) for name in Coordinator.__dataclass_fields__ if name != "_trace"}


Cluster.TestCase.settings = settings(
    max_examples=examples(120), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestCoordinatorAmongNodes = Cluster.TestCase
