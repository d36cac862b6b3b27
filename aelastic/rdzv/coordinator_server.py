"""The coordinator on the wire: carries out what the leader core asks for.

It runs in the agent that the board names, as long as that agent leads.  Its own node is a member like the others, over
the loopback interface.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, assert_never

import anyio
from anyio.abc import TaskGroup

from aelastic import aio
from aelastic.errors import InputError, RendezvousError
from aelastic.host.sockets import HeldPort
from aelastic.rdzv.board import Board
from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.coordinator.leader import Leader
from aelastic.rdzv.leader_record import LeaderRecord
from aelastic.rdzv.protocol.codec import UPWARD, OtherProtocolError, WireError, encode
from aelastic.rdzv.protocol.messages import Seats
from aelastic.rdzv.survivors.absent import awaited_s
from aelastic.rdzv.wire.incoming import Incoming
from aelastic.rdzv.wire.proofs import MEMBER as DOOR
from aelastic.rdzv.wire.proofs import Proofs
from aelastic.rdzv.wire.strangers import Strangers
from aelastic.rdzv.wire.stream import Stream

_log = logging.getLogger(__name__)

# Members close their connections when they have heard the verdict; one that does not is suspended or cut off.
FAREWELL_S = 1.0

STANDING_BACK = "lost all other nodes at once: stepping down as leader for %.1f s, so that another agent can take over"
WAITING = "job finished; waiting up to %.0f s for the agents on %s to receive the result (Ctrl-C skips the wait)"


class CoordinatorServer(Incoming[ev.Event]):
    """Coordinates from one listening socket, for one term.

    Args:
        leader: decides.
        record: of our leadership, as the board has it.
        board: where that is.
        turn: of an operation of the board, which this agent's member has, too.
        port: the one that the record names.
        on_stepped_down: called once, when this agent leads no longer.
        strangers: of this agent.
        proofs: of this agent.
    """

    def __init__(
        self,
        leader: Leader,
        record: LeaderRecord,
        board: Board,
        turn: anyio.Lock,
        port: HeldPort,
        on_stepped_down: Callable[[], None],
        strangers: Strangers,
        proofs: Proofs,
    ) -> None:
        super().__init__(port, strangers, proofs)
        self._leader, self._record = leader, record
        self._board, self._turn = board, turn
        self._on_stepped_down = on_stepped_down
        self._encoded: tuple[Any, bytes] = (None, b"")  # the last message: a heartbeat goes to thousands
        self._changed = anyio.Event()
        # An election's coordinator asks the board beside its renewals, which need no answer.
        self._is_claiming = self._is_displaced = False
        self._rival: LeaderRecord | None = None  # the leader on a board that knew nothing of this job

    async def run(self) -> None:
        """Coordinates until another agent leads, this one leaves, or it is cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                for listener in self._port.listeners:
                    tasks.start_soon(self._strangers.accept, listener, self._new_stream, name="accept")
                while not self._leader.has_stepped_down:
                    event = await self._mailbox.next(self._leader.deadline) or ev.DeadlinePassed()
                    for action in self._leader.handle(event, aio.now()):
                        self._carry_out(action, tasks)
                    if isinstance(event, ev.Received) and event.conn in self._streams:
                        stream = self._streams[event.conn]
                        if not stream.is_closing and self._strangers.forget(stream):  # else refused, or known
                            self._proofs.warn_if_open(stream.peer)
                        stream.handled()
                    self._changed.set()
                tasks.cancel_scope.cancel()
        finally:
            self._port.close()
            for stream in list(self._streams.values()):
                stream.close()

    async def tell_all(self) -> None:
        """Waits for agents that may have yet to hear the verdict: two leases at most, and some time to connect."""
        leader, began, has_said = self._leader, aio.now(), False
        most_s = awaited_s(leader.lease.lease_s)
        while leader.sessions.is_over and not leader.has_stepped_down:
            now = aio.now()
            until = min(leader.sessions.awaited_until, began + most_s)
            if now >= until:
                break
            if now >= began + FAREWELL_S and not has_said:
                has_said = True
                _log.warning(WAITING, until - now, leader.sessions.awaited_hosts)
            self._changed = anyio.Event()
            with anyio.move_on_after(until - now if has_said else min(until, began + FAREWELL_S) - now):
                await self._changed.wait()

    async def finish(self) -> None:
        """Steps down: all members hear that they need another coordinator, or have heard the verdict."""
        with anyio.move_on_after(FAREWELL_S):
            # Until our own node has been heard out, and all have heard the verdict, if there is one.
            while self._leader.has_own_node or (
                self._leader.coordinator.is_closed and not self._leader.sessions.is_empty
            ):
                self._changed = anyio.Event()
                await self._changed.wait()
        if self._leader.has_stepped_down:
            return
        if self._leader.coordinator.is_closed and not self._leader.has_told_all:
            return  # a node that reconnects reads on the board how the job ended, as long as that keeps it
        # First: as soon as the board has been told another agent may lead, and its answer may take a while to come.
        self._mailbox.post(ev.Resigned())
        await self._resign(self._record.seats if self._leader.is_blocked else None)  # those may go on, and hear nothing
        with anyio.move_on_after(FAREWELL_S):
            for stream in list(self._streams.values()):
                await stream.closed.wait()

    def _carry_out(self, action: ev.Action, tasks: TaskGroup) -> None:  # noqa: C901  one case for each action
        match action:
            case ev.Say(conn, message):
                if message is not self._encoded[0]:
                    self._encoded = message, encode(message)
                if conn in self._streams:
                    self._streams[conn].send(self._encoded[1])
            case ev.Drop(conn):
                if conn in self._streams:
                    self._streams[conn].close()
            case ev.Renew(seats):
                if self._record.is_elected:  # it needs no answer
                    record, rival = None if self._is_displaced else self._record, self._rival
                    self._mailbox.post(ev.Renewed(record, is_assumed=True, rival_epoch=rival.epoch if rival else 0))
                if not self._is_claiming:
                    self._is_claiming = self._record.is_elected
                    tasks.start_soon(self._claim if self._is_claiming else self._renew, seats, name="renew")
            case ev.Reclaim(above, stand_back_s):
                tasks.start_soon(self._reclaim, above, stand_back_s, name="reclaim")
            case ev.Publish(verdict):
                tasks.start_soon(self._publish, verdict, name="publish")
            case ev.StepDown(reason):
                _log.info("this agent no longer leads the job: %s", reason)
                self._on_stepped_down()
            case _:
                assert_never(action)

    # The board.

    @asynccontextmanager
    async def _board_within_lease(self) -> AsyncIterator[None]:
        """Our turn; an answer that comes later than in a lease is of no use."""
        with anyio.fail_after(self._leader.lease.lease_s):
            async with self._turn:
                yield

    async def _renew(self, seats: Seats | None) -> None:
        try:
            async with self._board_within_lease():
                renewed = await self._board.renew(self._record.replace(seats=seats))
            if renewed is not None:
                self._record = renewed
            self._mailbox.post(ev.Renewed(renewed))
        except (RendezvousError, InputError, TimeoutError) as error:
            reason = str(error) or "no answer"
            _log.info("%s: lease could not be renewed (%s); retrying", self._board.name, reason)
            self._mailbox.post(ev.RenewFailed(str(error)))

    async def _claim(self, seats: Seats | None) -> None:
        """Looks for the board that is to know of this coordinator, which was elected without it."""
        try:
            async with self._board_within_lease():
                renewed = await self._board.renew(self._record.replace(seats=seats))
            if renewed is not None and renewed.candidate != self._record.candidate:
                self._rival = renewed
                return
            self._is_displaced, self._record, self._rival = renewed is None, renewed or self._record, None
            if not self._record.is_elected:
                _log.info("%s is back and has the record of this leader: new agents can join", self._board.name)
        except (RendezvousError, InputError, TimeoutError):
            pass  # it is asked again
        finally:
            self._is_claiming = False

    async def _resign(self, seats: Seats | None) -> None:
        with anyio.move_on_after(FAREWELL_S):
            try:
                async with self._turn:
                    await self._board.resign(self._record.replace(seats=seats))
            except (RendezvousError, InputError) as error:
                _log.info("%s: could not resign as leader (%s)", self._board.name, error)

    async def _reclaim(self, above: int, stand_back_s: float) -> None:
        rival, self._rival = self._rival, None
        seen = None if stand_back_s else self._record
        if stand_back_s:
            _log.warning(STANDING_BACK, stand_back_s, extra={"topic": "this-node-lost-all-others"})
            until = aio.now() + stand_back_s
            await self._resign(self._record.seats)
            await anyio.sleep_until(until)
        try:
            async with self._board_within_lease():
                if rival is not None:
                    seen = await self._board.read()  # it renews its record
                record = await self._board.campaign(self._record.candidate, seen, above)
        except (RendezvousError, InputError, TimeoutError) as error:
            _log.info("%s: leadership could not be reclaimed (%s)", self._board.name, str(error) or "no answer")
            record = None
        if record is not None and record.candidate != self._record.candidate:
            record = None
        self._record = record or self._record
        self._mailbox.post(ev.Reclaimed(record))

    async def _publish(self, verdict: str) -> None:
        try:
            async with self._board_within_lease():
                is_ours = await self._board.publish(self._record, verdict)
            self._mailbox.post(ev.Published(is_ours))
        except (RendezvousError, InputError, TimeoutError) as error:
            reason = str(error) or "no answer"
            _log.info("%s: the verdict could not be written (%s); retrying", self._board.name, reason)
            self._mailbox.post(ev.PublishFailed())

    # Called by the loop.

    def _new_stream(self) -> Stream:
        proof = self._proofs.make(DOOR, is_client=False)
        return Stream(self, UPWARD, self._on_open, proof, self._on_proved)

    def _on_proved(self, stream: Stream) -> None:
        self._mailbox.post(ev.Opened(stream.conn, stream.peer, stream.own_address))

    def on_message(self, stream: Stream, message: Any) -> None:
        self._mailbox.post(ev.Received(stream.conn, message))

    def _on_garbled(self, stream: Stream, error: WireError) -> None:
        told = "rejected connection from %s: not an aelastic agent (%s)"
        self._strangers.warnings.warn(told, stream.peer, error, now=aio.now())
        self._mailbox.post(ev.Garbled(stream.conn, str(error), isinstance(error, OtherProtocolError)))

    def on_closed(self, stream: Stream, reason: str) -> None:
        self._mailbox.post(ev.Closed(stream.conn, stream.is_reset))
        super().on_closed(stream, reason)
