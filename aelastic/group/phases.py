"""Where a worker group stands: what it is doing, what it will do once its workers are gone, and what is left of them.

The parts of `worker_group`, which alone changes them.  Views of a run read the phase.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import TypeAlias

from aelastic.core.record import Record
from aelastic.decisions.decision import Why
from aelastic.failures.failure import ProcessFailure
from aelastic.group.events import WorkerState
from aelastic.rdzv.protocol.messages import Ended, Outcome

# A process in uninterruptible sleep survives SIGKILL.  We ask twice, then leave: an agent that waits without end can be
# neither restarted nor replaced.
KILL_COUNT_MAX = 2
# SIGKILL takes effect at once or not soon; the kernel needs time only to tear down large address spaces.
KILL_WAIT_S = 10.0


class Phase(StrEnum):
    """What the agent is doing; `WorkerState` is what of it concerns others."""

    INIT = auto()  # not started
    JOINING = auto()  # waiting for a round to complete
    SPAWNING = auto()  # the workers are being started
    PREPARING = auto()  # workers were started before a round takes them in: waiting for them, then for that
    RUNNING = auto()  # the workers run
    CANCELLING = auto()  # to be stopped while the workers were being started: waiting for the start to end
    LEAVING = auto()  # the round is over, workers keep their processes: waiting until all are ready for the next
    FORMING = auto()  # workers keep their processes, and all are ready: waiting for a round to complete
    STOPPING = auto()  # the workers were asked to end: waiting until nothing of them is left
    AWAITING = auto()  # a worker failed, all are gone: restart or not?
    BARRIER = auto()  # our workers succeeded: waiting for those of other nodes
    DONE = auto()  # final

    @property
    def has_workers(self) -> bool:
        """Whether workers exist, or what they left behind."""
        return self in {Phase.PREPARING, Phase.RUNNING, Phase.LEAVING, Phase.FORMING, Phase.STOPPING}

    @property
    def is_bounded(self) -> bool:
        """Whether a deadline ends it: workers, a back end or other nodes may never do."""
        return self in {Phase.CANCELLING, Phase.LEAVING, Phase.STOPPING, Phase.BARRIER}


class Rejoin(Record):
    """Once the workers are gone: take part in the next round."""

    signum = signal.SIGTERM


class Await(Record):
    """Once the workers are gone: do what the leader will say."""

    signum = signal.SIGTERM


class End(Record):
    """Once the workers are gone: return."""

    state: WorkerState
    reason: Why
    asked: bool = False  # by a person or a scheduler: the next request kills
    is_drained: bool = False
    signum: int = signal.SIGTERM  # what the workers are asked to end with

    @classmethod
    def after(cls, verdict: Ended) -> End:
        """How this node ends once the job has a verdict."""
        match verdict.outcome:
            case Outcome.SUCCEEDED:
                return cls(WorkerState.SUCCEEDED, verdict.decision)
            case Outcome.STOPPED | Outcome.KILLED:
                how = signal.SIGTERM if verdict.outcome is Outcome.STOPPED else signal.SIGKILL
                return cls(WorkerState.STOPPED, verdict.decision, asked=True, signum=how)
            case Outcome.SAVED:
                return cls(WorkerState.STOPPED, verdict.decision, asked=True, is_drained=True)
            case Outcome.FAILED | Outcome.TIMED_OUT | Outcome.REPLACED:
                return cls(WorkerState.FAILED, verdict.decision)


Wish: TypeAlias = Rejoin | Await | End


@dataclass(slots=True)
class Exits:
    """How the workers of one generation end, by local rank: which have failed, or were stopped, and what is left."""

    failed: dict[int, ProcessFailure] = field(default_factory=dict[int, ProcessFailure])  # as they failed
    # Those that ended because we asked them to, with what they raised themselves, if they did.
    stopped: dict[int, ProcessFailure | None] = field(default_factory=dict[int, ProcessFailure | None])
    alive: set[int] = field(default_factory=set[int])  # those whose own process has not ended
    asked: set[int] = field(default_factory=set[int])  # those that were sent a signal to end with
    is_draining: bool = False  # some were, since their job is about to be interrupted
    is_saving: bool = False  # and no others yet
    left: set[int] = field(default_factory=set[int])  # those of which something is alive
    kill_count: int = 0  # how often what is left was sent SIGKILL

    @property
    def unended(self) -> tuple[int, ...]:
        """Local ranks of which something is still alive."""
        return tuple(sorted(self.left))

    @property
    def has_children(self) -> bool:
        """Whether a worker has ended whose children may be alive."""
        return len(self.left) > len(self.alive)

    @property
    def is_killing(self) -> bool:
        """Whether the workers were sent SIGKILL."""
        return self.kill_count > 0

    @property
    def may_kill(self) -> bool:
        """Whether SIGKILL is to be tried, or tried again."""
        return self.kill_count < KILL_COUNT_MAX

    def begin(self, local_ranks: Iterable[int]) -> None:
        """The workers are started."""
        self.alive = set(local_ranks)
        self.left = set(self.alive)

    def replace(self, local_rank: int) -> None:
        """A process is about to be started in the place of a worker of which nothing is left."""
        self.failed.pop(local_rank, None)
        self.stopped.pop(local_rank, None)
        self.left.add(local_rank)

    def on_replaced(self, local_rank: int) -> None:
        """That process is started."""
        self.alive.add(local_rank)

    def ask(self, local_ranks: Iterable[int]) -> None:
        """Workers are sent a signal to end with."""
        self.is_saving = False
        self.asked.update(local_ranks)

    def drain(self, local_ranks: Iterable[int]) -> None:
        """Workers are to save, and end."""
        self.ask(local_ranks)
        self.is_draining = self.is_saving = True

    def fail(self, local_rank: int, failure: ProcessFailure) -> None:
        """A worker has failed by itself, or was found unhealthy."""
        self.failed[local_rank] = failure

    def on_killed(self) -> None:
        """What is left was sent SIGKILL."""
        self.kill_count += 1

    def on_exited(self, local_rank: int) -> None:
        self.alive.discard(local_rank)

    def on_stopping(self, local_rank: int, failure: ProcessFailure | None, raised: ProcessFailure | None) -> None:
        """A worker has ended while all are stopped: it failed before it could be asked, or is a victim."""
        if local_rank in self.failed:
            return  # it was found unhealthy, and that has been told
        if failure is not None and not self.is_draining:
            self.fail(local_rank, failure)
        else:
            self.stopped[local_rank] = raised or failure

    def on_cleared(self, local_rank: int) -> None:
        """Nothing of a worker is left."""
        self.alive.discard(local_rank)
        self.left.remove(local_rank)

    def validate(self) -> None:
        assert self.alive <= self.left, "of a worker that is alive something is left"
        assert self.failed.keys().isdisjoint(self.stopped), "a worker is a culprit or a victim"
        assert self.kill_count <= KILL_COUNT_MAX, "SIGKILL is tried a limited number of times"
