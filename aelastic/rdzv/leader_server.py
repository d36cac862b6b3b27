"""The leader on the wire: carries out the actions of the leader core.

It runs in an agent from the moment it campaigns until it stops leading.  The agent's own node is a member like the
others, over the loopback interface.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, assert_never

import anyio
from anyio.abc import TaskGroup

from aelastic.base.host.ports import HeldPort
from aelastic.base.loop import clock
from aelastic.errors import InputError, RendezvousError
from aelastic.rdzv.campaigns import Campaigns
from aelastic.rdzv.leader import leader_events as ev
from aelastic.rdzv.leader.absent import awaited_s
from aelastic.rdzv.leader.job_state import check_entries
from aelastic.rdzv.leader.leader import Leader, Phase
from aelastic.rdzv.protocol.codec import UPWARD, OtherAgentError, OtherProtocolError, WireError, encode
from aelastic.rdzv.protocol.incoming import Incoming
from aelastic.rdzv.protocol.messages import Campaign, Declined, StoredCell
from aelastic.rdzv.protocol.proofs import MEMBER as OF_MEMBERS
from aelastic.rdzv.protocol.proofs import Proofs
from aelastic.rdzv.protocol.stream import Stream
from aelastic.rdzv.protocol.unauthenticated import UnauthenticatedPeers
from aelastic.rdzv.stores.endpoint_cell import EndpointCell

_log = logging.getLogger(__name__)

# Members close their connections when they have the verdict; one that does not is suspended or cut off.
FAREWELL_S = 1.0
# After this many messages the leader decides, even if more are waiting.
DECIDE_AFTER = 64

LOST_ALL = "lost all other nodes at once: stepping down as leader for %.1f s, so that another agent can take over"
WAITING = "job finished; waiting up to %.0f s for the agents on %s to receive the result (Ctrl-C skips the wait)"


class LeaderServer(Incoming[ev.Event]):
    """Leads from one listening socket.

    Args:
        leader: the core that decides.
        cell: the endpoint's cell.
        turn: held during an operation on the cell; this agent's member uses it as well.
        port: where this agent listens as leader.
        campaigns: ask for votes; `None` if the store alone decides.
        on_leading: called once, when this agent leads.
        on_stepped_down: called once, when it no longer leads.
        on_passed: called with a campaign that the member must answer.
        unauthenticated: those of this agent.
        proofs: those of this agent.
    """

    def __init__(
        self,
        leader: Leader,
        cell: EndpointCell,
        turn: anyio.Lock,
        port: HeldPort,
        campaigns: Campaigns | None,
        on_leading: Callable[[], None],
        on_stepped_down: Callable[[ev.StepDown], None],
        on_passed: Callable[[int, Campaign], None],
        unauthenticated: UnauthenticatedPeers,
        proofs: Proofs,
    ) -> None:
        super().__init__(port, unauthenticated, proofs)
        self.leader = leader
        self._cell, self._turn, self._campaigns = cell, turn, campaigns
        self._on_leading, self._on_stepped_down, self._on_passed = on_leading, on_stepped_down, on_passed
        self._has_led = False
        self._undecided = 0  # messages in a row that others have followed at once
        self._encoded: tuple[Any, bytes] = (None, b"")  # the last message: it may go to thousands
        self._changed, self._has_released = anyio.Event(), anyio.Event()

    async def run(self) -> None:
        """Leads until another agent does, this one leaves, or it is cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                for listener in self._port.listeners:
                    tasks.start_soon(self._unauthenticated.accept, listener, self._new_stream, name="accept")
                while not self.leader.has_stepped_down:
                    event = await self._next_event()
                    for action in self.leader.handle(event, clock.now()):
                        self._carry_out(action, tasks)
                    if isinstance(event, ev.Received) and event.conn in self._streams:
                        stream = self._streams[event.conn]
                        if not stream.is_closing and self._unauthenticated.forget(stream):  # else refused, or known
                            self._proofs.warn_if_open(stream.peer)
                        stream.handled()
                    if self.leader.phase is Phase.LEADING and not self._has_led:
                        self._has_led = True
                        self._on_leading()
                    self._changed.set()
                await self._release_cell()
                tasks.cancel_scope.cancel()
        finally:
            self._port.close()
            for stream in list(self._streams.values()):
                if not stream.is_closing:
                    stream.abort()  # this process lives

    async def _next_event(self) -> ev.Event:
        event = await self._mailbox.next_by(lambda: self.leader.deadline) or ev.DeadlinePassed()
        if not isinstance(event, ev.Received) or self._mailbox.is_empty:
            self._undecided = 0
            return event
        self._undecided = (self._undecided + 1) % DECIDE_AFTER
        return event.replace(has_next=self._undecided > 0)

    async def wait_until_read(self) -> None:
        """Waits for agents that may not have the verdict yet: two leases at most, and some time to connect."""
        leader, began, has_warned = self.leader, clock.now(), False
        most_s = awaited_s(leader.lease_s)
        while leader.connections.is_over and not leader.has_stepped_down:
            now = clock.now()
            until = min(leader.connections.awaited_until, began + most_s)
            if now >= until:
                break
            if now >= began + FAREWELL_S and not has_warned:
                has_warned = True
                _log.warning(WAITING, until - now, leader.connections.awaited_hosts)
            self._changed = anyio.Event()
            with anyio.move_on_after(until - now if has_warned else min(until, began + FAREWELL_S) - now):
                await self._changed.wait()

    async def finish(self) -> None:
        """Steps down: all members learn that they need another leader, or already have the verdict."""
        with anyio.move_on_after(FAREWELL_S):
            # Until our own node has sent its last message, and all have received the verdict, if there is one.
            while self.leader.has_own_node or (
                self.leader.coordinator.is_closed and not self.leader.connections.is_empty
            ):
                self._changed = anyio.Event()
                await self._changed.wait()
        if self.leader.has_stepped_down:
            return
        if self.leader.coordinator.is_closed and not self.leader.is_known_to_all:
            return  # a node that reconnects reads in the cell how the job ended, as long as the endpoint keeps it
        self._mailbox.post(ev.Resigned())
        with anyio.move_on_after(FAREWELL_S):
            await self._has_released.wait()
        with anyio.move_on_after(FAREWELL_S):
            for stream in list(self._streams.values()):
                await stream.closed.wait()

    async def _release_cell(self) -> None:
        """Gives up the cell, so that another agent need not wait for the lease to end."""
        stored = self.leader.cell.stored
        if stored is not None and self.leader.is_cell_ours:
            cell = stored.cell.replace(leader="", renewals=stored.cell.renewals + 1)
            with anyio.move_on_after(FAREWELL_S):
                await self._change_cell(partial(self._replace_cell, stored, stored.replace(cell=cell, leader=None)))
        self._has_released.set()

    def _carry_out(self, action: ev.Action, tasks: TaskGroup) -> None:  # noqa: C901, PLR0912  one case for each action
        match action:
            case ev.SendTo(conn, message, serial):
                if message != self._encoded[0]:
                    self._encoded = message, encode(message)
                if (stream := self._streams.get(conn)) is not None:
                    stream.send(self._encoded[1])
                    if serial:
                        stream.when_flushed(lambda: self._mailbox.post(ev.Flushed(conn, serial)))
            case ev.Drop(conn, in_order):
                if (stream := self._streams.get(conn)) is not None:
                    stream.close() if in_order else stream.abort()
            case ev.AskVotes(participants, campaign):
                if self._campaigns is not None:
                    self._campaigns.ask(participants, campaign, self._on_declined, tasks)
            case ev.Answer(conn, declined):
                if self._campaigns is not None:
                    self._campaigns.answer(conn, declined)
            case ev.PassOn(conn, campaign):
                self._on_passed(conn, campaign)
            case ev.ReadCell():
                tasks.start_soon(self._change_cell, self._cell.read, name="read the cell")
            case ev.WriteCell(stored):
                write = partial(self._replace_cell, self.leader.cell.stored, stored)
                tasks.start_soon(self._change_cell, write, name="write the cell")
            case ev.StepDown(reason, _, stand_back_s):
                if stand_back_s:
                    _log.warning(LOST_ALL, stand_back_s, extra={"topic": "this-node-lost-all-others"})
                elif self._has_led:
                    _log.info("this agent no longer leads the job: %s", reason)
                self._on_stepped_down(action)
            case _:
                assert_never(action)

    def _on_declined(self, declined: Declined) -> None:
        leader = "" if declined.leader is None else declined.leader.token
        self._mailbox.post(ev.Declined(declined.term, leader, declined.is_own))

    def on_campaign(self, conn: int, campaign: Campaign) -> None:
        self._mailbox.post(ev.Campaigned(conn, campaign))

    async def _replace_cell(self, seen: StoredCell | None, stored: StoredCell) -> StoredCell | None:
        """Writes the cell if it is as the leader last saw it.

        The story behind it: a candidate reads the cell, another agent takes it, this agent's member reads that, and
        then the candidate overwrites it.
        """
        return await self._cell.write(stored) if self._cell.content == seen else self._cell.content

    async def _change_cell(self, do: Callable[[], Awaitable[StoredCell | None]]) -> None:
        try:
            with anyio.fail_after(self.leader.lease_s):
                async with self._turn:
                    stored = await do()
            self._mailbox.post(ev.CellAnswered(stored))
        except (RendezvousError, InputError, TimeoutError) as error:
            reason = str(error) or "no answer"
            if self.leader.phase is Phase.LEADING:
                _log.info("%s: the lease could not be renewed (%s); retrying", self._cell.name, reason)
            self._mailbox.post(ev.CellFailed(reason))

    # Called by the loop.

    def _new_stream(self) -> Stream:
        proof = self._proofs.make(OF_MEMBERS, is_client=False)
        return Stream(self, UPWARD, self._on_open, proof, self._on_proved)

    def _on_proved(self, stream: Stream) -> None:
        self._mailbox.post(ev.Opened(stream.conn, stream.peer, stream.own_address))

    def on_message(self, stream: Stream, message: Any) -> None:
        try:
            check_entries(message)
        except WireError as error:
            self._on_garbled(stream, error)
            return
        self._mailbox.post(ev.Received(stream.conn, message))

    def _on_garbled(self, stream: Stream, error: WireError) -> None:
        if isinstance(error, OtherAgentError):
            self._unauthenticated.refuse(stream, error.shown)
        else:
            text = "rejected connection from %s: not an aelastic agent (%s)"
            self._unauthenticated.warnings.warn(text, stream.peer, error, now=clock.now())
        self._mailbox.post(ev.Garbled(stream.conn, str(error), isinstance(error, OtherProtocolError)))

    def on_closed(self, stream: Stream, reason: str) -> None:
        self._mailbox.post(ev.Closed(stream.conn, stream.how_closed))
        super().on_closed(stream, reason)
