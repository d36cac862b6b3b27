"""Whether workers are started again after a round's end, what that costs, and why not.

Pure.  What ends a round for free (nodes that come, leave or drain, what somebody asks for) asks only where a rule names
it; each failure does.  `--max-restarts` is the budget of all rules that have none of their own.
"""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from aelastic.core.record import Record
from aelastic.failures.failure import ProcessFailure
from aelastic.rdzv.ledger import BROKEN_S, Ledger, Reached

if TYPE_CHECKING:
    from aelastic.rdzv.restart_rules import Condition, Rule

# At most one in so many hosts is kept out at once, and one always may be.
SEATS_PER_ABSENT = 10
OFF = "restarts are off (max_restarts is 0)"
PROOF = "restarting will not help"
SPENT = "all restarts of its rule are spent"
BY_RULE = "(--restart-policy)"
LARGER = "a larger --max-restarts, or a rule with a budget of its own"
# What a decision ends with, and what would have changed it; the first that is found counts.
_OTHERWISE = {
    OFF: "--max-restarts N",
    "restart is used up": LARGER,
    "restarts are used up": LARGER,
    PROOF: "a step that is new (--progress), or --restart-policy '*: restart'",
    SPENT: "a larger budget in that rule, or another rule after it",
    BY_RULE: "another rule in its place",
}


def otherwise(decided: str) -> str:
    """What would have changed a decision; "" where nothing that is known would."""
    return next((text for found, text in _OTHERWISE.items() if found in decided), "")


class Cause(Record):
    """Why a round has ended: a failure, or something that is free unless a rule says otherwise."""

    reason: str  # empty while a connection is broken, and its node may yet come back
    failure: ProcessFailure | None = None
    is_loss: bool = False  # a node was lost
    lost: str = ""  # its host, if that is known

    @staticmethod
    def is_failure(reason: str) -> bool:
        """Whether what nodes are told is that a worker has failed, be it charged or not."""
        return re.match(r"rank \d+ failed on ", reason) is not None

    @classmethod
    def of(cls, failure: ProcessFailure) -> Cause:
        return cls(f"rank {failure.rank} failed on {failure.host}", failure)

    @property
    def culprit(self) -> str:
        """The host that this is evidence against; empty if it proves nothing of one."""
        if self.failure is None:
            return self.lost
        return self.failure.host if not innocence(self.failure) else ""


def innocence(failure: ProcessFailure) -> str:
    """Why a failure alone is held against no host; empty if it is."""
    if failure.found_by:
        return "a hang"
    if failure.runs_out_of_memory:
        return "lack of memory"
    if failure.exitcode in {-signal.SIGBUS, -signal.SIGSEGV}:
        return ""
    if failure.names_lost_peer:
        return "a connection that was lost"
    return "a signal" if failure.is_signal else "an error of the script"


def blame_of(failure: ProcessFailure) -> str:
    """What a failure says of its host."""
    why = innocence(failure)
    if why:
        return f"{failure.host} is not blamed: {why} alone proves nothing of a host"
    return f"{failure.host} is blamed: twice within a day, and it has no seat while there are enough nodes"


class End(Record):
    """All that a decision is made of."""

    cause: Cause
    restart_count: int = 0  # charged so far
    ledger: Ledger = Ledger()
    reached: Reached = Reached()
    is_complete: bool = True  # all nodes of the round have said how far they were
    now: float = 0.0
    seats: int = 1  # of the round
    hosts: int = 1  # that these are on
    unfit: frozenset[str] = frozenset()  # hosts that have come out of the round unfit, by their own check

    @property
    def has_advanced(self) -> bool | None:
        return self.ledger.advance(self.reached, is_complete=self.is_complete)


class Decision(Record):
    """What follows."""

    text: str  # the whole sentence
    is_final: bool = False  # the job is over
    is_charged: bool = False  # to `--max-restarts`
    delay_s: float = 0.0  # before workers start again
    rule: int = -1  # whose budget pays; -1: none
    window_s: float = 0.0  # of that
    excluded: str = ""  # a host that has no seat for some time
    for_s: float = 0.0  # as `Ledger.exclude` has it


class RestartPolicy(Record):
    """What follows from the end of a round (torchrun: `--max-restarts` alone, per agent there).

    Args:
        max_restarts: for the whole job.
        rules: `None`: the default, `restart_rules.DEFAULT`.
        text: of the rules.
    """

    max_restarts: int
    rules: tuple[Rule, ...] | None = None
    text: str = ""

    def decide(self, end: End) -> Decision:
        """What follows from an end.  The same end has the same answer, however often it is asked for."""
        decision, host = self._judge(end), end.cause.culprit
        may_be_broken = host and end.hosts > 1 and not decision.is_final
        if not may_be_broken or not end.ledger.is_broken(host, end.now, is_loss=end.cause.is_loss):
            return decision
        text = f"{decision.text}; again {host} is the cause: it has no seat while there are enough nodes"
        return self._without(host, decision, end, text).replace(for_s=BROKEN_S)

    def _judge(self, end: End) -> Decision:
        cause, failure = end.cause, end.cause.failure
        if failure is not None and failure.why_final:
            return Decision(f"{cause.reason}; {failure.why_final}", is_final=True)
        if failure is None and not (cause.is_loss and self.rules):
            return Decision(cause.reason)
        spent = ""
        for place, rule in enumerate(self._rules(end)):
            if not any(self._holds(each, place, end) for each in rule.conditions):
                continue
            if not rule.most or end.ledger.spent_by(place, end.now - rule.window_s) < rule.most:
                return self._follow(rule, place, end)
            spent = spent or f"; {SPENT} ({rule.text})"
        if spent:
            return Decision(cause.reason + spent, is_final=True)
        return Decision(cause.reason) if failure is None else self._charge(end)

    def after(self, end: End, decision: Decision) -> Ledger:
        """What is remembered of an end once workers are to start again."""
        from aelastic.failures.root_cause import root_of

        failure = end.cause.failure
        if failure is None:
            ledger = end.ledger.replace(root="", step=max(end.ledger.step, end.reached.step))
        else:
            ledger = end.ledger.after(root_of(failure), end.reached, is_complete=end.is_complete)
        if decision.excluded:
            why = "lost again" if failure is None else failure.headline[:200]
            ledger = ledger.exclude(decision.excluded, why, end.now, decision.for_s)
        for host in sorted({end.cause.culprit, *end.unfit} - {""}) if end.hosts > 1 else ():
            is_unfit = host in end.unfit and end.ledger.is_broken(host, end.now)
            if is_unfit and host not in ledger.absent(end.now) and self._room(host, ledger, end):
                ledger = ledger.exclude(host, "unfit again", end.now, BROKEN_S)
            ledger = ledger.blame(host, end.now, is_loss=host not in end.unfit and end.cause.is_loss)
        return ledger.spend(decision.rule, end.now, decision.window_s) if decision.rule >= 0 else ledger

    def after_drain(self, text: str) -> str:
        """Why the job ends with a drain; empty if it goes on."""
        return f"{text}; {self.drain_rule}" if self.drain_rule else ""

    @property
    def drain_rule(self) -> str:
        """The rule by which a drain ends the job; empty if none does."""
        rule = next((each for each in self.rules or () if any(c.word == "drained" for c in each.conditions)), None)
        return f"{rule.text} {BY_RULE}" if rule is not None and rule.action == "stop" else ""

    def _rules(self, end: End) -> tuple[Rule, ...]:
        if self.rules is not None:
            return self.rules
        if not end.ledger.root or end.has_advanced is not False:
            return ()  # no proof: what is left of the default is a restart
        from aelastic.rdzv.restart_rules import DEFAULT

        return DEFAULT

    def _holds(self, condition: Condition, place: int, end: End) -> bool:
        """Whether a condition of the rule in that place does."""
        failure = end.cause.failure
        if failure is None:
            return condition.word == "node-lost"
        match condition.word:
            case "exit":
                return condition.first <= failure.exitcode <= condition.last
            case "signal":
                return failure.exitcode == -condition.first and not failure.found_by
            case "error":
                return place in failure.matched_rules  # found out where it failed
            case "oom":
                return failure.runs_out_of_memory
            case "hang":
                return bool(failure.found_by)
            case "unfit":
                return failure.host in end.unfit
            case "same-error":
                return self._is_proved(failure, end, takes_any=condition.pattern == "any")
            case "no-progress":
                return end.has_advanced is False and end.ledger.still + 1 >= condition.first
            case word:
                return word == "*"

    @staticmethod
    def _is_proved(failure: ProcessFailure, end: End, *, takes_any: bool) -> bool:
        if not end.ledger.root or end.has_advanced is not False:
            return False
        from aelastic.failures.root_cause import is_certain, root_of

        return root_of(failure) == end.ledger.root and (takes_any or is_certain(failure))

    def _follow(self, rule: Rule, place: int, end: End) -> Decision:
        cause, failure = end.cause, end.cause.failure
        if rule.action == "stop":
            why = f"; {rule.text}"
            if failure and any(each.word == "same-error" and self._holds(each, place, end) for each in rule.conditions):
                what, (_, at, where) = failure.message.strip().partition("\n")[0], end.ledger.root.partition(" at ")
                why = f": {what}{at}{where}, twice without progress: {PROOF}"
            return Decision(f"{cause.reason}{why} {BY_RULE}", is_final=True)
        if rule.action == "ignore":
            return Decision(f"{cause.reason}; this restart costs none ({rule.text})")
        if rule.action == "elsewhere":
            decision = self._charge(end)
            if failure is None or decision.is_final:
                return decision
            return self._without(failure.host, decision, end, f"{decision.text}, without {failure.host}")
        times = 0 if end.has_advanced else min(end.ledger.still, 60)
        delay_s = min(rule.after[0] * 2.0**times, rule.after[1])
        if not rule.most:
            return self._charge(end, delay_s)
        from aelastic.rdzv.restart_rules import in_time

        number = end.ledger.spent_by(place, end.now - rule.window_s) + 1
        budget = f"restart {number} of {rule.most} within {in_time(rule.window_s)}{_after(delay_s)}"
        return Decision(f"{cause.reason}; {budget}", False, False, delay_s, place, rule.window_s)

    def _without(self, host: str, decision: Decision, end: End, text: str) -> Decision:
        """A restart without a host; where too many are without a seat already, the cause is another."""
        if not self._room(host, end.ledger, end):
            absent = len(end.ledger.absent(end.now).keys() - {host})
            few = f"{host} keeps its seat: {absent} of {end.seats} are empty already, and all fail alike"
            return decision.replace(text=f"{decision.text}; {few}")
        return decision.replace(text=text, excluded=host)

    @staticmethod
    def _room(host: str, ledger: Ledger, end: End) -> bool:
        """Whether one host more may be without a seat."""
        return len(ledger.absent(end.now).keys() - {host}) < max(1, end.seats // SEATS_PER_ABSENT)

    def _charge(self, end: End, delay_s: float = 0.0) -> Decision:
        if end.restart_count < self.max_restarts:
            number = f"restart {end.restart_count + 1} of {self.max_restarts}{_after(delay_s)}"
            return Decision(f"{end.cause.reason}; {number}", is_charged=True, delay_s=delay_s)
        match self.max_restarts:
            case 0:
                refusal = OFF
            case 1:
                refusal = "the only restart is used up"
            case many:
                refusal = f"all {many} restarts are used up"
        return Decision(f"{end.cause.reason}; {refusal}", is_final=True)


def _after(delay_s: float) -> str:
    return f", after {delay_s:g} s" if delay_s else ""
