"""What a worker group is doing, what it will do once its workers are gone, and what is left of them."""

from __future__ import annotations

import signal
from enum import StrEnum, auto
from typing import TypeAlias

from aelastic.core.record import Record
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
    RUNNING = auto()  # the workers run
    CANCELLING = auto()  # to be stopped while the workers were being started: waiting for the start to end
    STOPPING = auto()  # the workers were asked to end: waiting until nothing of them is left
    AWAITING = auto()  # a worker failed, all are gone: restart or not?
    BARRIER = auto()  # our workers succeeded: waiting for those of other nodes
    DONE = auto()  # final

    @property
    def has_workers(self) -> bool:
        """Whether workers exist, or what they left behind."""
        return self in {Phase.RUNNING, Phase.STOPPING}

    @property
    def is_bounded(self) -> bool:
        """Whether a deadline ends it: workers, a back end or other nodes may never do."""
        return self in {Phase.CANCELLING, Phase.STOPPING, Phase.BARRIER}


class Rejoin(Record):
    """Once the workers are gone: take part in the next round."""

    signum = signal.SIGTERM


class Await(Record):
    """Once the workers are gone: do what the coordinator will say."""

    signum = signal.SIGTERM


class End(Record):
    """Once the workers are gone: return."""

    state: WorkerState
    reason: str
    asked: bool = False  # by a person or a scheduler: the next request kills
    is_drained: bool = False
    signum: int = signal.SIGTERM  # what the workers are asked to end with

    @classmethod
    def after(cls, verdict: Ended) -> End:
        """How this node ends once the job has a verdict."""
        match verdict.outcome:
            case Outcome.SUCCEEDED:
                return cls(WorkerState.SUCCEEDED, verdict.reason)
            case Outcome.STOPPED | Outcome.KILLED:
                how = signal.SIGTERM if verdict.outcome is Outcome.STOPPED else signal.SIGKILL
                return cls(WorkerState.STOPPED, verdict.reason, asked=True, signum=how)
            case Outcome.SAVED:
                return cls(WorkerState.STOPPED, verdict.reason, asked=True, is_drained=True)
            case Outcome.FAILED | Outcome.TIMED_OUT | Outcome.REPLACED:
                return cls(WorkerState.FAILED, verdict.reason)


Wish: TypeAlias = Rejoin | Await | End
