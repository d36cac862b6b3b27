"""The interface between the worker group and its supervisor: events in, actions out.

Events report what happened, actions request what to do; every action documents what answers it.  Events about
workers carry the generation they belong to, those of the rendezvous (`rdzv.messages`) their round.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any, TypeAlias

from aelastic.base.machine import DeadlinePassed as DeadlinePassed  # noqa: PLC0414  also an event of this core
from aelastic.base.record import Record
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.diagnose.hangs.options import WatchName
from aelastic.rdzv.decisions.decision import Why
from aelastic.rdzv.protocol.messages import Assigned, Ended, Interrupted, StartAhead
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.workers.states import Worker, signal_words


def worker_of(ranks: NodeRanks, local_rank: int) -> Worker:
    """Returns a worker of this node that is not started yet."""
    return Worker(
        local_rank=local_rank,
        global_rank=ranks.first_rank + local_rank,
        role_rank=ranks.first_role_rank + local_rank,
        world_size=ranks.world_size,
        role_world_size=ranks.role_world_size,
    )


# Events.


class Start(Record):
    """The run begins."""


class Spawned(Record):
    """The back end has started the workers."""

    generation: int
    ids: Mapping[int, Any]
    warm: frozenset[int] = frozenset()  # local ranks of workers that had their modules imported already


class SpawnCancelled(Record):
    """The back end was cancelled and has started no worker.  Comes instead of `Spawned`."""

    generation: int


class Exited(Record):
    """A worker's own process has ended."""

    generation: int
    local_rank: int
    failure: ProcessFailure | None  # None: it succeeded, or was asked to end
    gone_at: float | None = None  # when that was noticed; finding out why it failed takes a moment
    raised: ProcessFailure | None = None  # of a worker that was asked to end: an exception that it raised by itself


class Cleared(Record):
    """Nothing that the worker left behind is alive.  Follows its `Exited`."""

    generation: int
    local_rank: int


class FoundUnhealthy(Record):
    """A live worker that was not asked to end does not do what is expected of it: it has failed."""

    generation: int
    local_rank: int
    failure: ProcessFailure
    signum: int  # the signal to stop it with
    by: WatchName = "hang"
    reason: str = ""  # the watch's words; the failure's message may add the worker's last ones
    silent_s: float = 0.0  # how long it showed no sign of life; 0 if it does not hang


class Ready(Record):
    """A worker is at the safe point: it holds no process group, and waits for a round (recovery in place)."""

    generation: int
    local_rank: int
    process: int  # which of the rank's processes of this generation, from 0
    round: int  # `AELASTIC_ROUND` of the round that it left; -1: it has not been in one


class Shared(Record):
    """A worker has the state of the round that it is in (recovery in place)."""

    generation: int
    local_rank: int
    process: int
    round: int
    step: int  # of the state
    source: int  # the rank that it came from; -1: no rank, it was loaded or is new


class StateLost(Record):
    """A worker has found no rank with a whole state, and no checkpoint (recovery in place)."""

    generation: int
    local_rank: int
    process: int
    round: int


class Done(Record):
    """The worker's function has returned; the process waits for the others (recovery in place)."""

    generation: int
    local_rank: int
    process: int
    round: int


class Replaced(Record):
    """The back end has started a replacement.  Answers `Replace`."""

    generation: int
    local_rank: int
    id: Any
    is_warm: bool = False
    has_socket: bool = True  # without one it cannot opt in


class GraceOver(Record):
    """Do not wait any longer for workers that are being stopped: that cannot help, or a notice's time is up."""

    generation: int
    reason: str
    is_final: bool = False  # also if they are stopped for good, not only for a restart


class Drained(Record):
    """Workers end because they were asked to save: this is neither a failure nor a success."""

    generation: int
    local_ranks: tuple[int, ...]  # workers that must receive the drain signal
    until: float  # workers that have not ended by then are killed


class StopRequested(Record):
    """The agent is asked to leave.  On the second request, it kills."""

    signum: int = signal.SIGTERM
    reason: str = ""  # a sentence, if nobody asked: the agent cannot continue
    is_drained: bool = False  # its node is about to be interrupted: the same command may continue elsewhere

    @property
    def why(self) -> str:
        """The sentence, in any case."""
        return self.reason or f"the agent was asked to stop ({signal_words(self.signum)})"


Event: TypeAlias = (
    Start
    | Assigned
    | Interrupted
    | Ended
    | StartAhead
    | Spawned
    | SpawnCancelled
    | Exited
    | Cleared
    | FoundUnhealthy
    | Ready
    | Shared
    | StateLost
    | Done
    | Replaced
    | GraceOver
    | Drained
    | StopRequested
    | DeadlinePassed
)


# Actions.


class Join(Record):
    """Tell the rendezvous that this node is ready.  Answered by `Assigned` or `Ended`."""

    round: int  # the newest round that this node was assigned to
    are_ready: bool = False  # whether its workers are, and can leave the next round from its first moment


class Spawn(Record):
    """Start every local worker.  Answered by `Spawned`, and then by `Exited` and `Cleared` once per local rank."""

    generation: int
    assigned: Assigned | None  # None: no round includes this node yet; `Begin` follows when one does


class Begin(Record):
    """Make workers at the safe point enter the round.  Answered by `Shared`, `StateLost`, `Done` or `Exited`."""

    generation: int
    local_ranks: tuple[int, ...]
    assigned: Assigned


class Leave(Record):
    """Make workers leave the round and keep their processes.  Answered by `Ready` or `Exited`, once per worker."""

    generation: int
    local_ranks: tuple[int, ...]
    round: int  # `AELASTIC_ROUND`
    reason: Why


class Replace(Record):
    """Start a process that replaces a lost worker.  Answered by `Replaced`, then by `Ready` or `Exited`."""

    generation: int
    local_rank: int
    process: int


class Release(Record):
    """Let workers whose functions have returned end.  Answered by `Exited`, once per worker."""

    generation: int


class ReportOptedIn(Record):
    """Tell the rendezvous that all local workers can leave this round in place.  Not answered."""

    round: int


class ReportPrepared(Record):
    """Tell the rendezvous that its `StartAhead` is done, or cannot be done.  Not answered."""

    are_ready: bool  # whether its workers are, as in `Join`


class CancelSpawn(Record):
    """Start no worker, if it is not too late.  Answered by `SpawnCancelled`, otherwise by `Spawned`."""

    generation: int


class ReportFailed(Record):
    """Tell the rendezvous of a failure.  Answered by `Interrupted` or `Ended`."""

    round: int
    failure: ProcessFailure
    at: float  # when it was noticed


class ReportSucceeded(Record):
    """Tell the rendezvous that all local workers succeeded.  Answered by `Ended` or `Interrupted`."""

    round: int


class ReportLeft(Record):
    """Tell the rendezvous that this node leaves the job.  Not answered."""

    reason: str


class Stop(Record):
    """Signal live workers; SIGKILL ends everything that belongs to them.  Not answered; `Exited` follows."""

    generation: int
    local_ranks: tuple[int, ...]
    signum: int


class Finish(Record):
    """Return from the supervisor with the state the group has now."""

    reason: Why


Action: TypeAlias = (
    Join
    | Spawn
    | CancelSpawn
    | Begin
    | Leave
    | Replace
    | Release
    | ReportOptedIn
    | ReportPrepared
    | ReportFailed
    | ReportSucceeded
    | ReportLeft
    | Stop
    | Finish
)
