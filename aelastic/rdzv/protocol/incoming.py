"""The incoming connections of one port of an agent, by number, until each has closed.

Their messages go to the mailbox of the port's core; `unauthenticated` logs everything that is not a message from an
agent of this job.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from aelastic.base.host.ports import HeldPort
from aelastic.base.loop import clock
from aelastic.base.loop.mailbox import Mailbox
from aelastic.rdzv.protocol.codec import WireError
from aelastic.rdzv.protocol.handshake import ProofError
from aelastic.rdzv.protocol.proofs import Proofs
from aelastic.rdzv.protocol.stream import Stream
from aelastic.rdzv.protocol.unauthenticated import UnauthenticatedPeers

EventT = TypeVar("EventT")


class Incoming(ABC, Generic[EventT]):
    """Base class for listening at a port; called by the loop (`stream.Listener`).

    Args:
        port: the port that listens.
        unauthenticated: those of this agent.
        proofs: those of this agent.
    """

    def __init__(self, port: HeldPort, unauthenticated: UnauthenticatedPeers, proofs: Proofs) -> None:
        self._port, self._unauthenticated, self._proofs = port, unauthenticated, proofs
        self._mailbox: Mailbox[EventT] = Mailbox()
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count(1)

    def _on_open(self, stream: Stream) -> None:
        stream.conn = next(self._numbers)
        self._streams[stream.conn] = stream
        self._unauthenticated.add(stream, clock.now())

    @abstractmethod
    def on_message(self, stream: Stream, message: Any) -> None:
        """Handles a message from an agent."""

    def on_unfinished(self, stream: Stream) -> None:
        self._unauthenticated.note(stream, clock.now())

    def on_garbage(self, stream: Stream, error: WireError | ProofError) -> None:
        if isinstance(error, ProofError):
            self._unauthenticated.refuse(stream, error)
        else:
            self._on_garbled(stream, error)

    @abstractmethod
    def _on_garbled(self, stream: Stream, error: WireError) -> None:
        """Handles data that is not a message; nothing more is read."""

    def on_closed(self, stream: Stream, reason: str) -> None:  # noqa: ARG002  every end is handled alike
        del self._streams[stream.conn]
        self._unauthenticated.forget(stream)

    def on_failure(self, stream: Stream, error: Exception) -> None:
        self._unauthenticated.on_failure(stream, error)
