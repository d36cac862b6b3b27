"""What the end of a round costs: an oracle that knows the true times of the faults, and none of the product's code.

The rule (`docs/adr/0016-the-first-cause-is-charged.md`): the first cause of a round's end is charged if it is a worker's
own failure; a lost node is a cause, but free; a failure within the grace period of a loss is a victim's.

There is exactly one legal charge, except where the times that the rule uses are not the true ones:

- A loss is dated back to the node's *last message*: at most a heartbeat before it was gone.
- Whether a node that was silent for a while is lost is its leader's decision, within a lease.
- Events that differ by less than the delay of messages and timers (`slack_s`) may appear in either order.  If that is
  more than the grace period, victims may seem to have failed by themselves: a message does not carry its delay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

GRACE_S = 0.3
# A killed worker is noticed sooner than one that raised shortly before, so the killed one may appear first.
KILLED_LEAD_S = 0.1
FREE, CHARGED, EITHER = frozenset({0}), frozenset({1}), frozenset({0, 1})


@dataclass(frozen=True)
class Loss:
    """A node of the round that was, or may have been, lost: it vanished, left, or its connection broke.

    Args:
        since: the earliest time at which it may be dated.
        until: the latest time at which it may be dated.
        is_certain: it is certainly a loss.
        explains_until: the time of the last failure that can be its victim, without the grace; for a node that returns.
    """

    since: float = -math.inf
    until: float = math.inf
    is_certain: bool = False
    explains_until: float = math.inf


def legal_charges(
    failures: Sequence[float], losses: Iterable[Loss], *, ended_at: float = math.inf, slack_s: float
) -> frozenset[int]:
    """What the end of a round may cost.

    Args:
        failures: when workers failed by themselves.
        losses: the losses of its nodes.
        ended_at: when its nodes were notified that it is over.
        slack_s: the delay of messages and timers.
    """
    if not failures:
        return EITHER if slack_s > GRACE_S and any(losses) else FREE
    if min(failures) > ended_at:
        return FREE
    first = min(failures)
    last = max(at for at in failures if at <= first + KILLED_LEAD_S + slack_s)
    is_either = first > ended_at - slack_s  # and was not known by then
    for loss in losses:
        until, explains_until = loss.until - GRACE_S, loss.explains_until + GRACE_S
        if loss.is_certain and until < first - slack_s and last < explains_until - slack_s:
            return FREE
        is_either |= loss.since - GRACE_S < last + slack_s and first < explains_until + slack_s
    return EITHER if is_either else CHARGED
