"""How a job's time was spent, as shares, in time and in money; and what would save it, as far as logs prove it.

Pure: logs in, a `CostReport` out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from aelastic.observe.time_spent import GAP_S, ON, STARTS, TimeSpent
from aelastic.tools.timeline.reader import Log, in_order
from aelastic.tools.timeline.text import counted, duration

# A smaller gain is not worth a line.
WORTH_S = 1.0
# For `--hang-timeout 5x`: median steps, and the bounds in seconds.
HANG_STEPS, HANG_MIN_S, HANG_MAX_S = 5.0, 30.0, 900.0


@dataclass(frozen=True, slots=True)
class CostReport:
    """What one job cost.  Shares are in percent, and add up to 100.0; costs are `None` if no price is given."""

    run_id: str
    length_s: float
    workers: int  # the most at a time
    seconds: Mapping[str, float]  # of each of `time_spent.ON`
    shares: Mapping[str, float]
    costs: Mapping[str, float] | None
    notes: Mapping[str, str]  # remarks about some of these
    advice: tuple[str, ...]
    damaged: int  # lines, or records, that were left out

    @property
    def cost(self) -> float | None:
        return None if self.costs is None else sum(self.costs.values())


def report_of(logs: Sequence[Log], price: tuple[float, str] | None, save_s: float | None) -> CostReport:
    """Returns the cost report from the logs of one job, at least one with entries.

    Args:
        logs: of all nodes.
        price: of an hour, and of what: `gpu` (a worker) or the whole job, ``.
        save_s: how long a save takes; `None`: as long as in drains.
    """
    spent, damaged, workers, is_cold, now = TimeSpent(GAP_S), 0, 1, False, 0.0
    for now, entry in in_order(logs):
        try:
            spent.handle(entry.kind, entry.fields.get, now)
            workers = max(workers, entry.fields.get("world_size") or 0)
            is_cold |= entry.kind == "workers_started" and entry.fields["workers"][0].get("kind") == "cold"
        except (ValueError, TypeError, LookupError, AttributeError):
            damaged += 1  # left out; the others count
    now = max([now, *(log.alive_at for log in logs if log.alive_at is not None)])
    spent.handle("alive", dict[str, None]().get, now)
    seconds = spent.until(now)
    costs = None
    if price is not None:
        of = spent.worker_s if price[1] else seconds
        costs = {name: of[name] / 3600 * price[0] for name in ON}
    return CostReport(
        next(log.run_id for log in logs if log.entries), sum(seconds.values()), workers, seconds, in_tenths(seconds),
        costs, notes_of(spent), tuple(advice_of(spent, save_s, is_cold=is_cold)),
        damaged + sum(log.damaged for log in logs),
    )  # fmt: skip


def in_tenths(parts: Mapping[str, float]) -> dict[str, float]:
    """Returns parts as percent with one digit; those that lose most by rounding get the remainder."""
    whole = sum(parts.values())
    if whole <= 0:
        return {name: 100.0 * (name == "unknown") for name in parts}
    exact = {name: part / whole * 1000 for name, part in parts.items()}
    tenths = {name: math.floor(each) for name, each in exact.items()}
    for name in sorted(parts, key=lambda name: tenths[name] - exact[name])[: 1000 - sum(tenths.values())]:
        tenths[name] += 1
    return {name: each / 10 for name, each in tenths.items()}


def notes_of(spent: TimeSpent) -> dict[str, str]:
    starts = ", ".join(f"{'to the ' * (name == STARTS[-1])}{name} {duration(spent.seconds[name])}" for name in STARTS)
    in_place = f", {spent.in_place} in place" if spent.in_place else ""
    failures = counted(spent.failures, "failure")
    steps = f"up to step {spent.most}" if spent.most >= 0 else "or repeated: the steps are not known (--progress)"
    return {
        "trained": steps,
        "twice": f"{counted(spent.again, 'step')} again, after {failures}" if spent.again else "",
        "starting": f"{counted(spent.starts, 'start')}{in_place}: {starts}",
        "hung": counted(spent.hangs, "hang") if spent.hangs else "",
    }


def advice_of(spent: TimeSpent, save_s: float | None, *, is_cold: bool) -> Iterable[str]:
    """Yields what would have saved time, and how much at most."""
    seconds = spent.seconds
    again_s = seconds["imports"] - spent.first_imports_s if spent.starts > 1 else 0.0
    if is_cold and again_s >= WORTH_S:
        yield f"--preload auto: starts without imports save up to {duration(again_s)}"
    if spent.rate > 0 and spent.hangs:
        limit_s = min(max(HANG_STEPS / spent.rate, HANG_MIN_S), HANG_MAX_S)
        if (gain_s := seconds["hung"] - spent.hangs * limit_s) >= WORTH_S:
            yield f"--hang-timeout 5x: finds a hang after {duration(limit_s)}, which saves {duration(gain_s)}"
    save_s = save_s or spent.save_s
    if save_s and spent.failures and seconds["twice"] > 0:
        between_s = (seconds["trained"] + seconds["twice"]) / spent.failures
        best_s, now_s = math.sqrt(2 * save_s * between_s), 2 * seconds["twice"] / spent.failures
        costs = [save_s / each + each / (2 * between_s) for each in (now_s, best_s)]
        gain = f", {(costs[0] - costs[1]) * 100:.1f} % less" if costs[0] - costs[1] > 0.001 else ""
        seen = f"a save takes {duration(save_s)}, and a failure comes every {duration(between_s)}"
        yield f"save every {duration(best_s)}: {seen}; now it is every {duration(now_s)} or so{gain}"
    if spent.most < 0 and seconds["trained"] > 0 and spent.failures:
        yield "--progress 'step (\\d+)': shows how many steps failures cost"
