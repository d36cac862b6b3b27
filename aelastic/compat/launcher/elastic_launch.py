"""One launch from a blocking program (torch: `torch.distributed.launcher.api`).

A call runs one job on an event loop of its own and returns when nothing of it is left.  Any number may run, one after
the other or in threads, even if a loop is already running.  Signals are handled in the main thread only; the
program's own handlers are put back.
"""

from __future__ import annotations

import os
import signal
import sys
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aelastic.base.loop.factory import LOOPS, loop_factory
from aelastic.base.machine import CHECK_VARIABLE, check_invariants
from aelastic.cli.process import warnings_on_stderr
from aelastic.compat.launcher.blocking import BlockingRun
from aelastic.compat.launcher.errors import SignalException, catchable_as_torchs
from aelastic.compat.launcher.launch_config import SIGNALS_VARIABLE, LaunchConfig, completed, signals_in, worker_spec
from aelastic.errors import InputError, RendezvousClosedError
from aelastic.health_check_server import NoHealthCheckServer, delegate
from aelastic.result import RunResult, failed_error
from aelastic.supervisor import Supervisor


class elastic_launch:  # noqa: N801  torch's name
    """Launches functions or programs as workers of this node (torch: `elastic_launch`).

    Call the object with the workers' arguments.  It returns their return values by global rank; `None` for a program.

    Args:
        config: a `LaunchConfig`, aelastic's or torch's.
        entrypoint: a function, or the name of a program, that each worker runs.
        health_check_server: a server that you have already started; see `launch_agent`.
    """

    def __init__(
        self, config: LaunchConfig, entrypoint: str | Callable[..., Any] | None, health_check_server: Any = None
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        return launch_agent(self._config, self._entrypoint, list(args), self._health_check_server)


def launch_agent(
    config: LaunchConfig,
    entrypoint: str | Callable[..., Any] | None,
    args: list[Any],
    health_check_server: Any = None,
) -> dict[int, Any]:
    """Runs one job to its end, and returns the workers' return values by global rank (torch: `launch_agent`).

    It blocks; any number of jobs can run in threads.

    Args:
        config: a `LaunchConfig`, aelastic's or torch's.
        entrypoint: a function, or the name of a program, that each worker runs.
        args: the workers' arguments; `${local_rank}` in a string is replaced by the worker's local rank.
        health_check_server: a torch `HealthCheckServer` that you have already started.  It is stopped when the job
            ends; until then, an `alive_callback` that supports delegation (torch's `_AliveCallbackProxy`) returns when
            the agent's loop last ran.

    Raises:
        ChildFailedError: workers failed.  If torch is imported, you can also catch it as torch's `ChildFailedError`.
        SignalException: one of `signals_to_handle` stopped the job.  If torch's class is imported, you can catch that
            one as well.
        InputError: a `ValueError`: a value is invalid, and nothing was started.
        AelasticError: the rendezvous failed, the host is at fault, or aelastic has a bug.
    """
    return launch(config, entrypoint, args, os.environ, health_check_server)


def launch(
    config: LaunchConfig,
    entrypoint: str | Callable[..., Any] | None,
    args: list[Any],
    environ: Mapping[str, str],
    health_check_server: Any = None,
) -> dict[int, Any]:
    """Does what `launch_agent` does, with the environment that the workers inherit."""
    config = completed(config)
    try:
        spec, signals = worker_spec(config, entrypoint, args, environ), signals_in(config.signals_to_handle)
        os.environ[SIGNALS_VARIABLE] = config.signals_to_handle  # as in torch, also for what this program starts
        make_loop = loop_of(environ)
        if environ.get(CHECK_VARIABLE):  # set by aelastic's own tests
            check_invariants()
        none_of_ours = None if health_check_server is None else NoHealthCheckServer()
        supervisor = Supervisor(spec, health_check_server=none_of_ours)
        job = BlockingRun(supervisor, signals, make_loop)
        delegate(health_check_server, job.last_seen_alive)
        with warnings_on_stderr():
            result = job.run()
    finally:
        if health_check_server is not None:
            health_check_server.stop()
    name = entrypoint_name(entrypoint, args)
    return _conclude(name, result, job.stopped_by, [worker.global_rank for worker in supervisor.workers])


def entrypoint_name(entrypoint: str | Callable[..., Any] | None, args: Sequence[Any]) -> str:
    """Returns its name in reports, as in torch: the function, the program, or the script that this Python runs."""
    if isinstance(entrypoint, str):
        if entrypoint != sys.executable:
            return entrypoint
        return next((str(arg) for arg in args if not str(arg).startswith("-")), "")
    return str(getattr(entrypoint, "__name__", repr(entrypoint))) if callable(entrypoint) else ""


def loop_of(environ: Mapping[str, str]) -> Callable[[], AbstractEventLoop]:
    """Returns a function that makes the event loop of a job.

    Raises:
        InputError: `AELASTIC_LOOP` does not name one.
    """
    loop = environ.get("AELASTIC_LOOP", "") or "uvloop"
    if loop not in LOOPS:
        raise InputError(f"AELASTIC_LOOP={loop}: use uvloop or asyncio")
    return loop_factory(loop)


def _conclude(name: str, result: RunResult, stopped_by: int | None, ranks: Sequence[int]) -> dict[int, Any]:
    if result.is_failed():
        raise catchable_as_torchs(failed_error(name, result))
    if result.state.name == "SUCCEEDED":
        return {rank: result.return_values.get(rank) for rank in ranks}
    if stopped_by is not None:
        message = f"Process {os.getpid()} got signal: {stopped_by}"
        raise catchable_as_torchs(SignalException(message, signal.Signals(stopped_by)))
    raise RendezvousClosedError(f"{name} was stopped: {result.reason or 'unknown reason'}")
