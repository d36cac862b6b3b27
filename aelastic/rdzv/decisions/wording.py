"""Sentences about causes and decisions, for people: what happened, where, why, and what to do next.

`text_of` is the one function that makes them: a test replaces it with one that counts, and nothing else may change.
So call it as `wording.text_of`, and do not compare, cut or search the text that it returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aelastic.rdzv.decisions.cause import Cause, CauseKind, Innocence, SaveOutcome, listed
from aelastic.rdzv.decisions.decision import Decision, DecisionKind, Why

if TYPE_CHECKING:
    from collections.abc import Callable

_LARGER = "a larger --max-restarts, or a rule with its own budget"
# What would have let the job continue.
_INSTEAD = {
    DecisionKind.RESTARTS_OFF: "--max-restarts N",
    DecisionKind.RESTARTS_SPENT: _LARGER,
    DecisionKind.SAME_ERROR: "--restart-policy '*: restart'",
    DecisionKind.RULE_SPENT: "a larger budget in that rule, or another rule after it",
    DecisionKind.STOPPED_BY_RULE: "another rule",
}


def text_of(value: Why) -> str:
    """Returns the sentence for a value."""
    match value:
        case Decision():
            return _decision(value)
        case Cause():
            return _CAUSES[value.kind](value)
        case _:
            return value


def instead_of(decision: Decision | None) -> str:
    """Says what would have let the job continue; "" if it does, or nothing would."""
    return "" if decision is None else _INSTEAD.get(decision.kind, "")


def settled(round_: int, decision: Decision) -> str:
    """Says how the end of a round was settled, for nodes that were given another reason before."""
    free = "" if decision.is_charged else "; this restart is free"
    return f"round {round_}: {text_of(decision)}{free}"


def blame(host: str, innocence: Innocence | None) -> str:
    """Says what a failure means for its host."""
    if innocence is None:
        return f"{host} blamed: after a second time within a day it is cordoned while there are enough other nodes"
    return f"{host} not blamed: {_INNOCENT[innocence]} is not evidence of a bad host"


_INNOCENT = {
    Innocence.HANG: "a single hang",
    Innocence.MEMORY: "running out of memory",
    Innocence.LOST_CONNECTION: "a lost connection",
    Innocence.SIGNAL: "a single signal",
    Innocence.ERROR: "an error of the script",
}

# Decisions.


def _decision(decision: Decision) -> str:
    text = _DECISIONS[decision.kind](decision)
    if host := decision.kept:
        few = f"{decision.absent} of {decision.nodes} hosts are cordoned already, and all fail alike"
        return f"{text}; {host} stays in the job: {few}"
    if not (host := decision.cordoned):
        return text
    if not decision.for_s:
        return f"{text}, without {host}"
    return f"{text}; {host} is the cause again: cordoned while there are enough other nodes"


def _because(words: str) -> Callable[[Decision], str]:
    return lambda decision: f"{text_of(decision.cause)}; {words}"


def _restart(decision: Decision) -> str:
    return f"{text_of(decision.cause)}; restart {decision.number} of {decision.most}{_after(decision.delay_s)}"


def _restart_by_rule(decision: Decision) -> str:
    from aelastic.rdzv.restart_rules import in_time

    budget = f"restart {decision.number} of {decision.most} within {in_time(decision.within_s)}"
    return f"{text_of(decision.cause)}; {budget}{_after(decision.delay_s)}"


def _after(delay_s: float) -> str:
    return f", after {delay_s:g} s" if delay_s else ""


def _spent(decision: Decision) -> str:
    spent = "the only restart is used up" if decision.most == 1 else f"all {decision.most} restarts are used up"
    return f"{text_of(decision.cause)}; {spent}"


def _same_error(decision: Decision) -> str:
    cause = decision.cause
    who = f"rank {_ranks(cause)} on {_hosts(cause)}"
    return f"{who} failed twice in a row with {decision.error}, without progress"


def _too_few_joined(decision: Decision) -> str:
    few = f"{decision.number} of at least {decision.most} nodes joined within {decision.within_s:g} s"
    return f"{few}: {listed(decision.hosts, decision.number) or 'none'}"


def _too_few_left(decision: Decision) -> str:
    few = f"{decision.number} of at least {decision.most} nodes are left"
    return f"{text_of(decision.cause)}; {few}: {listed(decision.hosts, decision.number)}"


def _cause_alone(decision: Decision) -> str:
    return text_of(decision.cause)


_DECISIONS: dict[DecisionKind, Callable[[Decision], str]] = {
    DecisionKind.NEXT_ROUND: _cause_alone,
    DecisionKind.RESTART: _restart,
    DecisionKind.RESTART_BY_RULE: _restart_by_rule,
    DecisionKind.RESTART_FREE: lambda decision: f"{text_of(decision.cause)}; this restart is free ({decision.rule})",
    DecisionKind.RESTARTS_OFF: _because("restarts are off (--max-restarts 0)"),
    DecisionKind.RESTARTS_SPENT: _spent,
    DecisionKind.RULE_SPENT: lambda decision: (
        f"{text_of(decision.cause)}; all restarts of its rule are used up ({decision.rule})"
    ),
    DecisionKind.SAME_ERROR: _same_error,
    DecisionKind.STOPPED_BY_RULE: lambda decision: (
        f"{text_of(decision.cause)}; stopped by a rule of --restart-policy ({decision.rule})"
    ),
    DecisionKind.CANNOT_RECOVER: lambda decision: f"{text_of(decision.cause)}; {decision.error}",
    DecisionKind.TOO_FEW_JOINED: _too_few_joined,
    DecisionKind.TOO_FEW_LEFT: _too_few_left,
    DecisionKind.SUCCEEDED: _cause_alone,
    DecisionKind.STOPPED: _cause_alone,
    DecisionKind.REPLACED: _cause_alone,
    DecisionKind.NO_NEW_ROUND: lambda decision: (
        text_of(decision.cause) + (f", and no new round began: {decision.error}" if decision.error else "")
    ),
}

# Causes.


def _failure(cause: Cause) -> str:
    return f"rank {_ranks(cause)} failed on {_hosts(cause)}"


def _missing(cause: Cause) -> str:
    return f"group rank {_ranks(cause)} did not reconnect to the new leader"


def _joined(cause: Cause) -> str:
    return _with_saves(f"node{'s' * (cause.count > 1)} {_hosts(cause)} joined", cause)


def _drain(cause: Cause) -> str:
    return _with_saves(f"drain of {_hosts(cause)} within {cause.within_s:.0f} s{_in_brackets(cause.detail)}", cause)


def _requested(what: str) -> Callable[[Cause], str]:
    return lambda cause: _with_saves(f"{what} requested on {_hosts(cause)}{_in_brackets(cause.detail)}", cause)


def _with_saves(text: str, cause: Cause) -> str:
    match cause.saved:
        case SaveOutcome.NOT_ASKED:
            return text
        case SaveOutcome.ALL:
            return f"{text}; all ranks have saved"
        case SaveOutcome.LATE:
            return f"{text}; {cause.late} of {cause.nodes} nodes did not save in time"
        case SaveOutcome.NO_CALL:
            return f"{text}; the nodes did not agree in time on a call to save at"


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _cordoned(cause: Cause) -> str:
    how = f"for {cause.within_s / 3600:g} h{_in_brackets(cause.detail)}"
    return f"{_hosts(cause)} is cordoned {how}, while there are enough other nodes"


def _ranks(cause: Cause) -> str:
    return ", ".join(map(str, cause.ranks))


def _hosts(cause: Cause) -> str:
    return listed(cause.hosts, cause.count)


_ELSEWHERE = "the other nodes may have continued without this one"
_CAUSES: dict[CauseKind, Callable[[Cause], str]] = {
    CauseKind.PENDING: lambda _: "a connection broke",
    CauseKind.FAILURE: _failure,
    CauseKind.NODE_LOST: lambda cause: f"node {_hosts(cause)} was lost: {cause.detail}",
    CauseKind.NODE_LEFT: lambda cause: f"node {_hosts(cause)} left: {cause.detail}",
    CauseKind.CONNECTION_BROKE: lambda cause: f"the connection to {_hosts(cause)} broke",
    CauseKind.LEADER_LOST: lambda cause: f"the node of the previous leader is gone (group rank {_ranks(cause)})",
    CauseKind.NODES_MISSING: _missing,
    CauseKind.WORKERS_RESTARTED: lambda cause: f"the agent on {_hosts(cause)} restarted its workers on its own",
    CauseKind.NODES_JOINED: _joined,
    CauseKind.NODES_WAITING: lambda cause: (
        "1 node waits for the next round" if cause.count == 1 else f"{cause.count} nodes wait for the next round"
    ),
    CauseKind.ENDPOINT_SILENT: lambda _: f"no contact with the rendezvous endpoint: {_ELSEWHERE}",
    CauseKind.LEADER_SILENT: lambda _: f"no contact with the leader or the rendezvous endpoint: {_ELSEWHERE}",
    CauseKind.NODES_SILENT: lambda _: f"no contact with any other node: {_ELSEWHERE}",
    CauseKind.ENDED_EARLIER: lambda cause: f"round {cause.round} had already ended when the leader was lost",
    CauseKind.HOST_CORDONED: _cordoned,
    CauseKind.DRAIN: _drain,
    CauseKind.RESTART_REQUESTED: _requested("restart"),
    CauseKind.STOP_REQUESTED: _requested("stop"),
    CauseKind.ALL_SUCCEEDED: lambda cause: cause.detail or "every worker succeeded",
    CauseKind.CONTINUED_WITHOUT: lambda cause: f"round {cause.round} continued without this node; rejoining",
    CauseKind.ROUND_ENDED: lambda cause: f"round {cause.round} has ended; rejoining",
    CauseKind.AGENT_FROZEN: lambda _: "this agent was frozen, and its guard killed the workers; rejoining",
    CauseKind.REPLACED: lambda cause: f"another agent joined as node rank {_ranks(cause)} ({_hosts(cause)})",
    CauseKind.TORCH: lambda cause: cause.detail,
}
