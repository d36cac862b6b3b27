"""What the end of a round costs: an oracle that knows the true times of what went wrong, and nothing of the product's code.

The rule (`docs/adr/0016-the-first-cause-is-charged.md`): charged is the first cause of a round's end, if that is a
worker's own failure; a lost node is a cause, and free; a failure within the grace of a loss is a victim's.

There is one legal charge but where the rule's times are not the true ones:

- A node is lost *since it was heard last*: at most a heartbeat before it was gone.
- A node that was silent for a while is lost, or not: that is its coordinator's to decide, within a lease.
- What differs by less than messages and timers take (`slack_s`) may come in either order.  Where that is more than the
  grace, victims may seem to have failed by themselves: a message does not say how long it was on its way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

GRACE_S = 0.3
# A worker that was killed is noticed sooner than one that raised before it: that one may be the first.
KILLED_LEAD_S = 0.1
FREE, CHARGED, EITHER = frozenset({0}), frozenset({1}), frozenset({0, 1})


@dataclass(frozen=True)
class Loss:
    """A node of the round that was lost, left, or whose connection broke: or may have been.

    Args:
        since: it is dated then at the earliest.
        until: and then at the latest.
        is_certain: it is one.
        excuses_until: the last failure that can be its victim, but for the grace; of a node that comes back.
    """

    since: float = -math.inf
    until: float = math.inf
    is_certain: bool = False
    excuses_until: float = math.inf


def legal_charges(
    failures: Sequence[float], losses: Iterable[Loss], *, ended_at: float = math.inf, slack_s: float
) -> frozenset[int]:
    """What a round's end may cost.

    Args:
        failures: when workers failed by themselves.
        losses: of its nodes.
        ended_at: when its nodes were told that it is over.
        slack_s: what messages and timers take.
    """
    if not failures:
        return EITHER if slack_s > GRACE_S and any(losses) else FREE
    if min(failures) > ended_at:
        return FREE
    first = min(failures)
    last = max(at for at in failures if at <= first + KILLED_LEAD_S + slack_s)
    is_either = first > ended_at - slack_s  # and had not been heard of by then
    for loss in losses:
        until, excuses_until = loss.until - GRACE_S, loss.excuses_until + GRACE_S
        if loss.is_certain and until < first - slack_s and last < excuses_until - slack_s:
            return FREE
        is_either |= loss.since - GRACE_S < last + slack_s and first < excuses_until + slack_s
    return EITHER if is_either else CHARGED
