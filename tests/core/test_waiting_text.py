"""What people are told while nodes wait: who is there, and who is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aelastic.rdzv.coordinator.waiting_text import NAMES_MAX, some_of, who_is_missing
from aelastic.rdzv.protocol.messages import Node


def nodes(*hosts: str, ranks: Sequence[int | None] = ()) -> list[Node]:
    wishes = ranks or [None] * len(hosts)
    return [Node(host, host, "default", 1, "", 1, rank) for host, rank in zip(hosts, wishes, strict=True)]


def line(here: list[Node], **others: Any) -> str:
    given = {"stopping": [], "lost": {}, "nodes": (2, 2), "waited_s": 10.4, "is_first": False, "back": None, **others}
    return who_is_missing(here=here, **given)


def test_who_is_there_is_named_in_order() -> None:
    assert line(nodes("c", "a", "b")) == "3 of 2 nodes are ready (10 s): a, b, c"


def test_nobody_is_there() -> None:
    assert line([], is_first=True) == "0 of 2 nodes are ready (10 s): nobody; missing: 2 more"


def test_a_range_is_told_as_one() -> None:
    assert line(nodes("a"), nodes=(2, 4)) == "1 of 2 to 4 nodes are ready (10 s): a; missing: 1 more"


def test_during_the_last_call_those_who_may_come_are_missing() -> None:
    text = line(nodes("a", "b"), nodes=(2, 4), is_first=True)
    assert text == "2 of 2 to 4 nodes are ready (10 s): a, b; missing: 2 more"


def test_who_stops_its_workers_is_on_its_way_and_not_missing() -> None:
    assert line(nodes("a"), stopping=["b"]) == "1 of 2 nodes are ready (10 s): a; stopping their workers: b"


def test_who_was_lost_is_missing_by_name_and_reason() -> None:
    lost = {"b": "silent for 5 s", "a": "its connection closed"}
    assert line(nodes("a"), lost=lost) == "1 of 2 nodes are ready (10 s): a; missing: b (silent for 5 s)"


def test_ranks_that_nobody_has_are_missing() -> None:
    here = nodes("a", "b", ranks=[3, 0])
    assert line(here, nodes=(4, 4)) == "2 of 4 nodes are ready (10 s): a, b; missing: node rank 1, node rank 2"


def test_without_ranks_only_the_number_is_known() -> None:
    assert line(nodes("a", ranks=[None]), nodes=(4, 4)).endswith("missing: 3 more")


def test_ranks_that_are_wishes_beyond_the_number_of_nodes_do_not_hide_that_somebody_is_missing() -> None:
    here = nodes("a", "b", ranks=[0, 1])
    assert line(here, nodes=(2, 3), is_first=True).endswith("missing: 1 more")


def test_a_recovery_tells_how_many_are_back() -> None:
    assert line(nodes("a", "b"), back=(7, 2, 3)) == "2 of 2 nodes are ready (10 s): a, b; back from round 7: 2 of 3"


@pytest.mark.parametrize("count, more", [(NAMES_MAX, ""), (NAMES_MAX + 1, " and 1 more"), (4096, " and 4080 more")])
def test_of_many_a_few_are_named(count: int, more: str) -> None:
    text = some_of([f"node{number:04}" for number in reversed(range(count))])
    assert text.startswith("node0000, node0001, ") and text.endswith(f"node{NAMES_MAX - 1:04}{more}")
    assert len(text) < 200


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.none() | st.integers(0, 5)), max_size=6),
    st.lists(st.sampled_from("ghij"), max_size=3),
    st.dictionaries(st.sampled_from("abcxyz"), st.just("silent"), max_size=3),
    st.integers(1, 4),
    st.integers(0, 4),
    st.booleans(),
)
def test_whenever_nodes_lack_something_is_missing(
    here: list[Any], stopping: list[str], lost: dict[str, str], fewest: int, further: int, is_first: bool
) -> None:
    present = nodes(*(host for host, _ in here), ranks=[rank for _, rank in here])
    text = line(present, stopping=stopping, lost=lost, nodes=(fewest, fewest + further), is_first=is_first)
    lacking = fewest - len(present) - len(stopping)
    assert ("missing: " in text) == (lacking > 0 or is_first)
    assert "missing: nobody" not in text and "missing: ;" not in text
