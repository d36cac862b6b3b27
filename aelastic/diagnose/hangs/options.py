"""What a user can set about hangs, and the names of the watches that find them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from aelastic.base.record import Record
from aelastic.base.setting import REAL, are_ranks, are_texts, is_real, is_sequence, one_of, optional, own, rule, setting
from aelastic.base.setting import all_of as every
from aelastic.base.texts import keep, read_seconds
from aelastic.base.texts import one_of as read_one_of

# Which watch found a worker unhealthy: a timer that it set and did not clear, no sign of life, missing output, a sleep
# that no signal ends.
WatchName: TypeAlias = Literal["timer", "hang", "output", "stuck"]

# Signs of life of a worker: output in its files, CPU use, bytes and calls of its reads and writes.
HangSignal: TypeAlias = Literal["output", "cpu", "io"]
HANG_SIGNALS: tuple[HangSignal, ...] = get_args(HangSignal)
# What happens to a worker that hangs.
HangAction: TypeAlias = Literal["stop", "report"]
HANG_ACTIONS: tuple[HangAction, ...] = get_args(HangAction)
# Workers are looked at once a second at most.
HANG_TIMEOUT_MIN_S = 1.0


class ExpectedOutput(Record):
    """Output that workers must write repeatedly, on stdout or stderr.

    Args:
        pattern: regular expression that must match a line, or an update of a progress bar.
        within_s: seconds from the worker's start to the first match, and from each match to the next.
        ranks: global ranks of the workers that must write it; `None`: all.
    """

    pattern: str
    within_s: float
    ranks: frozenset[int] | None = None

    def concerns(self, env: Mapping[str, str]) -> bool:
        """Whether the worker with this environment must write it."""
        return self.ranks is None or int(env["RANK"]) in self.ranks


# Texts.


class Steps(NamedTuple):
    """A time as a multiple of a job's median step."""

    times: float


def read_hang_timeout(text: str) -> float | Steps:
    """Reads seconds, or a multiple of the median step, as in 5x."""
    number, times, rest = text.strip().partition("x")
    seconds = read_seconds(number)
    keep(_STEPS if times else _SILENCE, math.nan if rest else seconds)
    return Steps(seconds) if times else seconds


def read_signs(text: str) -> tuple[HangSignal, ...]:
    """Reads signs of life separated by commas; returns each once, in our order; empty if one is unknown."""
    chosen = {part.strip() for part in text.split(",")}
    return tuple(sign for sign in HANG_SIGNALS if sign in chosen) if chosen <= {*HANG_SIGNALS} else ()


def read_expected(text: str) -> ExpectedOutput:
    """Reads a pattern and seconds; all colons except the last belong to the pattern."""
    pattern, colon, seconds = text.rpartition(":")
    if not colon or not seconds.strip():
        raise ValueError("the seconds are missing: use REGEX:SECONDS, as in 'loss=:120'")
    return ExpectedOutput(pattern, read_seconds(seconds))


# Rules.


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


def _is_expected(expected: Any) -> bool:
    is_one = isinstance(expected, ExpectedOutput) and are_texts([expected.pattern]) and is_real(expected.within_s)
    return is_one and (expected.ranks is None or are_ranks(expected.ranks))


def _expected_problem(expected: ExpectedOutput) -> str:
    if expected.ranks is not None and not expected.ranks:
        return "ranks is empty: list some, or use None for all"
    return pattern_problem(expected.pattern) or silence_problem(expected.within_s)


_SILENCE = optional(REAL, silence_problem)
_STEPS = optional(REAL, rule(lambda times: 1 < times < math.inf, "use more than 1, times the median step, as in 5x"))
_SIGNS = every(
    rule(is_sequence, f"use a tuple of one or more of {', '.join(HANG_SIGNALS)}"),
    rule(
        lambda signs: 0 < len(signs) == len({*signs} & {*HANG_SIGNALS}), f"use one or more of {', '.join(HANG_SIGNALS)}"
    ),
)
_EXPECTED = optional(
    rule(_is_expected, "use an ExpectedOutput of a str, seconds, and ranks or None"), _expected_problem
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class HangRules:
    """When a worker is considered hung, and what happens to it then."""

    hang_timeout_s: float | None = setting(
        None,
        _SILENCE,
        "seconds without a sign of life after which a worker is considered hung; `None`: off",
        own("--hang-timeout", read_hang_timeout, "SECONDS",
            "a worker that shows no sign of life for this long hangs; 5x: five times the median step time, as found by "
            "--progress or told by workers that recover in place, from 30 to 900 s (default: no hang detection)",
            rule=every()),
    )  # fmt: skip
    hang_timeout_steps: float | None = setting(
        None,
        _STEPS,
        "the same as a multiple of the median step time, between 30 and 900 s; without a limit before the first step "
        "of each attempt.  Workers that recover in place report their steps, `progress` finds those of others.",
    )
    hang_signals: tuple[HangSignal, ...] = setting(
        HANG_SIGNALS,
        _SIGNS,
        "signs of life: output, cpu (1 % of a core or more), io (bytes and calls); leave out cpu if workers spin while "
        "they wait for each other, as with NCCL",
        own("--hang-signals", read_signs, "SIGNS"),
    )
    hang_action: HangAction = setting(
        "stop",
        one_of(*HANG_ACTIONS),
        "stop: treat a worker that hangs, or lacks expected output, as failed; report: only log it",
        own("--hang-action", read_one_of(*HANG_ACTIONS), "ACTION"),
    )
    expect_output: ExpectedOutput | None = setting(
        None,
        _EXPECTED,
        "output that workers must write, or they are considered hung; `None`: off",
        own("--expect-output", read_expected, "REGEX:SECONDS",
            "each worker must write a matching line within this time after its start, and after each match"),
    )  # fmt: skip

    @property
    def finds_hangs(self) -> bool:
        """Whether hang detection is on."""
        return self.hang_timeout_s is not None or self.hang_timeout_steps is not None

    def timeouts(self) -> dict[WatchName, float]:
        """Returns the timeouts of the rules that are on."""
        found = dict[WatchName, float]()
        if self.hang_timeout_steps is not None:
            found["hang"] = math.inf  # until a step is known
        elif self.hang_timeout_s is not None:
            found["hang"] = self.hang_timeout_s
        if self.expect_output is not None:
            found["output"] = self.expect_output.within_s
        return found
