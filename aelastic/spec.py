"""The user's settings, checked once.

A `WorkerSpec` is complete and valid from its creation: code that has one need not
check again.  Nothing here reads the environment, a clock or a file; the command
line (`cli`) does that and then builds the same spec that a library user would write.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import fsencode
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aelastic.diagnose.hangs.options import HANG_SIGNALS, ExpectedOutput, HangAction, HangSignal
from aelastic.errors import InputError
from aelastic.settings import (
    EXIT_BARRIER_TIMEOUT_S,
    RULES,
    SHUTDOWN_TIMEOUT_S,
    Preload,
    Recovery,
    RestartGrace,
    StartMethod,
    Streams,
    in_words,
)
from aelastic.settings import Std as Std  # noqa: PLC0414  this is its documented place
from aelastic.workers.options import NumaBinding

if TYPE_CHECKING:
    from aelastic.rdzv.settings import RendezvousSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Settings of the workers that one agent runs (torch: `torch.distributed.elastic.agent.server.WorkerSpec`).

    Args:
        entrypoint: what each worker runs: a program, looked up on `PATH`, or a function, which runs in a
            `multiprocessing` child and whose return value is kept.
        args: the arguments; `${local_rank}` in a string is replaced by the worker's local rank.
        role: the workers' role name; may be empty.
        local_world_size: number of workers on this node, at least 1.
        max_restarts: how often the job may restart its workers after a failure.  The default is torchelastic's for a
            spec; the command line's is 0, as with torchrun.
        restart_policy: rules for which failures restart the workers, end the job, or are not charged, as in
            `--restart-policy`; `None`: `drained: ignore; same-error: stop; *: restart`.
        monitor_interval: seconds between two checks of a worker if the kernel cannot report its exit (no
            `pidfd_open(2)`); otherwise nothing is polled.
        rdzv: where and how the agents of several nodes meet; `None`: a single node, which needs no endpoint.
        rdzv_handler: a torch `RendezvousHandler` to use instead of `rdzv` (torch: `WorkerSpec.rdzv_handler`).
        master_addr: the workers' `MASTER_ADDR`; `None`: an address of the node of rank 0.  With `rdzv`, only `static`
            uses it.
        master_port: the workers' `MASTER_PORT`, used in the same cases; `None` or 0 picks a free port.
        run_id: the job's name, the same on all nodes; `None` picks a random name, for a single node.
        redirects: streams that go only to files, for all workers or by local rank.  A map may name local ranks that
            only other nodes have.
        tee: streams that go to files and to the console; takes precedence over `redirects`.
        log_dir: folder for these files; `None`: a temporary folder.
        log_max_bytes: how many bytes to keep, approximately, at the end of each of these files; `None`: everything.
        logs_specs: a `LogsSpecs`, torch's or aelastic's, that decides where output goes; takes precedence over
            `redirects`, `tee`, `log_dir` and `local_ranks_filter`.
        log_line_prefix_template: prefix of teed lines, which may contain `${role_name}`, `${rank}`, `${local_rank}`,
            `${hostname}` and `${pid}`; `None`: `[${role_name}${local_rank}]:`.
        local_ranks_filter: local ranks whose teed output appears on the console; `None`: all.
        duplicate_stdout_filters: lines of kept stdout that contain one of these texts are also written to
            `filtered_stdout.log`.
        duplicate_stderr_filters: the same for stderr.
        numa_binding: how to choose the CPUs of each worker, by its device: one of `NUMA_BINDINGS`; `None`: no binding.
        numa_fall_back: if the CPUs of a worker cannot be determined, let it run on any (torch:
            `should_fall_back_if_binding_fails`).
        virtual_local_rank: each worker sees only its own device, and `LOCAL_RANK` 0.
        event_log_handler: name of the handler of torchelastic's events, from torch's `events.handlers`.
        start_method: how `multiprocessing` starts a function.
        cache_dir: folder on this node where workers keep compiled code (kernels, graphs, extensions, byte code);
            `None`: none.
        preload: modules that a template process imports once, so that workers start with them imported; `"auto"`:
            those that the first workers imported; `()`: none.
        preload_from: where `preload` comes from, for messages: the name of an option or a variable.
        shutdown_timeout_s: seconds from the request to stop until workers are killed.
        restart_grace: seconds that workers get to end before a restart, instead of `shutdown_timeout_s`.  `None`: as
            long as they write, 5 s while they only compute, 2 s while they do neither; `"shutdown-timeout"`: as for any
            other stop.
        exit_barrier_timeout_s: seconds that a finished node waits for the others.
        progress: regular expression that finds progress in the workers' output; the first group is the step, an
            optional second group the last step.  `None`: off.
        hang_timeout_s: seconds without a sign of life after which a worker is considered hung; `None`: off.
        hang_timeout_steps: the same as a multiple of the median step time, between 30 and 900 s; without a limit before
            the first step of each attempt.  Workers that recover in place tell their steps, `progress` finds those of
            others.
        hang_signals: the signs of life to look for: some of `HANG_SIGNALS`.
        hang_action: `"stop"`: a worker that hangs or lacks expected output fails and is stopped; `"report"`: it is only
            reported.
        expect_output: output that workers must write, or they are considered hung; `None`: off.
        drain_signal: signal for workers with a handler for it, when a drain begins and no rank has called `notice.due`.
        notice_file: file that announces that this node will go away; it may contain the seconds left and a reason.
            `None`: off.
        notice_command: program that announces interruptions, one per line on stdout, such as `drain 110 spot` or
            `cancel`; `None`: off.
        health_check: shell command that runs before this node joins a round.  Exit code 2 keeps the node out until a
            later check succeeds, 0 means healthy, and any other code is ignored with a warning.  `"builtin"`: only the
            built-in checks of the host; `None`: off.
        hold_on_failure_s: seconds for which the other workers keep running after a failure, so that you can look at
            them; `math.inf`: until you request a restart or a stop; `None`: all workers are stopped at once.
        recovery: `"in-place"`: when a worker is lost, the others keep their processes, if every worker has opted in
            with `aelastic.in_place`; `"restart"`: all processes end and start again.
        wrap: a program and its arguments that start the workers, such as `nsys profile`; `${local_rank}` as in `args`.
        wrap_ranks: global ranks of the workers that `wrap` starts; `None`: all.
        linger_s: seconds that the health server waits after the run, unless it was asked to stop, for a scraper to read
            the final metrics.
        metrics_textfile: a file `*.prom` to write metrics to, for node_exporter's textfile collector; `None`: off.
        env: the workers' base environment; `None`: the agent's own.

    Raises:
        InputError: a value is invalid; the message names the field and what to use instead.
    """

    entrypoint: str | Callable[..., Any]
    args: Sequence[Any] = ()
    role: str = "default"
    local_world_size: int = 1
    max_restarts: int = 3
    restart_policy: str | None = None
    monitor_interval: float = 0.1
    rdzv: RendezvousSettings | None = None
    rdzv_handler: Any = None
    master_addr: str | None = None
    master_port: int | None = None
    run_id: str | None = None
    redirects: Streams = Std.NONE
    tee: Streams = Std.NONE
    log_dir: Path | None = None
    log_max_bytes: int | None = None
    logs_specs: Any = None
    log_line_prefix_template: str | None = None
    local_ranks_filter: frozenset[int] | None = None
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    numa_binding: NumaBinding | None = None
    numa_fall_back: bool = False
    virtual_local_rank: bool = False
    event_log_handler: str = "null"
    start_method: StartMethod = "spawn"
    cache_dir: Path | None = None
    preload: Preload = ()
    preload_from: str = "preload"
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S
    restart_grace: RestartGrace = None
    exit_barrier_timeout_s: float = EXIT_BARRIER_TIMEOUT_S
    progress: str | None = None
    hang_timeout_s: float | None = None
    hang_timeout_steps: float | None = None
    hang_signals: tuple[HangSignal, ...] = HANG_SIGNALS
    hang_action: HangAction = "stop"
    expect_output: ExpectedOutput | None = None
    drain_signal: int = signal.SIGTERM
    notice_file: Path | None = None
    notice_command: str | None = None
    health_check: str | None = None
    hold_on_failure_s: float | None = None
    recovery: Recovery = "in-place"
    wrap: Sequence[str] = ()
    wrap_ranks: frozenset[int] | None = None
    linger_s: float = 0.0
    metrics_textfile: Path | None = None
    env: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            if remedy := rule(value := getattr(self, name)):
                raise InputError(f"{name} is {in_words(value)}: {remedy}")
        # Converts equivalent values to the types that the rest of the program expects.
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "wrap", tuple(self.wrap))
        for name in ("log_dir", "cache_dir", "notice_file"):
            path: Any = getattr(self, name)
            object.__setattr__(self, name, None if path is None else Path(path))
        if self.preload != "auto":
            object.__setattr__(self, "preload", tuple(self.preload))
        if isinstance(self.entrypoint, str):
            for place, arg in enumerate(self.args):
                what = f"args[{place}] is {in_words(arg)} ({type(arg).__name__})"
                _check(_is_for_exec(arg), f"{what}: every argument of a program must be a str without NUL")
        env: Mapping[Any, Any] = self.env or {}
        for name, value in env.items():  # values may be secret
            is_name = isinstance(name, str) and _is_for_exec(name, name)
            _check(is_name, f"env has the name {in_words(name)}: use a str without NUL and =")
            is_value = isinstance(value, str) and _is_for_exec(value)
            _check(is_value, f"env[{name!r}] is of type {type(value).__name__}: every value must be a str without NUL")
        self._check_together()

    def _check_together(self) -> None:
        """Checks fields that depend on each other."""
        grace, limit_s, method = self.restart_grace, self.shutdown_timeout_s, self.start_method
        is_program, has_steps = isinstance(self.entrypoint, str), self.hang_timeout_steps is not None
        has_others = self.rdzv is not None and self.rdzv.max_nodes > 1
        bound = "libraries count CPUs when they are imported, before the worker is bound: leave one of them out"
        for is_wrong, words in (
            (grace is not None and not isinstance(grace, str) and grace > limit_s,
             f"restart_grace is {grace}: use at most shutdown_timeout_s, which is {limit_s:g}"),
            (self.rdzv is not None and self.rdzv_handler is not None,
             "rdzv and rdzv_handler are both given: leave one out"),
            (has_others and not self.run_id, "run_id is empty: give the job a name, the same on every node"),
            (has_steps and self.hang_timeout_s is not None,
             "hang_timeout_s and hang_timeout_steps are given: leave one out"),
            (has_steps and self.progress is None and self.recovery != "in-place",
             "hang_timeout_steps has no effect without progress: add it"),
            (self.wrap and not is_program, "wrap is given with a function: only programs are wrapped"),
            (self.wrap_ranks is not None and not self.wrap, "wrap_ranks has no effect without wrap: add it"),
            (self.preload and self.numa_binding is not None,
             f"preload and numa_binding are both given, but {bound}"),
            (self.preload and not is_program and method != "spawn",
             f'preload is given with start_method {method!r}: use "spawn", or leave preload out'),
        ):  # fmt: skip
            _check(not is_wrong, words)

    @property
    def watches_output(self) -> bool:
        """Whether the agent needs to know which worker wrote what."""
        is_searched = self.expect_output is not None or self.progress is not None
        return is_searched or (self.finds_hangs and "output" in self.hang_signals)

    def wraps(self, rank: int) -> bool:
        """Whether `wrap` starts the worker with this global rank."""
        return self.wrap_ranks is None or rank in self.wrap_ranks

    @property
    def finds_hangs(self) -> bool:
        """Whether hang detection is on."""
        return self.hang_timeout_s is not None or self.hang_timeout_steps is not None

    def get_entrypoint_name(self) -> str:
        """The function's qualified name, or the program's path (torch: `get_entrypoint_name`)."""
        if isinstance(self.entrypoint, str):
            return self.entrypoint
        return getattr(self.entrypoint, "__qualname__", repr(self.entrypoint))


def _is_for_exec(value: Any, name: str = "") -> bool:
    """Whether the system takes it among a program's arguments, or as a variable of this name."""
    try:
        return "=" not in name and b"\0" not in fsencode(value)
    except (TypeError, UnicodeEncodeError):
        return False


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InputError(otherwise)
