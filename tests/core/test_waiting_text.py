"""Messages of a waiting node: which nodes have joined, and which are missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aelastic.rdzv.decisions.cause import NAMES_MAX
from aelastic.rdzv.leader.roster import some_of
from aelastic.rdzv.leader.waiting_text import forming_text
from aelastic.rdzv.protocol.messages import Node


def nodes(*hosts: str, ranks: Sequence[int | None] = ()) -> list[Node]:
    wishes = ranks or [None] * len(hosts)
    return [Node(host, host, "default", 1, "", 1, rank) for host, rank in zip(hosts, wishes, strict=True)]


def line(joined: list[Node], **others: Any) -> str:
    given = {
        "stopping": [], "lost": {}, "nodes": (2, 2), "waited_s": 10.4, "is_first": False, "reconnected": None, **others,
    }  # fmt: skip
    return forming_text(joined=joined, **given).full


LOST = {"b": "silent for 5 s", "a": "connection closed"}


@pytest.mark.parametrize(
    "joined, others, expected",
    [
        (nodes("c", "a", "b"), {}, "3 of 2 nodes joined after 10 s (a, b, c)"),
        ([], {"is_first": True}, "0 of 2 nodes joined after 10 s (none); waiting for 2 more"),
        (nodes("a"), {"nodes": (2, 4)}, "1 of 2-4 nodes joined after 10 s (a); waiting for 1 more"),
        # During the last call, optional nodes are listed as missing.
        (
            nodes("a", "b"),
            {"nodes": (2, 4), "is_first": True},
            "2 of 2-4 nodes joined after 10 s (a, b); waiting for 2 more",
        ),
        # A node that is stopping its workers is on its way, not missing.
        (nodes("a"), {"stopping": ["b"]}, "1 of 2 nodes joined after 10 s (a); stopping their workers: b"),
        # Lost nodes are listed by name and reason, node ranks without a node by number.
        (nodes("a"), {"lost": LOST}, "1 of 2 nodes joined after 10 s (a); waiting for b (silent for 5 s)"),
        (
            nodes("a", "b", ranks=[3, 0]),
            {"nodes": (4, 4)},
            "2 of 4 nodes joined after 10 s (a, b); waiting for node rank 1, node rank 2",
        ),
        # Without ranks, or with ranks beyond the number of nodes, only the number is known.
        (nodes("a", ranks=[None]), {"nodes": (4, 4)}, "1 of 4 nodes joined after 10 s (a); waiting for 3 more"),
        (
            nodes("a", "b", ranks=[0, 1]),
            {"nodes": (2, 3), "is_first": True},
            "2 of 2-3 nodes joined after 10 s (a, b); waiting for 1 more",
        ),
        (
            nodes("a", "b"),
            {"nodes": (2, 3), "is_first": True, "starts_in_s": 20.0},
            "2 of 2-3 nodes joined after 10 s (a, b); starting in 20 s; waiting for 1 more",
        ),
        (
            nodes("a", "b"),
            {"reconnected": (7, 2, 3)},
            "2 of 2 nodes joined after 10 s (a, b); reconnected from round 7: 2 of 3",
        ),
    ],
)
def test_a_line_shows_which_nodes_have_joined_and_which_are_missing(
    joined: list[Node], others: dict[str, Any], expected: str
) -> None:
    assert line(joined, **others) == f"rendezvous: {expected}"


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
    joined: list[Any], stopping: list[str], lost: dict[str, str], fewest: int, further: int, is_first: bool
) -> None:
    present = nodes(*(host for host, _ in joined), ranks=[rank for _, rank in joined])
    text = line(present, stopping=stopping, lost=lost, nodes=(fewest, fewest + further), is_first=is_first)
    lacking = fewest - len(present) - len(stopping)
    assert ("waiting for " in text) == (lacking > 0 or is_first)
    assert "waiting for none" not in text and "waiting for ;" not in text
