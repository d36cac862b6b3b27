"""The link to the coordinator: what it tells the member, and what a bug report shows of it."""

from __future__ import annotations

from typing import Any

import pytest
from kit.shared_board import InProcessBoard, SharedWorld

from aelastic.core.machine import InvalidTransition
from aelastic.rdzv import agent_link
from aelastic.rdzv.agent_link import AgentLink
from aelastic.rdzv.board import Candidate, LeaderRecord
from aelastic.rdzv.coordinator.restart_policy import RestartPolicy
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.protocol.codec import DOWNWARD
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stream import Stream


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
    assert told[0] == ev.ConnectionLost(0, "lost the coordinator: connection closed"), "no connection of the member's"
    assert told[1] == ev.ConnectFailed(1, False, "the coordinator closed the connection at once")
