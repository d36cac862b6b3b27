"""Looks inside an agent's rendezvous, for the checks and the faults; no other module does.

Most checks need only what supervisors submit and receive.  The rest is here, so that a change of the shells or their cores
changes one module of the simulation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aelastic.base.loop.mailbox import Mailbox
from aelastic.rdzv.agent_link import AgentLink
from aelastic.rdzv.leader import leader_events as c
from aelastic.rdzv.leader.coordinator_events import Phase as CoordinatorPhase
from aelastic.rdzv.leader.leader import Leader
from aelastic.rdzv.leader_server import LeaderServer
from aelastic.rdzv.log import leader as leading
from aelastic.rdzv.log import votes
from aelastic.rdzv.log.entries import Entry, log_of
from aelastic.rdzv.member import member_events as m
from aelastic.rdzv.protocol.messages import (
    Failed,
    Hello,
    NodeMessage,
    NodePhase,
    OptedIn,
    Plan,
    Prepared,
    Status,
    Succeeded,
)
from aelastic.rdzv.protocol.stream import Stream
from kit.reports import news
from kit.simulated.world import End

if TYPE_CHECKING:
    from kit.simulated.supervisor import Agent


class Coordination:
    """What is known about an agent's leadership, besides the messages that it sends."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    @property
    def token(self) -> str:
        """Its token in the cell."""
        return self._leader.connections.token

    @property
    def node_id(self) -> str:
        return self._leader.coordinator.own_node_id

    @property
    def awaits_quorum(self) -> bool:
        """Whether it may not decide anything for now, so that reports of nodes wait."""
        return not self._leader.log.mandate

    @property
    def has_proposed(self) -> bool:
        """Whether it has proposed an entry that is not committed."""
        return self._leader.log.proposal is not None

    @property
    def has_stepped_down(self) -> bool:
        return self._leader.has_stepped_down

    def lacks(self, living: set[str]) -> set[str]:
        """Names of the voters whose votes it lacks for a quorum even if all living voters vote."""
        log = self._leader.log
        last = leading.last_whole(log)
        if log.mandate or last is None:
            return set()
        voters = set(last.voters)
        found = leading.phase_1_votes(log)
        found = found.replace(answered=found.answered | (voters & living))
        is_known_whole = isinstance(log.node.committed, Entry)  # else only voters that are gone know who decides
        if is_known_whole and votes.mandate(last.configuration, found):
            return set()
        return voters - found.known  # one that was replaced is needed once the endpoint has forgotten the log

    def has(self, node_id: str) -> bool:
        """Whether it is connected to a node: it may have given the node up without having announced that yet."""
        return self._leader.connections.is_connected(node_id)

    @property
    def log_name(self) -> str | None:
        """The name of the log that it leads; `None` if the log is not founded yet."""
        return log_of(self._leader.log.node.committed)

    def round_of(self, node_id: str) -> int:
        """The number of the round that a node takes part in now; 0 if it is in no round."""
        core = self._leader.coordinator
        is_running = core.phase is CoordinatorPhase.RUNNING
        return core.round if is_running and node_id in core.roster.participants else 0


def _messages_in(status: Status, before: Status | None) -> list[NodeMessage]:
    """The messages in a node's status to its leader; its first status repeats what it told an earlier leader."""
    node_id, past, messages = status.node.node_id, status.past, list[NodeMessage]()
    was = None if before is None else before.past
    is_ready_anew = past.phase is NodePhase.READY and (before is None or status.ready_count != before.ready_count)
    if is_ready_anew or (before is not None and status.prepared_count != before.prepared_count):
        messages.append(Prepared(node_id, status.node.starts))
    if past.has_opted_in and (was is None or not was.has_opted_in or was.round != past.round):
        messages.append(OptedIn(node_id, past.round))
    if past.phase is NodePhase.FINISHED and (was is None or was.phase is not NodePhase.FINISHED):
        messages.append(Succeeded(node_id, past.round))
    if past.failure is not None and was is not None and was.failure is None:
        messages.append(Failed(node_id, past.round, past.failure, past.failure_age_s))
    known = () if before is None else before.asks  # a request may come with the first status
    return [*messages, *(ask for ask in status.asks if ask not in known)]


class ObservedLink(AgentLink):
    """Reports to its agent what it receives and does."""

    agent: Agent

    def on_message(self, stream: Stream, message: Any) -> None:
        if isinstance(message, Plan):
            self.agent.welcomed_at = min(self.agent.welcomed_at, self.agent.world.now)
        super().on_message(stream, message)

    def on_failure(self, stream: Stream, error: Exception) -> None:
        super().on_failure(stream, error)
        self.agent.world.fail(error)  # no agent sends what another one cannot take

    def _carry_out(self, action: m.Action, *args: Any) -> None:
        if isinstance(action, m.Disconnect):
            self.agent.watcher.hangs_up(self.agent)
        super()._carry_out(action, *args)


class ObservedServer(LeaderServer):
    """Reports to its agent what the leader sends."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        loop: Any = asyncio.get_running_loop()
        self.agent: Agent = loop.process
        self._plans: dict[int, Plan] = {}  # the last on each connection
        self._mailbox = _ObservedMailbox(self.agent, self.leader)

    def on_failure(self, stream: Stream, error: Exception) -> None:
        super().on_failure(stream, error)
        self.agent.world.fail(error)

    def _carry_out(self, action: c.Action, *args: Any) -> None:
        if isinstance(action, c.SendTo) and action.conn in self._streams:
            node_id = getattr(_end(self._streams[action.conn]).peer.process, "node_id", "")
            leader = Coordination(self.leader)
            for item in self._news(action.conn, action.message):
                if isinstance(item, str):
                    self.agent.watcher.welcomes(leader, node_id)
                else:
                    self.agent.watcher.leader_sends(self.agent, leader, node_id, item)
        if isinstance(action, c.StepDown):
            self.agent.watcher.steps_down(self.agent, Coordination(self.leader))
        super()._carry_out(action, *args)

    def _news(self, conn: int, message: Any) -> list[Any]:
        """The news in a message: for a plan, the parts that the previous plan did not have."""
        if not isinstance(message, Plan):
            return [message]
        before, self._plans[conn] = self._plans.get(conn), message
        return news(before, message)


class _ObservedMailbox(Mailbox[c.Event]):
    """Reports to its agent what the leader is about to receive."""

    def __init__(self, agent: Agent, leader: Leader) -> None:
        super().__init__()
        self._agent, self._leader = agent, leader
        self._statuses: dict[int, Status] = {}  # the last on each connection

    async def next_by(self, deadline: Callable[[], float | None]) -> c.Event | None:
        return await self.next(None if self._items else deadline())

    async def next(self, deadline: float | None) -> c.Event | None:
        event = await super().next(deadline)
        match event:
            case c.Received(conn, Hello() as hello):
                self._receive(conn, hello.status)
            case c.Received(conn, Status() as status):
                self._receive(conn, status)
            case _:
                pass
        return event

    def _receive(self, conn: int, status: Status) -> None:
        before, self._statuses[conn] = self._statuses.get(conn), status
        for message in _messages_in(status, before):
            self._agent.watcher.leader_receives(Coordination(self._leader), message)


def _end(stream: Stream) -> End:
    assert stream._transport is not None
    end: End = stream._transport.get_extra_info("socket").end
    return end


def connection_of(agent: Agent) -> End | None:
    """An agent's end of the connection to the leader that it follows, if any."""
    stream = None if agent.link is None else agent.link._stream
    return None if stream is None else _end(stream)


def has_connection(node: Agent, to: Agent) -> bool:
    """Whether a node has an open connection to a leader, which may not have welcomed it yet."""
    end, server = connection_of(node), None if to.link is None else to.link._server
    if end is None or end.peer.process is not to or not (end.is_open and end.peer.is_open):
        return False
    streams = [] if server is None else server._streams.values()
    return not any(stream.is_closing for stream in streams if _end(stream) is end.peer)


def coordination_of(agent: Agent) -> Coordination | None:
    """The leadership of this agent, if it leads."""
    server = None if agent.link is None else agent.link._server
    return None if server is None else Coordination(server.leader)


def phase_of(agent: Agent) -> m.Phase:
    """The phase of its member."""
    return m.Phase.SEARCHING if agent.link is None else agent.link._member.phase


def is_member(agent: Agent) -> bool:
    """Whether a leader has welcomed the agent, as far as the agent knows."""
    return phase_of(agent) is m.Phase.FOLLOWING


def name_of(agent: Agent) -> str:
    """The name of the agent's node in the log."""
    return agent.node_id if agent.link is None else agent.link._member.name


def term_of(agent: Agent) -> int:
    """The newest term that the agent knows of."""
    return 0 if agent.link is None else agent.link._member.term


def restart_count_of(agent: Agent) -> int:
    """The highest restart count that the agent knows of."""
    return 0 if agent.link is None else agent.link._member.state.restart_count
