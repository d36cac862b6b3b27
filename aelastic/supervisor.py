"""The supervisor: one event loop, one mailbox, one deadline.

It carries out what the worker group asks for and reports what happens; it decides nothing.  What takes time
is a task of its own and ends by posting its event.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, assert_never

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskGroup

from aelastic.autopsy import Autopsy, failure_of, prepare_for_failure, report_of
from aelastic.control_sockets import ControlSockets
from aelastic.env import check_devices, has_agent_store, worker_args, worker_env
from aelastic.errors import (
    AelasticError,
    InternalError,
    ProcessFailure,
    RendezvousError,
    RendezvousTimeoutError,
    UnkillableWorkerError,
)
from aelastic.group import WorkerGroup
from aelastic.group_events import (
    Action,
    Cleared,
    Condemned,
    DeadlinePassed,
    Event,
    Exited,
    Finish,
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
from aelastic.happenings import Happening, Noticed, RunBegan, RunEnded, Waited, Watch
from aelastic.logs import RunLogs, WorkerFiles
from aelastic.mailbox import Mailbox
from aelastic.narrator import Narrator
from aelastic.observer import Audience, Observer
from aelastic.procs import LocalWorkers
from aelastic.rdzv.link import Link
from aelastic.rdzv.messages import (
    Assigned,
    CoordinatorMessage,
    Ended,
    Failed,
    FailureReport,
    Interrupted,
    Left,
    Node,
    Outcome,
    Ready,
    Succeeded,
    Waiting,
)
from aelastic.rdzv.registry import Surroundings, names, open_link
from aelastic.spec import WorkerSpec
from aelastic.store import StoreHost
from aelastic.workers import WorkerBackend, WorkerExit, WorkerStart

if TYPE_CHECKING:
    from aelastic.torch_telemetry import TorchTelemetry

_log = logging.getLogger(__name__)

# A program that uses these may have handlers in them.
_LISTENED_TO = ("torch.distributed.elastic.events", "torch.distributed.elastic.metrics.api")

# Whether and where our words are seen is for the program around us to say; the command line does.
logging.getLogger("aelastic").addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended, all or nothing (torch: `torch.distributed.elastic.agent.server.api.RunResult`).

    Every mapping is keyed by global rank.  `return_values` holds what functions returned, if all
    succeeded.  `failures` holds the workers that failed, in the order they did.  `victims` are the
    workers that ended because the agent asked them to; they are in neither.
    """

    state: WorkerState
    return_values: Mapping[int, Any] = field(default_factory=dict)
    failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    victims: tuple[int, ...] = ()
    reason: str = ""

    def is_failed(self) -> bool:
        return self.state is WorkerState.FAILED


class Supervisor:
    """Runs the workers of this node until the job is over (torch: `LocalElasticAgent`).

    Lives on the caller's event loop and touches nothing of the process around it: no signal handler,
    no `os.environ`, no event-loop policy.  One supervisor runs once; any number run side by side.

    Args:
        spec: what to run.
        backend: who runs the workers; by default, this machine.
        observers: who is told of what happens.
    """

    def __init__(
        self, spec: WorkerSpec, *, backend: WorkerBackend | None = None, observers: Sequence[Observer] = ()
    ) -> None:
        self.spec = spec
        given_id = spec.rdzv_handler.get_run_id() if spec.rdzv_handler is not None else spec.run_id
        self._run_id = given_id or _random_run_id()
        self._base_env = dict(os.environ) if spec.env is None else dict(spec.env)
        self._has_agent_store = has_agent_store(spec, self._base_env)
        self._group = WorkerGroup(spec)
        self._node_id = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        self._given_backend = backend
        self._has_run = False
        self._mailbox: Mailbox[Event] = Mailbox()
        self._failures: dict[int, ProcessFailure] = {}  # of this generation, by local rank
        self._return_values: dict[int, Any] = {}  # likewise
        self._asked: set[int] = set()  # likewise: who was asked to end
        self._condemned: dict[int, str] = {}  # likewise: who does not do what is expected of it, and what that is
        self._looking_back = anyio.Lock()
        self._link_error: AelasticError | None = None
        self._cpus: Mapping[int, frozenset[int]] = {}  # by local rank, of workers that are bound to some
        self._finding_cpus: anyio.CancelScope | None = None
        self._telemetry: TorchTelemetry | None = None  # only where somebody may listen
        self._narrator = Narrator(self._group)
        self._audience = Audience(observers)

    @property
    def state(self) -> WorkerState:
        return self._group.state

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers of the current generation."""
        return self._group.workers

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Asks the run to end: workers get the signal, and are killed after `shutdown_timeout_s`.

        Asked a second time, they are killed now.  Never blocks; safe in a signal handler of the loop.
        """
        self._mailbox.post(StopRequested(signum))
        if self._finding_cpus is not None:
            self._finding_cpus.cancel()
        if self._group.is_done:
            self._logs.give_up()  # nothing is left to wait for but the console
            if self._telemetry is not None:
                self._telemetry.give_up()

    async def run(self) -> RunResult:
        """Runs the job to its end.

        Cancelled, it stops the workers as `stop` does, waits until nothing of them is left, and only then
        lets the cancellation through; cancelled again meanwhile, it kills them.

        Raises:
            InputError: what was asked for can't be done here (a port in use, an unwritable log folder).
            RendezvousTimeoutError: too few nodes came.
            UnkillableWorkerError: a worker survives SIGKILL; the host needs a look.
            InternalError: a bug of ours.
        """
        if self._has_run:
            raise RuntimeError("a Supervisor runs once: make another for another run")
        self._has_run = True
        check_devices(self.spec, self._base_env)
        await self._open_telemetry()
        if self._telemetry is None:
            return await self._run()
        try:
            result = await self._run()
        except BaseException as error:
            await self._telemetry.fail(error)
            raise
        await self._telemetry.finish(result.state, result.failures, result.reason)
        return result

    async def _open_telemetry(self) -> None:
        """Imports what tells torchelastic's listeners of the run, if there may be any."""
        if self.spec.event_log_handler == "null" and not any(name in sys.modules for name in _LISTENED_TO):
            return
        from aelastic.torch_telemetry import TorchTelemetry

        telemetry = TorchTelemetry(self.spec, self._run_id, self._group)
        await telemetry.open()
        self._telemetry = telemetry

    async def _run(self) -> RunResult:
        if self.spec.numa_binding is not None:
            await self._find_cpus()
        self._prepare()
        cancelled: BaseException | None = None
        done = anyio.Event()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run_shielded, done, name="supervisor")
                while not done.is_set():
                    try:
                        # Once cancelled, only asyncio's own `cancel` gets through: somebody is asking again.
                        with anyio.CancelScope(shield=cancelled is not None):
                            await done.wait()
                    except anyio.get_cancelled_exc_class() as error:
                        cancelled = error
                        self.stop()
        except BaseExceptionGroup as group:
            raise _first_of(group) from None
        if cancelled is not None:
            raise cancelled
        return self._result()

    async def _find_cpus(self) -> None:
        """Finds out which CPUs each worker may run on.  That takes seconds, which `stop` need not wait for."""
        from aelastic.topology import cpus_of_workers

        with anyio.CancelScope() as self._finding_cpus:
            self._cpus = await cpus_of_workers(self.spec, self._base_env)
        self._finding_cpus = None

    def _prepare(self) -> None:
        """Makes those that `run` puts to work; what they hold is let go if one of them can't be made."""
        with ExitStack() as made:
            self._logs = RunLogs(self.spec, self._run_id)
            made.callback(self._logs.close)
            self._autopsy = Autopsy(self._logs, is_local=self._given_backend is None)
            self._sockets = ControlSockets(self._logs.scratch)
            made.callback(self._sockets.close)
            self._store = StoreHost(self._sockets.mark_env(self._base_env))
            around = Surroundings(self._run_id, self._base_env, self._store)
            self._link: Link = open_link(self.spec, self._node_id, around)
            # Last: it starts a process.
            self._backend = self._given_backend or LocalWorkers(
                start_method=self.spec.start_method,
                monitor_interval=self.spec.monitor_interval,
                mark=self._sockets.mark,
                scratch=self._logs.scratch,
            )
            made.pop_all()

    async def _run_shielded(self, done: anyio.Event) -> None:
        with anyio.CancelScope(shield=True):
            try:
                self._logs.open()
                self._tell(self._introduction())
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._backend.run, name="backend")
                    tasks.start_soon(self._logs.run, name="logs")
                    tasks.start_soon(self._store.run, name="store")
                    tasks.start_soon(self._run_link, name="rendezvous")
                    tasks.start_soon(self._audience.run, name="observers")
                    if self._telemetry is not None:
                        tasks.start_soon(self._telemetry.run, name="telemetry")
                    await self._run_group(tasks)
                    tasks.cancel_scope.cancel()
            finally:
                try:
                    await self._close()
                finally:
                    done.set()

    async def _run_group(self, tasks: TaskGroup) -> None:
        self._mailbox.post(Start())
        while not self._group.is_done:
            event = await self._mailbox.next(self._group.deadline) or DeadlinePassed()
            now = anyio.current_time()
            for action in self._group.handle(event, now):
                self._carry_out(action, tasks)
            for happening in self._narrator.handle(event, now):
                self._tell(happening)
            if self._telemetry is not None:
                self._telemetry.tell(event)
            self._log_event(event)
        async with anyio.create_task_group() as last:
            last.start_soon(self._link.finish, name="leave")
            last.start_soon(self._logs.finish, name="the rest of the logs")

    def _carry_out(self, action: Action, tasks: TaskGroup) -> None:
        match action:
            case Join():
                self._join()
            case Spawn():
                tasks.start_soon(self._spawn, action, tasks, name=f"spawn {action.generation}")
            case TellFailed(round_, failure):
                self._link.tell(Failed(self._node_id, round_, failure))
            case TellSucceeded(round_):
                self._link.tell(Succeeded(self._node_id, round_))
            case TellLeft(reason):
                self._link.tell(Left(self._node_id, reason))
            case Stop(_, local_ranks, signum):
                for local_rank in local_ranks:
                    if self._backend.stop(local_rank, signum):
                        self._asked.add(local_rank)
            case Finish():
                pass  # the loop sees that the group is done
            case _:
                assert_never(action)

    async def _run_link(self) -> None:
        try:
            await self._link.run(self._deliver)
        except BaseExceptionGroup as group:
            self._on_link_error(_first_of(group))
        except AelasticError as error:
            self._on_link_error(error)

    def _on_link_error(self, error: BaseException) -> None:
        """The workers know nothing of it: they are asked to end, and may save what they have."""
        if not isinstance(error, AelasticError):
            raise error
        self._link_error = error
        self._mailbox.post(StopRequested())

    def _deliver(self, message: CoordinatorMessage) -> None:
        if isinstance(message, Waiting):
            _log.warning("%s", message.text)
            self._tell(Waited(message.text))
        else:
            self._mailbox.post(message)

    def _join(self) -> None:
        rdzv = self.spec.rdzv
        if self.spec.rdzv_handler is not None or (rdzv is not None and rdzv.backend not in names()):
            address, port = "", 0  # torch's handler says where the workers meet, and has that port
        elif rdzv is None:
            address, port = self.spec.master_addr or "localhost", self.spec.master_port or 0
        elif rdzv.backend == "static":
            # The address is that of node rank 0, and so is the port.
            address, port = self.spec.master_addr or "", (self.spec.master_port or 0) if rdzv.node_rank == 0 else 0
        else:
            address, port = rdzv.local_addr or "", self.spec.master_port or 0
        node = Node(
            node_id=self._node_id,
            host=socket.gethostname(),
            role=self.spec.role,
            local_world_size=self.spec.local_world_size,
            master_addr=address,
            master_port=self._store.open(port) if self._has_agent_store else self._store.hold(port),
            preferred_rank=None if rdzv is None else rdzv.node_rank,
        )
        self._link.tell(Ready(node))

    async def _spawn(self, spawn: Spawn, tasks: TaskGroup) -> None:
        self._failures, self._return_values, self._asked, self._condemned = {}, {}, set(), {}
        self._logs.end_attempt()
        envs = {rank: self._worker_env(rank, spawn) for rank in range(self.spec.local_world_size)}
        files = await self._logs.open_attempt(spawn.generation - 1, envs)
        starts = [self._worker_start(rank, files[rank], envs[rank]) for rank in sorted(files)]
        ids = await self._backend.start(starts)
        # After the workers: they need a second before they need the store.
        if spawn.assigned.ranks.group_rank == 0 and self._store_server(spawn.assigned) == "agent":
            self._store.serve()
        self._mailbox.post(Spawned(spawn.generation, ids))
        for start in starts:
            tasks.start_soon(self._follow, spawn.generation, start, name=f"worker {start.local_rank}")
        await anyio.to_thread.run_sync(prepare_for_failure)

    def _store_server(self, assigned: Assigned) -> str:
        """Who serves the workers' store, as `Assigned` has it."""
        return "worker" if assigned.store_server == "agent" and not self._has_agent_store else assigned.store_server

    def _worker_env(self, local_rank: int, spawn: Spawn) -> dict[str, str]:
        assigned = spawn.assigned
        return worker_env(
            self.spec,
            self._base_env,
            run_id=self._run_id,
            ranks=assigned.ranks,
            local_rank=local_rank,
            restart_count=assigned.restart_count,
            master_addr=assigned.master_addr,
            master_port=assigned.master_port,
            has_agent_store=self._store_server(assigned) != "worker",
            control_socket=self._sockets.path(spawn.generation - 1, local_rank),
        )

    def _worker_start(self, local_rank: int, files: WorkerFiles, env: dict[str, str]) -> WorkerStart:
        return WorkerStart(
            local_rank=local_rank,
            entrypoint=self.spec.entrypoint,
            args=worker_args(self.spec.args, local_rank),
            env=env,
            stdout=files.stdout,
            stderr=files.stderr,
            error_file=files.error_file,
            return_file=files.return_file,
            cpus=self._cpus.get(local_rank),
        )

    async def _follow(self, generation: int, start: WorkerStart) -> None:
        """Waits for one worker's end, and for the end of all it leaves behind."""
        exit_ = await self._backend.wait(start.local_rank)
        report, gone_at = None, anyio.current_time()
        # A worker that was asked to end is a victim, whatever it says; unless it was asked for what it had not done.
        if start.local_rank not in self._asked or start.local_rank in self._condemned:
            async with self._looking_back:  # one by one: who ended first is told first
                failure = await self._look_back(start, exit_)
            if failure is not None:
                self._failures[start.local_rank] = failure
                report = self._report_of(failure)
        self._mailbox.post(Exited(generation, start.local_rank, report, gone_at))
        await anyio.lowlevel.checkpoint()  # tell first: looking for leftovers takes milliseconds
        await self._backend.clear(start.local_rank)
        self._mailbox.post(Cleared(generation, start.local_rank))

    async def _look_back(self, start: WorkerStart, exit_: WorkerExit) -> ProcessFailure | None:
        """Reads what the worker left: its return value, or why it failed."""
        note = self._condemned.get(start.local_rank, exit_.note)
        if exit_.exitcode == 0 and start.local_rank not in self._condemned:
            try:
                self._return_values[start.local_rank] = await self._autopsy.return_value(start, exit_)
            except Exception as error:  # noqa: BLE001  unpickling runs the user's code
                note = f"its return value can't be read: {error!r}"
            else:
                return None
        return await self._autopsy.failure(start, self._group.workers[start.local_rank].id, exit_.exitcode, note)

    def _report_of(self, failure: ProcessFailure) -> FailureReport:
        return report_of(self._group.workers[failure.local_rank].global_rank, failure)

    # Workers that do not do what is expected of them.

    async def _condemn(
        self, generation: int, start: WorkerStart, by: Watch, reason: str, signum: int = signal.SIGKILL
    ) -> None:
        """Has a worker stopped that is alive; counts as its failure.

        Args:
            generation: of the worker.
            start: how it was started.
            by: who noticed.
            reason: a sentence without a subject, as in "timer 'step' expired".
            signum: what it is stopped with.
        """
        rank = start.local_rank
        if generation != self._group.generation or rank in self._condemned or rank not in self._group.alive:
            return
        self._condemned[rank] = reason
        worker = self._group.workers[rank]
        failure = await self._autopsy.failure(start, worker.id, -signum, reason)
        if generation != self._group.generation:
            return
        self._failures.setdefault(rank, failure)
        self._tell(Noticed(generation, rank, worker.global_rank, by, reason, is_stopped=True))
        self._mailbox.post(Condemned(generation, rank, self._report_of(failure), signum))

    def _log_event(self, event: Event) -> None:
        """Says what a person who watches wants to know, when it happens."""
        match event:
            case Exited(failure=FailureReport() as failure):
                _log.warning("rank %d failed on %s: %s", failure.rank, failure.host, failure.message)
            case Condemned(failure=failure):
                _log.warning("rank %d on %s is stopped: %s", failure.rank, failure.host, failure.message)
            case Interrupted(_, reason):
                _log.warning("all workers start again: %s", reason)
            case Assigned(round_, _, ranks):
                _log.info(
                    "round %d: group rank %d of %d, world size %d",
                    round_,
                    ranks.group_rank,
                    ranks.group_world_size,
                    ranks.world_size,
                )
            case Ended(outcome, reason):
                _log.info("the job has %s: %s", outcome, reason)
            case StopRequested() if self._link_error is not None:
                _log.warning("the agent leaves: %s", self._link_error)
            case StopRequested(signum) if not self._group.is_done:
                within = "now" if self._group.is_killing else f"within {self.spec.shutdown_timeout_s:g} s"
                _log.warning("asked to stop (signal %d): workers end %s; ask again to kill them", signum, within)
            case _:
                pass

    async def _close(self) -> None:
        async with AsyncExitStack() as stack:  # each is closed, whatever the others raise
            stack.callback(self._sockets.close)
            stack.callback(self._logs.close)
            stack.push_async_callback(self._audience.aclose)
            stack.push_async_callback(self._store.aclose)
            stack.push_async_callback(self._backend.aclose)
            group = self._group
            self._tell(RunEnded(group.state, self._end_reason(), group.verdict.cause if group.verdict else None))

    def _end_reason(self) -> str:
        return self._group.reason if self._link_error is None else str(self._link_error)

    def _tell(self, happening: Happening) -> None:
        self._audience.tell(happening)

    def _introduction(self) -> RunBegan:
        spec, rdzv = self.spec, self.spec.rdzv
        return RunBegan(
            run_id=self._run_id,
            node_id=self._node_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            role=spec.role,
            entrypoint=spec.get_entrypoint_name(),
            local_world_size=spec.local_world_size,
            min_nodes=rdzv.min_nodes if rdzv is not None else 1,
            max_nodes=rdzv.max_nodes if rdzv is not None else 1,
            max_restarts=spec.max_restarts,
            rdzv_backend=rdzv.backend if rdzv is not None else "",
        )

    def _result(self) -> RunResult:
        group = self._group
        if self._link_error is not None:
            raise self._link_error
        if group.state is WorkerState.UNKNOWN:
            raise UnkillableWorkerError([self._backend.describe(rank) for rank in group.unended] or [group.reason])
        if group.verdict is not None and group.verdict.outcome is Outcome.TIMED_OUT:
            raise RendezvousTimeoutError(group.verdict.reason)
        if group.verdict is not None and group.verdict.outcome is Outcome.REPLACED:
            raise RendezvousError(group.verdict.reason)
        rank_of = {worker.local_rank: worker.global_rank for worker in group.workers}
        failures = {rank_of[local]: self._failures[local] for local in group.failed}
        if group.state is WorkerState.FAILED and not failures:
            cause = group.verdict.cause if group.verdict is not None else None
            if cause is None:
                raise InternalError("failed without a failure", story=group.story)
            failures = {cause.rank: failure_of(cause)}
        values = self._return_values if group.state is WorkerState.SUCCEEDED and callable(self.spec.entrypoint) else {}
        return RunResult(
            state=group.state,
            return_values={rank_of[local]: values[local] for local in sorted(values)},
            failures=failures,
            victims=tuple(sorted(rank_of[local] for local in group.stopped)),
            reason=group.reason,
        )


def _random_run_id() -> str:
    """A random UUID, as torchrun's, without the 6 ms that `import uuid` takes from every start."""
    digits = os.urandom(16).hex()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The cause in a group that task groups made: what followed from it is cancelled tasks."""
    causes = [_first_of(each) if isinstance(each, BaseExceptionGroup) else each for each in group.exceptions]
    return next((cause for cause in causes if isinstance(cause, AelasticError)), causes[0])
