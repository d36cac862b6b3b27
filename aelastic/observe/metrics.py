"""What of a run is counted: run events in, Prometheus' text out.

Everything is there from the beginning, with 0 where nothing has happened yet, so that a rate or an alert has something
to begin with.  `docs/health.md` has the table; a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from aelastic.group.events import WatchName, WorkerState
from aelastic.group.worker_group import Phase
from aelastic.observe.prometheus import Counter, Gauge, Histogram, Registry
from aelastic.observe.run_events import (
    PHASES,
    Changed,
    Noticed,
    PhaseTook,
    RestartCause,
    Restarting,
    RoundFormed,
    RunBegan,
    RunEvent,
    StacksTaken,
    WorkerEnded,
    WorkersStarted,
)

# From what a failure on one node takes (milliseconds) to the timeouts: 30 s to stop, 600 s to meet.
DURATION_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
# From what one step of a loop may take to what a lease of a node allows (5 s).
LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


class RunMetrics:
    """Of one run.

    Args:
        build: what is running, as label and value: `version`, `python`.
    """

    def __init__(self, build: Mapping[str, str]) -> None:
        self.registry = Registry()
        add = self.registry.add
        info = add(Gauge("aelastic_build_info", "What is running, in the labels; always 1.", *build))
        info.set(1, *build.values())
        self._run = add(
            Gauge("aelastic_run_info", "Which run it is, in the labels; always 1.",
                  "run_id", "host", "role", "rdzv_backend")
        )  # fmt: skip
        self._state = add(Gauge("aelastic_state", "1 for the state the worker group is in, 0 for others.", "state"))
        self._phase = add(Gauge("aelastic_phase", "1 for the phase the agent is in, 0 for others.", "phase"))
        for state in WorkerState:
            self._state.set(state is WorkerState.INIT, state.value)
        for phase in Phase:
            self._phase.set(phase is Phase.INIT, phase.value)
        self._ready = add(Gauge("aelastic_ready", "Whether workers of a complete round run here, as /readyz has it."))
        self._add_rounds()
        self._add_durations()
        self._add_workers()
        self._is_running = False
        self._failed_at: float | None = None  # when the first worker of this generation was seen to have ended
        self._down_since: float | None = None  # since when workers do not run that did

    def _add_rounds(self) -> None:
        add = self.registry.add
        self._round = add(Gauge("aelastic_round", "Number of the round that this node took part in last."))
        self._rounds = add(Counter("aelastic_rounds_total", "Rounds that this node took part in."))
        self._world_size = add(Gauge("aelastic_world_size", "Workers of the job in that round, on all nodes."))
        self._nodes = add(Gauge("aelastic_group_world_size", "Nodes in that round."))
        self._local_world_size = add(Gauge("aelastic_local_world_size", "Workers of this node in that round."))
        self._restart_count = add(Gauge("aelastic_restart_count", "Restarts of the job that failures have cost."))
        self._max_restarts = add(Gauge("aelastic_max_restarts", "How many of these the job may have."))
        self._restarts = add(Counter("aelastic_restarts_total", "Restarts that this agent took part in.", "cause"))
        for cause in get_args(RestartCause):
            self._restarts.inc(cause, by=0)

    def _add_durations(self) -> None:
        add = self.registry.add
        self._phase_took = add(
            Histogram("aelastic_phase_duration_seconds", "How long phases took that are over.", "phase",
                      buckets=DURATION_BUCKETS_S)
        )  # fmt: skip
        for name in PHASES:
            self._phase_took.declare(name)
        self._restart_took = add(
            Histogram("aelastic_restart_duration_seconds", "From the first worker's end until all run again.",
                      buckets=DURATION_BUCKETS_S)
        )  # fmt: skip
        self._lag = add(
            Histogram("aelastic_loop_lag_seconds", "How late the agent's loop came to a task; looked at every second.",
                      buckets=LAG_BUCKETS_S)
        )  # fmt: skip

    def _add_workers(self) -> None:
        add = self.registry.add
        self._exits = add(Counter("aelastic_worker_exits_total", "Workers of this node that have ended.", "outcome"))
        for outcome in ("succeeded", "failed", "stopped"):
            self._exits.inc(outcome, by=0)
        self._expiries = add(Counter("aelastic_watchdog_expiries_total", "Timers that workers set and did not clear."))
        self._noticed = add(
            Counter("aelastic_noticed_total", "How often a worker did not do what was expected of it.", "by")
        )
        for watch in get_args(WatchName):
            self._noticed.inc(watch, by=0)
        self._stacks = add(Counter("aelastic_stacks_taken_total", "How often the workers' stacks were taken."))
        self._worker_cpu = add(
            Counter("aelastic_worker_cpu_seconds_total", "CPU time of a worker's own process.", "local_rank", "role")
        )
        self._worker_rss = add(
            Gauge("aelastic_worker_resident_memory_bytes", "Memory of a worker's own process.", "local_rank", "role")
        )
        self._agent_cpu = add(Counter("aelastic_agent_cpu_seconds_total", "CPU time of the agent's process."))
        self._agent_rss = add(Gauge("aelastic_agent_resident_memory_bytes", "Memory of the agent's process."))

    def tell(self, event: RunEvent, now: float) -> None:  # noqa: C901  one case for each
        """Something happened just now."""
        match event:
            case RunBegan() as run:
                self._run.set(1, run.run_id, run.host, run.role, run.rdzv_backend)
                self._max_restarts.set(run.max_restarts)
            case Changed(phase=phase, state=state):
                self._is_running = phase is Phase.RUNNING
                self._phase.choose(phase.value)
                self._state.choose(state.value)
            case RoundFormed() as formed:
                self._on_round(formed)
            case PhaseTook() as took:
                self._on_phase_took(took, now)
            case WorkersStarted() if self._is_running:  # else they are being stopped already
                if self._down_since is not None:
                    self._restart_took.observe(now - self._down_since)
                self._failed_at = self._down_since = None
            case WorkerEnded(outcome=outcome):
                self._exits.inc(outcome)
            case Restarting(cause=cause, restart_count=count):
                self._restarts.inc(cause)
                self._restart_count.set(count)
            case Noticed(by=by):
                self._noticed.inc(by)
                if by == "timer":
                    self._expiries.inc()
            case StacksTaken():
                self._stacks.inc()
            case _:
                pass  # says nothing that is counted

    def _on_round(self, formed: RoundFormed) -> None:
        self._rounds.inc()
        self._round.set(formed.round)
        self._world_size.set(formed.world_size)
        self._nodes.set(formed.group_world_size)
        self._local_world_size.set(formed.local_world_size)
        self._restart_count.set(formed.restart_count)

    def _on_phase_took(self, took: PhaseTook, now: float) -> None:
        self._phase_took.observe(took.duration_s, took.name)
        if took.name == "detect" and self._failed_at is None:
            self._failed_at = now - took.duration_s
        elif took.name == "run":
            self._down_since = now if self._failed_at is None else min(now, self._failed_at)
        elif took.name == "barrier":
            self._down_since = now  # until then nobody missed them

    # What is measured rather than told.

    def lag(self, duration_s: float) -> None:
        """The loop came to a task so late."""
        self._lag.observe(duration_s)

    def expose(
        self, *, is_ready: bool, role: str, agent: tuple[float, int] | None, workers: Mapping[int, tuple[float, int]]
    ) -> str:
        """The text for a scraper.

        Args:
            agent: its CPU seconds and bytes of memory.
            workers: likewise, by local rank, of those that live.
        """
        self._ready.set(is_ready)
        if agent is not None:
            self._agent_cpu.set(agent[0])
            self._agent_rss.set(agent[1])
        self._worker_cpu.clear()
        self._worker_rss.clear()
        for local_rank, (cpu_s, rss_bytes) in sorted(workers.items()):
            self._worker_cpu.set(cpu_s, local_rank, role)
            self._worker_rss.set(rss_bytes, local_rank, role)
        return self.registry.expose()
