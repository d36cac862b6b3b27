"""Processes of this node alone, started, waited for and closed by a blocking program (torch: `start_processes`).

A supervisor without rendezvous and restarts runs them, on a loop in a thread of its own: all succeed, or the first
failure stops the others.  Their environments are the caller's.  A `PContext` is used from one thread; nothing of it is
left when `close` returns, or when `wait` has given a result.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from aelastic.agent.resources import StartFunction
from aelastic.elastic_agent.hooked_supervisor import SIGNALS, HookedSupervisor
from aelastic.errors import InputError, ProcessFailure
from aelastic.failures.error_file import ERROR_FILE_VARIABLE
from aelastic.group.backend import WorkerStart
from aelastic.group.worker_env import CONTROL_SOCKET_VARIABLE
from aelastic.launcher.elastic_launch import loop_of
from aelastic.launcher.errors import SignalException, catchable_as_torchs
from aelastic.launcher.launch_config import SIGNALS_VARIABLE, as_text, check_entrypoint, numa_fields, signals_in
from aelastic.logs_specs import LogsDest
from aelastic.result import RunResult
from aelastic.spec import WorkerSpec

# After a second request to stop, which kills.
_KILL_TIMEOUT_S = 10.0


class _RanksError(InputError, RuntimeError):
    """Not one entry for each local rank; torch raises a `RuntimeError`."""


@dataclass
class RunProcsResult:
    """How the processes ended, by local rank (torch: `RunProcsResult`)."""

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        return bool(self.failures)


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: Any,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: Any = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
) -> PContext:
    """Starts a process for each entry of `args` and `envs` (torch: `start_processes`).

    Raises:
        InputError: a value that cannot work; nothing was started.  Where torch raises a `RuntimeError`, it is one, too.
    """
    context = PContext(
        name,
        entrypoint,
        args,
        envs,
        logs_specs,
        log_line_prefixes,
        duplicate_stdout_filters,
        duplicate_stderr_filters,
        start_method=start_method,
        numa_options=numa_options,
    )
    context.start()
    return context


class PContext:
    """Processes of this node (torch: `PContext`, and its two subclasses for functions and programs).

    Args:
        name: begins the prefix of teed lines.
        entrypoint: a function, or a program.
        args: by local rank.
        envs: by local rank, on top of this program's environment; each gets its `TORCHELASTIC_ERROR_FILE`.
        logs_specs: a `LogsSpecs`, ours or torch's.
        log_line_prefixes: by local rank; `None` is `[name0]:`.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: Any,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        *,
        start_method: str = "spawn",
        numa_options: Any = None,
    ) -> None:
        self.name, self.entrypoint, self.args, self.envs, self.nprocs = name, entrypoint, args, envs, len(args)
        for what, given in (("args", args), ("envs", envs)):
            if set(given) != set(range(self.nprocs)):
                raise _RanksError(f"{what} has entries for {sorted(given)}: use one for each of 0 to {self.nprocs - 1}")
        environ = dict(os.environ)
        check_entrypoint(entrypoint, start_method, environ)
        self._logs = _Logs(logs_specs, envs, log_line_prefixes or {rank: f"[{name}{rank}]:" for rank in args})
        spec = WorkerSpec(
            entrypoint=entrypoint,
            role=name,
            local_world_size=self.nprocs,
            max_restarts=0,
            start_method=start_method,  # type: ignore[arg-type]  # checked there
            logs_specs=self._logs,
            log_line_prefix_template="${role_name}",  # as `_Logs` has it
            duplicate_stdout_filters=tuple(duplicate_stdout_filters or ()),
            duplicate_stderr_filters=tuple(duplicate_stderr_filters or ()),
            env={**environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # no store is served for them
            **numa_fields(numa_options),
        )
        self._make_loop = loop_of(environ)
        self._signals = signals_in(environ.get(SIGNALS_VARIABLE, SIGNALS))
        self._handlers: dict[int, Any] = {}  # of the program, while ours are in their place
        self._supervisor = HookedSupervisor(spec, self._start_all)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._has_started, self._has_ended = threading.Event(), threading.Event()
        self._pids: dict[int, Any] = {}
        self._result: RunResult | None = None
        self._error: BaseException | None = None

    @property
    def stdouts(self) -> dict[int, str]:
        return self._logs.dest.stdouts

    @property
    def stderrs(self) -> dict[int, str]:
        return self._logs.dest.stderrs

    @property
    def error_files(self) -> dict[int, str]:
        return self._logs.dest.error_files

    def start(self) -> None:
        """Starts the processes; returns when they have been started.

        In the main thread, `signals_to_handle` raise a `SignalException` from then on, as with torch.
        """
        if self._thread is not None:
            raise ValueError("the processes have been started already: make another PContext")
        self._thread = threading.Thread(target=self._run, name=f"processes of {self.name}", daemon=True)
        self._thread.start()
        self._has_started.wait()
        if self._error is not None:
            raise self._error
        if threading.current_thread() is threading.main_thread():
            for signum in self._signals:
                self._handlers[signum] = signal.signal(signum, _raise_signal)

    def pids(self) -> dict[int, int]:
        """The processes, by local rank."""
        return dict(self._pids)

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:  # noqa: ARG002  nothing polls
        """How all ended; `None` if they still run after so many seconds.  Below 0: waits for the end; 0: looks."""
        if not self._has_ended.wait(None if timeout < 0 else timeout):
            return None
        self._finish()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result_of(self._result)

    def close(self, death_sig: int | None = None, timeout: float = 30) -> None:
        """Ends the processes: with a signal, SIGTERM by default, and with SIGKILL after so many seconds, 30 at most."""
        if self._thread is None:
            return
        self._stop(death_sig or signal.SIGTERM)
        if not self._has_ended.wait(timeout):
            self._stop(signal.SIGKILL)
            self._has_ended.wait(_KILL_TIMEOUT_S)
        self._finish()

    # The loop's thread.

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._make_loop) as runner:
                self._loop = runner.get_loop()
                self._result = runner.run(self._supervisor.run())
        except BaseException as error:  # noqa: BLE001  raised again, in the caller's thread
            self._error = error
        finally:
            self._loop = None
            self._has_ended.set()
            self._has_started.set()

    async def _start_all(self, starts: Sequence[WorkerStart], start: StartFunction) -> Mapping[int, Any]:
        ids = await start([self._changed(each) for each in starts])
        self._pids = dict(ids)
        self._has_started.set()
        return ids

    def _changed(self, start: WorkerStart) -> WorkerStart:
        """The process as the caller wants it; by its control socket the agent knows what belongs to it."""
        args = self.args[start.local_rank]
        socket = {CONTROL_SOCKET_VARIABLE: start.env[CONTROL_SOCKET_VARIABLE]}
        return start.replace(
            args=tuple(args if callable(self.entrypoint) else map(as_text, args)),
            env={**os.environ, **socket, **self.envs[start.local_rank]},
        )

    # The caller's thread.

    def _stop(self, signum: int) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._supervisor.stop, signum)
        except RuntimeError:
            pass  # closed at this moment: they have ended

    def _finish(self) -> None:
        while self._handlers:
            signum, handler = self._handlers.popitem()
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        if self._thread is not None and self._has_ended.is_set():
            self._thread.join()

    def _result_of(self, result: RunResult) -> RunProcsResult:
        failures = dict(result.failures)
        if result.state.name == "STOPPED":  # by `close`
            failures = {rank: self._stopped(rank) for rank in result.victims}
        values = dict(result.return_values)
        if not failures and not callable(self.entrypoint):
            values = dict.fromkeys(range(self.nprocs))
        return RunProcsResult(values, failures, dict(self.stdouts), dict(self.stderrs))

    def _stopped(self, rank: int) -> ProcessFailure:
        file = self.error_files.get(rank, "")
        return ProcessFailure(local_rank=rank, pid=self._pids.get(rank, -1), exitcode=-signal.SIGTERM, error_file=file)


class _Logs:
    """The caller's `LogsSpecs`, asked with the caller's environments; says the prefixes as roles, for the template."""

    def __init__(self, logs_specs: Any, envs: Mapping[int, dict[str, str]], prefixes: Mapping[int, str]) -> None:
        self._logs_specs, self._envs, self._prefixes = logs_specs, envs, prefixes
        self.dest = LogsDest()

    def reify(self, envs: Mapping[int, dict[str, str]]) -> Any:
        """As torch's: names the files, and makes their folders."""
        self.dest = self._logs_specs.reify(self._envs)
        for rank, env in envs.items():
            env["ROLE_NAME"] = self._prefixes.get(rank, "")
            env[ERROR_FILE_VARIABLE] = self._envs[rank].get(ERROR_FILE_VARIABLE, "")
        return self.dest


def _raise_signal(signum: int, _: FrameType | None) -> None:
    raise catchable_as_torchs(SignalException(f"Process {os.getpid()} got signal: {signum}", signal.Signals(signum)))
