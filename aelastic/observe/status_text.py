"""Makes the status line's text: the state of a run in words.

`StatusText` reads the state and returns the line for a width.  `changes_at` returns when the line would change without
an event: elapsed time is shown in growing steps, so an idle line costs next to nothing.  The view of nodes and ranks
(`ui.rank_view`) shows a `Picture`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from aelastic.base.record import Record
from aelastic.observe.run_events import PhaseName
from aelastic.observe.run_state import RunState, WorkerNow
from aelastic.workers.states import Phase

SEPARATOR = " | "
# Elapsed seconds, and the steps in which they are shown from there on.
_STEPS = ((3600, 60), (60, 10), (10, 5), (0, 1))
# The phases of a restart, in order, and of the end of a run.
_PHASES: tuple[PhaseName, ...] = ("detect", "stop", "await", "rendezvous", "spawn", "barrier")
# The logs have more.
WORDS_MAX = 200


class Frame(Record):
    """A frame of the status line."""

    key: object  # equal for equal rows
    rows: Callable[[], list[bytes]]  # makes it; may be called in another thread


class Picture(Record):
    """The contents of the view of nodes and ranks."""

    title: tuple[str, ...]
    node: str
    ranks: tuple[WorkerNow, ...]
    failure: str
    took: str
    endpoints: str = ""  # if there are several
    spare: tuple[str, ...] = ()  # parts of the title to leave out on a narrow terminal, in this order


class StatusText:
    """The state of one run for a status line.

    Args:
        state: read whenever the text is requested.
    """

    def __init__(self, state: RunState) -> None:
        self._of = state

    def frame(self, now: float, columns: int, rows: int) -> Frame:  # noqa: ARG002  one row is always there
        line = self.line(now, columns - 1)  # some terminals wrap after a full row
        return Frame(line, lambda: [line.encode()])

    def line(self, now: float, width: int) -> str:
        """Returns one line of printable ASCII, cut off at the width."""
        return fitted(self.parts(now), self.spare, width)

    def changes_at(self, now: float) -> float:
        """Returns when `line` changes if nothing happens."""
        passed = max(0.0, now - self._of.began_at)
        step = next(step for least, step in _STEPS if passed >= least)
        at = self._of.began_at + (passed // step + 1) * step
        return max(at, math.nextafter(now, math.inf))  # a difference may be rounded down

    def parts(self, now: float) -> tuple[str, ...]:
        """Returns the elapsed time, what the run does, its progress, the round, its size, and the restarts."""
        passed = "" if self._of.began is None else f" {duration(now - self._of.began_at)}"
        parts = (f"aelastic{passed}", *self.state, self.progress, self.round, self.size, self.restarts)
        return tuple(part for part in parts if part)

    @property
    def spare(self) -> tuple[str, ...]:
        """The parts that say least."""
        return self.round, self.size

    @property
    def state(self) -> tuple[str, ...]:  # noqa: C901  a case for each phase
        """The current activity of the run, then what it waits for."""
        match self._of.phase:
            case Phase.INIT:
                return ("starting",)
            case Phase.JOINING | Phase.PREPARING:
                began = self._of.began
                if began is None or began.max_nodes == 1:
                    return ("starting", *self._waited)
                fewest, most = began.min_nodes, began.max_nodes
                nodes = f"{fewest} nodes" if fewest == most else f"{fewest} to {most} nodes"
                return (f"waiting for {nodes}", *self._waited)
            case Phase.SPAWNING | Phase.RUNNING:
                return (self._running(),)
            case Phase.LEAVING | Phase.FORMING:
                return (f"recovering in place{self._why()}", *self._waited)
            case Phase.CANCELLING | Phase.STOPPING:
                left = sum(rank.state in {"starting", "running"} for rank in self._of.workers.values())
                return (f"stopping {counted(left, 'worker') if left else 'what workers left behind'}{self._why()}",)
            case Phase.AWAITING:
                return (
                    self._why().removeprefix(": ") or "a worker failed",
                    self._of.waited or "waiting for the leader's decision",
                )
            case Phase.BARRIER if self._of.formed is not None and self._of.formed.group_world_size == 1:
                return ("done",)
            case Phase.BARRIER:
                return ("done here", self._of.waited_parts[0] or "waiting for other nodes")
            case Phase.DONE:
                return ("over",)

    @property
    def _waited(self) -> tuple[str, ...]:
        """What the agent waits for, missing nodes first: the end of the line may be cut off."""
        return tuple(part[:WORDS_MAX] for part in self._of.waited_parts if part)

    def _why(self) -> str:
        failed = [rank.rank for rank in self._of.workers.values() if rank.state == "failed"]
        why = self._of.why_stopping or (f"rank {failed[0]} failed" if failed else "")
        return why and f": {why}"

    def _running(self) -> str:
        if any(rank.state == "starting" for rank in self._of.workers.values()):
            return "starting workers"
        if self._of.announced:
            return f"saving: {self._of.announced}"
        done = sum(rank.state == "succeeded" for rank in self._of.workers.values())
        return f"running, {done} of {len(self._of.workers)} done" if done else "running"

    @property
    def progress(self) -> str:
        if self._of.progress is None:
            return ""
        at, _ = self._of.progress
        words = [f"step {at.step}" if at.total is None else f"step {at.step} of {at.total}"]
        words += [] if at.share is None else [f"{at.share:.0%}"]
        words += [] if at.steps_per_s is None else [f"{at.steps_per_s:.3g}/s"]
        words += [] if at.remaining_s is None else [f"{duration(at.remaining_s)} left"]
        return ", ".join(words)

    @property
    def round(self) -> str:
        if self._of.formed is None:
            return ""
        return f"{'after ' * (self._of.phase is Phase.JOINING)}round {self._of.formed.round}"

    @property
    def size(self) -> str:
        formed, began = self._of.formed, self._of.began
        if formed is not None and self._of.phase is not Phase.JOINING:
            nodes = f" on {counted(formed.group_world_size, 'node')}" if formed.group_world_size > 1 else ""
            return f"{counted(formed.world_size, 'rank')}{nodes}"
        return "" if began is None else f"{counted(began.local_world_size, 'rank')} here"

    @property
    def restarts(self) -> str:
        if self._of.began is None:
            return ""
        most = self._of.began.max_restarts
        return f"restarts {self._of.restart_count} of {most}" if most else "no restarts"

    def picture(self, now: float) -> Picture:
        """Returns the contents of the view."""
        failed, took = "", self._of.took
        if self._of.last_failure is not None:
            failure, failed_at = self._of.last_failure
            ago = duration(now - failed_at)
            failed = f"last failure, {ago} ago: rank {failure.rank} on {failure.host}: {failure.message}"
        last = ", ".join(f"{name} {took[name]:.1f} s" for name in _PHASES if name in took)
        endpoints = [
            f"{endpoint} {f'missing ({trouble})' if trouble else 'answers'} for {duration(now - since)}"
            for endpoint, (trouble, since) in sorted(self._of.endpoints.items())
        ]
        return Picture(
            title=self.parts(now),
            spare=self.spare,
            node=self._node(),
            ranks=tuple(self._of.workers.values()),
            failure=failed,
            took=f"phases took: {last}" if last else "",
            endpoints=f"endpoints: {', '.join(endpoints)}" if endpoints else "",
        )

    def _node(self) -> str:
        began, formed = self._of.began, self._of.formed
        if began is None:
            return ""
        here, server = f"run {began.run_id} on {began.host}", self._of.fork_server
        if formed is not None:
            here += f" | group rank {formed.group_rank} of {formed.group_world_size}"
        if server is not None:
            here += f" | template {server.pss_bytes >> 20} MiB, {server.parked} parked"
        return here


def fitted(parts: Sequence[str], spare: Iterable[str], width: int) -> str:
    """Joins the parts, leaving out as many of the spare ones as necessary to fit the width."""
    for each in spare:
        if len(SEPARATOR.join(parts)) > width:
            parts = [part for part in parts if part != each]
    return cut(SEPARATOR.join(parts), width)


def cut(text: str, width: int) -> str:
    """Returns printable ASCII only, one column per character on every terminal; if too long, it ends in dots."""
    plain = "".join(each if " " <= each <= "~" else "?" for each in " ".join(text.split()))
    return plain if len(plain) <= width else plain[: max(0, width - 3)] + "..."[: max(0, width)]


def duration(passed_s: float) -> str:
    """Formats a duration, in steps: `42 s`, `3 min 20 s`, `2 h 5 min`."""
    passed = max(0, int(passed_s))
    step = next(step for least, step in _STEPS if passed >= least)
    minutes, seconds = divmod(passed - passed % step, 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
