"""One start of the workers: starts them, follows them, and examines them when they end.

Each worker has its own task, which ends by posting the worker's `Cleared`.  A start may be cancelled: then no worker
is started, or those that are started anyway get their signals as usual.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from aelastic.agent.group import events as ev
from aelastic.agent.group.in_place import WorkerStage
from aelastic.agent.group.worker_env import MEETING_VARIABLES, own_variables, worker_args, worker_env
from aelastic.agent.resources import AgentSettings, GenerationContext, listen_for_workers
from aelastic.agent.worker_links import WorkerLinks
from aelastic.base.loop import clock
from aelastic.base.loop.threads import run_sync
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.errors import HostError
from aelastic.logs.run_logs import WorkerFiles
from aelastic.observe.run_events import Announced
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.cause import Cause, CauseKind
from aelastic.rdzv.decisions.decision import next_round
from aelastic.rdzv.protocol.messages import Assigned, Interrupted
from aelastic.rdzv.protocol.ranks import assign_ranks
from aelastic.training.notice.page import PAGE_VARIABLE
from aelastic.workers.backend import WorkerExit, WorkerStart
from aelastic.workers.states import Phase

if TYPE_CHECKING:
    from aelastic.agent.grace_watch import GraceWatch
    from aelastic.agent.stuck_workers import StuckWorkers
    from aelastic.spec import WorkerSpec

_log = logging.getLogger(__name__)

# Workers that start need the CPUs, and the workers of a short job mostly do not fail.
PREPARES_AFTER_S = 1.0
# A failure that blames a lost peer is reported this much later, unless that peer is seen to end first.
GIVES_WAY_S = 0.3
# Workers on all nodes are notified of a worker's end within this time, unless the failure is held or the leader lost.
NOTIFIED_WITHIN_S = 10.0
HELD_MAX_S = 1800.0  # gloo's default timeout: collectives fail by then anyway
STATES_DIFFER = "a restart would hide that ranks which should have the same state differ"
FROZEN = next_round(Cause(CauseKind.AGENT_FROZEN))


def patience_s(spec: WorkerSpec) -> float:
    """Returns how many seconds a worker waits for the end of its round, once another rank has closed a connection.

    Meanwhile, the agents may hold the failure for the user to look at it, or may have to replace the leader.
    """
    lease_s = 0.0 if spec.rdzv is None else spec.rdzv.lease_s
    return NOTIFIED_WITHIN_S + lease_s + min(spec.hold_on_failure_s or 0.0, HELD_MAX_S)


class Generation:
    """The workers of one generation.

    Args:
        context: the context of the generation.
        spawn: the action that starts them.
        give_up: ends the run with an error; called before the start of the workers is reported as cancelled.
    """

    def __init__(self, context: GenerationContext, spawn: ev.Spawn, give_up: Callable[[HostError], None]) -> None:
        self.number = spawn.generation
        self.return_values: dict[int, Any] = {}  # by local rank
        self._is_ahead = spawn.assigned is None  # workers are started before a round takes this node in
        self._assigned = spawn.assigned or provisional(context.settings)
        self._context, self._settings, self._group = context, context.settings, context.group
        self._resources, self._post, self._emit = context.resources, context.post, context.emit
        self._give_up = give_up
        self._killed: set[int] = set()  # local ranks that were sent SIGKILL
        self._links = WorkerLinks(self.number, self._resources.sockets, self._post)
        self._stuck: StuckWorkers | None = None
        self._has_warned = False
        self._start = anyio.CancelScope()
        self._reading: dict[int, anyio.CancelScope] = {}  # by local rank: workers whose return value is being read
        self._one_has_ended = anyio.Event()
        self.is_held = False  # a worker has failed, and the others keep running for the user to look at them
        self._changed = anyio.Event()  # the group
        self._has_reported = anyio.Event()  # the previous failure has been reported
        self._has_reported.set()

    def cancel(self) -> None:
        """Cancels the start of the workers, if it is not too late."""
        self._start.cancel()

    async def run(self) -> None:
        """Starts the workers, unless cancelled first: none may start once the group has given up on them."""
        try:
            await self._run()
        except BaseException:
            self._links.close()
            raise

    async def _run(self) -> None:
        resources, local_ranks = self._resources, range(self._settings.spec.local_world_size)
        await resources.progress.end()
        await resources.logs.end_attempt()
        starts: list[WorkerStart] = []
        ids: Mapping[int, Any] | None = None
        with self._start, self._giving_up():
            await self._get_ready()
            pages = resources.pages.begin(self.number, local_ranks if self._settings.is_local else ())
            envs = {rank: self._worker_env(rank, pages.get(rank)) for rank in local_ranks}
            files = await resources.logs.open_attempt(self.number - 1, envs)
            if resources.recorder is not None:
                await resources.recorder.begin(resources.logs.root / f"flight_recorder_{self.number - 1}", envs)
            resources.progress.begin(self.number, [int(envs[rank]["RANK"]) for rank in local_ranks])
            if self._group.phase is Phase.SPAWNING:
                starts = [self._worker_start(rank, files[rank], envs[rank]) for rank in local_ranks]
                self._context.starts.update((start.local_rank, start) for start in starts)
                resources.start_watch.begin(starts)
                starter, by = self._settings.starter, resources.backend.start
                ids = await (by(starts) if starter is None else starter(starts, by))
                resources.logs.started(ids)
        if ids is None:
            self._links.close()
            self._post(ev.SpawnCancelled(self.number))
        elif self._group.is_done:  # the group gave up on a back end that could not be cancelled
            self._links.close()
            for start in starts:
                resources.backend.stop(start.local_rank, signal.SIGKILL)
        else:
            # After the workers: they need a second before they need the store.
            if self._serves_store:
                resources.store.serve()
            self._post(ev.Spawned(self.number, ids, frozenset(filter(resources.backend.is_warm, ids))))
            self._watch(ids)
            resources.postmortem.prepare()
            if self.number == 1 and resources.recorder is not None:
                self._context.tasks.start_soon(self.stuck.stack_dumps.warn_unless_seen, name="a first look at stacks")
            for start in starts:
                self._follow_soon(start)
            with anyio.move_on_after(PREPARES_AFTER_S) as scope:
                await self._one_has_ended.wait()
            if scope.cancelled_caught:
                await run_sync(prepare_for_failure)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """If this host refuses what the workers need, this agent leaves; the others continue without it."""
        try:
            yield
        except HostError as error:
            if self._group.phase in {Phase.SPAWNING, Phase.RUNNING}:  # else it is leaving, or another round follows
                self._give_up(error)

    def stop(self, local_ranks: tuple[int, ...], signum: int) -> None:
        """Signals workers."""
        for local_rank in local_ranks:
            if local_rank in self._reading:
                self._reading[local_rank].cancel()
            if not self._resources.backend.stop(local_rank, signum):
                continue
            if signum == signal.SIGKILL:
                self._killed.add(local_rank)
                self.stuck.stack_dumps.killed(local_rank)
            else:
                self._context.asked_at.setdefault(local_rank, clock.now())

    async def dump_and_stop(self, stop: ev.Stop) -> None:
        """Takes the stacks of workers, then kills them.

        Meanwhile the group waits for them to end, no longer than it would otherwise.
        """
        await self.stuck.stack_dumps.collect("about to be killed")
        if stop.generation == self._group.generation:  # otherwise they have ended, and others run
            local_ranks = tuple(rank for rank in stop.local_ranks if not self._is_replaced(rank))
            self.stuck.stack_dumps.log_innermost_frames(local_ranks)
            self.stop(local_ranks, stop.signum)

    def _is_replaced(self, local_rank: int) -> bool:
        """Whether a worker that was late to leave its round has ended meanwhile, and another process has its rank."""
        is_in_place = self._group.phase in {Phase.LEAVING, Phase.FORMING, Phase.RUNNING}
        return is_in_place and self._group.in_place.stage[local_rank] not in {WorkerStage.LEAVING, WorkerStage.LOST}

    @property
    def stuck(self) -> StuckWorkers:
        """Handles workers that hang or do not end."""
        if self._stuck is None:
            from aelastic.agent.stuck_workers import StuckWorkers

            self._stuck = StuckWorkers(self._context)
        return self._stuck

    # Recovery in place.

    def _listen(self, local_rank: int, process: int) -> Mapping[str, str]:
        """Opens the socket of a process that is about to start; returns its variable."""
        return self._links.listen(local_rank, process) if can_recover_in_place(self._settings) else {}

    async def begin(self, action: ev.Begin) -> None:
        """Makes workers enter a round: the one that they were started for, or the next one.

        Before the next one, an address may have to be looked up.  Meanwhile a worker may be lost, and that round may
        end: the replacement must not enter it.
        """
        links = self._links.present(action.local_ranks)
        if action.assigned is not self._assigned:
            self._assigned, self._is_ahead = action.assigned, False
            self.is_held = False
            self._stuck = None  # findings of the last round do not apply to this one
            self._resources.pages.begin_round()
            with self._giving_up():
                await self._listen_for_workers()
            if self._group.generation == self.number and self._group.assigned is action.assigned:
                self._watch_round()
        self._resources.progress.expect_commits()
        own = own_variables(self._settings.spec)
        for rank, link in links.items():
            env = self._worker_env(rank, self._context.starts[rank].env.get(PAGE_VARIABLE))
            own_env = {name: env.get(name) for name in own & env.keys()}
            self._links.begin(link, action.assigned.fence, own_env, patience_s(self._settings.spec))

    def _watch_round(self) -> None:
        if self._serves_store:
            self._resources.store.serve()
        self._resources.progress.renumber([worker.global_rank for worker in self._group.workers])
        self._watch({worker.local_rank: worker.id for worker in self._group.workers})

    def on_opted_in(self) -> None:
        """All workers of this node can recover in place."""
        spec = self._settings.spec
        if not spec.max_restarts and not spec.restart_policy and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the workers can recover in place, but a recovery counts as a restart: with --max-restarts 0, the "
                "first failure ends the job"
            )

    def leave(self, action: ev.Leave) -> None:
        """Makes workers leave their round and keep their processes."""
        self._links.leave(action.local_ranks, action.round, wording.text_of(action.reason))

    def release(self) -> None:
        """Notifies the workers that all their functions have returned, so that each can end."""
        self._links.release()

    async def replace(self, action: ev.Replace) -> None:
        """Replaces a worker whose processes are all gone."""
        rank, resources = action.local_rank, self._resources
        start = self._context.starts[rank]
        self._context.ended.discard(rank)
        self._context.asked_at.pop(rank, None)
        self._killed.discard(rank)
        self.return_values.pop(rank, None)
        resources.pages.renew(rank)
        await run_sync(_remove, start.error_file)
        socket_variable = self._listen(rank, action.process)
        start = start.replace(env={**start.env, **socket_variable})
        self._context.starts[rank] = start
        try:
            id_ = await resources.backend.replace(start)
        except HostError as error:
            self._give_up(error)
            self._post(ev.Cleared(self.number, rank))
            return
        self._post(
            ev.Replaced(self.number, rank, id_, resources.backend.is_warm(rank), has_socket=bool(socket_variable))
        )
        self._follow_soon(start)

    @cached_property
    def grace(self) -> GraceWatch:
        """Limits the time that workers have to end for a restart."""
        from aelastic.agent.grace_watch import GraceWatch

        return GraceWatch(self._context)

    def close(self) -> None:
        """All workers have ended."""
        self._links.close()

    def on_change(self) -> None:
        """Something has happened to the group, or to a worker."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
        if self._stuck is not None:
            self._stuck.comparisons.on_change()

    def stacks_of_killed(self) -> dict[int, str]:
        """Returns a description, with the stack, of each worker that had to be killed, by global rank."""
        return {} if self._stuck is None else self._stuck.stack_dumps.stacks_of_killed()

    async def _get_ready(self) -> None:
        """Prepares the start of workers.  Those that start ahead have time, and start warm if they can."""
        if self._is_ahead:
            await self._resources.prepared()
        await self._listen_for_workers()

    def _watch(self, ids: Mapping[int, Any]) -> None:
        """Watches workers, unless they wait for a round to include this node: then nothing is expected of them."""
        if not self._is_ahead:
            self._resources.watches.started(self.number, [*self._context.starts.values()], ids)

    async def _listen_for_workers(self) -> None:
        if self._serves_store:
            await listen_for_workers(self._resources.store, self._assigned.master_addr, self._settings.spec)

    @property
    def _serves_store(self) -> bool:
        return self._assigned.ranks.group_rank == 0 and self._store_server == "agent"

    @property
    def _store_server(self) -> str:
        """Which process serves the workers' store, as in `Assigned`."""
        server = self._assigned.store_server
        return "worker" if server == "agent" and not self._settings.has_agent_store else server

    def _worker_env(self, local_rank: int, page: str | None) -> dict[str, str]:
        return worker_env(
            self._settings.spec,
            {**self._settings.env, **self._resources.watches.env},
            self._assigned,
            local_rank,
            run_id=self._settings.run_id,
            has_agent_store=self._store_server != "worker",
            control_socket=self._resources.sockets.path(self.number - 1, local_rank),
            notice_page=page,
        )

    def _worker_start(self, local_rank: int, files: WorkerFiles, env: dict[str, str]) -> WorkerStart:
        spec = self._settings.spec
        known = {name: value for name, value in env.items() if not (self._is_ahead and name in MEETING_VARIABLES)}
        return WorkerStart(
            local_rank=local_rank,
            entrypoint=spec.entrypoint,
            args=worker_args(spec.args, local_rank),
            env={**known, **self._listen(local_rank, 0)},
            stdout=files.stdout,
            stderr=files.stderr,
            error_file=files.error_file,
            return_file=files.return_file,
            cpus=(self._settings.cpus or {}).get(local_rank),
            wrap=worker_args(spec.wrap, local_rank) if spec.wraps(int(env["RANK"])) else (),
        )

    def _follow_soon(self, start: WorkerStart) -> None:
        self._context.tasks.start_soon(self._links.follow, start.local_rank, name=f"link {start.local_rank}")
        self._context.tasks.start_soon(self._follow, start, name=f"worker {start.local_rank}")

    async def _follow(self, start: WorkerStart) -> None:
        """Waits for one worker to end, and for all processes that it leaves behind."""
        resources, local_rank = self._resources, start.local_rank
        exit_ = await resources.backend.wait(local_rank)
        self._one_has_ended.set()
        self._context.ended.add(local_rank)
        self.on_change()
        resources.watches.ended(self.number, local_rank)
        gone_at = clock.now()
        # A worker that was asked to end is a victim, whatever it reports; or was found unhealthy, for a known reason.
        if local_rank in self._group.exits.failed:
            self._post(ev.Exited(self.number, local_rank, None, gone_at))
        elif self._is_killed_by_others(local_rank, exit_):
            await self._report_in_turn(start, exit_, gone_at)
        elif local_rank in self._context.asked_at or local_rank in self._killed:
            worker, known = self._group.workers[local_rank], [*self._group.exits.failed.values()]
            raised = await resources.postmortem.raised(start, worker, exit_.exitcode, known)
            self._post(ev.Exited(self.number, local_rank, None, gone_at, raised))
        elif exit_.by_guard:  # another round may have begun: neither this worker nor its node failed
            self._post(Interrupted(self._assigned.round, FROZEN, self._assigned.restart_count))
            self._post(ev.Exited(self.number, local_rank, None, gone_at))
        else:
            await self._report_in_turn(start, exit_, gone_at)
        await anyio.lowlevel.checkpoint()  # report first: looking for leftovers takes milliseconds
        await resources.backend.clear(local_rank)
        self._links.on_ended(local_rank)
        self._post(ev.Cleared(self.number, local_rank))

    def _is_killed_by_others(self, local_rank: int, exit_: WorkerExit) -> bool:
        """Whether a worker that had to end because another one failed has died of a SIGKILL that we did not send."""
        is_killed = exit_.exitcode == -signal.SIGKILL and not exit_.by_guard
        return is_killed and local_rank not in self._killed and bool(self._group.exits.failed)

    async def _report_in_turn(self, start: WorkerStart, exit_: WorkerExit, gone_at: float) -> None:
        """Examines a worker at once, but reports it after earlier failures: the first to end is first in the report."""
        before, reported = self._has_reported, anyio.Event()
        if exit_.exitcode:  # reading a return value may take long, and no failure waits for that
            self._has_reported = reported
        try:
            failure = await self._look_back(start, exit_)
            if failure is not None:
                if failure.names_lost_peer:
                    reported.set()
                    await self._give_way()
                await self.stuck.comparisons.await_outliers(start.local_rank, failure)
                await self._hold(failure)
            if exit_.exitcode:
                await before.wait()
            if failure is None and self._resources.pages.is_saving(start.local_rank):  # it ends because it has saved
                self._post(ev.Drained(self.number, (), self._resources.pages.kill_at))
            self._post(ev.Exited(self.number, start.local_rank, failure, gone_at))
        finally:
            reported.set()

    async def _give_way(self) -> None:
        """A worker that blames a lost peer fails after that peer, which may be on this node and be seen a moment later.

        The leader waits equally long before it names such a failure.
        """
        with anyio.move_on_after(GIVES_WAY_S):
            while self._group.phase is Phase.RUNNING and self._group.exits.alive - self._context.ended:
                await self._changed.wait()

    async def _hold(self, failure: ProcessFailure) -> None:
        """If the user wants to look at failures first, nothing is stopped until a restart or stop is requested."""
        limit_s = self._settings.spec.hold_on_failure_s
        if limit_s is None or self._group.phase is not Phase.RUNNING or failure.is_final:
            return
        if not self.is_held:
            self.is_held = True
            self._links.hold(self._assigned.fence)
            until = "" if limit_s == math.inf else f", or {limit_s:g} s have passed"
            text = f"rank {failure.rank} failed on {failure.host}: {failure.headline}"
            self._emit(Announced("held", f"{text}; held: nothing is stopped until aelastic restart or stop{until}"))
        with anyio.move_on_after(limit_s):
            while self._group.phase is Phase.RUNNING:
                await self._changed.wait()

    async def _look_back(self, start: WorkerStart, exit_: WorkerExit) -> ProcessFailure | None:
        """Reads the worker's return value, or finds out why it failed."""
        postmortem, note = self._resources.postmortem, exit_.note
        await self._resources.progress.on_ended(start.local_rank, exit_.exitcode)
        if exit_.exitcode == 0:
            try:
                # Cancelled if the worker is stopped meanwhile: the value would be dropped anyway.
                with anyio.CancelScope() as self._reading[start.local_rank]:
                    self.return_values[start.local_rank] = await postmortem.return_value(start, exit_)
            except Exception as error:  # noqa: BLE001  unpickling runs the user's code
                note = f"its return value cannot be read: {error!r}"
            else:
                return None
        failure = await postmortem.failure(start, self._group.workers[start.local_rank], exit_.exitcode, note)
        if start.local_rank in self._links.differing:
            return failure.replace(is_final=True, note=STATES_DIFFER)
        return failure


def can_recover_in_place(settings: AgentSettings) -> bool:
    """Whether workers may keep their processes when a round ends, if they opt in."""
    is_ours = settings.is_local and settings.starter is None
    return is_ours and settings.spec.recovery == "in-place"


def provisional(settings: AgentSettings) -> Assigned:
    """Returns a stand-in for the assignment until a round includes this node: its ranks are above those of any round.

    Scripts check whether they have a rank, and what rank 0 does must happen only once.
    """
    spec = settings.spec
    nodes, size = (1 if spec.rdzv is None else spec.rdzv.max_nodes), spec.local_world_size
    return Assigned(0, 0, assign_ranks([(spec.role, size)] * (nodes + 1))[-1], "", 0)


def can_start_ahead(settings: AgentSettings) -> bool:
    """Whether workers may start before a round includes their node: nothing that they start with names their rank."""
    spec = settings.spec
    selects_ranks = spec.wrap_ranks is not None or (
        spec.expect_output is not None and spec.expect_output.ranks is not None
    )
    shows_rank = "${rank}" in (spec.log_line_prefix_template or "")
    return can_recover_in_place(settings) and not selects_ranks and not shows_rank


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def prepare_for_failure() -> None:
    """Imports, while workers run, what only their end needs, so that neither it nor a restart waits for that."""
    from aelastic import result  # noqa: F401
    from aelastic.agent import grace_watch, stuck_workers  # noqa: F401
    from aelastic.agent.group import restart_grace  # noqa: F401
    from aelastic.diagnose.failures import exit_reason, root_cause  # noqa: F401
