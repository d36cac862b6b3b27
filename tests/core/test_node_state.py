"""What a node says of itself to a coordinator that may know nothing of it."""

from __future__ import annotations

import pytest

from aelastic.rdzv.member.node_state import NodeState
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.ranks import assign_ranks

NODE = m.Node("me", "host", "", 2, "", 29500)


@pytest.mark.parametrize("starts", m.Starts)
def test_workers_that_waited_for_a_round_have_opted_in_to_it(starts: m.Starts) -> None:
    state = NodeState()
    state.submit(m.Ready(NODE), 0.0)
    state.submit(m.Prepared("me", starts), 0.0)
    (ranks,) = assign_ranks([("", 2)])
    for round_ in (1, 2):
        state.on_told(m.Assigned(round_, 0, ranks, "host", 29500, 0), 0.0)
        assert state.past.has_opted_in == (round_ == 1 and starts is m.Starts.READY)
        state.submit(m.Ready(NODE), 0.0)


@pytest.mark.parametrize("ballot_port, nodes, can_elect", [(1, 3, True), (0, 3, False), (1, m.SEATS_MAX + 1, False)])
def test_a_node_that_has_not_heard_who_is_in_its_round_knows_whether_the_others_elect(
    ballot_port: int, nodes: int, *, can_elect: bool
) -> None:
    """Its connection broke between the two messages: cut off, its workers would run beside the others' next round."""
    state = NodeState()
    state.submit(m.Ready(NODE.replace(ballot_port=ballot_port)), 0.0)
    assert not state.can_others_elect
    state.on_told(m.Assigned(1, 0, assign_ranks([("", 2)] * nodes)[0], "host", 29500, 0), 0.0)
    assert state.can_others_elect == can_elect
