"""Rules that decide which workers hang, from samples taken now and then.

`handle(event, now)` takes samples and returns verdicts; `deadline` is the time of the next look.  Nothing here reads
`/proc`, a file or a clock.


Three rules, each with its own timeout, each off by default:

- *hang*: none of the chosen signs (output, CPU use, IO) was seen for that long, or for that many median steps;
- *output*: no line that matches the pattern was seen for that long;
- *stuck*: the worker's process was in the same uninterruptible sleep at each look for that long.

A sign is a counter that has grown between two looks, and has the time of the later one: a verdict is never early, and
at most one interval late.  A sign that cannot be read is never a reason for a verdict: a rule without a
sign does not judge.
Time without a look does not count: an agent that was suspended together with its workers continues where it was.
Nor does time in which a worker waits because it is asked to, for example after it has saved for a drain.


Each verdict is returned once, and again only after the worker has shown a sign of life in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from aelastic.base.record import Record
from aelastic.diagnose.hangs.options import HangRules, HangSignal, WatchName

# Share of one core, between two looks.  A heartbeat thread uses less; computing, or a busy loop, uses far more.
CPU_FRACTION_MIN = 0.01
# The kernel counts CPU time in steps of 0.01 s (`times(2)`), in user and in kernel mode: up to two steps mean nothing.
CPU_STEPS_S = 0.02
# How many looks there are within a timeout, but at most one per second.
LOOKS_PER_TIMEOUT = 10
INTERVAL_MIN_S = 1.0
# Limits of a timeout that is given in steps: shorter pauses are common, and longer ones cost too much.
STEPS_TIMEOUT_MIN_S, STEPS_TIMEOUT_MAX_S = 30.0, 900.0
# Timers of event loops may be early by a millisecond (uvloop's resolution).
EARLY_S = 0.005
# An agent that looks later than this was suspended, or its machine is too busy for the workers as well.
LATE_S = 1.0
# How much of a pattern a reason quotes.
PATTERN_CHARS = 80

WORDS: dict[HangSignal, str] = {"output": "output", "cpu": "CPU use", "io": "IO"}


class Sample(Record):
    """The result of one look at a worker: counters, which only grow; `None` if one cannot be read."""

    output: int | None = None  # bytes in its files
    cpu_s: float | None = None
    io: int | None = None  # bytes and calls
    matches: int | None = None  # of the expected output
    # In uninterruptible sleep: a number that stays the same while that sleep lasts.  `None`: it is not.
    sleep: int | None = None

    def of(self, sign: HangSignal) -> float | None:
        """Returns the counter of a sign of life."""
        return {"output": self.output, "cpu": self.cpu_s, "io": self.io}[sign]


class Began(Record):
    """The workers of a new generation run, and no others."""

    local_ranks: tuple[int, ...]


class Looked(Record):
    """A look at the workers is over."""

    samples: Mapping[int, Sample]  # by local rank, of workers that could be seen
    began_at: float
    step_s: float | None = None  # the median step of this generation; `None` before the first
    waiting: frozenset[int] = frozenset()  # local ranks that wait because they are asked to, and do not hang


class Ended(Record):
    """A worker's process is gone."""

    local_rank: int


Event: TypeAlias = Began | Looked | Ended


class Verdict(Record):
    """A running worker violated a hang rule."""

    local_rank: int
    by: WatchName
    reason: str  # without a subject
    is_stopped: bool  # otherwise it is only reported
    waited_s: float


@dataclass(slots=True)
class _Watched:
    """What is known of one worker."""

    since: dict[WatchName, float]  # when it last satisfied each rule
    sample: Sample = field(default_factory=Sample)
    reported: set[WatchName] = field(default_factory=set[WatchName])
    has_matched: bool = False


class HangDetector:
    """Hang rules for the workers of one agent.

    Args:
        rules: what the workers must do.
        stuck_timeout_s: how long one may sleep where no signal can end it; `None`: off.
    """

    def __init__(self, rules: HangRules, stuck_timeout_s: float | None = None) -> None:
        self.deadline: float | None = None  # of the next look
        self._rules, self._stuck_timeout_s = rules, stuck_timeout_s
        self._timeouts = self._given_timeouts()
        self._watched: dict[int, _Watched] = {}
        self._looked_at = 0.0

    def handle(self, event: Event, now: float) -> list[Verdict]:
        """Handles an event; returns verdicts in the order of ranks."""
        verdicts: list[Verdict] = []
        match event:
            case Began(local_ranks):
                self._timeouts = self._given_timeouts()
                self._watched = {rank: _Watched(dict.fromkeys(self._timeouts, now)) for rank in sorted(local_ranks)}
                self._looked_at = now
                self.deadline = self._next_look()
            case Ended(local_rank):  # the next look may come earlier than the others need it
                self._watched.pop(local_rank, None)
                self.deadline = self.deadline if self._watched else None
            case Looked():
                if self._rules.hang_timeout_steps is not None and event.step_s is not None:
                    timeout_s = self._rules.hang_timeout_steps * event.step_s
                    self._timeouts["hang"] = min(max(timeout_s, STEPS_TIMEOUT_MIN_S), STEPS_TIMEOUT_MAX_S)
                verdicts = self._judge(event, now)
                self.deadline = self._next_look()
            case _:
                assert_never(event)
        return verdicts

    def _given_timeouts(self) -> dict[WatchName, float]:
        timeouts = dict[WatchName, float]()
        if self._stuck_timeout_s is not None:
            timeouts["stuck"] = self._stuck_timeout_s
        return timeouts | self._rules.timeouts()

    def silence(self, now: float) -> tuple[float, dict[int, float]]:
        """Returns how long a worker may be silent, or 0; and how long each has been, in seconds, by local rank."""
        by = next((by for by in ("hang", "output") if by in self._timeouts), None)
        if by is None or self._timeouts[by] == math.inf:
            return 0.0, {}
        return self._timeouts[by], {rank: max(0.0, now - watched.since[by]) for rank, watched in self._watched.items()}

    def _next_look(self) -> float | None:
        if not self._watched or not self._timeouts:
            return None
        dues = [
            since + self._timeouts[by]
            for watched in self._watched.values()
            for by, since in watched.since.items()
            if by not in watched.reported
        ]
        shortest_s = min(STEPS_TIMEOUT_MIN_S if each == math.inf else each for each in self._timeouts.values())
        return max(self._looked_at + INTERVAL_MIN_S, min([self._looked_at + shortest_s / LOOKS_PER_TIMEOUT, *dues]))

    def _judge(self, looked: Looked, now: float) -> list[Verdict]:
        elapsed_s = looked.began_at - self._looked_at
        late_s = 0.0 if self.deadline is None else looked.began_at - self.deadline
        self._looked_at = now
        verdicts = []
        for rank, watched in self._watched.items():
            if late_s > LATE_S:
                watched.since = {by: since + late_s for by, since in watched.since.items()}
            sample = looked.samples.get(rank)
            for by in self._timeouts:
                is_exempt = rank in looked.waiting and by != "stuck"
                if is_exempt or sample is None or self._keeps(by, watched, sample, elapsed_s):
                    watched.since[by] = now
                    watched.reported.discard(by)
                elif by not in watched.reported and looked.began_at >= watched.since[by] + self._timeouts[by] - EARLY_S:
                    watched.reported.add(by)
                    is_stopped = by == "stuck" or self._rules.hang_action == "stop"
                    verdicts.append(
                        Verdict(rank, by, self._reason(by, watched, sample), is_stopped, self._timeouts[by])
                    )
            watched.sample = sample or watched.sample
        return verdicts

    def _keeps(self, by: WatchName, watched: _Watched, sample: Sample, elapsed_s: float) -> bool:
        """Whether a worker has satisfied a rule since the last look, or that cannot be known."""
        before = watched.sample
        match by:
            case "hang":
                seen = self._seen(before, sample)
                return not seen or any(_is_sign(signal, before, sample, elapsed_s) for signal in seen)
            case "output":
                is_match = before.matches != sample.matches if before.matches is not None else bool(sample.matches)
                watched.has_matched |= is_match
                return is_match or sample.matches is None
            case "stuck":
                return sample.sleep is None or sample.sleep != before.sleep
            case "timer":
                raise AssertionError("timers are not ours")
            case _:
                assert_never(by)

    def _seen(self, before: Sample, sample: Sample) -> list[HangSignal]:
        """Returns those of the chosen signs that can be read."""
        return [sign for sign in self._rules.hang_signals if None not in (before.of(sign), sample.of(sign))]

    def _reason(self, by: WatchName, watched: _Watched, sample: Sample) -> str:
        timeout = f"{round(self._timeouts[by], 1):g} s"
        if by == "stuck":
            return f"in uninterruptible sleep (state D), which no signal can end, for {timeout}"
        if by == "hang":
            *words, last = [WORDS[signal] for signal in WORDS if signal in self._seen(watched.sample, sample)]
            steps = self._rules.hang_timeout_steps
            timeout += "" if steps is None else f" ({steps:g} times the median step)"
            return f"no {', '.join(words)} or {last} for {timeout}" if words else f"no {last} for {timeout}"
        assert self._rules.expect_output is not None
        pattern = self._rules.expect_output.pattern
        quoted = "".join(each if each.isprintable() else "?" for each in pattern[:PATTERN_CHARS])  # as typed
        if len(pattern) > PATTERN_CHARS:
            quoted += "…"
        since = f"for {timeout}" if watched.has_matched else f"in its first {timeout}"
        return f"no output that matches '{quoted}' {since}"


def _is_sign(sign: HangSignal, before: Sample, sample: Sample, elapsed_s: float) -> bool:
    was, now = before.of(sign), sample.of(sign)
    if sign != "cpu":
        return now != was
    assert was is not None and now is not None
    return now - was > CPU_STEPS_S and now - was >= CPU_FRACTION_MIN * elapsed_s
