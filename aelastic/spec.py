"""What the user asked for, checked once.

A `WorkerSpec` is complete and valid from the moment it exists: code that holds one need
not check again.  Nothing here reads the environment, a clock or a file; the command
line (`cli`) does that and then builds the same spec a library user would write.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import fsencode
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aelastic.errors import InputError
from aelastic.settings import (
    EXIT_BARRIER_TIMEOUT_S,
    HANG_SIGNALS,
    RULES,
    SHUTDOWN_TIMEOUT_S,
    ExpectedOutput,
    HangAction,
    HangSignal,
    NumaBinding,
    Preload,
    RestartGrace,
    StartMethod,
    Streams,
    in_words,
)
from aelastic.settings import Std as Std  # noqa: PLC0414  this is its documented place

if TYPE_CHECKING:
    from aelastic.rdzv.settings import RendezvousSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Blueprint of the workers that one agent runs (torch: `torch.distributed.elastic.agent.server.WorkerSpec`).

    Args:
        entrypoint: what every worker runs: a command (found on `PATH`), or a function, which runs in a
            child process of `multiprocessing` and whose return value is kept.
        args: the arguments; `${local_rank}` in a string becomes the worker's local rank.
        role: name shared by workers that do the same job; it may be empty.
        local_world_size: workers on this node, at least 1.
        max_restarts: how often the job may restart its workers after a failure.  3 is torchelastic's default for a
            spec; on the command line it is 0, as with torchrun.
        restart_policy: rules that say which failures are restarted, stopped, or not charged, as `--restart-policy` has
            them; `None`: `drained: ignore; same-error: stop; *: restart`.
        monitor_interval: seconds between two looks at a worker where the kernel cannot tell of its
            exit (no `pidfd_open(2)`); elsewhere exits are events, and nothing polls.
        rdzv: where and how the agents of several nodes meet; `None` is one node on its own, whose coordinator
            is in this process.
        rdzv_handler: a torch `RendezvousHandler` to meet through instead, as torchelastic's spec has it.
        master_addr: what workers get as `MASTER_ADDR`, with `rdzv_handler`, too; with `rdzv` only `static` uses it, the
            others find one.
        master_port: what workers get as `MASTER_PORT`, as above; `None` or 0 picks a free one.
        run_id: the job's name, the same on all of its nodes; `None` picks a random one, for one node.
        redirects: streams that go to files only; a map may name ranks that other nodes have and this one has not.
        tee: streams that go to files and to the console; wins over `redirects`.
        log_dir: folder for those files; `None` picks a temporary one.
        log_max_bytes: of each of those files, about so much of the end is kept; `None`: all.
        logs_specs: a torch-compatible `LogsSpecs` that says where output goes; before `redirects`, `tee`, `log_dir`
            and `local_ranks_filter`.
        log_line_prefix_template: what teed lines begin with, of `${role_name}`, `${rank}`, `${local_rank}`,
            `${hostname}` and `${pid}`; `None` is `[${role_name}${local_rank}]:`.
        local_ranks_filter: local ranks whose teed output the console shows; `None` is all.
        duplicate_stdout_filters: lines of kept stdout with one of these texts in them go to `filtered_stdout.log`, too.
        duplicate_stderr_filters: the same for stderr.
        numa_binding: the CPUs each worker may run on, by its device: one of `NUMA_BINDINGS`; `None` is any.
        numa_fall_back: a worker whose CPUs are not found out runs on any (torch: `should_fall_back_if_binding_fails`).
        virtual_local_rank: each worker sees one device, its own, and `LOCAL_RANK` 0.
        event_log_handler: takes torchelastic's events: a name of torch's `events.handlers`.
        start_method: how `multiprocessing` starts a function.
        cache_dir: folder of this node for what workers compile (kernels, graphs, extensions, byte code); `None`: none.
        preload: modules that a fork server imports once, so that workers start without importing them; `()`: none.
        preload_from: what `preload` was read from, as messages name it: an option, an environment variable.
        shutdown_timeout_s: seconds from the request to stop until workers are killed.
        restart_grace: seconds that workers have to end when they are stopped for a restart, instead of
            `shutdown_timeout_s`; `None`: as long as they write, 5 s while they only compute, 2 s while they do neither;
            `"shutdown-timeout"`: as for any other stop.
        exit_barrier_timeout_s: seconds a finished node waits for the others.
        progress: what in workers' output says how far they are: a regular expression whose first group is the step, and
            whose second, if there is one, the last step; `None`: nothing.
        hang_timeout_s: seconds without a sign of life after which a worker counts as hung; `None`: off.
        hang_timeout_steps: the same in place of seconds, as a multiple of the median step that `progress` tells: 30 to
            900 s, and no limit before the first step of each attempt.
        hang_signals: the signs that count: some of `HANG_SIGNALS`.
        hang_action: a worker that hangs, or does not write what is expected, fails and is stopped, or (`report`) is
            only reported.
        expect_output: what workers have to write, or they count as hung; `None`: nothing.
        drain_signal: what workers that handle it get where an interruption is announced, and no rank has called
            `notice.due`.
        notice_file: a file that says that this node is about to go: seconds, and why; `None`: none.
        notice_command: a program that writes lines such as `drain 110 spot`, or `cancel`; `None`: none.
        health_check: a program, run by a shell before this node joins a round: exit code 2 keeps it out until it is
            fit; 0 is fit, and anything else could not tell; `"builtin"`: what the host tells alone; `None`: nothing.
        hold_on_failure_s: seconds for which nothing is stopped once a worker has failed, so that somebody can look at
            the others; `math.inf`: until somebody asks for a restart or a stop; `None`: all are stopped at once.
        wrap: a program, and its arguments, that starts workers (`nsys profile`); `${local_rank}` as in `args`.
        wrap_ranks: global ranks of the workers that it starts; `None` is all.
        linger_s: seconds that the health server waits, at the end of a run that was not asked to stop, for a scraper to
            read how it ended.
        metrics_textfile: a file, `*.prom`, for the metrics, for node_exporter's textfile collector.
        env: the environment workers start from; `None` is the agent's own.

    Raises:
        InputError: a value that cannot work; says which and what to do.
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
    wrap: Sequence[str] = ()
    wrap_ranks: frozenset[int] | None = None
    linger_s: float = 0.0
    metrics_textfile: Path | None = None
    env: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            if remedy := rule(value := getattr(self, name)):
                raise InputError(f"{name} is {in_words(value)}: {remedy}")
        # What is as good, as the rest of the program expects it.
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
            _check(is_value, f"env[{name!r}] is a {type(value).__name__}: every value must be a str without NUL")
        self._check_together()

    def _check_together(self) -> None:
        """Checks fields that have to go with each other."""
        grace, limit_s, method = self.restart_grace, self.shutdown_timeout_s, self.start_method
        is_program, has_steps = isinstance(self.entrypoint, str), self.hang_timeout_steps is not None
        has_others = self.rdzv is not None and self.rdzv.max_nodes > 1
        bound = (
            "a library's threads are counted when it is imported, before the worker has its CPUs: leave one of them out"
        )
        for is_wrong, words in (
            (grace is not None and not isinstance(grace, str) and grace > limit_s,
             f"restart_grace is {grace}: use at most shutdown_timeout_s, which is {limit_s:g}"),
            (self.rdzv is not None and self.rdzv_handler is not None,
             "rdzv and rdzv_handler are both given: leave one out"),
            (has_others and not self.run_id, "run_id is empty: give the job a name, the same on every node"),
            (has_steps and self.hang_timeout_s is not None,
             "hang_timeout_s and hang_timeout_steps are given: leave one out"),
            (has_steps and self.progress is None, "hang_timeout_steps has no effect without progress: add it"),
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
        """Whether what each worker writes has to be told from what others write."""
        is_searched = self.expect_output is not None or self.progress is not None
        return is_searched or (self.finds_hangs and "output" in self.hang_signals)

    def wraps(self, rank: int) -> bool:
        """Whether the worker of that global rank is started by `wrap`."""
        return self.wrap_ranks is None or rank in self.wrap_ranks

    @property
    def finds_hangs(self) -> bool:
        """Whether a worker that shows no sign of life for some time counts as hung."""
        return self.hang_timeout_s is not None or self.hang_timeout_steps is not None

    def get_entrypoint_name(self) -> str:
        """The function's qualified name, or the program's path."""
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
