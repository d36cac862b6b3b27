"""The status line's text: the state of a run, from its events.

`StatusText` takes run events and gives the line for a width.  `changes_at` says when the line would change without an
event: the time that has passed is given in steps that grow, so an idle line costs next to nothing.  The view of nodes
and ranks (`ui.rank_view`) shows a `Picture`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aelastic.core.record import Record
from aelastic.failures.failure import ProcessFailure
from aelastic.group.events import signal_words
from aelastic.group.phases import Phase
from aelastic.observe import run_events as ev

SEPARATOR = " | "
# Seconds that have passed, and the steps in which they are given from there on.
_STEPS = ((3600, 60), (60, 10), (10, 5), (0, 1))
# What a restart takes, in this order, and the end of a run.
_PHASES: tuple[ev.PhaseName, ...] = ("detect", "stop", "await", "rendezvous", "spawn", "barrier")
# More is in the logs.
WORDS_MAX = 200


class Frame(Record):
    """A frame of the status line."""

    key: object  # equal for equal rows
    rows: Callable[[], list[bytes]]  # makes it; may be called in another thread


class RankPicture(Record):
    """One worker of this node, in this generation."""

    rank: int
    local_rank: int
    pid: int | None = None
    state: str = "starting"
    note: str = ""  # what a watch has found


class Picture(Record):
    """What a view of nodes and ranks shows."""

    title: tuple[str, ...]
    node: str
    ranks: tuple[RankPicture, ...]
    failure: str
    took: str
    endpoints: str = ""  # where there are several
    spare: tuple[str, ...] = ()  # parts of the title that a narrow terminal may lack, the first of them first


class StatusText:
    """State of one run, as a status line shows it."""

    def __init__(self) -> None:
        self.began: ev.RunBegan | None = None
        self.began_at = 0.0
        self.formed: ev.RoundFormed | None = None
        self.phase = Phase.INIT
        self.ranks: list[RankPicture] = []
        self.restart_count = 0
        self.why_stopping = ""
        self.took: dict[ev.PhaseName, float] = {}  # how long the last of each phase was, in seconds
        self.last_failure: ProcessFailure | None = None
        self.failed_at = 0.0
        self.fork_server: ev.ForkServerMeasured | None = None
        self._waited = ""
        self._endpoints: dict[str, tuple[str, float]] = {}  # why each is missing, or "", and since when
        self._progress: ev.Progressed | None = None  # of this generation

    # What happens.

    def handle(self, event: ev.RunEvent, now: float) -> None:  # noqa: C901, PLR0912  one case for each run event
        match event:
            case ev.RunBegan():
                self.began, self.began_at = event, now
            case ev.Changed(_, phase):
                self._on_changed(phase)
            case ev.Waited(text):
                self._waited = text
            case ev.EndpointChanged(endpoint, trouble):
                self._endpoints[endpoint] = trouble, now
            case ev.RoundFormed():
                self._on_formed(event)
            case ev.WorkersStarted(_, ids):
                for rank in tuple(self.ranks):
                    pid = ids.get(rank.local_rank)
                    state = "running" if rank.state == "starting" else rank.state
                    self._set(rank.local_rank, pid=pid if isinstance(pid, int) else None, state=state)
            case ev.WorkerEnded(_, local_rank, _, outcome, failure):
                self._set(local_rank, state=outcome)
                self._on_failure(failure, now)
            case ev.Noticed(_, local_rank, _, _, reason):
                self._set(local_rank, note=reason)
            case ev.Compared(_, text, odd):
                for each in [rank for rank in self.ranks if rank.rank in odd]:
                    self._set(each.local_rank, note=text)
            case ev.Progressed():
                self._progress = event
            case ev.PhaseTook(name, duration_s):
                self.took[name] = duration_s
            case ev.Restarting(_, reason, restart_count):
                self.restart_count, self.why_stopping = restart_count, reason
            case ev.ForkServerMeasured():
                self.fork_server = event
            case ev.StopAsked(signum):
                self.why_stopping = f"asked to by {signal_words(signum)}"
            case ev.RunEnded(_, _, cause):
                self._on_failure(cause, now)
            case _:
                pass  # not shown

    def _on_changed(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase, self._waited = phase, ""
        if phase in {Phase.JOINING, Phase.SPAWNING}:
            self.why_stopping = ""

    def _on_formed(self, formed: ev.RoundFormed) -> None:
        self._on_changed(Phase.SPAWNING)  # which is said a moment later
        self.formed, self.restart_count, self._progress = formed, formed.restart_count, None
        self.ranks = [RankPicture(formed.first_rank + local, local) for local in range(formed.local_world_size)]

    def _set(self, local_rank: int, **fields: Any) -> None:
        if local_rank < len(self.ranks):
            self.ranks[local_rank] = RankPicture(**{**vars(self.ranks[local_rank]), **fields})

    def _on_failure(self, failure: ProcessFailure | None, now: float) -> None:
        if failure is not None and failure != self.last_failure:
            self.last_failure, self.failed_at = failure, now

    # What it says.

    def frame(self, now: float, columns: int, rows: int) -> Frame:  # noqa: ARG002  one row is always there
        line = self.line(now, columns - 1)  # some terminals wrap behind a full row
        return Frame(line, lambda: [line.encode()])

    def line(self, now: float, width: int) -> str:
        """One line of printable ASCII, cut off at the width."""
        return fitted(self.parts(now), self.spare, width)

    def changes_at(self, now: float) -> float:
        """When `line` changes if nothing happens."""
        passed = max(0.0, now - self.began_at)
        step = next(step for least, step in _STEPS if passed >= least)
        return self.began_at + (passed // step + 1) * step

    def parts(self, now: float) -> tuple[str, ...]:
        """The time that has passed, what the run does, how far it is, the round, its size, the restarts."""
        passed = "" if self.began is None else f" {duration(now - self.began_at)}"
        parts = (f"aelastic{passed}", *self.state, self.progress, self.round, self.size, self.restarts)
        return tuple(part for part in parts if part)

    @property
    def spare(self) -> tuple[str, ...]:
        """The parts that say least."""
        return self.round, self.size

    @property
    def state(self) -> tuple[str, ...]:
        """What the run does now, and then what it waits for."""
        match self.phase:
            case Phase.INIT:
                return ("starting",)
            case Phase.JOINING:
                return (self._joining(), *_missing_first(self._waited))
            case Phase.SPAWNING | Phase.RUNNING:
                return (self._running(),)
            case Phase.CANCELLING | Phase.STOPPING:
                return (f"stopping {self._left()}{self._why()}",)
            case Phase.AWAITING:
                return (
                    self._why().removeprefix(": ") or "a worker failed",
                    self._waited or "waiting for the coordinator's decision",
                )
            case Phase.BARRIER if self.formed is not None and self.formed.group_world_size == 1:
                return ("done",)
            case Phase.BARRIER:
                return ("done here", self._waited.removeprefix("finished; ") or "waiting for other nodes")
            case Phase.DONE:
                return ("over",)

    def _joining(self) -> str:
        if self.began is None or self.began.max_nodes == 1:
            return "starting"
        fewest, most = self.began.min_nodes, self.began.max_nodes
        return f"waiting for {fewest} nodes" if fewest == most else f"waiting for {fewest} to {most} nodes"

    def _why(self) -> str:
        failed = [rank.rank for rank in self.ranks if rank.state == "failed"]
        why = self.why_stopping or (f"rank {failed[0]} failed" if failed else "")
        return why and f": {why}"

    def _running(self) -> str:
        if any(rank.state == "starting" for rank in self.ranks):
            return "starting workers"
        done = sum(rank.state == "succeeded" for rank in self.ranks)
        return f"running, {done} of {len(self.ranks)} done" if done else "running"

    def _left(self) -> str:
        left = sum(rank.state in {"starting", "running"} for rank in self.ranks)
        return _count(left, "worker") if left else "what workers left behind"

    @property
    def progress(self) -> str:
        if (at := self._progress) is None:
            return ""
        words = [f"step {at.step}" if at.total is None else f"step {at.step} of {at.total}"]
        words += [] if at.share is None else [f"{at.share:.0%}"]
        words += [] if at.steps_per_s is None else [f"{at.steps_per_s:.3g}/s"]
        words += [] if at.remaining_s is None else [f"{duration(at.remaining_s)} left"]
        return ", ".join(words)

    @property
    def round(self) -> str:
        if self.formed is None:
            return ""
        return f"{'after ' * (self.phase is Phase.JOINING)}round {self.formed.round}"

    @property
    def size(self) -> str:
        formed, began = self.formed, self.began
        if formed is not None and self.phase is not Phase.JOINING:
            nodes = f" on {_count(formed.group_world_size, 'node')}" if formed.group_world_size > 1 else ""
            return f"{_count(formed.world_size, 'rank')}{nodes}"
        return "" if began is None else f"{_count(began.local_world_size, 'rank')} here"

    @property
    def restarts(self) -> str:
        if self.began is None:
            return ""
        most = self.began.max_restarts
        return f"restarts {self.restart_count} of {most}" if most else "no restarts"

    def picture(self, now: float) -> Picture:
        """What the view shows."""
        failure, took, failed = self.last_failure, self.took, ""
        if failure is not None:
            ago = duration(now - self.failed_at)
            failed = f"last failure, {ago} ago: rank {failure.rank} on {failure.host}: {failure.message}"
        last = ", ".join(f"{name} {took[name]:.1f} s" for name in _PHASES if name in took)
        return Picture(
            title=self.parts(now),
            spare=self.spare,
            node=self._node(),
            ranks=tuple(self.ranks),
            failure=failed,
            took=f"phases took: {last}" if last else "",
            endpoints=f"endpoints: {', '.join(self._endpoint_words(now))}" if self._endpoints else "",
        )

    def _endpoint_words(self, now: float) -> list[str]:
        return [
            f"{endpoint} {f'missing ({trouble})' if trouble else 'answers'} for {duration(now - since)}"
            for endpoint, (trouble, since) in sorted(self._endpoints.items())
        ]

    def _node(self) -> str:
        began, formed = self.began, self.formed
        if began is None:
            return ""
        here, server = f"run {began.run_id} on {began.host}", self.fork_server
        if formed is not None:
            here += f" | group rank {formed.group_rank} of {formed.group_world_size}"
        if server is not None:
            here += f" | fork server {server.pss_bytes >> 20} MiB, {server.parked} parked"
        return here


def fitted(parts: Sequence[str], spare: Iterable[str], width: int) -> str:
    """The parts in a row, without as many of the spare ones as it takes."""
    for each in spare:
        if len(SEPARATOR.join(parts)) > width:
            parts = [part for part in parts if part != each]
    return cut(SEPARATOR.join(parts), width)


def cut(text: str, width: int) -> str:
    """Printable ASCII only, each of one column on every terminal; what is too long ends in dots."""
    plain = "".join(each if " " <= each <= "~" else "?" for each in " ".join(text.split()))
    return plain if len(plain) <= width else plain[: max(0, width - 3)] + "..."[: max(0, width)]


def duration(passed_s: float) -> str:
    """How long, in steps: `42 s`, `3 min 20 s`, `2 h 5 min`."""
    passed = max(0, int(passed_s))
    step = next(step for least, step in _STEPS if passed >= least)
    minutes, seconds = divmod(passed - passed % step, 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _missing_first(waited: str) -> list[str]:
    """The clauses of a waiting text, missing nodes first: the end of the line may be cut off."""
    clauses = waited[:WORDS_MAX].split("; ") if waited else []
    return sorted(clauses, key=lambda clause: not clause.startswith("waiting for "))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
