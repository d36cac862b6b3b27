"""Campaigns on the wire: another agent asks for this node's vote, and this one asks others.

A campaign is one connection, from the agent that asks to the one that answers.  A node that votes for the candidate
connects to it.  The port is held while the agent has a part in the job, and open while its node is a member of a round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup

from aelastic.base.host.ports import HeldPort, is_address
from aelastic.base.loop import clock
from aelastic.base.loop.reports import described
from aelastic.rdzv.leader.job_state import Participant
from aelastic.rdzv.protocol.codec import CAMPAIGN, WireError, encode
from aelastic.rdzv.protocol.handshake import ProofError
from aelastic.rdzv.protocol.incoming import Incoming
from aelastic.rdzv.protocol.listening import local_addresses_of_name
from aelastic.rdzv.protocol.messages import Campaign, Declined
from aelastic.rdzv.protocol.proofs import CAMPAIGN as OF_CAMPAIGNS
from aelastic.rdzv.protocol.proofs import Proofs
from aelastic.rdzv.protocol.stream import NoConnectionError, Stream, connect
from aelastic.rdzv.protocol.unauthenticated import UnauthenticatedPeers
from aelastic.rdzv.stores.endpoints import look_up_limit_s

_log = logging.getLogger(__name__)

# A live agent answers at once; an agent that does not is asked again.
ANSWER_TIMEOUT_S = 1.0


class Campaigns(Incoming[Any]):
    """Receives the campaigns of others, and sends this agent's.

    Args:
        port: the port for requests of other agents, which open once they know its address.
        unauthenticated: those of this agent.
        proofs: those of this agent.
        lease_s: the job's lease.
        on_campaign: called with the number of a connection, and the other agent's request.
    """

    def __init__(
        self,
        port: HeldPort,
        unauthenticated: UnauthenticatedPeers,
        proofs: Proofs,
        lease_s: float,
        on_campaign: Callable[[int, Campaign], None],
    ) -> None:
        super().__init__(port, unauthenticated, proofs)
        self.port = port.number
        self._look_up_s = look_up_limit_s(lease_s)
        self._on_campaign = on_campaign
        self._given = "", ""  # address and peer address of this agent, as given to others
        self._moved = anyio.Event()  # set when these change

    def listen_at(self, participants: Sequence[Participant], node_id: str) -> None:
        """Notes the address at which the other nodes of a round reach this agent for its vote."""
        for each in participants:
            given = each.address, each.peer_address
            if each.node_id == node_id and given != self._given:
                self._given = given
                self._moved.set()

    async def run(self) -> None:
        """Runs until cancelled, then closes the port."""
        try:
            while True:
                await self._moved.wait()
                self._moved = anyio.Event()
                await self._open_port()
                async with anyio.create_task_group() as tasks:
                    for listener in self._port.listeners:
                        tasks.start_soon(
                            self._unauthenticated.accept, listener, self._new_stream, name="accept campaigns"
                        )
                    await self._moved.wait()
                    tasks.cancel_scope.cancel()
        finally:
            self._port.close()
            for stream in list(self._streams.values()):
                stream.abort()

    async def _open_port(self) -> None:
        addresses = await self._addresses()
        try:
            self._port.listen_at(addresses)
        except OSError as error:
            named = ", ".join(addresses)
            _log.info("cannot listen for votes at %s (%s); listening at all addresses instead", named, error.strerror)
            self._port.listen_at([])

    async def _addresses(self) -> list[str]:
        """Returns where to listen for nodes that were given this agent's address; none: at all addresses."""
        address, peer_address = self._given
        if is_address(address):
            return [address]
        here = await local_addresses_of_name(address, self._look_up_s)
        return [*here, peer_address] if here and peer_address else here

    def _new_stream(self) -> Stream:
        return Stream(self, CAMPAIGN, self._on_open, self._proofs.make(OF_CAMPAIGNS, is_client=False))

    def answer(self, conn: int, declined: Declined | None) -> None:
        """Answers a campaign; `None`: this node connects to the candidate."""
        if (stream := self._streams.get(conn)) is not None:
            if declined is not None:
                stream.send(encode(declined))
            stream.close()

    def ask(
        self,
        participants: Sequence[Participant],
        campaign: Campaign,
        on_declined: Callable[[Declined], None],
        tasks: TaskGroup,
    ) -> None:
        """Asks nodes for their votes, or who leads."""
        for each in participants:
            tasks.start_soon(self._ask, each, campaign, on_declined, name="ask for a vote")

    async def _ask(self, participant: Participant, campaign: Campaign, on_declined: Callable[[Declined], None]) -> None:
        asking = _Asking(on_declined)

        def new_stream() -> Stream:
            return Stream(asking, CAMPAIGN, proof=self._proofs.make(OF_CAMPAIGNS, is_client=True))

        with anyio.move_on_after(ANSWER_TIMEOUT_S):
            try:
                addresses = list(filter(None, [participant.address, participant.peer_address]))
                stream = await connect(addresses, participant.vote_port, new_stream, self._look_up_s)
            except NoConnectionError:
                return  # the other agent is gone, or cut off
            try:
                stream.send(encode(campaign))
                await stream.closed.wait()
            finally:
                stream.close()

    # Called by the loop.

    def on_message(self, stream: Stream, message: Any) -> None:
        if isinstance(message, Campaign):
            self._unauthenticated.forget(stream)
            self._on_campaign(stream.conn, message)
        else:
            stream.abort()

    def _on_garbled(self, stream: Stream, error: WireError) -> None:
        text = "rejected a request for a vote from %s: not an aelastic agent of this version (%s)"
        self._unauthenticated.warnings.warn(text, stream.peer, error, now=clock.now())
        stream.abort()


class _Asking:
    """The end of a connection that waits for an answer."""

    def __init__(self, on_declined: Callable[[Declined], None]) -> None:
        self._on_declined = on_declined

    def on_message(self, stream: Stream, message: Any) -> None:
        if isinstance(message, Declined):
            self._on_declined(message)
        stream.close()

    def on_unfinished(self, stream: Stream) -> None:
        pass  # the rest of the answer follows, or comes too late

    def on_garbage(self, stream: Stream, error: WireError | ProofError) -> None:
        _log.info("no vote from %s: %s", stream.peer, error)
        stream.abort()

    def on_closed(self, stream: Stream, reason: str) -> None:
        pass  # the answer has come, or this agent asks again

    def on_failure(self, stream: Stream, error: Exception) -> None:
        _log.info("no vote from %s: %s", stream.peer, described(error))
