"""The state of this node: its part in the rounds so far, as reported by its supervisor and the leader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.rdzv.decisions.cause import Cause
from aelastic.rdzv.decisions.decision import next_round
from aelastic.rdzv.ledger import Reached
from aelastic.rdzv.log.node import Status as LogStatus
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r

# More than a person requests while there is no leader.
ASKED_MAX = 32
# A notice that kills workers earlier by less than this is the same.
EARLIER_S = 0.5
# The parts of a plan of which a supervisor is notified when they change.
_NOTHING = dict.fromkeys(("settled", "waiting", "cordoned", "look", "compared", "notice"))
# A leader may be lost after it has answered such a request but before it is done.
LASTING = {r.Verb.DRAIN, r.Verb.RESTART, r.Verb.STOP, r.Verb.KILL}


@dataclass(slots=True)
class OpenRequest:
    """A request of this node."""

    request: r.Ask
    at: float
    is_accepted: bool = False  # by a leader, which may have been lost since

    def again(self, now: float) -> r.Ask:
        """Returns the request for another leader, which must not refuse what an earlier one has accepted.

        It always leaves time to save, however late it is.  The story behind it: a leader has accepted a drain, and
        ranks have saved and wait for its end.  The next leader receives the request half a second before the
        deadline, and refuses.
        """
        request = self.request
        least_s = min(request.deadline_s, r.DEADLINE_MIN_S)
        left_s = max(least_s, request.deadline_s - (now - self.at))
        return request.replace(deadline_s=left_s, spares_job=request.spares_job and not self.is_accepted)


@dataclass(slots=True)
class NodeState:
    """This node's side of the rounds: turns its supervisor's messages and its leader's plans into its status."""

    node: m.Node | None = None
    phase: m.NodePhase = m.NodePhase.READY
    assigned: m.Assigned | None = None  # the last round that this node took part in
    failure: ProcessFailure | None = None  # the first of that round, until the next begins
    failed_at: float = 0.0  # when it was noticed
    reached: Reached | None = None  # by the workers of that round, as far as it was reported
    ended: Cause | None = None  # the free cause of that round's end, if this node knows of one
    is_charged: bool = False  # this node knows that a failure has ended that round
    has_opted_in: bool = False  # its workers can leave this round in place
    alone_since: float | None = None  # without a leader
    # The same, when this node ended that round on its own, or first lost a leader after `is_charged` was set.
    ended_alone_since: float | None = None
    has_spares: bool = False  # nodes wait for a place, as far as this node knows
    # This node's requests, by id: until they are answered, or, for requests that last, refused or done.
    asked: dict[str, OpenRequest] = field(default_factory=dict[str, "OpenRequest"])
    # This node's queries, until they are answered.
    fetches: dict[str, r.Fetch] = field(default_factory=dict[str, r.Fetch])
    frozen: r.Frozen | None = None  # this node's progress with an announced interruption
    saved: r.Saved | None = None
    question: m.Hangs | None = None  # one of its workers hangs
    places: m.Saw | None = None  # what its workers do, since the leader asked
    ready_count: int = 0
    prepared_count: int = 0
    plan: m.Plan | None = None  # the last one that was followed
    _notice_kill_at: float = 0.0  # of the last notice

    @property
    def round(self) -> int:
        return 0 if self.assigned is None else self.assigned.round

    @property
    def restart_count(self) -> int:
        """The restarts that were charged when its last round began."""
        return 0 if self.assigned is None else self.assigned.restart_count

    @property
    def past(self) -> m.Past:
        if self.assigned is None:
            return m.Past(self.phase)
        return m.Past(
            phase=self.phase,
            round=self.assigned.round,
            term=self.assigned.term,
            failure=self.failure,
            has_spares=self.has_spares,
            ended=self.ended,
            is_charged=self.is_charged,
            reached=self.reached,
            has_opted_in=self.has_opted_in,
            restart_count=self.restart_count,
        )

    def past_at(self, now: float) -> m.Past:
        """Returns its part in its last round, with ages at `now`."""
        past = self.past
        if self.failure is not None:
            past = past.replace(failure_age_s=now - self.failed_at)
        # The cause ended its round at that time, even if this node has found and lost a leader since.
        alone_since = self.alone_since if self.ended_alone_since is None else self.ended_alone_since
        return past if alone_since is None else past.replace(alone_s=now - alone_since)

    def status_at(self, now: float, left: m.Left | None = None, log: LogStatus | None = None) -> m.Status:
        """Returns the whole state of this node, with what it knows of the log."""
        assert self.node is not None, "a node that connects is ready for a round, or has been"
        asks = tuple(asked.again(now) for asked in self.asked.values())
        return m.Status(
            self.node,
            self.past_at(now),
            self.ready_count,
            self.prepared_count,
            asks,
            self.frozen,
            self.saved,
            self.question,
            self.places,
            left,
            log,
        )

    def validate(self) -> None:
        has_failed = self.phase is m.NodePhase.FAILED
        assert not has_failed or self.failure is not None, "a node that stands failed knows why"
        is_well = self.phase in {m.NodePhase.BUSY, m.NodePhase.FINISHED}
        assert self.failure is None or not is_well, "workers that run, or have finished, have not failed"
        is_new = self.assigned is None
        assert not is_new or self.phase is m.NodePhase.READY, "a node without a round is ready for its first"

    def submit(self, message: m.NodeMessage, now: float) -> None:  # noqa: C901, PLR0912  one case for each message
        """Handles a message of the supervisor; one about another round changes nothing here."""
        match message:
            case m.Ready(node, reached):
                self.node, self.phase, self.reached = node, m.NodePhase.READY, reached or self.reached
                self.ready_count += 1
            case m.Failed(_, round_, failure, age_s, reached):
                is_first = round_ == self.round and self.failure is None
                if is_first and self.phase in {m.NodePhase.BUSY, m.NodePhase.STOPPING}:  # it may know already
                    self.reached, self.failure, self.failed_at = reached, failure, now - age_s
                if is_first and self.phase is m.NodePhase.BUSY:
                    self.phase = m.NodePhase.FAILED
            case m.Succeeded(_, round_):
                if round_ == self.round and self.phase is m.NodePhase.BUSY:
                    self.phase = m.NodePhase.FINISHED
            case m.Prepared(_, starts):
                self.node = None if self.node is None else self.node.replace(starts=starts)
                self.prepared_count += 1
            case m.OptedIn(_, round_):
                self.has_opted_in |= round_ == self.round
            case r.Ask():
                if message.verb is r.Verb.CANCEL:
                    self._forget(r.Verb.DRAIN)
                self.asked[message.ask_id] = OpenRequest(message, now)
                if len(self.asked) > ASKED_MAX:
                    del self.asked[next(iter(self.asked))]
            case r.Fetch():
                self.fetches[message.ask_id] = message
                if len(self.fetches) > ASKED_MAX:
                    del self.fetches[next(iter(self.fetches))]
            case r.Frozen():
                self.frozen = message
            case r.Saved():
                self.saved = message
            case m.Hangs():
                self.question = message.replace(number=1 if self.question is None else self.question.number + 1)
            case m.Saw():
                look = None if self.plan is None else self.plan.look
                self.places = message if look is None else message.replace(number=look.number)
            case m.Left() | r.Fetched():
                pass  # not part of the node's state
            case _:
                assert_never(message)

    def follow(self, plan: m.Plan, now: float) -> list[m.LeaderMessage]:  # noqa: C901  one case for each field
        """Returns what is new in a plan for the supervisor, in the order in which it must be delivered.

        A plan may be repeated, also by another leader.  What this node has done already is not new.
        """
        before, self.plan = self.plan or plan.replace(**_NOTHING), plan
        news: list[m.LeaderMessage] = [each for each in plan.answers if self._on_answer(each)]
        if plan.assigned is not None and self.on_assigned(plan.assigned):
            news.append(plan.assigned)
        if plan.interrupted is not None and self.on_interrupted(plan.interrupted):
            news.append(plan.interrupted)
        if plan.settled is not None and plan.settled != before.settled:
            news.append(plan.settled)
        if plan.waiting is not None and plan.waiting != before.waiting:
            news.append(plan.waiting)
        is_other = plan.term != before.term  # its numbers start again
        if plan.cordoned is not None and (
            is_other or plan.cordoned.number != (before.cordoned and before.cordoned.number)
        ):
            news.append(plan.cordoned)
        if self._on_start_ahead(plan.starts_ahead):
            news.append(m.StartAhead(plan.starts_ahead))
        if plan.look is not None and (is_other or plan.look != before.look) and plan.look.round == self.round:
            news.append(plan.look)
        if plan.compared is not None and plan.compared != before.compared and plan.compared.round == self.round:
            news.append(plan.compared)
        if plan.notice is not None and self._is_news(plan.notice, before.notice, now):
            news.append(plan.notice)
        if plan.ended is not None:
            news.append(plan.ended)
        return news

    def _is_news(self, notice: r.Notice, before: r.Notice | None, now: float) -> bool:
        """Returns whether a notice contains something new; an earlier kill of the workers is enough."""
        kill_at, known_at = now + notice.kill_s, self._notice_kill_at
        is_known = before is not None and before.replace(kill_s=0.0) == notice.replace(kill_s=0.0)
        if is_known and kill_at >= known_at - EARLIER_S:
            return False
        self._notice_kill_at = kill_at
        if notice.stage is r.Stage.NONE:
            self.frozen = self.saved = None
        return notice.round == self.round or notice.stage is r.Stage.LEAVE

    def _on_start_ahead(self, number: int) -> bool:
        """Notes that no round waits for this node until its workers are ready, no matter who leads then."""
        if self.node is None or self.phase is not m.NodePhase.READY or self.node.starts is m.Starts.PREPARING:
            return False
        if number != self.ready_count + self.prepared_count:
            return False  # it has been ready again since, or has answered; if need be, the leader repeats this
        self.node = self.node.replace(starts=m.Starts.PREPARING)
        return True

    def _on_answer(self, answer: r.Answer) -> bool:
        """A request is decided.  One that lasts is repeated to the next leader.  Returns whether that is news."""
        asked = self.asked.get(answer.ask_id)
        if asked is None or asked.is_accepted:
            return False
        if answer.is_applied and asked.request.verb in LASTING:
            asked.is_accepted = True
        else:
            del self.asked[answer.ask_id]
        return True

    def on_fetch_answered(self, ask_id: str) -> None:
        """The leader has answered a query of this node."""
        self.fetches.pop(ask_id, None)

    def drop_unanswered(self) -> list[str]:
        """Forgets requests of this node that no leader has answered; returns their ids."""
        dropped = [ask_id for ask_id, each in self.asked.items() if not each.is_accepted]
        for ask_id in dropped:
            del self.asked[ask_id]
        fetches, self.fetches = list(self.fetches), {}
        return [*dropped, *fetches]

    def _forget(self, *verbs: r.Verb) -> None:
        self.asked = {ask_id: each for ask_id, each in self.asked.items() if each.request.verb not in verbs}

    def on_assigned(self, assigned: m.Assigned) -> bool:
        """A round is complete.  Returns false if this node knew that."""
        is_later = self.assigned is None or assigned.fence > self.assigned.fence
        if self.phase is not m.NodePhase.READY or not is_later:
            return False
        self.assigned, self.phase = assigned, m.NodePhase.BUSY
        self.failure, self.ended, self.is_charged, self.reached = None, None, False, None
        self.ended_alone_since = None
        self.has_opted_in = self.node is not None and self.node.starts is m.Starts.READY
        self._forget(r.Verb.DRAIN, r.Verb.RESTART)
        self.frozen = self.saved = self.question = self.places = None
        return True

    def on_interrupted(self, interrupted: m.Interrupted) -> bool:
        """The round is over.  Returns false if this node knew that, or it is another round."""
        is_new = self.phase not in {m.NodePhase.READY, m.NodePhase.STOPPING}
        is_charged = interrupted.restart_count > self.restart_count and not interrupted.went_on
        # A loss from before the failure was reported after it.
        is_charge_withdrawn = self.is_charged and not is_charged and not interrupted.went_on
        if interrupted.round != self.round or not (is_new or is_charge_withdrawn):
            return False
        # What the end costs is settled when the next round begins; a later leader works it out again.
        self.phase = m.NodePhase.STOPPING if is_new else self.phase
        self.is_charged, self.ended = is_charged, None if is_charged else interrupted.decision.cause
        return is_new

    def interrupt(self, cause: Cause | None) -> m.Interrupted | None:
        """Ends the round on this node's own account, for a cause; `None` without one."""
        if cause is None:
            return None
        interrupted = m.Interrupted(self.round, next_round(cause), self.restart_count)
        if not self.on_interrupted(interrupted):
            return None
        self.ended_alone_since = self.alone_since
        return interrupted

    def on_welcome(self, *, is_new: bool) -> None:
        """A leader has admitted this node; `is_new`: another leader, or one in another term."""
        self.alone_since = None
        if is_new:
            self.has_spares = False

    def on_spares(self, has_spares: bool) -> None:
        self.has_spares = has_spares

    def on_alone(self, since: float) -> None:
        """The leader is lost."""
        if self.alone_since is None:
            self.alone_since = since
        # The failure may be a victim of that loss.  The next leader may know that, but be lost before it reports it.
        if self.is_charged and self.ended_alone_since is None:
            self.ended_alone_since = since
