"""Between two rounds: what the end of the last one costs, when the next one begins, and when newcomers end one.

- Nodes are notified that a round is **over** as soon as its cause is known (`first_cause.py`).  What that costs is
  settled when the next round begins: by then each node of the last one has reported.  If the job can't pay, it ends.
- The **first** round begins at once with `max_nodes`, and with `min_nodes` when the last call is over.
- A **later** round begins when each living node of the last one is ready again.  It waits for no other node, but
  includes those that wait already.
- Below `min_nodes` a round waits for the join timeout, then the job ends.
- A node that takes longer than the join timeout to **stop** its workers has no part in the next round.
- A node whose **connection** has broken is back at once, or lost after a grace.  No round begins before that is known.
- A **new** leader waits a little longer: spares find it at the same time as the nodes of the round do, and if a spare
  comes too late for a place, that costs a second interruption.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum, auto
from math import inf

from aelastic.rdzv.decisions.cause import Cause, CauseKind
from aelastic.rdzv.decisions.decision import Decision, next_round
from aelastic.rdzv.leader.coordinator_events import Lost, Phase, Send
from aelastic.rdzv.leader.cordons import Cordons
from aelastic.rdzv.leader.drain import Crew
from aelastic.rdzv.leader.first_cause import RoundEnd
from aelastic.rdzv.leader.gathering import Gathering
from aelastic.rdzv.leader.job_state import JobState
from aelastic.rdzv.leader.roster import Roster, RoundRules, hosts_of
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.restart_policy import End, RestartPolicy

# When the leader is lost, running nodes and waiting nodes find the next one at the same time.
SPARES_TIMEOUT_S = 1.0
# A fork server that imports for longer is not waited for; the workers import on their own.
PREPARE_MAX_S = 10.0
# Workers that start before a round includes their node are not waited for any longer.
START_AHEAD_MAX_S = 60.0
# Workers of a younger round may still be starting.
YOUNG_S = 10.0


@dataclass(slots=True)
class Newcomers:
    """When nodes that come while a round runs interrupt it.

    All newcomers within the settle time cost one interruption.  Three kinds wait longer:

    - A newcomer whose fork server still **imports** waits until that is done: its workers would start cold, and all
      others would wait.
    - If all workers of the round can leave it **in place**, a waiting node starts its own **ahead**.  It interrupts the
      round once they are ready for the next one, so no worker waits for the imports of another.
    - If workers start **cold**, newcomers that interrupt a young round waste a start.  From then on newcomers leave a
      round alone until it is twice as old as that one was, longer each time.  The story behind it: agents are lost and
      replaced every few seconds, and each replacement stops workers just before their first step.  Once a round has
      become old, this is forgotten.
    """

    rules: RoundRules
    roster: Roster
    came_at: float = 0.0  # when the first waiting one came
    why: str = ""  # why they wait for longer than the settle time
    began_at: float = -inf  # when the round began
    spared_s: float = 0.0  # its age at which newcomers interrupt it, if workers start cold

    @property
    def has_room(self) -> bool:
        """Whether the running round would admit one."""
        return len(self.roster.participants) < self.rules.max_nodes and not self.roster.has_finished

    def on_begun(self, now: float) -> float | None:
        """A round runs.  Returns when to look at newcomers that it does not include."""
        self.began_at = now
        return self.on_come(None, now)

    def on_ended(self, now: float, *, by_newcomers: bool) -> None:
        age_s = now - self.began_at
        if age_s >= YOUNG_S:
            self.spared_s = 0.0
        elif by_newcomers:
            self.spared_s = min(max(self.spared_s, 2 * age_s), YOUNG_S)

    def on_come(self, deadline: float | None, now: float) -> float | None:
        """Nodes may have come.  Returns when to look at them, unless an earlier look is already due."""
        if deadline is not None or not self.has_room or not self.roster.ready:
            return deadline
        self.came_at, self.why = now, ""
        return self.settled_at

    @property
    def settled_at(self) -> float:
        return self.came_at + self.rules.settle_time_s

    def look(self, now: float) -> tuple[list[str], float | None, list[Send]]:
        """Returns hosts of newcomers that interrupt the round now; or none, when to look again, and what to send."""
        newcomers, was_notified = self.roster.ready, bool(self.why)
        if not newcomers or not self.has_room:
            return [], None, []
        if now < (due := self._due()):
            return [], due, [] if was_notified else self.notify(newcomers, due, now)
        for node in list(newcomers.values()):  # those still preparing have had their time
            if node.starts is m.Starts.PREPARING:
                self.roster.set_starts(node.node_id, m.Starts.COLD)
        self.on_ended(now, by_newcomers=True)
        return hosts_of(newcomers), None, []

    def _due(self) -> float:
        due, self.why = self.settled_at, ""
        if self.roster.are_preparing:
            limit_s, until = PREPARE_MAX_S, "after the fork servers of new nodes have imported their modules"
            if self.roster.can_all_leave:
                limit_s, until = START_AHEAD_MAX_S, "after the workers of new nodes have started"
            due, self.why = max(due, self.came_at + limit_s), until
        spared_until = self.began_at + self.spared_s
        if spared_until > due and self.roster.start_cold:
            due, self.why = spared_until, "because new nodes have interrupted workers that had just started"
        return due

    def start_ahead(self, nodes: Collection[str]) -> list[Send]:
        """Returns what to send waiting nodes, if workers of the round will keep their processes when it admits them."""
        if not self.roster.can_all_leave:
            return []
        return self.roster.start_ahead(nodes)

    def notify(self, nodes: Iterable[str], deadline: float | None, now: float) -> list[Send]:
        """Tells waiting nodes that the round has no room, or is not interrupted soon."""
        if not self.has_room:
            text, kind = self.rules.spare_text(has_finished=self.roster.has_finished), m.WaitKind.SPARE
        elif self.why and deadline is not None:
            text, kind = f"joining in at most {deadline - now:.0f} s, {self.why}", m.WaitKind.NEWCOMER
        else:
            return []
        return [Send(node_id, m.Waiting(text, kind=kind)) for node_id in nodes]

    def validate(self) -> None:
        assert 0 <= self.spared_s <= YOUNG_S, "a round is left alone while it is young, no longer"


class NextStep(StrEnum):
    WAIT = auto()  # until `deadline`, or until a node changes
    NOTIFY = auto()  # nodes of the last round that it is over, and why
    END = auto()  # the job, with the verdict
    BEGIN = auto()
    GIVE_UP_STOPPING = auto()  # nodes that fail to stop their workers
    TIME_OUT = auto()


@dataclass(slots=True)
class Forming:
    """The round that forms.  Timers are points in time; `None`: not armed."""

    rules: RoundRules
    policy: RestartPolicy
    restart_count: int = 0
    cordons: Cordons = field(default_factory=Cordons)
    end: RoundEnd = field(default_factory=RoundEnd)  # of the last round: what has ended it, or will
    decided: Decision | None = None  # about that, as sent to nodes; `None` until one was notified
    is_charged: bool = False  # as sent to nodes
    is_corrected: bool = False  # they were sent another cause before
    verdict: m.Ended | None = None  # if the job cannot pay for it
    deadline: float | None = None
    since: float | None = None
    join_by: float | None = None
    last_call_until: float | None = None
    spares_until: float | None = None  # until then, spares of a round that was taken over may reconnect
    refilled_until: float | None = None  # until then, nodes may replace those that have left in order
    ahead_until: float | None = None  # until then, the round waits for workers that start ahead of it
    is_behind: bool = False  # nodes have reported more than the leader has handled
    is_in_place: bool = False  # the last round was left in place

    def next_step(self, roster: Roster, *, is_first: bool, now: float) -> NextStep:
        """Returns what the round does now, with its present nodes.  O(1)."""
        rules, ready = self.rules, len(roster.ready)
        if self.since is None:
            self.since = now
        if self.is_behind:  # the next report may be the first cause
            return self._wait(now)
        if self.end.unnotified:
            return self._explain(now)
        if roster.stopping:  # their agents bound that, each as its user configured it
            stop_by = self.since + rules.join_timeout_s
            return NextStep.GIVE_UP_STOPPING if now >= stop_by else self._wait(stop_by)
        if self.join_by is None:
            self.join_by = now + rules.join_timeout_s
        if ready < rules.min_nodes:
            self.last_call_until = None
            return NextStep.TIME_OUT if now >= self.join_by else self._wait(self.join_by)
        until = self._more_until(roster, is_first=is_first, now=now)
        if until is not None and now < until:
            return self._wait(until)
        if roster.broken:
            return self._wait(None)
        return self._settle(now)

    def start_ahead(self, nodes: Collection[str], roster: Roster, now: float) -> list[Send]:
        """Tells nodes to start workers for the round while those of other nodes wait at the safe point.

        If one of those is lost, the others keep their processes.  Once they are in a round with workers that have not
        opted in, all would restart.
        """
        may_others_wait = self.is_in_place and self.end.size > 1
        waiting = roster.start_ahead(nodes) if may_others_wait else []
        if waiting:
            self.ahead_until = now + START_AHEAD_MAX_S
        return waiting

    def _more_until(self, roster: Roster, *, is_first: bool, now: float) -> float | None:
        """Returns until when the round waits for more nodes than it needs, or for workers that start ahead of it."""
        ready = len(roster.ready)
        if self.ahead_until is not None and roster.prepared < self.rules.min_nodes:
            return self.ahead_until
        if ready >= self.rules.max_nodes:
            return None
        if self.spares_until is not None and now < self.spares_until:
            return self.spares_until
        if self.refilled_until is not None and ready < self.end.size:
            return self.refilled_until
        if is_first and self.last_call_until is None:
            self.last_call_until = now + self.rules.last_call_timeout_s
        return self.last_call_until if is_first else None

    def _explain(self, now: float) -> NextStep:
        """Tells nodes why the round is over, once that is known."""
        cause = self.end.cause
        assert cause is not None, "a round ends for a reason"
        decision = self.policy.decide(self._as_known(cause, now))
        known_at = self.end.known_at(is_final=decision.is_final)
        if known_at is None or now < known_at:
            return self._wait(known_at)
        self._note_notified(cause, decision)
        return self._answer(cause, decision, NextStep.NOTIFY)

    def _settle(self, now: float) -> NextStep:
        """Pays for the last round."""
        cause, since = self.end.cause, self.since
        if cause is None:
            return NextStep.BEGIN
        if not cause.is_known:
            return self._wait(None)
        decision = self.policy.decide(end := self._as_known(cause, now))
        if since is not None and now < since + decision.delay_s and not decision.is_final:
            return self._wait(since + decision.delay_s)
        self.is_corrected |= self.end.notified_cause is not None and self.end.notified_cause != cause
        step = self._answer(cause, decision, NextStep.BEGIN)
        if step is NextStep.BEGIN:
            self.restart_count = max(self.restart_count, self.end.restart_count + decision.is_charged)
            self.cordons.remember(self.policy.after(end, decision))
        return step

    def _as_known(self, cause: Cause, now: float) -> End:
        end, unfit = self.end, frozenset(self.end.unfit)
        known = end.restart_count, self.cordons.ledger, *end.progress, now, end.size, len(end.hosts), unfit
        return End(cause, end.failure, *known)

    def _note_notified(self, cause: Cause, decision: Decision) -> None:
        self.end.note_notified(cause)
        self.is_charged = decision.is_charged

    def _answer(self, cause: Cause, decision: Decision, step: NextStep) -> NextStep:
        if decision.is_final:
            outcome = m.Outcome.FAILED if cause.is_failure else m.Outcome.TIMED_OUT
            self.verdict = m.Ended(outcome, decision, self.end.failure)
            return NextStep.END
        self.decided = decision
        return step

    # What nodes are sent about the last round.

    def interrupted(
        self, round_: int, decision: Decision, *, went_on: bool = False, in_place: bool = False
    ) -> m.Interrupted:
        return m.Interrupted(round_, decision, self.next_count, went_on, in_place)

    def ended(self, round_: int) -> m.Interrupted:
        """Returns the message that the last round is over, for a node that is back: in place, as for the others."""
        decision = self.decided or next_round(Cause(CauseKind.ROUND_ENDED, round=round_))
        return self.interrupted(round_, decision, in_place=self.is_in_place)

    def went_on(self, round_: int) -> m.Interrupted:
        """Returns the message that a round continued without a node."""
        return self.interrupted(round_, next_round(Cause(CauseKind.CONTINUED_WITHOUT, round=round_)), went_on=True)

    def _interruptions(self, node_ids: Iterable[str], round_: int) -> list[Send]:
        assert self.decided is not None, "nodes are sent what was decided"
        interrupted = self.interrupted(round_, self.decided, in_place=self.is_in_place)
        return [Send(node_id, interrupted) for node_id in node_ids]

    def notify_of_end(self, roster: Roster, round_: int) -> list[Send]:
        """Tells nodes that have not been notified why their round is over."""
        stopping = roster.stopping
        return self._interruptions([node_id for node_id in self.end.take_unnotified() if node_id in stopping], round_)

    def notify_of_withdrawal(self, roster: Roster, round_: int, now: float) -> list[Send]:
        """Tells nodes that the end of their round costs nothing after all, so that a later leader knows it."""
        if self.is_behind or not self.end.is_charge_withdrawn or (cause := self.end.cause) is None:
            return []
        decision = self.policy.decide(self._as_known(cause, now))
        self._note_notified(cause, decision)
        self.decided, self.is_corrected = decision, True
        return self._interruptions(roster.connected_participants(), round_)

    def give_up_stopping(self, roster: Roster, round_: int) -> list[Send]:
        """Stops waiting for nodes that fail to stop their workers."""
        nodes = roster.give_up_stopping()
        text = m.Waiting(self.rules.gave_up([node.host for node in nodes]), kind=m.WaitKind.GIVEN_UP)
        left_behind = [Send(node.node_id, self.went_on(round_)) for node in nodes]
        return [*left_behind, *(Send(node_id, text) for node_id in roster.ready)]

    def correct(self, roster: Roster, round_: int) -> list[Send]:
        """Sends nodes that were given another cause the one that was settled, and whether it is free."""
        if not self.is_corrected or self.decided is None:
            return []
        settled = m.Settled(round_, self.decided)
        return [Send(node_id, settled) for node_id in roster.ready]

    @property
    def next_count(self) -> int:
        """The restart count of the next round, as sent to nodes."""
        return max(self.restart_count, self.end.restart_count + self.is_charged)

    def note_handled(self, *, is_all: bool) -> None:
        """Notes whether the leader has handled everything that nodes have reported."""
        self.is_behind = not is_all

    def await_replacement(self, now: float) -> None:
        """Nodes leave the round in order, so the next one waits some time for others."""
        self.refilled_until = self.join_by = now + self.rules.drain_wait_s

    def _wait(self, deadline: float | None) -> NextStep:
        self.deadline = deadline
        return NextStep.WAIT

    def restart(self, unnotified: list[str], cause: Cause | None, now: float, *, in_place: bool) -> None:
        """Ends a round, for a cause that costs nothing or for what is known; these nodes must be notified.

        Args:
            in_place: workers keep their processes.
        """
        self.is_in_place, self.ahead_until = in_place, None
        if cause is not None:
            self.end.on_free(cause, now)
        self.since = now
        self.end.await_notification(unnotified)

    def crew(self, roster: Roster, gathering: Gathering | None, round_: int, phase: Phase) -> Crew:
        """Returns the nodes of the job that a request may concern, and how many of them the job needs."""
        crew = roster.crew(round_ if phase is Phase.RUNNING else 0, is_closed=phase is Phase.CLOSED)
        coming = () if gathering is None else tuple(gathering.awaited)
        least = self.rules.least_left if round_ else 1  # before the first round, others may still come
        rule = self.policy.drain_rule
        return crew.replace(able=crew.able + coming, least=least, rule="" if rule is None else rule.text)

    def after_drain(self, cause: Cause, leaving: Collection[str]) -> m.Ended | None:
        """Returns how the job ends with a drain, if it does."""
        decision = self.policy.after_drain(cause) if leaving else None
        return None if decision is None else m.Ended(m.Outcome.TIMED_OUT, decision)

    def note_loss(self, roster: Roster, node: m.Node, event: m.Left | Lost, now: float, *, was_finished: bool) -> None:
        """A node of the last round has gone."""
        if not was_finished:
            roster.note_loss(node.host, event.reason)
        self.end.on_gone(node, event, now, ends_round=not was_finished)

    def resume(self, state: JobState, now: float) -> None:
        """This leader continues a job: another leader began its last round."""
        self.restart_count = state.restart_count
        self.cordons.remember(state.ledger.turned(now))
        self.stop(0 if state.last_round is None else len(state.last_round.participants))
        self.since = now

    def note_count(self, restart_count: int) -> None:
        """A node has reported how many restarts were charged, and no log keeps that."""
        self.restart_count = max(self.restart_count, restart_count)

    def inherit(self, gathering: Gathering, now: float) -> bool:
        """The nodes of the last round have reported, or are missing.  Returns whether the round is over."""
        if gathering.has_spares:  # they find the new leader at the same time as the nodes of the round do
            self.spares_until = now + SPARES_TIMEOUT_S
        if (loss := gathering.loss) is not None:
            # A leader that lived for the grace after a failure would have answered it.
            host = gathering.leader_host if gathering.missing == [gathering.leader_rank] else ""
            loss = loss.replace(hosts=(host,) if host else ())
            self.end.on_missing(loss, gathering.lost_at if gathering.is_charged else -inf)
        if (cause := gathering.end) is not None:
            self.end.on_free(cause, inf if gathering.ended is None else -inf)
        return self.end.cause is not None

    def stop(self, size: int = 0, hosts: Iterable[str] = ()) -> None:
        """A round with this many nodes has begun, or the job is over."""
        self.end = RoundEnd(size, self.restart_count, hosts=set(hosts))
        self.since = self.join_by = self.last_call_until = self.spares_until = self.refilled_until = None
        self.is_corrected = self.is_charged = False
        self.decided = None

    def waited_s(self, now: float) -> float:
        return 0.0 if self.since is None else now - self.since

    def starts_in_s(self, now: float) -> float | None:
        """Returns how soon the first round starts without further nodes; `None` if that is not known."""
        if self.last_call_until is None or self.last_call_until <= now:
            return None
        return self.last_call_until - now

    def validate(self) -> None:
        self.end.validate()
