"""Which node gets which ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.effort import examples

from aelastic.rdzv.protocol.messages import Assigned
from aelastic.rdzv.protocol.ranks import assign_ranks, order_nodes

roles = st.sampled_from(["default", "trainer", "reader"])
tables = st.lists(st.tuples(roles, st.integers(1, 9)), min_size=1, max_size=8)
names = st.sampled_from([f"n{i}" for i in range(8)])
hosts = st.one_of(st.from_regex(r"[a-z]{1,3}[0-9]{0,3}", fullmatch=True), st.text(max_size=4))
crowds = st.dictionaries(names, st.tuples(st.none() | st.integers(-1, 9), hosts), min_size=1)
rounds = st.lists(names, unique=True, max_size=8)


# Ranks.


def test_no_nodes_have_no_ranks() -> None:
    assert assign_ranks([]) == []


def test_role_ranks_run_through_the_nodes_of_a_role_also_when_another_role_comes_between() -> None:
    table = assign_ranks([("trainer", 2), ("reader", 3), ("trainer", 4)])
    assert [ranks.first_role_rank for ranks in table] == [0, 0, 2]
    assert [ranks.role_world_size for ranks in table] == [6, 3, 6]
    assert [ranks.first_rank for ranks in table] == [0, 2, 5]


@given(tables)
def test_global_ranks_are_0_to_n_and_unique_and_role_ranks_too_within_their_role(nodes: list[tuple[str, int]]) -> None:
    table = assign_ranks(nodes)
    ranks_of_role: dict[str, list[int]] = {}
    global_ranks: list[int] = []
    for (role, size), ranks in zip(nodes, table, strict=True):
        assert ranks.local_world_size == size
        global_ranks += range(ranks.first_rank, ranks.first_rank + size)
        ranks_of_role.setdefault(role, []).extend(range(ranks.first_role_rank, ranks.first_role_rank + size))
    assert global_ranks == list(range(sum(size for _, size in nodes)))
    assert [ranks.group_rank for ranks in table] == list(range(len(nodes)))
    assert {(ranks.world_size, ranks.group_world_size) for ranks in table} == {(len(global_ranks), len(nodes))}
    for (role, _), ranks in zip(nodes, table, strict=True):
        assert ranks_of_role[role] == list(range(ranks.role_world_size))


# Order.


def newcomers(*hosts: str) -> dict[str, tuple[int | None, str]]:
    return {host: (None, host) for host in hosts}


@pytest.mark.parametrize(
    "candidates, previous, max_nodes, order",
    [
        pytest.param(newcomers("node10", "node2", "node1"), "", 9, "node1 node2 node10", id="node2 comes before node10"),
        pytest.param(
            newcomers("rack10-node1", "rack9-node10", "rack9-node9", "10.0.0.2", "9.0.0.1"), "", 9,
            "9.0.0.1 10.0.0.2 rack9-node9 rack9-node10 rack10-node1", id="digits are numbers in every part of a name",
        ),
        pytest.param({"b": (None, "h"), "a": (None, "h")}, "", 9, "a b", id="nodes of one host by their id"),
        pytest.param({**newcomers("a", "c"), "new": (None, "0")}, "a b c", 9, "a new c", id="newcomers fill the holes"),
        pytest.param(newcomers("b", "d"), "a b c d", 9, "d b", id="a survivor moves down if its rank is no more"),
        pytest.param(
            {"old": (None, "z"), "new": (0, "a"), "newer": (None, "b")}, "gone old", 2, "new old", id="survivors keep their rank"
        ),
        pytest.param(
            {"old": (None, "z"), "new": (0, "a"), "newer": (None, "b")}, "gone old", 1, "old", id="survivors go first"
        ),
        pytest.param({"old": (None, "z"), "new": (0, "a")}, "old", 2, "old new", id="though a newcomer asks for it"),
        pytest.param({"a": (2, "a"), "b": (None, "b"), "c": (0, "c")}, "", 9, "c b a", id="newcomers get what they ask for"),
        pytest.param({"a": (None, "a"), "b": (7, "b")}, "", 1, "b", id="those that ask go first"),
        pytest.param({"x": (0, "node10"), "y": (0, "node2")}, "", 9, "y x", id="of two that ask the first by host"),
        pytest.param({"a": (-1, "a"), "b": (1, "b")}, "", 9, "a b", id="no rank is negative"),
        pytest.param({"a": (5, "a"), "b": (1, "b")}, "", 9, "a b", id="nor above all"),
    ],
)  # fmt: skip
def test_nodes_are_in_order(
    candidates: dict[str, tuple[int | None, str]], previous: str, max_nodes: int, order: str
) -> None:
    assert order_nodes(candidates, tuple(previous.split()), max_nodes) == tuple(order.split())


def test_host_names_may_hold_any_digits() -> None:
    assert order_nodes(newcomers("1²", "²", "٣", "١٠"), (), 9)  # superscript and Arabic ones


@given(crowds, rounds, st.integers(1, 9))
@settings(max_examples=examples(300))
def test_as_many_as_fit_are_chosen_once_each_survivors_first(
    candidates: dict[str, tuple[int | None, str]], previous: list[str], max_nodes: int
) -> None:
    previous = previous[:max_nodes]
    order = order_nodes(candidates, previous, max_nodes)
    assert len(order) == min(len(candidates), max_nodes)
    assert set(Counter(order).values()) <= {1}
    assert set(order) <= set(candidates)
    survivors = set(previous) & set(candidates)
    assert survivors <= set(order)
    for rank, node in enumerate(previous):
        if node in survivors and rank < len(order):
            assert order[rank] == node
    if max_nodes >= len(candidates):
        return
    left_out = set(candidates) - set(order)
    asked = [candidates[node][0] is not None for node in order if node not in survivors]
    assert all(asked) or not any(candidates[node][0] is not None for node in left_out)


@given(crowds, st.integers(1, 9))
def test_the_order_does_not_depend_on_which_came_first(
    candidates: dict[str, tuple[int | None, str]], max_nodes: int
) -> None:
    backwards = dict(reversed(candidates.items()))
    assert order_nodes(candidates, (), max_nodes) == order_nodes(backwards, (), max_nodes)


def test_the_fencing_number_of_a_round_rises_with_the_round_and_before_that_with_the_epoch() -> None:
    """Two coordinators may both begin a round 5: one that has lost the endpoint, and then its successor."""
    ranks = assign_ranks([("default", 1)])[0]
    fences = [Assigned(r, 0, ranks, "host", 1, term=term).fence for term, r in ((0, 1), (1, 4), (1, 5), (2, 5), (3, 1))]
    assert fences == [1, 1_004, 1_005, 2_005, 3_001]
