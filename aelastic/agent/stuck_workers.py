"""Workers of one generation that hang or do not end: their stacks, the findings of other nodes, and who has failed.

When a watch reports a worker, its stacks are taken first, because they are lost with it; then the group receives its
failure, and decides.  A worker that is being stopped, or has ended, is left alone: nothing that it does then is a
failure.

Created, and imported, when the first such worker is found: most generations have none.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import anyio

from aelastic.agent.group.events import FoundUnhealthy
from aelastic.agent.hang_comparisons import HangComparisons
from aelastic.agent.resources import GenerationContext
from aelastic.agent.stack_dumps import StackDumps
from aelastic.agent.watches.watch import Found
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.diagnose.failures.places import Place
from aelastic.observe.run_events import Noticed, StacksTaken
from aelastic.workers.states import Phase

_log = logging.getLogger(__name__)


class StuckWorkers:
    """The parts that handle these workers, composed."""

    def __init__(self, context: GenerationContext) -> None:
        self._context, self._resources, self._group = context, context.resources, context.group
        self.stack_dumps = StackDumps(context)
        self.unhealthy = UnhealthyWorkers(context, self.stack_dumps)
        self.comparisons = HangComparisons(context, see=self._see, act=self.unhealthy.on_found)

    async def collect(self, why: str) -> StacksTaken:
        """Takes the stacks of all workers of the job; returns what is known of this node's."""
        before = self.stack_dumps.taken
        await self.comparisons.compare(why, 0.0, is_stopped=False)  # on all nodes, including this one
        taken = self.stack_dumps.taken
        return await self.stack_dumps.collect(why) if taken is before else taken

    async def _see(self, why: str, failed: Mapping[int, ProcessFailure]) -> Sequence[Place]:
        """Returns where the workers are; writes their stacks, and logs what is known of their collectives."""
        from aelastic.agent.places import places_of
        from aelastic.diagnose.stacks.collectives import ras_line

        recorder = self._resources.recorder
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_log_line, partial(ras_line, self._context.settings.env), name="RAS")
            if recorder is not None:
                tasks.start_soon(_log_line, recorder.line, name="flight recorder")
            await self.stack_dumps.collect(why)
        steps = {rank: step.step for rank, step in self._resources.progress.steps().items()}
        return places_of(self._group, self.stack_dumps.threads_of, failed, steps)


async def _log_line(ask: Callable[[], Awaitable[str]]) -> None:
    if line := await ask():
        _log.warning("%s", line)


class UnhealthyWorkers:
    """Live workers of one generation that a watch reports as unhealthy, and that fail because of it.

    Args:
        context: the context of the generation.
        stack_dumps: takes their stacks.
    """

    def __init__(self, context: GenerationContext, stack_dumps: StackDumps) -> None:
        self._context, self._group, self._stack_dumps = context, context.group, stack_dumps
        self._post, self._emit = context.post, context.emit
        self._found: dict[int, Found] = {}  # by local rank: findings that stop a worker
        self._unhealthy: dict[int, ProcessFailure] = {}  # by local rank: the resulting failures

    async def on_found(self, found: Found) -> None:
        """Stops a worker, which then has failed; or only reports it."""
        rank, group = found.local_rank, self._group
        is_at_work = rank in group.exits.alive and rank not in self._context.ended and rank not in self._found
        if found.generation != group.generation or group.phase is not Phase.RUNNING or not is_at_work:
            return
        worker = group.workers[rank]
        if found.signum is None:
            known = found.generation, rank, worker.global_rank, found.by, found.reason
            self._emit(Noticed(*known, is_stopped=False, silent_s=found.waited_s))
            if found.has_stacks:
                self._stack_dumps.log_innermost_frames([rank])
            elif found.by != "timer":  # a worker whose own timer has expired may not hang
                await self._stack_dumps.dump_and_log(rank, f"rank {worker.global_rank}: {found.reason}")
            return
        self._found[rank] = found
        if self._stack_dumps.claim_dump([rank], is_fresh=found.has_stacks):
            await self._stack_dumps.collect(f"rank {worker.global_rank}: {found.reason}")
        stack = self._stack_dumps.quote(rank)
        if self._found.get(rank) is found and rank not in self._context.ended:
            failure = await self._context.resources.postmortem.of_living(
                self._context.starts[rank], worker, found, stack
            )
            if self._found.get(rank) is found:
                self._unhealthy[rank] = failure
        self._post_found()

    def _post_found(self) -> None:
        """Posts the failures of workers that were found together at once, by rank: the first one stops all workers."""
        if self._found.keys() - self._unhealthy.keys() - self._context.ended:
            return  # the last of them posts
        for rank, failure in sorted(self._unhealthy.items()):
            found = self._found[rank]
            if found.signum is not None and rank not in self._context.ended:  # else it has ended by itself
                known = found.generation, rank, failure, found.signum, found.by, found.reason
                self._post(FoundUnhealthy(*known, silent_s=found.waited_s))
