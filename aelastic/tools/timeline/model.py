"""The timeline of one run: values that the page draws and the trace writes.

All times are seconds since the first record of the run.  `node_reader` makes a `NodeTimeline` of one agent's log, and
`merge` the `Timeline` of all of them.

- An agent's row is cut into phases without gaps.  `detect` is the end of the workers' `run`: from the moment when the
  first of them was gone until the agent knew why.
- A worker's row holds its incarnations, one for each generation.
- A log without an end is shown as far as it goes; its last phase is open.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeAlias

WorkerOutcome: TypeAlias = Literal["succeeded", "failed", "stopped", "open"]
# How a log ends: with the run; in the middle, and its agent is alive; in the middle, and it is dead; or unknown.
Closing: TypeAlias = Literal["ended", "running", "cut off", "unknown"]
CLOSING_WORDS: dict[Closing, str] = {
    "running": "still running", "cut off": "cut off", "unknown": "still running or cut off",
}  # fmt: skip
MarkKind: TypeAlias = Literal[
    "failure", "noticed", "recovered", "compared", "killed", "stacks", "waited", "stop asked", "lost"
]
# The phases of a restart, in the order in which a node goes through them.
RESTART_PHASES = ("detect", "stop", "await", "rendezvous", "spawn")
NO_RANK = 1 << 30
# An agent whose log does not end may have lived this much longer: it writes a heartbeat at this interval.
UNKNOWN_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Block:
    """A phase of an agent."""

    name: str  # one of `run_events.PHASES`
    start: float
    end: float
    is_open: bool = False  # the log ends in it


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One process of a worker, from its start to its end."""

    generation: int
    round: int
    local_rank: int
    rank: int
    pid: str
    start: float
    end: float
    outcome: WorkerOutcome = "open"
    headline: str = ""  # why it failed
    exitcode: int | None = None  # of a failure
    known_at: float = 0.0  # when the agent learned of its end
    last_round: int = 0  # that it took part in: in place, a process outlives its first round
    is_replacement: bool = False  # in place, of a process that was lost
    kind: str = ""  # of its start: "warm" or "cold"; "" if the log does not say
    output_at: float | None = None  # its first output, and its first process group, if they were seen
    group_at: float | None = None

    @property
    def is_up_at(self) -> float | None:
        """When its start was over, as far as can be seen from outside."""
        return self.group_at if self.output_at is None else self.output_at

    progress: str = ""  # the last progress that its output reported


@dataclass(frozen=True, slots=True)
class Mark:
    """An event without a duration."""

    at: float
    kind: MarkKind
    text: str
    local_rank: int | None = None  # None: it concerns the agent
    round: int = 0


@dataclass(frozen=True, slots=True)
class RestartNotice:
    """The moment when a node learned that all workers restart."""

    at: float
    cause: str
    reason: str
    in_place: bool = False  # workers keep their processes
    stimulus: str = ""  # that set it off


@dataclass(frozen=True, slots=True)
class Recovery:
    """How the workers of a node, or of all nodes, continued in place."""

    kept: int
    workers: int  # including those that were not kept
    step: int  # of the state
    source_rank: int  # that it came from; -1: none


@dataclass(slots=True)
class NodeTimeline:
    """The story of one agent."""

    name: str  # of its host; made unique
    pid: int
    begins: float
    ends: float = 0.0  # as far as the log goes
    # If the log does not say: it was gone then, or may still be there at the end of the picture.
    gone_by: float = 0.0
    closing: Closing = "unknown"
    ends_at_start: bool = False  # the log's last entry says that the workers are started
    state: str = ""  # in the end
    reason: str = ""  # why it ended so
    entrypoint: str = ""
    workers: int = 0
    group_rank: int = NO_RANK  # when it first had one
    blocks: list[Block] = field(default_factory=list[Block])
    incarnations: list[Incarnation] = field(default_factory=list[Incarnation])
    marks: list[Mark] = field(default_factory=list[Mark])
    formed: dict[int, float] = field(default_factory=dict[int, float])  # by round
    started: dict[int, float] = field(default_factory=dict[int, float])  # by round: all its workers run
    notices: dict[int, RestartNotice] = field(default_factory=dict[int, RestartNotice])  # by the round that was over
    recovered: dict[int, Recovery] = field(default_factory=dict[int, Recovery])  # by the round that continues in place
    incomplete: int = 0  # entries with missing fields
    lost: int = 0  # records that the agent could not write

    def lose(self, records: int) -> None:
        """Counts records that the agent could not write."""
        self.lost += records

    def ranks_of(self, local_rank: int) -> tuple[int, ...]:
        """Returns the global ranks that one of its workers had, in order, without repetition."""
        return tuple(dict.fromkeys(process.rank for process in self.incarnations if process.local_rank == local_rank))


@dataclass(frozen=True, slots=True)
class Share:
    """The phases of one node in a restart."""

    node: int  # its place among the nodes of the story
    blocks: tuple[Block, ...]  # cut to the restart
    kind: str = ""  # of its workers' start: "warm", "cold", both, or "" if the log does not say
    output_s: float | None = None  # from the beginning of the restart until one of its workers wrote something

    def spent(self, name: str) -> float:
        return sum(block.end - block.start for block in self.blocks if block.name == name)

    @property
    def total(self) -> float:
        return sum(block.end - block.start for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Followed:
    """A link of the chain from what set off a restart to its end."""

    after_s: float  # since its beginning, on the first host
    text: str
    where: str  # the hosts


@dataclass(frozen=True, slots=True)
class Restart:
    """The time from a failure, or a change of nodes, until all workers run again."""

    number: int
    round: int  # that was over
    next_round: int | None
    cause: str  # "failure" or "membership"
    reason: str
    culprit: str  # the worker that failed, where and why; "" if none did
    start: float
    end: float
    is_over: bool  # else not all workers ran again: the next restart came first, or the end
    shares: tuple[Share, ...]
    in_place: bool = False  # workers kept their processes
    recovery: Recovery | None = None  # of all nodes together, once workers had the state
    chain: tuple[Followed, ...] = ()  # what happened, in order; empty for logs of older versions

    @property
    def took_s(self) -> float:
        return self.end - self.start

    @property
    def first_output(self) -> Share | None:
        """The node whose workers wrote something first."""
        seen = [share for share in self.shares if share.output_s is not None]
        return min(seen, key=lambda share: share.output_s or 0.0, default=None)


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run, according to its event logs."""

    run_id: str
    entrypoint: str
    began: datetime
    length_s: float
    nodes: tuple[NodeTimeline, ...]
    restarts: tuple[Restart, ...]
    spent: dict[str, float]  # seconds of each of `time_spent.ON`; together `length_s`
    state: str  # of the job, as the last agent saw it; "" if no agent saw the end
    reason: str
    culprit: str  # the worker whose failure ended the job, where and why; "" if none did
    notes: tuple[str, ...]  # sentences below the picture

    @property
    def is_training_known(self) -> bool:
        """Whether shares of the whole mean something.

        They do not if the logs end just after the workers had started: more training may have followed than they show.
        """
        last = max(self.nodes, key=lambda node: node.ends)
        is_open = last.closing in {"cut off", "unknown"} and last.ends_at_start
        return not is_open or self.spent["trained"] >= UNKNOWN_END_S
