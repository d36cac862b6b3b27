"""This agent's line to the coordinator, on another host or in this process: carries out the member core's actions."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, assert_never

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from aelastic import aio
from aelastic.aio import Mailbox
from aelastic.errors import InputError, RendezvousConnectionError, RendezvousError, RendezvousStateError
from aelastic.host.sockets import LOOPBACKS, HeldPort
from aelastic.rdzv.ballots import Ballots
from aelastic.rdzv.board import Board
from aelastic.rdzv.coordinator.coordinator import Coordinator
from aelastic.rdzv.coordinator.roster import RoundRules
from aelastic.rdzv.coordinator_server import CoordinatorServer
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.election_news import election_news
from aelastic.rdzv.member.member import Member
from aelastic.rdzv.member.member_events import Phase
from aelastic.rdzv.member.search import Search
from aelastic.rdzv.other_secret import OtherSecret
from aelastic.rdzv.protocol.codec import DOWNWARD, WireError, encode
from aelastic.rdzv.protocol.messages import CoordinatorMessage, HungUp, NodeMessage, Ready, Terms
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.secret.handshake import ProofError
from aelastic.rdzv.secret.secret_file import SecretFile
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.endpoints import RefusedError, look_up_limit_s
from aelastic.rdzv.survivors.election import Election
from aelastic.rdzv.survivors.election_events import BoardSaid, BoardSilent
from aelastic.rdzv.term import begin_term
from aelastic.rdzv.wire.listening import addresses_beside, listen_for_members, local_addresses, own_addresses
from aelastic.rdzv.wire.proofs import MEMBER as DOOR
from aelastic.rdzv.wire.proofs import Proofs
from aelastic.rdzv.wire.strangers import Strangers
from aelastic.rdzv.wire.stream import NoConnectionError, Stream, connect
from aelastic.rdzv.writing import NotTrustedError

_log = logging.getLogger(__name__)


# What is unsent when we leave is small and on its way already.
FAREWELL_S = 1.0


class AgentLink:
    """Finds the coordinator on a board, stays with it, and hosts it when this agent is elected (`Link`).

    Args:
        board: where the agents of this job find their coordinator.
        settings: what the user chose.
        run_id: the job's name.
        node_id: this agent's.
        policy: of the coordinator, if this agent hosts it.
        files_max: the descriptors that connections may take.
        secret: the job's, if it has one.
    """

    def __init__(
        self,
        board: Board,
        settings: RendezvousSettings,
        run_id: str,
        node_id: str,
        policy: RestartPolicy,
        files_max: float = math.inf,
        secret: SecretFile | None = None,
    ) -> None:
        self._board, self._is_reached = board, False
        self._turn = anyio.Lock()  # of an operation of the board, which member and coordinator share
        self._settings = settings
        self._policy = policy
        self._strangers = Strangers(settings.max_nodes, files_max)
        self._secret, self._proofs = secret, Proofs(secret)
        limits = settings.min_nodes, settings.max_nodes, policy.max_restarts
        terms = Terms(run_id, *limits, settings.lease_s, policy.text)
        trouble = f"no answer from {board.name} yet: the store is still starting, or another program listens there"
        self._member = Member(node_id, terms, Search(settings.join_timeout_s, trouble, settings.endpoint_note))
        self._mailbox: Mailbox[ev.Event] = Mailbox()
        self._port: HeldPort | None = None  # that our next candidacy names
        self._other_secret = OtherSecret()
        self._local_addresses: list[str] = []  # of the name that others are told
        self._candidate: Candidate | None = None  # our last candidacy, and when it was asked for
        self._campaigned_at = 0.0
        self._server: CoordinatorServer | None = None
        self._stream: Stream | None = None
        self._connecting = anyio.CancelScope()
        self._election = Election(node_id, settings.lease_s)
        self._ballots: Ballots | None = None  # where there are elections
        self._questions: set[anyio.CancelScope] = set()  # to the board
        self._patience = anyio.CancelScope()  # with others that have not heard how the job ended

    @property
    def coordinates(self) -> bool:
        return self._server is not None

    def tell(self, message: NodeMessage) -> None:
        if isinstance(message, Ready) and self._settings.has_elections:
            port = self._open_ballots().port
            message = message.replace(node=message.node.replace(ballot_port=port))
        self._mailbox.post(ev.Submitted(message))

    async def run(self, deliver: Callable[[CoordinatorMessage], None]) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                await self._begin(tasks)
                while True:
                    event = await self._mailbox.next(self._member.deadline) or ev.DeadlinePassed()
                    for action in self._member.handle(event, aio.now()):
                        self._carry_out(action, deliver, tasks)
                    if isinstance(event, ev.Received) and self._stream is not None:
                        self._stream.handled()
                    if self._ballots is not None:
                        for news in election_news(self._member, self._election, self._new_candidate):
                            self._ballots.post(news)
        finally:
            if self._stream is not None:
                self._stream.close()
            if self._port is not None:
                self._port.close()
            with anyio.CancelScope(shield=True), anyio.move_on_after(FAREWELL_S):
                await self._board.aclose()

    async def _begin(self, tasks: TaskGroup) -> None:
        self._local_addresses = await local_addresses(self._settings)
        tasks.start_soon(self._board.run, name="board")
        if self._secret is not None:
            tasks.start_soon(self._secret.follow, name="secret")
        if self._settings.has_elections:
            tasks.start_soon(self._open_ballots().run, name="ballots")

    async def finish(self) -> None:
        await anyio.lowlevel.checkpoint()  # the last messages are still in the mailbox
        if self._stream is not None:  # first: the coordinator, here or elsewhere, must hear that this node leaves
            self._stream.hang_up()
            with anyio.move_on_after(FAREWELL_S):
                await self._stream.closed.wait()
        read = self._member.record
        with self._patience:
            if self._server is not None:
                await self._server.tell_all()
            if read is not None and read.verdict and self._board.is_served_here:
                # The leader is gone.  Others may have yet to read this, and the board goes with this agent.
                await anyio.sleep(self._settings.lease_s)
        if self._server is not None:
            await self._server.finish()

    def hurry(self) -> None:
        self._patience.cancel()

    def _carry_out(  # noqa: C901  one case for each action
        self, action: ev.Action, deliver: Callable[[CoordinatorMessage], None], tasks: TaskGroup
    ) -> None:
        match action:
            case ev.ReadBoard() if self._election.chosen is not None:
                self._mailbox.post(ev.BoardRead(self._election.chosen))
            case ev.ReadBoard():
                tasks.start_soon(self._ask, self._read, name="read the board")
            case ev.Campaign(seen, above) if seen is not None and self._is_chosen(seen):
                self._campaigned_at = aio.now()
                self._mailbox.post(ev.BoardRead(seen))
            case ev.Campaign(seen, above):
                tasks.start_soon(self._campaign, seen, above, name="campaign")
            case ev.Lead(record, is_heir, before):
                self._lead(record, tasks, before, is_heir=is_heir)
            case ev.Connect(conn, record):
                self._disconnect()
                tasks.start_soon(self._connect, conn, record, name="connect to the coordinator")
            case ev.Disconnect():
                self._disconnect()
            case ev.Send(message):
                if self._stream is not None:
                    self._stream.send(encode(message))
            case ev.Deliver(message):
                deliver(message)
            case ev.GiveUp(reason, is_refused):
                raise InputError(reason) if is_refused else RendezvousConnectionError(reason)
            case _:
                assert_never(action)

    # The board.

    async def _read(self) -> ev.Event:
        record = await self._board.read()
        if self._election.is_stale(record, aio.now()):
            return ev.BoardFailed(f"{self._board.name}: no agent has been elected leader yet")
        return ev.BoardRead(record)

    async def _campaign(self, seen: LeaderRecord | None, above: int) -> None:
        async def campaign() -> ev.Event:
            past = self._member.state.past
            self._candidate = self._new_candidate().replace(
                fence=past.fence, group_rank=past.group_rank, made_ms=aio.wall_ms()
            )
            record = await self._board.campaign(self._candidate, seen, above)
            return ev.NotEligible() if record is None else ev.BoardRead(record)

        self._campaigned_at = aio.now()
        await self._ask(campaign)

    async def _ask(self, question: Callable[[], Awaitable[ev.Event]]) -> None:
        """Asks the board, reaching it first where that is needed; posts its answer, or the agent elected meanwhile."""
        with anyio.CancelScope() as scope:
            self._questions.add(scope)
            try:
                self._tell_ballots(BoardSilent(aio.now(), is_refused=False))
                answer = await self._answer(question)
            finally:
                self._questions.discard(scope)
        if scope.cancelled_caught:
            chosen = self._election.chosen
            answer = ev.BoardFailed("a leader was elected") if chosen is None else ev.BoardRead(chosen)
        self._mailbox.post(answer)

    async def _answer(self, question: Callable[[], Awaitable[ev.Event]]) -> ev.Event:
        try:
            if not self._is_reached:
                async with self._turn:
                    if not self._is_reached:  # by another question meanwhile
                        await self._board.open()
                        self._is_reached = True
            with anyio.fail_after(self._member.leader.lease_s):
                async with self._turn:
                    answer = await question()
            if not isinstance(answer, ev.BoardFailed):
                self._tell_ballots(BoardSaid())
            return answer
        except (RendezvousError, InputError, TimeoutError) as caught:
            error = caught
            if isinstance(error, NotTrustedError) and error.candidate is not None:
                await self._greet(error.candidate)
                error = self._other_secret.judge(error, self._board.name, aio.now())
            if isinstance(error, RefusedError):
                self._tell_ballots(BoardSilent(aio.now(), is_refused=True))
            self._is_reached = False
            if isinstance(error, InputError | RendezvousStateError) and not self._member.leader.epoch:
                raise error from None  # there is no hope
            silence = f"{self._board.name}: no answer within {self._member.leader.lease_s:g} s"
            return ev.BoardFailed(str(error) or silence)

    async def _greet(self, candidate: Candidate) -> None:
        """Connects to what is not trusted, once: both ends say what differs."""
        if not self._other_secret.is_new(candidate.token, aio.now()):
            return
        with anyio.move_on_after(self._member.leader.lease_s), suppress(NoConnectionError):
            stream = await connect(candidate.addresses, candidate.port, self._new_stream, self._look_up_s)
            try:
                await stream.is_proved.wait()
            finally:
                stream.abort()
            self._other_secret.take(stream.distrust)

    # Elections.

    def _open_ballots(self) -> Ballots:
        if self._ballots is None:
            port = HeldPort(what="the election's port", is_bind_all=self._settings.bind_all)
            self._ballots = Ballots(self._election, port, self._strangers, self._proofs, self._on_chosen)
        return self._ballots

    def _tell_ballots(self, event: BoardSaid | BoardSilent) -> None:
        if self._ballots is not None:
            self._ballots.post(event)

    def _is_chosen(self, record: LeaderRecord) -> bool:
        """Whether that is this agent, elected by the nodes of its round."""
        return record == self._election.chosen and record.candidate.node_id == self._member.node_id

    def _on_chosen(self) -> None:
        for scope in self._questions:
            scope.cancel()

    def _new_candidate(self) -> Candidate:
        addresses = own_addresses(self._settings, self._board)
        if self._port is None:
            self._port = HeldPort(what="the coordinator", is_bind_all=self._settings.bind_all)
        listen_for_members(self._port, addresses, self._local_addresses)
        beside = addresses_beside(addresses, self._local_addresses, self._board)
        return Candidate(self._member.node_id, (*addresses, *beside), self._port.number, os.urandom(16).hex())

    # The coordinator, here.

    def _lead(self, record: LeaderRecord, tasks: TaskGroup, before: tuple[int, int], *, is_heir: bool) -> None:
        if self._port is None or record.candidate.port != self._port.number:
            # The record is of a term that this agent had once.
            self._mailbox.post(ev.LeadershipLost())
            return
        rules = RoundRules.of(self._settings)
        coordinator = Coordinator(rules, self._policy, self._member.node_id, seat_before=before if is_heir else None)
        is_fixed = self._settings.backend == "static"
        leader = begin_term(
            coordinator,
            self._member.terms,
            record,
            self._campaigned_at,
            has_fixed_ranks=is_fixed,
            has_elections=self._settings.has_elections,
            is_replaceable=not is_fixed and not self._board.endpoint_host,
        )
        port, self._port = self._port, None
        around = self._on_stepped_down, self._strangers, self._proofs
        self._server = CoordinatorServer(leader, record, self._board, self._turn, port, *around)
        told = "this agent leads the job now (%s, epoch %d)"
        if record.is_elected:
            told = (
                "a majority of the round elected this agent leader: %s is down, and new agents can join once it is "
                "back (epoch %d)"
            )
        _log.info(told, self._board.name, record.epoch)
        tasks.start_soon(self._server.run, name="coordinator")

    def _on_stepped_down(self) -> None:
        self._server = None
        self._mailbox.post(ev.LeadershipLost())

    # The connection.

    def _disconnect(self) -> None:
        self._connecting.cancel()
        if self._stream is not None:
            if self._member.phase is not Phase.OVER:
                self._stream.send(encode(HungUp()))
            self._stream.hang_up()
            self._stream = None

    async def _connect(self, conn: int, record: LeaderRecord) -> None:
        is_here = record.candidate.node_id == self._member.node_id
        addresses = (*LOOPBACKS, *record.candidate.addresses) if is_here else record.candidate.addresses
        with anyio.CancelScope() as self._connecting:
            try:
                stream = await connect(addresses, record.candidate.port, self._new_stream, self._look_up_s)
            except NoConnectionError as error:
                self._mailbox.post(ev.ConnectFailed(conn, error.is_refused, str(error), error.is_here))
                return
            try:
                await stream.is_proved.wait()
            except BaseException:
                stream.abort()
                raise
            if stream.refusal or stream.closed.is_set():  # before it had its number: the member was not told
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
        return look_up_limit_s(self._member.leader.lease_s)

    def _new_stream(self) -> Stream:
        return Stream(self, DOWNWARD, proof=self._proofs.make(DOOR, is_client=True))

    def on_message(self, stream: Stream, message: Any) -> None:
        self._mailbox.post(ev.Received(stream.conn, message))

    def on_unfinished(self, stream: Stream) -> None:
        pass  # the coordinator's messages come whole, sooner or later

    def on_garbage(self, stream: Stream, error: WireError | ProofError) -> None:
        if isinstance(error, ProofError):
            self._strangers.refuse(stream, error)
            return
        self._mailbox.post(ev.ConnectionLost(stream.conn, str(error), is_reset=True, is_garbage=True))
        stream.abort()

    def on_closed(self, stream: Stream, reason: str) -> None:
        self._mailbox.post(ev.ConnectionLost(stream.conn, f"lost the leader: {reason}", stream.is_reset))

    def on_failure(self, stream: Stream, error: Exception) -> None:
        self._strangers.on_failure(stream, error)
