"""Reads one agent's log, in order, into the story of its node."""

from __future__ import annotations

from dataclasses import replace
from typing import cast, get_args

from aelastic.observe.run_events import NAME_OF
from aelastic.tools.timeline.model import (
    NO_RANK,
    Block,
    Incarnation,
    Mark,
    MarkKind,
    NodeTimeline,
    Recovery,
    RestartNotice,
    WorkerOutcome,
)
from aelastic.tools.timeline.reader import Entry, Log, recovered_in
from aelastic.tools.timeline.text import counted

# The block for each phase of the worker group, by its name in the log.
_PHASE_IN = {phase.value: name for phase, name in NAME_OF.items()}
# Marks with the text of their records.
_MARKS: dict[str, tuple[MarkKind, str]] = {
    "compared": ("compared", "{text}"), "waited": ("waited", "{text}"), "killed": ("killed", "SIGKILL: {reason}"),
    "stacks_taken": ("stacks", "stacks taken: {why} ({path})"),
    "not_recovered": ("noticed", "not continuing in place: {reason}"),
    "stop_asked": ("stop asked", "asked to stop (signal {signum})"),
}  # fmt: skip
# A block begins where the one before ended, unless records are missing between them.  An agent that has to wait for a
# CPU records an event some milliseconds after it (9 ms were seen, with 12 processes on 2 cores).
_SAME_MOMENT_S = 0.05


class NodeReader:
    """One log, on its way to a `NodeTimeline`.

    Args:
        log: of one agent.
        zero: the time on its clock when the picture begins.
    """

    def __init__(self, log: Log, zero: float) -> None:
        self._log = log
        self._zero = zero
        begins = log.first_wall - zero
        self._node = NodeTimeline(log.host or "?", log.pid, begins, ends=begins)
        self._phase: str | None = None  # the current one
        self._detect_since: float | None = None  # when a worker was gone; the others ran on until the agent knew
        self._alive: dict[int, Incarnation] = {}
        self._progress: dict[tuple[int, int], str] = {}  # by generation and local rank

    def read(self) -> NodeTimeline:
        node, log = self._node, self._log
        for entry in log.entries:
            at = max(entry.wall - self._zero, node.ends)
            node.ends = at
            node.ends_at_start = _is_of_a_start(entry)
            try:
                self._take(entry, at)
            except (ValueError, TypeError, KeyError):
                node.incomplete += 1  # left out; the rest is shown
        if not log.is_ended:
            node.closing = "cut off" if log.is_dead else "unknown"
            if log.alive_at is not None:
                node.closing, node.ends = "running", max(node.ends, log.alive_at - self._zero)
            self._leave_open()
        progress = self._progress
        node.incarnations = [
            replace(process, progress=progress.get((process.generation, process.local_rank), ""))
            for process in node.incarnations
        ]
        return node

    def _take(self, entry: Entry, at: float) -> None:
        node = self._node
        match entry.kind:
            case "run_began":
                node.entrypoint, node.workers = entry.text("entrypoint"), entry.number("local_world_size")
            case "changed":
                self._phase = _PHASE_IN.get(entry.text("phase"))
            case "phase_took":
                self._on_phase(entry.text("name"), entry.seconds("duration_s"), entry, at)
            case "round_formed":
                node.formed[entry.number("round")] = at
                node.workers = max(node.workers, entry.number("local_world_size"))
                if node.group_rank == NO_RANK:
                    node.group_rank = entry.number("group_rank")
            case "workers_started":
                node.started[entry.number("round")] = at
                self._phase = "run"
                self._on_started(entry, at)
            case "worker_ended":
                self._on_ended(entry, at)
            case "restarting":
                in_place = entry.fields.get("in_place") is True
                notice = RestartNotice(at, entry.text("cause"), _decided(entry), in_place, entry.text("stimulus"))
                node.notices.setdefault(entry.number("round"), notice)
            case "run_ended":
                node.closing, node.state, node.reason = "ended", entry.text("state"), _decided(entry)
            case _:
                self._take_moment(entry, at)

    def _take_moment(self, entry: Entry, at: float) -> None:
        """Events without a duration; events of a newer aelastic are left out."""
        match entry.kind:
            case "worker_reached":
                self._on_reached(entry)
            case "recovered":
                self._on_recovered(entry, at)
            case "noticed":
                sort: MarkKind = "failure" if entry.fields.get("is_stopped") is True else "noticed"
                self._mark(entry, at, sort, f"rank {entry.number('rank')}: {entry.text('reason')}")
            case kind if kind in _MARKS:
                self._mark(entry, at, _MARKS[kind][0], _MARKS[kind][1].format_map(entry.fields))
            case "progressed":
                words = f"step {entry.number('step')}"
                words += "" if entry.fields.get("total") is None else f" of {entry.number('total')}"
                self._progress[entry.number("generation"), entry.number("local_rank")] = words
            case "records_lost":
                count = entry.number("count")
                self._node.lose(count)
                self._mark(entry, at, "lost", f"{counted(count, 'record')} missing here: {entry.text('reason')}")
            case _:
                pass

    def _on_recovered(self, entry: Entry, at: float) -> None:
        node, recovered = self._node, recovered_in(entry)
        kept, workers = recovered.workers_kept, recovered.workers_kept + recovered.workers_replaced
        node.recovered[recovered.round] = Recovery(kept, workers, recovered.step, recovered.source_rank)
        self._mark(entry, at, "recovered", f"round {recovered.round} continues in place: {recovered.text}")

    def _mark(self, entry: Entry, at: float, kind: MarkKind, text: str) -> None:
        local_rank = entry.number("local_rank") if "local_rank" in entry.fields else None
        self._node.marks.append(Mark(at, kind, text, local_rank, entry.fields.get("round") or 0))

    def _on_phase(self, name: str, duration_s: float, entry: Entry, at: float) -> None:
        blocks, incarnations = self._node.blocks, self._node.incarnations
        if name == "detect":
            gone_at = max(at - duration_s, 0.0)
            self._detect_since = min(gone_at, self._detect_since or gone_at)
            for place in reversed(range(len(incarnations))):
                if incarnations[place].local_rank == entry.number("local_rank"):
                    incarnations[place] = replace(incarnations[place], end=max(gone_at, incarnations[place].start))
                    break
            return
        start = at - duration_s
        if blocks:
            start = max(start, blocks[-1].end) if start > blocks[-1].end + _SAME_MOMENT_S else blocks[-1].end
        since, self._detect_since = self._detect_since, None
        if name == "run" and since is not None and start < since < at:
            blocks += [Block("run", start, since), Block("detect", since, at)]
        else:
            blocks.append(Block(name, start, at))

    def _on_started(self, entry: Entry, at: float) -> None:
        for worker in cast("list[dict[str, object]]", entry.fields["workers"]):
            local_rank, rank = worker["local_rank"], worker["rank"]
            if not isinstance(local_rank, int) or not isinstance(rank, int):
                raise TypeError("rank")
            running = self._alive.get(local_rank)
            if running is not None and running.pid == str(worker.get("id")):
                continue  # it continues in place
            generation = entry.number("generation")
            is_replacement = any(
                (process.generation, process.local_rank) == (generation, local_rank)
                for process in self._node.incarnations
            )
            self._alive[local_rank] = Incarnation(
                generation, entry.number("round"), local_rank, rank, str(worker.get("id")), at, at,
                kind=_kind_of(worker.get("kind")), is_replacement=is_replacement,
            )  # fmt: skip

    def _on_reached(self, entry: Entry) -> None:
        local_rank, formed_at = entry.number("local_rank"), self._node.formed[entry.number("round")]
        process, reached_at = self._alive[local_rank], formed_at + entry.seconds("duration_s")
        match entry.text("phase"):
            case "output":
                self._alive[local_rank] = replace(process, output_at=reached_at)
            case "process_group":
                self._alive[local_rank] = replace(process, group_at=reached_at)
            case _:
                pass  # of a newer aelastic

    def _on_ended(self, entry: Entry, at: float) -> None:
        local_rank, outcome = entry.number("local_rank"), entry.text("outcome")
        if outcome not in get_args(WorkerOutcome):
            raise ValueError(outcome)
        # A worker may be gone before all of its node are started.
        generation, number = entry.number("generation"), entry.number("round")
        unseen = Incarnation(
            generation, number, local_rank, entry.number("rank"), "", self._node.formed.get(number, at), at
        )
        process = self._alive.pop(local_rank, unseen)
        failure = entry.fields.get("failure")
        headline, exitcode = "", None
        if isinstance(failure, dict):
            message = str(failure.get("message") or "").strip()
            headline, exitcode = message.partition("\n")[0].strip() or "failed", failure.get("exitcode")
        self._node.incarnations.append(
            replace(
                process, end=at, known_at=at, outcome=cast("WorkerOutcome", outcome), headline=headline,
                last_round=number,
                exitcode=exitcode if isinstance(exitcode, int) else None,
            )
        )  # fmt: skip

    def _leave_open(self) -> None:
        node = self._node
        node.incarnations += [replace(process, end=node.ends) for _, process in sorted(self._alive.items())]
        if self._phase is not None:
            start = node.blocks[-1].end if node.blocks else node.begins
            node.blocks.append(Block(self._phase, start, max(start, node.ends), is_open=True))


def _kind_of(value: object) -> str:
    return value if value in {"warm", "cold"} and isinstance(value, str) else ""


def _is_of_a_start(entry: Entry) -> bool:
    """Whether a record says that workers are started; three kinds do."""
    match entry.kind:
        case "phase_took":
            return entry.text("name") == "spawn"
        case "changed":
            return entry.text("before") == "spawning"
        case _:
            return entry.kind == "workers_started"


def _decided(entry: Entry) -> str:
    """Says what was decided, and what would have changed it."""
    otherwise = entry.text("otherwise")
    return entry.text("reason") + (f" (to restart anyway: {otherwise})" if otherwise else "")
