"""This node's part in a hang comparison: asks what all workers of the job are doing, and answers for its own.

A worker that hangs, or reports that a collective timed out, is mostly a victim: the rank that it waits for is
elsewhere.  So all nodes are asked before anything is stopped (`rdzv/leader/hang_comparison.py` compares), within
`ANSWER_S`.  The ranks that differ, the outliers, fail, each on its own node, and the others are stopped as after any
failure.  If there are none, or no answer comes, the worker that was found first has failed, as without a comparison.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import assert_never

import anyio

from aelastic.agent.resources import GenerationContext
from aelastic.agent.watches.watch import Found
from aelastic.diagnose.failures.failure import SENTENCE_CHARS_MAX, ProcessFailure
from aelastic.diagnose.failures.places import Place
from aelastic.diagnose.hangs.options import WatchName
from aelastic.observe.run_events import Compared
from aelastic.rdzv.protocol import messages as m
from aelastic.workers.states import Phase

# How long to wait for nodes; the answers that came by then are used.
ANSWER_S = 3.0
# The comparison follows at once, unless the leader is gone.
COMPARED_S = 1.0
# How long the node of an outlier has to report its failure, before a victim reports its own.
OUTLIER_S = 2.0

# For a worker that has waited, but did not report how long.
SOME_TIME_S = 0.1

_HANGS: frozenset[WatchName] = frozenset({"hang", "output"})

# A collective that timed out: gloo, NCCL's watchdog, nccl2, a barrier with a timeout, a store that waits for a rank.
_TIMED_OUT = (
    r"(?i)timed out waiting \d+ ?ms|wait timeout after|watchdog caught collective operation timeout"
    r"|collective.{0,40}timed out|(failed to pass|reached) monitoredbarrier|timed out after.{0,20}ms waiting"
    r"|aborting process on rank \d+ due to timeout|nccl operation timed out|work timed out during finalize"
)


def is_collective_timeout(failure: ProcessFailure) -> bool:
    """Whether a worker failed because others did not reach a collective."""
    return bool(re.search(_TIMED_OUT, failure.message))


class HangComparisons:
    """Hang comparisons of one node, in one generation.

    Args:
        context: the context of the generation.
        see: takes the stacks of its workers, writes them, and returns where they are; receives the reason, and the
           failures that are not reported yet, by local rank.
        act: stops a worker, which then has failed; or only reports it.
    """

    def __init__(
        self,
        context: GenerationContext,
        *,
        see: Callable[[str, Mapping[int, ProcessFailure]], Awaitable[Sequence[Place]]],
        act: Callable[[Found], Awaitable[None]],
    ) -> None:
        self._node_id, self._group = context.settings.node_id, context.group
        self._send, self._emit = context.resources.link.send, context.emit
        self._see, self._act = see, act
        self._comparison: m.Compared | None = None  # the last comparison of this round
        self._unreported: dict[
            int, ProcessFailure
        ] = {}  # by local rank: failures of this round that are reported later
        self._is_cause = True  # the next worker to be stopped is the first: its reason includes the comparison
        self._changed = anyio.Event()

    @property
    def round(self) -> int:
        """The round whose workers run; 0 if none does."""
        group = self._group
        return group.assigned.round if group.assigned and group.phase is Phase.RUNNING else 0

    def on_change(self) -> None:
        """The group has changed, or a message came: all waiting tasks check again, in the order in which they came."""
        self._changed.set()
        self._changed = anyio.Event()

    async def on_found(self, found: Found) -> None:
        """A watch has found a worker of this node: if it hangs, the ranks that it waits for fail instead of it."""
        if found.by not in _HANGS or not (round_ := self.round):
            return await self._act(found)
        is_stopped = found.signum is not None
        compared = await self.compare(found.reason, found.waited_s, is_stopped=is_stopped)
        if compared is None:
            return await self._act(found)
        if is_stopped and compared.outliers and await self._wait(lambda: self.round != round_, OUTLIER_S):
            return None  # an outlier has failed
        if is_stopped and self._is_cause:
            self._is_cause, found = False, found.replace(reason=f"{found.reason}; {compared.text}")
        return await self._act(found.replace(has_stacks=True))

    async def compare(self, reason: str, waited_s: float, *, is_stopped: bool) -> m.Compared | None:
        """Asks what all workers of the job are doing; returns `None` if no answer comes, or the round is over.

        Args:
            reason: the reason, for the stack files.
            waited_s: how long the worker has waited already; 0: perhaps not at all.
            is_stopped: outliers will be stopped, and have failed.
        """
        if not (round_ := self.round):
            return None
        self._comparison, hangs = (
            None,
            m.Hangs(self._node_id, round_, reason[:SENTENCE_CHARS_MAX], waited_s, is_stopped),
        )
        self._send(hangs)
        if not await self._wait(lambda: self._comparison is not None or self.round != round_, ANSWER_S):
            self._send(hangs.replace(is_last=True))
            await self._wait(lambda: self._comparison is not None or self.round != round_, COMPARED_S)
        return self._comparison

    async def await_outliers(self, local_rank: int, failure: ProcessFailure) -> None:
        """A collective timed out and ended a worker: the ranks that it waited for fail first, if they are found."""
        if not is_collective_timeout(failure) or not (round_ := self.round):
            return
        self._unreported[local_rank] = failure
        compared = await self.compare(failure.message, SOME_TIME_S, is_stopped=True)
        if compared is not None and compared.outliers:
            await self._wait(lambda: self.round != round_, OUTLIER_S)

    async def on_received(self, message: m.Look | m.Compared) -> None:
        """Handles the leader's question, or its comparison."""
        if message.round != self.round:
            return
        match message:
            case m.Look(round_, reason):
                places = await self._see(reason, self._unreported)
                self._send(m.Saw(self._node_id, round_, tuple(place.for_others for place in places)))
            case m.Compared(_, text, outliers, is_stopped, waited_s):
                self._comparison = message
                self.on_change()
                self._emit(Compared(self._group.generation, text, outliers))
                known_s = waited_s if waited_s > SOME_TIME_S else 0.0
                found = Found(self._group.generation, 0, "hang", text, signal.SIGTERM, known_s, has_stacks=True)
                for worker in self._group.workers if is_stopped else ():
                    if worker.global_rank in outliers:
                        await self._act(found.replace(local_rank=worker.local_rank))
            case _:
                assert_never(message)

    async def _wait(self, is_so: Callable[[], bool], within_s: float) -> bool:
        """Waits until the condition holds; returns whether it did in time."""
        with anyio.move_on_after(within_s):
            while not is_so():
                await self._changed.wait()
        return is_so()
