"""A coordinator in the agent's own process: for a job of one node, nothing has to be found or connected."""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio

from aelastic.rdzv.coordinator import Coordinator, DeadlinePassed, Event
from aelastic.rdzv.messages import CoordinatorMessage, NodeMessage


class InProcessLink:
    """Feeds a coordinator core and delivers what it decides for the one node there is."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._send, self._receive = anyio.create_memory_object_stream[Event](math.inf)

    def tell(self, message: NodeMessage) -> None:
        self._send.send_nowait(message)

    async def run(self, deliver: Callable[[CoordinatorMessage], None]) -> None:
        with self._send, self._receive:
            while True:
                event = await self._next_event()
                for send in self._coordinator.handle(event, anyio.current_time()):
                    deliver(send.message)

    async def _next_event(self) -> Event:
        deadline = self._coordinator.deadline
        with anyio.CancelScope(deadline=math.inf if deadline is None else deadline):
            return await self._receive.receive()
        return DeadlinePassed()
