"""The coordinator: who takes part in the next round, when it begins, and when the job is over.

One per job.  It decides alone: rounds, ranks, restarts, verdict.  It reads no clock and no network:
whoever hosts it feeds `handle` with what nodes say (and `Lost` when one stops saying anything),
delivers what it returns, and sends `DeadlinePassed` when `deadline` has come.

- **Forming**: nodes gather.  The first round closes at `max_nodes` at once, at `min_nodes` after the
  last call.  A later one closes when every node of the last round that still lives is ready
  again; it waits for nobody else, but takes in whoever waits already.
- **Running**: a failure interrupts the round and pays one restart; a lost node or a newcomer
  that fits interrupts it for free.  A newcomer that does not fit waits as a spare.
- **Closed**: the verdict is final; whoever asks is told.

All or nothing: a node whose workers have succeeded is not done before all nodes have.
Messages about an earlier round change nothing: node A fails in round 3, the coordinator interrupts
round 3, A's second worker fails on the way down, and its report must not cost round 4 a restart.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import TypeAlias, assert_never

from aelastic.policy import RestartPolicy
from aelastic.ranks import assign_ranks, order_nodes
from aelastic.rdzv.messages import (
    Assigned,
    CoordinatorMessage,
    Ended,
    Failed,
    Interrupted,
    Left,
    Node,
    NodeMessage,
    Outcome,
    Ready,
    Succeeded,
)
from aelastic.record import Record

# torch's `last_call_timeout` and `join_timeout`.
LAST_CALL_TIMEOUT_S = 30.0
JOIN_TIMEOUT_S = 600.0
# Nodes that a scheduler starts together arrive within this time of each other: one interruption for all.
SETTLE_TIME_S = 0.5


class Lost(Record):
    """A node went away without a word: its connection closed for good, or its lease ran out."""

    node_id: str
    reason: str


class DeadlinePassed(Record): ...


Event: TypeAlias = NodeMessage | Lost | DeadlinePassed


class Send(Record):
    """Deliver a message to one node.  In order per node; a node that is gone is reported by `Lost`."""

    node_id: str
    message: CoordinatorMessage


class Phase(StrEnum):
    FORMING = auto()
    RUNNING = auto()
    CLOSED = auto()


class Standing(StrEnum):
    """What a node does, as far as the coordinator knows."""

    READY = auto()  # waits for the next round
    BUSY = auto()  # its workers run, or are being stopped
    FINISHED = auto()  # its workers succeeded


@dataclass(slots=True)
class _Member:
    node: Node
    standing: Standing


@dataclass(slots=True)
class Coordinator:
    min_nodes: int
    max_nodes: int
    policy: RestartPolicy
    last_call_timeout_s: float = LAST_CALL_TIMEOUT_S
    join_timeout_s: float = JOIN_TIMEOUT_S
    settle_time_s: float = SETTLE_TIME_S

    phase: Phase = Phase.FORMING
    round: int = 0  # the last one that was completed; 0: none yet
    restart_count: int = 0
    deadline: float | None = None
    _members: dict[str, _Member] = field(default_factory=dict[str, _Member])
    _participants: tuple[str, ...] = ()  # of the last round, by group rank
    _join_by: float | None = None
    _last_call: float | None = None
    _verdict: Ended | None = None
    _story: deque[str] = field(default_factory=lambda: deque(maxlen=64))

    @property
    def story(self) -> tuple[str, ...]:
        return tuple(self._story)

    def handle(self, event: Event, now: float) -> list[Send]:
        before = self.phase
        sends = self._dispatch(event, now)
        self._story.append(f"{now:.3f} round {self.round} {before} --{event!r}--> {self.phase}")
        return sends

    def _dispatch(self, event: Event, now: float) -> list[Send]:
        match event:
            case Ready():
                return self._on_ready(event.node, now)
            case Failed():
                return self._on_failed(event, now)
            case Succeeded():
                return self._on_succeeded(event)
            case Left() | Lost():
                return self._on_gone(event.node_id, event.reason, now)
            case DeadlinePassed():
                return self._on_deadline_passed(now)
            case _:
                assert_never(event)

    def _on_ready(self, node: Node, now: float) -> list[Send]:
        match self.phase:
            case Phase.CLOSED:
                assert self._verdict is not None
                return [Send(node.node_id, self._verdict)]
            case Phase.FORMING:
                self._members[node.node_id] = _Member(node, Standing.READY)
                return self._form(now)
            case Phase.RUNNING if node.node_id in self._participants:
                # It lost its workers without saying so; its place in this round is empty.
                self._members[node.node_id] = _Member(node, Standing.READY)
                return self._interrupt(f"{node.host} starts over", now)
            case Phase.RUNNING:
                self._members[node.node_id] = _Member(node, Standing.READY)
                if self._room and self.deadline is None:
                    self.deadline = now + self.settle_time_s
                return []  # taken in when the settle time is over, or a spare
            case _:
                assert_never(self.phase)

    def _on_failed(self, event: Failed, now: float) -> list[Send]:
        if self.phase is not Phase.RUNNING or event.round != self.round or event.node_id not in self._participants:
            return []  # the round it speaks of is over already
        refusal = self.policy.refusal(self.restart_count)
        where = f"rank {event.failure.rank} failed on {event.failure.host}"
        if refusal is not None:
            return self._close(Ended(Outcome.FAILED, f"{where}; {refusal}", event.failure))
        self.restart_count += 1
        return self._interrupt(f"{where}; restart {self.restart_count} of {self.policy.max_restarts}", now)

    def _on_succeeded(self, event: Succeeded) -> list[Send]:
        member = self._members.get(event.node_id)
        if self.phase is not Phase.RUNNING or event.round != self.round or event.node_id not in self._participants:
            return []  # the round it speaks of is over already
        if member is None:
            return []  # it was lost meanwhile
        member.standing = Standing.FINISHED
        return self._close_if_finished()

    def _on_gone(self, node_id: str, reason: str, now: float) -> list[Send]:
        member = self._members.pop(node_id, None)
        if member is None:
            return []  # never seen, or told twice
        match self.phase:
            case Phase.CLOSED:
                return []
            case Phase.FORMING:
                return self._form(now)
            case Phase.RUNNING if node_id not in self._participants:
                return []  # a spare
            case Phase.RUNNING if member.standing is Standing.FINISHED:
                return self._close_if_finished()  # its work is done; it is missed only if the job restarts
            case Phase.RUNNING:
                return self._interrupt(f"{member.node.host} left: {reason}", now)
            case _:
                assert_never(self.phase)

    def _on_deadline_passed(self, now: float) -> list[Send]:
        if self.deadline is None or now < self.deadline:
            return []  # disarmed or moved while the event was on its way
        match self.phase:
            case Phase.FORMING:
                return self._form(now)
            case Phase.RUNNING:  # the settle time is over
                self.deadline = None
                hosts = ", ".join(m.node.host for i, m in self._members.items() if i not in self._participants)
                return self._interrupt(f"{hosts} joins", now) if hosts and self._room else []
            case Phase.CLOSED:
                return []
            case _:
                assert_never(self.phase)

    @property
    def _room(self) -> bool:
        return len(self._participants) < self.max_nodes

    def _interrupt(self, reason: str, now: float) -> list[Send]:
        """Ends the round; the next begins when everybody who lives is ready again."""
        self.phase = Phase.FORMING
        sends = []
        for node_id in self._participants:
            member = self._members.get(node_id)
            if member is not None and member.standing is not Standing.READY:
                member.standing = Standing.BUSY
                sends.append(Send(node_id, Interrupted(self.round, reason)))
        return sends + self._form(now)

    def _form(self, now: float) -> list[Send]:
        """Closes the round if its time has come; else arms the deadline that will."""
        ready = {i: m.node for i, m in self._members.items() if m.standing is Standing.READY}
        if len(ready) < len(self._members):
            self.deadline = None  # a node of the last round is stopping its workers: that is bounded there
            return []
        if self._join_by is None:
            self._join_by = now + self.join_timeout_s
        if len(ready) < self.min_nodes:
            self._last_call, self.deadline = None, self._join_by
            return self._time_out(ready) if now >= self._join_by else []
        if self.round == 0 and len(ready) < self.max_nodes:
            if self._last_call is None:
                self._last_call = now + self.last_call_timeout_s
            if now < self._last_call:
                self.deadline = self._last_call
                return []
        return self._begin_round(ready)

    def _begin_round(self, ready: dict[str, Node]) -> list[Send]:
        candidates = {node_id: (node.preferred_rank, node.host) for node_id, node in ready.items()}
        self._participants = order_nodes(candidates, self._participants, self.max_nodes)
        nodes = [ready[node_id] for node_id in self._participants]
        for node_id in self._participants:
            self._members[node_id].standing = Standing.BUSY
        self.phase, self.deadline, self._join_by, self._last_call = Phase.RUNNING, None, None, None
        self.round += 1
        table = assign_ranks([(node.role, node.local_world_size) for node in nodes])
        master = nodes[0]
        return [
            Send(
                node.node_id,
                Assigned(self.round, self.restart_count, ranks, master.master_addr, master.master_port),
            )
            for node, ranks in zip(nodes, table, strict=True)
        ]

    def _time_out(self, ready: dict[str, Node]) -> list[Send]:
        came = ", ".join(sorted(node.host for node in ready.values())) or "nobody"
        reason = f"{len(ready)} of at least {self.min_nodes} nodes came within {self.join_timeout_s:g} s: {came}"
        return self._close(Ended(Outcome.TIMED_OUT, reason))

    def _close_if_finished(self) -> list[Send]:
        standings = [self._members[i].standing for i in self._participants if i in self._members]
        if any(standing is not Standing.FINISHED for standing in standings):
            return []
        return self._close(Ended(Outcome.SUCCEEDED, "every worker succeeded"))

    def _close(self, verdict: Ended) -> list[Send]:
        self.phase, self.deadline, self._verdict = Phase.CLOSED, None, verdict
        return [Send(node_id, verdict) for node_id in self._members]
