"""What the supervisor needs of a rendezvous: to tell it things and to be told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aelastic.rdzv.protocol.messages import CoordinatorMessage, NodeMessage


class Link(Protocol):
    """This node's line to the job's coordinator, wherever that runs."""

    def tell(self, message: NodeMessage) -> None:
        """Passes a message on, in order.  Never blocks."""

    async def run(self, deliver: Callable[[CoordinatorMessage], None]) -> None:
        """Hands over what the coordinator says, in order.  Runs until cancelled, and then leaves nothing behind.

        Raises:
            InputError: the job does not want this agent, and says why.
            RendezvousError: nobody could be reached for too long, or what answers is no board.
        """

    async def finish(self) -> None:
        """Leaves in order, while `run` still runs: all that was told is sent, what is ours is handed over.  Bounded."""
