"""A process that has imported torch's store, and from which the children for several endpoints are forked.

Each endpoint has a child of its own, so that none waits for another that does not answer.  Forked, they cost one import
together, and share its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio

from aelastic.base.host.children import ForkedHelper
from aelastic.workers.tcpstore.child import FORKED_CONTROL, Death, StoreProcess, Unanswered

# A fork takes 10 ms.
FORK_TIMEOUT_S = 2.0


class StoreTemplate:
    """Started by the first fork.  Once it has failed, children start by an exec.

    Args:
        env: the environment of the process, and of those that are forked from it.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._process = StoreProcess(env, "was there to be forked", mode="template")
        self._lock = anyio.Lock()
        self._has_failed = False

    async def fork(self, _: Sequence[str], fds: Mapping[int, int]) -> ForkedHelper | None:
        """Forks a child that runs the store's program (`child.Fork`)."""
        async with self._lock:
            if self._has_failed:
                return None
            try:
                await self._process.make_ready()
                with anyio.CancelScope(shield=True):  # otherwise there might be a child that nothing waits for
                    pid = await self._process.ask("fork", fds[FORKED_CONTROL], timeout_s=FORK_TIMEOUT_S)
            except (Death, Unanswered):
                self._has_failed = True
                await self._process.aclose()
                return None
            return ForkedHelper(pid)

    async def aclose(self) -> None:
        """Ends the process; its forks keep running."""
        await self._process.aclose()
