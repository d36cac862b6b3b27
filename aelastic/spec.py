"""What the user asked for, checked once.

A `WorkerSpec` is complete and valid from the moment it exists: whoever holds one need
not check again.  Nothing here reads the environment, a clock or a file; the command
line (`cli.py`) does that and then builds the same spec a library user would write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntFlag
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from aelastic.errors import InputError

StartMethod: TypeAlias = Literal["spawn", "fork", "forkserver"]
START_METHODS: tuple[str, ...] = get_args(StartMethod)

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
            return {int(rank): cls(_stream_number(streams)) for rank, streams in pairs}
        except ValueError:
            raise InputError(
                f"{text!r} is not a choice of streams: use 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
                "or a map by local rank such as 0:3,1:2"
            ) from None


def _stream_number(text: str) -> int:
    if text.strip() not in {"0", "1", "2", "3"}:
        raise ValueError(text)
    return int(text)


Streams: TypeAlias = Std | Mapping[int, Std]


def streams_of(streams: Streams, local_rank: int) -> Std:
    """The choice that holds for one worker; a rank that a map does not name has `Std.NONE`."""
    return streams if isinstance(streams, Std) else streams.get(local_rank, Std.NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Blueprint of the workers that one agent runs (torch: `torch.distributed.elastic.agent.server.WorkerSpec`).

    Args:
        entrypoint: what every worker runs: a command (found on `PATH`), or a function, which runs in a
            child process of `multiprocessing` and whose return value is kept.
        args: the arguments; `${local_rank}` in a string becomes the worker's local rank.
        role: name shared by workers that do the same job.
        local_world_size: workers on this node, at least 1.
        max_restarts: how often the job may restart its workers after a failure.
        monitor_interval: seconds between two looks at a worker where the kernel cannot tell of its
            exit (no `pidfd_open(2)`); elsewhere exits are events and nobody looks.
        master_addr: what workers get as `MASTER_ADDR`.
        master_port: what workers get as `MASTER_PORT`; `None` or 0 picks a free one.
        run_id: the job's name; `None` picks a random one.
        redirects: streams that go to files only.
        tee: streams that go to files and to the console; wins over `redirects`.
        log_dir: folder for those files; `None` picks a temporary one.
        start_method: how `multiprocessing` starts a function.
        shutdown_timeout_s: seconds from the request to stop until workers are killed.
        exit_barrier_timeout_s: seconds a finished node waits for the others.
        env: the environment workers start from; `None` is the agent's own.

    Raises:
        InputError: a value that cannot work; says which and what to do.
    """

    entrypoint: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    role: str = "default"
    local_world_size: int = 1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_addr: str | None = None
    master_port: int | None = None
    run_id: str | None = None
    redirects: Streams = Std.NONE
    tee: Streams = Std.NONE
    log_dir: Path | None = None
    start_method: StartMethod = "spawn"
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S
    exit_barrier_timeout_s: float = EXIT_BARRIER_TIMEOUT_S
    env: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        _check(bool(self.entrypoint), "entrypoint is empty: name a program or pass a function")
        _check(self.local_world_size >= 1, f"local_world_size is {self.local_world_size}: at least 1 worker is needed")
        _check(self.max_restarts >= 0, f"max_restarts is {self.max_restarts}: use 0 for no restarts")
        _check(not isinstance(self.args, str), f"args is the string {self.args!r}: use a tuple of arguments")
        if isinstance(self.entrypoint, str):
            strange = [arg for arg in self.args if not isinstance(arg, str | bytes | PathLike) or "\0" in str(arg)]
            _check(not strange, f"args holds {strange[:1]}: a command's arguments are strings without NUL")
        _check(bool(self.role), "role is empty: give the workers a name")
        _check(self.monitor_interval > 0, f"monitor_interval is {self.monitor_interval}: use seconds above 0")
        for name in ("shutdown_timeout_s", "exit_barrier_timeout_s"):
            value: float = getattr(self, name)
            _check(math.isfinite(value) and value >= 0, f"{name} is {value}: use seconds, 0 or more")
        port = self.master_port
        _check(port is None or 0 <= port <= 65535, f"master_port is {port}: use 0 to 65535")
        methods = ", ".join(START_METHODS)
        _check(self.start_method in START_METHODS, f"start_method is {self.start_method!r}: use one of {methods}")
        for name in ("redirects", "tee"):
            self._check_ranks(name, getattr(self, name))

    def _check_ranks(self, name: str, streams: Streams) -> None:
        if not isinstance(streams, Std):
            strange = [rank for rank in streams if not 0 <= rank < self.local_world_size]
            last = self.local_world_size - 1
            _check(not strange, f"{name} names local rank {', '.join(map(str, strange))}: ranks here are 0 to {last}")

    def get_entrypoint_name(self) -> str:
        """The function's qualified name, or the program's path."""
        if isinstance(self.entrypoint, str):
            return self.entrypoint
        return getattr(self.entrypoint, "__qualname__", repr(self.entrypoint))


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InputError(otherwise)
