"""The coordinator: stories as text (`stories/`), and what these do not show."""

from __future__ import annotations

from typing import Any

from kit.stories.coordinator import failure, node

from aelastic.rdzv.coordinator.coordinator import Coordinator
from aelastic.rdzv.coordinator.coordinator_events import DeadlinePassed, Registered
from aelastic.rdzv.coordinator.roster import RoundRules
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.settings import JOIN_TIMEOUT_S


def coordinator(*nodes: m.Node, max_nodes: int, max_restarts: int = 3) -> tuple[Coordinator, list[Any]]:
    """A coordinator, and what it sends when the last of these nodes is ready."""
    core = Coordinator(RoundRules(1, max_nodes), RestartPolicy(max_restarts))
    sends: list[Any] = []
    assert core.deadline is None, "nothing is due before a node comes"
    for each in nodes:
        sends = core.handle(m.Ready(each), 100.0)
    return core, sends


def test_every_node_hears_its_own_ranks_and_the_same_round_and_master() -> None:
    nodes = [
        node("c").replace(role="reader", local_world_size=1),
        node("b").replace(role="trainer", local_world_size=4),
        node("a").replace(local_world_size=3, master_port=4242),
    ]
    _, sends = coordinator(*nodes, max_nodes=3)
    heard: dict[str, Any] = {send.node_id: send.message for send in sends}
    assert {(each.round, each.restart_count, each.ranks.world_size) for each in heard.values()} == {(1, 0, 8)}
    assert {(each.master_addr, each.master_port) for each in heard.values()} == {("addr-a", 4242)}
    assert [heard[name].ranks.group_rank for name in "abc"] == [0, 1, 2]
    assert [heard[name].ranks.first_rank for name in "abc"] == [0, 3, 7]
    assert [heard[name].ranks.first_role_rank for name in "abc"] == [0, 0, 0]


def test_a_node_that_comes_again_brings_its_new_port() -> None:
    core, _ = coordinator(node("a"), node("b"), max_nodes=2)
    core.handle(m.Failed("a", 1, failure("a")), 100.0)
    core.handle(m.Ready(node("b")), 100.0)
    sends: list[Any] = [*core.handle(m.Ready(node("a").replace(master_port=4242)), 100.0)]
    assert {send.message.master_port for send in sends} == {4242}


def test_a_timeout_names_a_few_of_the_nodes_that_joined() -> None:
    core = Coordinator(RoundRules(100, 200), RestartPolicy(0))
    for number in range(50):
        core.handle(Registered(node(f"n{number}"), m.Past(m.Standing.READY)), 100.0)
    assert core.deadline == 100.0 + JOIN_TIMEOUT_S
    verdict: Any
    (verdict,) = {send.message for send in core.handle(DeadlinePassed(), core.deadline)}
    assert core.is_closed and len(verdict.reason) < 400 and verdict.reason.endswith("and 34 more")


def test_its_last_events_are_told_and_no_more_than_those() -> None:
    core, _ = coordinator(node("a"), node("b"), max_nodes=2)
    core.handle(m.Failed("a", 1, failure("a")), 100.0)
    assert "Failed" in core.story[-1] and "running" in core.story[-1] and "forming" in core.story[-1]
    for _ in range(500):
        core.handle(DeadlinePassed(), 100.0)
    assert len(core.story) == 64


def test_messages_for_one_node_come_in_the_order_of_the_decisions() -> None:
    core, _ = coordinator(node("a"), max_nodes=1, max_restarts=1)
    sends = core.handle(m.Failed("a", 1, failure("a")), 100.0) + core.handle(m.Ready(node("a")), 100.0)
    assert [type(send.message) for send in sends] == [m.Interrupted, m.Assigned]
