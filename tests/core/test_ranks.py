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


def test_one_node_has_all_the_ranks() -> None:
    (ranks,) = assign_ranks([("default", 4)])
    assert (ranks.group_rank, ranks.group_world_size) == (0, 1)
    assert (ranks.first_rank, ranks.world_size, ranks.local_world_size) == (0, 4, 4)
    assert (ranks.first_role_rank, ranks.role_world_size) == (0, 4)


def test_no_nodes_have_no_ranks() -> None:
    assert assign_ranks([]) == []


def test_global_ranks_run_through_nodes_of_unequal_size_in_the_order_of_their_group_ranks() -> None:
    table = assign_ranks([("default", 1), ("default", 4), ("default", 2)])
    assert [ranks.first_rank for ranks in table] == [0, 1, 5]
    assert {ranks.world_size for ranks in table} == {7}
    assert [ranks.local_world_size for ranks in table] == [1, 4, 2]


def test_role_ranks_run_through_the_nodes_of_a_role_also_when_another_role_stands_between() -> None:
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
    return {f"id of {host}": (None, host) for host in hosts}


def test_node2_comes_before_node10() -> None:
    order = order_nodes(newcomers("node10", "node2", "node1"), (), 9)
    assert order == ("id of node1", "id of node2", "id of node10")


def test_digits_compare_as_numbers_in_every_part_of_a_host_name() -> None:
    order = order_nodes(newcomers("rack10-node1", "rack9-node10", "rack9-node9", "10.0.0.2", "9.0.0.1"), (), 9)
    assert order == tuple(
        f"id of {host}" for host in ("9.0.0.1", "10.0.0.2", "rack9-node9", "rack9-node10", "rack10-node1")
    )


def test_nodes_of_one_host_are_told_apart_by_their_id() -> None:
    assert order_nodes({"b": (None, "host"), "a": (None, "host")}, (), 9) == ("a", "b")


def test_survivors_keep_their_group_ranks_and_newcomers_fill_the_holes() -> None:
    candidates = {"a": (None, "a"), "c": (None, "c"), "new": (None, "0")}
    assert order_nodes(candidates, ("a", "b", "c"), 9) == ("a", "new", "c")


def test_a_survivor_moves_down_only_if_its_rank_no_longer_exists() -> None:
    candidates = {"b": (None, "b"), "d": (None, "d")}
    assert order_nodes(candidates, ("a", "b", "c", "d"), 9) == ("d", "b")


def test_a_survivor_goes_before_a_newcomer_when_not_all_can_take_part() -> None:
    candidates = {"old": (None, "z"), "new": (0, "a"), "newer": (None, "b")}
    assert order_nodes(candidates, ("gone", "old"), 2) == ("new", "old")
    assert order_nodes(candidates, ("gone", "old"), 1) == ("old",)


def test_a_survivor_keeps_the_rank_that_a_newcomer_asks_for() -> None:
    assert order_nodes({"old": (None, "z"), "new": (0, "a")}, ("old",), 2) == ("old", "new")


def test_newcomers_get_the_ranks_they_ask_for() -> None:
    candidates = {"a": (2, "a"), "b": (None, "b"), "c": (0, "c")}
    assert order_nodes(candidates, (), 9) == ("c", "b", "a")


def test_newcomers_that_ask_for_a_rank_go_before_those_that_do_not() -> None:
    assert order_nodes({"a": (None, "a"), "b": (7, "b")}, (), 1) == ("b",)


def test_of_two_that_ask_for_one_rank_the_first_by_host_gets_it() -> None:
    assert order_nodes({"x": (0, "node10"), "y": (0, "node2")}, (), 9) == ("y", "x")


@pytest.mark.parametrize("preferred", [-1, 5])
def test_a_preferred_rank_that_does_not_exist_is_no_preference(preferred: int) -> None:
    assert order_nodes({"a": (preferred, "a"), "b": (1, "b")}, (), 9) == ("a", "b")


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
    """Two coordinators may each begin a round 5: the first after it has lost the board, the second in its place."""
    ranks = assign_ranks([("default", 1)])[0]
    fences = [
        Assigned(r, 0, ranks, "host", 1, epoch=epoch).fence for epoch, r in ((0, 1), (1, 4), (1, 5), (2, 5), (3, 1))
    ]
    assert fences == [1, 1_004, 1_005, 2_005, 3_001]
