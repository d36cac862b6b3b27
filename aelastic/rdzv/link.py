"""Between the supervisor and the job's coordinator: what a rendezvous must do, and the simplest one.

A job of one node needs no connection: its coordinator is in the agent's own process.  All others go through
`agent_link.py` or `torch_handler/handler_link.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aelastic.host import aio
from aelastic.host.aio import Mailbox
from aelastic.rdzv.protocol.messages import CoordinatorMessage, NodeMessage
from aelastic.rdzv.single_node import SingleNode


class Link(Protocol):
    """This node's line to the job's coordinator, wherever that runs."""

    @property
    def coordinates(self) -> bool:
        """Whether the job's coordinator is in this agent now."""

    def tell(self, message: NodeMessage) -> None:
        """Passes a message on, in order.  Never blocks."""

    async def run(self, deliver: Callable[[CoordinatorMessage], None]) -> None:
        """Delivers the coordinator's messages, in order.  Runs until cancelled, and then leaves nothing behind.

        Raises:
            InputError: the job does not take this agent, and says why.
            RendezvousError: no coordinator could be reached for too long, or what answers is no rendezvous store.
        """

    async def finish(self) -> None:
        """Leaves in order, while `run` still runs: what was told is sent, what is ours is handed over.  Bounded."""

    def hurry(self) -> None:
        """Ends the wait of `finish` for agents that have not heard how the job ended, or prevents it.  Never blocks."""


class InProcessLink:
    """A coordinator in this process, for the one node of its job."""

    coordinates = True

    def __init__(self, coordinator: SingleNode) -> None:
        self._coordinator = coordinator
        self._mailbox: Mailbox[NodeMessage] = Mailbox()

    def tell(self, message: NodeMessage) -> None:
        self._mailbox.post(message)

    async def run(self, deliver: Callable[[CoordinatorMessage], None]) -> None:
        while True:
            message, now = await self._mailbox.next(self._coordinator.deadline), aio.now()
            core = self._coordinator
            for answer in core.on_deadline_passed(now) if message is None else core.handle(message, now):
                deliver(answer)

    async def finish(self) -> None:
        """There is no other process to tell."""

    def hurry(self) -> None:
        """Nothing is waited for."""
