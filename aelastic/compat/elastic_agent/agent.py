"""torch's `LocalElasticAgent` over a `Supervisor`: `run` blocks until the job has ended.

A subclass may override `run`, and `_start_workers`, which is called in a thread each time workers start and must
call its `super()`.  The other methods that torch's agent has for its own loop are decided by the supervisor and never
called: a subclass that overrides one of them is refused.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any
from weakref import WeakMethod

import anyio.from_thread
import anyio.to_thread

from aelastic.agent.group.worker_env import STUCK_VARIABLE, worker_args
from aelastic.agent.resources import Starter, StartFunction
from aelastic.compat.elastic_agent.worker_group import WorkerGroup
from aelastic.compat.launcher.blocking import BlockingRun
from aelastic.compat.launcher.elastic_launch import loop_of
from aelastic.compat.launcher.errors import SignalException, catchable_as_torchs
from aelastic.compat.launcher.launch_config import SIGNALS_VARIABLE, as_text, check_entrypoint, numa_fields, signals_in
from aelastic.errors import InputError
from aelastic.health_check_server import NoHealthCheckServer, delegate
from aelastic.rdzv.lent_handler import lent
from aelastic.result import RunResult
from aelastic.settings import EXIT_BARRIER_TIMEOUT_S, SHUTDOWN_TIMEOUT_S
from aelastic.spec import WorkerSpec
from aelastic.supervisor import Supervisor
from aelastic.workers.backend import WorkerStart

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # torch's default for the signals that stop a job
# Methods that torch's agent calls in its loop, and ours does not: an override would have no effect.
_NOT_CALLED = frozenset({
    "_assign_worker_ranks", "_check_uninterruptible_state_timeout", "_construct_event", "_exit_barrier",
    "_get_alive_time", "_get_worker_state", "_initialize_workers", "_invoke_run", "_log_watchdog_event",
    "_monitor_workers", "_record_metrics", "_record_worker_events", "_rendezvous", "_restart_workers",
    "_set_local_rank_env", "_setup_healthcheck", "_setup_local_watchdog", "_stop_workers", "get_event_failed",
    "get_event_succeeded",
})  # fmt: skip


# Fields that torch's spec and ours have in common.
_SAME = (
    "role", "local_world_size", "max_restarts", "monitor_interval", "master_addr", "master_port",
    "virtual_local_rank", "event_log_handler",
)  # fmt: skip


class _HookedSupervisor(Supervisor):
    """A supervisor that starts workers with `starter`, which receives the back end's `start`."""

    def __init__(self, spec: WorkerSpec, starter: Starter, **more: Any) -> None:
        super().__init__(spec, **more)
        self._settings = self._settings.replace(starter=starter)


class LocalElasticAgent:
    """Runs the workers of this node until the job is over (torch: `LocalElasticAgent`).

    Args:
        spec: a `WorkerSpec` of torch's kind, ours or torch's.
        logs_specs: a `LogsSpecs`, ours or torch's; `None` keeps no files.
        health_check_server: a server of torch's kind that the caller has started; it is stopped when the job has ended.
        uninterruptible_state_timeout: seconds; another way to set `TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT`.

    Raises:
        InputError: a subclass overrides a method that is not called here.
    """

    def __init__(
        self,
        spec: Any,
        logs_specs: Any = None,
        start_method: str = "spawn",
        exit_barrier_timeout: float = EXIT_BARRIER_TIMEOUT_S,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = SHUTDOWN_TIMEOUT_S,
        health_check_server: Any = None,
        uninterruptible_state_timeout: float | None = None,
    ) -> None:
        _refuse_what_is_not_called(type(self))
        self._worker_group = WorkerGroup(spec)
        self._health_check_server = health_check_server
        self._stuck_timeout_s = uninterruptible_state_timeout
        self._how: dict[str, Any] = {
            "logs_specs": logs_specs,
            "start_method": start_method,
            "exit_barrier_timeout_s": exit_barrier_timeout,
            "log_line_prefix_template": log_line_prefix_template,
            "shutdown_timeout_s": shutdown_timeout,
        }
        self._environ: dict[str, str] = {}  # of this program, as `run` found it
        self._starting: tuple[Sequence[WorkerStart], StartFunction] | None = None
        self._has_started = False  # set by the last call of `_start_workers`
        self._job: BlockingRun | None = None
        self._total_execution_time = 0  # seconds that `run` took (torch: the same name)

    def run(self, role: str = "default") -> RunResult:  # noqa: ARG002  torch's agent also has one role
        """Runs the job to its end, and returns its result (torch: `run`).

        Raises:
            SignalException: a signal stopped the job, whose workers have all ended; also torch's, if that is imported.
            AelasticError: the rendezvous failed, the host is at fault, or a value cannot work.
        """
        self._environ, began_at = dict(os.environ), monotonic()
        try:
            signals = signals_in(self._environ.get(SIGNALS_VARIABLE, SIGNALS))
            is_watched = self._health_check_server is not None
            supervisor = _HookedSupervisor(
                self._spec(), _weakly(self._start), health_check_server=NoHealthCheckServer() if is_watched else None
            )
            self._job = BlockingRun(supervisor, signals, loop_of(self._environ))
            delegate(self._health_check_server, self._job.last_seen_alive)
            result = self._job.run()
        finally:
            self._total_execution_time = int(monotonic() - began_at)
            if self._health_check_server is not None:
                self._health_check_server.stop()
        self._worker_group.state = result.state
        if result.state.name == "STOPPED" and (signum := self._job.stopped_by) is not None:
            message = f"Process {os.getpid()} got signal: {signum}"
            raise catchable_as_torchs(SignalException(message, signal.Signals(signum)))
        return result

    def get_worker_group(self, role: str = "default") -> WorkerGroup:  # noqa: ARG002
        """Returns the workers as they were last started (torch: `get_worker_group`)."""
        return self._worker_group

    @property
    def _remaining_restarts(self) -> int:
        return max(0, int(self._worker_group.spec.max_restarts) - self._worker_group.restart_count)

    def _shutdown(self, death_sig: int = signal.SIGTERM, timeout: float = 30) -> None:  # noqa: ARG002
        """Asks the job to end, from any thread; only the constructor's `shutdown_timeout` matters."""
        if self._job is not None:
            self._job.stop(death_sig)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Starts the workers, and returns their pids by local rank (torch: `_start_workers`).

        They get the entrypoint and the arguments that the group's spec has now, and the variables of `os.environ` that
        have changed since `run`.
        """
        if self._starting is None:
            raise RuntimeError("_start_workers is called by the agent's run, not by programs")
        (starts, start), self._starting = self._starting, None
        changed = {name: value for name, value in os.environ.items() if self._environ.get(name) != value}
        spec = worker_group.spec
        entrypoint, args = _command(spec.entrypoint, spec.args)
        starts = [
            each.replace(entrypoint=entrypoint, args=worker_args(args, each.local_rank), env={**each.env, **changed})
            for each in starts
        ]
        ids: Mapping[int, Any] = anyio.from_thread.run(start, starts)
        worker_group.started(ids)
        self._has_started = True
        return dict(ids)

    async def _start(self, starts: Sequence[WorkerStart], start: StartFunction) -> Mapping[int, Any]:
        group = self._worker_group
        group.begin([each.env for each in starts])
        self._starting, self._has_started = (starts, start), False
        await anyio.to_thread.run_sync(self._start_workers, group)
        if not self._has_started:
            raise InputError(
                f"{type(self).__name__}._start_workers started no worker of this agent: call its super()",
                topic="a-subclass-of-the-agent-does-not-work",
            )
        return {worker.local_rank: worker.id for worker in group.workers}

    def _spec(self) -> WorkerSpec:
        spec = self._worker_group.spec
        check_entrypoint(spec.entrypoint, self._how["start_method"])
        entrypoint, args = _command(spec.entrypoint, spec.args)
        timeout = self._stuck_timeout_s
        return WorkerSpec(
            entrypoint=entrypoint,
            args=args,
            **{name: getattr(spec, name) for name in _SAME},
            rdzv_handler=None if spec.rdzv_handler is None else lent(spec.rdzv_handler),
            duplicate_stdout_filters=tuple(spec.duplicate_stdout_filters or ()),
            duplicate_stderr_filters=tuple(spec.duplicate_stderr_filters or ()),
            env={**self._environ, **({} if timeout is None else {STUCK_VARIABLE: str(timeout)})},
            **numa_fields(spec.numa_options),
            **self._how,
        )


def _weakly(method: Starter) -> Starter:
    """Returns a function that calls a method of an agent without keeping the agent alive.

    Cycles keep the remains of a run until the next collection.  They must not keep the agent, whose spec has the
    handler.
    """
    weak = WeakMethod(method)

    async def start(starts: Sequence[WorkerStart], start_all: StartFunction) -> Mapping[int, Any]:
        living = weak()
        assert living is not None, "run is a method of the agent"
        return await living(starts, start_all)

    return start


def _command(entrypoint: Any, args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    return entrypoint, tuple(args if callable(entrypoint) else map(as_text, args))


def _refuse_what_is_not_called(cls: type) -> None:
    known = set(LocalElasticAgent.__mro__)
    overridden = sorted({name for each in cls.__mro__ if each not in known for name in vars(each)} & _NOT_CALLED)
    if overridden:
        raise InputError(
            f"{cls.__name__} overrides {', '.join(overridden)}, which aelastic's agent does not call: its supervisor "
            "decides that; derive from torch's LocalElasticAgent, or use observers of aelastic.Supervisor",
            topic="a-subclass-of-the-agent-does-not-work",
        )
