"""Recovery in place: the stage of each worker of this node.  A part of `worker_group`; only that changes it.

A worker opts in when it reaches the safe point: it holds no process group and waits for a round.  A round in which all
workers have opted in can end without ending their processes.

    STARTING ──ready──> READY ──begin──> RUNNING ──done──> DONE
                          ^                 │                │
                          └──ready── LEAVING <──────over─────┘
    any ──its process ends──> LOST ──replaced──> STARTING

A worker is identified by its local rank and the number of its process: 0 is the first one, 1 its replacement.  The
story behind that fence: rank 2 reports that it is ready and dies, its replacement starts, and only then is the message
of the dead process read.  Taken for the replacement's, it would begin a round that the replacement cannot take part in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum, auto

from aelastic.rdzv.protocol.messages import Assigned

# A survivor leaves a round within milliseconds, unless it is in code that does not return.
GRACE_S = 5.0
# From the end of a round until all workers are ready for the next one: a replacement that starts cold imports first.
LIMIT_S = 60.0
# Rounds in a row that may end before all workers have the state.  If more do, the script itself ends them.
UNSHARED_ROUNDS_MAX = 3


class WorkerStage(StrEnum):
    """The stage of a worker."""

    STARTING = auto()  # its process was started and has not reached the safe point
    READY = auto()  # at the safe point
    RUNNING = auto()  # in the round
    LEAVING = auto()  # the round is over; it has not reached the safe point
    DONE = auto()  # its function has returned; it waits for the others
    LOST = auto()  # its process has ended


_IN_ROUND = frozenset({WorkerStage.RUNNING, WorkerStage.DONE})


@dataclass(slots=True)
class InPlace:
    """The workers of one generation, by local rank."""

    stage: dict[int, WorkerStage] = field(default_factory=dict[int, WorkerStage])
    process: dict[int, int] = field(default_factory=dict[int, int])  # the number of its current process
    kept: set[int] = field(default_factory=set[int])  # survivors of the round that has ended
    warm: frozenset[int] = frozenset()  # ranks whose process was started warm
    sharing: set[int] = field(default_factory=set[int])  # ranks that do not have the state of this round yet
    unshared_rounds: int = 0  # rounds in a row that ended before all workers had the state
    # While workers leave a round, or start ahead: when all must be ready for the next one; whether the rendezvous knows
    # that this node is; and that round, if it is complete before all workers are ready.
    ready_by: float = 0.0
    has_joined: bool = False
    next: Assigned | None = None
    is_ahead: bool = False  # workers were started before a round included this node
    is_released: bool = False  # all were done and may end
    is_state_lost: bool = False  # no rank has the whole state

    def start(self, local_ranks: Iterable[int], *, is_ahead: bool) -> None:
        """A generation starts; `is_ahead`: before a round includes this node."""
        self.stage = dict.fromkeys(local_ranks, WorkerStage.STARTING)
        self.process = dict.fromkeys(self.stage, 0)
        self.kept, self.sharing = set(), set(self.stage)
        self.unshared_rounds, self.is_released, self.is_state_lost = 0, False, False
        self.warm = frozenset()
        self.has_joined, self.next, self.is_ahead = is_ahead, None, is_ahead

    # Questions.

    def is_from(self, local_rank: int, process: int) -> bool:
        """Whether a message is from the rank's current process, which has not ended."""
        stage = self.stage.get(local_rank, WorkerStage.LOST)
        return stage is not WorkerStage.LOST and self.process[local_rank] == process

    @property
    def have_all_opted_in(self) -> bool:
        """Whether all workers are in the round, or are done and wait for the others."""
        return bool(self.stage) and not self.is_released and _IN_ROUND.issuperset(self.stage.values())

    @property
    def can_leave(self) -> bool:
        """Whether workers may keep their processes if the round ends now."""
        return self.have_all_opted_in and not self.is_worn_out

    @property
    def is_worn_out(self) -> bool:
        """Whether too many rounds ended before all workers had the state, so that the next end is a restart."""
        return self.unshared_rounds >= UNSHARED_ROUNDS_MAX

    @property
    def can_lose_one(self) -> bool:
        """Whether the others may keep their processes if a worker is lost now."""
        return self.can_leave and len(self.stage) > 1

    def is_next(self, round_: int) -> bool:
        """Whether this is the round that waits for workers of this node."""
        return self.next is not None and self.next.round == round_

    def are_all(self, stage: WorkerStage) -> bool:
        return all(each is stage for each in self.stage.values())

    @property
    def may_be_released(self) -> bool:
        """Whether a function has returned, and its process need not wait for any running worker.

        Called while no worker has failed: lost workers have ended on their own, inside or outside the function.
        """
        stages = set(self.stage.values())
        return not self.is_released and WorkerStage.DONE in stages and stages <= {WorkerStage.DONE, WorkerStage.LOST}

    def those(self, stage: WorkerStage) -> tuple[int, ...]:
        return tuple(rank for rank, each in self.stage.items() if each is stage)

    # Changes.

    def on_ready(self, local_rank: int) -> None:
        self.stage[local_rank] = WorkerStage.READY

    def begin(self, local_rank: int) -> None:
        self.stage[local_rank] = WorkerStage.RUNNING

    def begin_round(self) -> None:
        """All workers enter the next round."""
        self.stage = dict.fromkeys(self.stage, WorkerStage.RUNNING)
        self.sharing = set(self.stage)
        self.is_ahead = False
        self.drop_next()

    def on_shared(self, local_rank: int) -> None:
        self.sharing.discard(local_rank)
        if not self.sharing:
            self.unshared_rounds = 0

    def on_state_lost(self) -> None:
        """No rank has a whole state, and there is no checkpoint."""
        self.is_state_lost = True

    def on_done(self, local_rank: int) -> None:
        self.stage[local_rank] = WorkerStage.DONE

    def leave(self, now: float) -> tuple[int, ...]:
        """The round is over; returns the ranks that must leave it."""
        self.ready_by = now + LIMIT_S
        self.drop_next()
        leaving = tuple(rank for rank, each in self.stage.items() if each in _IN_ROUND)
        self.stage |= dict.fromkeys(leaving, WorkerStage.LEAVING)
        self.kept = set(leaving)
        self.unshared_rounds += bool(self.sharing)
        return leaving

    def await_replacement(self, now: float) -> None:
        """A worker that waited for the next round is lost, however long after the end of the last one."""
        self.ready_by = now + LIMIT_S

    def on_lost(self, local_rank: int) -> None:
        self.stage[local_rank] = WorkerStage.LOST
        self.kept.discard(local_rank)

    def replace(self, local_rank: int) -> int:
        """Another process takes the rank; returns its number."""
        self.stage[local_rank] = WorkerStage.STARTING
        self.process[local_rank] += 1
        return self.process[local_rank]

    def on_started(self, local_ranks: frozenset[int], *, warm: frozenset[int]) -> None:
        """Processes have been started."""
        self.warm = (self.warm - local_ranks) | warm

    def join(self) -> None:
        """This node is ready for the next round."""
        self.has_joined = True

    def keep_next(self, assigned: Assigned) -> None:
        """The next round is complete, but workers are not ready for it."""
        self.next = assigned

    def drop_next(self) -> None:
        """No round waits for this node any more."""
        self.has_joined, self.next = False, None

    def release(self) -> None:
        """All are done and may end."""
        self.is_released = True

    def validate(self) -> None:
        assert self.stage.keys() == self.process.keys(), "each rank has a process"
        assert all(self.stage[rank] is not WorkerStage.LOST for rank in self.kept), "a survivor has not ended"
