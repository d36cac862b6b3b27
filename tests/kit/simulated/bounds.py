"""How soon all nodes are in one round once faults stop: a bound for each cause that occurred shortly before.

A job reassembles in steps, each with its own limit and each needed only after some causes: a loss is noticed, another
leader is elected, the round's nodes find it, workers end.  If several causes coincide, each step takes as long as the
slowest of them, because their steps run in parallel; newcomers wait while others elect.
"""

from __future__ import annotations

from collections.abc import Iterable

from kit.simulated.charges import Fault
from kit.simulated.endpoint import ENDPOINT
from kit.simulated.world import CONNECT_TIMEOUT_S, RESEND_MAX_S

# Timers other than leases, the last call of a first round, and messages.
SOON_S = 3.5
# For a worker that ignores SIGTERM; for one that leaves processes behind.
KILLED_AFTER_S, CLEARED_AFTER_S = 8.0, 3.0
# How long spares take to find a new leader.
SPARES_S = 1.0
# How long a returning node, as a newcomer, may have to leave a young round alone (`docs/adr/0022`).
NEWCOMER_S = 10.0
# Older faults have no consequences any more.
LEASES_OF_CONSEQUENCES = 3


def noticed_s(fault: Fault, lease_s: float) -> float:
    """How long until the others know of a fault."""
    if fault.to and fault.kind == "silence":
        return lease_s + RESEND_MAX_S
    return CONNECT_TIMEOUT_S if fault.kind in {"break", "reset"} else lease_s


def takes_coordinator(fault: Fault) -> bool:
    """Whether a fault may end a leader's term."""
    return fault.kind not in {"break", "reset"} or ENDPOINT in {fault.host, fault.to}


def bound_s(
    faults: Iterable[Fault],
    now: float,
    lease_s: float,
    *,
    is_led: bool,
    comes_back: bool,
    is_slow: bool,
    ignores_term: bool,
    leaves_something: bool,
) -> float:
    """The bound, from the moment when faults stop.

    Args:
        faults: the faults of the whole run.
        now: when they stop.
        lease_s: the job's lease.
        is_led: a leader is alive; otherwise the record of one may have to be silent for a lease, also for new agents.
        comes_back: a host returns only now, with the endpoint that it serves or as a newcomer that other nodes wait for.
        is_slow: messages to the endpoint or between agents were late or lost until now.
        ignores_term: workers may ignore SIGTERM.
        leaves_something: workers may leave processes behind.
    """
    recent = [fault for fault in faults if fault.until > now - LEASES_OF_CONSEQUENCES * lease_s]
    within_s = SOON_S + KILLED_AFTER_S * ignores_term + CLEARED_AFTER_S * leaves_something
    within_s += max([noticed_s(fault, lease_s) for fault in recent] + [lease_s * is_slow])
    beside = [NEWCOMER_S if recent or comes_back else 0.0]
    if is_slow or not is_led or comes_back or any(map(takes_coordinator, recent)):
        beside.append(lease_s + lease_s + SPARES_S)  # an election, and a takeover
    return within_s + max(beside)
