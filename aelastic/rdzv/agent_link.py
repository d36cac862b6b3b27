"""This agent's link to the leader, on another host or in this process: carries out the member core's actions."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, assert_never

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from aelastic.base.host.ports import LOOPBACKS, HeldPort
from aelastic.base.loop import clock
from aelastic.base.loop.mailbox import Mailbox
from aelastic.errors import (
    InputError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from aelastic.rdzv.campaigns import Campaigns
from aelastic.rdzv.leader.connections import Connections
from aelastic.rdzv.leader.coordinator import Coordinator
from aelastic.rdzv.leader.job_state import Participant, check_entries, voters_in
from aelastic.rdzv.leader.leader import Leader
from aelastic.rdzv.leader.leader_cell import LeaderCell
from aelastic.rdzv.leader.leader_events import StepDown
from aelastic.rdzv.leader.roster import RoundRules
from aelastic.rdzv.leader_server import LeaderServer
from aelastic.rdzv.log import leader as leading
from aelastic.rdzv.log.entries import Entry, EntryRef, id_of
from aelastic.rdzv.log.node import Node
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.agreed import Agreed, agreed
from aelastic.rdzv.member.member import Member
from aelastic.rdzv.member.member_events import Phase
from aelastic.rdzv.member.search import Search
from aelastic.rdzv.protocol.codec import DOWNWARD, WireError, encode
from aelastic.rdzv.protocol.handshake import ProofError
from aelastic.rdzv.protocol.listening import addresses_beside, listen_for_members, local_addresses, own_addresses
from aelastic.rdzv.protocol.messages import (
    Campaign,
    Declined,
    HungUp,
    LeaderAt,
    LeaderMessage,
    NodeMessage,
    Ready,
    Terms,
)
from aelastic.rdzv.protocol.other_secret import OtherSecret
from aelastic.rdzv.protocol.proofs import MEMBER as OF_MEMBERS
from aelastic.rdzv.protocol.proofs import Proofs
from aelastic.rdzv.protocol.secret_file import SecretFile
from aelastic.rdzv.protocol.stream import NoConnectionError, Stream, connect
from aelastic.rdzv.protocol.unauthenticated import UnauthenticatedPeers
from aelastic.rdzv.protocol.writing import NotTrustedError
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.endpoint_cell import EndpointCell
from aelastic.rdzv.stores.endpoints import look_up_limit_s

_log = logging.getLogger(__name__)


# Unsent data at the end is small, and already on its way.
FAREWELL_S = 1.0


class AgentLink:
    """Finds the leader through the endpoint's cell, follows it, and hosts it when this agent campaigns (`Link`).

    Args:
        cell: where the agents of this job find their leader.
        settings: the user's settings.
        run_id: the job's name.
        node_id: this agent's node id.
        policy: the leader's policy, if this agent hosts it.
        files_max: how many descriptors connections may take.
        secret: the job's secret, if it has one.
    """

    def __init__(
        self,
        cell: EndpointCell,
        settings: RendezvousSettings,
        run_id: str,
        node_id: str,
        policy: RestartPolicy,
        files_max: float = math.inf,
        secret: SecretFile | None = None,
    ) -> None:
        self._cell, self._is_reached = cell, False
        self._turn = anyio.Lock()  # held during an operation on the cell, which member and leader share
        self._settings = settings
        self._policy = policy
        self._unauthenticated = UnauthenticatedPeers(settings.max_nodes, files_max)
        self._secret, self._proofs = secret, Proofs(secret)
        limits = settings.min_nodes, settings.max_nodes, policy.max_restarts
        terms = Terms(run_id, *limits, settings.lease_s, policy.text)
        trouble = f"no answer from {cell.name} yet: the store is still starting, or another program listens there"
        search = Search(settings.join_timeout_s, trouble, settings.endpoint_note)
        may_lead = settings.backend != "static" or settings.node_rank == 0
        self._member = Member(node_id, terms, search, may_lead, settings.has_elections)
        self._mailbox: Mailbox[ev.Event] = Mailbox()
        self._port: HeldPort | None = None  # the one that our next candidacy names
        self._other_secret = OtherSecret()
        self._local_addresses: list[str] = []  # of the name that others are given
        self._server: LeaderServer | None = None
        self._stream: Stream | None = None
        self._connecting = anyio.CancelScope()
        self._campaigns: Campaigns | None = None  # where nodes vote
        self._known: EntryRef | None = None  # the last entry that was noted
        self._patience = anyio.CancelScope()  # with others that do not know yet how the job ended

    @property
    def coordinates(self) -> bool:
        return self._server is not None

    @property
    def agreed(self) -> Agreed | None:
        return None if self._log is None else agreed(self._log)

    def send(self, message: NodeMessage) -> None:
        if isinstance(message, Ready) and self._settings.has_elections:
            port = self._open_campaigns().port
            message = message.replace(node=message.node.replace(vote_port=port))
        self._mailbox.post(ev.Submitted(message))

    async def run(self, deliver: Callable[[LeaderMessage], None]) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                await self._begin(tasks)
                while True:
                    event = await self._mailbox.next_by(lambda: self._member.deadline) or ev.DeadlinePassed()
                    for action in self._member.handle(event, clock.now()):
                        self._carry_out(action, deliver, tasks)
                    if isinstance(event, ev.Received) and self._stream is not None:
                        self._stream.handled()
                    self._note_committed()
        finally:
            if self._stream is not None:
                self._stream.abort()
            if self._port is not None:
                self._port.close()
            with anyio.CancelScope(shield=True), anyio.move_on_after(FAREWELL_S):
                await self._cell.aclose()

    async def _begin(self, tasks: TaskGroup) -> None:
        self._local_addresses = await local_addresses(self._settings)
        tasks.start_soon(self._cell.run, name="store")
        if self._secret is not None:
            tasks.start_soon(self._secret.follow, name="secret")
        if self._settings.has_elections:
            tasks.start_soon(self._open_campaigns().run, name="campaigns")

    def _open_campaigns(self) -> Campaigns:
        if self._campaigns is None:
            port = HeldPort(what="the port for campaigns", is_bind_all=self._settings.bind_all)
            lease_s = self._member.lease_s
            self._campaigns = Campaigns(port, self._unauthenticated, self._proofs, lease_s, self._on_campaign)
        return self._campaigns

    def _note_committed(self) -> None:
        """Notes the last committed entry: if it gives this node a vote, others know where to ask for it."""
        log = self._log
        if log is None or log.committed is None or log.committed is self._known:
            return
        committed = log.committed
        is_new, self._known = id_of(committed) != id_of(self._known), committed
        if is_new and _log.isEnabledFor(logging.INFO) and self.agreed is not None:
            _log.info("%s", self.agreed.text)
        if self._campaigns is not None and isinstance(committed, Entry):
            self._campaigns.listen_at(voters_in(committed), self._member.node_id)

    @property
    def _log(self) -> Node | None:
        """What this agent keeps of the log, in whichever core holds it."""
        return self._member.log if self._server is None else self._server.leader.log.node

    def _on_campaign(self, conn: int, campaign: Campaign) -> None:
        if self._server is not None:
            self._server.on_campaign(conn, campaign)
        else:
            self._mailbox.post(ev.Campaigned(conn, campaign))

    async def finish(self) -> None:
        await anyio.lowlevel.checkpoint()  # the last messages are still in the mailbox
        if self._stream is not None:  # first: the leader, here or elsewhere, must learn that this node leaves
            self._stream.hang_up()
            with anyio.move_on_after(FAREWELL_S):
                await self._stream.closed.wait()
        has_led = self._server is not None
        with self._patience:
            if self._server is not None:
                await self._server.wait_until_read()
            elif self._member.read_verdict and self._cell.is_served_here:
                # The leader is gone.  Others may not have read the cell yet, and such a store ends with the agents that
                # serve it.
                await anyio.sleep(self._settings.lease_s)
        if has_led and self._server is not None:
            await self._server.finish()

    def cut_short(self) -> None:
        self._patience.cancel()

    def _carry_out(  # noqa: C901, PLR0912  one case for each action
        self, action: ev.Action, deliver: Callable[[LeaderMessage], None], tasks: TaskGroup
    ) -> None:
        match action:
            case ev.ReadCell():
                tasks.start_soon(self._read_cell, name="read the cell")
            case ev.AskWhoLeads():
                self._ask_who_leads(tasks)
            case ev.Campaign():
                tasks.start_soon(self._campaign, action, name="campaign")
            case ev.Answer(conn, declined):
                if self._campaigns is not None:
                    self._campaigns.answer(conn, declined)
            case ev.Connect(conn, leader):
                self._disconnect()
                tasks.start_soon(self._connect, conn, leader, name="connect to the leader")
            case ev.Disconnect():
                self._disconnect()
            case ev.Send(message):
                if self._stream is not None:
                    self._stream.send(encode(message))
            case ev.Deliver(message):
                deliver(message)
            case ev.GiveUp(reason, is_refused=True):
                raise InputError(reason)
            case ev.GiveUp(reason, lacks_quorum=True):
                raise RendezvousTimeoutError(reason, topic="the-outcome-of-the-job-is-unknown")
            case ev.GiveUp(reason):
                raise RendezvousConnectionError(reason)
            case _:
                assert_never(action)

    # The cell.

    async def _read_cell(self) -> None:
        self._mailbox.post(await self._answer())

    async def _answer(self) -> ev.Event:
        """Returns the endpoint's answer, after connecting to it if necessary."""
        try:
            if not self._is_reached:
                async with self._turn:
                    if not self._is_reached:  # by another question in the meantime
                        await self._cell.open()
                        self._is_reached = True
            with anyio.fail_after(self._member.lease_s):
                async with self._turn:
                    return ev.CellAnswered(await self._cell.read())
        except (RendezvousError, InputError, TimeoutError) as caught:
            error = caught
            if isinstance(error, NotTrustedError) and error.leader is not None:
                await self._greet(error.leader)
                error = self._other_secret.judge(error, self._cell.name, clock.now())
            self._is_reached = False
            if isinstance(error, InputError | RendezvousStateError) and self._member.led_at is None:
                raise error from None  # there is no hope
            silence = f"{self._cell.name}: no answer within {self._member.lease_s:g} s"
            return ev.CellFailed(str(error) or silence)

    async def _greet(self, leader: LeaderAt) -> None:
        """Connects once to a leader that is not trusted, so that both ends report what differs."""
        if not self._other_secret.is_new(leader.token, clock.now()):
            return
        with anyio.move_on_after(self._member.lease_s), suppress(NoConnectionError):
            stream = await connect(leader.addresses, leader.port, self._new_stream, self._look_up_s)
            try:
                await stream.is_proved.wait()
            finally:
                stream.abort()
            self._other_secret.take(stream.distrust)

    # Votes.

    def _ask_who_leads(self, tasks: TaskGroup) -> None:
        log = self._member.log
        if self._campaigns is None or log is None or not isinstance(log.committed, Entry):
            return
        campaign = Campaign(0, log.committed.id, self._new_leader_at(log.name))
        others: list[Participant] = [each for each in voters_in(log.committed) if each.name != log.name]
        self._campaigns.ask(others, campaign, self._on_declined, tasks)

    def _on_declined(self, declined: Declined) -> None:
        self._mailbox.post(ev.Declined(declined.term, declined.leader))

    def _new_leader_at(self, name: str) -> LeaderAt:
        """Returns where this agent would lead."""
        addresses = own_addresses(self._settings, self._cell)
        if self._port is None:
            self._port = HeldPort(what="the leader", is_bind_all=self._settings.bind_all)
        listen_for_members(self._port, addresses, self._local_addresses)
        beside = addresses_beside(addresses, self._local_addresses, self._cell)
        token = os.urandom(16).hex()
        return LeaderAt(self._member.node_id, name, (*addresses, *beside), self._port.number, token)

    # The leader, in this process.

    async def _campaign(self, action: ev.Campaign) -> None:
        await anyio.lowlevel.checkpoint()
        node, member, settings = action.node, self._member, self._settings
        term = leading.next_term(action.highest)
        if action.has_listened:
            more = int.from_bytes(os.urandom(4)) % leading.UNSEEN_TERMS
            term = leading.term_from_clock(clock.wall_ms(), action.highest, more)
        at = self._new_leader_at(node.name)
        coordinator = Coordinator(RoundRules.of(settings), self._policy, member.node_id)
        coordinator.roster.begin_term(term)
        is_fixed = settings.backend == "static"
        connections = Connections(member.terms, at.token, term, settings.join_timeout_s, has_fixed_ranks=is_fixed)
        leader = Leader(
            coordinator,
            connections,
            leading.campaign(node, term, 1, has_listened=action.has_listened),
            at,
            "" if member.state.node is None else member.state.node.host,
            settings.has_elections,
            LeaderCell(os.urandom(8).hex(), member.lease_s, action.seen),
            clock.now(),
            frozenset(action.gone),
            action.job_before,
            action.silent,
            is_replaceable=not is_fixed and not self._cell.endpoint_host,
        )
        port, self._port = self._port, None
        assert port is not None
        self._server = LeaderServer(
            leader,
            self._cell,
            self._turn,
            port,
            self._campaigns,
            lambda: self._on_leading(leader),
            lambda how: self._on_stepped_down(leader, how),
            lambda conn, campaign: self._mailbox.post(ev.Campaigned(conn, campaign)),
            self._unauthenticated,
            self._proofs,
        )
        await self._server.run()

    def _on_leading(self, leader: Leader) -> None:
        _log.info("this agent leads the job now (%s, term %d)", self._cell.name, leader.term)
        self._mailbox.post(ev.Leading(leader.at, leader.term))

    def _on_stepped_down(self, leader: Leader, how: StepDown) -> None:
        self._server = None
        token = leader.at.token
        self._mailbox.post(
            ev.LeadershipLost(how.node, token, how.reason, how.stand_back_s, how.alive, how.lacks_quorum, how.stored)
        )

    # The connection.

    def _disconnect(self) -> None:
        self._connecting.cancel()
        if self._stream is not None:
            if self._member.phase is not Phase.OVER:
                self._stream.send(encode(HungUp()))
            self._stream.hang_up()
            self._stream = None

    async def _connect(self, conn: int, leader: LeaderAt) -> None:
        is_here = leader.node_id == self._member.node_id
        addresses = (*LOOPBACKS, *leader.addresses) if is_here else leader.addresses
        with anyio.CancelScope() as self._connecting:
            try:
                stream = await connect(addresses, leader.port, self._new_stream, self._look_up_s)
            except NoConnectionError as error:
                self._mailbox.post(ev.ConnectFailed(conn, error.is_refused, str(error), error.is_here))
                return
            try:
                await stream.is_proved.wait()
            except BaseException:
                stream.abort()
                raise
            if stream.refusal or stream.closed.is_set():  # before it had its number: the member was not notified
                why = "the leader closed the connection at once"
                if stream.refusal:
                    why = f"the leader at {stream.peer} was not accepted: {stream.refusal}"
                self._mailbox.post(ev.ConnectFailed(conn, False, why))
                return
            self._proofs.warn_if_open(stream.peer)
            stream.conn, self._stream = conn, stream
            self._mailbox.post(ev.Connected(conn))

    @property
    def _look_up_s(self) -> float:
        return look_up_limit_s(self._member.lease_s)

    def _new_stream(self) -> Stream:
        return Stream(self, DOWNWARD, proof=self._proofs.make(OF_MEMBERS, is_client=True))

    def on_message(self, stream: Stream, message: Any) -> None:
        try:
            check_entries(message)
        except WireError as error:
            self.on_garbage(stream, error)
            return
        self._mailbox.post(ev.Received(stream.conn, message))

    def on_unfinished(self, stream: Stream) -> None:
        pass  # the leader's messages come whole, sooner or later

    def on_garbage(self, stream: Stream, error: WireError | ProofError) -> None:
        if isinstance(error, ProofError):
            self._unauthenticated.refuse(stream, error)
            return
        self._mailbox.post(ev.ConnectionLost(stream.conn, str(error), is_garbage=True))
        stream.abort()

    def on_closed(self, stream: Stream, reason: str) -> None:
        self._mailbox.post(ev.ConnectionLost(stream.conn, f"lost the leader: {reason}", stream.how_closed))

    def on_failure(self, stream: Stream, error: Exception) -> None:
        self._unauthenticated.on_failure(stream, error)
