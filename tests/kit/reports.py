"""Reports of nodes in tests: a status for each node, which changes with its actions and the messages it receives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aelastic.rdzv.leader.coordinator import Coordinator
from aelastic.rdzv.leader.coordinator_events import Event, Lost, Reported
from aelastic.rdzv.ledger import Reached
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r

WORKERS = m.NodePhase.BUSY, m.NodePhase.STOPPING


@dataclass
class Reports:
    """The statuses of all nodes of a test, by name."""

    of: dict[str, m.Status] = field(default_factory=dict)
    earlier: dict[str, m.Status] = field(default_factory=dict)  # before the last message to a node
    looks: dict[str, int] = field(default_factory=dict)  # the number of the last `m.Look` that each received
    known: set[str] = field(default_factory=set)  # nodes that are connected and have reported

    def connects(self, node: m.Node, past: m.Past) -> Reported:
        """A node connects, for the first time or again."""
        before = self.of.get(node.node_id)
        counts = (0, 0) if before is None else (before.ready_count, before.prepared_count)
        status = self.of[node.node_id] = m.Status(node, past, *counts)
        self.known.add(node.node_id)
        return Reported(node, status, True)

    def ready(self, node: m.Node, reached: Reached | None = None, after: int | None = None) -> Reported:
        """No worker of a node runs; `after` is as in `m.Ready`."""
        before = self.of.get(node.node_id)
        if before is not None and after is not None and after < before.past.round:
            return self._now(node.node_id)
        if before is None or node.node_id not in self.known:
            self.connects(node, m.Past(m.NodePhase.READY) if before is None else before.past)
            return self._now(
                node.node_id, is_new=True, past=self._past(node.node_id, m.NodePhase.READY, reached), node=node
            )
        return self._now(
            node.node_id,
            past=self._past(node.node_id, m.NodePhase.READY, reached),
            node=node,
            ready_count=before.ready_count + 1,
        )

    def prepared(self, name: str, starts: m.Starts) -> Reported:
        status = self.of[name]
        return self._now(name, node=status.node.replace(starts=starts), prepared_count=status.prepared_count + 1)

    def opted_in(self, name: str, round_: int) -> Reported:
        past = self.of[name].past
        return self._now(name, past=past.replace(has_opted_in=past.has_opted_in or past.round == round_))

    def failed(
        self, name: str, round_: int, failure: Any, age_s: float = 0.0, reached: Reached | None = None
    ) -> Reported:
        past = self.of[name].past
        if past.round != round_ or past.phase not in WORKERS or past.failure is not None:
            return self._now(name)  # of an earlier round
        phase = m.NodePhase.FAILED if past.phase is m.NodePhase.BUSY else past.phase
        return self._now(name, past=past.replace(phase=phase, failure=failure, failure_age_s=age_s, reached=reached))

    def succeeded(self, name: str, round_: int) -> Reported:
        past = self.of[name].past
        is_running = past.round == round_ and past.phase is m.NodePhase.BUSY
        return self._now(name, past=past.replace(phase=m.NodePhase.FINISHED) if is_running else past)

    def left(self, name: str, reason: str) -> Reported:
        return self._now(name, left=m.Left(name, reason))

    def asked(self, name: str, ask: r.Ask) -> Reported:
        return self._now(name, asks=(*self.of[name].asks, ask))

    def updated(self, name: str, **fields: Any) -> Reported:
        return self._now(name, **fields)

    def hangs(self, name: str, question: m.Hangs) -> Reported:
        before = self.of[name].question
        return self._now(name, question=question.replace(number=1 if before is None else before.number + 1))

    def saw(self, name: str, places: m.Saw) -> Reported:
        return self._now(name, places=places.replace(number=self.looks.get(name, 0)))

    def repeats(self, name: str) -> Reported:
        """A node sent its status again before it could read the last message to it."""
        status = self.earlier[name]
        return Reported(status.node, status)

    def receives(self, name: str, message: Any) -> None:
        """A node receives a message."""
        if name not in self.of:
            return
        status = self.earlier[name] = self.of[name]
        past = status.past
        match message:
            case m.Assigned() if message.fence <= past.fence:
                pass  # it takes part in that round, or did so
            case m.Assigned(round_):
                part = m.Past(m.NodePhase.BUSY, round_, message.term)
                part = part.replace(has_opted_in=status.node.starts is m.Starts.READY)
                self.of[name] = status.replace(past=part, frozen=None, saved=None, question=None, places=None)
            case m.Interrupted(round_) if round_ == past.round and past.phase is not m.NodePhase.READY:
                self.of[name] = status.replace(past=past.replace(phase=m.NodePhase.STOPPING))
            case m.StartAhead():
                self.of[name] = status.replace(node=status.node.replace(starts=m.Starts.PREPARING))
            case m.Look():
                self.looks[name] = message.number
            case r.Answer(ask_id):
                self.of[name] = status.replace(asks=tuple(each for each in status.asks if each.ask_id != ask_id))
            case _:
                pass

    def goes(self, name: str) -> None:
        """A node is lost: its next message comes over another connection."""
        self.known.discard(name)

    def _past(self, name: str, phase: m.NodePhase, reached: Reached | None) -> m.Past:
        past = self.of[name].past
        return past.replace(phase=phase, reached=reached or past.reached) if past.round else past

    def _now(self, name: str, *, is_new: bool = False, **changes: Any) -> Reported:
        status = self.of[name] = self.of[name].replace(**changes)
        return Reported(status.node, status, is_new)

    def submit(self, core: Coordinator, message: m.NodeMessage | Event, now: float) -> list[Any]:
        """What a leader sends when a node submits a message or an event arrives; nodes read it at once."""
        event = message if isinstance(message, Event) else self.reported(message)
        sends = core.handle(event, now)
        for send in sends:
            self.receives(send.node_id, send.message)
        if isinstance(message, m.Left | Lost):
            self.goes(message.node_id)
        return sends

    def status_after(self, message: m.NodeMessage) -> m.Status:
        """The status of a node after its supervisor submitted a message."""
        return self.reported(message).status

    def reported(self, message: m.NodeMessage) -> Reported:  # noqa: C901  one case for each message
        """The report of a node after its supervisor submitted a message."""
        match message:
            case m.Ready(node, reached):
                return self.ready(node, reached)
            case m.Prepared(name, starts):
                return self.prepared(name, starts)
            case m.OptedIn(name, round_):
                return self.opted_in(name, round_)
            case m.Failed(name, round_, failure, age_s, reached):
                return self.failed(name, round_, failure, age_s, reached)
            case m.Succeeded(name, round_):
                return self.succeeded(name, round_)
            case m.Left(name):
                return self.updated(name, left=message)
            case m.Hangs(name):
                return self.hangs(name, message)
            case m.Saw(name):
                return self.saw(name, message)
            case r.Frozen(name):
                return self.updated(name, frozen=message)
            case r.Saved(name):
                return self.updated(name, saved=message)
            case r.Ask(name):
                return self.asked(name, message)
            case _:
                raise AssertionError(message)


@dataclass
class Job:
    """A `Coordinator`, and nodes that read its messages at once."""

    core: Coordinator
    nodes: Reports = field(default_factory=Reports)

    def handle(self, message: m.NodeMessage | Event, now: float) -> list[Any]:
        """What the leader sends when a node submits a message or an event arrives."""
        return self.nodes.submit(self.core, message, now)

    def connect(self, node: m.Node, past: m.Past, now: float) -> list[Any]:
        """What the leader sends when a node with a past connects."""
        return self.handle(self.nodes.connects(node, past), now)


def news(before: m.Plan | None, plan: m.Plan) -> list[Any]:
    """The news in a plan, compared with the previous one on the same connection; the first one is a welcome."""
    found: list[Any] = []
    if before is None or before.term != plan.term:
        found.append(f"welcome to term {plan.term}")
    answered = {} if before is None else {each.ask_id: each for each in before.answers}
    found += [each for each in plan.answers if answered.get(each.ask_id) != each]
    if plan.starts_ahead and (before is None or plan.starts_ahead != before.starts_ahead):
        found.append(m.StartAhead(plan.starts_ahead))
    for name in ("assigned", "interrupted", "settled", "waiting", "look", "compared", "notice", "cordoned", "ended"):
        value = getattr(plan, name)
        if value is not None and (before is None or value != getattr(before, name)):
            found.append(value)
    return found
