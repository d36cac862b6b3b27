"""The worker group: what this agent does next, given what just happened.

Events in, actions out.  Nothing here waits, spawns, signals, logs or reads a clock; the supervisor
does all of that, in the order this module asks for it.

- `handle(event, now)` is the only way to change state.  Every pair of phase and event is decided.
- The phase is a fact; what to do once the workers are gone (`_wish`) is a wish.  Events of the
  rendezvous and requests to stop change the wish, exits change the fact.
- A failure is told to the rendezvous first and the workers are stopped second, so that all nodes stop
  at the same time.  Whether to restart is not decided here: the coordinator answers.
- One deadline is armed at a time.  When it passes, send `DeadlinePassed`.

Events from workers carry their generation, those from the rendezvous their round.  The story behind the
fence: generation 3 is killed, its last exit is still in the mailbox, generation 4 starts, and
the old exit, taken for one of generation 4, would stop a healthy group.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, TypeAlias, assert_never

from aelastic.core.machine import Machine, Story
from aelastic.core.record import Record
from aelastic.failures.failure import ProcessFailure
from aelastic.group.events import (
    Action,
    Cleared,
    DeadlinePassed,
    Event,
    Exited,
    Finish,
    FoundUnhealthy,
    Join,
    Spawn,
    Spawned,
    Start,
    Stop,
    StopRequested,
    TellFailed,
    TellLeft,
    TellSucceeded,
    Worker,
    WorkerState,
)
from aelastic.rdzv.protocol.messages import Assigned, Ended, Interrupted, Outcome
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.spec import WorkerSpec

# A process in uninterruptible sleep survives SIGKILL.  We ask twice, then leave: an agent that waits
# for ever can be neither restarted nor replaced.
KILL_COUNT_MAX = 2
# SIGKILL takes effect at once or not soon; the kernel needs time only to tear down large address spaces.
KILL_WAIT_S = 10.0


class Phase(StrEnum):
    """Where the agent stands; `WorkerState` is what of it concerns others."""

    INIT = auto()
    JOINING = auto()  # waiting for a round to complete
    RUNNING = auto()
    STOPPING = auto()  # told to end, waiting for the last worker
    AWAITING = auto()  # a worker failed, all are gone: restart or not?
    BARRIER = auto()  # our workers succeeded, waiting for those of other nodes
    DONE = auto()


class _Rejoin(Record):
    """Once the workers are gone: take part in the next round."""


class _Await(Record):
    """Once the workers are gone: do what the coordinator will say."""


class _End(Record):
    """Once the workers are gone: return."""

    state: WorkerState
    reason: str
    asked: bool = False  # by a person or a scheduler: the next request kills


_Wish: TypeAlias = _Rejoin | _Await | _End


@dataclass(slots=True)
class WorkerGroup(Machine[Event, Action]):
    """The workers of one agent (torch: `torch.distributed.elastic.agent.server.WorkerGroup`)."""

    spec: WorkerSpec

    phase: Phase = Phase.INIT
    state: WorkerState = WorkerState.INIT
    reason: str = ""  # the sentence that explains `state`
    deadline: float | None = None
    generation: int = 0
    assigned: Assigned | None = None  # of the current generation
    workers: tuple[Worker, ...] = ()  # of the current generation
    failed: dict[int, ProcessFailure] = field(default_factory=dict[int, ProcessFailure])  # local ranks, as they failed
    stopped: set[int] = field(default_factory=set[int])  # local ranks that ended because we asked them to
    verdict: Ended | None = None
    _alive: set[int] = field(default_factory=set[int])
    _uncleared: set[int] = field(default_factory=set[int])
    _wish: _Wish = field(default_factory=_Rejoin)
    _kill_count: int = 0
    _is_spawned: bool = False  # the back end has started this generation; before that nobody can be signalled
    _signum: int = signal.SIGTERM  # what the workers of this generation were asked to end with
    _story: Story = field(default_factory=Story)

    @property
    def is_done(self) -> bool:
        return self.phase is Phase.DONE

    @property
    def is_killing(self) -> bool:
        """Whether the workers were sent SIGKILL."""
        return self._kill_count > 0

    @property
    def is_leaving(self) -> bool:
        """Whether its workers start no more."""
        return isinstance(self._wish, _End) or self.is_done

    @property
    def alive(self) -> frozenset[int]:
        """Local ranks of workers whose own process has not ended."""
        return frozenset(self._alive)

    @property
    def unended(self) -> tuple[int, ...]:
        """Local ranks of which something is still alive."""
        return tuple(sorted(self._alive | self._uncleared))

    def _dispatch(self, event: Event, now: float) -> list[Action]:  # noqa: C901  one case for each event
        match event:
            case Start():
                return self._on_start(event)
            case Assigned():
                return self._on_assigned(event)
            case Interrupted():
                return self._on_interrupted(event, now)
            case Ended():
                return self._on_ended(event, now)
            case Spawned():
                return self._on_spawned(event)
            case Exited():
                return self._on_exited(event, now)
            case Cleared():
                return self._on_cleared(event, now)
            case FoundUnhealthy():
                return self._on_found_unhealthy(event, now)
            case StopRequested():
                return self._on_stop_requested(event, now)
            case DeadlinePassed():
                return self._on_deadline_passed(event, now)
            case _:
                assert_never(event)

    # What the rendezvous says.

    def _on_start(self, event: Start) -> list[Action]:
        if self.phase is not Phase.INIT:
            raise self._impossible(event)
        return self._join()

    def _on_assigned(self, event: Assigned) -> list[Action]:
        match self.phase:
            case Phase.JOINING:
                return self._spawn(event)
            case Phase.DONE:
                return []  # the round completed while we were leaving
            case Phase.INIT | Phase.RUNNING | Phase.STOPPING | Phase.AWAITING | Phase.BARRIER:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    def _on_interrupted(self, event: Interrupted, now: float) -> list[Action]:
        if self.assigned is None or event.round != self.assigned.round:
            return []  # of an earlier round
        match self.phase:
            case Phase.RUNNING:
                return self._stop(_Rejoin(), WorkerState.STOPPED, event.reason, now)
            case Phase.STOPPING if isinstance(self._wish, _Await):
                self._wish, self.reason = _Rejoin(), event.reason
                return []
            case Phase.STOPPING:
                return []  # on the way to the next round, or out, already
            case Phase.AWAITING | Phase.BARRIER:
                self.state, self.reason = WorkerState.STOPPED, event.reason
                return self._join()
            case Phase.JOINING | Phase.DONE:
                return []  # the round is behind us
            case Phase.INIT:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    def _on_ended(self, event: Ended, now: float) -> list[Action]:
        if self.phase is Phase.DONE or isinstance(self._wish, _End):
            return []  # leaving already
        self.verdict = event
        end = _End(_STATE_OF[event.outcome], event.reason)
        match self.phase:
            case Phase.RUNNING:
                return self._stop(end, WorkerState.UNHEALTHY, event.reason, now)
            case Phase.STOPPING:
                self._wish = end
                return []
            case Phase.INIT | Phase.JOINING | Phase.AWAITING | Phase.BARRIER:
                return self._finish(end)
            case _:
                assert_never(self.phase)

    # What the workers do.

    def _on_spawned(self, event: Spawned) -> list[Action]:
        if event.generation != self.generation or self._is_spawned:
            return []  # an earlier generation's, or told twice
        self._is_spawned = True
        self.workers = tuple(self._worker(w.local_rank, event.ids.get(w.local_rank)) for w in self.workers)
        return self._signal(self._signum) if self.phase is Phase.STOPPING else []

    def _on_exited(self, event: Exited, now: float) -> list[Action]:
        if event.generation != self.generation or event.local_rank not in self._alive:
            return []  # an earlier generation's
        self._alive.discard(event.local_rank)
        match self.phase:
            case Phase.RUNNING if event.failure is None:
                self.deadline = now + KILL_WAIT_S  # for `Cleared`
                return []
            case Phase.RUNNING:
                assert self.assigned is not None
                assert event.failure is not None  # or the case above
                self.failed[event.local_rank] = event.failure
                tell = TellFailed(self.assigned.round, event.failure)
                return [tell, *self._stop(_Await(), WorkerState.UNHEALTHY, event.failure.message, now)]
            case Phase.STOPPING if event.local_rank in self.failed:
                return []  # it was found unhealthy, and that has been told
            case Phase.STOPPING if event.failure is None:
                self.stopped.add(event.local_rank)
                return []
            case Phase.STOPPING:
                assert event.failure is not None  # or the case above
                self.failed[event.local_rank] = event.failure  # it did not need us to end
                return []
            case Phase.DONE:
                return []  # we gave up on it
            case Phase.INIT | Phase.JOINING | Phase.AWAITING | Phase.BARRIER:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    def _on_found_unhealthy(self, event: FoundUnhealthy, now: float) -> list[Action]:
        if event.generation != self.generation or event.local_rank not in self._alive or not self._is_spawned:
            return []  # an earlier generation's, or it ended by itself meanwhile; or nobody can have looked at it
        stop = Stop(self.generation, (event.local_rank,), event.signum)
        match self.phase:
            case Phase.RUNNING:
                assert self.assigned is not None
                self.failed[event.local_rank] = event.failure
                tell = TellFailed(self.assigned.round, event.failure)
                return [tell, stop, *self._stop(_Await(), WorkerState.UNHEALTHY, event.failure.message, now)]
            case Phase.STOPPING if isinstance(self._wish, _Await) and event.local_rank not in self.failed:
                self.failed[event.local_rank] = event.failure  # of several that hang, each: all were found running
                return [stop]
            case Phase.STOPPING | Phase.DONE:
                return []  # it is being stopped already, or we gave up on it
            case Phase.INIT | Phase.JOINING | Phase.AWAITING | Phase.BARRIER:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    def _on_cleared(self, event: Cleared, now: float) -> list[Action]:
        if event.generation != self.generation or event.local_rank not in self._uncleared:
            return []  # an earlier generation's
        self._uncleared.discard(event.local_rank)
        if self.phase is Phase.RUNNING and self._uncleared == self._alive:
            self.deadline = None
        if self.unended:
            return []
        match self.phase:
            case Phase.RUNNING:
                return self._enter_barrier(now)
            case Phase.STOPPING:
                return self._stopped()
            case Phase.DONE:
                return []  # we gave up on it
            case Phase.INIT | Phase.JOINING | Phase.AWAITING | Phase.BARRIER:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    # What people and clocks ask.

    def _on_stop_requested(self, event: StopRequested, now: float) -> list[Action]:
        reason = event.reason or f"the agent was asked to stop ({_name_of(event.signum)})"
        end = _End(WorkerState.STOPPED, reason, asked=True)
        match self.phase:
            case Phase.RUNNING:
                return [TellLeft(reason), *self._stop(end, WorkerState.STOPPED, reason, now, event.signum)]
            case Phase.STOPPING if isinstance(self._wish, _End) and self._wish.asked:
                return self._kill(now)
            case Phase.STOPPING if isinstance(self._wish, _End):
                # Ending already, with a verdict worth keeping.
                self._wish = _End(self._wish.state, self._wish.reason, asked=True)
                return []
            case Phase.STOPPING:
                self._wish, self.reason = end, reason
                return [TellLeft(reason)]
            case Phase.INIT | Phase.JOINING | Phase.AWAITING | Phase.BARRIER:
                return [TellLeft(reason), *self._finish(end)]
            case Phase.DONE:
                return []
            case _:
                assert_never(self.phase)

    def _on_deadline_passed(self, event: DeadlinePassed, now: float) -> list[Action]:
        if self.deadline is None or now < self.deadline:
            return []  # disarmed or moved while the event was in the mailbox
        match self.phase:
            case Phase.STOPPING if self._kill_count == KILL_COUNT_MAX:
                reason = "workers survive SIGKILL"
                return [TellLeft(reason), *self._finish(_End(WorkerState.UNKNOWN, reason))]
            case Phase.STOPPING:
                return self._kill(now)
            case Phase.RUNNING:
                reason = "what a finished worker left behind survives SIGKILL"
                end = _End(WorkerState.UNKNOWN, reason)
                return [TellLeft(reason), *self._stop(end, WorkerState.UNHEALTHY, reason, now)]
            case Phase.BARRIER:
                reason = f"other nodes did not finish within {self.spec.exit_barrier_timeout_s:g} s of ours"
                return [TellLeft(reason), *self._finish(_End(WorkerState.SUCCEEDED, reason))]
            case Phase.INIT | Phase.JOINING | Phase.AWAITING | Phase.DONE:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    # Moves.

    def _join(self) -> list[Action]:
        self.phase, self.deadline = Phase.JOINING, None
        return [Join()]

    def _spawn(self, assigned: Assigned) -> list[Action]:
        self.generation += 1
        self.assigned = assigned
        self.phase, self.state, self.reason = Phase.RUNNING, WorkerState.HEALTHY, ""
        self._wish, self._kill_count = _Rejoin(), 0
        self._is_spawned = False
        self._alive = set(range(self.spec.local_world_size))
        self._uncleared = set(self._alive)
        self.failed, self.stopped = {}, set()
        self.workers = tuple(self._worker(local_rank, None) for local_rank in range(self.spec.local_world_size))
        return [Spawn(self.generation, assigned)]

    def _worker(self, local_rank: int, worker_id: Any) -> Worker:
        assert self.assigned is not None
        ranks: NodeRanks = self.assigned.ranks
        return Worker(
            local_rank=local_rank,
            global_rank=ranks.first_rank + local_rank,
            role_rank=ranks.first_role_rank + local_rank,
            world_size=ranks.world_size,
            role_world_size=ranks.role_world_size,
            id=worker_id,
        )

    def _stop(
        self, wish: _Wish, state: WorkerState, reason: str, now: float, signum: int = signal.SIGTERM
    ) -> list[Action]:
        self.phase, self.state, self.reason, self._wish = Phase.STOPPING, state, reason, wish
        self._kill_count = 0
        self.deadline = now + self.spec.shutdown_timeout_s
        if not self.unended:
            return self._stopped()
        return self._signal(signum)

    def _kill(self, now: float) -> list[Action]:
        if self._kill_count == KILL_COUNT_MAX:
            return []  # asked again while the last wait is on
        self._kill_count += 1
        self.deadline = now + KILL_WAIT_S
        return self._signal(signal.SIGKILL)

    def _signal(self, signum: int) -> list[Action]:
        self._signum = signum
        if not self._is_spawned:
            return []  # `Spawned` makes up for it
        # Who failed and lives was found unhealthy, and was told to end in another way.
        local_ranks = self.unended if signum == signal.SIGKILL else tuple(sorted(self._alive - self.failed.keys()))
        return [Stop(self.generation, local_ranks, signum)] if local_ranks else []

    def _stopped(self) -> list[Action]:
        match self._wish:
            case _Rejoin():
                self.state = WorkerState.STOPPED
                return self._join()
            case _Await():
                self.phase, self.state, self.deadline = Phase.AWAITING, WorkerState.STOPPED, None
                return []
            case _End() as end:
                return self._finish(end)
            case _:
                assert_never(self._wish)

    def _enter_barrier(self, now: float) -> list[Action]:
        assert self.assigned is not None
        self.phase, self.deadline = Phase.BARRIER, now + self.spec.exit_barrier_timeout_s
        self.state, self.reason = WorkerState.SUCCEEDED, "every worker of this node succeeded"
        return [TellSucceeded(self.assigned.round)]

    def _finish(self, end: _End) -> list[Action]:
        self.phase, self.deadline = Phase.DONE, None
        self.state, self.reason = end.state, end.reason
        return [Finish(end.reason)]


_STATE_OF = {
    Outcome.SUCCEEDED: WorkerState.SUCCEEDED,
    Outcome.FAILED: WorkerState.FAILED,
    Outcome.TIMED_OUT: WorkerState.FAILED,
    Outcome.REPLACED: WorkerState.FAILED,
}


def _name_of(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
