"""What a node that waits reads in its log: which nodes have joined, and which are missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from aelastic.rdzv.coordinator.coordinator import Coordinator
from aelastic.rdzv.coordinator.coordinator_events import Phase, Send
from aelastic.rdzv.coordinator.roster import hosts_of, some_of
from aelastic.rdzv.protocol import messages as m


def waiting_texts(coordinator: Coordinator, now: float, missing: Sequence[m.Seat] = ()) -> list[Send]:
    """What is waited for, for each node that waits.

    Args:
        coordinator: decides.
        now: the time.
        missing: nodes that could have elected another coordinator.
    """
    roster, rules, takeover = coordinator.roster, coordinator.rules, coordinator.takeover
    match coordinator.phase:
        case Phase.FORMING | Phase.TAKING_OVER:
            nodes = roster.ready
            text = forming_text(
                joined=list(nodes.values()),
                stopping=hosts_of(roster.stopping),
                lost=roster.lost_hosts,
                nodes=(rules.min_nodes, rules.max_nodes),
                waited_s=coordinator.forming.waited_s(now),
                is_first=coordinator.round == 0,
                reconnected=None if takeover is None else (takeover.round, len(takeover.seats), takeover.size),
            )
            if missing:
                text = f"{text}; {missing_text(missing)}"
            return [Send(node_id, m.Waiting(text)) for node_id in nodes]
        case Phase.RUNNING:
            if not roster.finished:
                return []
            text = f"finished; waiting for the workers of {some_of(hosts_of(roster.busy))}"
            return [Send(node_id, m.Waiting(text)) for node_id in roster.finished]
        case Phase.CLOSED:
            return []
        case _:
            assert_never(coordinator.phase)


def forming_text(
    *,
    joined: Sequence[m.Node],
    stopping: Sequence[str],
    lost: Mapping[str, str],
    nodes: tuple[int, int],
    waited_s: float,
    is_first: bool,
    reconnected: tuple[int, int, int] | None,
) -> str:
    """One line about a round that forms.

    Args:
        joined: the nodes that are ready.
        stopping: hosts that stop the workers of the last round.
        lost: hosts that the last round lost, and why.
        nodes: how many the job needs, and takes.
        waited_s: since the round began to form.
        is_first: no round has been completed yet.
        reconnected: for a new coordinator, the round that it takes over, how many nodes are back, and its size.
    """
    fewest, most = nodes
    wanted = f"{fewest}" if fewest == most else f"{fewest}-{most}"
    names = some_of([node.host for node in joined])
    parts = [f"rendezvous: {len(joined)} of {wanted} nodes joined after {waited_s:.0f} s ({names})"]
    if stopping:
        parts.append(f"stopping their workers: {some_of(stopping)}")
    if reconnected is not None:
        parts.append("reconnected from round {}: {} of {}".format(*reconnected))
    lacking = fewest - len(joined) - len(stopping)
    if lacking > 0 or is_first:
        missing = _names_of_missing(joined, lost, fewest) or [f"{max(lacking, 0) or most - len(joined)} more"]
        parts.append(f"waiting for {some_of(missing)}")
    return "; ".join(parts)


def doubt_text(unconfirmed_s: float) -> str:
    """Why what nodes have said has no consequences."""
    return (
        f"rendezvous: no answer from the endpoint for {unconfirmed_s:.0f} s: running workers continue, no new round "
        "can start"
    )


def missing_text(missing: Sequence[m.Seat]) -> str:
    """Why no round begins, though enough nodes are ready."""
    return (
        f"cannot start a round: {some_of([seat.host for seat in missing])} cannot be reached and may be running "
        "without this node; restart an agent on each, or all agents with --rdzv-conf survivor=endpoint"
    )


def ended_in_vain(coordinator: Coordinator, unaccounted: Callable[[], Sequence[m.Seat]], now: float) -> m.Ended | None:
    """How these agents end, and not the job, if they have waited for too long for nodes that may be at work."""
    limit_s = coordinator.rules.join_timeout_s
    if coordinator.phase is not Phase.FORMING or coordinator.forming.waited_s(now) < limit_s:
        return None
    if not (missing := unaccounted()):
        return None
    hosts = some_of([seat.host for seat in missing])
    reason = f"the endpoint knows of a round with {hosts}, which may go on: no contact with them for {limit_s:g} s"
    return m.Ended(m.Outcome.TIMED_OUT, reason)


def _names_of_missing(joined: Sequence[m.Node], lost: Mapping[str, str], fewest: int) -> list[str]:
    """What is known of missing nodes: hosts that the last round lost, or node ranks that no node has."""
    hosts, ranks = {node.host for node in joined}, {node.preferred_rank for node in joined}
    if names := [f"{host} ({reason})" for host, reason in lost.items() if host not in hosts]:
        return names
    if ranks <= {None}:
        return []
    return [f"node rank {rank}" for rank in range(fewest) if rank not in ranks]
