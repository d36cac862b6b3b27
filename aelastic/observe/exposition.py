"""Exposes status and metrics of one run, made from its run events, as pages or as a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType

import anyio
import anyio.lowlevel

import aelastic
from aelastic.base.host.kernel_states import KernelState
from aelastic.base.host.process_states import ProcessStates
from aelastic.base.host.usage import usage_of, usage_of_leaders
from aelastic.base.loop import clock
from aelastic.base.record import Record
from aelastic.observe.metrics import RunMetrics
from aelastic.observe.observer import Observer
from aelastic.observe.run_events import RunEvent

# How often the loop's lag is measured: once a second costs nothing.
TICK_S = 1.0
_NONE: Mapping[str, str] = MappingProxyType({})


class AgentFacts(Record):
    """Facts that are in no event, because nothing needs them at the moment they change."""

    coordinates: bool = False  # this agent leads the job
    silence_max_s: float = 0.0  # how long a worker may show no sign of life; 0: forever
    silent_s: Mapping[int, float] = MappingProxyType({})  # how long workers have shown none, by local rank


class Exposition(Observer):
    """Status and metrics of one run, for everything that shows them.

    Args:
        is_local: the workers' ids are pids of this machine.
        look: returns the current facts.
        catch_up: waits until the run state has the steps that workers have written by now.
    """

    def __init__(
        self,
        *,
        is_local: bool,
        look: Callable[[], AgentFacts] = AgentFacts,
        catch_up: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint,
    ) -> None:
        self._is_local = is_local
        self._look = look
        self.catch_up = catch_up
        self._epoch: float | None = None
        self._process_states = ProcessStates()
        self.metrics = RunMetrics({"version": aelastic.__version__, "python": sys.version.split()[0]})
        self.lag_s = 0.0

    def tell(self, event: RunEvent, now: float) -> None:
        if self._epoch is None:
            self._epoch = datetime.now(UTC).timestamp() - now
        self.metrics.tell(event, now)

    async def run(self) -> None:
        """Measures how late the loop is."""
        while True:
            before = time.monotonic()
            await anyio.sleep(TICK_S)
            self.lag_s = max(0.0, time.monotonic() - before - TICK_S)
            self.metrics.lag(self.lag_s)

    def metrics_text(self, common: Mapping[str, str] = _NONE, *, is_open: bool = False) -> str:
        """Returns the current metrics.

        Args:
            common: labels for every series.
            is_open: in the format of OpenMetrics.
        """
        facts = self._look()
        agent = usage_of("self")
        return self.metrics.expose(
            self.run_state,
            agent=None if agent is None else (agent.cpu_s, agent.rss_bytes),
            workers=self.usage(),
            kernel=self.kernel_states(),
            common=common,
            now=clock.now(),
            epoch=self._epoch or 0.0,
            coordinates=facts.coordinates,
            silence=(facts.silence_max_s, facts.silent_s),
            is_open=is_open,
        )

    def usage(self) -> dict[int, tuple[float, int]]:
        """Returns CPU seconds and bytes of memory of live workers, by local rank."""
        if not self._is_local:
            return {}
        return usage_of_leaders(self.run_state.running)

    def kernel_states(self) -> dict[int, KernelState]:
        """Returns the kernel states of workers that are alive but not running, by local rank."""
        if not self._is_local:
            return {}
        return self._process_states.look(self.run_state.running, clock.now())
