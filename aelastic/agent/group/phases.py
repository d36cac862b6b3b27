"""State of a worker group: what it does once its workers are gone, and which of them have ended.

Parts of `worker_group`; only that changes them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from aelastic.base.record import Record
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.rdzv.decisions.decision import Why
from aelastic.rdzv.protocol.messages import Ended, Outcome
from aelastic.workers.states import KILL_COUNT_MAX, WorkerState


class Rejoin(Record):
    """Once the workers are gone: take part in the next round."""

    signum = signal.SIGTERM


class Await(Record):
    """Once the workers are gone: do what the leader decides."""

    signum = signal.SIGTERM


class End(Record):
    """Once the workers are gone: return."""

    state: WorkerState
    reason: Why
    asked: bool = False  # by a person or a scheduler: the next request kills
    is_drained: bool = False
    signum: int = signal.SIGTERM  # the signal that asks the workers to end

    @classmethod
    def after(cls, verdict: Ended) -> End:
        """Returns how this node ends once the job has a verdict."""
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
    """How the workers of one generation end, by local rank: which failed, which were stopped, and which are left."""

    failed: dict[int, ProcessFailure] = field(default_factory=dict[int, ProcessFailure])  # in order of failure
    # Those that ended because we asked them to, with the exception that they raised by themselves, if any.
    stopped: dict[int, ProcessFailure | None] = field(default_factory=dict[int, ProcessFailure | None])
    alive: set[int] = field(default_factory=set[int])  # those whose own process has not ended
    asked: set[int] = field(default_factory=set[int])  # those that were sent a signal to end
    is_draining: bool = False  # some were asked because of a drain
    is_saving: bool = False  # and no others were asked yet
    left: set[int] = field(default_factory=set[int])  # those with a live process, their own or a child
    kill_count: int = 0  # how often the remaining processes were sent SIGKILL

    @property
    def unended(self) -> tuple[int, ...]:
        """The local ranks that still have a live process."""
        return tuple(sorted(self.left))

    @property
    def has_children(self) -> bool:
        """Whether a worker has ended but its children may be alive."""
        return len(self.left) > len(self.alive)

    @property
    def is_killing(self) -> bool:
        """Whether the workers were sent SIGKILL."""
        return self.kill_count > 0

    @property
    def may_kill(self) -> bool:
        """Whether SIGKILL may be tried, or tried again."""
        return self.kill_count < KILL_COUNT_MAX

    def begin(self, local_ranks: Iterable[int]) -> None:
        """The workers are started."""
        self.alive = set(local_ranks)
        self.left = set(self.alive)

    def replace(self, local_rank: int) -> None:
        """A process is about to be started that replaces a worker without live processes."""
        self.failed.pop(local_rank, None)
        self.stopped.pop(local_rank, None)
        self.left.add(local_rank)

    def on_replaced(self, local_rank: int) -> None:
        """That process is started."""
        self.alive.add(local_rank)

    def ask(self, local_ranks: Iterable[int]) -> None:
        """Workers are sent a signal to end."""
        self.is_saving = False
        self.asked.update(local_ranks)

    def drain(self, local_ranks: Iterable[int]) -> None:
        """Workers must save and end."""
        self.ask(local_ranks)
        self.is_draining = self.is_saving = True

    def fail(self, local_rank: int, failure: ProcessFailure) -> None:
        """A worker has failed by itself, or was found unhealthy."""
        self.failed[local_rank] = failure

    def on_killed(self) -> None:
        """The remaining processes were sent SIGKILL."""
        self.kill_count += 1

    def on_exited(self, local_rank: int) -> None:
        self.alive.discard(local_rank)

    def on_stopping(self, local_rank: int, failure: ProcessFailure | None, raised: ProcessFailure | None) -> None:
        """A worker has ended while all are being stopped: it failed before it could be asked, or is a victim."""
        if local_rank in self.failed:
            return  # it was found unhealthy, which has been reported
        if failure is not None and not self.is_draining:
            self.fail(local_rank, failure)
        else:
            self.stopped[local_rank] = raised or failure

    def on_cleared(self, local_rank: int) -> None:
        """A worker has no live process left."""
        self.alive.discard(local_rank)
        self.left.remove(local_rank)

    def validate(self) -> None:
        assert self.alive <= self.left, "a live worker has a live process"
        assert self.failed.keys().isdisjoint(self.stopped), "a worker is a culprit or a victim"
        assert self.kill_count <= KILL_COUNT_MAX, "SIGKILL is tried a limited number of times"
