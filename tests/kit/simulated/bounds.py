"""How soon all nodes are in one round once faults stop, by what has happened shortly before: a bound for each cause.

A job that has to come together again does so in steps, each with its own limit, and each is needed only after some
causes: that a loss is noticed, that another coordinator is elected, that the round's nodes find it, that workers end.
Several causes at once take the longest of each step, for their steps run beside each other; and newcomers wait while
others elect.
"""

from __future__ import annotations

from collections.abc import Iterable

from kit.simulated.charges import Fault
from kit.simulated.endpoint import ENDPOINT
from kit.simulated.world import CONNECT_TIMEOUT_S, RESEND_MAX_S

# Timers that are no leases, the last call of a first round, and messages.
SOON_S = 3.5
# A worker that ignores SIGTERM; one that leaves processes behind.
KILLED_AFTER_S, CLEARED_AFTER_S = 8.0, 3.0
# Spares find a new coordinator.
SPARES_S = 1.0
# A node that comes back is a newcomer, and may have to leave a young round alone for so long (`docs/adr/0022`).
NEWCOMER_S = 10.0
# What is older has no consequences any more.
LEASES_OF_CONSEQUENCES = 3


def noticed_s(fault: Fault, lease_s: float) -> float:
    """Until the others know of it."""
    if fault.to and fault.kind == "silence":
        return lease_s + RESEND_MAX_S
    return CONNECT_TIMEOUT_S if fault.kind in {"break", "reset"} else lease_s


def takes_coordinator(fault: Fault) -> bool:
    """Whether it may end a coordinator's term."""
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
    """From when faults stop.

    Args:
        faults: of the whole run.
        now: when they stop.
        lease_s: of the job.
        is_led: a coordinator lives; else the record of one may have to be silent for a lease, for new agents too.
        comes_back: a host does, only now: with a endpoint that it serves, or as a newcomer to nodes that wait for it.
        is_slow: words to the endpoint or between agents were late or lost until now.
        ignores_term: workers may.
        leaves_something: workers may.
    """
    recent = [fault for fault in faults if fault.until > now - LEASES_OF_CONSEQUENCES * lease_s]
    within_s = SOON_S + KILLED_AFTER_S * ignores_term + CLEARED_AFTER_S * leaves_something
    within_s += max([noticed_s(fault, lease_s) for fault in recent] + [lease_s * is_slow])
    beside = [NEWCOMER_S if recent or comes_back else 0.0]
    if is_slow or not is_led or comes_back or any(map(takes_coordinator, recent)):
        beside.append(lease_s + lease_s + SPARES_S)  # an election, and a takeover
    return within_s + max(beside)
