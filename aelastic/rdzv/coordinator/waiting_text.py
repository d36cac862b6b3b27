"""What people are told while nodes wait: who is there, and who is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aelastic.rdzv.protocol.messages import Node

# More names than this make a line that nobody reads.
NAMES_MAX = 16


def who_is_missing(
    *,
    here: Sequence[Node],
    stopping: Sequence[str],
    lost: Mapping[str, str],
    nodes: tuple[int, int],
    waited_s: float,
    is_first: bool,
    back: tuple[int, int, int] | None,
) -> str:
    """One line about a round that is forming.

    Args:
        here: the nodes that are ready.
        stopping: hosts that stop the workers of the last round.
        lost: hosts that the last round lost, and why.
        nodes: how many the job needs, and takes.
        waited_s: since the round began to form.
        is_first: no round has been completed yet.
        back: for a new coordinator, the round that it gathers, who is back of it, and its size.
    """
    fewest, most = nodes
    wanted = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    parts = [f"{len(here)} of {wanted} nodes are ready ({waited_s:.0f} s): {some_of([node.host for node in here])}"]
    if stopping:
        parts.append(f"stopping their workers: {some_of(stopping)}")
    if back is not None:
        parts.append("back from round {}: {} of {}".format(*back))
    lacking = fewest - len(here) - len(stopping)
    if lacking > 0 or is_first:
        missing = _names_of_missing(here, lost, fewest) or [f"{max(lacking, 0) or most - len(here)} more"]
        parts.append(f"missing: {some_of(missing)}")
    return "; ".join(parts)


def _names_of_missing(here: Sequence[Node], lost: Mapping[str, str], fewest: int) -> list[str]:
    """What is known of who is missing: the hosts that were there, or the node ranks that nobody has."""
    hosts, ranks = {node.host for node in here}, {node.preferred_rank for node in here}
    if names := [f"{host} ({reason})" for host, reason in lost.items() if host not in hosts]:
        return names
    if ranks <= {None}:
        return []
    return [f"node rank {rank}" for rank in range(fewest) if rank not in ranks]


def some_of(names: Sequence[str]) -> str:
    """At most so many names that a line of a log stays one."""
    named, rest = sorted(names)[:NAMES_MAX], len(names) - NAMES_MAX
    return (", ".join(named) + (f" and {rest} more" if rest > 0 else "")) or "nobody"
