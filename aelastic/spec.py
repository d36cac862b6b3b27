"""The user's settings, checked once.

A `WorkerSpec` is complete and valid from its creation: code that has one need not
check again.  Nothing here reads the environment, a clock or a file; the command
line (`cli`) does that and then builds the same spec that a library user would write.

Settings that one part of the program reads are a class of their own, from which `WorkerSpec` inherits, so that a spec
can be passed to that part.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import fsencode
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aelastic.base.setting import (
    ANY,
    BOOL,
    INT,
    MAPPING,
    NAME,
    NOT_NEGATIVE,
    PATH,
    RANKS,
    REAL,
    REQUIRED,
    SECONDS,
    STR,
    TEXTS,
    Option,
    all_of,
    in_words,
    of_torchrun,
    one_of,
    optional,
    own,
    problem_of,
    setting,
)
from aelastic.base.texts import (
    one_of as read_one_of,
)
from aelastic.base.texts import (
    read_address,
    read_flag,
    read_int,
    read_path,
    read_ranks,
    read_seconds,
    read_signal,
    read_size,
)
from aelastic.diagnose.hangs.options import HangRules
from aelastic.errors import InputError
from aelastic.settings import (
    ARGS,
    DRAIN_SIGNAL,
    ENTRYPOINT,
    EXIT_BARRIER_TIMEOUT_S,
    INTERVAL,
    LOCAL_WORLD_SIZE,
    LOG_BYTES,
    PORT,
    PRELOAD,
    PROGRESS,
    RECOVERIES,
    RENDEZVOUS,
    RENDEZVOUS_HANDLER,
    RESTART_GRACE,
    RESTART_POLICY,
    ROLE,
    RUN_ID,
    SHUTDOWN_TIMEOUT_S,
    START_METHODS,
    STREAMS,
    TEXTFILE,
    Preload,
    Recovery,
    RestartGrace,
    StartMethod,
    Streams,
    read_filters,
    read_grace,
    read_hold,
    read_policy,
    read_preload,
    read_workers,
    read_wrap,
)
from aelastic.settings import Std as Std  # noqa: PLC0414  this is its documented place
from aelastic.workers.options import NUMA_BINDINGS, NumaBinding

if TYPE_CHECKING:
    from aelastic.rdzv.settings import RendezvousSettings


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class RestartRules:
    """What follows from a failure."""

    max_restarts: int = setting(
        3,
        all_of(INT, NOT_NEGATIVE),
        "how many times the job may restart its workers after a failure.  The default is torchelastic's for a spec; "
        "the command line's is 0, as with torchrun.",
        of_torchrun("--max-restarts", read_int, "N",
            "how many times the workers may be restarted after a failure", default="0"),
    )  # fmt: skip
    restart_policy: str | None = setting(
        None,
        RESTART_POLICY,
        "rules for which failures restart the workers, end the job, or are not charged; `None`: "
        "`drained: ignore; same-error: stop; *: restart`",
        own("--restart-policy", read_policy, "RULES",
            "rules for how to react to failures, e.g. 'exit 42: stop; *: restart 5/1h after 1s..5m', or @FILE "
            "(default: a failure that a restart cannot fix ends the job the second time it happens without progress)"),
    )  # fmt: skip
    hold_on_failure_s: float | None = setting(
        None,
        optional(REAL, NOT_NEGATIVE),
        "seconds for which the other workers keep running after a failure, so that you can look at them; `math.inf`: "
        "until you request a restart or a stop; `None`: all workers are stopped at once",
        own("--on-failure", read_hold, "WHAT",
            "stop: stop all workers at once; hold: leave them running until aelastic restart or stop; hold:SECONDS: "
            "for at most that long", default="stop"),
    )  # fmt: skip
    recovery: Recovery = setting(
        "in-place",
        one_of(*RECOVERIES),
        "in-place: when a worker is lost, the others keep their processes and their state, if every worker has opted "
        "in with aelastic.in_place; restart: all workers start again",
        own("--recovery", read_one_of(*RECOVERIES), "HOW"),
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class StopRules:
    """How long workers get to stop, and how their exits are noticed."""

    shutdown_timeout_s: float = setting(
        SHUTDOWN_TIMEOUT_S,
        SECONDS,
        "seconds from the request to stop until workers are killed",
        of_torchrun("--shutdown-timeout", read_seconds, "SECONDS",
            "time from the stop request until workers are killed; also TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    )  # fmt: skip
    restart_grace: RestartGrace = setting(
        None,
        RESTART_GRACE,
        "seconds that workers get to end before a restart, instead of `shutdown_timeout_s`.  `None`: as long as they "
        'write, 5 s while they only compute, 2 s while they do neither; `"shutdown-timeout"`: as for any other stop.',
        own("--restart-grace", read_grace, "SECONDS",
            "time until workers that are stopped for a restart are killed, or shutdown-timeout, as for other stops "
            "(default: as long as they write, 5 s while they only compute, 2 s while they do neither)"),
    )  # fmt: skip
    exit_barrier_timeout_s: float = setting(
        EXIT_BARRIER_TIMEOUT_S, SECONDS, "seconds that a finished node waits for the others"
    )
    monitor_interval: float = setting(
        0.1,
        INTERVAL,
        "seconds between two checks of a worker if the kernel cannot report its exit (no `pidfd_open(2)`); otherwise "
        "nothing is polled",
        of_torchrun("--monitor-interval", read_seconds, "SECONDS",
            "how often to check workers if the kernel cannot report their exit"),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class OutputSettings:
    """Where the output of workers goes."""

    redirects: Streams = setting(
        Std.NONE,
        STREAMS,
        "streams that go only to files, for all workers or by local rank.  A map may name local ranks that only other "
        "nodes have.",
        of_torchrun("-r --redirects", Std.from_str, "STREAMS",
            "streams that go to files: 1 stdout, 2 stderr, 3 both; or by local rank, e.g. 0:3,1:2"),
    )  # fmt: skip
    tee: Streams = setting(
        Std.NONE,
        STREAMS,
        "streams that go to files and to the console; takes precedence over `redirects`",
        of_torchrun("-t --tee", Std.from_str, "STREAMS",
            "streams that go to files and to the console; values as for --redirects"),
    )  # fmt: skip
    log_dir: Path | None = setting(
        None,
        optional(PATH),
        "folder for log files (default: a temporary folder)",
        of_torchrun("--log-dir", str, "DIR"),
    )
    log_max_bytes: int | None = setting(
        None,
        LOG_BYTES,
        "how many bytes to keep, approximately, at the end of each of these files; `None`: everything",
        own("--keep-log-size", read_size, "SIZE",
            "keep only about the last SIZE of each worker log file, e.g. 500M or 2G (default: everything)"),
    )  # fmt: skip
    logs_specs: Any = setting(
        None,
        ANY,  # an object of another package
        "a `LogsSpecs`, torch's or aelastic's, that decides where output goes; takes precedence over `redirects`, "
        "`tee`, `log_dir` and `local_ranks_filter`",
        Option(("--logs-specs",), str, "NAME",
            "class in an installed package that decides where output goes (entry point group torchrun.logs_specs)",
            rule=optional(NAME)),
    )  # fmt: skip
    log_line_prefix_template: str | None = setting(
        None,
        optional(STR),
        "prefix of each teed line on the console, made of `${role_name}`, `${rank}`, `${local_rank}`, `${hostname}` "
        "and `${pid}`; `None`: `[${role_name}${local_rank}]:`",
        of_torchrun("--log-line-prefix-template", str, "TEMPLATE",
            "prefix of each teed line on the console, made of ${role_name}, ${rank}, ${local_rank}, ${hostname} and "
            "${pid}; also TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE (default: [${role_name}${local_rank}]:)",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", default=""),
    )  # fmt: skip
    local_ranks_filter: frozenset[int] | None = setting(
        None,
        RANKS,
        "local ranks whose teed output is shown on the console, e.g. 0,1 (default: all)",
        of_torchrun("--local-ranks-filter", read_ranks, "RANKS", default=""),
    )
    duplicate_stdout_filters: tuple[str, ...] = setting(
        (),
        TEXTS,
        "lines of kept stdout that contain one of these texts are also written to `filtered_stdout.log`",
        of_torchrun("--duplicate-stdout-filters", read_filters, "TEXTS",
            "copy lines of stdout that contain one of these texts to filtered_stdout.log; separate texts with commas "
            "(,, is a comma); stdout must go to files"),
    )  # fmt: skip
    duplicate_stderr_filters: tuple[str, ...] = setting(
        (),
        TEXTS,
        "the same for stderr, to filtered_stderr.log",
        of_torchrun("--duplicate-stderr-filters", read_filters, "TEXTS"),
    )


@dataclass(frozen=True, kw_only=True)
class WorkerSpec(HangRules, RestartRules, StopRules, OutputSettings):
    """Settings of the workers that one agent runs (torch: `torch.distributed.elastic.agent.server.WorkerSpec`).

    The fields are described where they are defined, and in `docs/reference/api.md`.

    Raises:
        InputError: a value is invalid; the message names the field and what to use instead.
    """

    entrypoint: str | Callable[..., Any] = setting(
        REQUIRED,
        ENTRYPOINT,
        "what each worker runs: a program, looked up on `PATH`, or a function, which runs in a `multiprocessing` child "
        "and whose return value is kept",
    )
    args: Sequence[Any] = setting(
        (), ARGS, "the arguments; `${local_rank}` in a string is replaced by the worker's local rank"
    )
    env: Mapping[str, str] | None = setting(
        None, optional(MAPPING), "the workers' base environment; `None`: the agent's own"
    )
    role: str = setting(
        "default",
        ROLE,
        "role of the workers, in their environment and in logs",
        of_torchrun("--role", str, "NAME"),
    )
    local_world_size: int = setting(
        1,
        LOCAL_WORLD_SIZE,
        "number of workers on this node, at least 1",
        of_torchrun("--nproc-per-node", read_workers, "N",
            "workers on this node: a number, cpu (one per usable CPU), gpu or xpu (one per device), or auto (one per "
            "accelerator, or per CPU without accelerators)", rule=ANY),
    )  # fmt: skip
    start_method: StartMethod = setting(
        "spawn",
        one_of(*START_METHODS),
        "how `multiprocessing` starts a function",
        of_torchrun("--start-method", read_one_of(*START_METHODS), "METHOD",
            f"how multiprocessing starts that child: {', '.join(START_METHODS)}"),
    )  # fmt: skip
    numa_binding: NumaBinding | None = setting(
        None,
        optional(STR, one_of(*NUMA_BINDINGS)),
        "how to choose the CPUs of each worker, by its device: one of `NUMA_BINDINGS`; `None`: no binding",
        Option(("--numa-binding",), read_one_of(*NUMA_BINDINGS), "MODE",
            f"bind each worker to CPUs near its GPU: {', '.join(NUMA_BINDINGS)}"),
    )  # fmt: skip
    numa_fall_back: bool = setting(
        False,
        BOOL,
        "if the CPUs of a worker cannot be determined, let it run on any (torch: `should_fall_back_if_binding_fails`)",
    )
    virtual_local_rank: bool = setting(
        False,
        BOOL,
        "show each worker only its own device, and give it LOCAL_RANK 0",
        of_torchrun("--virtual-local-rank", read_flag),
    )
    preload: Preload = setting(
        (),
        PRELOAD,
        "modules that a template process imports once, so that workers start with them imported; auto: those that "
        "the first workers imported; `()`: none",
        of_torchrun("--preload", read_preload, "MODULES",
            "modules to import once, in a template process that workers are forked from, e.g. torch,transformers; "
            "auto: those that the first workers imported; off", default="off"),
    )  # fmt: skip
    preload_from: str = setting(
        "preload", STR, "where `preload` comes from, for messages: the name of an option or a variable"
    )
    cache_dir: Path | None = setting(
        None,
        optional(PATH),
        "folder on this node where workers keep what they compile: kernels, graphs, extensions, bytecode",
        own("--cache-dir", read_path, "DIR"),
    )
    wrap: Sequence[str] = setting(
        (),
        TEXTS,
        "a program and its arguments that start the workers, such as `nsys profile`; `${local_rank}` as in `args`",
        own("--wrap", read_wrap, "COMMAND", "program that starts the workers, e.g. 'nsys profile'"),
    )
    wrap_ranks: frozenset[int] | None = setting(
        None,
        RANKS,
        "global ranks of the workers that `wrap` starts; `None`: all",
        own("--wrap-ranks", read_ranks, "RANKS", "global ranks that --wrap applies to, e.g. 0,1 (default: all)"),
    )
    rdzv: RendezvousSettings | None = setting(
        None,
        RENDEZVOUS,
        "where and how the agents of several nodes meet; `None`: a single node, which needs no endpoint",
    )
    rdzv_handler: Any = setting(
        None,
        RENDEZVOUS_HANDLER,
        "a torch `RendezvousHandler` to use instead of `rdzv` (torch: `WorkerSpec.rdzv_handler`)",
    )
    master_addr: str | None = setting(
        None,
        optional(STR),
        "the workers' `MASTER_ADDR`; `None`: an address of the node of rank 0.  With `rdzv`, only `static` uses it.",
        of_torchrun("--master-addr", read_address, "HOST",
            "static: address of rank 0, and MASTER_ADDR", default="127.0.0.1"),
    )  # fmt: skip
    master_port: int | None = setting(
        None,
        PORT,
        "the workers' `MASTER_PORT`, used in the same cases; `None` or 0 picks a free port",
        of_torchrun("--master-port", read_int, "PORT",
            "static: port of rank 0, and MASTER_PORT (default: 29500; a single node picks a free port and a run id)"),
    )  # fmt: skip
    run_id: str | None = setting(
        None,
        RUN_ID,
        "the job's name, the same on all nodes; `None` picks a random name, for a single node",
        of_torchrun("--rdzv-id", str, "ID",
            "run id: the job's name, the same on every node and different from every other job's", default="none"),
    )  # fmt: skip
    drain_signal: int = setting(
        signal.SIGTERM,
        DRAIN_SIGNAL,
        "signal sent on a drain to workers that have a handler for it, if no rank calls aelastic.notice.due",
        own("--drain-signal", read_signal, "SIGNAL", default="SIGTERM"),
    )
    notice_file: Path | None = setting(
        None,
        optional(PATH),
        "drain this node when PATH appears (it may hold the seconds that are left); deleting the file cancels the "
        "drain",
        own("--notice-file", read_path, "PATH"),
    )
    notice_command: str | None = setting(
        None,
        optional(NAME),
        "program that announces interruptions, one per line on stdout: 'drain 110 spot' or 'cancel'",
        own("--notice-command", str, "COMMAND"),
    )
    health_check: str | None = setting(
        None,
        optional(NAME),
        "command to run before each join: exit code 2 keeps this node out, any other does not; builtin: check the "
        "kernel log and the free space of this host",
        own("--health-check", str, "COMMAND"),
    )
    progress: str | None = setting(
        None,
        PROGRESS,
        "how the workers' output shows the step: the first group is the step, the second the last step, "
        r"e.g. 'step (\d+)/(\d+)'",
        of_torchrun("--progress", str, "REGEX"),
    )
    event_log_handler: str = setting(
        "null",
        NAME,
        "handler of torchelastic's events: null, console, or one that a program registers in torch's events.handlers",
        of_torchrun("--event-log-handler", str, "NAME"),
    )
    linger_s: float = setting(
        0.0,
        SECONDS,
        "how long the health server stays after the run, until /metrics has been read",
        own("--linger", read_seconds, "SECONDS"),
    )
    metrics_textfile: Path | None = setting(
        None,
        TEXTFILE,
        "write the metrics to a file (*.prom) for node_exporter, every 15 s and at the end",
        own("--metrics-textfile", read_path, "PATH"),
    )

    def __post_init__(self) -> None:
        if problem := problem_of(self):
            raise InputError(problem)
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
