"""Observers of a run, their dispatcher, and the observer that every run has: the agent's own log lines.

An observer gets every run event, in order, as it happens, on the agent's loop: first `RunBegan`, last `RunEnded`,
however the run ends.  An observer never ends a job: one that raises gets no further events, which is logged once, and
the run continues.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import anyio

from aelastic.base.loop.mailbox import Mailbox
from aelastic.observe import run_events as ev
from aelastic.observe.run_events import RunEnded, RunEvent
from aelastic.observe.run_state import RunState
from aelastic.observe.stimuli import Stimuli
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.decision import DecisionKind
from aelastic.rdzv.protocol.messages import Outcome
from aelastic.workers.states import Phase, signal_words

_log = logging.getLogger(__name__)

# How long an observer may take to finish at the end, for example to write out a file.
CLOSE_TIMEOUT_S = 5.0
# From this much time on, what restarts without imports would have saved is worth a log line.
SAVED_MIN_S = 5.0
# Phases in which workers run, or begin to.
_WITH_WORKERS = {
    Phase.SPAWNING, Phase.PREPARING, Phase.RUNNING, Phase.LEAVING, Phase.FORMING, Phase.CANCELLING, Phase.STOPPING,
}  # fmt: skip


class Observer(ABC):
    """Receives the run events of one run, on the agent's loop; derive from it and pass it to `Supervisor`.

    It gets every event, in order, from `RunBegan` to `RunEnded`.  An observer that raises gets no further events, and
    the run continues.
    """

    close_timeout_s: float = CLOSE_TIMEOUT_S  # how long `aclose` may take
    run_state: RunState  # the state of the run as of the last event; set when the run takes the observer

    @abstractmethod
    def tell(self, event: RunEvent, now: float) -> None:
        """Called for each run event as it happens.  Must not block.

        Args:
            event: what happened.
            now: the loop's monotonic time, in seconds.
        """

    async def run(self) -> None:  # noqa: B027  most observers have nothing to do between events
        """Runs for the whole run, if the observer has work between events.  Cancelled at its end, before `RunEnded`."""

    async def aclose(self) -> None:  # noqa: B027  most observers hold nothing
        """Called once, after the last event, even after a failure.  Cancelled after `close_timeout_s`."""

    def give_up(self) -> None:  # noqa: B027  most observers don't wait
        """Called if the agent is asked again to stop while it only waits for observers: `aclose` must return now."""


class Observers:
    """The observers of one run, and their dispatcher."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self.state = RunState()
        self._stimuli = Stimuli()
        self._observers: list[Observer] = []
        self._dropped: set[int] = set()  # by `id`: an observer need not be hashable
        for observer in observers:
            self.add(observer)

    def add(self, observer: Observer) -> None:
        """Adds an observer, before `run`."""
        observer.run_state = self.state
        self._observers.append(observer)

    def remove(self, observer: Observer) -> None:
        self._observers.remove(observer)

    def tell(self, event: RunEvent, now: float) -> None:
        """Passes an event to all observers, with its stimulus.  Never blocks, never raises."""
        event = event.caused_by(self._stimuli.of(event))
        observers: tuple[RunState | Observer, ...] = (self.state, *self._observers)
        for observer in observers:
            if id(observer) not in self._dropped:
                try:
                    observer.tell(event, now)
                except Exception as error:  # noqa: BLE001  an observer may be the user's; the job is worth more
                    self._drop(observer, error)

    async def run(self) -> None:
        """Runs all observers, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for observer in self._observers:
                tasks.start_soon(self._guard, observer, observer.run, name=type(observer).__name__)

    def give_up(self) -> None:
        """Makes all observers stop waiting."""
        for observer in self._observers:
            observer.give_up()

    async def aclose(self) -> None:
        """Closes all observers, including those that failed, each within its time."""
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

    def tell(self, event: RunEvent, now: float) -> None:  # noqa: ARG002  the consumer knows the time
        self._mailbox.post(event)

    async def next(self, deadline: float | None = None) -> RunEvent | None:
        """Returns the next event, or `None` once the deadline has passed without one."""
        return await self._mailbox.next(deadline)


async def events_of(observers: Observers) -> AsyncIterator[RunEvent]:
    """Yields the events from now on, to the end of the run."""
    observers.add(stream := EventStream())
    try:
        while (event := await stream.next()) is not None:
            yield event
            if isinstance(event, RunEnded):
                return
    finally:
        observers.remove(stream)


# Log lines.


class LogLines(Observer):
    """Log lines of one run: what a user wants to know while it is running.

    Args:
        shutdown_timeout_s: how long workers may take to end when they are asked to.
    """

    def __init__(self, shutdown_timeout_s: float) -> None:
        self._shutdown_timeout_s = shutdown_timeout_s
        self._is_stop_asked = self._is_killing = False
        self._began_s: dict[int, float] = {}  # by generation after the first: how long its cold workers took to begin
        # Of this generation.
        self._has_failed = False
        self._compared = ""

    def tell(self, event: ev.RunEvent, now: float) -> None:  # noqa: ARG002, C901, PLR0912, PLR0915  one case for each
        runs = self.run_state.phase in _WITH_WORKERS
        match event:
            case ev.Waited():
                _log.warning("%s", event.full)
            case ev.Announced("held", words):
                _log.warning("%s", words)
            case ev.RoundFormed(round_):
                self._has_failed, self._is_killing, self._compared = False, False, ""
                place = event.group_rank, event.group_world_size, event.world_size
                _log.info("round %d: group rank %d of %d, world size %d", round_, *place)
            case ev.Noticed():
                host = "" if self.run_state.began is None else self.run_state.began.host
                is_stopped = " is stopped" if event.is_stopped else ""
                _log.warning("rank %d on %s%s: %s", event.rank, host, is_stopped, event.reason)
                self._has_failed |= event.is_stopped
            case ev.Compared(_, words) if words != self._compared:  # each node that finds a hang starts a comparison
                self._compared = words
                _log.warning("%s", words)
            case ev.Announced("saving", words):
                _log.warning("%s: %s", words, event.where)
            case ev.Announced("refused", words):
                _log.warning("request refused: %s", words)
            case ev.Announced("called off", words):
                _log.warning("drain cancelled: %s", words or "workers continue")
            case ev.Announced("leaving", words):
                _log.info("leaving: %s", words)
            case ev.WorkerEnded(failure=failure) if failure is not None:
                self._has_failed = True
                if not failure.found_by:  # otherwise it was logged when it was noticed
                    _log.warning("rank %d failed on %s: %s", failure.rank, failure.host, failure.short_message)
            case ev.Restarting(in_place=True):
                _log.warning("recovering in place: %s", event.reason)
            case ev.Restarting(only_here=True):
                _log.warning("restarting the workers of this node: %s; other nodes keep theirs", event.reason)
            case ev.Recovered():
                _log.warning("round %d continues in place: %s", event.round, event.text)
            case ev.NotRecovered(_, reason):
                _log.warning("not continuing in place: %s; restarting all workers of this node", reason)
            case ev.Restarting("membership"):  # also where the other nodes of a job are stopped one by one
                _log.warning("stopping workers for the next round: %s", event.reason)
            case ev.Restarting():
                _log.warning("restarting worker group: %s", event.reason)
            case ev.Killed(_, _, reason, is_early):
                self._is_killing = True
                if is_early:
                    _log.warning("%s: killed", reason)
            case ev.StopAsked(signum):
                self._on_stop_asked(signum)
            case ev.RendezvousLost(reason):
                if runs:  # otherwise the error that ends the run follows at once, with the reason
                    _log.warning("stopping workers: %s", reason)
            case ev.WorkerReached(generation, _, _, "cold", _, duration_s) if generation > 1:
                self._began_s[generation] = max(self._began_s.get(generation, 0.0), duration_s)
            case ev.JobEnded(Outcome.FAILED) if runs and not self._has_failed:
                _log.warning("the job has failed: %s", event.reason)  # elsewhere; the report follows our workers' end
            case ev.JobEnded(Outcome.FAILED, decision) if decision.kind is not DecisionKind.RESTARTS_OFF:
                instead = wording.instead_of(decision)
                _log.warning("not restarting: %s%s", event.reason, f". To restart anyway: {instead}" if instead else "")
            case ev.JobEnded(outcome):
                _log.info("the job has %s: %s", outcome, event.reason)
            case ev.RunEnded() if self.run_state.fork_server is not None:
                pass  # the workers already had a template
            case ev.RunEnded() if (spent_s := sum(self._began_s.values())) >= SAVED_MIN_S:
                count = len(self._began_s)
                times = f"{count} restart{'s' * (count > 1)} took {spent_s:.0f} s until workers had begun"
                _log.warning("%s, with imports: --preload auto starts them with these done", times)
            case _:
                pass  # shown elsewhere: durations in the event log, the end in the report

    def _on_stop_asked(self, signum: int) -> None:
        if self.run_state.phase not in _WITH_WORKERS:
            return  # nothing runs: the agent leaves at once
        name = signal_words(signum)
        if self._is_stop_asked and self.run_state.phase in {Phase.SPAWNING, Phase.CANCELLING}:
            _log.warning("second %s: leaving; the start of workers does not end", name)
        elif self._is_stop_asked:
            _log.warning("second %s: killing workers", name)
        elif self._is_killing:
            _log.warning("%s: workers are being killed already", name)
        else:
            limit_s = self._shutdown_timeout_s
            _log.warning("%s: stopping workers (up to %g s); send it again to kill them", name, limit_s)
        self._is_stop_asked = True
