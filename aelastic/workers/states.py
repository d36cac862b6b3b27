"""The states of workers and of the group of workers of a node, as all views of a run show them."""

from __future__ import annotations

from enum import Enum, StrEnum, auto
from typing import Any

from aelastic.base.host.signals import signal_name
from aelastic.base.record import Record

# A process in uninterruptible sleep survives SIGKILL.  We try twice, then leave: an agent that waits forever can be
# neither restarted nor replaced.
KILL_COUNT_MAX = 2
# SIGKILL takes effect at once or not soon; the kernel only needs time to tear down large address spaces.
KILL_WAIT_S = 10.0


class WorkerState(str, Enum):  # noqa: UP042  as torch's, so that it equals torch's
    """State of a worker group (torch: `torch.distributed.elastic.agent.server.WorkerState`)."""

    UNKNOWN = "UNKNOWN"  # the agent lost track of its workers; cannot be recovered
    INIT = "INIT"  # not yet started
    HEALTHY = "HEALTHY"  # workers are running
    UNHEALTHY = "UNHEALTHY"  # workers are running, and one of them has failed
    STOPPED = "STOPPED"  # stopped by the agent; restarted unless the agent is leaving
    SUCCEEDED = "SUCCEEDED"  # all workers exited with 0; final once those of the other nodes have as well
    FAILED = "FAILED"  # a worker failed, and the job has ended

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Whether worker processes exist, healthy or not (torch: `WorkerState.is_running`)."""
        return state in {WorkerState.HEALTHY, WorkerState.UNHEALTHY}


class Worker(Record):
    """One worker of a round (torch: `torch.distributed.elastic.agent.server.Worker`).

    Args:
        local_rank: its rank on this node, from 0.
        global_rank: its rank in the job; torch's `RANK`.
        role_rank: its rank among the workers with its role.
        world_size: number of workers in the job.
        role_world_size: number of workers with its role.
        id: the back end's name for it: the pid of a process of this machine; `None` before the start.
    """

    local_rank: int
    global_rank: int = -1
    role_rank: int = -1
    world_size: int = -1
    role_world_size: int = -1
    id: Any = None


class Phase(StrEnum):
    """What the agent is doing; `WorkerState` is the public part of it."""

    INIT = auto()  # not started
    JOINING = auto()  # waiting for a round to complete
    SPAWNING = auto()  # the workers are being started
    PREPARING = auto()  # workers were started before a round includes them: waiting for them, then for the round
    RUNNING = auto()  # the workers run
    CANCELLING = auto()  # stopped while the workers were being started: waiting for the start to end
    LEAVING = auto()  # the round is over, workers keep their processes: waiting until all are ready for the next
    FORMING = auto()  # workers keep their processes, and all are ready: waiting for a round to complete
    STOPPING = auto()  # the workers were asked to end: waiting until none of their processes is left
    AWAITING = auto()  # a worker failed, all are gone: restart or not?
    BARRIER = auto()  # our workers succeeded: waiting for those of other nodes
    DONE = auto()  # final

    @property
    def has_workers(self) -> bool:
        """Whether workers, or processes that they left behind, exist."""
        return self in {Phase.PREPARING, Phase.RUNNING, Phase.LEAVING, Phase.FORMING, Phase.STOPPING}

    @property
    def is_bounded(self) -> bool:
        """Whether a deadline ends this phase: workers, a back end or other nodes may never do."""
        return self in {Phase.CANCELLING, Phase.LEAVING, Phase.STOPPING, Phase.BARRIER}


def signal_words(signum: int) -> str:
    """Returns the name, such as `SIGTERM`, or `signal 40` for a signal without a name."""
    return signal_name(signum) or f"signal {signum}"
