"""What the user asked for, checked once.

A `WorkerSpec` is complete and valid from the moment it exists: code that holds one need
not check again.  Nothing here reads the environment, a clock or a file; the command
line (`cli.py`) does that and then builds the same spec a library user would write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from os import PathLike, fsencode
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from aelastic.core.fits import Fits, are_ranks, are_texts, in_words, is_int, is_real, is_sequence, optional
from aelastic.errors import InputError
from aelastic.output_patterns import (
    HANG_TIMEOUT_MIN_S,
    HANG_TIMEOUT_REMEDY,
    ExpectedOutput,
    expected_problem,
    progress_problem,
)
from aelastic.rdzv.settings import RendezvousSettings

StartMethod: TypeAlias = Literal["spawn", "fork", "forkserver"]
START_METHODS: tuple[str, ...] = get_args(StartMethod)
# By what of its device's neighbourhood a worker's CPUs are chosen (torch: `torch.numa.binding.AffinityMode`).
NumaBinding: TypeAlias = Literal["node", "socket", "exclusive", "core-complex"]
NUMA_BINDINGS: tuple[str, ...] = get_args(NumaBinding)

# What a fork server imports before it forks workers: modules by name, or what the first workers imported.
Preload: TypeAlias = tuple[str, ...] | Literal["auto"]

# How long workers have that are stopped for a restart: seconds, as for other stops, or, `None`, while that can help.
RestartGrace: TypeAlias = float | Literal["shutdown-timeout"] | None

# What of a worker can be a sign of life: output in its files, CPU use, bytes and calls that it reads and writes.
HangSignal: TypeAlias = Literal["output", "cpu", "io"]
HANG_SIGNALS: tuple[HangSignal, ...] = get_args(HangSignal)
# What becomes of a worker that hangs.
HangAction: TypeAlias = Literal["stop", "report"]
HANG_ACTIONS: tuple[str, ...] = get_args(HangAction)

# Far more than any machine has devices or CPUs.
LOCAL_WORLD_SIZE_MAX = 1 << 16

HANG_STEPS_REMEDY = "use more than 1, times the median step, as in 5x"

# torch's agent waits as long for workers before it kills them (`--shutdown-timeout`).
SHUTDOWN_TIMEOUT_S = 30.0
# torch's `exit_barrier_timeout`: how long a finished node waits for the others.
EXIT_BARRIER_TIMEOUT_S = 300.0


class Std(IntFlag):
    """Which standard streams of a worker (torch: `torch.distributed.elastic.multiprocessing.Std`)."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, text: str) -> Std | dict[int, Std]:
        """Reads `"3"` as every worker's streams, `"0:3,1:2"` as streams by local rank.

        Raises:
            InputError: anything else.
        """
        try:
            if ":" not in text:
                return cls(_stream_number(text))
            pairs = (pair.split(":") for pair in text.split(","))
            return {_rank_number(rank): cls(_stream_number(streams)) for rank, streams in pairs}
        except ValueError:
            raise InputError(
                f"{text!r} is not a choice of streams: use 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
                "or a map by local rank such as 0:3,1:2"
            ) from None


def _stream_number(text: str) -> int:
    if text.strip() not in {"0", "1", "2", "3"}:
        raise ValueError(text)
    return int(text)


def _rank_number(text: str) -> int:
    if (rank := int(text)) < 0:
        raise ValueError(text)
    return rank


def run_id_problem(run_id: str) -> str:
    """What keeps the text from being a run id, which goes into environments, onto boards and into logs."""
    return "use a run id without line breaks and NUL" if set(run_id) & {"\0", "\n", "\r"} else ""


# Of the files that node_exporter's textfile collector reads.
TEXTFILE_SUFFIX = ".prom"
# Of a log file's end: a cause of death is looked for in less.
LOG_BYTES_MIN = 1 << 20


Streams: TypeAlias = Std | Mapping[int, Std]


def streams_of(streams: Streams, local_rank: int) -> Std:
    """The choice that holds for one worker; a rank that a map does not name has `Std.NONE`.

    The flags may be torch's, which are integers just as ours.
    """
    return Std(int(streams if isinstance(streams, int) else streams.get(local_rank, Std.NONE)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Blueprint of the workers that one agent runs (torch: `torch.distributed.elastic.agent.server.WorkerSpec`).

    Args:
        entrypoint: what every worker runs: a command (found on `PATH`), or a function, which runs in a
            child process of `multiprocessing` and whose return value is kept.
        args: the arguments; `${local_rank}` in a string becomes the worker's local rank.
        role: name shared by workers that do the same job; it may be empty.
        local_world_size: workers on this node, at least 1.
        max_restarts: how often the job may restart its workers after a failure.
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
    linger_s: float = 0.0
    metrics_textfile: Path | None = None
    env: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self._check_types()
        # What is as good, as the rest of the program expects it.
        object.__setattr__(self, "args", tuple(self.args))
        for name in ("log_dir", "cache_dir"):
            path: Any = getattr(self, name)
            object.__setattr__(self, name, None if path is None else Path(path))
        if self.preload != "auto":
            object.__setattr__(self, "preload", tuple(self.preload))
        _check(bool(self.entrypoint), "entrypoint is empty: name a program or pass a function")
        _check(self.local_world_size >= 1, f"local_world_size is {self.local_world_size}: at least 1 worker is needed")
        is_possible = self.local_world_size <= LOCAL_WORLD_SIZE_MAX
        limit = f"local_world_size is {self.local_world_size}: use at most {LOCAL_WORLD_SIZE_MAX}"
        _check(is_possible, limit)
        _check(self.max_restarts >= 0, f"max_restarts is {self.max_restarts}: use 0 for no restarts")
        if isinstance(self.entrypoint, str):
            strange = [arg for arg in self.args if not _is_for_exec(arg)]
            _check(not strange, f"args holds {strange[:1]}: a command's arguments are strings without NUL")
        env = self.env or {}
        odd = [name for name in env if not (are_texts([name, env[name]]) and _is_for_exec(name + env[name], name))]
        rule = "the names and values of variables are strings without NUL, and names without ="
        _check(not odd, f"env holds {odd[:1]}: {rule}")  # values may be secret
        _check(self.monitor_interval > 0, f"monitor_interval is {self.monitor_interval}: use seconds above 0")
        for name in ("shutdown_timeout_s", "exit_barrier_timeout_s", "linger_s"):
            value: float = getattr(self, name)
            _check(math.isfinite(value) and value >= 0, f"{name} is {value}: use seconds, 0 or more")
        self._check_restart_grace()
        self._check_meeting_point()
        self._check_hangs()
        size = self.log_max_bytes
        _check(size is None or size >= LOG_BYTES_MIN, f"log_max_bytes is {size}: use at least {LOG_BYTES_MIN}")
        problem = "" if self.progress is None else progress_problem(self.progress)
        _check(not problem, f"progress: {problem}")
        path = self.metrics_textfile
        is_read = path is None or str(path).endswith(TEXTFILE_SUFFIX)
        _check(is_read, f"metrics_textfile is {path}: node_exporter reads files named *{TEXTFILE_SUFFIX} only")
        self._check_preload()
        methods = ", ".join(START_METHODS)
        _check(self.start_method in START_METHODS, f"start_method is {self.start_method!r}: use one of {methods}")
        modes = ", ".join(NUMA_BINDINGS)
        known = self.numa_binding is None or self.numa_binding in NUMA_BINDINGS
        _check(known, f"numa_binding is {self.numa_binding!r}: use one of {modes}")

    def _check_types(self) -> None:
        """Refuses values of a wrong type, which would fail later and in other words."""
        for name, (fits, remedy) in _TYPES.items():
            value = getattr(self, name)
            if not fits(value):
                raise InputError(f"{name} is {in_words(value)}: use {remedy}")

    def _check_restart_grace(self) -> None:
        grace: Any = self.restart_grace
        limit_s = self.shutdown_timeout_s
        if grace is None or grace == "shutdown-timeout":
            return
        is_length = not isinstance(grace, str) and is_real(grace) and math.isfinite(grace) and grace >= 0
        _check(is_length, f'restart_grace is {grace!r}: use seconds, 0 or more, "shutdown-timeout", or None')
        limit = f"use at most shutdown_timeout_s, which is {limit_s:g}"
        _check(float(grace) <= limit_s, f"restart_grace is {grace}: {limit}")

    def _check_meeting_point(self) -> None:
        _check(self.rdzv is None or self.rdzv_handler is None, "rdzv and rdzv_handler are both given: leave one out")
        port, run_id = self.master_port, self.run_id
        _check(port is None or 0 <= port <= 65535, f"master_port is {port}: use 0 to 65535")
        problem = run_id_problem(run_id or "")
        _check(not problem, f"run_id is {run_id!r}: {problem}")
        has_name = bool(run_id) or self.rdzv is None or self.rdzv.max_nodes == 1
        _check(has_name, "run_id is empty: give the job a name, the same on every node")

    def _check_hangs(self) -> None:
        timeout_s, signs, action = self.hang_timeout_s, self.hang_signals, self.hang_action
        is_length = timeout_s is None or HANG_TIMEOUT_MIN_S <= timeout_s < math.inf
        _check(is_length, f"hang_timeout_s is {timeout_s}: {HANG_TIMEOUT_REMEDY}")
        steps = self.hang_timeout_steps
        _check(steps is None or 1 < steps < math.inf, f"hang_timeout_steps is {steps}: {HANG_STEPS_REMEDY}")
        _check(steps is None or timeout_s is None, "hang_timeout_s and hang_timeout_steps are given: leave one out")
        _check(steps is None or self.progress is not None, "hang_timeout_steps has no effect without progress: add it")
        is_choice = 0 < len(signs) == len({*signs} & {*HANG_SIGNALS})
        _check(is_choice, f"hang_signals is {signs!r}: use a tuple of one or more of {', '.join(HANG_SIGNALS)}")
        _check(action in HANG_ACTIONS, f"hang_action is {action!r}: use one of {', '.join(HANG_ACTIONS)}")
        problem = "" if self.expect_output is None else expected_problem(self.expect_output)
        _check(not problem, f"expect_output{problem}")

    def _check_preload(self) -> None:
        if not self.preload:
            return
        for name in () if self.preload == "auto" else self.preload:
            is_name = all(part.isidentifier() for part in str(name).split("."))
            _check(is_name, f"preload names {name!r}, which is not the name of a module: use names such as torch.nn")
        bound = (
            "a library's threads are counted when it is imported, before the worker has its CPUs: leave one of them out"
        )
        _check(self.numa_binding is None, f"preload and numa_binding are both given, but {bound}")
        is_forkable = isinstance(self.entrypoint, str) or self.start_method == "spawn"
        _check(
            is_forkable, f'preload is given with start_method {self.start_method!r}: use "spawn", or leave preload out'
        )

    @property
    def watches_output(self) -> bool:
        """Whether what each worker writes has to be told from what others write."""
        is_searched = self.expect_output is not None or self.progress is not None
        return is_searched or (self.finds_hangs and "output" in self.hang_signals)

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


def _are_streams(value: Any) -> bool:
    by_rank = value if isinstance(value, Mapping) else {0: value}
    return are_ranks(by_rank) and all(is_int(each) and 0 <= each <= Std.ALL for each in by_rank.values())


_INT: Fits = is_int, "an int"
_REAL: Fits = is_real, "a number"
_STR: Fits = (lambda value: isinstance(value, str)), "a str"
_PATH: Fits = (lambda value: isinstance(value, str | PathLike)), "a Path"
_BOOL: Fits = (lambda value: isinstance(value, bool)), "a bool"
_STREAMS: Fits = _are_streams, "a Std, or a dict of them by local rank"
_TEXTS: Fits = are_texts, "a tuple or list of texts"
# What fits each field, and the words for it.  A number may be numpy's, and a path any that the system takes.
_TYPES: Mapping[str, Fits] = {
    "entrypoint": ((lambda value: isinstance(value, str) or callable(value)), "the name of a program, or a function"),
    "args": (is_sequence, "a tuple or list of arguments"),
    "role": _STR,
    "local_world_size": _INT,
    "max_restarts": _INT,
    "monitor_interval": _REAL,
    "rdzv": optional(((lambda value: isinstance(value, RendezvousSettings)), "RendezvousSettings")),
    "rdzv_handler": optional(((lambda value: hasattr(value, "next_rendezvous")), "a torch RendezvousHandler")),
    "numa_fall_back": _BOOL,
    "virtual_local_rank": _BOOL,
    "master_addr": optional(_STR),
    "master_port": optional(_INT),
    "run_id": optional(_STR),
    "redirects": _STREAMS,
    "tee": _STREAMS,
    "log_dir": optional(_PATH),
    "log_max_bytes": optional(_INT),
    "cache_dir": optional(_PATH),
    "preload": ((lambda value: value == "auto" or is_sequence(value)), 'a tuple of module names, or "auto"'),
    "preload_from": _STR,
    "log_line_prefix_template": optional(_STR),
    "local_ranks_filter": optional((are_ranks, "a frozenset of local ranks")),
    "duplicate_stdout_filters": _TEXTS,
    "duplicate_stderr_filters": _TEXTS,
    "event_log_handler": _STR,
    "shutdown_timeout_s": _REAL,
    "exit_barrier_timeout_s": _REAL,
    "progress": optional(_STR),
    "hang_timeout_s": optional(_REAL),
    "hang_timeout_steps": optional(_REAL),
    "linger_s": _REAL,
    "metrics_textfile": optional(_PATH),
    "hang_signals": (is_sequence, f"a tuple of one or more of {', '.join(HANG_SIGNALS)}"),
    "env": optional(((lambda value: isinstance(value, Mapping)), "a dict of variables")),
}


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InputError(otherwise)
