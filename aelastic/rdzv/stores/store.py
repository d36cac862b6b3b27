"""A store: one cell for each run id, outside the agents, changed by compare-and-set.

The cell holds the text in which the agents of a job record which of them leads, and what they agreed on last
(`endpoint_cell.py`).  A store knows nothing about that text, or about leaders.  The cell must be strongly consistent,
and must remain when an agent goes.

To keep the cell elsewhere, implement `get`, `compare_set`, `aclose` and `name`, and pass a factory to
`registry.register`.  `MasterStore` in `static.py` is the smallest example; `etcd_v2.py` is one on a server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class Store(ABC):
    """The cell of one run id, as one agent uses it.  At most one operation runs at a time.

    An operation takes a few round trips, connects first if necessary, and never waits for something to happen.  It may
    be cancelled at any moment; it may or may not have taken effect by then.

    An operation raises `RendezvousConnectionError` if the store cannot be reached now, and the caller tries again.  It
    raises `RendezvousStateError` if the server is not such a store, and `InputError` if the store belongs to another
    job or refuses the credentials.
    """

    async def run(self) -> None:  # noqa: B027  most stores need nothing
        """Does background work; operations wait for it.  Runs until cancelled, or returns at once."""

    async def open(self) -> None:
        """Connects to the store, or serves it if that is this agent's task.  Unlike the others, this may take minutes.

        Called first, and again after a failed operation.
        """
        await self.get()

    @abstractmethod
    async def get(self) -> bytes:
        """Returns the text of the cell, or ""."""

    @abstractmethod
    async def compare_set(self, expected: bytes, new: bytes) -> bytes:
        """Replaces the text if it is the expected one.

        Never begins to serve a store: a new one is empty.

        Args:
            expected: the text as far as the caller knows; empty if the cell is.
            new: never empty, and never a text that the cell held before.

        Returns:
            The text afterwards: `new` if it was written, even by an attempt whose answer was lost.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Releases everything, including the store if this agent serves it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Back end and endpoint, for messages: `c10d at node0:29400`."""

    @property
    def where(self) -> str:
        """The cell, for messages."""
        return f"the record at {self.name}"

    @property
    def own_address(self) -> str:
        """This agent's address on its connection to the store, which other nodes may use; empty if unknown."""
        return ""

    @property
    def endpoint_host(self) -> str:
        """The host of the store, as the user wrote it, if it is this machine; otherwise empty."""
        return ""

    @property
    def is_served_here(self) -> bool:
        """Whether the cell is lost when this agent ends."""
        return False
