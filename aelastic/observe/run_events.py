"""Run events, as observers get them.

The event log writes them, metrics count them, log lines and the status line show them, and torchelastic's events are
made from them.  A run event says what happened, not what to do about it, and is not answered.  `run_state.py`
makes those that follow from the worker group's events; the supervisor adds what only it knows: `RunBegan`, `Waited`,
`EndpointChanged`, `WorkerReached`, `ForkServerMeasured`, `Progressed`, `StacksTaken`, `Compared`, `Announced`,
`RunEnded`.  The time of each is given beside it (`observer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from aelastic.core.record import Record
from aelastic.failures.failure import ProcessFailure
from aelastic.group.events import WatchName, Worker, WorkerState
from aelastic.group.phases import Phase
from aelastic.rdzv.protocol.messages import Outcome

# What a run spends its time on.
#   rendezvous: ready for a round, until it is complete          spawn: from there until all workers are started
#   run: workers run                                             detect: a worker has ended, until the agent knows why
#   stop: workers are asked to end, until nothing of them lives  await: all are gone, until the coordinator decides
#   barrier: ours have succeeded, until those of other nodes have
PhaseName: TypeAlias = Literal["rendezvous", "spawn", "run", "detect", "stop", "await", "barrier"]
PHASES: tuple[PhaseName, ...] = ("rendezvous", "spawn", "run", "detect", "stop", "await", "barrier")
# What takes time in each phase of the worker group; in the others nothing does.
NAME_OF: dict[Phase, PhaseName] = {
    Phase.JOINING: "rendezvous", Phase.SPAWNING: "spawn", Phase.RUNNING: "run", Phase.CANCELLING: "stop",
    Phase.STOPPING: "stop", Phase.AWAITING: "await", Phase.BARRIER: "barrier",
}  # fmt: skip
# How a worker was started: with modules imported already (`--preload`), or from nothing.
StartKind: TypeAlias = Literal["warm", "cold"]
# How far a worker's start has come, as it can be seen from outside:
#   spawned: its process is there        imported: a warm one, with that: what is preloaded is imported
#   output: it has written something     process_group: it is connected to the workers' store (`init_process_group`)
StartPhase: TypeAlias = Literal["spawned", "imported", "output", "process_group"]
# Why workers start again: a worker failed, or nodes came or went.
RestartCause: TypeAlias = Literal["failure", "membership"]


class RunEvent(Record):
    """What has happened in a run: one of the classes below."""


class RunBegan(RunEvent):
    """The run began: always the first event."""

    run_id: str
    node_id: str
    host: str
    pid: int  # the agent's
    role: str
    entrypoint: str
    local_world_size: int
    min_nodes: int
    max_nodes: int
    max_restarts: int
    rdzv_backend: str  # "" for a node on its own


class Changed(RunEvent):
    """The phase of the agent, or the state of its workers, has changed."""

    before: Phase
    phase: Phase
    state: WorkerState
    reason: str  # a sentence; what happened, if no reason was given


class PhaseTook(RunEvent):
    """A phase has just ended."""

    name: PhaseName
    duration_s: float
    local_rank: int | None = None  # of `detect`


class Waited(RunEvent):
    """Nodes are still missing; repeated every 10 s."""

    text: str


class EndpointChanged(RunEvent):
    """One of several rendezvous endpoints has begun to answer, or to be missing."""

    endpoint: str
    trouble: str  # why it is missing; "" if it answers


class RoundFormed(RunEvent):
    """This node takes part in a round, by a new generation of workers."""

    round: int
    generation: int
    restart_count: int
    group_rank: int
    group_world_size: int
    first_rank: int  # of this node's workers; the others follow
    local_world_size: int
    world_size: int
    workers: tuple[Worker, ...] = ()  # of this node; not started yet, so without ids


class WorkersStarted(RunEvent):
    """All workers of this node are started."""

    generation: int
    ids: Mapping[int, Any]  # local rank to pid, or what the back end calls them
    warm: frozenset[int] = frozenset()  # local ranks of those that started warm

    def kind_of(self, local_rank: int) -> StartKind:
        return "warm" if local_rank in self.warm else "cold"


class WorkerReached(RunEvent):
    """A worker that starts has come so far."""

    generation: int
    local_rank: int
    rank: int
    kind: StartKind
    phase: StartPhase  # `output` or `process_group`; the others are told by `WorkersStarted`
    duration_s: float  # since the round was complete


class ForkServerMeasured(RunEvent):
    """The memory of the fork server was measured, which is done now and then."""

    parked: int  # processes that wait to be workers
    pss_bytes: int  # of all of these and itself: pages that several processes share count in parts


class WorkerEnded(RunEvent):
    """A worker's process is gone."""

    generation: int
    local_rank: int
    rank: int
    outcome: Literal["succeeded", "failed", "stopped"]
    failure: ProcessFailure | None = None


class Noticed(RunEvent):
    """A watch found a worker unhealthy."""

    generation: int
    local_rank: int
    rank: int
    by: WatchName
    reason: str
    is_stopped: bool  # and counts as failed; else it is only reported


class Compared(RunEvent):
    """A worker hangs somewhere in the job, and what all of its workers do was compared: each node has this event."""

    generation: int
    text: str  # which ranks the others wait for, or which groups there are
    odd: tuple[int, ...]  # the global ranks that are waited for; empty where that cannot be told


class Progressed(RunEvent):
    """A worker's output said how far it is (`--progress`): twice a second at most, and once a generation is over."""

    generation: int
    local_rank: int
    rank: int
    step: int
    total: int | None = None  # of steps
    steps_per_s: float | None = None
    remaining_s: float | None = None
    is_last: bool = False  # of the generation

    @property
    def share(self) -> float | None:
        """Of the steps, how much is done: 0 to 1."""
        return None if self.total is None else min(1.0, self.step / self.total)


class StacksTaken(RunEvent):
    """The stacks of this node's workers were taken."""

    generation: int
    why: str
    source: Mapping[int, str]  # local rank to the source of its stack, or why there is none
    path: str  # the folder they are in


class Announced(RunEvent):
    """An interruption was announced, and what has become of it, or of a request; or a failure stops nothing yet."""

    what: Literal["saving", "called off", "leaving", "answer", "refused", "held"]  # "leaving": this node, now
    text: str
    save_at: int = 0  # the call of `notice.due` at which all ranks save; 0: none could be agreed
    is_signalled: bool = False  # no rank has called it yet: workers that handle the drain signal get that
    verb: str = "drain"  # what ranks save for: that a node leaves, or the job is to "restart", or "stop"

    @property
    def where(self) -> str:
        """At which call ranks save."""
        at = f"all ranks save at call {self.save_at} of notice.due" if self.save_at else "no call could be agreed"
        return at + ", or on the drain signal: no rank has called it yet" * self.is_signalled


class Killed(RunEvent):
    """Workers that did not end are sent SIGKILL."""

    generation: int
    local_ranks: tuple[int, ...]
    reason: str
    is_early: bool = False  # before the shutdown timeout, since to wait longer could save nothing


class Restarting(RunEvent):
    """All workers are to start again, on all nodes."""

    cause: RestartCause
    reason: str
    restart_count: int  # of the round to come


class StopAsked(RunEvent):
    """The agent is asked to leave."""

    signum: int


class RendezvousLost(RunEvent):
    """The agent leaves, because it cannot go on without the rendezvous."""

    reason: str


class JobEnded(RunEvent):
    """The job has a verdict; what still runs here is stopped."""

    outcome: Outcome
    reason: str
    cause: ProcessFailure | None = None


class RunEnded(RunEvent):
    """The run ended: always the last event."""

    state: WorkerState
    reason: str
    cause: ProcessFailure | None = None
    failures: Mapping[int, ProcessFailure] = MappingProxyType({})  # as `RunResult` has them, by global rank
    traceback: str = ""  # of the error that the run ends with


@cache
def name_of(kind: str) -> str:
    """What a kind of run event is called in the log: `WorkerEnded` is `worker_ended`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower()
