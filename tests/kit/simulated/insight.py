"""What the checks and the faults know of the inside of an agent's rendezvous: the only module that looks there.

What supervisors submit and hear says most; the rest is here, so that a change of the shells or of their cores is one here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aelastic.aio import Mailbox
from aelastic.rdzv.agent_link import AgentLink
from aelastic.rdzv.coordinator import session_events as c
from aelastic.rdzv.coordinator.leader import Leader
from aelastic.rdzv.coordinator_server import CoordinatorServer
from aelastic.rdzv.member import member_events as m
from aelastic.rdzv.protocol.messages import HungUp, Seats, Welcome
from aelastic.rdzv.wire.stream import Stream
from kit.simulated.world import End

if TYPE_CHECKING:
    from kit.simulated.agent import Agent


class ObservedLink(AgentLink):
    """Tells its agent what it hears and does."""

    agent: Agent

    def on_message(self, stream: Stream, message: Any) -> None:
        if isinstance(message, Welcome):
            self.agent.welcomed_at = min(self.agent.welcomed_at, self.agent.world.now)
        super().on_message(stream, message)

    def on_failure(self, stream: Stream, error: Exception) -> None:
        super().on_failure(stream, error)
        self.agent.world.fail(error)  # no agent sends what another one cannot take

    def _carry_out(self, action: m.Action, *args: Any) -> None:
        if isinstance(action, m.Disconnect):
            self.agent.watcher.hangs_up(self.agent)
        super()._carry_out(action, *args)


class ObservedServer(CoordinatorServer):
    """Tells its agent what the coordinator says, and when the board has confirmed it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        loop: Any = asyncio.get_running_loop()
        self.agent: Agent = loop.process
        self._hung_up: set[int] = set()  # connections whose nodes have said so
        self._mailbox = _Heard(self.agent)

    def on_message(self, stream: Stream, message: Any) -> None:
        if isinstance(message, HungUp):
            self._hung_up.add(stream.conn)
        super().on_message(stream, message)

    def on_failure(self, stream: Stream, error: Exception) -> None:
        super().on_failure(stream, error)
        self.agent.world.fail(error)

    def _carry_out(self, action: c.Action, *args: Any) -> None:
        if isinstance(action, c.Say) and action.conn in self._streams:
            node_id = getattr(_end(self._streams[action.conn]).peer.process, "node_id", "")
            self.agent.watcher.said(self.agent, self._leader, node_id, action.message)
        super()._carry_out(action, *args)

    async def _renew(self, seats: Seats | None) -> None:
        before, connected = self._record, self._connected()
        await super()._renew(seats)
        self._tell_renewed(before, connected)

    async def _claim(self, seats: Seats | None) -> None:
        before, connected = self._record, self._connected()
        await super()._claim(seats)
        self._tell_renewed(before, connected)

    def _tell_renewed(self, before: Any, connected: set[str]) -> None:
        if self._record is not before:
            self.agent.watcher.renewed(self._record.candidate.token, connected)

    def _connected(self) -> set[str]:
        """The nodes that it has connections with."""
        ends = [_end(stream) for conn, stream in self._streams.items() if conn not in self._hung_up]
        return {getattr(end.peer.process, "node_id", "") for end in ends if end.is_open}


class _Heard(Mailbox[c.Event]):
    """Tells its agent what the coordinator hears, just before it does."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent

    async def next(self, deadline: float | None) -> c.Event | None:
        event = await super().next(deadline)
        if event is not None:
            self._agent.watcher.coordinator_hears(self._agent, event)
        return event


def _end(stream: Stream) -> End:
    assert stream._transport is not None
    end: End = stream._transport.get_extra_info("socket").end
    return end


def connection_of(agent: Agent) -> End | None:
    """Its end of the connection with the coordinator that it follows, if there is one."""
    stream = None if agent.link is None else agent.link._stream
    return None if stream is None else _end(stream)


def leader_of(agent: Agent) -> Leader | None:
    """The coordinator in this agent."""
    server = None if agent.link is None else agent.link._server
    return None if server is None else server._leader


def phase_of(agent: Agent) -> m.Phase:
    """Of its member."""
    return m.Phase.IDLE if agent.link is None else agent.link._member.phase


def is_member(agent: Agent) -> bool:
    """Whether a coordinator has welcomed it, as far as it knows."""
    return phase_of(agent) is m.Phase.MEMBER


def epoch_of(agent: Agent) -> int:
    """The newest that it knows of."""
    return 0 if agent.link is None else agent.link._member.leader.epoch


def restart_count_of(agent: Agent) -> int:
    """The highest that it has heard of."""
    return 0 if agent.link is None else agent.link._member.state.restart_count
