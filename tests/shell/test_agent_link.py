"""The link to the leader: what it passes to the member, and how it carries out the member's actions."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import anyio
import pytest
from kit.shared_cell import InProcessCell, SharedWorld
from kit.stories.leader_terms import leader_at, running
from kit.stories.member import NODE

from aelastic.base.host.ports import HeldPort
from aelastic.errors import (
    AelasticError,
    InputError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from aelastic.rdzv import agent_link, leader_server
from aelastic.rdzv.agent_link import AgentLink
from aelastic.rdzv.leader_server import LeaderServer
from aelastic.rdzv.log.node import Close
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import DOWNWARD
from aelastic.rdzv.protocol.proofs import Proofs
from aelastic.rdzv.protocol.stream import Stream
from aelastic.rdzv.protocol.unauthenticated import UnauthenticatedPeers
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.settings import RendezvousSettings


def link(world: SharedWorld | None = None, **settings: Any) -> AgentLink:
    chosen = RendezvousSettings("c10d", "node0:29400", 1, 2, endpoint_from="PET_RDZV_ENDPOINT", **settings)
    return AgentLink(InProcessCell("job", world or SharedWorld()), chosen, "job", "me", RestartPolicy(3))


async def test_a_wait_is_reported_with_the_variable_that_the_endpoint_is_from() -> None:
    assert link()._member.search.hint == "the endpoint is from PET_RDZV_ENDPOINT"


@pytest.mark.parametrize("way", ["nodes vote", "the store alone"])
async def test_a_node_reports_where_its_agent_can_be_asked_to_vote(way: str) -> None:
    mine = link(config={"survivor": "endpoint"} if way == "the store alone" else {})
    mine.send(m.Ready(NODE))
    event = await mine._mailbox.next(None)
    assert isinstance(event, ev.Submitted) and isinstance(event.message, m.Ready)
    assert (event.message.node.vote_port > 0) == (way == "nodes vote")
    if mine._campaigns is not None:
        mine._campaigns._port.close()


async def test_what_no_agent_wrote_ends_one_that_has_just_started_and_not_one_that_had_a_leader() -> None:
    world = SharedWorld()
    world.texts["job"] = b"hello"
    mine = link(world)
    with pytest.raises(RendezvousStateError, match="choose another run id"):
        await mine._answer()
    mine._member.led_at = 100.0
    answer = await mine._answer()
    assert isinstance(answer, ev.CellFailed) and "was not written by an aelastic agent" in answer.reason


@pytest.mark.parametrize(
    "action, error, code",
    [
        (ev.GiveUp("no", is_refused=True), InputError, 2),
        (ev.GiveUp("no", is_refused=False), RendezvousConnectionError, 1),
        (ev.GiveUp("no", is_refused=False, lacks_quorum=True), RendezvousTimeoutError, 75),
    ],
)
async def test_a_node_that_gives_up_ends_with_the_exit_code_of_its_reason(
    action: ev.GiveUp, error: type[AelasticError], code: int
) -> None:
    async with anyio.create_task_group() as tasks:
        with pytest.raises(error) as raised:
            link()._carry_out(action, lambda _: None, tasks)
    assert raised.value.exit_code == code


async def test_an_endpoint_that_is_away_is_asked_again() -> None:
    world = SharedWorld()
    world.is_down = True
    mine = link(world)
    assert await mine._answer() == ev.CellFailed("the store in this process is down")
    world.is_down = False
    assert await mine._answer() == ev.CellAnswered(None)


async def test_agents_that_have_yet_to_learn_of_the_end_are_named_and_waited_for_until_it_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leader_server, "FAREWELL_S", 0.01)
    mine, term = link(), running("ab", max_restarts=0)
    term.fail("a")
    assert term.leader.is_over
    term.close("a")
    unauthenticated, cell = UnauthenticatedPeers(2, math.inf), InProcessCell("job", SharedWorld())
    with closing(HeldPort()) as port:
        server = LeaderServer(
            term.leader,
            cell,
            mine._turn,
            port,
            None,
            lambda: None,
            lambda *_: None,
            lambda *_: None,
            unauthenticated,
            Proofs(None),
        )
        mine._server = server
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(mine.finish)
                while not caplog.messages:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
                mine.cut_short()
    text = "for the agents on host-b to receive the result (Ctrl-C skips the wait)"
    assert [message[-len(text) :] for message in caplog.messages] == [text]


async def test_a_connection_that_closes_before_it_has_its_number_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the member would wait several leases for an answer to a `Hello` that was never sent."""
    mine = link()

    async def connect_and_lose(*_: Any) -> Stream:
        stream = Stream(mine, DOWNWARD)
        stream.connection_lost(None)
        return stream

    monkeypatch.setattr(agent_link, "connect", connect_and_lose)
    await mine._connect(1, leader_at())

    events = [await mine._mailbox.next(None) for _ in range(2)]
    lost = ev.ConnectionLost(0, "lost the leader: connection closed", Close.ORDERLY)
    assert events[0] == lost, "not one of the member's connections"
    assert events[1] == ev.ConnectFailed(1, False, "the leader closed the connection at once")


@pytest.mark.parametrize("is_broken, how", [(False, Close.ORDERLY), (True, Close.ABORTED)])
async def test_the_member_learns_how_a_connection_ended(is_broken: bool, how: Close) -> None:
    mine = link()
    stream = Stream(mine, DOWNWARD)
    stream.conn = 3
    stream.connection_lost(ConnectionResetError("reset by peer") if is_broken else None)
    event = await mine._mailbox.next(None)
    assert isinstance(event, ev.ConnectionLost) and (event.conn, event.close, event.is_garbage) == (3, how, False)


async def test_an_end_in_the_middle_of_a_message_proves_nothing() -> None:
    mine = link()
    stream = Stream(mine, DOWNWARD)
    stream.data_received(b"\0\0\0\x09")
    stream.connection_lost(None)
    event = await mine._mailbox.next(None)
    assert isinstance(event, ev.ConnectionLost) and event.close is Close.ABORTED
