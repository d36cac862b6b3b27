"""Run events, as observers get them.

The event log writes them, metrics count them, log lines and the status line show them, and torchelastic's events are
made from them.  A run event records what happened; it asks for nothing and is not answered.  `RunEventSource` of
the agent makes those that follow from the worker group's events; the supervisor adds what only it knows: `RunBegan`,
`Waited`, `EndpointChanged`, `WorkerReached`, `ForkServerMeasured`, `Progressed`, `StacksTaken`, `Compared`,
`Announced`, `RunEnded`.  The time of each is given beside it (`observer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, Self, TypeAlias

from aelastic.base.record import Record
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.diagnose.hangs.options import WatchName
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.decision import Decision
from aelastic.rdzv.protocol.messages import Outcome
from aelastic.workers.states import Phase, Worker, WorkerState

# What a run spends its time on.
#   rendezvous: ready for a round, until it is complete          spawn: from there until all workers are started
#   run: workers run                                             detect: a worker has ended, until the agent knows why
#   stop: workers are asked to end, until nothing of them lives  await: all are gone, until the leader decides
#   barrier: ours have succeeded, until those of other nodes have
PhaseName: TypeAlias = Literal["rendezvous", "spawn", "run", "detect", "stop", "await", "barrier"]
PHASES: tuple[PhaseName, ...] = ("rendezvous", "spawn", "run", "detect", "stop", "await", "barrier")
# What takes time in each phase of the worker group; in the others nothing does.
NAME_OF: dict[Phase, PhaseName] = {
    Phase.JOINING: "rendezvous", Phase.SPAWNING: "spawn", Phase.RUNNING: "run", Phase.CANCELLING: "stop",
    Phase.PREPARING: "rendezvous", Phase.LEAVING: "stop", Phase.FORMING: "rendezvous", Phase.STOPPING: "stop",
    Phase.AWAITING: "await", Phase.BARRIER: "barrier",
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
    """Something that happened in a run: base class of the events below.

    Its `stimulus` names what set it off (`stimuli`): the events of one restart have the same one, on all nodes.  It is
    empty for an event that observers have not been given yet, and for one that nothing set off.  Two events are
    equal if the same happened, whatever set it off.
    """

    stimulus = ""  # not a field of the events: it comes with each of them

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return False
        return all(getattr(self, name) == getattr(other, name) for name in self._names)

    __hash__ = Record.__hash__

    def caused_by(self, stimulus: str) -> Self:
        """Returns the event with its stimulus."""
        event = self.replace()
        event.__dict__["stimulus"] = stimulus
        return event


class RunBegan(RunEvent):
    """The run began.  Always the first event."""

    run_id: str  # the job's name
    node_id: str  # the agent's, new at each start
    host: str
    pid: int  # the agent's
    role: str  # of the workers
    entrypoint: str  # name of the program or function
    local_world_size: int  # workers on this node
    min_nodes: int
    max_nodes: int
    max_restarts: int
    rdzv_backend: str  # empty for a single node


class Changed(RunEvent):
    """The agent's phase or the state of its workers changed."""

    before: Phase  # the previous phase
    phase: Phase
    state: WorkerState
    reason: str  # a sentence that explains the change


class PhaseTook(RunEvent):
    """A phase ended."""

    name: PhaseName
    duration_s: float
    local_rank: int | None = None  # only for `detect`


class Waited(RunEvent):
    """Nodes are missing.  Repeated every 10 s."""

    text: str  # names the missing nodes
    missing: str = ""  # the part that matters most where there is little room

    @property
    def full(self) -> str:
        return f"{self.text}; {self.missing}" if self.missing else self.text


class EndpointChanged(RunEvent):
    """One of several rendezvous endpoints started or stopped answering."""

    endpoint: str
    trouble: str  # why it does not answer; empty if it does


class RoundFormed(RunEvent):
    """This node takes part in a new round, with a new generation of workers or, in place, with the present one."""

    round: int
    generation: int  # counts the starts of workers on this node
    restart_count: int  # restarts charged so far
    group_rank: int  # rank of this node
    group_world_size: int  # number of nodes
    first_rank: int  # global rank of this node's first worker; the others follow
    local_world_size: int  # workers on this node
    world_size: int  # workers of the job
    workers: tuple[Worker, ...] = ()  # of this node; without ids unless they continue in place
    in_place: bool = False  # workers run already: they kept their processes, or were started before this round


class WorkersStarted(RunEvent):
    """All workers of this node have started or, in a round in place, continue."""

    generation: int
    ids: Mapping[int, Any]  # pid, or the back end's name for the worker, by local rank
    warm: frozenset[int] = frozenset()  # local ranks of workers that started warm

    def kind_of(self, local_rank: int) -> StartKind:
        """How the worker was started: `warm` or `cold`."""
        return "warm" if local_rank in self.warm else "cold"


class Recovered(RunEvent):
    """All workers of this node have the state of a round that continues in place."""

    round: int
    generation: int
    workers_kept: int  # workers of this node that kept their processes
    workers_replaced: int  # workers of this node that were replaced
    step: int  # of the state
    source_rank: int  # the rank that it came from; -1: it was loaded from a checkpoint or is new
    duration_s: float  # since this node's first worker ended or was found to hang, or it learned of the round's end

    @property
    def text(self) -> str:
        """How many workers were kept, where the state came from, and how long it took."""
        state = f"state of step {self.step} from rank {self.source_rank}"
        if self.source_rank < 0:
            state = f"state of step {self.step} from the checkpoint" if self.step > 0 else "no state yet"
        kept, size = self.workers_kept, self.workers_kept + self.workers_replaced
        return f"{kept} of {size} workers kept, {state}, {1000 * self.duration_s:.0f} ms"


class NotRecovered(RunEvent):
    """The workers of this node do not continue in place after all: they end and start again."""

    generation: int
    reason: str


class WorkerReached(RunEvent):
    """A starting worker has reached a phase."""

    generation: int
    local_rank: int
    rank: int
    kind: StartKind
    phase: StartPhase  # `output` or `process_group`; see `WorkersStarted` for the others
    duration_s: float  # since the round was complete


class ForkServerMeasured(RunEvent):
    """The agent measured the memory of the template, which it does from time to time."""

    parked: int  # number of processes that wait to become workers
    pss_bytes: int  # memory (PSS) of these processes and the template


class WorkerEnded(RunEvent):
    """A worker's process has ended."""

    generation: int
    local_rank: int
    rank: int
    outcome: Literal["succeeded", "failed", "stopped"]  # "stopped": by the agent
    failure: ProcessFailure | None = None


class Noticed(RunEvent):
    """A watch found a worker unhealthy."""

    generation: int
    local_rank: int
    rank: int
    by: WatchName
    reason: str
    is_stopped: bool  # the worker has failed and is stopped; otherwise it is only reported
    silent_s: float = 0.0  # how long it had shown no sign of life; 0 if it does not hang


class Compared(RunEvent):
    """A worker of the job hangs, and the agents have compared all workers.  Each node gets this event."""

    generation: int
    text: str  # the ranks that the others wait for, or the groups of ranks
    outliers: tuple[int, ...]  # global ranks that the others wait for; empty if unknown

    @property
    def odd(self) -> tuple[int, ...]:
        """Deprecated: the old name of `outliers`, until version 0.2."""
        return self.outliers


class Progressed(RunEvent):
    """A worker printed its step (`--progress`).  At most twice a second, and at the end of a generation."""

    generation: int
    local_rank: int
    rank: int
    step: int
    total: int | None = None  # number of steps, if known
    steps_per_s: float | None = None
    remaining_s: float | None = None
    is_last: bool = False  # last event of the generation

    @property
    def share(self) -> float | None:
        """The share of steps done, from 0 to 1; `None` if the total is unknown."""
        return None if self.total is None else min(1.0, self.step / self.total)


class StacksTaken(RunEvent):
    """The agent collected the stacks of this node's workers."""

    generation: int
    why: str  # the reason for collecting them
    source: Mapping[int, str]  # by local rank, the source of the stack, or why it could not be taken
    path: str  # folder of the stacks


class Announced(RunEvent):
    """News of an announced interruption or of a request, or a failure that does not stop the workers yet."""

    what: Literal["saving", "called off", "leaving", "answer", "refused", "held"]  # "leaving": this node leaves
    text: str
    save_at: int = 0  # the call of `notice.due` at which all ranks save; 0: the agents agreed on none
    is_signalled: bool = False  # no rank has called it yet, so workers get the drain signal
    verb: str = "drain"  # what ranks save for: "drain", "restart" or "stop"

    @property
    def where(self) -> str:
        """A text that names the call at which ranks save."""
        at = f"all ranks save at call {self.save_at} of notice.due" if self.save_at else "no call could be agreed"
        return at + ", or on the drain signal, since none has called it yet" * self.is_signalled


class Killed(RunEvent):
    """The agent sent SIGKILL to workers that did not end."""

    generation: int
    local_ranks: tuple[int, ...]
    reason: str
    is_early: bool = False  # before the shutdown timeout, because waiting longer could not help


class Restarting(RunEvent):
    """All workers on all nodes will restart or, in place, continue with the next round."""

    cause: RestartCause
    decision: Decision
    restart_count: int  # of the next round
    in_place: bool = False  # workers keep their processes
    only_here: bool = False  # those of this node do not, and those of the others do

    @property
    def reason(self) -> str:
        return wording.text_of(self.decision)


class StopAsked(RunEvent):
    """The agent was asked to stop."""

    signum: int


class RendezvousLost(RunEvent):
    """The agent leaves because it has lost the rendezvous."""

    reason: str


class JobEnded(RunEvent):
    """The job has a verdict; the agent stops workers that still run."""

    outcome: Outcome
    decision: Decision
    cause: ProcessFailure | None = None

    @property
    def reason(self) -> str:
        return wording.text_of(self.decision)


class RunEnded(RunEvent):
    """The run ended.  Always the last event."""

    state: WorkerState
    reason: str
    cause: ProcessFailure | None = None
    failures: Mapping[int, ProcessFailure] = MappingProxyType({})  # as in `RunResult`, by global rank
    traceback: str = ""  # of the exception that ended the run, if any
    decision: Decision | None = None  # if the agent or the job made one


@cache
def name_of(kind: str) -> str:
    """Returns the name of a kind of event in the event log: `worker_ended` for `WorkerEnded`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower()
