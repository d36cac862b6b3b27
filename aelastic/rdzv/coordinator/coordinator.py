"""The coordinator: who takes part in the next round, when it begins, and when the job is over.

One per job.  It decides alone: rounds, ranks, restarts, verdict.  It reads no clock and no network:
whoever hosts it feeds `handle` with what nodes say (and `Lost` when one stops saying anything),
delivers what it returns, and sends `DeadlinePassed` when `deadline` has come.

- **Forming**: nodes gather.  The first round closes at `max_nodes` at once, at `min_nodes` after the
  last call.  A later one closes when every node of the last round that still lives is ready
  again; it waits for nobody else, but takes in whoever waits already.
- **Running**: a failure interrupts the round and pays one restart, or is final and ends the job; a lost
  node or a newcomer that fits interrupts it for free.  A newcomer that does not fit waits as a spare.
- **Recovering**: this coordinator is new, the round is older than it.  Nodes register with their past until
  each seat of that round is taken, or given up; a round that has lost nobody goes on untouched.
- **Closed**: the verdict is final; whoever asks is told.

All or nothing: a node whose workers have succeeded is not done before all nodes have.
Messages about an earlier round change nothing: node A fails in round 3, the coordinator interrupts
round 3, A's second worker fails on the way down, and its report must not cost round 4 a restart.
A node that comes back with a round that went on without it is a stray: it is told to stop, and nobody waits for it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import TypeAlias, assert_never

from aelastic.core.record import Record
from aelastic.failures.failure import ProcessFailure
from aelastic.rdzv.coordinator.restart_policy import RestartPolicy
from aelastic.rdzv.coordinator.takeover import Recovery
from aelastic.rdzv.coordinator.waiting_text import some_of, who_is_missing
from aelastic.rdzv.protocol.addresses import master_address
from aelastic.rdzv.protocol.messages import (
    Assigned,
    CoordinatorMessage,
    Departed,
    Ended,
    Failed,
    Interrupted,
    Left,
    Node,
    NodeMessage,
    Outcome,
    Past,
    Ready,
    Standing,
    Succeeded,
    Waiting,
)
from aelastic.rdzv.protocol.ranks import assign_ranks, order_nodes
from aelastic.rdzv.settings import JOIN_TIMEOUT_S, LAST_CALL_TIMEOUT_S, LEASE_S, SETTLE_TIME_S

# When the coordinator is lost, those who run and those who wait find the next one at the same time; a place that a
# spare comes too late for costs a second interruption.
SPARES_TIMEOUT_S = 1.0


class Registered(Record):
    """A node has come, or come back, and says where it stands."""

    node: Node
    past: Past
    knew_another: bool = False  # it was welcomed by a coordinator before us


class Lost(Record):
    """A node went away without a word: its connection closed for good, or its lease ran out."""

    node_id: str
    reason: str


class DeadlinePassed(Record): ...


Event: TypeAlias = Registered | NodeMessage | Lost | DeadlinePassed


class Send(Record):
    """Deliver a message to one node.  In order per node; a node that is gone is reported by `Lost`."""

    node_id: str
    message: CoordinatorMessage | Departed


class Phase(StrEnum):
    FORMING = auto()
    RUNNING = auto()
    RECOVERING = auto()
    CLOSED = auto()


@dataclass(slots=True)
class _Member:
    node: Node
    standing: Standing
    failure: ProcessFailure | None = None
    is_stray: bool = False  # stops the workers of a round that is not ours to speak of


@dataclass(slots=True)
class Coordinator:
    min_nodes: int
    max_nodes: int
    policy: RestartPolicy
    last_call_timeout_s: float = LAST_CALL_TIMEOUT_S
    join_timeout_s: float = JOIN_TIMEOUT_S
    settle_time_s: float = SETTLE_TIME_S
    recovery_timeout_s: float = LEASE_S
    own_node_id: str = ""  # of the agent that hosts us
    is_heir: bool = False  # the coordinator before us is known to be gone

    phase: Phase = Phase.FORMING
    round: int = 0  # the last one that was completed; 0: none yet
    restart_count: int = 0
    deadline: float | None = None
    _members: dict[str, _Member] = field(default_factory=dict[str, _Member])
    _counts: Counter[Standing] = field(default_factory=Counter[Standing])  # of members that are no strays
    # Of the last round, by group rank, with what they were told, if by us.
    _participants: dict[str, Assigned | None] = field(default_factory=dict[str, Assigned | None])
    _stable_ids: dict[int, str] = field(default_factory=dict[int, str])  # preferred rank to the node that asked for it
    _lost_hosts: dict[str, str] = field(default_factory=dict[str, str])  # of the last round: host to reason
    _departed: set[int] = field(default_factory=set[int])  # group ranks of the round that finished, and have left
    _recovery: Recovery | None = None
    _newest_round: int = 0  # that anybody has told of
    _forming_since: float | None = None
    _join_by: float | None = None
    _last_call: float | None = None
    _recall_until: float | None = None  # so long a round that is older than we are may yet show itself
    _spares_until: float | None = None  # so long spares of a round that is older than we are may yet come
    _verdict: Ended | None = None
    _story: deque[tuple[float, int, Phase, Event, Phase]] = field(default_factory=lambda: deque(maxlen=64))

    @property
    def is_closed(self) -> bool:
        return self.phase is Phase.CLOSED

    @property
    def has_lost_nodes(self) -> bool:
        """Whether nodes of the last round are gone that no later one has done without."""
        return bool(self._lost_hosts)

    @property
    def has_spares(self) -> bool:
        """Whether nodes wait for a place in the round that runs."""
        return self.phase is Phase.RUNNING and self._counts[Standing.READY] > 0

    @property
    def story(self) -> tuple[str, ...]:
        return tuple(
            f"{now:.3f} round {round_} {before} --{event!r}--> {after}"
            for now, round_, before, event, after in self._story
        )

    def handle(self, event: Event, now: float) -> list[Send]:
        before = self.phase
        sends = self._dispatch(event, now)
        self._story.append((now, self.round, before, event, self.phase))
        return sends

    def _dispatch(self, event: Event, now: float) -> list[Send]:
        match event:
            case Registered():
                if event.knew_another and not self.round and self._recall_until is None:
                    self._recall_until = now + self.recovery_timeout_s
                return self._on_registered(event.node, event.past, now)
            case Ready():
                return self._on_ready(event.node, now)
            case Failed():
                return self._on_failed(event, now)
            case Succeeded():
                return self._on_succeeded(event, now)
            case Left() | Lost():
                return self._on_gone(event.node_id, event.reason, now)
            case DeadlinePassed():
                return self._on_deadline_passed(now)
            case _:
                assert_never(event)

    # Who comes.

    def _on_registered(self, node: Node, past: Past, now: float) -> list[Send]:
        sends = self._replace_old_self(node, now)
        if self._verdict is not None:
            return [*sends, Send(node.node_id, self._verdict)]
        self._newest_round = max(self._newest_round, past.round)
        self.restart_count = max(self.restart_count, past.restart_count)
        if past.standing is Standing.FAILED and past.failure is None:
            past = past.replace(standing=Standing.STOPPING)  # no agent of ours says so
        has_seat = 0 <= past.group_rank < past.group_world_size <= self.max_nodes
        if past.round > self.round and has_seat and (self.phase is Phase.RECOVERING or not self.round):
            return sends + self._begin_recovery(past, now) + self._take_seat(node, past, now)
        if self.phase is Phase.RECOVERING and past.round == self.round:
            return sends + self._take_seat(node, past, now)
        return sends + self._catch_up(node, past, now)

    def _catch_up(self, node: Node, past: Past, now: float) -> list[Send]:
        """Puts a node that has been away, for a moment or for rounds, where it belongs."""
        assigned = self._participants.get(node.node_id)
        is_current = past.round == self.round and node.node_id in self._participants
        match past.standing:
            case Standing.READY if assigned is not None and past.round < self.round and self.phase is Phase.RUNNING:
                return [Send(node.node_id, assigned)]  # it was on its way when the connection broke
            case Standing.READY:
                return self._on_ready(node, now)
            case Standing.FINISHED if is_current and self.phase is Phase.RUNNING and node.node_id not in self._members:
                self._put(node, Standing.FINISHED)  # lost when its work was done, and not missed
                return []
            case _ if not is_current or node.node_id not in self._members or self._members[node.node_id].is_stray:
                self._put(node, Standing.STOPPING, is_stray=True)
                return [Send(node.node_id, self._interrupted(past.round, "it went on without this node"))]
            case _ if self.phase is Phase.FORMING:
                return [Send(node.node_id, self._interrupted(past.round, "it is over"))]  # said, but not heard
            case Standing.BUSY:
                return [Send(node.node_id, Departed(self.round, rank)) for rank in sorted(self._departed)]
            case Standing.STOPPING:
                return self._interrupt(f"{node.host} starts over", now)
            case Standing.FAILED:
                assert past.failure is not None
                return self._on_failed(Failed(node.node_id, past.round, past.failure), now)
            case Standing.FINISHED:
                return self._on_succeeded(Succeeded(node.node_id, past.round), now)
            case _:
                assert_never(past.standing)

    def _replace_old_self(self, node: Node, now: float) -> list[Send]:
        """A node that comes back under a new id need not wait until its old self is missed."""
        if node.preferred_rank is None or self.phase is Phase.CLOSED:
            return []
        old = self._stable_ids.get(node.preferred_rank)
        self._stable_ids[node.preferred_rank] = node.node_id
        if old is None or old == node.node_id or old not in self._members:
            return []
        reason = f"another agent came as node rank {node.preferred_rank} ({node.host})"
        told = Send(old, Ended(Outcome.REPLACED, reason))
        return [told, *self._on_gone(old, reason, now)]

    def _on_ready(self, node: Node, now: float) -> list[Send]:
        sends = self._replace_old_self(node, now)
        match self.phase:
            case Phase.CLOSED:
                assert self._verdict is not None
                return [*sends, Send(node.node_id, self._verdict)]
            case Phase.FORMING:
                self._put(node, Standing.READY)
                return sends + self._form(now)
            case Phase.RECOVERING:
                was_seated = self._recovery is not None and node.node_id in self._recovery.seats.values()
                self._put(node, Standing.READY)
                if was_seated and self._recovery is not None:
                    self._recovery.is_over = True
                return sends + self._recover_if_complete(now)
            case Phase.RUNNING if node.node_id in self._participants:
                # It lost its workers without saying so; its place in this round is empty.
                self._put(node, Standing.READY)
                return sends + self._interrupt(f"{node.host} starts over", now)
            case Phase.RUNNING:
                self._put(node, Standing.READY)
                return sends + self._welcome_newcomer(node, now)
            case _:
                assert_never(self.phase)

    def _welcome_newcomer(self, node: Node, now: float) -> list[Send]:
        """It is taken in when the settle time is over, or it is a spare."""
        if not self._room:
            return [self._tell_spare(node.node_id)]
        if self.deadline is None:
            self.deadline = now + self.settle_time_s
        return []

    def _tell_spare(self, node_id: str) -> Send:
        text = f"all {self.max_nodes} places are taken: this node is a spare, and replaces the next that is lost"
        return Send(node_id, Waiting(text))

    def _tell_spares(self) -> list[Send]:
        if self._room or not self._counts[Standing.READY]:
            return []
        return [self._tell_spare(i) for i, m in self._members.items() if m.standing is Standing.READY]

    # What happens to them.

    def _on_failed(self, event: Failed, now: float) -> list[Send]:
        member = self._members.get(event.node_id)
        if member is None or event.round != self.round or event.node_id not in self._participants:
            return []  # the round it speaks of is over already
        if self.phase is Phase.RECOVERING:
            self._put(member.node, Standing.FAILED, failure=event.failure)
            return []
        if self.phase is not Phase.RUNNING:
            return []  # likewise
        refusal = self.policy.refusal(self.restart_count, is_final=event.failure.is_final)
        where = f"rank {event.failure.rank} failed on {event.failure.host}"
        if refusal is not None:
            return self._close(Ended(Outcome.FAILED, f"{where}; {refusal}", event.failure))
        self.restart_count += 1
        return self._interrupt(f"{where}; restart {self.restart_count} of {self.policy.max_restarts}", now)

    def _on_succeeded(self, event: Succeeded, now: float) -> list[Send]:
        member = self._members.get(event.node_id)
        if member is None or event.round != self.round or event.node_id not in self._participants:
            return []  # the round it speaks of is over already, or it was lost meanwhile
        match self.phase:
            case Phase.RUNNING:
                self._put(member.node, Standing.FINISHED)
                return self._close_if_finished()
            case Phase.RECOVERING:
                self._put(member.node, Standing.FINISHED)
                return self._recover_if_complete(now)
            case Phase.FORMING | Phase.CLOSED:
                return []  # the round is over already
            case _:
                assert_never(self.phase)

    def _on_gone(self, node_id: str, reason: str, now: float) -> list[Send]:
        member = self._remove(node_id)
        if member is None:
            return []  # never seen, or told twice
        was_finished = member.standing is Standing.FINISHED
        if node_id in self._participants and not was_finished:
            self._lost_hosts[member.node.host] = reason
        match self.phase:
            case Phase.CLOSED:
                return []
            case Phase.FORMING:
                return self._form(now)
            case Phase.RECOVERING:
                return self._give_up_seat(node_id, now, was_finished=was_finished)
            case Phase.RUNNING if node_id not in self._participants or member.is_stray:
                return []  # a spare
            case Phase.RUNNING if was_finished:
                # Its work is done; it is missed only if the job restarts.
                return self._depart(node_id) + self._close_if_finished()
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
            case Phase.RECOVERING:
                return self._end_recovery(now)
            case Phase.RUNNING:  # the settle time is over
                self.deadline = None
                hosts = ", ".join(self._hosts_of_newcomers())
                return self._interrupt(f"{hosts} joins", now) if hosts and self._room else []
            case Phase.CLOSED:
                return []
            case _:
                assert_never(self.phase)

    # Members.

    def _put(
        self, node: Node, standing: Standing, *, failure: ProcessFailure | None = None, is_stray: bool = False
    ) -> None:
        self._remove(node.node_id)
        self._members[node.node_id] = _Member(node, standing, failure, is_stray)
        if not is_stray:
            self._counts[standing] += 1

    def _remove(self, node_id: str) -> _Member | None:
        member = self._members.pop(node_id, None)
        if member is not None and not member.is_stray:
            self._counts[member.standing] -= 1
        return member

    @property
    def _room(self) -> bool:
        return len(self._participants) < self.max_nodes

    def _hosts_of_newcomers(self) -> list[str]:
        return [
            m.node.host
            for node_id, m in self._members.items()
            if node_id not in self._participants and m.standing is Standing.READY
        ]

    # Moves.

    def _interrupted(self, round_: int, reason: str) -> Interrupted:
        return Interrupted(round_, reason, self.restart_count)

    def _interrupt(self, reason: str, now: float) -> list[Send]:
        """Ends the round; the next begins when everybody who lives is ready again."""
        self.phase = Phase.FORMING
        self._forming_since = now
        sends = []
        for node_id in self._participants:
            member = self._members.get(node_id)
            if member is not None and member.standing is not Standing.READY and not member.is_stray:
                self._put(member.node, Standing.STOPPING)
                sends.append(Send(node_id, self._interrupted(self.round, reason)))
        return sends + self._form(now)

    def _form(self, now: float) -> list[Send]:
        """Closes the round if its time has come; else arms the deadline that will."""
        if self._forming_since is None:
            self._forming_since = now
        if self._counts[Standing.STOPPING]:
            self.deadline = None  # a node of the last round is stopping its workers: that is bounded there
            return []
        if self._join_by is None:
            self._join_by = now + self.join_timeout_s
        ready_count = self._counts[Standing.READY]
        if ready_count < self.min_nodes:
            self._last_call, self.deadline = None, self._join_by
            return self._time_out() if now >= self._join_by else []
        if self.round == 0 and self._recall_until is not None and now < self._recall_until:
            # The story behind it: a spare becomes the coordinator, and the other spares are faster than those who run.
            self.deadline = self._recall_until
            return []
        if self._spares_until is not None and ready_count < self.max_nodes and now < self._spares_until:
            self.deadline = self._spares_until
            return []
        if self.round == 0 and ready_count < self.max_nodes:
            if self._last_call is None:
                self._last_call = now + self.last_call_timeout_s
            if now < self._last_call:
                self.deadline = self._last_call
                return []
        return self._begin_round()

    def _ready_nodes(self) -> dict[str, Node]:
        return {i: m.node for i, m in self._members.items() if m.standing is Standing.READY}

    def _begin_round(self) -> list[Send]:
        ready = self._ready_nodes()
        candidates = {node_id: (node.preferred_rank, node.host) for node_id, node in ready.items()}
        order = order_nodes(candidates, tuple(self._participants), self.max_nodes)
        nodes = [ready[node_id] for node_id in order]
        self.phase, self.deadline = Phase.RUNNING, None
        self._join_by = self._last_call = self._forming_since = self._spares_until = None
        self._lost_hosts = {}
        self.round = self._newest_round = max(self.round, self._newest_round) + 1
        table = assign_ranks([(node.role, node.local_world_size) for node in nodes])
        address, port = master_address(nodes), nodes[0].master_port
        coordinator_rank = order.index(self.own_node_id) if self.own_node_id in order else -1
        self._participants, self._departed = {}, set()
        sends = []
        for node, ranks in zip(nodes, table, strict=True):
            self._put(node, Standing.BUSY)
            assigned = Assigned(self.round, self.restart_count, ranks, address, port, coordinator_rank)
            self._participants[node.node_id] = assigned
            sends.append(Send(node.node_id, assigned))
        return sends + self._tell_spares()

    def _depart(self, node_id: str) -> list[Send]:
        """Tells the others that a node is done and gone, for who may coordinate after us."""
        rank = list(self._participants).index(node_id)
        self._departed.add(rank)
        return [Send(i, Departed(self.round, rank)) for i in self._participants if i in self._members]

    def _time_out(self) -> list[Send]:
        ready = self._ready_nodes()
        came = some_of([node.host for node in ready.values()])
        reason = f"{len(ready)} of at least {self.min_nodes} nodes came within {self.join_timeout_s:g} s: {came}"
        return self._close(Ended(Outcome.TIMED_OUT, reason))

    def _close_if_finished(self) -> list[Send]:
        if self._counts[Standing.BUSY]:
            return []
        return self._close(Ended(Outcome.SUCCEEDED, "every worker succeeded"))

    def _close(self, verdict: Ended) -> list[Send]:
        self.phase, self.deadline, self._verdict = Phase.CLOSED, None, verdict
        self._recovery = self._forming_since = None
        return [Send(node_id, verdict) for node_id in self._members]

    # A round that is older than we are.

    def _begin_recovery(self, past: Past, now: float) -> list[Send]:
        """Begins to gather the round a node comes from; who came with an older one is a stray."""
        old_round, self.round, self.phase = self.round, past.round, Phase.RECOVERING
        gone_rank = past.coordinator_rank if self.is_heir else -1
        self._recovery = Recovery(past.group_world_size, gone_rank)
        self.deadline = now + self.recovery_timeout_s
        self._join_by = self._last_call = None
        sends = []
        for node_id in self._participants:
            member = self._members.get(node_id)
            if member is not None and member.standing is not Standing.READY:
                self._put(member.node, Standing.STOPPING, is_stray=True)
                sends.append(Send(node_id, self._interrupted(old_round, "it went on without this node")))
        self._participants = {}
        return sends

    def _take_seat(self, node: Node, past: Past, now: float) -> list[Send]:
        recovery = self._recovery
        assert recovery is not None
        holder = recovery.seats.get(past.group_rank, node.node_id)
        if holder != node.node_id or not 0 <= past.group_rank < recovery.size:
            if past.standing is Standing.READY:
                return self._on_ready(node, now)
            self._put(node, Standing.STOPPING, is_stray=True)
            return [Send(node.node_id, self._interrupted(past.round, "its place is taken"))]
        recovery.seats[past.group_rank] = node.node_id
        recovery.given_up.discard(past.group_rank)
        recovery.departed.update(past.departed)
        recovery.counts[node.node_id] = past.restart_count
        recovery.has_spares |= past.has_spares
        recovery.is_over |= past.standing in {Standing.READY, Standing.STOPPING}
        self._participants[node.node_id] = None
        self._put(node, past.standing, failure=past.failure)
        return self._recover_if_complete(now)

    def _give_up_seat(self, node_id: str, now: float, *, was_finished: bool) -> list[Send]:
        assert self._recovery is not None
        self._recovery.give_up(node_id, was_finished=was_finished)
        return self._recover_if_complete(now)

    def _recover_if_complete(self, now: float) -> list[Send]:
        assert self._recovery is not None
        return self._end_recovery(now) if self._recovery.is_complete else []

    def _end_recovery(self, now: float) -> list[Send]:
        """Goes on with the round if it has lost nobody; else it is over, as if that had happened now."""
        recovery, self._recovery, self.deadline = self._recovery, None, None
        assert recovery is not None
        by_rank = [recovery.seats.get(rank, f"nobody {rank}") for rank in range(recovery.size)]
        self._participants, self._departed = dict.fromkeys(by_rank), recovery.departed
        self.phase = Phase.RUNNING
        if recovery.has_spares:
            self._spares_until = now + SPARES_TIMEOUT_S
        failed = [i for i in by_rank if i in self._members and self._members[i].standing is Standing.FAILED]
        for node_id in failed:
            if recovery.counts[node_id] == self.restart_count:  # else it was paid for under the coordinator before us
                failure = self._members[node_id].failure
                assert failure is not None
                return self._on_failed(Failed(node_id, self.round, failure), now)
        missing = recovery.missing
        if missing == [recovery.gone_rank]:
            return self._interrupt(f"the agent that coordinated is gone (group rank {missing[0]})", now)
        if missing:
            ranks = ", ".join(map(str, missing))
            return self._interrupt(f"group rank {ranks} did not come to the new coordinator", now)
        if recovery.is_over or failed:
            return self._interrupt("the round was over when the coordinator was lost", now)
        if self._hosts_of_newcomers() and self._room:
            self.deadline = now + self.settle_time_s
        return self._close_if_finished() or self._tell_spares()

    # For people.

    def roll_call(self, now: float) -> list[Send]:
        """Who is there and who is missing, for each node that waits."""
        match self.phase:
            case Phase.FORMING | Phase.RECOVERING:
                waiting_for, text = Standing.READY, self._who_is_missing(now)
            case Phase.RUNNING:
                waiting_for = Standing.FINISHED
                busy = [m.node.host for m in self._members.values() if m.standing is Standing.BUSY]
                text = f"finished; waiting for the workers of {some_of(busy)}"
            case Phase.CLOSED:
                return []
            case _:
                assert_never(self.phase)
        return [
            Send(i, Waiting(text)) for i, m in self._members.items() if m.standing is waiting_for and not m.is_stray
        ]

    def _who_is_missing(self, now: float) -> str:
        members = [m for m in self._members.values() if not m.is_stray]
        recovery = self._recovery
        return who_is_missing(
            here=[m.node for m in members if m.standing is Standing.READY],
            stopping=[m.node.host for m in members if m.standing is Standing.STOPPING],
            lost=self._lost_hosts,
            nodes=(self.min_nodes, self.max_nodes),
            waited_s=0.0 if self._forming_since is None else now - self._forming_since,
            is_first=self.round == 0,
            back=None if recovery is None else (self.round, len(recovery.seats), recovery.size),
        )
