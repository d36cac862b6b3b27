"""What follows from the end of a round: for its nodes, or for the whole job."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from aelastic.base.record import Record
from aelastic.rdzv.decisions.cause import Cause


class DecisionKind(StrEnum):
    """What was decided.  The names are those of the event log; they stay."""

    # Workers start again.
    NEXT_ROUND = "next_round"  # what ended the round costs nothing
    RESTART = "restart"  # one of `--max-restarts`
    RESTART_BY_RULE = "restart_by_rule"  # from the rule's own budget
    RESTART_FREE = "restart_free"  # by a rule
    # The job is over.
    RESTARTS_OFF = "restarts_off"
    RESTARTS_SPENT = "restarts_spent"
    RULE_SPENT = "rule_spent"  # no restart is left in the budget of a rule
    SAME_ERROR = "same_error"  # twice in a row, without progress
    STOPPED_BY_RULE = "stopped_by_rule"
    CANNOT_RECOVER = "cannot_recover"  # the failure itself says that no restart may follow
    TOO_FEW_JOINED = "too_few_joined"
    TOO_FEW_LEFT = "too_few_left"
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"  # on request
    REPLACED = "replaced"
    NO_NEW_ROUND = "no_new_round"  # from a torch rendezvous


CONTINUES = frozenset(
    (DecisionKind.NEXT_ROUND, DecisionKind.RESTART, DecisionKind.RESTART_BY_RULE, DecisionKind.RESTART_FREE)
)


class Decision(Record):
    """What was decided about the end of a round.  It travels to each node, and is logged, as it is."""

    kind: DecisionKind
    cause: Cause
    number: int = 0  # of the restart; of the nodes that are there, if they are too few
    most: int = 0  # restarts; the fewest nodes that the job needs
    within_s: float = 0.0  # of a rule's budget, or how long nodes were waited for
    delay_s: float = 0.0  # before workers start again
    rule: str = ""  # of --restart-policy, as the user wrote it
    place: int = -1  # of the rule whose budget pays; -1: none
    error: str = ""  # of a worker, with the place where it was raised
    hosts: tuple[str, ...] = ()  # of nodes that are there, if they are too few
    cordoned: str = ""  # a host that is kept out of the job for some time
    for_s: float = 0.0  # as in `Ledger.exclude`
    kept: str = ""  # a host that would be, but too many are already
    absent: int = 0  # hosts that are cordoned already
    nodes: int = 0  # of the round, if a host is kept

    @property
    def is_final(self) -> bool:
        """Whether the job is over."""
        return self.kind not in CONTINUES

    @property
    def is_charged(self) -> bool:
        """Whether it is a restart of `--max-restarts`."""
        return self.kind is DecisionKind.RESTART


# The reason for a state: `wording.text_of` makes a sentence of it.  A text already is one.
Why: TypeAlias = Decision | Cause | str


def next_round(cause: Cause) -> Decision:
    """Returns the decision for a round that ended for free."""
    return Decision(DecisionKind.NEXT_ROUND, cause)
