"""Makes metrics of a run: run events in, Prometheus' text out.

Every series exists from the beginning, with 0 while nothing has happened, so that a rate or an alert has a start.
`docs/reference/metrics.md` is generated from these declarations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, get_args

from aelastic.base.host.kernel_states import KERNEL_STATES
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.diagnose.hangs.options import WatchName
from aelastic.observe import run_events as ev
from aelastic.observe.prometheus import Registry
from aelastic.observe.run_state import RunState
from aelastic.observe.status import readiness
from aelastic.observe.time_spent import ON
from aelastic.workers.states import Phase, WorkerState

# From the time that a failure on one node takes (milliseconds) to the timeouts: 30 s to stop, 600 s for a rendezvous.
DURATION_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
# From the time that one step of a loop may take to the lease of a node (5 s).
LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


# How a worker failed: it could not be started, was stopped by a watch, was killed for lack of memory or by a signal,
# raised an exception that it recorded or printed, or exited with a code other than 0.
FAILURE_KINDS: tuple[str, ...] = ("start", *get_args(WatchName), "oom", "signal", "exception", "exit")


# Metrics read from the state of a run on each scrape: name, meaning, and the value; `None`: not known yet.
_OF_STATE: tuple[tuple[str, str, Callable[[RunState], Any]], ...] = (
    ("aelastic_ready", "1 while /readyz returns 200: workers of a complete round run on this node.",
     lambda run: readiness(run)[0]),
    # Rounds.
    ("aelastic_round", "Number of the last round that this node took part in.",
     lambda run: run.formed and run.formed.round),
    ("aelastic_world_size", "Workers of the job in that round, on all nodes.",
     lambda run: run.formed and run.formed.world_size),
    ("aelastic_group_world_size", "Nodes in that round.", lambda run: run.formed and run.formed.group_world_size),
    ("aelastic_local_world_size", "Workers of this node in that round.",
     lambda run: run.formed and run.formed.local_world_size),
    ("aelastic_used_restarts", "Restarts of the job charged so far.", lambda run: run.restart_count),
    ("aelastic_max_restarts", "Restarts that the job may have (--max-restarts).",
     lambda run: run.began and run.began.max_restarts),
    ("aelastic_nodes_missing", "Nodes missing from the maximum of --nnodes in this node's last round.",
     lambda run: run.began and max(0, run.began.max_nodes - (run.formed.group_world_size if run.formed else 1))),
    ("aelastic_drains_total", "Announced departures of nodes for which all ranks saved; these cost no restart.",
     lambda run: run.drains),
    # How far the workers are.
    ("aelastic_progress_step", "The last step of the workers: printed (--progress), or committed in place.",
     lambda run: run.last_progress and run.last_progress.step),
    ("aelastic_progress_steps", "The final step of the training; 0 if unknown.",
     lambda run: run.last_progress and (run.last_progress.total or 0)),
    ("aelastic_progress_steps_per_second", "Steps per second in the last minute.",
     lambda run: run.last_progress and (run.last_progress.steps_per_s or 0)),
    ("aelastic_progress_remaining_seconds", "Seconds until the final step at this speed; NaN if unknown.",
     lambda run: math.nan if (left := getattr(run.last_progress, "remaining_s", None)) is None else left),
    # The fork server.
    ("aelastic_parked_processes", "Processes of the template that wait to become workers.",
     lambda run: run.fork_server and run.fork_server.parked),
    ("aelastic_fork_server_pss_bytes",
     "Memory of the template and its waiting processes (PSS: shared pages counted in proportion).",
     lambda run: run.fork_server and run.fork_server.pss_bytes),
)  # fmt: skip


# Counted run events: type, name, meaning, label with its first values, and the label's value; if falsy, not counted.
_COUNTED: tuple[tuple[type[ev.RunEvent], str, str, str, tuple[str, ...], Callable[[Any], Any]], ...] = (
    (ev.RoundFormed, "aelastic_rounds_total", "Rounds that this node took part in.", "", (), lambda _: True),
    (ev.Restarting, "aelastic_restarts_total", "Restarts that this agent took part in, including those in place.",
     "cause", get_args(ev.RestartCause), lambda restarting: restarting.cause),
    (ev.WorkerEnded, "aelastic_worker_exits_total", "Ended workers of this node.",
     "outcome", ("succeeded", "failed", "stopped"), lambda ended: ended.outcome),
    (ev.WorkerEnded, "aelastic_failures_total",
     "Failed workers of this node, by kind: not started, stopped by a watch, or how they died.",
     "kind", FAILURE_KINDS, lambda ended: ended.failure and (ended.failure.found_by or _kind_of(ended.failure))),
    (ev.Noticed, "aelastic_watchdog_expiries_total", "Timers that workers set and did not clear in time.",
     "", (), lambda noticed: noticed.by == "timer"),
    (ev.Noticed, "aelastic_noticed_total", "Workers that a watch found unhealthy.",
     "by", get_args(WatchName), lambda noticed: noticed.by),
    (ev.Compared, "aelastic_hangs_compared_total",
     "Comparisons of all workers of the job in a hang, by whether ranks were named.",
     "outcome", ("named", "not_named"), lambda compared: "named" if compared.outliers else "not_named"),
    (ev.StacksTaken, "aelastic_stacks_taken_total", "Collections of the workers' stacks.",
     "", (), lambda _: True),
)  # fmt: skip


class RunMetrics:
    """Metrics of one run.

    Args:
        build: the running versions, as labels and values: `version`, `python`.
    """

    def __init__(self, build: Mapping[str, str]) -> None:
        self.registry = Registry()
        counter, gauge, histogram = self.registry.counter, self.registry.gauge, self.registry.histogram
        gauge("aelastic_build_info", "Version of aelastic and Python, in the labels; always 1.", *build).set(
            1, *build.values()
        )
        identity = "run_id", "host", "role", "rdzv_backend"
        self._run = gauge("aelastic_run_info", "Identity of the run, in the labels; always 1.", *identity)
        text = "1 after the run, for the state it ended in; UNKNOWN after an error of the rendezvous or the agent."
        self._ended = gauge("aelastic_run_ended", text, "run_id", "state")
        self._state = gauge("aelastic_state", "1 for the state of the workers, 0 for the other states.", "state")
        self._phase = gauge("aelastic_phase", "1 for the agent's phase, 0 for the other phases.", "phase")
        self._of_state = [
            ((counter if name.endswith("_total") else gauge)(name, text), read) for name, text, read in _OF_STATE
        ]
        self._counted = [
            (kind, counter(name, text, *filter(None, [label]), start=start), of)
            for kind, name, text, label, start, of in _COUNTED
        ]
        self._coordinates = gauge("aelastic_leads", "1 while this agent leads the job.")
        # Durations.
        text, name = "Duration of finished phases.", "aelastic_phase_duration_seconds"
        self._phase_took = histogram(name, text, "phase", buckets=DURATION_BUCKETS_S)
        for phase_name in ev.PHASES:
            self._phase_took.declare(phase_name)
        text, name = (
            "Time from the first worker's end until all workers run again, in new processes.",
            "aelastic_restart_duration_seconds",
        )
        self._restart_took = histogram(name, text, buckets=DURATION_BUCKETS_S)
        self._recoveries = _Recoveries(self.registry)
        text, name = (
            "Time from the complete round until a worker reached a phase of its start.",
            "aelastic_worker_start_seconds",
        )
        self._start_took = histogram(name, text, "kind", "phase", buckets=DURATION_BUCKETS_S)
        for kind, phase in itertools.product(get_args(ev.StartKind), get_args(ev.StartPhase)):
            if (kind, phase) != ("cold", "imported"):  # not visible from outside
                self._start_took.declare(kind, phase)
        text = "Time of the run, by activity; the sum is the whole run."
        self._spent = counter("aelastic_time_seconds_total", text, "spent", start=ON)
        text = "Start of the agent's current phase, in seconds since 1970."
        self._phase_start = gauge("aelastic_phase_start_time_seconds", text)
        text = "Delay of the agent's event loop, sampled every second."
        self._lag = histogram("aelastic_loop_lag_seconds", text, buckets=LAG_BUCKETS_S)
        # Workers and agent.
        text = "Time since the last sign of life for --hang-timeout, or the last output for --expect-output."
        self._silence = gauge("aelastic_worker_silence_seconds", text, "local_rank")
        text = "Limit of that time; 0 without hang detection."
        self._silence_max = gauge("aelastic_worker_silence_max_seconds", text)
        whose, name = ("local_rank", "role"), "aelastic_worker_resident_memory_bytes"
        text = "CPU time of a worker's own process, without children; starts over with each process."
        self._worker_cpu = counter("aelastic_worker_cpu_seconds_total", text, *whose)
        self._worker_rss = gauge(name, "Memory of a worker's own process, without children.", *whose)
        text = "1 for the kernel state of a worker that is alive but not running, 0 for the other states."
        self._worker_kernel = gauge("aelastic_worker_kernel_state", text, *whose, "state")
        self._agent_cpu = counter("aelastic_agent_cpu_seconds_total", "CPU time of the agent's process.")
        self._agent_rss = gauge("aelastic_agent_resident_memory_bytes", "Memory of the agent's process.")
        self._is_starting = False
        self._formed_at = 0.0
        self._failed_at: float | None = None  # when the first worker of this generation was seen to have ended
        self._down_since: float | None = None  # since when workers that ran no longer do
        self._look(RunState())

    def tell(self, event: ev.RunEvent, now: float) -> None:
        self._recoveries.tell(event)
        for counted, family, of in self._counted:
            if isinstance(event, counted) and (value := of(event)):
                family.inc(*([value] if family.labels else []))
        match event:
            case ev.Changed(phase=phase):
                self._is_starting = phase is Phase.SPAWNING
            case ev.RoundFormed(in_place=in_place):
                self._formed_at = now
                if in_place:  # then nothing restarts
                    self._failed_at = self._down_since = None
            case ev.PhaseTook() as took:
                self._on_phase_took(took, now)
            case ev.WorkersStarted() if self._is_starting:  # otherwise they are already being stopped
                self._on_started(event, now)
            case ev.WorkerReached(kind=kind, phase=phase, duration_s=duration_s):
                self._start_took.observe(duration_s, kind, phase)
            case _:
                pass  # no duration to measure

    def _on_started(self, started: ev.WorkersStarted, now: float) -> None:
        for kind in map(started.kind_of, started.ids):
            for reached in ("spawned", "imported") if kind == "warm" else ("spawned",):
                self._start_took.observe(now - self._formed_at, kind, reached)
        if self._down_since is not None:
            self._restart_took.observe(now - self._down_since)
        self._failed_at = self._down_since = None

    def _on_phase_took(self, took: ev.PhaseTook, now: float) -> None:
        self._phase_took.observe(took.duration_s, took.name)
        if took.name == "detect" and self._failed_at is None:
            self._failed_at = now - took.duration_s
        elif took.name == "run":
            self._down_since = now if self._failed_at is None else min(now, self._failed_at)
        elif took.name == "barrier":
            self._down_since = now  # until then no worker was missing

    # Measured on each scrape.

    def lag(self, duration_s: float) -> None:
        """Observes how late the loop reached a task."""
        self._lag.observe(duration_s)

    def expose(
        self,
        state: RunState,
        *,
        agent: tuple[float, int] | None = None,
        workers: Mapping[int, tuple[float, int]] = MappingProxyType({}),
        kernel: Mapping[int, str] = MappingProxyType({}),
        common: Mapping[str, str] = MappingProxyType({}),
        now: float = 0.0,
        epoch: float = 0.0,
        coordinates: bool = False,
        silence: tuple[float, Mapping[int, float]] = (0.0, MappingProxyType({})),
        is_open: bool = False,
    ) -> str:
        """Returns the text for a scraper.

        Args:
            state: the state of the run.
            agent: the agent's CPU seconds and bytes of memory.
            workers: the same for live workers, by local rank.
            kernel: kernel states of workers that are alive but not running, by local rank.
            common: labels for every series.
            now: on the clock of the events.
            epoch: seconds since 1970 when the clock of `now` was 0.
            coordinates: this agent leads the job.
            silence: how long a worker may show no sign of life, and how long each has shown none, by local rank.
            is_open: in the format of OpenMetrics.
        """
        self._look(state)
        for what, seconds in state.spent.until(now).items():
            # Time first exposed as training may turn out to be a hang.  A counter never shrinks, so it stands still.
            self._spent.raise_to(seconds, what)
        self._phase_start.set(round(state.phase_since + epoch, 3))
        self._coordinates.set(coordinates)
        self._silence_max.set(silence[0])
        self._silence.clear()
        for local_rank, silent_s in sorted(silence[1].items()):
            self._silence.set(silent_s, local_rank)
        if agent is not None:
            self._agent_cpu.set(agent[0])
            self._agent_rss.set(agent[1])
        self._worker_cpu.clear()
        self._worker_rss.clear()
        self._worker_kernel.clear()
        for local_rank, (cpu_s, rss_bytes) in sorted(workers.items()):
            self._worker_cpu.set(cpu_s, local_rank, state.role)
            self._worker_rss.set(rss_bytes, local_rank, state.role)
        for local_rank, each in itertools.product(sorted({*workers, *kernel}), KERNEL_STATES):
            self._worker_kernel.set(kernel.get(local_rank) == each, local_rank, state.role, each)
        return self.registry.expose(common, is_open=is_open)

    def _look(self, state: RunState) -> None:
        """Sets the metrics that are read from the state of the run."""
        for each in WorkerState:
            self._state.set(each is state.state, each.value)
        for phase in Phase:
            self._phase.set(phase is state.phase, phase.value)
        for family, read in self._of_state:
            if (value := read(state)) is not None:
                family.set(value)
        if (began := state.began) is not None:
            self._run.set(1, began.run_id, began.host, began.role, began.rdzv_backend)
            if (ended := state.ended) is not None:
                # If workers were stopped because of an error, the job was not asked to stop.
                self._ended.set(1, began.run_id, (WorkerState.UNKNOWN if ended.traceback else ended.state).value)


class _Recoveries:
    """Counts recoveries in place."""

    def __init__(self, registry: Registry) -> None:
        text = "Recoveries in place on this node: all workers have the state, or they were restarted instead."
        start = "recovered", "restarted"
        self._recoveries = registry.counter("aelastic_recoveries_total", text, "outcome", start=start)
        text = "Workers of this node that kept their processes in recoveries in place, and those that were replaced."
        start = "kept", "replaced"
        self._workers = registry.counter("aelastic_recovered_workers_total", text, "outcome", start=start)
        text = "Time from the first worker's end until all workers of this node have the state again, in place."
        name = "aelastic_recovery_duration_seconds"
        self._took = registry.histogram(name, text, buckets=DURATION_BUCKETS_S)

    def tell(self, event: ev.RunEvent) -> None:
        match event:
            case ev.Recovered(workers_kept=kept, workers_replaced=replaced, duration_s=duration_s):
                self._recoveries.inc("recovered")
                self._workers.inc("kept", by=kept)
                self._workers.inc("replaced", by=replaced)
                self._took.observe(duration_s)
            case ev.NotRecovered():
                self._recoveries.inc("restarted")
            case _:
                pass


def _kind_of(failure: ProcessFailure) -> str:
    if failure.pid == -1:
        return "start"
    if failure.oom:
        return "oom"
    if failure.is_signal:
        return "signal"
    return "exception" if failure.traceback else "exit"
