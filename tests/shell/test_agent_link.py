"""The link to the coordinator: what it tells the member, and what a bug report shows of it."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import anyio
import pytest
from kit.shared_board import InProcessBoard, SharedWorld
from kit.stories.leader_terms import CANDIDATE, running

from aelastic.core.machine import InvalidTransition
from aelastic.host.sockets import HeldPort
from aelastic.rdzv import agent_link, coordinator_server
from aelastic.rdzv.agent_link import AgentLink
from aelastic.rdzv.coordinator import session_events
from aelastic.rdzv.coordinator_server import CoordinatorServer
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.protocol.codec import DOWNWARD
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.wire.proofs import Proofs
from aelastic.rdzv.wire.strangers import Strangers
from aelastic.rdzv.wire.stream import Stream


def link() -> AgentLink:
    settings = RendezvousSettings("c10d", "node0:29400", 1, 2, endpoint_from="PET_RDZV_ENDPOINT")
    return AgentLink(InProcessBoard("job", SharedWorld()), settings, "job", "me", RestartPolicy(3))


async def test_a_wait_is_told_with_the_variable_that_the_endpoint_is_from() -> None:
    assert link()._member.search.hint == "the endpoint is from PET_RDZV_ENDPOINT"


async def test_an_event_that_cannot_be_is_reported_with_the_story_of_the_member() -> None:
    mine = link()
    mine._mailbox.post(ev.LeadershipLost())
    with pytest.raises(ExceptionGroup) as caught:
        await mine.run(lambda message: None)
    (error,) = caught.value.exceptions
    assert isinstance(error, InvalidTransition)
    assert "LeadershipLost() in phase idle (a bug in aelastic: please report it)" in str(error)


async def test_agents_that_have_yet_to_hear_of_the_end_are_named_and_waited_for_until_it_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator_server, "FAREWELL_S", 0.01)
    mine, term = link(), running("ab", max_restarts=0)
    term.fail("a")
    term.tell(session_events.Published(True))
    term.close("a")
    strangers, board = Strangers(2, math.inf), InProcessBoard("job", SharedWorld())
    with closing(HeldPort()) as port:
        record, proofs = LeaderRecord(1, CANDIDATE), Proofs(None)
        mine._server = CoordinatorServer(term.leader, record, board, mine._turn, port, lambda: None, strangers, proofs)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(mine.finish)
                while not caplog.messages:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
                mine.hurry()
    told = "for the agents on host-b to receive the result (Ctrl-C skips the wait)"
    assert [message[-len(told) :] for message in caplog.messages] == [told]


async def test_a_connection_that_closes_before_it_has_its_number_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the member would wait some leases for an answer to a `Hello` that was never sent."""
    mine = link()

    async def connect_and_lose(*where: Any) -> Stream:
        stream = Stream(mine, DOWNWARD)
        stream.connection_lost(None)
        return stream

    monkeypatch.setattr(agent_link, "connect", connect_and_lose)
    await mine._connect(1, LeaderRecord(1, Candidate("boss", ("10.0.0.1",), 4000, "token")))

    told = [await mine._mailbox.next(None) for _ in range(2)]
    assert told[0] == ev.ConnectionLost(0, "lost the leader: connection closed"), "no connection of the member's"
    assert told[1] == ev.ConnectFailed(1, False, "the leader closed the connection at once")
