"""The story that the event logs of a run tell: rows and blocks on one line of time, and what each restart cost.

Pure: logs go in (`timeline_log.py`), values come out, which `timeline_page.py` draws and `timeline_trace.py` writes for
Perfetto.  All times in them are seconds since the first record of the run.

- An agent's row is cut into phases without gaps.  `detect` is the end of what was the workers' `run`: from the moment
  when the first of them was gone until the agent knew why.
- A worker's row holds its lives, one for each generation.
- A log that does not say how it ended is told as far as it goes; what was going on then is open.
- A restart begins when the first worker was gone, or, where nodes came or went, when the first agent was told.  It is
  over when the last node of the next round has started all its workers.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal, TypeAlias, cast, get_args

from aelastic.timeline.reader import Entry, Log, offsets_of

Outcome: TypeAlias = Literal["succeeded", "failed", "stopped", "open"]
# How a log ends: as it should; in the middle, and its agent lives; likewise, and it does not; or nobody knows.
Closing: TypeAlias = Literal["ended", "running", "cut off", "unknown"]
CLOSING_WORDS: dict[Closing, str] = {
    "running": "still running", "cut off": "cut off", "unknown": "still running or cut off",
}  # fmt: skip
MarkKind: TypeAlias = Literal["failure", "noticed", "killed", "stacks", "waited", "stop asked", "lost"]
# What an agent does while it stands there; `running` begins with starting the workers.
_PHASE_IN = {"joining": "rendezvous", "running": "spawn", "stopping": "stop", "awaiting": "await", "barrier": "barrier"}
# What a restart is spent on, in the order in which a node goes through it.
RESTART_PHASES = ("detect", "stop", "await", "rendezvous", "spawn")
# A block begins where the one before ended, unless records are missing between them.  An agent that has to wait for a
# CPU tells of an event some milliseconds after it (9 ms were seen, with 12 processes on 2 cores).
_SAME_MOMENT_S = 0.05
_NO_RANK = 1 << 30
# An agent whose log does not end may have lived so much longer: it gives a sign of life as often.
UNKNOWN_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Block:
    """A phase of an agent."""

    name: str  # one of `run_events.PHASES`
    start: float
    end: float
    is_open: bool = False  # the log ends in it


@dataclass(frozen=True, slots=True)
class Life:
    """One worker of one generation, from its start until it was gone."""

    generation: int
    round: int
    local_rank: int
    rank: int
    pid: str
    start: float
    end: float
    outcome: Outcome = "open"
    headline: str = ""  # why it failed
    exitcode: int | None = None  # likewise
    known_at: float = 0.0  # when the agent knew that it had ended


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that took no time."""

    at: float
    kind: MarkKind
    text: str
    local_rank: int | None = None  # None: it concerns the agent
    round: int = 0


@dataclass(frozen=True, slots=True)
class Told:
    """A node learnt that all workers start again."""

    at: float
    cause: str
    reason: str
    restart_count: int


@dataclass(slots=True)
class NodeStory:
    """What one agent did."""

    name: str  # of its host; made unique
    pid: int
    begins: float
    ends: float = 0.0  # as far as the log goes
    gone_by: float = (
        0.0  # where the log does not say: it was gone then, or may still be there at the end of the picture
    )
    closing: Closing = "unknown"
    ends_at_start: bool = False  # the log's last entry says that the workers are started
    state: str = ""  # in the end
    reason: str = ""  # likewise
    entrypoint: str = ""
    workers: int = 0
    group_rank: int = _NO_RANK  # when it first had one
    blocks: list[Block] = field(default_factory=list[Block])
    lives: list[Life] = field(default_factory=list[Life])
    marks: list[Mark] = field(default_factory=list[Mark])
    formed: dict[int, float] = field(default_factory=dict[int, float])  # by round
    started: dict[int, float] = field(default_factory=dict[int, float])  # by round: all its workers run
    told: dict[int, Told] = field(default_factory=dict[int, Told])  # by the round that was over
    odd: int = 0  # entries that lack what they should have
    lost: int = 0  # records that the agent could not write

    def ranks_of(self, local_rank: int) -> tuple[int, ...]:
        """The global ranks that one of its workers had, in order, without repetition."""
        return tuple(dict.fromkeys(life.rank for life in self.lives if life.local_rank == local_rank))


@dataclass(frozen=True, slots=True)
class Share:
    """What one node spent a restart on."""

    node: int  # its place among the nodes of the story
    blocks: tuple[Block, ...]  # cut to the restart

    def spent(self, name: str) -> float:
        return sum(block.end - block.start for block in self.blocks if block.name == name)

    @property
    def total(self) -> float:
        return sum(block.end - block.start for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Restart:
    """From a failure, or a change of nodes, until all workers run again."""

    number: int
    round: int  # that was over
    next_round: int | None
    cause: str  # "failure" or "membership"
    reason: str
    culprit: str  # who failed where and why, "" where nobody did
    restart_count: int
    start: float
    end: float
    is_over: bool  # else not all workers ran again: the next restart came first, or the end
    shares: tuple[Share, ...]

    @property
    def took_s(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Story:
    """A run, as its event logs tell it."""

    run_id: str
    entrypoint: str
    began: datetime
    length_s: float
    nodes: tuple[NodeStory, ...]
    restarts: tuple[Restart, ...]
    spent: dict[str, float]  # on starting, training, restarting, ending; together `length_s`
    state: str  # of the job, as the last agent saw it; "" where no agent saw the end
    reason: str
    notes: tuple[str, ...]  # sentences for whoever looks at the picture

    @property
    def is_training_known(self) -> bool:
        """Whether shares of the whole mean something.

        They don't where the logs end when workers had just started, and tell of less training than may have followed.
        """
        last = max(self.nodes, key=lambda node: node.ends)
        is_open = last.closing in {"cut off", "unknown"} and last.ends_at_start
        return not is_open or self.spent["training"] >= UNKNOWN_END_S


def tell_story(logs: Sequence[Log]) -> Story:
    """Merges the logs of one run.

    Args:
        logs: at least one, each with at least one entry.
    """
    offsets, notes = offsets_of(logs)
    begins = [log.first_wall - offset for log, offset in zip(logs, offsets, strict=True)]
    zero = min(begins)
    nodes = [_Reader(log, offset + zero).read() for log, offset in zip(logs, offsets, strict=True)]
    nodes.sort(key=lambda node: (node.group_rank, node.begins))
    length = max(node.ends for node in nodes)
    _bound_open_ends(nodes, length)
    _name_apart(nodes)
    restarts = _restarts(nodes, length)
    ended = [node for node in nodes if node.closing == "ended"]
    last = max(ended, key=lambda node: node.ends, default=None)
    is_over = last is not None and all(node.closing in {"ended", "cut off"} or node.gone_by < length for node in nodes)
    return Story(
        run_id=logs[0].run_id,
        entrypoint=next((node.entrypoint for node in nodes if node.entrypoint), ""),
        began=logs[begins.index(zero)].began,
        length_s=length,
        nodes=tuple(nodes),
        restarts=tuple(restarts),
        spent=_spent(nodes, restarts, length),
        state=last.state if last is not None and is_over else "",
        reason=last.reason if last is not None and is_over else "",
        notes=(*notes, *_notes_on(logs, nodes)),
    )


class _Reader:
    """Reads one log, in order.

    Args:
        log: of one agent.
        zero: what its clock shows when the picture begins.
    """

    def __init__(self, log: Log, zero: float) -> None:
        self._log = log
        self._zero = zero
        begins = log.first_wall - zero
        self._node = NodeStory(log.host or "?", log.pid, begins, ends=begins)
        self._phase: str | None = None  # what goes on now
        self._detect_since: float | None = None  # a worker was gone then; until that was known the others ran on
        self._alive: dict[int, Life] = {}

    def read(self) -> NodeStory:
        node, log = self._node, self._log
        for entry in log.entries:
            at = max(entry.wall - self._zero, node.ends)
            node.ends = at
            node.ends_at_start = entry.kind == "workers_started" or (
                entry.kind == "phase_took" and entry.text("name") == "spawn"
            )
            try:
                self._take(entry, at)
            except (ValueError, TypeError, KeyError):
                node.odd += 1  # what is known of the rest is told
        if not log.is_ended:
            node.closing = "cut off" if log.is_dead else "unknown"
            if log.alive_at is not None:
                node.closing, node.ends = "running", max(node.ends, log.alive_at - self._zero)
            self._leave_open()
        return node

    def _take(self, entry: Entry, at: float) -> None:  # noqa: C901  one case for each event
        node = self._node
        match entry.kind:
            case "run_began":
                node.entrypoint, node.workers = entry.text("entrypoint"), entry.number("local_world_size")
            case "changed":
                phase = _PHASE_IN.get(entry.text("phase"))
                if phase != "spawn" or entry.text("before") != "running":
                    self._phase = phase
            case "phase_took":
                self._on_phase(entry.text("name"), entry.seconds("duration_s"), entry, at)
            case "round_formed":
                node.formed[entry.number("round")] = at
                node.workers = max(node.workers, entry.number("local_world_size"))
                if node.group_rank == _NO_RANK:
                    node.group_rank = entry.number("group_rank")
            case "workers_started":
                node.started[entry.number("round")] = at
                self._phase = "run"
                self._on_started(entry, at)
            case "worker_ended":
                self._on_ended(entry, at)
            case "restarting":
                told = Told(at, entry.text("cause"), entry.text("reason"), entry.number("restart_count"))
                node.told.setdefault(entry.number("round"), told)
            case "run_ended":
                node.closing, node.state, node.reason = "ended", entry.text("state"), entry.text("reason")
            case _:
                self._take_moment(entry, at)

    def _take_moment(self, entry: Entry, at: float) -> None:
        """What took no time; what a newer aelastic tells beside that is left out."""
        match entry.kind:
            case "noticed":
                kind: MarkKind = "failure" if entry.fields.get("is_stopped") is True else "noticed"
                self._mark(entry, at, kind, f"rank {entry.number('rank')}: {entry.text('reason')}")
            case "killed":
                self._mark(entry, at, "killed", f"SIGKILL: {entry.text('reason')}")
            case "stacks_taken":
                self._mark(entry, at, "stacks", f"stacks taken: {entry.text('why')} ({entry.text('path')})")
            case "waited":
                self._mark(entry, at, "waited", entry.text("text"))
            case "stop_asked":
                self._mark(entry, at, "stop asked", f"asked to stop (signal {entry.number('signum')})")
            case "records_lost":
                count = entry.number("count")
                self._node.lost += count
                self._mark(entry, at, "lost", f"{_count(count, 'record')} missing here: {entry.text('reason')}")
            case _:
                pass

    def _mark(self, entry: Entry, at: float, kind: MarkKind, text: str) -> None:
        local_rank = entry.number("local_rank") if "local_rank" in entry.fields else None
        self._node.marks.append(Mark(at, kind, text, local_rank, entry.fields.get("round") or 0))

    def _on_phase(self, name: str, duration_s: float, entry: Entry, at: float) -> None:
        blocks, lives = self._node.blocks, self._node.lives
        if name == "detect":
            gone_at = max(at - duration_s, 0.0)
            self._detect_since = min(gone_at, self._detect_since or gone_at)
            for place in reversed(range(len(lives))):
                if lives[place].local_rank == entry.number("local_rank"):
                    lives[place] = replace(lives[place], end=max(gone_at, lives[place].start))
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
            self._alive[local_rank] = Life(
                entry.number("generation"), entry.number("round"), local_rank, rank, str(worker.get("id")), at, at
            )

    def _on_ended(self, entry: Entry, at: float) -> None:
        local_rank, outcome = entry.number("local_rank"), entry.text("outcome")
        if outcome not in get_args(Outcome):
            raise ValueError(outcome)
        # A worker may be gone before all of its node are started.
        generation, number = entry.number("generation"), entry.number("round")
        unseen = Life(generation, number, local_rank, entry.number("rank"), "", self._node.formed.get(number, at), at)
        life = self._alive.pop(local_rank, unseen)
        failure = entry.fields.get("failure")
        headline, exitcode = "", None
        if isinstance(failure, dict):
            headline, exitcode = _headline(failure), failure.get("exitcode")
        self._node.lives.append(
            replace(
                life, end=at, known_at=at, outcome=cast("Outcome", outcome), headline=headline,
                exitcode=exitcode if isinstance(exitcode, int) else None,
            )
        )  # fmt: skip

    def _leave_open(self) -> None:
        node = self._node
        node.lives += [replace(life, end=node.ends) for _, life in sorted(self._alive.items())]
        if self._phase is not None:
            start = node.blocks[-1].end if node.blocks else node.begins
            node.blocks.append(Block(self._phase, start, max(start, node.ends), is_open=True))


def _headline(failure: dict[str, object]) -> str:
    message = str(failure.get("message") or "").strip()
    return message.partition("\n")[0].strip() or "failed"


# What the logs of all nodes tell together.


def _bound_open_ends(nodes: Sequence[NodeStory], length: float) -> None:
    """Until when an agent whose log does not end may have lived: until a round was complete without it."""
    for node in nodes:
        node.gone_by = node.ends
        if node.closing in {"cut off", "unknown"}:
            last = max(node.formed, default=0)
            later = [at for other in nodes for number, at in other.formed.items() if number > last and at > node.ends]
            still = length if node.closing == "unknown" else node.ends
            node.gone_by = min(later, default=still)


def _name_apart(nodes: Sequence[NodeStory]) -> None:
    """Agents of one host get their pid, too."""
    count = Counter(node.name for node in nodes)
    for node in nodes:
        if count[node.name] > 1:
            node.name = f"{node.name} · {node.pid}"


def _restarts(nodes: Sequence[NodeStory], length: float) -> list[Restart]:
    over = sorted({number for node in nodes for number in node.told})
    rounds = sorted({number for node in nodes for number in node.formed})
    failures = _failures(nodes)
    told = [
        min((node.told[number] for node in nodes if number in node.told), key=lambda each: each.at) for number in over
    ]
    # When each began, and by whose doing.
    begins = [
        min([*failures.get(number, []), (first.at, "")]) if first.cause == "failure" else (first.at, "")
        for number, first in zip(over, told, strict=True)
    ]
    restarts = []
    for place, number in enumerate(over):
        start, culprit = begins[place]
        limit = max(begins[place + 1][0] if place + 1 < len(over) else length, start)
        later = bisect.bisect_right(rounds, number)
        next_round = rounds[later] if later < len(rounds) else None
        again = [node for node in nodes if next_round in node.formed]
        is_over = bool(again) and all(next_round in node.started for node in again)
        end = max(node.started[next_round or 0] for node in again) if is_over else limit
        is_over, end = is_over and end <= limit, min(max(start, end), limit)
        shares = [
            Share(index, _cut(node, start, end, was_there=number in node.told))
            for index, node in enumerate(nodes)
            if number in node.told or next_round in node.formed
        ]
        first = told[place]
        restarts.append(
            Restart(
                place + 1, number, next_round, first.cause, first.reason, culprit, first.restart_count,
                start, end, is_over, tuple(shares),
            )
        )  # fmt: skip
    return restarts


def _failures(nodes: Sequence[NodeStory]) -> dict[int, list[tuple[float, str]]]:
    """When workers failed, and who and why, by round."""
    failures: dict[int, list[tuple[float, str]]] = {}
    for node in nodes:
        for life in node.lives:
            if life.outcome == "failed":
                words = f"rank {life.rank} on {node.name}: {life.headline}"
                failures.setdefault(life.round, []).append((life.end, words))
        for mark in node.marks:
            if mark.kind == "failure":
                failures.setdefault(mark.round, []).append((mark.at, f"{mark.text} (on {node.name})"))
    return failures


def _cut(node: NodeStory, start: float, end: float, *, was_there: bool) -> tuple[Block, ...]:
    """What a node did in a restart; while its workers still ran, or had finished, the news was on its way."""
    blocks: list[Block] = []
    is_news = was_there
    first = bisect.bisect_right(node.blocks, start, key=lambda block: block.end)
    last = bisect.bisect_left(node.blocks, end, key=lambda block: block.start)
    for block in node.blocks[first:last]:
        if block.name in RESTART_PHASES and block.name != "detect":
            is_news = False
        name = "detect" if is_news else block.name
        begins, ends = max(block.start, start), min(block.end, end)
        if begins < ends and name in RESTART_PHASES:
            if blocks and blocks[-1].name == name:
                begins = blocks.pop().start
            blocks.append(Block(name, begins, ends))
    return tuple(blocks)


def _spent(nodes: Sequence[NodeStory], restarts: Sequence[Restart], length: float) -> dict[str, float]:
    """Cuts the whole run in four."""
    first = min((number for node in nodes for number in node.formed), default=None)
    there = [node for node in nodes if first in node.formed]
    starting = length
    if first is not None and all(first in node.started for node in there):
        starting = max(node.started[first] for node in there)
    if restarts:
        starting = min(starting, restarts[0].start)
    restarting, until = 0.0, starting
    for restart in restarts:
        restarting += max(0.0, restart.end - max(restart.start, until))
        until = max(until, restart.end)
    for node in nodes:
        for block in node.blocks:
            if block.name == "run":
                until = max(until, node.gone_by if block.is_open else block.end)
    ending = max(0.0, length - until)
    training = max(0.0, length - starting - restarting - ending)
    return {"starting": starting, "training": training, "restarting": restarting, "ending": ending}


def _notes_on(logs: Sequence[Log], nodes: Sequence[NodeStory]) -> list[str]:
    notes = []
    damaged = sum(log.damaged for log in logs)
    if damaged:
        where = ", ".join(log.source for log in logs if log.damaged)
        notes.append(f"{_count(damaged, 'damaged line')} left out ({where}).")
    if odd := sum(node.odd for node in nodes):
        notes.append(f"{_count(odd, 'record')} that lack what they should have left out.")
    if lost := sum(node.lost for node in nodes):
        notes.append(f"{_count(lost, 'record')} could not be written when they happened.")
    for node in nodes:
        if node.closing in CLOSING_WORDS:
            words = CLOSING_WORDS[node.closing]
            notes.append(f"{node.name}: {words}; the log goes as far as {node.ends:.3f} s.")
    return notes


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
