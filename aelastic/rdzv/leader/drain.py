"""A drain: before some nodes leave, all ranks of the job save at the same call of `notice.due`.

A restart or a stop of the whole job is a drain that no node leaves.  It happens at once, or after all ranks have saved.

Ranks don't talk to each other about it; their agents do, while training continues.

1. A node **requests** a drain, for itself or for another node.  The earliest deadline of all requests applies.
2. **Freeze.**  Each agent pauses its ranks at their next call, and reports how far its foremost rank is.
3. **Save.**  The leader names the call after the foremost one.  Ranks continue to that call, save there and wait.  If
   no rank has called `notice.due` yet, its first call is named, and workers that handle the drain signal receive it.
   If no rank has called it, and all workers recover in place, nothing is saved: the nodes that stay have the state.
4. Once all nodes have saved, or the time is up, the round **ends** on all of them at once, and the nodes leave.

A leader that takes over receives the request again from the node that made it, and freezes again.  A call that was
named before is named again, unless a rank may be past it.  Without a request it lets the ranks that are paused, or have
saved, continue.  A failure ends the round and the drain with it; the nodes still leave.  While no round runs
they leave at once, because nothing is lost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Generic, TypeVar, assert_never

from aelastic.base.record import Record
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.cause import Cause, CauseKind, SaveOutcome
from aelastic.rdzv.decisions.decision import Decision, DecisionKind
from aelastic.rdzv.protocol.messages import Ended, Outcome
from aelastic.rdzv.protocol.requests import (
    DEADLINE_MIN_S,
    Answer,
    Ask,
    Frozen,
    Notice,
    Request,
    Saved,
    Stage,
    Verb,
)

T = TypeVar("T")

# Agents answer within some 10 ms.  A silent agent may not pause the ranks of the others for longer than this.
FREEZE_S = 5.0
# A node repeats its request as soon as it has found a new leader.
ASKED_AGAIN_S = 1.0
# The round ends this long before the deadline, or after two thirds of a short one.  Halfway through this time, workers
# that still run are killed, which leaves their agent a second to leave.
MARGIN_S = 3.0
DEADLINE_MAX_S = 1e6
ANSWERS_MAX = 256
# How many notices one leader can send; the next leader has a higher term.
NOTICES_OF_A_TERM = 1_000


class DrainPhase(StrEnum):
    OFF = auto()  # no drain
    PAUSED = auto()  # ranks are paused, or have saved, for an earlier leader; nobody has sent this one a request yet
    FREEZING = auto()  # nodes report how far they are
    SAVING = auto()  # nodes save
    OVER = auto()  # all have saved, or the time is up


class Aim(Record):
    """What was requested: a node leaves, or the whole job begins another round or stops."""

    end_at: float  # when the round ends, at the latest
    kill_at: float
    cause: Cause
    verb: Verb = Verb.DRAIN
    at_save: bool = True

    def outcome(self, how: How) -> Cause:
        """Returns the cause of the round's end once this is done."""
        if how.saved is SaveOutcome.NOT_ASKED:
            return self.cause
        return self.cause.replace(saved=how.saved, late=how.late, nodes=how.nodes)


class How(Record):
    """How many nodes have saved, in the terms of `Cause`."""

    saved: SaveOutcome = SaveOutcome.NOT_ASKED
    late: int = 0
    nodes: int = 0


# How the job ends, by request.
_OUTCOMES = {Verb.STOP: Outcome.STOPPED, Verb.KILL: Outcome.KILLED}
_KINDS = {
    Verb.RESTART: CauseKind.RESTART_REQUESTED,
    Verb.STOP: CauseKind.STOP_REQUESTED,
    Verb.KILL: CauseKind.STOP_REQUESTED,
}
_NOT_ASKED = How()
# The cause of a drain whose requests were all withdrawn.
_NOBODY = Cause(CauseKind.DRAIN)


class Crew(Record):
    """The nodes of a job, as its leader sees them."""

    hosts: Mapping[str, str]  # of connected nodes, by node; empty once the job is over
    nodes: tuple[str, ...]  # those that take part in the running round; empty while none runs
    round: int
    term: int  # of the leader
    able: tuple[str, ...]  # nodes with which the job can continue
    least: int = 1  # how many of these the job needs
    rule: str = ""  # if any drain ends the job: the rule of --restart-policy for that


@dataclass(slots=True)
class Drain(Generic[T]):
    """The drain of one job.  Answers to an earlier notice change nothing.

    Args:
        send: makes an action that sends a message to a node.
    """

    send: Callable[[str, Notice | Answer], T]
    phase: DrainPhase = DrainPhase.OFF
    deadline: float | None = None
    leaving: dict[str, Aim] = field(default_factory=dict[str, Aim])  # of nodes that will leave
    aim: Aim | None = None  # for the whole job
    save_at: int = 0
    notice_id: int = 0
    outcome: Cause | None = None  # of the last drain that is over
    late: How = _NOT_ASKED  # if not all ranks have saved: why
    is_signalled: bool = False
    is_in_place: bool = False  # on nodes that stay, workers keep their processes, and nothing was saved
    _how: How = _NOT_ASKED  # how the last one ended
    _round: int = 0
    _nodes: tuple[str, ...] = ()  # that take part in that round
    _awaited: set[str] = field(default_factory=set[str])  # those of them that have not frozen yet, or not saved
    _frozen: dict[str, Frozen] = field(default_factory=dict[str, Frozen])
    _let_go: set[str] = field(default_factory=set[str])  # nodes that were sent the notice to leave
    _answers: OrderedDict[str, Answer] = field(default_factory=OrderedDict[str, Answer])  # by request

    @property
    def is_on(self) -> bool:
        """Whether a drain of the running round is on."""
        return self.phase is not DrainPhase.OFF

    @property
    def is_over(self) -> bool:
        """Whether the round must end now."""
        return self.phase is DrainPhase.OVER

    @property
    def _first(self) -> Aim:
        """The request with the earliest end."""
        aims = [*self.leaving.values(), *([] if self.aim is None else [self.aim])]
        return min(aims, key=lambda each: each.end_at, default=Aim(0.0, 0.0, _NOBODY))

    @property
    def verdict(self) -> Ended | None:
        """How the job ends once no round runs; `None` if no request ends it."""
        aim = self.aim
        if aim is None or aim.verb is Verb.RESTART:
            return None
        has_saved = aim.at_save and self.is_over
        outcome, cause = (Outcome.SAVED, aim.outcome(self._how)) if has_saved else (_OUTCOMES[aim.verb], aim.cause)
        return Ended(outcome, Decision(DecisionKind.STOPPED, cause))

    def handle(self, request: Request | None, crew: Callable[[], Crew], now: float) -> list[T]:
        """Handles a node's message, the time or a new round; returns what is sent to nodes.

        Args:
            request: the message, if there is one.
            crew: returns the nodes; called only if needed, so that a message costs the same in a job of any size.
            now: the time.
        """
        match request:
            case Ask():
                answer = self.send(request.node_id, self._answer(request, nodes := crew(), now))
                return [answer, *self._follow(nodes, now)]
            case Frozen():
                return self._on_frozen(request, now)
            case Saved(node_id, notice_id) if self.phase is DrainPhase.SAVING and notice_id == self.notice_id:
                self._awaited.discard(node_id)
                return [] if self._awaited else self._go_on(now)
            case Saved(_, notice_id) if self.phase is DrainPhase.OFF and notice_id > self.notice_id:
                self._on_paused(notice_id, now)
                return []
            case Saved():
                return []  # it answers an earlier notice
            case None:
                is_due = self.deadline is not None and now >= self.deadline
                sends = self._on_deadline_passed(crew(), now) if is_due else []
                return sends + self._follow(crew(), now)
            case _:
                assert_never(request)

    def forget(self, nodes: Iterable[str]) -> bool:
        """These nodes stay; returns whether one of them was to leave."""
        known = self.leaving.keys() & {*nodes}
        for node_id in known:
            del self.leaving[node_id]
        return bool(known)

    def on_gone(self, node_id: str) -> bool:
        """A node is gone, so nothing waits for it; returns whether it was to leave."""
        self._let_go.discard(node_id)
        if self.is_on:
            self._awaited.discard(node_id)
            self._nodes = tuple(each for each in self._nodes if each != node_id)
        return self.forget([node_id])

    def on_round_over(self) -> None:
        self.phase, self.deadline = DrainPhase.OFF, None
        self.aim = None if self.aim is None or self.aim.verb is Verb.RESTART else self.aim

    def restart_at_save(self, cause: Cause, within_s: float, now: float) -> None:
        """The leader itself wants the running round to end, once all ranks have saved."""
        self.aim = Aim(now + within_s, now + within_s + MARGIN_S, cause, Verb.RESTART, at_save=True)

    def let_go(self, node_ids: Container[str], now: float) -> list[T]:
        """Sends the notice to leave, once, to those of these nodes that must leave."""
        nodes = [node_id for node_id in self.leaving if node_id in node_ids and node_id not in self._let_go]
        self._let_go.update(nodes)
        aims = {node_id: self.leaving[node_id] for node_id in nodes}
        settled = {node_id: aim.replace(cause=aim.outcome(self.late)) for node_id, aim in aims.items()}
        return [self.send(node_id, self._notice(Stage.LEAVE, leaving, now)) for node_id, leaving in settled.items()]

    def on_connected(self, node_id: str) -> None:
        """A node may have missed the notice to leave."""
        self._let_go.discard(node_id)

    # Messages of nodes.

    def _answer(self, ask: Ask, crew: Crew, now: float) -> Answer:
        """Decides on a request once, and returns the same answer whenever it is repeated.

        A repeated drain is applied again, because its node may have been lost meanwhile.
        """
        answer = self._answers.get(ask.ask_id)
        if answer is None or (answer.is_applied and ask.verb is Verb.DRAIN):
            is_of_job = ask.verb in _KINDS
            is_applied, words = self._apply_to_job(ask, crew, now) if is_of_job else self._apply(ask, crew, now)
            answer = self._answers[ask.ask_id] = Answer(ask.ask_id, is_applied, words)
            if len(self._answers) > ANSWERS_MAX:
                self._answers.popitem(last=False)
        return answer

    def _apply(self, ask: Ask, crew: Crew, now: float) -> tuple[bool, str]:
        target, hosts = ask.target or ask.node_id, crew.hosts
        nodes = [node_id for node_id, host in hosts.items() if target in {node_id, host}]
        names = ", ".join(sorted({hosts[node_id] for node_id in nodes}))
        if not nodes:
            return False, f"no node {target}" if hosts else "the job has ended"
        if ask.verb is Verb.CANCEL:
            is_asked = self.forget(nodes)
            by = f" ({ask.reason})" if ask.reason else ""
            return is_asked, f"{names} stays{by}" if is_asked else f"{names} is not asked to leave"
        if problem := _problem_of(ask.deadline_s, "stop the node instead"):
            return False, problem
        if ask.spares_job and (why := self._end_of_job(nodes, crew)):
            return False, f"this ends the job: {why}; --force drains {names} anyway"
        margin_s, until = min(MARGIN_S, ask.deadline_s / 3), now + ask.deadline_s
        leaving = sorted({hosts[node_id] for node_id in nodes})
        cause = Cause.of_hosts(CauseKind.DRAIN, leaving, within_s=ask.deadline_s, detail=ask.reason)
        for node_id in nodes:
            new = Aim(until - margin_s, until - margin_s / 2, cause)
            self.leaving[node_id] = min(new, self.leaving.get(node_id, new), key=lambda each: each.end_at)
        return True, wording.text_of(cause)

    def _end_of_job(self, nodes: Sequence[str], crew: Crew) -> str:
        """Returns why the job ends if these nodes also leave; empty if it continues, or if they leave anyway."""
        if self.leaving.keys() >= {*nodes}:
            return ""
        if crew.rule:
            return f"{crew.rule} (--restart-policy)"
        left = {*crew.able} - {*nodes} - self.leaving.keys()
        if len(left) >= crew.least:
            return ""
        few = f"{len(left)} of at least {crew.least} nodes" if left else "no node"
        return f"{few} would be left"

    def _apply_to_job(self, ask: Ask, crew: Crew, now: float) -> tuple[bool, str]:
        if not crew.hosts:
            return False, "the job has ended"
        if ask.verb is Verb.RESTART and ask.round and crew.round and ask.round != crew.round:
            return True, f"round {ask.round} has ended already"  # a request to an earlier leader, repeated
        if ask.at_save and (problem := _problem_of(ask.deadline_s, "leave --at-save out")):
            return False, problem
        until_s = ask.deadline_s if ask.at_save else 0.0
        asker = crew.hosts.get(ask.node_id, ask.node_id)
        cause = Cause(_KINDS[ask.verb], (asker,), detail=ask.reason)
        new, old = Aim(now + until_s, now + until_s + MARGIN_S, cause, ask.verb, ask.at_save), self.aim
        if old is None or old.verb is Verb.RESTART or (new.verb is not Verb.RESTART and new.end_at <= old.end_at):
            self.aim = new
        first = f": all ranks save first, within {until_s:.0f} s" if ask.at_save else ""
        return True, wording.text_of(cause) + first

    def _on_frozen(self, frozen: Frozen, now: float) -> list[T]:
        """A node has paused its ranks.  Once all nodes do, the call is named."""
        is_awaited = self.phase is DrainPhase.FREEZING and frozen.notice_id == self.notice_id
        self._on_paused(frozen.notice_id, now)
        if not is_awaited or frozen.node_id not in self._awaited:
            return []
        self._frozen[frozen.node_id] = frozen
        self._awaited.discard(frozen.node_id)
        return [] if self._awaited else self._go_on(now)

    def _on_paused(self, notice_id: int, now: float) -> None:
        """A node's ranks wait for the next notice.  If no drain is on, an earlier leader announced one."""
        if self.phase is DrainPhase.OFF:
            self.phase, self.deadline = DrainPhase.PAUSED, now + ASKED_AGAIN_S
        self.notice_id = max(self.notice_id, notice_id)

    def _on_deadline_passed(self, crew: Crew, now: float) -> list[T]:
        if self.phase is DrainPhase.PAUSED:
            is_asked = self.aim is not None or self.leaving.keys() & {*crew.nodes}
            return [] if is_asked else self._call_off(crew)
        if self.phase is DrainPhase.FREEZING and now < self._first.end_at:
            self.is_signalled = True
            return self._save(now)  # an agent is silent, so no call can be named
        late = How(SaveOutcome.LATE, len(self._awaited), len(self._nodes))
        self.late = late if self.phase is DrainPhase.SAVING else How(SaveOutcome.NO_CALL)
        self._end(self.late)
        return []

    # Moves.

    def _follow(self, crew: Crew, now: float) -> list[T]:
        """Begins a drain of the running round, calls it off, or changes its deadline."""
        if not crew.nodes:
            return []
        sends = self.let_go(crew.hosts.keys() - {*crew.nodes}, now)  # nodes without a part in it
        if not self.leaving.keys() & {*crew.nodes} and self.aim is None:
            return sends + (self._call_off(crew) if self.phase in {DrainPhase.FREEZING, DrainPhase.SAVING} else [])
        if self.aim is not None and not self.aim.at_save:
            self._end(_NOT_ASKED)
            return sends
        if not self._awaited and self.phase in {DrainPhase.FREEZING, DrainPhase.SAVING}:  # the last one is gone
            return sends + self._go_on(now)
        if self.phase is DrainPhase.PAUSED and now >= self._first.end_at:  # requested while this leader took over
            self.late = How(SaveOutcome.NO_CALL)
            self._end(self.late)
            return sends
        if self.phase in {DrainPhase.OFF, DrainPhase.PAUSED}:
            self.phase, self._round, self._nodes = DrainPhase.FREEZING, crew.round, crew.nodes
            self.save_at, self._frozen, self._awaited = 0, {}, {*crew.nodes}
            self.notice_id, self.is_signalled, self.late = self._next_id(crew), False, _NOT_ASKED
            self.is_in_place = False
            self.deadline = min(now + FREEZE_S, self._first.end_at)
            return sends + self._notify(Stage.FREEZE, now)
        if self.deadline is None or self.deadline <= self._first.end_at:
            return sends
        self.deadline = self._first.end_at
        return sends + (self._notify(Stage.SAVE, now) if self.phase is DrainPhase.SAVING else [])

    def _go_on(self, now: float) -> list[T]:
        """All nodes that are left have frozen, or saved."""
        if self.phase is DrainPhase.SAVING:
            self._end(How(SaveOutcome.ALL))
            return []
        frozen = self._frozen.values()
        if self._can_end_in_place:
            self.is_in_place = True
            self._end(_NOT_ASKED)
            return []
        before = max((each.save_at for each in frozen), default=0)
        is_ahead = all(each.calls < before or each.calls == before == each.save_at for each in frozen)
        self.save_at = before if before and is_ahead else max((each.calls for each in frozen), default=0) + 1
        self.is_signalled = not any(each.pages for each in frozen)
        return self._save(now)

    @property
    def _can_end_in_place(self) -> bool:
        """Whether nodes with the state stay, and no script waits for its call."""
        stay = self._frozen.keys() - self.leaving.keys()
        is_asked = any(each.pages for each in self._frozen.values())
        have_opted_in = all(each.has_opted_in for each in self._frozen.values())
        return bool(stay) and self.aim is None and have_opted_in and not is_asked

    def _save(self, now: float) -> list[T]:
        self.phase, self._awaited, self.deadline = DrainPhase.SAVING, {*self._nodes}, self._first.end_at
        return self._notify(Stage.SAVE, now)

    def _end(self, how: How) -> None:
        self.phase, self.deadline, self._how, self.outcome = DrainPhase.OVER, None, how, self._first.outcome(how)

    def _call_off(self, crew: Crew) -> list[T]:
        self.on_round_over()
        self.notice_id = self._next_id(crew)
        return [self.send(node_id, Notice(self.notice_id, crew.round, Stage.NONE)) for node_id in crew.nodes]

    def _next_id(self, crew: Crew) -> int:
        return max(self.notice_id + 1, crew.term * NOTICES_OF_A_TERM)

    def _notify(self, stage: Stage, now: float) -> list[T]:
        notice = self._notice(stage, self._first, now)
        return [self.send(node_id, notice) for node_id in self._nodes]

    def _notice(self, stage: Stage, aim: Aim, now: float) -> Notice:
        left_s = max(0.0, aim.kill_at - now)
        verb = Verb.DRAIN if self.leaving or self.aim is None else self.aim.verb
        return Notice(self.notice_id, self._round, stage, self.save_at, self.is_signalled, left_s, aim.cause, verb)

    def validate(self) -> None:
        is_timed = self.phase in {DrainPhase.PAUSED, DrainPhase.FREEZING, DrainPhase.SAVING}
        assert (self.deadline is not None) == is_timed, "ranks are paused, and saves awaited, for a limited time"
        assert not self.is_over or self.leaving or self.aim, "a drain is over for nodes that leave, or for the job"


def _problem_of(deadline_s: float, instead: str) -> str:
    """Returns why nodes cannot save within that time; empty if they can."""
    if deadline_s > DEADLINE_MAX_S:
        return f"{deadline_s:g} s is too long: use {DEADLINE_MAX_S:,.0f} s at most"
    return "" if deadline_s >= DEADLINE_MIN_S else f"{deadline_s:g} s is too short to save: {instead}"
