"""Settings of workers: their types and constants, and the rule for each field of a `WorkerSpec`.

Values are checked here, whether they come from a program, the command line or a `LaunchConfig`.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntFlag
from functools import partial
from operator import index
from typing import Any, Literal, TypeAlias, get_args

from aelastic.diagnose.hangs.options import (
    HANG_ACTIONS,
    HANG_SIGNALS,
    HANG_TIMEOUT_MIN_S,
    ExpectedOutput,
)
from aelastic.errors import InputError
from aelastic.workers.options import NUMA_BINDINGS

# Rules for a caller's values: each returns what to use instead, or an empty text if the value is valid.

Rule: TypeAlias = Callable[[Any], str]


def rule(holds: Callable[[Any], bool], remedy: str) -> Rule:
    return lambda value: "" if holds(value) else remedy


def all_of(*rules: Rule) -> Rule:
    """Combines rules in order, so that a range may rely on the type rule before it."""
    return lambda value: next((remedy for each in rules if (remedy := each(value))), "")


def optional(kind: Rule, *more: Rule) -> Rule:
    """Accepts `None`, or a value of a kind that satisfies the other rules."""

    def check(value: Any) -> str:
        if value is None:
            return ""
        return f"{remedy}, or None" if (remedy := kind(value)) else all_of(*more)(value)

    return check


def one_of(*choices: str) -> Rule:
    """Returns a rule that accepts one of these words, which it has as `args[0]`."""
    return partial(_none_of, choices)


def _none_of(choices: Sequence[str], value: Any) -> str:
    return "" if value in choices else f"use one of {', '.join(choices)}"


def in_words(value: Any) -> str:
    """Formats a value for a message; for a huge int, which Python may refuse to print, its size."""
    is_huge = isinstance(value, int) and not is_real(value)
    return f"an int of {value.bit_length()} bits, which is too large" if is_huge else repr(value)


def is_real(value: Any) -> bool:
    try:
        return hasattr(value, "__float__") and isinstance(float(value), float)
    except (TypeError, ValueError, OverflowError):
        return False


def is_int(value: Any) -> bool:
    try:
        return is_real(index(value))
    except TypeError:
        return False


def is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def are_texts(value: Any) -> bool:
    return is_sequence(value) and all(isinstance(each, str) for each in value)


def are_ranks(value: Any) -> bool:
    return isinstance(value, Collection) and all(map(is_int, value))


# A number may be numpy's, and a path may be any that the system accepts.
INT = rule(is_int, "use an int")
REAL = rule(is_real, "use a number")
STR = rule(lambda value: isinstance(value, str), "use a str")
PATH = rule(lambda value: isinstance(value, str) or hasattr(value, "__fspath__"), "use a Path")
BOOL = rule(lambda value: isinstance(value, bool), "use a bool")
MAPPING = rule(lambda value: isinstance(value, Mapping), "use a dict")
TEXTS = rule(are_texts, "use a tuple or list of texts")
NOT_NEGATIVE = rule(lambda value: value >= 0, "use 0 or more")
SECONDS = rule(lambda value: 0 <= value < math.inf, "use seconds, 0 or more")


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


def _are_streams(value: Any) -> bool:
    by_rank = value if isinstance(value, Mapping) else {0: value}
    return are_ranks(by_rank) and all(is_int(each) and 0 <= each <= Std.ALL for each in by_rank.values())


# Output that is expected, or shows progress.


def is_expected(expected: Any) -> bool:
    """Whether it is an `ExpectedOutput` with a text, seconds, and ranks."""
    is_one = isinstance(expected, ExpectedOutput) and are_texts([expected.pattern]) and is_real(expected.within_s)
    return is_one and (expected.ranks is None or are_ranks(expected.ranks))


def expected_problem(expected: ExpectedOutput) -> str:
    """Returns what is wrong with expected output."""
    if expected.ranks is not None and not expected.ranks:
        return "ranks is empty: list some, or use None for all"
    return pattern_problem(expected.pattern) or silence_problem(expected.within_s)


def silence_problem(timeout_s: float) -> str:
    """Returns what is wrong with a time after which a silent worker is considered hung."""
    is_seen = HANG_TIMEOUT_MIN_S <= timeout_s < math.inf
    return "" if is_seen else "use 1 second or more: workers are checked once a second"


def pattern_problem(pattern: str) -> str:
    """Returns why the text is not a valid pattern for output."""
    if not pattern:
        return "the pattern is empty and matches every line"
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"the pattern {pattern!r} is not a regular expression ({error})"
    return ""


def progress_problem(pattern: str) -> str:
    """Returns why the text is not a valid pattern for progress."""
    if problem := pattern_problem(pattern):
        return problem
    if not re.compile(pattern).groups:
        return f"the pattern {pattern!r} has no group: put the step's digits in ( ), as in 'step (\\d+)/(\\d+)'"
    return ""


# Rules.


def _is_rendezvous(value: Any) -> bool:
    from aelastic.rdzv.settings import RendezvousSettings  # not needed with one node

    return isinstance(value, RendezvousSettings)


def _modules_problem(names: Any) -> str:
    for name in () if names == "auto" else names:
        if not all(part.isidentifier() for part in str(name).split(".")):
            return f"{name!r} is not the name of a module: use names such as torch,torch.distributed; or auto, or off"
    return ""


def _policy_problem(text: Any) -> str:
    from aelastic.rdzv.restart_rules import problem_of  # not needed without a policy

    return problem_of(text)


def _are_signs(signs: Any) -> bool:
    return 0 < len(signs) == len({*signs} & {*HANG_SIGNALS})


def _is_grace(grace: Any) -> bool:
    is_time = not isinstance(grace, str) and is_real(grace) and 0 <= grace < math.inf
    return is_time or grace in (None, "shutdown-timeout")


NAME_MAX = 255  # characters of a name that is sent to other nodes (`rdzv.protocol.sense`)
NAME = all_of(STR, rule(bool, "use a name that is not empty"))
RANKS = optional(
    rule(are_ranks, "use a frozenset of local ranks"), rule(lambda ranks: min(ranks, default=0) >= 0, "count from 0")
)
_STREAMS = rule(_are_streams, "use a Std, or a dict of them by local rank")
RULES: Mapping[str, Rule] = {
    "entrypoint": all_of(
        rule(lambda value: isinstance(value, str) or callable(value), "use the name of a program, or a function"),
        rule(bool, "name a program or pass a function")),
    "args": rule(is_sequence, "use a tuple or list of arguments"),
    "role": all_of(STR, rule(lambda role: len(role) <= NAME_MAX, f"use {NAME_MAX} characters at most")),
    "local_world_size": all_of(INT,
        rule(lambda value: value >= 1, "at least 1 worker is needed"),
        rule(lambda value: value <= LOCAL_WORLD_SIZE_MAX, f"use at most {LOCAL_WORLD_SIZE_MAX}")),
    "max_restarts": all_of(INT, NOT_NEGATIVE),
    "restart_policy": optional(STR, _policy_problem),
    "monitor_interval": all_of(REAL, rule(lambda value: 0 < value < math.inf, "use seconds above 0")),
    "rdzv": optional(rule(_is_rendezvous, "use RendezvousSettings")),
    "rdzv_handler": optional(rule(lambda value: hasattr(value, "next_rendezvous"), "use a torch RendezvousHandler")),
    "master_addr": optional(STR),
    "master_port": optional(INT,
        rule(lambda port: 0 <= port <= PORT_MAX, f"use a port from 0 (a free one) to {PORT_MAX}")),
    # It is used in environments, stores and logs.
    "run_id": optional(STR,
        rule(lambda value: not set(value) & {*"\0\n\r"}, "use a run id without line breaks and NUL")),
    "redirects": _STREAMS,
    "tee": _STREAMS,
    "log_dir": optional(PATH),
    "log_max_bytes": optional(INT, rule(lambda size: size >= LOG_BYTES_MIN, f"use {LOG_BYTES_MIN} (1M) or more")),
    "log_line_prefix_template": optional(STR),
    "local_ranks_filter": RANKS,
    "duplicate_stdout_filters": TEXTS,
    "duplicate_stderr_filters": TEXTS,
    "numa_binding": optional(STR, one_of(*NUMA_BINDINGS)),
    "numa_fall_back": BOOL,
    "virtual_local_rank": BOOL,
    "event_log_handler": NAME,
    "start_method": one_of(*START_METHODS),
    "cache_dir": optional(PATH),
    "preload": all_of(
        rule(lambda value: value == "auto" or is_sequence(value), 'use a tuple of module names, or "auto"'),
        _modules_problem),
    "preload_from": STR,
    "shutdown_timeout_s": all_of(REAL, SECONDS),
    "restart_grace": rule(_is_grace, "use seconds, 0 or more, or shutdown-timeout"),
    "exit_barrier_timeout_s": all_of(REAL, SECONDS),
    "progress": optional(STR, progress_problem),
    "hang_timeout_s": optional(REAL, silence_problem),
    "hang_timeout_steps": optional(REAL,
        rule(lambda times: 1 < times < math.inf, "use more than 1, times the median step, as in 5x")),
    "hang_signals": all_of(
        rule(is_sequence, f"use a tuple of one or more of {', '.join(HANG_SIGNALS)}"),
        rule(_are_signs, f"use one or more of {', '.join(HANG_SIGNALS)}")),
    "hang_action": one_of(*HANG_ACTIONS),
    "recovery": one_of(*RECOVERIES),
    "expect_output": optional(
        rule(is_expected, "use an ExpectedOutput of a str, seconds, and ranks or None"), expected_problem),
    "drain_signal": rule(
        lambda value: value in [each for each in signal.Signals if each not in (signal.SIGKILL, signal.SIGSTOP)],
        "use a signal that can be handled"),
    "notice_file": optional(PATH),
    "notice_command": optional(NAME),
    "health_check": optional(NAME),
    "hold_on_failure_s": optional(REAL, NOT_NEGATIVE),
    "wrap": TEXTS,
    "wrap_ranks": RANKS,
    "linger_s": all_of(REAL, SECONDS),
    "metrics_textfile": optional(PATH,
        rule(lambda path: str(path).endswith(TEXTFILE_SUFFIX),
             f"use a name that ends in {TEXTFILE_SUFFIX}: node_exporter reads no others")),
    "env": optional(MAPPING),
}  # fmt: skip
