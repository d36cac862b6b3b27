"""Fails live workers that a watch reports as unhealthy: dumps the stacks, then posts the failure.

The stacks come first, since they are gone with the worker; then the group hears of it, and decides.  A worker that is
being stopped, or has ended, is left alone: what it does meanwhile is no failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aelastic.agent.postmortem import Postmortem
from aelastic.failures.failure import ProcessFailure
from aelastic.group.backend import WorkerStart
from aelastic.group.events import FoundUnhealthy
from aelastic.group.phases import Phase
from aelastic.group.worker_group import WorkerGroup
from aelastic.hangs.watch import Found
from aelastic.observe.run_events import Noticed
from aelastic.stacks.before_kill import StackDumps


class UnhealthyWorkers:
    """Unhealthy workers of one generation.

    Args:
        group: the workers; read, never changed.
        starts: how they were started, by local rank.
        ended: local ranks whose own process has ended.
        stack_dumps: takes their stacks.
        postmortem: makes failures of what they left.
        post: takes events for the group.
        tell: gets what was found of workers that are not stopped for it.
    """

    def __init__(
        self,
        group: WorkerGroup,
        starts: Mapping[int, WorkerStart],
        ended: set[int],
        stack_dumps: StackDumps,
        postmortem: Postmortem,
        post: Callable[[FoundUnhealthy], None],
        tell: Callable[[Noticed], None],
    ) -> None:
        self._group = group
        self._stack_dumps = stack_dumps
        self._postmortem = postmortem
        self._post = post
        self._tell = tell
        self._starts, self._ended = starts, ended
        self._found: dict[int, Found] = {}  # by local rank: findings for which a worker is stopped
        self._unhealthy: dict[int, ProcessFailure] = {}  # by local rank: the failures that follow from them

    async def on_found(self, found: Found) -> None:
        """Has a worker stopped, which then has failed; or only reports it."""
        rank, group = found.local_rank, self._group
        is_at_work = rank in group.exits.alive and rank not in self._ended and rank not in self._found
        if found.generation != group.generation or group.phase is not Phase.RUNNING or not is_at_work:
            return
        worker = group.workers[rank]
        if found.signum is None:
            self._tell(Noticed(found.generation, rank, worker.global_rank, found.by, found.reason, is_stopped=False))
            if found.has_stacks:
                self._stack_dumps.log_innermost_frames([rank])
            elif found.by != "timer":  # a worker that waits for the user's own timer need not hang
                await self._stack_dumps.dump_and_log(rank, f"rank {worker.global_rank}: {found.reason}")
            return
        self._found[rank] = found
        if self._stack_dumps.claim_dump([rank], is_fresh=found.has_stacks):
            await self._stack_dumps.collect(f"rank {worker.global_rank}: {found.reason}")
        stack = self._stack_dumps.quote(rank)
        if self._found.get(rank) is found and rank not in self._ended:
            failure = await self._postmortem.of_living(self._starts[rank], worker, found, stack)
            if self._found.get(rank) is found:
                self._unhealthy[rank] = failure
        self._post_found()

    def _post_found(self) -> None:
        """Posts the failures of workers that were found together at once, by rank: at the first, all are stopped."""
        if self._found.keys() - self._unhealthy.keys() - self._ended:
            return  # the last of them posts
        for rank, failure in sorted(self._unhealthy.items()):
            found = self._found[rank]
            if found.signum is not None and rank not in self._ended:  # else it ended by itself meanwhile
                self._post(FoundUnhealthy(found.generation, rank, failure, found.signum, found.by, found.reason))
