"""Who is told of a run, and how: observers, and the audience they make up.

An observer is told everything, in order, at the moment it happens, on the agent's loop.  It is never the reason why
a job ends: one that raises is dropped, which is said once, and the run goes on.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable

import anyio

from aelastic.happenings import Happening

_log = logging.getLogger(__name__)

# What an observer has to finish at the end, a file to write out, say.
CLOSE_TIMEOUT_S = 5.0


class Observer(ABC):
    """Is told of one run."""

    @abstractmethod
    def tell(self, happening: Happening, now: float) -> None:
        """Something happened just now.  Must not block.

        Args:
            happening: what.
            now: the loop's monotonic time, in seconds.
        """

    async def run(self) -> None:  # noqa: B027  nothing to do meanwhile is a fair answer
        """Does what has to be done during the whole run.  Cancelled at its end."""

    async def aclose(self) -> None:  # noqa: B027  nothing to give back is a fair answer
        """Called once, when all is told; cancelled if it takes more than 5 s."""


class Audience:
    """The observers of one run."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)

    def add(self, observer: Observer) -> None:
        self._observers.append(observer)

    def tell(self, happening: Happening) -> None:
        """Tells all of them.  Never blocks, never raises."""
        now = anyio.current_time()
        for observer in tuple(self._observers):
            try:
                observer.tell(happening, now)
            except Exception as error:  # noqa: BLE001  an observer may be the user's; the job is worth more
                self._drop(observer, error)

    async def run(self) -> None:
        """Runs all of them, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for observer in self._observers:
                tasks.start_soon(self._guard, observer, observer.run, name=type(observer).__name__)

    async def aclose(self) -> None:
        """Closes all of them, each within its time."""
        async with anyio.create_task_group() as tasks:
            for observer in self._observers:
                tasks.start_soon(self._close, observer)

    async def _close(self, observer: Observer) -> None:
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True) as waited:
            await self._guard(observer, observer.aclose)
        if waited.cancelled_caught:
            _log.warning("%s did not finish within %g s", type(observer).__name__, CLOSE_TIMEOUT_S)

    async def _guard(self, observer: Observer, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except Exception as error:  # noqa: BLE001  as above
            self._drop(observer, error)

    def _drop(self, observer: Observer, error: Exception) -> None:
        if observer in self._observers:
            self._observers.remove(observer)
            _log.warning(
                "%s failed, and is told no more: %s: %s", type(observer).__name__, type(error).__name__, error,
                exc_info=error if _log.isEnabledFor(logging.DEBUG) else None,
            )  # fmt: skip
