"""Elections on the wire: carries out what the election core asks for.

Each vote has a connection of its own, from the agent that asks to the one that answers.  The port is held while the
agent has a part in the job, and open where its node has a seat; what does not know the secret of the round is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, assert_never

import anyio
from anyio.abc import TaskGroup

from aelastic import aio
from aelastic.aio import described
from aelastic.host.sockets import HeldPort, is_address
from aelastic.rdzv.protocol.codec import BALLOT, WireError, encode
from aelastic.rdzv.protocol.messages import Seat, Vote, Voted
from aelastic.rdzv.secret.handshake import ProofError
from aelastic.rdzv.stores.endpoints import look_up_limit_s
from aelastic.rdzv.survivors import election_events as ev
from aelastic.rdzv.survivors.election import Election
from aelastic.rdzv.wire.incoming import Incoming
from aelastic.rdzv.wire.listening import local_addresses_told
from aelastic.rdzv.wire.proofs import BALLOT as DOOR
from aelastic.rdzv.wire.proofs import Proofs
from aelastic.rdzv.wire.strangers import Strangers
from aelastic.rdzv.wire.stream import NoConnectionError, Stream, connect

_log = logging.getLogger(__name__)

# An agent that lives answers at once; one that does not is asked again.
ANSWER_TIMEOUT_S = 1.0


class Ballots(Incoming[ev.Event]):
    """Asks for votes, and gives them.

    Args:
        election: decides.
        port: where other agents ask, once they are told an address of it.
        strangers: of this agent.
        proofs: of this agent.
        on_chosen: called when a coordinator is elected, as far as this agent knows.
    """

    def __init__(
        self,
        election: Election,
        port: HeldPort,
        strangers: Strangers,
        proofs: Proofs,
        on_chosen: Callable[[], None],
    ) -> None:
        super().__init__(port, strangers, proofs)
        self.election = election
        self.port = port.number
        self._told = "", ""  # address and peer address of this agent, as others are told
        self._moved = anyio.Event()  # it is another one
        self._on_chosen = on_chosen

    def post(self, event: ev.Event) -> None:
        if isinstance(event, ev.Seated):  # others of a round are told where this agent answers
            for seat in event.seats.seats:
                told = seat.address, seat.peer_address
                if seat.node_id == self.election.node_id and told != self._told:
                    self._told = told
                    self._moved.set()
        self._mailbox.post(event)

    async def run(self) -> None:
        """Runs until it is cancelled; then the port is closed."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._listen, name="listen for ballots")
                while True:
                    event = await self._mailbox.next(self.election.deadline) or ev.DeadlinePassed()
                    for action in self.election.handle(event, aio.now()):
                        self._carry_out(action, tasks)
                    if self.election.chosen is not None:
                        self._on_chosen()
        finally:
            self._port.close()
            for stream in list(self._streams.values()):
                stream.abort()

    async def _listen(self) -> None:
        while True:
            await self._moved.wait()
            self._moved = anyio.Event()
            await self._open_port()
            async with anyio.create_task_group() as tasks:
                for listener in self._port.listeners:
                    tasks.start_soon(self._strangers.accept, listener, self._new_stream, name="accept ballots")
                await self._moved.wait()
                tasks.cancel_scope.cancel()

    async def _open_port(self) -> None:
        addresses = await self._addresses()
        try:
            self._port.listen_at(addresses)
        except OSError as error:
            named = ", ".join(addresses)
            _log.info("cannot listen for votes at %s (%s); listening at all addresses instead", named, error.strerror)
            self._port.listen_at([])

    async def _addresses(self) -> list[str]:
        """Where to listen for those that were told where this agent is; none: at all addresses."""
        address, peer_address = self._told
        if is_address(address):
            return [address]
        here = await local_addresses_told(address, self._look_up_s)
        return [*here, peer_address] if here and peer_address else here

    @property
    def _look_up_s(self) -> float:
        return look_up_limit_s(self.election.lease_s)

    def _new_stream(self) -> Stream:
        return Stream(self, BALLOT, self._on_open, self._proofs.make(DOOR, is_client=False))

    def _carry_out(self, action: ev.Action, tasks: TaskGroup) -> None:
        match action:
            case ev.Ask(seat, vote):
                tasks.start_soon(self._ask, seat, vote, name="ask for a vote")
            case ev.Answer(conn, voted):
                if (stream := self._streams.get(conn)) is not None:
                    stream.send(encode(voted))
                    stream.close()
            case _:
                assert_never(action)

    async def _ask(self, seat: Seat, vote: Vote) -> None:
        asking = _Asking(lambda voted: self.post(ev.Answered(seat.node_id, vote.leader.epoch, voted)))

        def new_stream() -> Stream:
            return Stream(asking, BALLOT, proof=self._proofs.make(DOOR, is_client=True))

        with anyio.move_on_after(ANSWER_TIMEOUT_S):
            try:
                addresses = list(filter(None, [seat.address, seat.peer_address]))
                stream = await connect(addresses, seat.port, new_stream, self._look_up_s)
            except NoConnectionError:
                return  # it is gone, or cut off
            try:
                stream.send(encode(vote))
                await stream.closed.wait()
            finally:
                stream.close()

    # Called by the loop.

    def on_message(self, stream: Stream, message: Any) -> None:
        if isinstance(message, Vote):
            self._strangers.forget(stream)
            self.post(ev.Asked(stream.conn, message))
        else:
            stream.abort()

    def _on_garbled(self, stream: Stream, error: WireError) -> None:
        told = "rejected a request for a vote from %s: not an aelastic agent of this version (%s)"
        self._strangers.warnings.warn(told, stream.peer, error, now=aio.now())
        stream.abort()


class _Asking:
    """The end of a connection at which an answer is waited for."""

    def __init__(self, on_voted: Callable[[Voted], None]) -> None:
        self._on_voted = on_voted

    def on_message(self, stream: Stream, message: Any) -> None:
        if isinstance(message, Voted):
            self._on_voted(message)
        stream.close()

    def on_unfinished(self, stream: Stream) -> None:
        pass  # an answer comes whole, or too late

    def on_garbage(self, stream: Stream, error: WireError | ProofError) -> None:
        _log.info("no vote from %s: %s", stream.peer, error)
        stream.abort()

    def on_closed(self, stream: Stream, reason: str) -> None:
        pass  # it was heard, or it is asked again

    def on_failure(self, stream: Stream, error: Exception) -> None:
        _log.info("no vote from %s: %s", stream.peer, described(error))
