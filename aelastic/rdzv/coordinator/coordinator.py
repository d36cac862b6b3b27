"""The coordinator, one per job: which nodes take part in the next round, when it begins, and when the job is over.

- **Forming**: nodes gather; `forming.py` says when the round begins.
- **Running**: a failure interrupts the round and pays one restart, or is final and ends the job; a lost
  node or a newcomer that fits interrupts it for free.  A newcomer that does not fit waits as a spare.
- **Taking over**: this coordinator is new, the round is older.  Nodes register with their past until each
  seat of that round is taken or given up (`takeover.py`); a round that has lost no node goes on untouched.
- **Closed**: the verdict is final; each node that asks gets it.

All or nothing: a node whose workers have succeeded is not done before all nodes have.
Messages about an earlier round change nothing: node A fails in round 3, the coordinator interrupts
round 3, A's second worker fails on the way down, and its report must not cost round 4 a restart.
A node that reconnects with a round that went on without it is a stray: it is told to stop, and no round waits for it.
Each `Ended` is for all nodes and the same for all, but `REPLACED`, which is for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import assert_never

from aelastic.core.machine import Machine, Story
from aelastic.failures.failure import ProcessFailure
from aelastic.rdzv.coordinator.coordinator_events import DeadlinePassed, Event, Lost, Registered, Send
from aelastic.rdzv.coordinator.forming import Forming, RoundRules, Step
from aelastic.rdzv.coordinator.restart_policy import RestartPolicy
from aelastic.rdzv.coordinator.returning import Return, credible, how_it_returns
from aelastic.rdzv.coordinator.roster import Roster, some_of
from aelastic.rdzv.coordinator.takeover import Takeover, has_seat
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.messages import Outcome, Standing

WENT_ON = "round {} went on without this node; rejoining"
RESTARTED = "the worker group of {} restarted on its own"


class Phase(StrEnum):
    FORMING = auto()  # nodes gather for the next round
    RUNNING = auto()  # a round runs
    TAKING_OVER = auto()  # nodes of a round that is older than this coordinator reconnect
    CLOSED = auto()  # there is a verdict


@dataclass(slots=True)
class Coordinator(Machine[Event, Send]):
    rules: RoundRules
    policy: RestartPolicy
    own_node_id: str = ""  # of the agent that this coordinator runs in
    is_heir: bool = False  # the coordinator before this one is known to be gone

    phase: Phase = Phase.FORMING
    round: int = 0  # the last one that was completed; 0: none yet
    newest_round: int = 0  # that any node has told of
    restart_count: int = 0
    deadline: float | None = None
    roster: Roster = field(default_factory=Roster)
    forming: Forming = field(init=False)
    takeover: Takeover | None = None  # of a round that is older than this coordinator
    verdict: m.Ended | None = None
    _story: Story = field(default_factory=Story)

    def __post_init__(self) -> None:
        self.forming = Forming(self.rules)

    @property
    def is_closed(self) -> bool:
        return self.phase is Phase.CLOSED

    def is_due(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline

    @property
    def has_spares(self) -> bool:
        """Whether nodes wait for a place in the round that runs."""
        return self.phase is Phase.RUNNING and self.roster.counts[Standing.READY] > 0

    def _dispatch(self, event: Event, now: float) -> list[Send]:
        match event:
            case Registered():
                return self._on_registered(event, now)
            case m.Ready():
                return self._on_ready(event, now)
            case m.Failed():
                return self._on_failed(event, now)
            case m.Succeeded():
                return self._on_succeeded(event, now)
            case m.Left() | Lost():
                return self._on_gone(event, now)
            case DeadlinePassed():
                return self._on_deadline_passed(event, now)
            case _:
                assert_never(event)

    # Nodes that connect.

    def _on_registered(self, event: Registered, now: float) -> list[Send]:
        node, past = event.node, credible(event.past)
        if event.knew_another and not self.round:
            self.forming.await_older_round(now)
        sends = self._replace_previous_agent(node, now)
        is_new = not self.round or self.phase is Phase.TAKING_OVER  # this coordinator has begun no round
        shows_round = is_new and past.round > self.round and has_seat(past, self.rules.max_nodes)
        if not self.is_closed:
            self.newest_round = max(self.newest_round, past.round)
            self.restart_count = max(self.restart_count, past.restart_count)
        match self.phase:
            case Phase.FORMING | Phase.TAKING_OVER if shows_round:  # that round is taken over
                return sends + self._begin_takeover(past, now) + self._take_seat(node, past, now)
            case Phase.TAKING_OVER if past.round == self.round:  # it takes its seat
                return sends + self._take_seat(node, past, now)
            case Phase.FORMING | Phase.RUNNING | Phase.TAKING_OVER:  # it hears what it has missed
                return sends + self._return(node, past, now)
            case Phase.CLOSED:  # it hears the verdict
                return sends + self._tell_verdict(node)
            case _:
                assert_never(self.phase)

    def _return(self, node: m.Node, past: m.Past, now: float) -> list[Send]:
        """A node reconnects that this coordinator may know: it hears what it has missed, or has news."""
        how = how_it_returns(node.node_id, past, self.roster, self.round, is_running=self.phase is Phase.RUNNING)
        match how:
            case Return.WAITS:
                return self._join(node, now)
            case Return.MISSED_ASSIGNMENT:
                assigned = self.roster.participants[node.node_id]
                return [Send(node.node_id, assigned)] if assigned is not None else []
            case Return.NOT_MISSED:
                self.roster.put(node, Standing.FINISHED)
                return []
            case Return.STRAY:
                was_awaited = self.roster.put_stray(node) and self.phase is Phase.FORMING
                stop = self._interrupted(node.node_id, past.round, WENT_ON.format(past.round))
                return [stop, *(self._form(now) if was_awaited else [])]
            case Return.MISSED_END:
                return [self._interrupted(node.node_id, past.round, f"round {past.round} has ended; rejoining")]
            case Return.RUNS:
                return [Send(node.node_id, m.Departed(self.round, rank)) for rank in sorted(self.roster.departed)]
            case Return.RESTARTED:
                return self._interrupt(RESTARTED.format(node.host), now)
            case Return.FAILED:
                assert past.failure is not None
                return self._on_failed(m.Failed(node.node_id, past.round, past.failure), now)
            case Return.FINISHED:
                return self._on_succeeded(m.Succeeded(node.node_id, past.round), now)
            case _:
                assert_never(how)

    def _replace_previous_agent(self, node: m.Node, now: float) -> list[Send]:
        """An agent that joins with the same --node-rank as one before takes its place: its loss is not waited for."""
        if node.preferred_rank is None or self.is_closed:
            return []
        if (old := self.roster.give_rank(node.preferred_rank, node.node_id)) is None:
            return []
        reason = f"another agent joined as node rank {node.preferred_rank} ({node.host})"
        return [Send(old, m.Ended(Outcome.REPLACED, reason)), *self._on_gone(Lost(old, reason), now)]

    def _on_ready(self, event: m.Ready, now: float) -> list[Send]:
        return self._replace_previous_agent(event.node, now) + self._join(event.node, now)

    def _join(self, node: m.Node, now: float) -> list[Send]:
        match self.phase:
            case Phase.FORMING:  # it takes part in the next round
                self.roster.put(node, Standing.READY)
                return self._form(now)
            case Phase.TAKING_OVER:  # it waits; if it has a seat, the round is over
                self.roster.put(node, Standing.READY)
                assert self.takeover is not None
                self.takeover.on_ready(node.node_id)
                return self._end_takeover_if_complete(now)
            case Phase.RUNNING if node.node_id in self.roster.participants:  # its place in the round is empty
                self.roster.put(node, Standing.READY)
                return self._interrupt(RESTARTED.format(node.host), now)
            case Phase.RUNNING:  # a newcomer, or a spare
                self.roster.put(node, Standing.READY)
                if self._has_room and self.deadline is None:
                    self.deadline = now + self.rules.settle_time_s
                return self._tell_spares([node.node_id])
            case Phase.CLOSED:  # it hears the verdict
                return self._tell_verdict(node)
            case _:
                assert_never(self.phase)

    @property
    def _has_room(self) -> bool:
        return len(self.roster.participants) < self.rules.max_nodes

    # What happens to nodes.

    def _on_failed(self, event: m.Failed, now: float) -> list[Send]:
        node = self.roster.participant(event.node_id)
        if node is None or event.round != self.round:
            return []  # the round it speaks of is over already
        match self.phase:
            case Phase.RUNNING:  # pays a restart, or ends the job
                return self._pay_restart(event.failure, now)
            case Phase.TAKING_OVER:  # decided when the takeover is complete
                self.roster.put(node, Standing.FAILED, failure=event.failure)
                return []
            case Phase.FORMING | Phase.CLOSED:
                return []  # the round is over already
            case _:
                assert_never(self.phase)

    def _on_succeeded(self, event: m.Succeeded, now: float) -> list[Send]:
        node = self.roster.participant(event.node_id)
        if node is None or event.round != self.round:
            return []  # the round it speaks of is over already, or it was lost meanwhile
        match self.phase:
            case Phase.RUNNING:  # the last one ends the job
                self.roster.put(node, Standing.FINISHED)
                return self._close_if_finished()
            case Phase.TAKING_OVER:
                self.roster.put(node, Standing.FINISHED)
                return self._end_takeover_if_complete(now)
            case Phase.FORMING | Phase.CLOSED:
                return []  # the round is over already
            case _:
                assert_never(self.phase)

    def _on_gone(self, event: m.Left | Lost, now: float) -> list[Send]:
        node_id = event.node_id
        member = self.roster.remove(node_id)
        if member is None:
            return []  # never seen, or told twice
        was_finished, is_participant = member.standing is Standing.FINISHED, node_id in self.roster.participants
        if is_participant and not was_finished:
            self.roster.lost_hosts[member.node.host] = event.reason
        match self.phase:
            case Phase.FORMING:  # the round may begin without it
                return self._form(now)
            case Phase.TAKING_OVER:  # its seat is given up
                assert self.takeover is not None
                self.takeover.give_up(node_id, was_finished=was_finished)
                return self._end_takeover_if_complete(now)
            case Phase.RUNNING if not is_participant or member.is_stray:
                return []  # a spare
            case Phase.RUNNING if was_finished:  # it is missed only if the job restarts
                departed = m.Departed(self.round, self.roster.depart(node_id))  # for a coordinator after this one
                return [Send(i, departed) for i in self.roster.connected_participants()] + self._close_if_finished()
            case Phase.RUNNING:  # interrupts the round for free
                how = "left" if isinstance(event, m.Left) else "was lost"
                return self._interrupt(f"node {member.node.host} {how}: {event.reason}", now)
            case Phase.CLOSED:
                return []  # the job is over
            case _:
                assert_never(self.phase)

    def _on_deadline_passed(self, event: DeadlinePassed, now: float) -> list[Send]:
        if not self.is_due(now):
            return []  # disarmed or moved while the event was on its way
        match self.phase:
            case Phase.FORMING:  # the round begins, or the job times out
                return self._form(now)
            case Phase.TAKING_OVER:  # seats that no node has taken are given up
                return self._end_takeover(now)
            case Phase.RUNNING:  # the settle time is over: newcomers are taken in
                return self._take_in_newcomers(now)
            case Phase.CLOSED:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    def _take_in_newcomers(self, now: float) -> list[Send]:
        hosts, self.deadline = self.roster.newcomers, None
        if not hosts or not self._has_room:
            return []
        return self._interrupt(f"re-rendezvous: node{'s' * (len(hosts) > 1)} {', '.join(hosts)} joined", now)

    # Moves.

    def _pay_restart(self, failure: ProcessFailure, now: float) -> list[Send]:
        answer = self.policy.answer(failure, self.restart_count)
        if isinstance(answer, m.Ended):
            return self._close(answer)
        self.restart_count += 1
        return self._interrupt(answer, now)

    def _tell_verdict(self, node: m.Node) -> list[Send]:
        assert self.verdict is not None
        return [Send(node.node_id, self.verdict)]

    def _interrupted(self, node_id: str, round_: int, reason: str) -> Send:
        return Send(node_id, m.Interrupted(round_, reason, self.restart_count))

    def _interrupt(self, reason: str, now: float) -> list[Send]:
        """Ends the round; the next begins when every node that lives is ready again."""
        self.phase = Phase.FORMING
        self.forming.restart(now)
        message = m.Interrupted(self.round, reason, self.restart_count)
        return [Send(node_id, message) for node_id in self.roster.stop_participants()] + self._form(now)

    def _form(self, now: float) -> list[Send]:
        ready, stopping = self.roster.counts[Standing.READY], self.roster.counts[Standing.STOPPING]
        step = self.forming.step(ready=ready, stopping=stopping, is_first=self.round == 0, now=now)
        match step:
            case Step.WAIT:
                self.deadline = self.forming.deadline
                return []
            case Step.BEGIN:
                return self._begin_round()
            case Step.TIME_OUT:
                return self._time_out()
            case _:
                assert_never(step)

    def _begin_round(self) -> list[Send]:
        self.phase, self.deadline = Phase.RUNNING, None
        self.forming.end()
        self.round = self.newest_round = max(self.round, self.newest_round) + 1
        own, most = self.own_node_id, self.rules.max_nodes
        assignments = self.roster.assign(self.round, self.restart_count, max_nodes=most, own_node_id=own)
        return [*(Send(*each) for each in assignments.items()), *self._tell_spares(self.roster.ready)]

    def _tell_spares(self, nodes: Iterable[str]) -> list[Send]:
        if self._has_room:
            return []
        text = f"all {self.rules.max_nodes} places are taken: this node is a spare, and replaces the next that is lost"
        return [Send(node_id, m.Waiting(text)) for node_id in nodes]

    def _time_out(self) -> list[Send]:
        names, rules = [node.host for node in self.roster.ready.values()], self.rules
        few = f"{len(names)} of at least {rules.min_nodes} nodes joined within {rules.join_timeout_s:g} s"
        return self._close(m.Ended(Outcome.TIMED_OUT, f"{few}: {some_of(names)}"))

    def _close_if_finished(self) -> list[Send]:
        if self.roster.counts[Standing.BUSY]:
            return []
        return self._close(m.Ended(Outcome.SUCCEEDED, "every worker succeeded"))

    def _close(self, verdict: m.Ended) -> list[Send]:
        self.phase, self.deadline, self.verdict, self.takeover = Phase.CLOSED, None, verdict, None
        self.forming.end()
        return [Send(node_id, verdict) for node_id in self.roster.members]

    # A round that is older than this coordinator.

    def _begin_takeover(self, past: m.Past, now: float) -> list[Send]:
        """Gathers the round of a node; nodes that have reconnected with an older one are strays."""
        old_round, self.round, self.phase = self.round, past.round, Phase.TAKING_OVER
        gone_rank = past.coordinator_rank if self.is_heir else -1
        self.takeover = Takeover(past.round, past.group_world_size, gone_rank)
        self.deadline = now + self.rules.takeover_timeout_s
        self.forming.forget_calls()
        strays = self.roster.disown_participants()
        return [self._interrupted(node_id, old_round, WENT_ON.format(old_round)) for node_id in strays]

    def _take_seat(self, node: m.Node, past: m.Past, now: float) -> list[Send]:
        assert self.takeover is not None
        if not self.takeover.take_seat(node.node_id, past):
            if past.standing is Standing.READY:
                return self._join(node, now)
            self.roster.put_stray(node)
            reason = f"another node has the place of this one in round {past.round}; rejoining"
            return [self._interrupted(node.node_id, past.round, reason)]
        self.roster.participants[node.node_id] = None
        self.roster.put(node, past.standing, failure=past.failure)
        return self._end_takeover_if_complete(now)

    def _end_takeover_if_complete(self, now: float) -> list[Send]:
        assert self.takeover is not None
        return self._end_takeover(now) if self.takeover.is_complete else []

    def _end_takeover(self, now: float) -> list[Send]:
        """Goes on with the round if it has lost no node; else it is over, as if that had happened now."""
        takeover, self.takeover, self.deadline = self.takeover, None, None
        assert takeover is not None
        self.phase = Phase.RUNNING
        self.roster.inherit(takeover.by_rank, takeover.departed)
        if takeover.has_spares:
            self.forming.await_spares(now)
        outcome = takeover.outcome(self.roster.failed, self.restart_count)
        if isinstance(outcome, ProcessFailure):
            return self._pay_restart(outcome, now)
        if outcome:
            return self._interrupt(outcome, now)
        if self.roster.newcomers and self._has_room:
            self.deadline = now + self.rules.settle_time_s
        return self._close_if_finished() or self._tell_spares(self.roster.ready)

    def validate(self) -> None:
        self.roster.validate()
        assert (self.verdict is not None) == self.is_closed, "a verdict closes the job"
        assert (self.takeover is not None) == (self.phase is Phase.TAKING_OVER), "a takeover has its phase"
        assert self.newest_round >= self.round, "the next round is above each that any node has told of"
        counts, is_due = self.roster.counts, self.deadline is not None
        workers = counts[Standing.BUSY] + counts[Standing.FAILED] + counts[Standing.FINISHED]
        match self.phase:
            case Phase.FORMING:
                assert not workers, "before the next round, all workers of the last one are being stopped"
                assert is_due or counts[Standing.STOPPING] or not self.round, "a round that forms waits for something"
            case Phase.RUNNING:
                assert not counts[Standing.STOPPING] + counts[Standing.FAILED], "a round that is over does not run"
                assert len(self.roster.participants) <= self.rules.max_nodes
            case Phase.TAKING_OVER:
                assert self.takeover is not None and is_due, "a takeover ends"
                self.takeover.validate()
            case Phase.CLOSED:
                assert not is_due, "nothing is due after the verdict"
