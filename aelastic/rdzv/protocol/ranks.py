"""Which node gets which ranks.

A pure function of the nodes in group-rank order.  Global ranks are counted through all nodes in that order, role ranks
through the nodes that share a role.  Nodes may differ in role and in number of workers.
Source: the torchelastic documents, "rank assignment", slow path.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from aelastic.base.record import Record


class NodeRanks(Record):
    """The ranks of one node's workers in one round."""

    group_rank: int
    group_world_size: int
    first_rank: int  # global rank of the node's local rank 0; the others follow
    world_size: int
    first_role_rank: int
    role_world_size: int
    local_world_size: int


def assign_ranks(nodes: Sequence[tuple[str, int]]) -> list[NodeRanks]:
    """Returns the ranks of every node, in the given order.

    Args:
        nodes: (role, local world size) of each node; the position is the group rank.
    """
    world_size = sum(size for _, size in nodes)
    role_world_size: Counter[str] = Counter()
    for role, size in nodes:
        role_world_size[role] += size
    first_rank, first_role_rank, table = 0, Counter[str](), []
    for group_rank, (role, size) in enumerate(nodes):
        table.append(
            NodeRanks(
                group_rank=group_rank,
                group_world_size=len(nodes),
                first_rank=first_rank,
                world_size=world_size,
                first_role_rank=first_role_rank[role],
                role_world_size=role_world_size[role],
                local_world_size=size,
            )
        )
        first_rank += size
        first_role_rank[role] += size
    return table


def order_nodes(
    candidates: Mapping[str, tuple[int | None, str]], previous: Sequence[str], max_nodes: int
) -> tuple[str, ...]:
    """Chooses at most `max_nodes` nodes and puts them in the order of their group ranks.

    Nodes of the previous round come before newcomers and keep their group rank if it still exists; newcomers fill the
    gaps, first those with a preferred rank, then by host name.

    Args:
        candidates: node id to (preferred group rank or None, host name).
        previous: node ids of the last round, by group rank.
    """
    rank_before = {node: rank for rank, node in enumerate(previous)}
    survivors = [node for node in previous if node in candidates]
    newcomers = sorted(candidates.keys() - set(previous), key=lambda node: (*_precedence(*candidates[node]), node))
    chosen = (survivors + newcomers)[:max_nodes]
    placed_at: dict[int, str] = {}
    for node in chosen:
        wanted = rank_before.get(node, candidates[node][0])
        if wanted is not None and 0 <= wanted < len(chosen):
            placed_at.setdefault(wanted, node)
    placed = set(placed_at.values())
    rest = iter([node for node in chosen if node not in placed])
    return tuple(placed_at[rank] if rank in placed_at else next(rest) for rank in range(len(chosen)))


def _precedence(preferred: int | None, host: str) -> tuple[float, list[tuple[int, int | str]]]:
    """Returns a sort key: by preferred rank, then by host name with digits as numbers (node2 before node10)."""
    parts = [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", host) if part]
    return (float("inf") if preferred is None else preferred, parts)
