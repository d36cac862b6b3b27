"""A coordinator in the agent's own process: for a job of one node, nothing has to be found or connected."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from aelastic.aio.mailbox import Mailbox
from aelastic.rdzv.coordinator.coordinator import Coordinator
from aelastic.rdzv.coordinator.coordinator_events import DeadlinePassed, Event
from aelastic.rdzv.protocol.messages import CoordinatorMessage, Departed, NodeMessage


class InProcessLink:
    """Feeds a coordinator core and delivers what it decides for the one node there is."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._mailbox: Mailbox[Event] = Mailbox()

    def tell(self, message: NodeMessage) -> None:
        self._mailbox.post(message)

    async def run(self, deliver: Callable[[CoordinatorMessage], None]) -> None:
        while True:
            event = await self._mailbox.next(self._coordinator.deadline) or DeadlinePassed()
            for send in self._coordinator.handle(event, anyio.current_time()):
                if not isinstance(send.message, Departed):  # there is nobody else to coordinate
                    deliver(send.message)

    async def finish(self) -> None:
        """There is nobody to tell."""
