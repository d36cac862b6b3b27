"""The line that a waiting node logs: which nodes have joined, and which are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

from aelastic.rdzv.leader.coordinator import Coordinator
from aelastic.rdzv.leader.coordinator_events import Phase, Send
from aelastic.rdzv.leader.roster import hosts_of, some_of
from aelastic.rdzv.protocol import messages as m


def waiting_texts(coordinator: Coordinator, now: float) -> list[Send]:
    """Returns what each waiting node waits for.

    Args:
        coordinator: the leader of the job.
        now: the time.
    """
    roster, rules, gathering = coordinator.roster, coordinator.rules, coordinator.gathering
    match coordinator.phase:
        case Phase.FORMING | Phase.GATHERING:
            nodes = roster.ready
            waiting = forming_text(
                joined=list(nodes.values()),
                stopping=hosts_of(roster.stopping),
                lost=roster.lost_hosts,
                nodes=(rules.min_nodes, rules.max_nodes),
                waited_s=coordinator.forming.waited_s(now),
                starts_in_s=coordinator.forming.starts_in_s(now),
                is_first=coordinator.round == 0,
                reconnected=None if gathering is None else (gathering.round, len(gathering.here), len(gathering.nodes)),
            )
            return [Send(node_id, waiting) for node_id in nodes]
        case Phase.RUNNING:
            if not roster.finished:
                return []
            others = f"waiting for the workers of {some_of(hosts_of(roster.busy))}"
            waiting = m.Waiting("finished", others, m.WaitKind.OTHERS)
            return [Send(node_id, waiting) for node_id in roster.finished]
        case Phase.CLOSED:
            return []
        case _:
            assert_never(coordinator.phase)


def votes_text(hosts: Sequence[str]) -> str:
    """Returns the line to log while voters have not accepted the next entry."""
    return f"rendezvous: no answer from {some_of(hosts)}, which must vote: no new round can start"


def silent_text(silent_s: float) -> str:
    """Returns the line to log while the endpoint has not taken the next entry."""
    silent = f"rendezvous: no answer from the endpoint for {silent_s:.0f} s"
    return f"{silent}: running workers continue, no new round can start"


def forming_text(
    *,
    joined: Sequence[m.Node],
    stopping: Sequence[str],
    lost: Mapping[str, str],
    nodes: tuple[int, int],
    waited_s: float,
    is_first: bool,
    reconnected: tuple[int, int, int] | None,
    starts_in_s: float | None = None,
) -> m.Waiting:
    """Returns one line about a round that forms.

    Args:
        joined: the nodes that are ready.
        stopping: hosts that stop the workers of the last round.
        lost: hosts that the last round lost, and why.
        nodes: how many the job needs, and takes.
        waited_s: how long the round has been forming.
        is_first: no round has been completed yet.
        reconnected: for a new leader, the round that it takes over, how many nodes are back, and its size.
        starts_in_s: how soon the first round starts without further nodes, if enough have joined.
    """
    fewest, most = nodes
    wanted = f"{fewest}" if fewest == most else f"{fewest}-{most}"
    names = some_of([node.host for node in joined])
    parts = [f"rendezvous: {len(joined)} of {wanted} nodes joined after {waited_s:.0f} s ({names})"]
    if stopping:
        parts.append(f"stopping their workers: {some_of(stopping)}")
    if starts_in_s is not None:
        parts.append(f"starting in {starts_in_s:.0f} s")
    if reconnected is not None:
        parts.append("reconnected from round {}: {} of {}".format(*reconnected))
    waiting, lacking = m.Waiting("; ".join(parts)), fewest - len(joined) - len(stopping)
    if lacking > 0 or is_first:
        missing = _names_of_missing(joined, lost, fewest) or [f"{max(lacking, 0) or most - len(joined)} more"]
        return waiting.replace(missing=f"waiting for {some_of(missing)}")
    return waiting


def _names_of_missing(joined: Sequence[m.Node], lost: Mapping[str, str], fewest: int) -> list[str]:
    """Returns what is known of missing nodes: hosts that the last round lost, or node ranks that no node has."""
    hosts, ranks = {node.host for node in joined}, {node.preferred_rank for node in joined}
    if names := [f"{host} ({reason})" for host, reason in lost.items() if host not in hosts]:
        return names
    if ranks <= {None}:
        return []
    return [f"node rank {rank}" for rank in range(fewest) if rank not in ranks]
