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
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, assert_never

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskGroup

from aelastic.agent.postmortem import Autopsy, prepare_for_failure
from aelastic.agent.unhealthy import UnhealthyWorkers
from aelastic.aio.mailbox import Mailbox
from aelastic.errors import AelasticError, ProcessFailure
from aelastic.group.backend import WorkerBackend, WorkerExit, WorkerStart
from aelastic.group.events import (
    Action,
    CancelSpawn,
    Cleared,
    DeadlinePassed,
    Event,
    Exited,
    Finish,
    Join,
    Spawn,
    SpawnCancelled,
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
from aelastic.group.phases import Phase
from aelastic.group.worker_env import (
    HEALTH_PORT_VARIABLE,
    SYSTEMD_VARIABLES,
    check_devices,
    has_agent_store,
    worker_args,
    worker_env,
)
from aelastic.group.worker_group import WorkerGroup
from aelastic.hangs.watches import Watches
from aelastic.logs.run_logs import RunLogs, WorkerFiles
from aelastic.observe.log_lines import LogLines
from aelastic.observe.observer import Observer, Observers
from aelastic.observe.run_event_source import RunEventSource, introduction
from aelastic.observe.run_events import RunEnded, RunEvent, StacksTaken, Waited
from aelastic.procs import LocalWorkers
from aelastic.rdzv.link import Link
from aelastic.rdzv.protocol.messages import (
    Assigned,
    CoordinatorMessage,
    Failed,
    Left,
    Node,
    Ready,
    Succeeded,
    Waiting,
)
from aelastic.rdzv.registry import AgentContext, names, open_link
from aelastic.result import RunResult, result_of
from aelastic.spec import WorkerSpec
from aelastic.stacks.before_kill import StackDumps
from aelastic.stacks.control_sockets import ControlSockets
from aelastic.tcpstore.host import StoreHost

if TYPE_CHECKING:
    from aelastic.health.foreign_server import ForeignServer
    from aelastic.health.server import HealthServer
    from aelastic.health_check_server import HealthCheckServer, HealthCheckServerFactory
    from aelastic.observe.torch_events import TorchEvents

_log = logging.getLogger(__name__)

# A program that uses these may have handlers in them.
_LISTENED_TO = ("torch.distributed.elastic.events", "torch.distributed.elastic.metrics.api")

# Whether and where our words are seen is for the program around us to say; the command line does.
logging.getLogger("aelastic").addHandler(logging.NullHandler())


class Supervisor:
    """Runs the workers of this node until the job is over (torch: `LocalElasticAgent`).

    Lives on the caller's event loop and touches nothing of the process around it: no signal handler,
    no `os.environ`, no event-loop policy.  One supervisor runs once; any number run side by side.

    Args:
        spec: what to run.
        backend: who runs the workers; by default, this machine.
        observers: who is told of what happens.
        health_check_server: a server of torch's kind, or what makes one, in the place of our own; started and
            stopped here.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        backend: WorkerBackend | None = None,
        observers: Sequence[Observer] = (),
        health_check_server: HealthCheckServer | HealthCheckServerFactory | None = None,
    ) -> None:
        self.spec = spec
        given_id = spec.rdzv_handler.get_run_id() if spec.rdzv_handler is not None else spec.run_id
        self._run_id = given_id or _random_run_id()
        self._base_env = dict(os.environ) if spec.env is None else dict(spec.env)
        # The port is this agent's: one that a worker starts must not want it, too.
        self._health_port = self._base_env.pop(HEALTH_PORT_VARIABLE, "")
        if SYSTEMD_VARIABLES[0] in self._base_env:  # a worker that used them would speak in the agent's name
            for name in SYSTEMD_VARIABLES:
                self._base_env.pop(name, None)
        self._given_health = health_check_server
        self._health: HealthServer | ForeignServer | None = None  # only where somebody may ask
        self._has_agent_store = has_agent_store(spec, self._base_env)
        self._group = WorkerGroup(spec)
        self._node_id = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        self._given_backend = backend
        self._has_run = False
        self._mailbox: Mailbox[Event] = Mailbox()
        self._return_values: dict[int, Any] = {}  # of this generation, by local rank
        self._asked: set[int] = set()  # likewise: who was asked to end
        self._looking_back = anyio.Lock()
        self._link_error: AelasticError | None = None
        self._cpus: Mapping[int, frozenset[int]] = {}  # by local rank, of workers that are bound to some
        self._spawning: anyio.CancelScope | None = None
        self._finding_cpus: anyio.CancelScope | None = None
        self._torch_events: TorchEvents | None = None  # only where somebody may listen
        self._has_begun = False
        self._error: BaseException | None = None  # that the run ends with
        self._result: RunResult | None = None  # likewise
        self._event_source = RunEventSource(self._group)
        self._observers = Observers([LogLines(spec.shutdown_timeout_s), *observers])

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
            self._observers.give_up()

    async def collect_stacks(self, why: str = "asked") -> StacksTaken:
        """Finds out where the workers of this node stand in their Python code; they are not disturbed.

        Takes 2 s at most, and mostly less than 0.1 s.  The stacks are in the folder that the answer names, which also
        says of each worker what gave its stack, or why nothing did.  Who asks while others wait gets what they get;
        before the workers run, and after, there are none.  Cancelled, it changes nothing for others.

        Args:
            why: said beside the stacks.
        """
        if not self._has_begun:
            return StacksTaken(self._group.generation, why, {}, "")
        return await self._stack_dumps.collect(why)

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
        await self._open_torch_events()
        await self._open()
        return await self._run()

    async def _open_torch_events(self) -> None:
        """Imports what tells torchelastic's listeners of the run, if there may be any."""
        if self.spec.event_log_handler == "null" and not any(name in sys.modules for name in _LISTENED_TO):
            return
        from aelastic.observe.torch_events import TorchEvents

        torch_events = TorchEvents(self.spec, self._run_id)
        await torch_events.open()
        self._torch_events = torch_events
        self._observers.add(torch_events)

    async def _open(self) -> None:
        """Makes what the run needs, before anything is started."""
        try:
            if self._health_port or self._given_health is not None:
                await self._open_health()
            if self.spec.numa_binding is not None:
                await self._find_cpus()
            self._prepare()
        except BaseException as error:
            if self._health is not None:
                self._health.close()
            if self._torch_events is not None:
                await self._torch_events.fail(error)
            raise

    async def _run(self) -> RunResult:
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
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    async def _find_cpus(self) -> None:
        """Finds out which CPUs each worker may run on.  That takes seconds, which `stop` need not wait for."""
        from aelastic.workers.topology import cpus_of_workers

        with anyio.CancelScope() as self._finding_cpus:
            self._cpus = await cpus_of_workers(self.spec, self._base_env)
        self._finding_cpus = None

    async def _open_health(self) -> None:
        """Listens for whoever asks how this agent is."""
        from aelastic.health.server import open_health

        is_local = self._given_backend is None
        self._health = await open_health(self._health_port, self._given_health, self.collect_stacks, is_local=is_local)
        if self._health is not None:
            self._observers.add(self._health)

    def _prepare(self) -> None:
        """Makes those that `run` puts to work; what they hold is let go if one of them can't be made."""
        with ExitStack() as made:
            self._logs = RunLogs(self.spec, self._run_id)
            made.callback(self._logs.close)
            if self._logs.kept is not None:
                from aelastic.observe.event_log import FILE_NAME, EventLog

                self._observers.add(EventLog(self._logs.kept / FILE_NAME))
            self._autopsy = Autopsy(self._logs, is_local=self._given_backend is None)
            self._sockets = ControlSockets(self._logs.scratch)
            made.callback(self._sockets.close)
            self._stack_dumps = StackDumps(
                self._group,
                scratch=self._logs.scratch,
                sockets=self._sockets,
                env=self._base_env,
                is_local=self._given_backend is None,
                tell=self._tell,
            )
            self._unhealthy = UnhealthyWorkers(
                self._group, self._stack_dumps, self._autopsy, self._mailbox.post, self._tell
            )
            self._watches = Watches(
                self.spec, self._base_env, self._logs.scratch, self._logs.count_matches, self._unhealthy.on_found
            )
            made.callback(self._watches.close)
            self._store = StoreHost(self._sockets.mark_env(self._base_env))
            around = AgentContext(self._run_id, self._base_env, self._store)
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
                self._watches.open()
                self._has_begun = True
                host, pid = socket.gethostname(), os.getpid()
                self._tell(introduction(self.spec, run_id=self._run_id, node_id=self._node_id, host=host, pid=pid))
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._backend.run, name="backend")
                    tasks.start_soon(self._logs.run, name="logs")
                    tasks.start_soon(self._store.run, name="store")
                    tasks.start_soon(self._run_link, name="rendezvous")
                    tasks.start_soon(self._observers.run, name="observers")
                    tasks.start_soon(self._watches.run, name="watches")
                    await self._run_group(tasks)
                    tasks.cancel_scope.cancel()
            except BaseException as error:
                self._error = error
                raise
            finally:
                try:
                    await self._close()
                finally:
                    done.set()

    async def _run_group(self, tasks: TaskGroup) -> None:
        self._stack_dumps.open(tasks)
        self._mailbox.post(Start())
        while not self._group.is_done:
            event = await self._mailbox.next(self._group.deadline) or DeadlinePassed()
            now = anyio.current_time()
            for action in self._group.handle(event, now):
                self._carry_out(action, tasks)
            for run_event in self._event_source.handle(event, now):
                self._observers.tell(run_event, now)
        async with anyio.create_task_group() as last:
            last.start_soon(self._link.finish, name="leave")
            last.start_soon(self._logs.finish, name="the rest of the logs")

    def _carry_out(self, action: Action, tasks: TaskGroup) -> None:
        match action:
            case Join():
                self._join()
            case Spawn():
                self._spawning = anyio.CancelScope()
                tasks.start_soon(self._spawn, action, tasks, name=f"spawn {action.generation}")
            case CancelSpawn():
                assert self._spawning is not None
                self._spawning.cancel()
            case TellFailed(round_, failure):
                self._link.tell(Failed(self._node_id, round_, failure.for_others()))
            case TellSucceeded(round_):
                self._link.tell(Succeeded(self._node_id, round_))
            case TellLeft(reason):
                self._link.tell(Left(self._node_id, reason))
            case Stop(_, local_ranks, signum):
                if signum == signal.SIGKILL and self._stack_dumps.claim_look(local_ranks):
                    tasks.start_soon(self._look_and_stop, action, name="kill")
                else:
                    self._stop_workers(action)
            case Finish():
                pass  # the loop sees that the group is done
            case _:
                assert_never(action)

    async def _look_and_stop(self, stop: Stop) -> None:
        """Finds out where the workers stand before they are killed.

        Meanwhile the group waits for their end, and for no longer than it would without.
        """
        await self._stack_dumps.collect("about to be killed")
        if stop.generation == self._group.generation:  # else they have ended, and others run
            self._stack_dumps.log_places(stop.local_ranks)
            self._stop_workers(stop)

    def _stop_workers(self, stop: Stop) -> None:
        for local_rank in stop.local_ranks:
            if self._backend.stop(local_rank, stop.signum):
                self._asked.add(local_rank)
                self._stack_dumps.asked(local_rank, stop.signum)

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
        self._mailbox.post(StopRequested(reason=str(error)))

    def _deliver(self, message: CoordinatorMessage) -> None:
        if isinstance(message, Waiting):
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
        """Starts the workers, unless that is cancelled first: none may start once the group has given up on them."""
        self._return_values, self._asked = {}, set()
        self._logs.end_attempt()
        starts: list[WorkerStart] = []
        ids: Mapping[int, Any] | None = None
        assert self._spawning is not None
        with self._spawning:
            envs = {rank: self._worker_env(rank, spawn) for rank in range(self.spec.local_world_size)}
            files = await self._logs.open_attempt(spawn.generation - 1, envs)
            if self._group.phase is Phase.SPAWNING:
                starts = [self._worker_start(rank, files[rank], envs[rank]) for rank in sorted(files)]
                self._stack_dumps.begin(starts)
                self._unhealthy.begin(starts)
                ids = await self._backend.start(starts)
        if ids is None:
            self._mailbox.post(SpawnCancelled(spawn.generation))
            return
        if self._group.is_done:  # it gave up on a back end that could not be cancelled
            for start in starts:
                self._backend.stop(start.local_rank, signal.SIGKILL)
            return
        # After the workers: they need a second before they need the store.
        if spawn.assigned.ranks.group_rank == 0 and self._store_server(spawn.assigned) == "agent":
            self._store.serve()
        self._mailbox.post(Spawned(spawn.generation, ids))
        self._watches.started(spawn.generation, starts, ids)
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
            {**self._base_env, **self._watches.env},
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
        self._unhealthy.ended(start.local_rank)
        self._watches.ended(generation, start.local_rank)
        failure, gone_at = None, anyio.current_time()
        # A worker that was asked to end is a victim, whatever it says; or it was found unhealthy, for a known reason.
        if start.local_rank not in self._asked and start.local_rank not in self._group.failed:
            async with self._looking_back:  # one by one: who ended first is told first
                failure = await self._look_back(start, exit_)
        self._mailbox.post(Exited(generation, start.local_rank, failure, gone_at))
        await anyio.lowlevel.checkpoint()  # tell first: looking for leftovers takes milliseconds
        await self._backend.clear(start.local_rank)
        self._mailbox.post(Cleared(generation, start.local_rank))

    async def _look_back(self, start: WorkerStart, exit_: WorkerExit) -> ProcessFailure | None:
        """Reads what the worker left: its return value, or why it failed."""
        note = exit_.note
        if exit_.exitcode == 0:
            try:
                self._return_values[start.local_rank] = await self._autopsy.return_value(start, exit_)
            except Exception as error:  # noqa: BLE001  unpickling runs the user's code
                note = f"its return value can't be read: {error!r}"
            else:
                return None
        return await self._autopsy.failure(start, self._group.workers[start.local_rank], exit_.exitcode, note)

    async def _close(self) -> None:
        self._stack_dumps.close()
        async with AsyncExitStack() as stack:  # each is closed, whatever the others raise
            stack.callback(self._sockets.close)
            stack.callback(self._logs.close)
            stack.callback(self._watches.close)
            stack.push_async_callback(self._observers.aclose)
            stack.push_async_callback(self._store.aclose)
            stack.push_async_callback(self._backend.aclose)
            if self._has_begun:
                self._tell(self._ending())

    def _ending(self) -> RunEnded:
        group, error = self._group, self._error
        if error is not None:
            error = _first_of(error) if isinstance(error, BaseExceptionGroup) else error
            return RunEnded(WorkerState.UNKNOWN, f"{type(error).__name__}: {error}", traceback=_traceback_of(error))
        try:
            self._result = self._make_result()
        except AelasticError as error:
            self._error = error
        cause = None if group.verdict is None else group.verdict.cause
        failures = {} if self._result is None else self._result.failures
        told = "" if self._error is None else _traceback_of(self._error)
        reason = group.reason if self._link_error is None else str(self._link_error)
        return RunEnded(group.state, reason, cause, failures, told)

    def _make_result(self) -> RunResult:
        if self._link_error is not None:
            raise self._link_error
        returned = self._return_values if callable(self.spec.entrypoint) else {}
        stacks = self._stack_dumps.stacks_of_killed()
        return result_of(self._group, returned, stacks, self._backend.describe)

    def _tell(self, run_event: RunEvent) -> None:
        self._observers.tell(run_event, anyio.current_time())


def _random_run_id() -> str:
    """A random UUID, as torchrun's, without the 6 ms that `import uuid` takes from every start."""
    digits = os.urandom(16).hex()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"


def _traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The cause in a group that task groups made: what followed from it is cancelled tasks."""
    causes = [_first_of(each) if isinstance(each, BaseExceptionGroup) else each for each in group.exceptions]
    return next((cause for cause in causes if isinstance(cause, AelasticError)), causes[0])
