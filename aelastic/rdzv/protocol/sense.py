"""Which values make sense in a message: a value of the right type may still not be a rank, a port or an address.

`codec.py` checks every received record before anything else reads it; after a message that makes no sense, the
connection is closed.  Fields with the same name have the same rule in all messages.  Some values only one of the two
ends can check, against its own settings: `objection_to` checks a greeting, `trust.py` a leader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aelastic.base.record import Record
from aelastic.diagnose.failures.failure import ProcessFailure, printable
from aelastic.rdzv.decisions.cause import NAMES_MAX, Cause
from aelastic.rdzv.decisions.decision import Decision
from aelastic.rdzv.ledger import EXCLUDED_MAX, SPENT_MAX, Blamed, Excluded, Ledger, Reached, Spent
from aelastic.rdzv.log.entries import Entry
from aelastic.rdzv.log.node import Status as LogStatus
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.rdzv.restart_rules import RULES_MAX

# A DNS name has at most 255 characters (RFC 1035); ids and tokens of agents are shorter.
NAME_MAX = 255
LOG_NAME_MAX = 4000
# More than any job has, yet small enough that sums and fencing numbers stay integers of 64 bits.
COUNT_MAX = 1 << 31
TERM_MAX = (1 << 62) // m.ROUNDS_OF_A_TERM
SECONDS_MAX = 1e9
NOTICE_MAX = 1 << 62
ASKS_MAX = 64  # in one status; a node has fewer requests open at a time

Rule = Callable[[Any], Any]


def rule_of(kind: type[Record], name: str) -> Rule | None:
    """Returns the rule of a field, if any: it returns the value to use, or raises a `ValueError` with what is valid."""
    return _OWN_RULES.get((kind, name), _RULES.get(name))


def contradiction(record: Record) -> str:
    """Returns how a record contradicts itself, though each field alone makes sense; empty if it does not."""
    check = _CHECKS.get(type(record))
    return "" if check is None else next((text for text, is_wrong in check(record) if is_wrong), "")


def one_line(text: str) -> str:
    """Returns a peer's text in a form that is safe to show: it moves no cursor, sets no title, and begins no line."""
    return printable(text).replace("\n", " ")


def _rule(holds: Callable[[Any], bool], what: str) -> Rule:
    """Returns a rule that accepts values that meet a condition, and names the condition for others."""

    def check(value: Any) -> Any:
        if holds(value):
            return value
        raise ValueError(f"should be {what}")

    return check


def _word(least: int) -> Rule:
    def check(value: Any) -> Any:
        if least <= len(value) <= NAME_MAX and value.isprintable() and " " not in value:
            return value
        raise ValueError(f"should be a word of {least} to {NAME_MAX} characters")

    return check


def _number(least: float, most: float) -> Rule:
    def check(value: Any) -> Any:
        if value is None or least <= value <= most:
            return value
        raise ValueError(f"should be between {least:.15g} and {most:.15g}")

    return check


def _distinct(each: Rule, most: float) -> Rule:
    def holds(values: Any) -> bool:
        return len([each(value) for value in values]) <= most and len(set(values)) == len(values)

    return _rule(holds, f"at most {most}, and different ones")


def _words(values: Any) -> Any:
    for each in values:
        _WORD(each)
    return values


def _is_log_name(value: str) -> bool:
    """Returns whether a text may be several incarnations, joined by plus signs."""
    return len(value) <= LOG_NAME_MAX and value.isprintable() and " " not in value


def _few(most: int) -> Rule:
    return _rule(lambda values: len(values) <= most, f"at most {most}")


def _ranks(values: Any) -> Any:
    for each in values:
        _RANK(each)
    return values


def _shown_name(value: Any) -> Any:
    if len(value) > NAME_MAX:
        raise ValueError(f"should be a text of at most {NAME_MAX} characters")
    return one_line(value)


def _shown_names(values: Any) -> Any:
    if len(values) > NAMES_MAX:
        raise ValueError(f"should be at most {NAMES_MAX}")
    return tuple(_shown_name(each) for each in values)


def anything(value: Any) -> Any:
    """Accepts any value of the field's type."""
    return value


_NAME, _WORD = _word(1), _word(0)
_LOG_NAME = _rule(lambda value: value is None or not isinstance(value, str) or _is_log_name(value), "the name of a log")
_STORE_SERVER = _rule(m.STORE_SERVERS.__contains__, f"one of {', '.join(m.STORE_SERVERS)}")
_COUNT, _SIZE, _RANK = _number(0, COUNT_MAX), _number(1, COUNT_MAX), _number(0, COUNT_MAX)
_RANK_OR_NONE = _number(-1, COUNT_MAX)
_TERM, _ROUND = _number(0, TERM_MAX), _number(0, m.ROUND_MAX)
_FENCE = _number(0, m.fence_of(TERM_MAX, m.ROUND_MAX))
_SECONDS, _CALLS = _number(0, SECONDS_MAX), _number(0, 1 << 53)
_PORT, _PORT_OR_NONE = _number(1, 65535), _number(0, 65535)

_RULES: dict[str, Rule] = {
    "node_id": _NAME, "token": _NAME, "secret": _NAME, "run_id": anything, "protocol": anything,
    "host": _shown_name, "role": _shown_name, "reason": one_line, "text": one_line, "missing": one_line,
    "ended": one_line,
    "master_addr": _WORD, "way_address": _WORD, "peer_address": _WORD,
    "address": _WORD, "addresses": _distinct(_NAME, 16),
    "master_port": _PORT, "port": _PORT, "vote_port": _PORT_OR_NONE,
    "term": _TERM, "name": _NAME, "log_name": _WORD, "leader": anything, "leader_rank": _RANK_OR_NONE,
    "incarnation": _WORD, "incarnations": _words, "members": _words, "voters": _words, "replaces": _words,
    "log": _LOG_NAME, "digest": _WORD, "round": _ROUND, "after": _ROUND, "fence": _FENCE,
    "ready_count": _COUNT, "prepared_count": _COUNT, "number": _COUNT, "starts_ahead": _COUNT,
    "restart_count": _COUNT, "max_restarts": _COUNT, "renewals": _COUNT, "min_nodes": _SIZE, "max_nodes": _SIZE,
    "preferred_rank": _RANK, "group_rank": _RANK,
    "first_rank": _RANK, "first_role_rank": _RANK, "departed": _distinct(_RANK, COUNT_MAX),
    "local_world_size": _SIZE, "role_world_size": _SIZE, "group_world_size": _SIZE, "world_size": _SIZE,
    "lease_s": _number(1e-3, SECONDS_MAX), "age_s": _SECONDS, "failure_age_s": _SECONDS, "alone_s": _SECONDS,
    "store_server": _STORE_SERVER, "waited_s": _SECONDS, "outliers": _distinct(_RANK, COUNT_MAX),
    "steps": _number(-1, 1 << 53), "at": _shown_name, "call": _shown_name, "collective": _shown_name,
    "state": _shown_name, "unknown": _shown_name,
    "notice_id": _number(0, NOTICE_MAX), "calls": _CALLS, "save_at": _CALLS, "pages": _COUNT, "kill_s": _SECONDS,
    "ask_id": _NAME, "asker": _NAME, "nodes": _distinct(_NAME, COUNT_MAX), "key": _WORD, "value": anything,
    "offset": _number(-1, 1 << 53), "target": _shown_name, "deadline_s": _SECONDS,
    # Fields of a failure, where -1 means unknown; its texts have their own limits.
    "rank": _RANK_OR_NONE, "local_rank": _RANK_OR_NONE, "pid": _RANK_OR_NONE,
    "exitcode": _number(-COUNT_MAX, COUNT_MAX), "timestamp": anything,
    "message": anything, "traceback": anything, "stack": anything, "oom": anything, "note": anything,
    "log_file": anything, "found_by": anything, "matched_rules": _distinct(_COUNT, RULES_MAX), "unfit": one_line,
    "restart_policy": anything, "root": anything, "step": _number(-2, 1 << 53), "life_s": _SECONDS, "still": _COUNT,
    "rule": _COUNT, "for_s": _SECONDS, "again_s": _SECONDS, "why": one_line,
}  # fmt: skip
_OWN_RULES: dict[tuple[type[Record], str], Rule] = {
    (LogStatus, "ended"): _few(COUNT_MAX),
    (LogStatus, "failures"): _few(COUNT_MAX),
    (Entry, "charged"): _few(COUNT_MAX),
    (Entry, "payload"): anything,
    (m.Past, "ended"): anything,
    (m.Plan, "ended"): anything,
    (m.Status, "asks"): _few(ASKS_MAX),
    (m.Plan, "answers"): _few(ASKS_MAX),
    (m.Assigned, "master_addr"): _NAME,
    (Reached, "calls"): _number(-1, 1 << 53),
    (Ledger, "calls"): _number(-1, 1 << 53),
    (Ledger, "spent"): _few(SPENT_MAX),
    (Ledger, "excluded"): _few(EXCLUDED_MAX + 1),
    (Ledger, "blamed"): _few(EXCLUDED_MAX),
    (Blamed, "at"): _SECONDS,
    (Spent, "at"): _SECONDS,
    (Excluded, "at"): _SECONDS,
    (ProcessFailure, "host"): anything,
    (ProcessFailure, "world_size"): _COUNT,
}
_OWN_RULES |= {
    (Cause, name): rule
    for name, rule in {
        "hosts": _shown_names, "ranks": _ranks, "count": _COUNT, "within_s": _SECONDS,
        "late": _COUNT, "nodes": _COUNT, "detail": one_line,
    }.items()
}  # fmt: skip
_OWN_RULES |= {
    (Decision, name): rule
    for name, rule in {
        "number": _COUNT, "most": _COUNT, "within_s": _SECONDS, "delay_s": _SECONDS, "rule": one_line,
        "place": _RANK_OR_NONE, "error": one_line, "hosts": _shown_names, "cordoned": _shown_name, "kept": _shown_name,
        "absent": _COUNT, "nodes": _COUNT,
    }.items()
}  # fmt: skip


def _check_past(past: m.Past) -> list[tuple[str, bool]]:
    if not past.round:
        return [("a node without a round has a past", past.phase is not m.NodePhase.READY)]
    return [("a node that failed does not say how", past.phase is m.NodePhase.FAILED and past.failure is None)]


def _check_status(status: m.Status) -> list[tuple[str, bool]]:
    node_id = status.node.node_id
    reports = [*status.asks, status.frozen, status.saved, status.question, status.places, status.left]
    return [("it speaks of another node", any(each is not None and each.node_id != node_id for each in reports))]


def _check_ranks(ranks: NodeRanks) -> list[tuple[str, bool]]:
    size, end, role_end = ranks.local_world_size, ranks.world_size, ranks.role_world_size
    return [
        ("group_rank is not below group_world_size", ranks.group_rank >= ranks.group_world_size),
        ("group_world_size is above world_size", ranks.group_world_size > end),
        ("its ranks are not below world_size", ranks.first_rank + size > end),
        ("its role ranks are not below role_world_size", ranks.first_role_rank + size > role_end),
        ("role_world_size is above world_size", role_end > end),
    ]


_Check = Callable[[Any], list[tuple[str, bool]]]
_CHECKS: dict[type[Record], _Check] = {
    m.Terms: lambda terms: [("max_nodes is below min_nodes", terms.max_nodes < terms.min_nodes)],
    m.Past: _check_past,
    m.Status: _check_status,
    m.Hello: lambda hello: [
        ("past.restart_count is above terms.max_restarts", hello.status.past.restart_count > hello.terms.max_restarts)
    ],
    m.Assigned: lambda assigned: [
        ("round is 0", not assigned.round),
    ],
    m.Ended: lambda ended: [
        ("a job that failed has no cause", ended.outcome is m.Outcome.FAILED and ended.cause is None)
    ],
    NodeRanks: _check_ranks,
}


def is_too_high(term: int, known: int) -> bool:
    """Returns whether a term is too high for any log to have reached; `known` is the highest known term.

    Nobody would follow a leader in a term above that, because the number of terms is limited.
    """
    return term > known + m.TERMS_AHEAD_MAX


def too_high_text(term: int) -> str:
    return f"term {term} is none that a log has counted to"


def objection_to(hello: m.Hello, ours: m.Terms, term: int) -> str:
    """Returns which of an agent's settings differ from the rest of the job, and what to do; empty if none does."""
    theirs = hello.terms
    theirs_nodes, our_nodes = f"{theirs.min_nodes}:{theirs.max_nodes}", f"{ours.min_nodes}:{ours.max_nodes}"
    for what, here, there, remedy in (
        ("the run id", repr(theirs.run_id), repr(ours.run_id), " --rdzv-id"),
        ("--nnodes", theirs_nodes, our_nodes, ""),
        ("--max-restarts", theirs.max_restarts, ours.max_restarts, ""),
        ("--restart-policy", repr(theirs.restart_policy), repr(ours.restart_policy), ""),
        ("the lease", f"{theirs.lease_s:g} s", f"{ours.lease_s:g} s", " --rdzv-conf"),
    ):
        if here != there:
            return f"{what} is {here} here and {there} in the running job: use the same{remedy} on every node"
    if hello.status.log is not None and is_too_high(hello.status.log.term, term):
        return f"Status.log.term is {hello.status.log.term}, and the job's is {term}"
    return ""
