"""Computes how a job's time was spent, from run events: those of one node while it runs, or all nodes' logs.

Every second is charged to exactly one of `ON`, so that the shares add up to the whole run, wherever its log is cut:

- **starting**: until workers make their first step in a round or, if no steps are reported, have joined their process
  group, or written output.  Later news (the first step, a joined process group) applies to all of the round so far.
- **trained**, **twice**: steps made for the first time, and steps that an earlier round had made.  Between two records
  of progress, all steps are taken to be equally long.  If no steps are reported, repeated work is unknown.
- **hung**: the time that a watch had waited when it found that workers show no sign of life, and the time after that.
- **drained**: from the notice that a node leaves until workers run again.  **waiting**: for missing nodes, for somebody
  to look at a failure that is held, or for the end.
- **unknown**: nothing was recorded for longer than a live agent is silent.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ON = "trained", "twice", "starting", "hung", "drained", "waiting", "unknown"
# Names for people, where they differ.
WORDS = {"twice": "trained twice", "unknown": "not known"}
# A live agent writes a record each minute.
GAP_S = 90.0
# The parts of starting.
STARTS = "stopping", "rendezvous", "imports", "first step"
_AT_WORK = "trained", "twice"


class TimeSpent:
    """How the time of one job was spent.

    Args:
        gap_s: a longer silence is unknown time.
    """

    def __init__(self, gap_s: float = float("inf")) -> None:
        self.seconds = dict.fromkeys((*ON, *STARTS), 0.0)
        self.worker_s = dict.fromkeys((*ON, *STARTS), 0.0)  # the same, times the number of workers
        self.failures = self.starts = self.hangs = 0
        self.in_place = 0  # how many of the starts were rounds that continued in place
        self.again, self.most = 0, -1  # steps made twice, and the highest step
        self.first_imports_s = 0.0  # in the first start
        self.save_s: float | None = None  # from the last notice until all had saved
        self.rate = 0.0  # steps per second, as last reported
        self._high = -1  # the highest step of earlier rounds
        self._gap_s = gap_s
        self._on, self._part = "waiting", ""
        self._now: float | None = None  # counted until then
        self._since = 0.0  # when the current activity began
        self._saves_since: float | None = None  # since when all ranks save
        self._agents = self._round = self._formed = self._started = self._ended = self._workers = 0
        self._is_up = self._is_down = self._has_counted = self._has_steps = False
        self._step: tuple[int, float] | None = None  # the last step of this round, and when
        self._before = self._at_work()  # time at work before this round, or this sample

    def until(self, now: float) -> dict[str, float]:
        """Returns the seconds of each of `ON`; their sum is the time from the first event to the last, or until now."""
        more = 0.0 if self._now is None else max(0.0, now - self._now)
        return {name: self.seconds[name] + more * (name == self._on) for name in ON}

    def handle(self, kind: str, get: Callable[[str], Any], at: float) -> None:
        """Handles an event.

        Args:
            kind: its name in the event log.
            get: returns a field of it, as in the log; `None` if it has none of that name.
            at: when it happened, on one clock for all nodes.
        """
        if self._now is not None and (at - self._now > self._gap_s or not self._on):
            self._on, self._part, was = "unknown", "", (self._on, self._part)
            self._count(at)
            self._on, self._part = was
            self._agents = 0 if kind == "run_began" else max(1, self._agents)  # earlier agents were killed
        self._count(at)
        if kind == "run_began":
            if not self._agents:  # rounds are counted from the beginning again
                self._go("starting", "rendezvous")
                self._round = 0
            self._agents += 1
        elif kind == "run_ended":
            self._agents -= 1
            if self._agents <= 0:
                self._go("")  # the job is over
        elif kind == "round_formed":
            self._on_formed(int(get("round")), int(get("world_size")), in_place=get("in_place") is True)
        elif get("round") in {None, self._round}:
            self._in_round(kind, get, at)

    def _in_round(self, kind: str, get: Callable[[str], Any], at: float) -> None:  # noqa: C901, PLR0912, PLR0915  one case for each
        match kind:
            case "workers_started":
                if not self._started:  # earlier reports belong to the previous round
                    self._step, self._high, self._before = None, self.most, self._at_work()
                self._started += 1
                if self._started >= self._formed and not self._has_steps and self._on in {"starting", "drained"}:
                    self._go("trained")
            case "worker_reached" if self._has_steps:
                self._part = "first step" if self._part == "imports" else self._part
            case "worker_reached" if not self._is_up and self._on in {*_AT_WORK, "starting"} and not self._is_down:
                self._begin_work("imports")
                self._is_up = get("phase") == "process_group"
            case "progressed":
                if self._step is None and get("is_last"):  # another node's, of the previous round
                    self.most = self._high = max(self.most, int(get("step")))
                else:
                    self._on_step(int(get("step")), at)
                self.rate = get("steps_per_s") or self.rate
            case "recovered":
                self._on_step(int(get("step")), at)
            case "noticed" if (silent_s := _silent_s(get)) is not None and self._on in _AT_WORK:
                self.hangs += 1
                self._move(self._on, "hung", silent_s)
                self._go("hung")
                self._before = self._at_work()
            case "announced":
                is_on = _after(what := str(get("what")), str(get("verb")))
                if is_on and self._on in {*_AT_WORK, "drained", "waiting"}:
                    self._go(is_on)
                self._saves_since = at if what == "saving" and get("save_at") else None
            case "changed" if get("phase") == "joining" and self._on == "starting":
                self._go("starting", "rendezvous")
            case "waited" if self._part == "rendezvous" or (self._on == "drained" and self._is_down):
                if self._part:
                    self.seconds[self._part] = max(0.0, self.seconds[self._part] - (at - self._since))
                self._move(self._on, "waiting", at - self._since)
                self._go("waiting")
            case "worker_ended":
                self._ended += 1
                if get("outcome") == "failed" and not self._is_down:
                    self._down()
                elif self._ended >= self._workers and not self._is_down and self._on != "drained":
                    self._go("waiting")
            case "restarting":
                if self._saves_since is not None:
                    self.save_s, self._saves_since = at - self._saves_since, None
                if not self._is_down or self._on == "waiting":
                    self._down()
                self.failures += get("cause") == "failure" and not self._has_counted
                self._has_counted = True
            case _:
                pass

    def _down(self) -> None:
        """Notes that the workers of the round no longer train."""
        self._is_down = True
        self._go("drained" if self._on == "drained" else "starting", "stopping")

    def _on_formed(self, round_: int, workers: int, *, in_place: bool) -> None:
        if round_ <= self._round:
            self._formed += round_ == self._round
            return
        self._round, self._formed, self._started, self._ended, self._workers = round_, 1, 0, 0, workers
        self._is_up = self._is_down = self._has_counted = False
        self.starts += 1
        self.in_place += in_place
        self.first_imports_s = self.first_imports_s if self.starts > 2 else self.seconds["imports"]
        self._go("drained" if self._on == "drained" else "starting", "imports")

    def _begin_work(self, part: str) -> None:
        """Begins work: time counted as work in this round so far was the workers' start."""
        for name, before in self._before.items():
            self._move(name, "starting", max(0.0, self.seconds[name] - before), part)
        self._go("trained")

    def _on_step(self, step: int, at: float) -> None:
        last, self._has_steps = self._step, True
        if last is None:
            if self._on not in {"hung", "waiting"} and not self._is_down:
                self._begin_work("first step")
            self._is_up = True
        elif step <= last[0]:
            return  # another node, or the next epoch
        else:
            self._settle(last[0], step)
        self._step, self._before, self.most = (step, at), self._at_work(), max(self.most, step)
        if self._on in {*_AT_WORK, "hung"} and not self._is_down:
            self._go("twice" if step < self._high else "trained")

    def _settle(self, first: int, last: int) -> None:
        """Charges the repeated steps' share of the time between two steps to `twice`."""
        repeated = min(max(self._high - first, 0), last - first)
        self.again += repeated
        passed = {name: max(0.0, now - self._before[name]) for name, now in self._at_work().items()}
        total = sum(passed.values())
        if total > 0:
            wanted = total * repeated / (last - first)
            source, target = ("trained", "twice") if wanted > passed["twice"] else ("twice", "trained")
            self._move(source, target, abs(wanted - passed["twice"]))

    def _at_work(self) -> dict[str, float]:
        return {name: self.seconds[name] for name in _AT_WORK}

    def _move(self, source: str, target: str, seconds: float, part: str = "") -> None:
        """Charges these seconds to another activity than before."""
        share = min(seconds / self.seconds[source], 1.0) if self.seconds[source] > 0 else 0.0
        for totals in (self.seconds, self.worker_s):
            moved = totals[source] * share
            totals[source] -= moved
            for name in filter(None, (target, part)):
                totals[name] += moved

    def _go(self, on: str, part: str = "") -> None:
        self._on, self._part, self._since = on, part if on == "starting" else "", self._now or 0.0

    def _count(self, now: float) -> None:
        """Charges the time since the last call to the current activity."""
        passed = 0.0 if self._now is None else max(0.0, now - self._now)
        self._now = now if self._now is None else max(now, self._now)
        for name in filter(None, (self._on, self._part)):
            self.seconds[name] += passed
            self.worker_s[name] += passed * max(1, self._workers)


def _silent_s(get: Callable[[str], Any]) -> float | None:
    """Returns how long a worker that a watch found had shown no sign of life; `None` if it does not hang."""
    if get("silent_s") is None:  # logs of older versions lack it
        return None if get("by") == "timer" else 0.0
    return float(get("silent_s")) or None


def _after(what: str, verb: str) -> str:
    """Returns what time is spent on after an announcement; empty if that does not change."""
    if what == "saving" and verb in {"restart", "stop"}:  # ranks are at work until they have saved
        return ""
    return {"saving": "drained", "held": "waiting", "called off": "trained"}.get(what, "")
