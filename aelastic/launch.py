"""The launcher as a library, and `python -m aelastic.launch`.

    values = elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2), train)(0.1, 20)

The names and promises are those of `torch.distributed.launcher.api` and `torch.distributed.launch`.  A call runs one
job on an event loop of its own and returns when nothing of it is left; any number may run, one after the other or in
threads, also where a loop runs already.  Signals are handled in the main thread only, and given back.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from aelastic.cli.blocking import BlockingRun
from aelastic.cli.launch_config import LaunchConfig as LaunchConfig  # noqa: PLC0414  this is its documented place
from aelastic.cli.launch_config import signals_of, worker_spec
from aelastic.cli.main import loop_factory
from aelastic.cli.options import LAUNCH_GROUPS
from aelastic.errors import ChildFailedError, ErrorHandler, InputError, RendezvousClosedError
from aelastic.failures.error_file import ERROR_FILE_VARIABLE
from aelastic.health_check_server import NoHealthCheckServer
from aelastic.result import RunResult
from aelastic.supervisor import Supervisor


class SignalException(Exception):
    """A signal stopped the job, whose workers have all ended (torch: `SignalException`).

    Args:
        sigval: the signal.
    """

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval

    def __reduce__(self) -> tuple[Any, ...]:
        return SignalException, (*self.args, self.sigval)


# The face of `torch.distributed.launcher.api`.


class elastic_launch:  # noqa: N801  torch's name
    """Launches functions or programs as workers of this node (torch: `elastic_launch`).

    Called with the workers' arguments, it gives what they returned by global rank; for a program that is `None`.

    Args:
        config: how, as ours or as torch's `LaunchConfig`.
        entrypoint: what every worker runs: a function, or the name of a program.
        health_check_server: one that the caller has started; see `launch_agent`.
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
    """Runs one job to its end, and gives what the workers returned, by global rank (torch: `launch_agent`).

    Args:
        args: `${local_rank}` in a string becomes the worker's local rank.
        health_check_server: one of torch's kind that the caller has started.  It is stopped when the job has ended;
            until then an `alive_callback` that can be delegated (torch's `_AliveCallbackProxy`) tells when the
            agent's loop was last seen turning.

    Raises:
        ChildFailedError: workers failed.  Where torch is imported, it is torch's `ChildFailedError`, too.
        SignalException: one of `signals_to_handle` stopped the job; likewise.
        InputError: a `ValueError`: what was asked for cannot be; nothing was started.
        AelasticError: no rendezvous, a sick host, a bug of ours.
    """
    return launch(config, entrypoint, args, os.environ, health_check_server)


def launch(
    config: LaunchConfig,
    entrypoint: str | Callable[..., Any] | None,
    args: list[Any],
    environ: Mapping[str, str],
    health_check_server: Any = None,
) -> dict[int, Any]:
    """As `launch_agent`, with the environment that the workers inherit."""
    try:
        spec, signals = worker_spec(config, entrypoint, args, environ), signals_of(config)
        loop = environ.get("AELASTIC_LOOP", "") or "uvloop"
        if loop not in {"uvloop", "asyncio"}:
            raise InputError(f"AELASTIC_LOOP={loop}: use uvloop or asyncio")
        supervisor = Supervisor(
            spec, health_check_server=None if health_check_server is None else NoHealthCheckServer()
        )
        job = BlockingRun(supervisor, signals, loop_factory(loop))
        _delegate(health_check_server, job.last_seen_alive)
        result = job.run()
    finally:
        if health_check_server is not None:
            health_check_server.stop()
    name = entrypoint_name(entrypoint, args)
    return _conclude(name, result, job.stopped_by, [worker.global_rank for worker in supervisor.workers])


def entrypoint_name(entrypoint: str | Callable[..., Any] | None, args: Sequence[Any]) -> str:
    """What the report calls it, as torch does: the function, the program, or what runs in our own Python."""
    if isinstance(entrypoint, str):
        if entrypoint != sys.executable:
            return entrypoint
        return next((str(arg) for arg in args if not str(arg).startswith("-")), "")
    return getattr(entrypoint, "__name__", repr(entrypoint))


def _delegate(health_check_server: Any, alive: Callable[[], int]) -> None:
    delegate = getattr(getattr(health_check_server, "alive_callback", None), "set_delegate", None)
    if delegate is not None:
        delegate(alive)


def _conclude(name: str, result: RunResult, stopped_by: int | None, ranks: Sequence[int]) -> dict[int, Any]:
    if result.is_failed():
        raise _for_torchs_catchers(ChildFailedError(name, result.failures, result.victims, result.stacks))
    if result.state.name == "SUCCEEDED":
        return {rank: result.return_values.get(rank) for rank in ranks}
    if stopped_by is not None:
        message = f"Process {os.getpid()} got signal: {stopped_by}"
        raise _for_torchs_catchers(SignalException(message, signal.Signals(stopped_by)))
    raise RendezvousClosedError(f"{name} was stopped: {result.reason or 'no reason is known'}")


# Programs that launch with us may catch with torch's classes, and torch's `record` does.
_TORCHS: dict[type[Exception], str] = {
    ChildFailedError: "torch.distributed.elastic.multiprocessing.errors",
    SignalException: "torch.distributed.elastic.multiprocessing.api",
}


def _for_torchs_catchers(error: Exception) -> Exception:
    """The error; where the program has imported torch's class of that name, one that is of this class, too."""
    ours = type(error)
    torchs: type[Exception] | None = getattr(sys.modules.get(_TORCHS[ours]), ours.__name__, None)
    if torchs is None:
        return error
    both: type[Exception] = type(
        ours.__name__,
        (ours, torchs),
        {
            "__module__": ours.__module__,
            "__qualname__": ours.__qualname__,
            "__reduce__": lambda _: (_for_torchs_catchers, (error,)),  # pickle finds no class of this name
        },
    )
    twin = both.__new__(both, *error.args)  # whose `__init__`s do not know of each other
    vars(twin).update(vars(error))
    if isinstance(twin, ChildFailedError) and os.environ.get(ERROR_FILE_VARIABLE):
        _keep_cause(twin)
    return twin


def _keep_cause(failed: ChildFailedError) -> None:
    """Writes the cause to a file that lives as long as the error: torch's `record` reads it there."""
    rank, cause = failed.get_first_failure()
    if os.path.isfile(cause.error_file):
        return
    import tempfile

    try:
        fd, path = tempfile.mkstemp(prefix="aelastic_", suffix=".json")
    except OSError:
        return  # no room; the failure to tell of matters more
    os.close(fd)
    weakref.finalize(failed, _remove, path)
    _Copy(path).write_failure(cause)
    failed.failures[rank] = dataclasses.replace(cause, error_file=path)


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


class _Copy(ErrorHandler):
    def __init__(self, path: str) -> None:
        self._path = path

    def _get_error_file_path(self) -> str:
        return self._path


# The face of `torch.distributed.launch`.


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Reads the command line of `torch.distributed.launch`: torchrun's, and `--use-env`."""
    from aelastic.run import get_args_parser

    parser = get_args_parser()
    (use_env,) = LAUNCH_GROUPS["of torch.distributed.launch"]
    parser.add_argument(*use_env.spellings, action="store_true", help=use_env.text)
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Runs a script that takes `--local-rank`, as `torch.distributed.launch` does (torch: `main` there).

    Raises:
        ChildFailedError: workers failed.
        InputError: what was asked for cannot be.
        SystemExit: the arguments cannot be parsed; argparse has said why.
    """
    from aelastic.run import run

    _warn(stacklevel=3)
    run(parse_args(args))


def _warn(stacklevel: int) -> None:
    import warnings

    warnings.warn(
        "aelastic.launch hands --local-rank to the script, as the deprecated torch.distributed.launch did: "
        "read os.environ['LOCAL_RANK'] in the script, and use python -m aelastic",
        FutureWarning,
        stacklevel=stacklevel,
    )


if __name__ == "__main__":
    from aelastic.cli.main import main_and_exit

    _warn(stacklevel=2)
    main_and_exit(LAUNCH_GROUPS)
