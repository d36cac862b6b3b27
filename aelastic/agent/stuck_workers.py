"""Workers of one generation that hang, or do not end: their stacks, what other nodes see, and who has failed.

Made, and imported, when the first of them is found: most generations have none.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import anyio
from anyio.abc import TaskGroup

from aelastic.agent.inquiry import Inquiries
from aelastic.agent.resources import AgentSettings, Resources
from aelastic.agent.unhealthy import UnhealthyWorkers
from aelastic.failures.failure import ProcessFailure
from aelastic.failures.places import Place
from aelastic.group.backend import WorkerStart
from aelastic.group.events import FoundUnhealthy
from aelastic.group.worker_group import WorkerGroup
from aelastic.observe.run_events import RunEvent, StacksTaken
from aelastic.stacks.before_kill import StackDumps

_log = logging.getLogger(__name__)


class StuckWorkers:
    """The parts that look at them, composed.

    Args:
        settings: the agent's.
        held: what the run holds.
        group: the workers; read, never changed.
        starts: how they were started, by local rank.
        asked_at: when those that were asked to end were, by local rank.
        ended: local ranks whose own process has ended.
        tasks: takes what is done meanwhile.
        post: takes events for the group.
        tell: takes what observers are to hear.
    """

    def __init__(
        self,
        settings: AgentSettings,
        held: Resources,
        group: WorkerGroup,
        *,
        starts: Mapping[int, WorkerStart],
        asked_at: Mapping[int, float],
        ended: set[int],
        tasks: TaskGroup,
        post: Callable[[FoundUnhealthy], None],
        tell: Callable[[RunEvent], None],
    ) -> None:
        self._held, self._group, self._env = held, group, settings.env
        self.stack_dumps = StackDumps(
            group,
            starts,
            asked_at,
            scratch=held.logs.scratch,
            sockets=held.sockets,
            env=settings.env,
            is_local=settings.is_local,
            tasks=tasks,
            tell=tell,
        )
        self.unhealthy = UnhealthyWorkers(group, starts, ended, self.stack_dumps, held.postmortem, post, tell)
        self.inquiries = Inquiries(
            settings.node_id, group, see=self._see, say=held.link.tell, tell=tell, act=self.unhealthy.on_found
        )

    async def collect(self, why: str) -> StacksTaken:
        """Takes the stacks of all workers of the job, and gives what is known of this node's."""
        before = self.stack_dumps.taken
        await self.inquiries.compare(why, 0.0, is_stopped=False)  # of all nodes, this one's among them
        taken = self.stack_dumps.taken
        return await self.stack_dumps.collect(why) if taken is before else taken

    async def _see(self, why: str, failed: Mapping[int, ProcessFailure]) -> Sequence[Place]:
        """Where the workers are; their stacks are written, and what is known of their collectives is said."""
        from aelastic.agent.places import places_of
        from aelastic.stacks.collectives import ras_line

        recorder = self._held.recorder
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_say, partial(ras_line, self._env), name="RAS")
            if recorder is not None:
                tasks.start_soon(_say, recorder.line, name="flight recorder")
            await self.stack_dumps.collect(why)
        steps = {rank: step.step for rank, step in self._held.logs.steps().items()}
        return places_of(self._group, self.stack_dumps.threads_of, failed, steps)


async def _say(ask: Callable[[], Awaitable[str]]) -> None:
    if line := await ask():
        _log.warning("%s", line)
