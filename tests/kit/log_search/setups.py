"""The worlds to search.  No rule is broken in them, so the search must find nothing."""

from __future__ import annotations

from kit.log_search.world import Move, Setup

# Random walks.
WALKS = {
    "three nodes": Setup(ends=2, ends_by_reset=1, resets=2, forgets=1, has_verdict=True, failures=2),
    "four nodes": Setup(nodes=4, ends=3, ends_by_reset=1, resets=2, forgets=1, has_verdict=True),
    "three nodes, two spares": Setup(spares=2, ends=2, ends_by_reset=1, resets=2, forgets=1, has_verdict=True),
    "two nodes, two spares": Setup(nodes=2, spares=2, ends=2, ends_by_reset=1, resets=2, forgets=2, has_verdict=True),
    "one node, two spares": Setup(nodes=1, spares=2, ends=1, ends_by_reset=1, resets=2, forgets=1),
    "two voters of three": Setup(spares=1, voters_max=2, ends=2, ends_by_reset=1, resets=2, forgets=1),
    "three nodes, replaced": Setup(spares=1, ends=1, ends_by_reset=2, resets=2, agents=2),
    "two nodes, replaced": Setup(nodes=2, spares=1, ends=1, ends_by_reset=2, resets=2, agents=2),
    "two nodes, replaced, and an endpoint that forgets": Setup(
        nodes=2, spares=1, ends=1, ends_by_reset=2, resets=2, forgets=1, agents=2
    ),
    "three endpoints": Setup(endpoints=3, ends=1, resets=1, forgets=2, has_verdict=True, failures=1),
    "new agents": Setup(nodes=0, spares=3, is_founding=True, ends=1, resets=1),
    "new agents, three endpoints": Setup(nodes=0, spares=3, endpoints=3, is_founding=True, ends=1, resets=1),
    "a second log": Setup(
        nodes=2, spares=1, is_founding=True, ends=1, ends_by_reset=1, resets=1, forgets=1, agents=2, campaigns=8
    ),
    "a second log, and two spares": Setup(
        nodes=2, spares=2, is_founding=True, ends=1, ends_by_reset=1, resets=1, forgets=1, agents=2, campaigns=8
    ),
}

# Random walks after these moves: all nodes with a whole entry were replaced before it reached the endpoint.
LOST: dict[str, tuple[Setup, tuple[Move, ...]]] = {
    "known to a spare by its id": (
        Setup(nodes=2, spares=2, ends=1, ends_by_reset=2, resets=1, agents=2),
        (
            ("connect", "s", "a"), ("status", "s", "a"), ("establish", "a"), ("propose", "a", "b"), ("send", "a", "b"),
            ("plan", "b"), ("status", "b", "a"), ("commit", "a"), ("send", "a", "s"), ("plan", "s"),
            ("end by reset", "a"), ("end by reset", "b"), ("replace", "a"), ("replace", "b"),
        ),
    ),
    "known by its id to a voter of the entry before": (
        Setup(spares=1, ends_by_reset=3, resets=1, agents=3, campaigns=8),
        (
            ("establish", "a"), ("propose", "a", "b"), ("send", "a", "b"), ("plan", "b"), ("status", "b", "a"),
            ("lease passes", "c"), ("closed at leader", "c", "a"), ("commit", "a"), ("connect", "c", "a"),
            ("status", "c", "a"), ("send", "a", "c"), ("plan", "c"), ("end by reset", "a"), ("end by reset", "b"),
            ("replace", "a"), ("replace", "b"),
        ),
    ),
}  # fmt: skip

# All states up to a bound, nearest first.
STATES = {
    "two nodes": Setup(nodes=2, ends=2, campaigns=2, positions=3),
    "three nodes": Setup(ends=2, campaigns=2, positions=3),
    "two nodes, three endpoints": Setup(nodes=2, endpoints=3, ends=1, forgets=2, campaigns=2, positions=3),
    "two nodes and a spare, replaced": Setup(
        nodes=2, spares=1, ends_by_reset=1, ends=1, agents=1, campaigns=3, positions=3
    ),
    "two new agents": Setup(nodes=0, spares=2, is_founding=True, ends=1, campaigns=3, positions=2),
}
