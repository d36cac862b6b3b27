"""What the fields of a `WorkerSpec` may be: their types and constants, their rules, and the readers of their texts."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping
from enum import IntFlag
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from aelastic.base.setting import (
    INT,
    NAME_MAX,
    PATH,
    REAL,
    STR,
    all_of,
    are_ranks,
    is_int,
    is_real,
    is_sequence,
    optional,
    rule,
)
from aelastic.base.texts import keep, read_as, read_seconds
from aelastic.diagnose.hangs.options import pattern_problem
from aelastic.errors import InputError

# The types of a spec.

StartMethod: TypeAlias = Literal["spawn", "fork", "forkserver"]
START_METHODS: tuple[str, ...] = get_args(StartMethod)

# The modules that a fork server imports before it forks workers: names, or what the first workers imported.
Preload: TypeAlias = tuple[str, ...] | Literal["auto"]

# How long workers have to stop for a restart: seconds, as for other stops, or as long as that can help (`None`).
RestartGrace: TypeAlias = float | Literal["shutdown-timeout"] | None

# What happens to the other workers when one is lost.
Recovery: TypeAlias = Literal["in-place", "restart"]
RECOVERIES: tuple[str, ...] = get_args(Recovery)
PORT_MAX = 65535  # ports have 16 bits: tcp(7)
# Far more than the devices or CPUs of any machine.
LOCAL_WORLD_SIZE_MAX = 1 << 16

# torch's agent waits equally long for workers before it kills them (`--shutdown-timeout`).
SHUTDOWN_TIMEOUT_S = 30.0
# torch's `exit_barrier_timeout`: how long a finished node waits for the others.
EXIT_BARRIER_TIMEOUT_S = 300.0

# The suffix of files that node_exporter's textfile collector reads.
TEXTFILE_SUFFIX = ".prom"
# The minimum to keep of a log file's end: the search for a cause of death needs less.
LOG_BYTES_MIN = 1 << 20


# Standard streams.

_NUMBERS = ("0", "1", "2", "3")


class Std(IntFlag):
    """Standard streams of a worker (torch: `torch.distributed.elastic.multiprocessing.Std`)."""

    NONE = 0  # no stream
    OUT = 1  # stdout
    ERR = 2  # stderr
    ALL = OUT | ERR  # both

    @classmethod
    def from_str(cls, text: str) -> Std | dict[int, Std]:
        """Parses `"3"` into streams of all workers, `"0:3,1:2"` into streams by local rank (torch: `Std.from_str`).

        Raises:
            InputError: the text has neither form.
        """
        try:
            if ":" not in text:
                return cls(_NUMBERS.index(text.strip()))
            pairs = (pair.split(":") for pair in text.split(","))
            return {_rank_number(rank): cls(_NUMBERS.index(streams.strip())) for rank, streams in pairs}
        except ValueError:
            raise InputError(
                f"{text!r} is not a choice of streams: use 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
                "or a map by local rank such as 0:3,1:2"
            ) from None


def _rank_number(text: str) -> int:
    if (rank := int(text)) < 0:
        raise ValueError(text)
    return rank


Streams: TypeAlias = Std | Mapping[int, Std]


def streams_of(streams: Streams, local_rank: int) -> Std:
    """Returns the streams of one worker; `Std.NONE` for a rank that a map does not name.

    The flags may be torch's, which are integers like ours.
    """
    return Std(int(streams if isinstance(streams, int) else streams.get(local_rank, Std.NONE)))


# Rules, by field.

ENTRYPOINT = all_of(
    rule(lambda value: isinstance(value, str) or callable(value), "use the name of a program, or a function"),
    rule(bool, "name a program or pass a function"),
)
ARGS = rule(is_sequence, "use a tuple or list of arguments")
ROLE = all_of(STR, rule(lambda role: len(role) <= NAME_MAX, f"use {NAME_MAX} characters at most"))
LOCAL_WORLD_SIZE = all_of(
    INT,
    rule(lambda value: value >= 1, "at least 1 worker is needed"),
    rule(lambda value: value <= LOCAL_WORLD_SIZE_MAX, f"use at most {LOCAL_WORLD_SIZE_MAX}"),
)
INTERVAL = all_of(REAL, rule(lambda value: 0 < value < math.inf, "use seconds above 0"))
RENDEZVOUS_HANDLER = optional(rule(lambda value: hasattr(value, "next_rendezvous"), "use a torch RendezvousHandler"))
PORT = optional(INT, rule(lambda port: 0 <= port <= PORT_MAX, f"use a port from 0 (a free one) to {PORT_MAX}"))
# It is used in environments, stores and logs.
RUN_ID = optional(STR, rule(lambda value: not set(value) & {*"\0\n\r"}, "use a run id without line breaks and NUL"))
LOG_BYTES = optional(INT, rule(lambda size: size >= LOG_BYTES_MIN, f"use {LOG_BYTES_MIN} (1M) or more"))
DRAIN_SIGNAL = rule(
    lambda value: value in [each for each in signal.Signals if each not in (signal.SIGKILL, signal.SIGSTOP)],
    "use a signal that can be handled",
)
TEXTFILE = optional(
    PATH,
    rule(
        lambda path: str(path).endswith(TEXTFILE_SUFFIX),
        f"use a name that ends in {TEXTFILE_SUFFIX}: node_exporter reads no others",
    ),
)


def _are_streams(value: Any) -> bool:
    by_rank = value if isinstance(value, Mapping) else {0: value}
    return are_ranks(by_rank) and all(is_int(each) and 0 <= each <= Std.ALL for each in by_rank.values())


STREAMS = rule(_are_streams, "use a Std, or a dict of them by local rank")


def progress_problem(pattern: str) -> str:
    """Returns why the text is not a valid pattern for progress."""
    if problem := pattern_problem(pattern):
        return problem
    if not re.compile(pattern).groups:
        return f"the pattern {pattern!r} has no group: put the step's digits in ( ), as in 'step (\\d+)/(\\d+)'"
    return ""


PROGRESS = optional(STR, progress_problem)


def _is_rendezvous(value: Any) -> bool:
    from aelastic.rdzv.settings import RendezvousSettings  # not needed with one node

    return isinstance(value, RendezvousSettings)


RENDEZVOUS = optional(rule(_is_rendezvous, "use RendezvousSettings"))


def _modules_problem(names: Any) -> str:
    for name in () if names == "auto" else names:
        if not all(part.isidentifier() for part in str(name).split(".")):
            return f"{name!r} is not the name of a module: use names such as torch,torch.distributed; or auto, or off"
    return ""


PRELOAD = all_of(
    rule(lambda value: value == "auto" or is_sequence(value), 'use a tuple of module names, or "auto"'),
    _modules_problem,
)


def _policy_problem(text: Any) -> str:
    from aelastic.rdzv.restart_rules import problem_of  # not needed without a policy

    return problem_of(text)


RESTART_POLICY = optional(STR, _policy_problem)


def _is_grace(grace: Any) -> bool:
    is_time = not isinstance(grace, str) and is_real(grace) and 0 <= grace < math.inf
    return is_time or grace in (None, "shutdown-timeout")


RESTART_GRACE = rule(_is_grace, "use seconds, 0 or more, or shutdown-timeout")


# Readers, by field.


def read_workers(text: str) -> int | str:
    """Reads a number of workers, or a word that names what to count, such as `gpu`."""
    if text in {"auto", "cpu", "gpu", "xpu"}:
        return text
    workers = read_as(int, text, "use a number of workers, or auto, cpu, gpu or xpu")
    keep(LOCAL_WORLD_SIZE, workers)
    return workers


def read_preload(text: str) -> Preload:
    if text in {"auto", "off", ""}:
        return "auto" if text == "auto" else ()
    names = tuple(name.strip() for name in text.split(","))
    if alone := {"auto", "off"}.intersection(names):
        raise ValueError(f"{min(alone)} cannot be combined with modules: use it alone, or name only modules")
    return tuple(dict.fromkeys(names))


def read_filters(text: str) -> tuple[str, ...]:
    """Reads texts separated by commas; two commas are a comma within a text."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")) if text else ()


def read_grace(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # a word


def read_hold(text: str) -> float | None:
    """Reads how long workers are left running after a failure: `hold`, `hold:SECONDS`; `None` for `stop`."""
    what, colon, seconds = text.partition(":")
    if what == "hold" and bool(seconds) == bool(colon):
        return read_seconds(seconds) if seconds else math.inf
    if text == "stop":
        return None
    raise ValueError("use stop, hold, or hold:SECONDS")


def read_wrap(text: str) -> tuple[str, ...]:
    """Reads a command, split as a shell would."""
    if not text:
        return ()
    import shlex  # jobs without --wrap do not pay for these
    import shutil

    words = tuple(shlex.split(text))
    if words and shutil.which(words[0]) is None:
        raise ValueError(f"{words[0]} is not found: name a program that is on PATH")
    return words


def read_policy(text: str) -> str:
    """Reads rules, or those in the file named after `@`."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file cannot be read ({getattr(error, 'strerror', None) or error})") from None
