"""The leader of a job of one node: a `Coordinator` without anything that concerns other nodes.

The restart policy and the numbers of rounds remain.  `SingleNode` sends exactly the messages that `Coordinator` would
send in a job of one node: a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aelastic.diagnose.failures.places import Place
from aelastic.rdzv.decisions.cause import PENDING, Cause, CauseKind
from aelastic.rdzv.decisions.decision import Decision, DecisionKind, next_round
from aelastic.rdzv.ledger import Ledger, most_of
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.ranks import assign_ranks
from aelastic.rdzv.restart_policy import End, RestartPolicy, cause_of

if TYPE_CHECKING:
    from aelastic.rdzv.leader.drain import Drain

SUCCEEDED = m.Ended(m.Outcome.SUCCEEDED, Decision(DecisionKind.SUCCEEDED, Cause(CauseKind.ALL_SUCCEEDED)))


@dataclass(slots=True)
class SingleNode:
    """Rounds, restarts and the verdict of one node.

    Args:
        policy: the budget.
        term: of all its rounds.
    """

    policy: RestartPolicy
    term: int = 0
    restart_count: int = 0
    verdict: m.Ended | None = None
    _assigned: m.Assigned | None = None  # the last round
    _is_running: bool = False  # whether that round is running
    _host: str = ""
    _question: m.Hangs | None = None  # the open question about the workers of that round
    _node_id: str = ""
    _ledger: Ledger = field(default_factory=Ledger)
    _ended: End | None = None  # how the last round ended
    _ended_at: float = 0.0
    _waiting: m.Ready | None = None  # the node waits until workers may start again
    _begins_at: float = 0.0
    _drain: Drain[m.LeaderMessage] | None = None  # made by the first request
    _opted_in: int = 0  # the last round that all workers can leave in place

    @property
    def deadline(self) -> float | None:
        drains_at = None if self._drain is None else self._drain.deadline
        return drains_at if self._waiting is None else min(self._begins_at, drains_at or self._begins_at)

    def handle(self, message: m.NodeMessage, now: float = 0.0) -> list[m.LeaderMessage]:  # noqa: C901, PLR0912  one case for each
        """Returns the leader's replies to the node's message.  One about an earlier round changes nothing."""
        match message:
            case m.Ready() if self.verdict is not None:
                return [self.verdict]
            case m.Ready():
                self._on_ready(message, now)
                return (self._on_request(None, now) if self._drain else []) or self._begin(now)
            case m.Failed() if self._runs(message.round):
                ended = self._end(message, now)
                return (self._on_request(None, now) if self._drain else []) or [ended]
            case r.Ask(_, ask_id, r.Verb.CORDON | r.Verb.UNCORDON) if self.verdict is None:
                return [r.Answer(ask_id, False, r.ONE_NODE)]
            case r.Ask() | r.Frozen() | r.Saved():
                return self._on_request(message, now)
            case r.Fetch(node_id, ask_id):
                return [r.Answer(ask_id, True, "", (node_id,)), r.Show(message)]
            case r.Fetched():
                return [r.Shown(message)]
            case m.Succeeded() if self._runs(message.round):
                self._is_running, self.verdict = False, SUCCEEDED
                return [self.verdict]
            case m.OptedIn() if self._runs(message.round):
                self._opted_in = message.round
                return []
            case m.Hangs(is_last=False) if self._runs(message.round) and self._question is None:
                self._question = message
                return [m.Look(message.round, message.reason)]
            case m.Saw(_, round_, places) if self._runs(round_):
                return self._compare(places)
            case m.Hangs(is_last=True) if self._runs(message.round):
                return self._compare(())
            case _:
                return []

    def _runs(self, round_: int) -> bool:
        return self._is_running and self._assigned is not None and round_ == self._assigned.round

    def _begin(self, now: float) -> list[m.LeaderMessage]:
        if self._waiting is None:
            return []
        if self._ended is not None:
            decision = self.policy.decide(end := self._ended.replace(now=now))
            if decision.is_final:
                return [self._close(end, decision)]
            self._begins_at = self._ended_at + decision.delay_s
            if now < self._begins_at:
                return []
            self.restart_count += decision.is_charged
            self._ledger, self._ended = self.policy.after(end, decision), None
        node, self._waiting = self._waiting.node, None
        round_ = 1 if self._assigned is None else self._assigned.round + 1
        (ranks,) = assign_ranks([(node.role, node.local_world_size)])
        self._assigned = m.Assigned(
            round_,
            self.restart_count,
            ranks,
            node.master_addr,
            node.master_port,
            term=self.term,
        )
        self._node_id, self._host, self._is_running, self._question = node.node_id, node.host, True, None
        return [self._assigned]

    def _end(self, failed: m.Failed, now: float) -> m.Interrupted | m.Ended:
        """A failure has ended the round: the job restarts, or is over."""
        self._is_running, self._ended_at = False, now
        reached = most_of(failed.reached)
        self._ended = End(cause_of(failed.failure), failed.failure, self.restart_count, self._ledger, reached, now=now)
        decision = self.policy.decide(self._ended)
        if decision.is_final:
            return self._close(self._ended, decision)
        count, in_place = self.restart_count + decision.is_charged, failed.round == self._opted_in
        return m.Interrupted(failed.round, decision, count, in_place=in_place)

    def _on_ready(self, ready: m.Ready, now: float) -> None:
        """No worker is running, so how far all of them came is now known."""
        if self._ended is None and self._assigned is not None:  # not charged
            self._ended, self._ended_at = End(PENDING, None, self.restart_count, self._ledger), now
        if self._ended is not None and ready.reached is not None:
            self._ended = self._ended.replace(reached=ready.reached)
        self._is_running, self._waiting = False, None if ready.node.unfit else ready

    def _close(self, end: End, decision: Decision) -> m.Ended:
        self._waiting, self.verdict = None, m.Ended(m.Outcome.FAILED, decision, end.failure)
        return self.verdict

    def _on_request(self, request: r.Request | None, now: float) -> list[m.LeaderMessage]:
        """Handles a request, or the time if `None`.  Once a drain is over, or if no round runs, the node leaves."""
        from aelastic.rdzv.leader.drain import Crew, Drain

        if request is not None:
            self._node_id = request.node_id  # a request may come before the node is ready for its first round
        drain = self._drain = self._drain or Drain[m.LeaderMessage](lambda _, message: message)
        if self.verdict is not None or (request is None and not self._is_running):
            drain.on_round_over()
        hosts = {} if self.verdict else {self._node_id: self._host}
        nodes, round_ = tuple(hosts) if self._is_running else (), 0 if self._assigned is None else self._assigned.round
        answers = drain.handle(request, lambda: Crew(hosts, nodes, round_, self.term, tuple(hosts)), now)
        if drain.is_over or not self._is_running:
            verdict, is_restarted = drain.verdict, drain.is_over and drain.aim is not None
            drain.on_round_over()
            left = drain.let_go(hosts, now)
            answers += left
            if left or verdict is not None:
                self._waiting = None
            if verdict is not None and self.verdict is None:
                self._is_running, self.verdict = False, verdict
                answers.append(verdict)
            elif is_restarted:
                self._is_running = False
                assert drain.outcome is not None, "a drain is over for a reason"
                answers.append(m.Interrupted(round_, next_round(drain.outcome), self.restart_count))
        return answers

    def on_deadline_passed(self, now: float) -> list[m.LeaderMessage]:
        if self.deadline is None or now < self.deadline:
            return []
        is_due = self._waiting is not None and now >= self._begins_at
        return self._begin(now) if is_due else self._on_request(None, now)

    def _compare(self, places: Sequence[Place]) -> list[m.LeaderMessage]:
        """Answers the open question with what the workers do; without any places, the node has stopped waiting."""
        question, self._question = self._question, None
        if question is None or self._assigned is None:
            return []
        from aelastic.rdzv.leader.hang_comparison import compared, filled

        return [compared(question, filled(places, self._host, self._assigned))]
