"""The coordinator, one per job: which nodes take part in the next round, when it begins, and when the job is over.

- **Forming**: nodes gather; `forming.py` says when the round begins.
- **Running**: a failure, a lost node or a newcomer that fits ends the round; `first_cause.py` decides what that costs.
- **Gathering**: the round is older than this leader.  Its nodes report, or are given up.

Nodes report their state.  One function, `_on_reported`, decides what follows, whether a node has just connected, has
changed, or repeats its report.  A node with workers of a round that continued without it is **left behind**: it stops
them, and no round waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from aelastic.base.machine import Machine, Trace
from aelastic.rdzv.decisions.cause import Cause, CauseKind
from aelastic.rdzv.decisions.decision import next_round
from aelastic.rdzv.leader import coordinator_events as ev
from aelastic.rdzv.leader.coordinator_events import Phase, Send
from aelastic.rdzv.leader.drain import Drain
from aelastic.rdzv.leader.first_cause import GRACE_S
from aelastic.rdzv.leader.forming import Forming, Newcomers, NextStep
from aelastic.rdzv.leader.gathering import Gathering, credible
from aelastic.rdzv.leader.hang_comparison import HangComparison
from aelastic.rdzv.leader.job_state import JobState, Round
from aelastic.rdzv.leader.roster import SUCCEEDED, Roster, RoundRules, hosts_of, joined, replaced_by
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.messages import NodePhase
from aelastic.rdzv.restart_policy import RestartPolicy


@dataclass(slots=True)
class Coordinator(Machine[ev.Event, Send]):
    rules: RoundRules
    policy: RestartPolicy
    own_node_id: str = ""  # of the agent that runs this coordinator
    phase: Phase = Phase.FORMING
    round: int = 0  # the last completed one; 0: none yet
    deadline: float | None = None
    roster: Roster = field(default_factory=Roster)
    forming: Forming = field(init=False)
    newcomers: Newcomers = field(init=False)
    hang_comparison: HangComparison = field(default_factory=HangComparison)
    drain: Drain[Send] = field(default_factory=lambda: Drain(Send))
    gathering: Gathering | None = None  # of a round that is older than this leader
    verdict: m.Ended | None = None
    version: int = 0  # of the state that the log must keep; rises with each change
    _begun: Round | None = None  # the last round
    _asks: dict[str, tuple[r.Ask, float]] = field(default_factory=dict[str, tuple[r.Ask, float]])  # accepted, and when
    _trace: Trace = field(default_factory=Trace)

    def __post_init__(self) -> None:
        self.forming, self.newcomers = Forming(self.rules, self.policy), Newcomers(self.rules, self.roster)

    @property
    def is_closed(self) -> bool:
        return self.phase is Phase.CLOSED

    @property
    def looks_at_newcomers(self) -> bool:
        """Whether its deadline is the time at which waiting nodes may end the round."""
        return self.phase is Phase.RUNNING and not self.drain.is_on

    def is_due(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline

    def put_off(self, until: float) -> None:
        """Makes waiting nodes wait longer: the next round could not begin now."""
        assert self.looks_at_newcomers, "nothing else can wait"
        self.deadline = until

    def _dispatch(self, event: ev.Event, now: float) -> list[Send]:
        match event:
            case ev.Reported():
                return self._on_reported(event, now)
            case ev.Lost():
                return self._on_gone(event, now)
            case r.Fetch() | r.Fetched():
                return [Send(*each) for each in self.roster.passed_on(event, is_new=self.gathering is not None)]
            case ev.Broken():
                if self.roster.on_broken(event.node_id) and event.node_id in self.roster.participants:
                    self.forming.end.on_broken(event.node_id, now - event.age_s - event.silent_s, now - event.age_s)
                return []  # the fate of its node is reported soon
            case ev.CutOff(kind):  # this leader steps down
                is_ended = kind is CauseKind.CONTINUED_WITHOUT
                return self._on_cut_off(Cause(kind, round=self.round if is_ended else 0))
            case ev.DeadlinePassed():
                return self._on_deadline_passed(event, now)
            case _:
                assert_never(event)

    # What the log keeps.

    def state(self, now: float) -> JobState:
        """Returns everything that a leader must know to continue this job."""
        asks = tuple(self._accepted(now))
        ledger, departed = self.forming.cordons.ledger.turned(now), tuple(sorted(self.roster.departed))
        return JobState(self._begun, self.forming.restart_count, ledger, departed, asks, self.verdict)

    def _accepted(self, now: float) -> list[r.Ask]:
        """Returns the requests that it has accepted and that are not done, with the time that each has left."""
        return [ask.replace(deadline_s=max(0.0, ask.deadline_s - (now - at))) for ask, at in self._asks.values()]

    def resume(self, state: JobState, gone: Iterable[str], now: float) -> None:
        """Continues a job from what the log keeps.

        Args:
            state: from the last entry, with present ages.
            gone: nodes that are known to have ended.
            now: the time.
        """
        assert self.phase is Phase.FORMING and not self.round, "a leader resumes a job before any node reports"
        self.forming.resume(state, now)
        for ask in state.asks:
            self._asks[ask.ask_id] = ask, now
        if state.verdict is not None:
            self.phase, self.verdict = Phase.CLOSED, state.verdict
            return
        if (round_ := state.last_round) is None:
            return
        self._begun, self.round, self.phase = round_, round_.number, Phase.GATHERING
        self.roster.take_round(round_, state.restart_count, state.departed)
        host = round_.participants[round_.leader_rank].host if round_.leader_rank >= 0 else ""
        departed = {*state.departed}
        self.gathering = Gathering(round_.number, round_.node_ids, departed, round_.leader_rank, host, now)
        self.gathering.on_gone(set(gone) & set(round_.node_ids))
        self.deadline = now + GRACE_S

    # What nodes report.

    def _on_reported(self, event: ev.Reported, now: float) -> list[Send]:
        """A node reports its state."""
        node, status, since = event.node, event.status, now - event.age_s
        before = None if event.is_new else self.roster.reported.get(node.node_id)
        if status.left is not None:
            return self._on_gone(status.left.replace(age_s=status.left.age_s + event.age_s), now)
        self.roster.note_report(status)
        past = credible(status.past)
        sends = self._note(event, past, since, now)
        sends += self._follow(node, past, before, now, since)
        return sends + self._on_wishes(status, before, now)

    def _note(self, event: ev.Reported, past: m.Past, since: float, now: float) -> list[Send]:
        """Notes what a report reveals about the round, whatever follows from the state of its node."""
        if self.is_closed:
            return []
        node, is_here = event.node, event.node.node_id in self.roster.participants
        is_own_round = past.fence == self.roster.fence
        sends: list[Send] = []
        if event.is_new:
            sends += self._replace_previous_agent(node, now)
            self.drain.on_connected(node.node_id)
            self.roster.note_round(past.round)
            if not self.round or past.fence > self.roster.fence:  # the log, or the entry of that round, is lost
                self.forming.note_count(past.restart_count)
            if self.gathering is None and is_here and self._has_met(node.node_id):
                back_at = since - event.back_s
                self.forming.end.on_back(node, back_at - event.silent_s, back_at)
        if self.gathering is None and is_here and is_own_round:
            failed_at = None if event.failed_s is None else since - event.failed_s
            self.forming.end.on_past(node.node_id, past, since, failed_at=failed_at)
            if node.unfit and past.phase is NodePhase.READY:
                self.forming.end.unfit.add(node.host)
        return sends

    def _has_met(self, node_id: str) -> bool:
        """Returns whether a node of the round was connected to this leader before; if not, it was only missing."""
        return node_id in self.roster.members or node_id in self.forming.end.losses

    def _follow(self, node: m.Node, past: m.Past, before: m.Status | None, now: float, since: float) -> list[Send]:
        """Does what follows from a node's state."""
        match self.phase:
            case Phase.GATHERING if node.node_id in self.roster.participants and past.fence <= self.roster.fence:
                return self._gather(node, past, since, now)
            case Phase.FORMING | Phase.RUNNING | Phase.GATHERING if past.phase is NodePhase.READY:
                return self._on_waiting(node, past, before, now)
            case Phase.FORMING | Phase.RUNNING | Phase.GATHERING:
                return self._on_workers(node, past, before, now)
            case Phase.CLOSED:  # it receives the verdict once
                return self._close(self.verdict, node) if before is None else []
            case _:
                assert_never(self.phase)

    def _on_waiting(self, node: m.Node, past: m.Past, before: m.Status | None, now: float) -> list[Send]:
        """No worker of a node runs."""
        member = self.roster.members.get(node.node_id)
        is_assigned = member is not None and member.phase is NodePhase.BUSY and past.fence < self.roster.fence
        if is_assigned and (self.phase is Phase.RUNNING or before is not None):
            if node.starts is not m.Starts.READY:  # workers that were started ahead have ended since
                self.roster.opted_in.discard(node.node_id)
            return []  # it has yet to read that, or its plan is on its way once more
        if before is not None and member is not None and not self._is_ready_again(node.node_id, before):
            return self._on_prepared(node, before, now)
        return self._join(node, now)

    def _is_ready_again(self, node_id: str, before: m.Status) -> bool:
        return self.roster.reported[node_id].ready_count != before.ready_count

    def _on_prepared(self, node: m.Node, before: m.Status, now: float) -> list[Send]:
        """A waiting node may have reported how its workers will start."""
        if self.roster.reported[node.node_id].prepared_count == before.prepared_count:
            return []
        if self.roster.set_starts(node.node_id, node.starts) and self.phase is Phase.RUNNING:
            self._look_again(now)
        return self._form(now) if self.phase is Phase.FORMING else []  # newcomers, or a round, may have waited

    def _on_workers(self, node: m.Node, past: m.Past, before: m.Status | None, now: float) -> list[Send]:
        """A node has or had workers: they belong to this round, or must stop."""
        node_id, is_running, is_last = node.node_id, self.phase is Phase.RUNNING, past.fence == self.roster.fence
        has_place, member = is_last and node_id in self.roster.participants, self.roster.members.get(node_id)
        if has_place and member is None and past.phase is NodePhase.FINISHED and is_running:
            self.roster.put(node, NodePhase.FINISHED)  # it was lost after its work was done, so the round continued
            return []
        if member is not None and member.is_left_behind and before is not None:
            return []  # its plan contains that
        if not has_place or member is None or member.is_left_behind:  # its workers are of a round that is over
            was_awaited = self.roster.leave_behind(node) and self.phase is Phase.FORMING
            went_on = Send(node_id, self.forming.went_on(past.round))
            return [went_on, *(self._form(now) if was_awaited else [])]
        if not is_running:
            return self._form(now)
        opted_in = past.has_opted_in and node_id not in self.roster.opted_in
        sends = self._on_opted_in(node_id) if opted_in else []
        return sends + self._on_phase(node, past, now)

    def _on_opted_in(self, node_id: str) -> list[Send]:
        """All workers of a node can leave the round in place."""
        self.roster.opt_in(node_id)  # the node decides how the round ends
        return self.newcomers.start_ahead([*self.roster.ready]) if self.roster.can_all_leave else []

    def _on_phase(self, node: m.Node, past: m.Past, now: float) -> list[Send]:
        """Handles the state of a node in the running round."""
        match past.phase:
            case NodePhase.BUSY:
                return []
            case NodePhase.STOPPING:  # it has stopped its workers without being told to
                return self._end_round(now, Cause(CauseKind.WORKERS_RESTARTED, (node.host,)))
            case NodePhase.FAILED:  # that is noted already
                return self._end_round(now)
            case NodePhase.FINISHED:  # the last one ends the job
                self.roster.put(node, NodePhase.FINISHED)
                return self._close_if_finished()
            case NodePhase.READY:
                raise AssertionError("it has no workers")
            case _:
                assert_never(past.phase)

    def _on_wishes(self, status: m.Status, before: m.Status | None, now: float) -> list[Send]:
        """Handles a node's requests and answers that are new on this connection."""
        known = {each.ask_id for each in before.asks} if before is not None else frozenset[str]()
        news: list[m.NodeMessage] = [each for each in status.asks if each.ask_id not in known]
        if status.frozen is not None and (before is None or status.frozen != before.frozen):
            news.append(status.frozen)
        if status.saved is not None and (before is None or status.saved != before.saved):
            news.append(status.saved)
        if status.question is not None and (before is None or status.question != before.question):
            news.append(status.question)
        if status.places is not None and (before is None or status.places != before.places):
            news.append(status.places)
        return [send for each in news for send in self._on_wish(each, now)]

    def _on_wish(self, wish: m.NodeMessage, now: float) -> list[Send]:
        match wish:
            case m.Hangs() | m.Saw():  # questions are void while no round runs
                return self.hang_comparison.handle(wish, self.round, self.roster) if self.phase is Phase.RUNNING else []
            case r.Ask(node_id, ask_id) if node_id != self.own_node_id and (refusal := self.rules.refusal(wish)):
                return [Send(node_id, r.Answer(ask_id, False, refusal))]
            case r.Ask(_, ask_id) if ask_id in self._asks and self.phase is Phase.GATHERING:
                return []  # it was accepted, and is carried out once the nodes that it is about are back
            case r.Ask(verb=r.Verb.CORDON | r.Verb.UNCORDON) if not self.is_closed:
                sends, cause = self.forming.cordons.ask(wish, self.roster, self.rules.limits, now)
                self.version += 1  # a cordon outlives this leader
                is_on = cause is not None and self.phase is Phase.RUNNING
                return sends + self._end_round(now, cause) if is_on else sends  # it applies from the next round on
            case r.Ask() | r.Frozen() | r.Saved():
                return self._drain(wish, now)  # nodes have more to report, or this leader takes over the round first
            case _:
                raise AssertionError(f"{wish} is no wish")

    def _replace_previous_agent(self, node: m.Node, now: float) -> list[Send]:
        """An agent that joins with the --node-rank of an earlier one replaces it, and its loss is not waited for."""
        if self.is_closed or (old := self.roster.on_connected(node)) is None:
            return []
        return [Send(old, replaced_by(node)), *self._on_gone(ev.Lost(old, "another agent has its node rank"), now)]

    def _join(self, node: m.Node, now: float) -> list[Send]:
        if not self.is_closed:
            self.roster.put(node, NodePhase.READY)
        match self.phase:
            case Phase.FORMING:  # it takes part in the next round
                ahead = self.forming.start_ahead([node.node_id], self.roster, now)
                return ahead + self._form(now)
            case Phase.GATHERING:  # it waits
                return []
            case Phase.RUNNING if node.node_id in self.roster.participants:  # its place in the round is empty
                return self._end_round(now, Cause(CauseKind.WORKERS_RESTARTED, (node.host,)))
            case Phase.RUNNING:  # a newcomer, or a spare, unless it is cordoned
                sends = self.forming.cordons.take(self.roster, now, keep=0)
                self.deadline = self.newcomers.on_come(self.deadline, now)
                if node.starts is m.Starts.READY:  # it became ready while it was lost
                    self._look_again(now)
                ahead = self.newcomers.start_ahead([node.node_id])
                return sends or ahead + self.newcomers.notify([node.node_id], self.deadline, now)
            case Phase.CLOSED:  # it receives the verdict
                return self._close(self.verdict, node)
            case _:
                assert_never(self.phase)

    def _look_again(self, now: float) -> None:
        """A node that waits while a round runs is ready sooner than expected, or is gone."""
        if self.deadline is not None and not self.drain.is_on:
            self.deadline = max(now, self.newcomers.settled_at)

    def _on_gone(self, event: m.Left | ev.Lost, now: float) -> list[Send]:
        node_id = event.node_id
        if (member := self.roster.forget(node_id)) is None:
            return []  # never seen, or reported twice
        was_finished, was_drained = member.phase is NodePhase.FINISHED, self.drain.on_gone(node_id)
        is_participant = node_id in self.roster.participants and (was_drained or not member.is_left_behind)
        if is_participant or node_id in self.forming.end.broken:
            self.forming.note_loss(self.roster, member.node, event, now, was_finished=was_finished)
        match self.phase:
            case Phase.FORMING:  # the round may begin without it
                return self._form(now)
            case Phase.GATHERING:
                return self._gather_without(node_id, now, was_finished=was_finished) if is_participant else []
            case Phase.RUNNING if not is_participant:  # others may have waited for it
                self._look_again(now)
                return []
            case Phase.RUNNING if was_finished:  # it is missed only if the job restarts
                self._depart(node_id)
                sends = self._close_if_finished()
                return sends + (self._drain(None, now) if self.drain.is_on else [])
            case Phase.RUNNING:  # ends the round for free
                return self._end_round(now)
            case Phase.CLOSED:
                return []  # the job is over
            case _:
                assert_never(self.phase)

    def _gather_without(self, node_id: str, now: float, *, was_finished: bool) -> list[Send]:
        """A node of the round that is gathered is gone: it is missing unless it had finished."""
        assert self.gathering is not None
        if was_finished:
            self._depart(node_id)
        else:
            self.gathering.on_gone([node_id])
        return self._end_gathering(now)

    def _depart(self, node_id: str) -> None:
        """A node has finished the round and leaves it; the log keeps that."""
        rank = self.roster.depart(node_id)
        self.version += 1
        if self.gathering is not None:
            self.gathering.on_departed(rank)

    def _on_cut_off(self, cause: Cause) -> list[Send]:
        """This leader steps down: nodes of the round stop their workers.  The next leader decides what follows."""
        match self.phase:
            case Phase.GATHERING | Phase.RUNNING:
                stop = self.forming.interrupted(self.round, next_round(cause))
                return [Send(node.node_id, stop) for node in self.roster.with_workers]
            case Phase.FORMING | Phase.CLOSED:
                return []  # no round runs
            case _:
                assert_never(self.phase)

    def _on_deadline_passed(self, event: ev.DeadlinePassed, now: float) -> list[Send]:
        if not self.is_due(now):
            return []  # disarmed or moved while the event was on its way
        match self.phase:
            case Phase.FORMING:  # the round begins, or the job times out
                return self._form(now)
            case Phase.GATHERING:  # nodes that have not reported are missing
                return self._end_gathering(now, is_late=True)
            case Phase.RUNNING if self.drain.is_on:
                return self._drain(None, now)  # nodes have more to report
            case Phase.RUNNING:  # newcomers are admitted, or wait longer
                hosts, self.deadline, sends = self.newcomers.look(now)
                if hosts and self.rules.admit_s:
                    self.drain.restart_at_save(joined(hosts), self.rules.admit_s, now)
                    return self._drain(None, now)
                return self._end_round(now, joined(hosts)) if hosts else sends
            case Phase.CLOSED:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    def _drain(self, event: r.Request | None, now: float) -> list[Send]:
        """A node requests a drain, or reports progress with one.  Newcomers wait until the drain ends."""
        was_on, roster, gathering = self.drain.is_on, self.roster, self.gathering
        sends = self.drain.handle(event, lambda: self.forming.crew(roster, gathering, self.round, self.phase), now)
        if isinstance(event, r.Ask):
            self._keep(event, sends, now)
        if self.phase is Phase.FORMING or (self.phase is Phase.RUNNING and self.drain.is_over):
            return sends + (self._end_drain(now) if self.phase is Phase.RUNNING else self._form(now))
        if self.phase is Phase.RUNNING and (self.drain.is_on or was_on):
            self.deadline = self.drain.deadline if self.drain.is_on else self.newcomers.on_come(None, now)
        return sends

    def _keep(self, ask: r.Ask, sends: list[Send], now: float) -> None:
        """Keeps an accepted request until it is done: the log remembers it for the next leader."""
        answers = [each.message for each in sends if isinstance(each.message, r.Answer)]
        is_accepted = any(each.ask_id == ask.ask_id and each.is_applied for each in answers)
        if not is_accepted or ask.ask_id in self._asks:
            return
        self.version += 1
        if ask.verb is r.Verb.CANCEL:
            self._forget_drains()
        else:
            self._asks[ask.ask_id] = ask, now

    def _forget_drains(self) -> None:
        """Forgets requests for drains of nodes that need not leave any more."""
        leaving = self.drain.leaving.keys()
        hosts = {self.roster.members[i].node.host for i in leaving if i in self.roster.members}
        for ask_id, (ask, _) in list(self._asks.items()):
            if ask.verb is r.Verb.DRAIN and (ask.target or ask.node_id) not in {*leaving, *hosts}:
                del self._asks[ask_id]

    def _end_drain(self, now: float) -> list[Send]:
        """All workers end together: drained nodes leave, and the others continue if there are enough of them."""
        hosts, cause = self.roster.hosts_without(self.drain.leaving), self.drain.outcome
        assert cause is not None, "a drain is over for a reason"
        if verdict := self.rules.too_few(cause, hosts) or self.forming.after_drain(cause, self.drain.leaving):
            return self.drain.let_go(self.roster.members, now) + self._close(verdict)
        if self.drain.leaving:
            self.forming.await_replacement(now)
        return self._end_round(now, cause, in_place=self.drain.is_in_place)

    def _end_round(self, now: float, cause: Cause | None = None, *, in_place: bool = True) -> list[Send]:
        """Ends the round, for a cause that costs nothing, or for what is known about its end.

        Args:
            in_place: workers keep their processes, if all workers of the job can.
        """
        self.newcomers.on_ended(now, by_newcomers=False)
        self.phase = Phase.FORMING
        in_place = in_place and self.roster.have_all_opted_in
        self.forming.restart(self.roster.stop_participants(), cause, now, in_place=in_place)
        ahead = self.forming.start_ahead([*self.roster.ready], self.roster, now)
        return ahead + self._form(now)

    def _form(self, now: float) -> list[Send]:
        self.forming.cordons.call_back(self.roster, self.rules.min_nodes, self.drain.leaving)
        leave, verdict = self.drain.let_go(self.roster.members, now), self.drain.verdict
        self.drain.on_round_over()
        self.roster.leave_all_behind(send.node_id for send in leave)  # no round waits for these, or includes them
        step = self.forming.next_step(self.roster, is_first=self.round == 0, now=now)
        if verdict is not None and step is not NextStep.END:
            return leave + self._close(verdict)
        is_refill = self.forming.refilled_until is not None
        match step:
            case NextStep.WAIT:
                self.deadline = self.forming.deadline
                return leave + self.forming.notify_of_withdrawal(self.roster, self.round, now)
            case NextStep.NOTIFY:
                return leave + self.forming.notify_of_end(self.roster, self.round) + self._form(now)
            case NextStep.BEGIN:
                return leave + self._begin_round(now)
            case NextStep.GIVE_UP_STOPPING:
                return leave + self.forming.give_up_stopping(self.roster, self.round) + self._form(now)
            case NextStep.END:  # nodes that leave have failed as well
                return self._close(self.forming.verdict)
            case NextStep.TIME_OUT:
                return leave + self._close(self.rules.timed_out(hosts_of(self.roster.ready), is_refill=is_refill))
            case _:
                assert_never(step)

    def _begin_round(self, now: float) -> list[Send]:
        self.phase = Phase.RUNNING
        sends = self.forming.correct(self.roster, self.round)
        sends += self.forming.cordons.take(self.roster, now, keep=self.rules.min_nodes)
        self.round, count = self.roster.next_round(self.round), self.forming.restart_count
        self._begun = self.roster.assign(self.round, count, self.rules.limits, self.own_node_id)
        self.forming.stop(len(self._begun.participants), hosts_of(self.roster.busy))
        self._asks = {ask_id: each for ask_id, each in self._asks.items() if each[0].verb is not r.Verb.RESTART}
        self._forget_drains()
        self.version += 1
        assignments = self.roster.participants
        self.deadline = self.newcomers.on_begun(now)
        sends += [Send(*each) for each in assignments.items()] + self.newcomers.start_ahead([*self.roster.ready])
        return sends + self.newcomers.notify(self.roster.ready, self.deadline, now)

    def _close_if_finished(self) -> list[Send]:
        return [] if self.roster.busy else self._close(SUCCEEDED)

    def _close(self, verdict: m.Ended | None, late: m.Node | None = None) -> list[Send]:
        """Ends the job: sends all nodes the verdict, or one that comes late."""
        assert verdict is not None
        self.version += self.verdict is None
        self.phase, self.deadline, self.verdict, self.gathering = Phase.CLOSED, None, verdict, None
        self.drain.on_round_over()
        self.forming.stop()
        return [Send(node_id, verdict) for node_id in ([late.node_id] if late else self.roster.members)]

    def _gather(self, node: m.Node, past: m.Past, since: float, now: float) -> list[Send]:
        """A node of the round that this leader continues reports its state."""
        assert self.gathering is not None
        assigned = self.roster.participants[node.node_id]
        if past.fence < assigned.fence:  # it does not know of the round yet, or has workers of an earlier one
            if past.phase is not NodePhase.READY:
                return self._on_workers(node, past, None, now)
            past = m.Past(NodePhase.BUSY, assigned.round, term=assigned.term, has_spares=past.has_spares)
        self.gathering.on_reported(node.node_id, past, since)
        self.roster.put(node, past.phase)
        if past.has_opted_in:
            self.roster.opt_in(node.node_id)
        self.forming.end.on_gathered(node, past, since)
        return [Send(node.node_id, assigned), *self._end_gathering(now)]

    def _end_gathering(self, now: float, *, is_late: bool = False) -> list[Send]:
        """Continues the round if it has lost no node, otherwise ends it."""
        gathering = self.gathering
        assert gathering is not None
        if not gathering.are_all_known and not is_late:
            return []
        self.phase, self.gathering = Phase.RUNNING, None
        is_over = self.forming.inherit(gathering, now)
        sends = [send for ask in self._accepted(now) for send in self._on_wish(ask, now)]
        has_ended_it = self.phase is not Phase.RUNNING or self.round != gathering.round  # the next may have begun
        if has_ended_it:
            return sends
        if is_over:
            return sends + self._end_round(now)
        self.deadline = self.newcomers.on_come(None, now)
        finished = self._close_if_finished()
        if not finished:
            sends += self.newcomers.start_ahead([*self.roster.ready])
            sends += self.newcomers.notify(self.roster.ready, self.deadline, now)
        return sends + finished + self._drain(None, now)

    def validate(self) -> None:
        is_forming, is_running = self.phase is Phase.FORMING, self.phase is Phase.RUNNING
        self.roster.validate(is_forming=is_forming, is_running=is_running)
        self.forming.validate()
        self.newcomers.validate()
        if self.gathering is not None:
            self.gathering.validate()
            assert self.deadline is not None, "a leader gathers nodes for a limited time"
        assert (self.verdict is not None) == self.is_closed, "a verdict closes the job"
        assert (self.gathering is not None) == (self.phase is Phase.GATHERING), "gathering is a phase"
        assert not is_running or len(self.roster.participants) <= self.rules.max_nodes, "a round has at most max nodes"
        is_waiting = self.roster.is_awaited or not self.round
        assert self.deadline is not None or is_waiting or not is_forming, "a round that forms waits for something"
        assert self.deadline is None or not self.is_closed, "nothing is due after the verdict"
