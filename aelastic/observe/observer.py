"""Observers of a run, and their dispatcher.

An observer gets every run event, in order, at the moment it happens, on the agent's loop: first `RunBegan`, last
`RunEnded`, whatever the run ends with.  It is never the reason why a job ends: one that raises gets no further events,
which is logged once, and the run goes on.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import anyio

from aelastic.host.aio import Mailbox
from aelastic.observe.run_events import RunEnded, RunEvent
from aelastic.observe.run_state import RunState

_log = logging.getLogger(__name__)

# What an observer has to finish at the end, a file to write out, say.
CLOSE_TIMEOUT_S = 5.0


class Observer(ABC):
    """Observer of one run."""

    close_timeout_s: float = CLOSE_TIMEOUT_S
    run_state: RunState  # as of the last event; there once the observer is one of a run's

    @abstractmethod
    def tell(self, event: RunEvent, now: float) -> None:
        """Takes a run event, just now.  Must not block.

        Args:
            event: what happened.
            now: the loop's monotonic time, in seconds.
        """

    async def run(self) -> None:  # noqa: B027  most observers have nothing to do between events
        """Does what has to be done during the whole run.  Cancelled at its end, before `RunEnded`."""

    async def aclose(self) -> None:  # noqa: B027  most observers hold nothing
        """Called once, after the last event, also after a failure; cancelled after `close_timeout_s`."""

    def give_up(self) -> None:  # noqa: B027  most observers don't wait
        """Called when the agent is asked to stop again while only observers are left: `aclose` must not wait."""


class Observers:
    """The observers of one run, and their dispatcher."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self.state = RunState()
        self._observers: list[Observer] = []
        self._dropped: set[int] = set()  # by `id`: an observer need not be hashable
        for observer in observers:
            self.add(observer)

    def add(self, observer: Observer) -> None:
        """Adds one, before `run`."""
        observer.run_state = self.state
        self._observers.append(observer)

    def remove(self, observer: Observer) -> None:
        self._observers.remove(observer)

    def tell(self, event: RunEvent, now: float) -> None:
        """Passes an event to all of them.  Never blocks, never raises."""
        told: tuple[RunState | Observer, ...] = (self.state, *self._observers)
        for observer in told:
            if id(observer) not in self._dropped:
                try:
                    observer.tell(event, now)
                except Exception as error:  # noqa: BLE001  an observer may be the user's; the job is worth more
                    self._drop(observer, error)

    async def run(self) -> None:
        """Runs all of them, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for observer in self._observers:
                tasks.start_soon(self._guard, observer, observer.run, name=type(observer).__name__)

    def give_up(self) -> None:
        """Tells all of them not to wait any longer."""
        for observer in self._observers:
            observer.give_up()

    async def aclose(self) -> None:
        """Closes all of them, those that failed too, each within its time."""
        async with anyio.create_task_group() as tasks:
            for observer in self._observers:
                tasks.start_soon(self._close, observer)

    async def _close(self, observer: Observer) -> None:
        with anyio.move_on_after(observer.close_timeout_s, shield=True) as waited:
            await self._guard(observer, observer.aclose)
        if waited.cancelled_caught:
            _log.warning("%s did not finish within %g s", type(observer).__name__, observer.close_timeout_s)

    async def _guard(self, observer: Observer, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except Exception as error:  # noqa: BLE001  as above
            self._drop(observer, error)

    def _drop(self, observer: Observer | RunState, error: Exception) -> None:
        if id(observer) not in self._dropped:
            self._dropped.add(id(observer))
            _log.warning(
                "observer %s raised and was disabled: %s: %s", type(observer).__name__, type(error).__name__, error,
                exc_info=error if _log.isEnabledFor(logging.DEBUG) else None,
            )  # fmt: skip


class EventStream(Observer):
    """Keeps events until they are taken."""

    def __init__(self) -> None:
        self._mailbox: Mailbox[RunEvent] = Mailbox()

    def tell(self, event: RunEvent, now: float) -> None:  # noqa: ARG002  who takes them knows when
        self._mailbox.post(event)

    async def next(self, deadline: float | None = None) -> RunEvent | None:
        """The next event, or `None` once the deadline has passed without one."""
        return await self._mailbox.next(deadline)


async def events_of(observers: Observers) -> AsyncIterator[RunEvent]:
    """What happens from now on, to the end of the run."""
    observers.add(stream := EventStream())
    try:
        while (event := await stream.next()) is not None:
            yield event
            if isinstance(event, RunEnded):
                return
    finally:
        observers.remove(stream)
