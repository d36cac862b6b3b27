"""Elections on the wire: carries out what the election core asks for.

Each vote has a connection of its own, from the agent that asks to the one that answers.  The port is open while the
agent has a part in the job; what does not know the secret of the round is refused.
"""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, assert_never

import anyio
from anyio.abc import TaskGroup

from aelastic.aio import clock
from aelastic.aio.mailbox import Mailbox
from aelastic.rdzv.protocol.codec import BALLOT, WireError, encode
from aelastic.rdzv.protocol.messages import Seat, Vote, Voted
from aelastic.rdzv.strangers import Strangers
from aelastic.rdzv.stream import NoConnectionError, Stream, connect
from aelastic.rdzv.survivors import election_events as ev
from aelastic.rdzv.survivors.election import Election

_log = logging.getLogger(__name__)

# An agent that lives answers at once; one that does not is asked again.
ANSWER_TIMEOUT_S = 1.0


class Ballots:
    """Asks for votes, and gives them.

    Args:
        election: decides.
        listener: where other agents ask.
        strangers: of this agent.
        on_chosen: called when a coordinator is elected, as far as this agent knows.
    """

    def __init__(
        self, election: Election, listener: socket.socket, strangers: Strangers, on_chosen: Callable[[], None]
    ) -> None:
        self.election = election
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._on_chosen = on_chosen
        self._mailbox: Mailbox[ev.Event] = Mailbox()
        self._streams: dict[int, Stream] = {}
        self._strangers = strangers
        self._numbers = itertools.count(1)

    def post(self, event: ev.Event) -> None:
        self._mailbox.post(event)

    async def run(self) -> None:
        """Runs until it is cancelled; then the port is closed."""
        try:
            async with anyio.create_task_group() as tasks:
                opened = partial(Stream, self, BALLOT, self._on_open)
                tasks.start_soon(self._strangers.accept, self._listener, opened, name="accept ballots")
                while True:
                    event = await self._mailbox.next(self.election.deadline) or ev.DeadlinePassed()
                    for action in self.election.handle(event, clock.now()):
                        self._carry_out(action, tasks)
                    if self.election.chosen is not None:
                        self._on_chosen()
        finally:
            self._listener.close()
            for stream in list(self._streams.values()):
                stream.abort()

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
        asking = _Asking(lambda voted: self.post(ev.Answered(seat.node_id, vote.leader.epoch, voted)), self.on_bug)
        with anyio.move_on_after(ANSWER_TIMEOUT_S):
            try:
                stream = await connect((seat.address,), seat.port, lambda: Stream(asking, BALLOT))
            except NoConnectionError:
                return  # it is gone, or cut off
            try:
                stream.send(encode(vote))
                await stream.closed.wait()
            finally:
                stream.close()

    # Called by the loop.

    def _on_open(self, stream: Stream) -> None:
        stream.conn = next(self._numbers)
        self._streams[stream.conn] = stream
        self._strangers.add(stream, clock.now())

    def on_message(self, stream: Stream, message: Any) -> None:
        if isinstance(message, Vote):
            self._strangers.forget(stream)
            self.post(ev.Asked(stream.conn, message))
        else:
            stream.abort()

    def on_unfinished(self, stream: Stream) -> None:
        self._strangers.note(stream, clock.now())

    def on_garbage(self, stream: Stream, error: WireError) -> None:
        told = "rejected connection from %s: it asked for a vote, and is not an aelastic agent of this version (%s)"
        self._strangers.tell(clock.now(), told, stream.peer, error)
        stream.abort()

    def on_closed(self, stream: Stream, reason: str) -> None:  # noqa: ARG002  all ends are one here
        del self._streams[stream.conn]
        self._strangers.forget(stream)

    def on_bug(self, error: Exception) -> None:
        self._mailbox.fail(error)


class _Asking:
    """The end of a connection at which an answer is waited for."""

    def __init__(self, on_voted: Callable[[Voted], None], on_bug: Callable[[Exception], None]) -> None:
        self._on_voted = on_voted
        self.on_bug = on_bug

    def on_message(self, stream: Stream, message: Any) -> None:
        if isinstance(message, Voted):
            self._on_voted(message)
        stream.close()

    def on_unfinished(self, stream: Stream) -> None:
        pass  # an answer comes whole, or too late

    def on_garbage(self, stream: Stream, error: WireError) -> None:
        _log.info("no vote from %s: %s", stream.peer, error)
        stream.abort()

    def on_closed(self, stream: Stream, reason: str) -> None:
        pass  # it was heard, or it is asked again
