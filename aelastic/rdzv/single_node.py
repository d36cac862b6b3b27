"""The coordinator of a job of one node: all that `coordinator` decides about other nodes falls away.

What is left are the restart policy and the numbers of rounds.  It says the same, word for word, as `Coordinator` would
of a job for one node: a test holds the two side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aelastic.failures.places import Place
from aelastic.rdzv.coordinator.restart_policy import Cause, RestartPolicy
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.ranks import assign_ranks

if TYPE_CHECKING:
    from aelastic.rdzv.requests.drain import Drain


@dataclass(slots=True)
class SingleNode:
    """Rounds, restarts and the verdict of one node.

    Args:
        policy: the budget.
        epoch: of all its rounds.
    """

    policy: RestartPolicy
    epoch: int = 0
    restart_count: int = 0
    verdict: m.Ended | None = None
    _assigned: m.Assigned | None = None  # the last round
    _is_running: bool = False  # that one
    _host: str = ""
    _question: m.Hangs | None = None  # what is asked about the workers of that round
    _node_id: str = ""
    _drain: Drain[m.CoordinatorMessage] | None = None  # made by the first request

    @property
    def deadline(self) -> float | None:
        return None if self._drain is None else self._drain.deadline

    def handle(self, message: m.NodeMessage, now: float = 0.0) -> list[m.CoordinatorMessage]:  # noqa: C901  one case for each
        """What the node hears of what it says.  A message about an earlier round changes nothing."""
        match message:
            case m.Ready() if self.verdict is not None:
                return [self.verdict]
            case m.Ready(node):
                self._is_running = False
                return (self._on_request(None, now) if self._drain else []) or [self._begin(node)]
            case m.Failed() if self._runs(message.round):
                ended = self._end(message)
                return (self._on_request(None, now) if self._drain else []) or [ended]
            case r.Ask() | r.Frozen() | r.Saved():
                return self._on_request(message, now)
            case r.Fetch(node_id, ask_id):
                return [r.Answer(ask_id, True, "", (node_id,)), r.Show(message)]
            case r.Fetched():
                return [r.Shown(message)]
            case m.Succeeded() if self._runs(message.round):
                self._is_running, self.verdict = False, m.Ended(m.Outcome.SUCCEEDED, "every worker succeeded")
                return [self.verdict]
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

    def _begin(self, node: m.Node) -> m.Assigned:
        round_ = 1 if self._assigned is None else self._assigned.round + 1
        (ranks,) = assign_ranks([(node.role, node.local_world_size)])
        self._assigned = m.Assigned(
            round_, self.restart_count, ranks, node.master_addr, node.master_port, epoch=self.epoch
        )
        self._node_id, self._host, self._is_running, self._question = node.node_id, node.host, True, None
        return self._assigned

    def _end(self, failed: m.Failed) -> m.Interrupted | m.Ended:
        """A failure has ended the round: the job restarts, or is over."""
        self._is_running, failure = False, failed.failure
        answer = self.policy.answer(Cause.of(failure), self.restart_count)
        if isinstance(answer, m.Ended):
            self.verdict = answer
            return answer
        self.restart_count += 1
        return m.Interrupted(failed.round, answer, self.restart_count)

    def _on_request(self, request: r.Request | None, now: float) -> list[m.CoordinatorMessage]:
        """The node asks for a drain, or says how far it is with it; once that is over, or no round runs, it leaves."""
        from aelastic.rdzv.requests.drain import Crew, Drain

        if request is not None:
            self._node_id = request.node_id  # it may ask before it is ready for its first round
        drain = self._drain = self._drain or Drain[m.CoordinatorMessage](lambda _, message: message)
        if self.verdict is not None or (request is None and not self._is_running):
            drain.on_round_over()
        hosts = {} if self.verdict else {self._node_id: self._host}
        nodes, round_ = tuple(hosts) if self._is_running else (), 0 if self._assigned is None else self._assigned.round
        told = drain.handle(request, lambda: Crew(hosts, nodes, round_, self.epoch), now)
        if drain.is_over or not self._is_running:
            verdict, is_restarted = drain.verdict, drain.is_over and drain.aim is not None
            drain.on_round_over()
            told += drain.let_go(hosts, now)
            if verdict is not None and self.verdict is None:
                self._is_running, self.verdict = False, verdict
                told.append(verdict)
            elif is_restarted:
                self._is_running = False
                told.append(m.Interrupted(round_, drain.outcome, self.restart_count))
        return told

    def on_deadline_passed(self, now: float) -> list[m.CoordinatorMessage]:
        return [] if self.deadline is None or now < self.deadline else self._on_request(None, now)

    def _compare(self, places: Sequence[Place]) -> list[m.CoordinatorMessage]:
        """What the workers do, once that is known, or is waited for no longer."""
        question, self._question = self._question, None
        if question is None or self._assigned is None:
            return []
        from aelastic.rdzv.coordinator.inquiry import compared, filled

        return [compared(question, filled(places, self._host, self._assigned))]
