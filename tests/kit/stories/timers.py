"""Stories of the workers' timers as text: what workers write, what happens to them, and what is reported.

As in `texts.py`.  Two workers run, `0` and `1`; a `child` and a `stranger` also write.  A story begins with `workers`.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

from aelastic.diagnose.hangs import timer_rules as t
from kit.stories import files, texts
from kit.stories.files import Story, options_of

FOLDER = files.FOLDER / "timers"
KILL = int(signal.SIGKILL)
EPOCH_S = 1_700_000_000.0  # how far the wall clock is ahead of the monotonic one
WORKERS = {100: 0, 101: 1}
CHILD, STRANGER = 500, 600


def line(pid: Any, scope: Any, expiration_time: Any, signum: Any = KILL, **more: Any) -> bytes:
    """A request as torch's client writes it."""
    request = {"version": 1, "pid": pid, "scope_id": scope, "expiration_time": expiration_time, "signal": signum}
    return json.dumps(request | more).encode() + b"\n"


class Playing(texts.Playing):
    """Timers of two workers, and their clocks."""

    core: t.Timers

    def __init__(self) -> None:
        self.core = t.Timers()
        self.now = 50.0
        self.generation = 0
        self.handle("workers start")

    @property
    def wall(self) -> float:
        return self.now + EPOCH_S

    @property
    def left_s(self) -> float | None:
        return None if self.core.deadline is None else round(self.core.deadline - self.now, 3)

    def parts(self) -> Iterator[str]:
        yield f"timers: {len(self.core)}"

    def receive(self, *lines: bytes, wall: float | None = None) -> list[t.Action]:
        return self.core.handle(t.DataReceived(b"".join(lines), self.wall if wall is None else wall), self.now)

    def pid(self, name: str) -> int:
        return {"child": CHILD, "stranger": STRANGER}.get(name) or 100 * self.generation + int(name)

    def handle(self, line_: str) -> list[Any]:
        of = int(options_of(line_).get("of", self.generation))
        match line_.split():
            case ["workers", "start", *_]:
                self.generation = of if "of" in options_of(line_) else self.generation + 1
                workers = {100 * self.generation + rank: rank for rank in (0, 1)}
                return self.core.handle(t.Started(self.generation, workers), self.now)
            case ["a", "timer", "fires"]:
                return self.core.handle(t.DeadlinePassed(), self.now)
            case [name, "sets", scope, after_s, *more]:
                signum = int(more[0]) if more and more[0].lstrip("-").isdigit() else KILL
                ahead_s = float(options_of(line_).get("ahead", 0))
                wall = self.wall + ahead_s
                return self.receive(line(self.pid(name), scope, wall + float(after_s), signum), wall=wall)
            case [name, "clears", scope]:
                return self.receive(line(self.pid(name), scope, -1, 0))
            case [rank, "ends", *_]:
                return self.core.handle(t.Ended(of, int(rank)), self.now)
            case [name, "belongs", "to", rank, *_]:
                owner = int(rank) if rank.isdigit() else None
                is_gone = "gone" in options_of(line_)
                return self.core.handle(t.Belongs(of, self.pid(name), owner, is_gone=is_gone), self.now)
            case _:
                raise AssertionError(line_)

    def words(self, action: t.Action) -> str:
        match action:
            case t.Expired(generation, rank, pid, scope, set_for_s, late_s, signum):
                times = f"set for {set_for_s:.2f} s, {abs(late_s):.2f} s late"
                return f"{scope} of {rank} (pid {pid}, generation {generation}) expires: {times}, signal {signum}"
            case t.FindOwner(generation, pid):
                return f"asks whose pid {pid} is in generation {generation}"
            case t.Complain(kind, quote):
                return f"complains of {kind}: {quote}"


def played(story: Story) -> list[str]:
    return list(Playing().lines(story))
