"""Whether workers restart after a round ends, what that costs, and why not.

Pure.  Every failure is decided here.  Ends that are not charged (nodes that join, leave or drain, requests) are decided
here only if a rule names them.  `--max-restarts` is the budget of all rules without one of their own.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from aelastic.base.record import Record
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.rdzv.decisions.cause import Cause, CauseKind, Innocence
from aelastic.rdzv.decisions.decision import Decision, DecisionKind, next_round
from aelastic.rdzv.ledger import BROKEN_S, Ledger, Reached

if TYPE_CHECKING:
    from aelastic.rdzv.restart_rules import Condition, Rule

# At most one host for this many nodes is cordoned at once, but one always may be.
NODES_PER_ABSENT = 10


def cause_of(failure: ProcessFailure) -> Cause:
    """Returns a worker's failure as the cause of its round's end."""
    return Cause(CauseKind.FAILURE, (failure.host,), (failure.rank,))


def innocence(failure: ProcessFailure) -> Innocence | None:
    """Returns why a failure alone is not evidence against its host; `None` if it is."""
    if failure.found_by:
        return Innocence.HANG
    if failure.runs_out_of_memory:
        return Innocence.MEMORY
    if failure.exitcode in {-signal.SIGBUS, -signal.SIGSEGV}:
        return None
    if failure.names_lost_peer:
        return Innocence.LOST_CONNECTION
    return Innocence.SIGNAL if failure.is_signal else Innocence.ERROR


def culprit_of(cause: Cause, failure: ProcessFailure | None) -> str:
    """Returns the host that the end of a round is evidence against, or ""."""
    if failure is None:
        return cause.lost_host
    return failure.host if innocence(failure) is None else ""


class End(Record):
    """Everything that a decision depends on."""

    cause: Cause
    failure: ProcessFailure | None = None  # if that is the cause
    restart_count: int = 0  # charged so far
    ledger: Ledger = Ledger()
    reached: Reached = Reached()
    is_complete: bool = True  # all nodes of the round have reported how far they were
    now: float = 0.0
    nodes: int = 1  # of the round
    hosts: int = 1  # that these are on
    unfit: frozenset[str] = frozenset()  # hosts whose own check found them unfit after the round

    @property
    def has_advanced(self) -> bool | None:
        return self.ledger.advance(self.reached, is_complete=self.is_complete)

    @property
    def culprit(self) -> str:
        """The host that this end is evidence against, or ""."""
        return culprit_of(self.cause, self.failure)


class RestartPolicy(Record):
    """What follows from the end of a round (torchrun: `--max-restarts` alone, per agent there).

    Args:
        max_restarts: for the whole job.
        rules: `None`: the default, `restart_rules.DEFAULT`.
        text: the rules as text.
    """

    max_restarts: int
    rules: tuple[Rule, ...] | None = None
    text: str = ""

    def decide(self, end: End) -> Decision:
        """Returns what follows from an end.  The same end always gets the same decision."""
        decision, host = self._judge(end), end.culprit
        may_be_broken = host and end.hosts > 1 and not decision.is_final
        if not may_be_broken or not end.ledger.is_broken(host, end.now, is_loss=end.cause.is_loss):
            return decision
        return self._without(host, decision, end, for_s=BROKEN_S)

    def _judge(self, end: End) -> Decision:
        cause, failure = end.cause, end.failure
        if failure is not None and failure.why_final:
            return Decision(DecisionKind.CANNOT_RECOVER, cause, error=failure.why_final)
        if failure is None and not (cause.is_loss and self.rules):
            return next_round(cause)
        spent = None
        for place, rule in enumerate(self._rules(end)):
            if not any(self._holds(each, place, end) for each in rule.conditions):
                continue
            if not rule.most or end.ledger.spent_by(place, end.now - rule.window_s) < rule.most:
                return self._follow(rule, place, end)
            spent = spent or Decision(DecisionKind.RULE_SPENT, cause, rule=rule.text)
        if spent is not None:
            return spent
        return next_round(cause) if failure is None else self._charge(end)

    def after(self, end: End, decision: Decision) -> Ledger:
        """Returns the ledger with this end, once workers will restart."""
        from aelastic.diagnose.failures.root_cause import root_of

        failure = end.failure
        if failure is None:
            ledger = end.ledger.replace(root="", step=max(end.ledger.step, end.reached.step))
        else:
            ledger = end.ledger.after(root_of(failure), end.reached, is_complete=end.is_complete)
        if decision.cordoned:
            why = "lost again" if failure is None else failure.headline[:200]
            ledger = ledger.exclude(decision.cordoned, why, end.now, decision.for_s)
        for host in sorted({end.culprit, *end.unfit} - {""}) if end.hosts > 1 else ():
            is_unfit = host in end.unfit and end.ledger.is_broken(host, end.now)
            if is_unfit and host not in ledger.absent(end.now) and self._room(host, ledger, end):
                ledger = ledger.exclude(host, "unfit again", end.now, BROKEN_S)
            ledger = ledger.blame(host, end.now, is_loss=host not in end.unfit and end.cause.is_loss)
        return ledger.spend(decision.place, end.now, decision.within_s) if decision.place >= 0 else ledger

    def after_drain(self, cause: Cause) -> Decision | None:
        """Returns how a drain ends the job; `None` if the job continues."""
        rule = self.drain_rule
        return None if rule is None else Decision(DecisionKind.STOPPED_BY_RULE, cause, rule=rule.text)

    @property
    def drain_rule(self) -> Rule | None:
        """The rule that ends the job on a drain, if any."""
        rule = next((each for each in self.rules or () if any(c.word == "drained" for c in each.conditions)), None)
        return rule if rule is not None and rule.action == "stop" else None

    def _rules(self, end: End) -> tuple[Rule, ...]:
        if self.rules is not None:
            return self.rules
        if not end.ledger.root or end.has_advanced is not False:
            return ()  # no proof, so the default rules can only restart
        from aelastic.rdzv.restart_rules import DEFAULT

        return DEFAULT

    def _holds(self, condition: Condition, place: int, end: End) -> bool:
        """Returns whether a condition of the rule at that place holds."""
        failure = end.failure
        if failure is None:
            return condition.word == "node-lost"
        match condition.word:
            case "exit":
                return condition.first <= failure.exitcode <= condition.last
            case "signal":
                return failure.exitcode == -condition.first and not failure.found_by
            case "error":
                return place in failure.matched_rules  # matched on the node where it failed
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
        from aelastic.diagnose.failures.root_cause import is_certain, root_of

        return root_of(failure) == end.ledger.root and (takes_any or is_certain(failure))

    def _follow(self, rule: Rule, place: int, end: End) -> Decision:
        cause, failure = end.cause, end.failure
        match rule.action:
            case "stop":
                conditions = [each for each in rule.conditions if each.word == "same-error"]
                if failure is not None and any(self._holds(each, place, end) for each in conditions):
                    return Decision(DecisionKind.SAME_ERROR, cause, rule=rule.text, error=_error_of(failure))
                return Decision(DecisionKind.STOPPED_BY_RULE, cause, rule=rule.text)
            case "ignore":
                return Decision(DecisionKind.RESTART_FREE, cause, rule=rule.text)
            case "elsewhere":
                decision = self._charge(end)
                if failure is None or decision.is_final:
                    return decision
                return self._without(failure.host, decision, end)
            case _:
                pass
        times = 0 if end.has_advanced else min(end.ledger.still, 60)
        delay_s = min(rule.after[0] * 2.0**times, rule.after[1])
        if not rule.most:
            return self._charge(end, delay_s)
        return Decision(
            DecisionKind.RESTART_BY_RULE,
            cause,
            number=end.ledger.spent_by(place, end.now - rule.window_s) + 1,
            most=rule.most,
            within_s=rule.window_s,
            delay_s=delay_s,
            rule=rule.text,
            place=place,
        )

    def _without(self, host: str, decision: Decision, end: End, for_s: float = 0.0) -> Decision:
        """Returns the restart without a host, or with it if too many are cordoned already: it is not the cause then."""
        if not self._room(host, end.ledger, end):
            absent = len(end.ledger.absent(end.now).keys() - {host})
            return decision.replace(kept=host, absent=absent, nodes=end.nodes)
        return decision.replace(cordoned=host, for_s=for_s, kept="")

    @staticmethod
    def _room(host: str, ledger: Ledger, end: End) -> bool:
        """Returns whether another host may be cordoned."""
        return len(ledger.absent(end.now).keys() - {host}) < max(1, end.nodes // NODES_PER_ABSENT)

    def _charge(self, end: End, delay_s: float = 0.0) -> Decision:
        most = self.max_restarts
        if end.restart_count < most:
            return Decision(DecisionKind.RESTART, end.cause, end.restart_count + 1, most, delay_s=delay_s)
        return Decision(DecisionKind.RESTARTS_SPENT if most else DecisionKind.RESTARTS_OFF, end.cause, most=most)


def _error_of(failure: ProcessFailure) -> str:
    """Returns the error, with the line that raises it each time."""
    from aelastic.diagnose.failures.root_cause import place_of

    what, place = failure.message.strip().partition("\n")[0], place_of(failure)
    return f"{what} at {place}" if place else what
