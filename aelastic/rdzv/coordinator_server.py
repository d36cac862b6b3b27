"""The coordinator on the wire: carries out what the chair asks for.

It runs in the agent that the board names, as long as the reign is that agent's.  Its own node is a member like
the others, over the loopback interface.
"""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable
from typing import Any, assert_never

import anyio
from anyio.abc import TaskGroup

from aelastic.aio.accept import OUT_OF_FILES_PAUSE_S, attach, next_connection
from aelastic.aio.mailbox import Mailbox
from aelastic.errors import InputError, RendezvousError
from aelastic.rdzv.board import Board, LeaderRecord
from aelastic.rdzv.coordinator.session_events import (
    Action,
    Closed,
    DeadlinePassed,
    Drop,
    Event,
    Garbled,
    Keep,
    KeepFailed,
    Kept,
    Opened,
    Publish,
    Published,
    Received,
    Reclaim,
    Reclaimed,
    Resigned,
    Say,
    Vacate,
)
from aelastic.rdzv.coordinator.sessions import Chair
from aelastic.rdzv.protocol.codec import UPWARD, WireError, encode
from aelastic.rdzv.stream import Stream, is_other_protocol

_log = logging.getLogger(__name__)

# Members close their connections when they have heard the verdict; one that does not is suspended or cut off.
FAREWELL_S = 1.0
# So many connections are taken before what those say that are here is heard.
ACCEPTS_AT_ONCE = 128


class CoordinatorServer:
    """Coordinates from one listening socket for one reign.

    Args:
        chair: decides.
        reign: what the board says of us.
        board: where that is.
        listener: the socket that the reign names.
        on_vacated: called once, when the reign is another's.
    """

    def __init__(
        self, chair: Chair, record: LeaderRecord, board: Board, listener: socket.socket, on_vacated: Callable[[], None]
    ) -> None:
        self._chair = chair
        self._record = record
        self._board = board
        self._listener = listener
        self._on_vacated = on_vacated
        self._mailbox: Mailbox[Event] = Mailbox()
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count(1)
        self._encoded: tuple[Any, bytes] = (None, b"")  # the last message: a beat goes to thousands
        self._changed = anyio.Event()

    async def run(self) -> None:
        """Coordinates until the reign is over, or it is cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._accept, name="accept")
                while not self._chair.is_vacated:
                    event = await self._mailbox.next(self._chair.deadline) or DeadlinePassed()
                    for action in self._chair.handle(event, anyio.current_time()):
                        self._carry_out(action, tasks)
                    self._changed.set()
                tasks.cancel_scope.cancel()
        finally:
            self._listener.close()
            for stream in list(self._streams.values()):
                stream.close()

    async def finish(self) -> None:
        """Hands the reign over: all members hear that they need another coordinator, or have heard the verdict."""
        with anyio.move_on_after(FAREWELL_S):
            # Until our own node has been heard out, and all have heard the verdict, if there is one.
            while self._chair.has_own_node or (self._chair.coordinator.is_closed and not self._chair.is_empty):
                self._changed = anyio.Event()
                await self._changed.wait()
        if self._chair.is_vacated:
            return
        if self._chair.coordinator.is_closed and not self._chair.has_told_all:
            return  # who comes back reads on the board how the job ended, as long as that keeps it
        # First: as soon as the board has been told another may reign, and its answer may take a while to come.
        self._mailbox.post(Resigned())
        with anyio.move_on_after(FAREWELL_S):
            try:
                await self._board.resign(self._record)
            except (RendezvousError, InputError) as error:
                _log.info("the board could not be told that this agent leaves: %s", error)
        with anyio.move_on_after(FAREWELL_S):
            for stream in list(self._streams.values()):
                await stream.closed.wait()

    def _carry_out(self, action: Action, tasks: TaskGroup) -> None:
        match action:
            case Say(conn, message):
                if message is not self._encoded[0]:
                    self._encoded = message, encode(message)
                if conn in self._streams:
                    self._streams[conn].send(self._encoded[1])
            case Drop(conn):
                if conn in self._streams:
                    self._streams[conn].close()
            case Keep():
                tasks.start_soon(self._renew, name="keep")
            case Reclaim(above):
                tasks.start_soon(self._reclaim, above, name="reclaim")
            case Publish(verdict):
                tasks.start_soon(self._publish, verdict, name="publish")
            case Vacate(reason):
                _log.info("this agent coordinates no longer: %s", reason)
                self._on_vacated()
            case _:
                assert_never(action)

    # The board.

    async def _renew(self) -> None:
        try:
            with anyio.fail_after(self._chair.lease_s):
                renewed = await self._board.renew(self._record)
            if renewed is not None:
                self._record = renewed
            self._mailbox.post(Kept(renewed))
        except (RendezvousError, InputError, TimeoutError) as error:
            _log.info("the board can't be asked: %s", str(error) or "no answer")
            self._mailbox.post(KeepFailed(str(error)))

    async def _reclaim(self, above: int) -> None:
        try:
            with anyio.fail_after(self._chair.lease_s):
                record = await self._board.campaign(self._record.candidate, self._record, above)
        except (RendezvousError, InputError, TimeoutError) as error:
            _log.info("the board can't be asked: %s", str(error) or "no answer")
            record = None
        if record is None or record.candidate != self._record.candidate:
            self._mailbox.post(Reclaimed(None))
        else:
            self._record = record
            self._mailbox.post(Reclaimed(record.epoch))

    async def _publish(self, verdict: str) -> None:
        try:
            self._mailbox.post(Published(await self._board.publish(self._record, verdict)))
        except (RendezvousError, InputError) as error:
            _log.info("the board could not be told how the job ended: %s", error)

    # Connections.

    async def _accept(self) -> None:
        self._listener.setblocking(False)
        is_told = False
        while True:
            await anyio.wait_readable(self._listener)
            conns: list[socket.socket] = []
            failure: OSError | None = None
            try:
                while len(conns) < ACCEPTS_AT_ONCE and (conn := next_connection(self._listener)) is not None:
                    conns.append(conn)
            except OSError as error:
                failure = error
            await attach(conns, lambda: Stream(self, UPWARD, self._on_open))
            if failure is None:
                continue
            if not is_told:
                is_told = True
                _log.warning("no more agents can connect for now: %s", failure.strerror)
            await anyio.sleep(OUT_OF_FILES_PAUSE_S)

    # Called by the loop.

    def _on_open(self, stream: Stream) -> None:
        stream.conn = next(self._numbers)
        self._streams[stream.conn] = stream
        self._mailbox.post(Opened(stream.conn, stream.peer, stream.own_address))

    def on_message(self, stream: Stream, message: Any) -> None:
        self._mailbox.post(Received(stream.conn, message))

    def on_garbage(self, stream: Stream, error: WireError) -> None:
        _log.warning("what connected from %s is no agent of this job: %s", stream.peer, error)
        self._mailbox.post(Garbled(stream.conn, str(error), is_other_protocol(error)))

    def on_closed(self, stream: Stream, reason: str) -> None:  # noqa: ARG002  all ends are one here
        del self._streams[stream.conn]
        self._mailbox.post(Closed(stream.conn))
