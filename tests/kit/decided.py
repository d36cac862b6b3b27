"""Decisions for tests of messages, events and states."""

from __future__ import annotations

from aelastic.rdzv.decisions.cause import Cause, CauseKind
from aelastic.rdzv.decisions.decision import Decision, DecisionKind, next_round


def failed(rank: int = 0, host: str = "host") -> Cause:
    return Cause(CauseKind.FAILURE, (host,), (rank,))


def restart(number: int = 1, most: int = 3, cause: Cause | None = None) -> Decision:
    """A restart of `--max-restarts`."""
    return Decision(DecisionKind.RESTART, cause or failed(), number, most)


def restart_by_rule(cause: Cause | None = None) -> Decision:
    """A restart of a rule's own budget."""
    return Decision(DecisionKind.RESTART_BY_RULE, cause or failed(), 1, 2, 3600.0, rule="*: restart 2/1h", place=0)


def refused(most: int = 0, cause: Cause | None = None) -> Decision:
    """No restart is left; with `most` 0, restarts are off."""
    kind = DecisionKind.RESTARTS_SPENT if most else DecisionKind.RESTARTS_OFF
    return Decision(kind, cause or failed(), most=most)


def lost(host: str, why: str) -> Decision:
    """A node was lost."""
    return next_round(Cause(CauseKind.NODE_LOST, (host,), detail=why, is_loss=True))


def left(host: str, why: str) -> Decision:
    return next_round(Cause(CauseKind.NODE_LEFT, (host,), detail=why))


def joined(*hosts: str) -> Decision:
    """Nodes joined."""
    return next_round(Cause.of_hosts(CauseKind.NODES_JOINED, hosts))


def drain(host: str, within_s: float, why: str) -> Cause:
    return Cause.of_hosts(CauseKind.DRAIN, [host], within_s=within_s, detail=why)


def stopped(host: str, why: str = "") -> Decision:
    """The job is stopped on request."""
    return Decision(DecisionKind.STOPPED, Cause(CauseKind.STOP_REQUESTED, (host,), detail=why))


SUCCEEDED = Decision(DecisionKind.SUCCEEDED, Cause(CauseKind.ALL_SUCCEEDED))
TOO_FEW = Decision(DecisionKind.TOO_FEW_JOINED, joined("n0").cause, 1, 2, within_s=600.0, hosts=("n0",))
