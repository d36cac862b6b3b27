"""The resources of a run: logs, channels, store, watches, rendezvous link and back end, opened and closed together.

`agent.run` opens them, and offers this node to the rendezvous; the parts of a run share them through their context.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
from anyio.abc import TaskGroup

from aelastic.agent.channels import ControlSocket, ControlSockets, NoticePages
from aelastic.agent.group.events import Event
from aelastic.agent.group.worker_env import common_env, has_agent_store, own_variables
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.agent.link import open_link
from aelastic.agent.open_files import check_open_files
from aelastic.agent.postmortem import Postmortem
from aelastic.agent.watches.hang_watches import Watches
from aelastic.agent.watches.progress import Progress
from aelastic.agent.watches.start import StartWatch
from aelastic.base.host import control_sockets
from aelastic.base.host.ports import is_loopback
from aelastic.base.host.process_states import ProcessStates
from aelastic.base.loop import clock
from aelastic.base.record import Record
from aelastic.errors import AelasticError, InputError
from aelastic.logs.run_logs import RunLogs
from aelastic.observe.observer import Observers
from aelastic.observe.run_events import EndpointChanged, ForkServerMeasured, RunEvent, WorkerReached
from aelastic.observe.run_state import RunState
from aelastic.procs import LocalWorkers
from aelastic.rdzv.ledger import NONE, Reached
from aelastic.rdzv.protocol.messages import Node, Starts
from aelastic.rdzv.registry import AgentContext, Link, names
from aelastic.spec import WorkerSpec
from aelastic.workers.backend import WorkerBackend, WorkerStart
from aelastic.workers.tcpstore.host import StoreHost

# The back end's `start`; and a function that starts workers through it, changed or not.
StartFunction: TypeAlias = Callable[[Sequence[WorkerStart]], Coroutine[Any, Any, Mapping[int, Any]]]
Starter: TypeAlias = Callable[[Sequence[WorkerStart], StartFunction], Awaitable[Mapping[int, Any]]]

if TYPE_CHECKING:
    from aelastic.agent.error_rules import ErrorRules
    from aelastic.agent.health_gate import HealthGate
    from aelastic.agent.watches.watch import Found
    from aelastic.diagnose.stacks.collectives import FlightRecorder
    from aelastic.observe.exposition import AgentFacts
    from aelastic.workers.forkserver.fork_server import ForkServer


class DrainRequest(Record):
    """What this node requests of the job: to leave it within `deadline_s` seconds, or to stay after all (`None`)."""

    deadline_s: float | None
    reason: str = ""


class AgentSettings(Record):
    """What an agent knows before its run begins."""

    spec: WorkerSpec
    run_id: str
    node_id: str
    env: dict[str, str]  # the basis of the workers' environments
    backend: WorkerBackend | None = None  # None: this machine
    cpus: Mapping[int, frozenset[int]] | None = None  # by local rank, of workers that are bound to CPUs
    starter: Starter | None = None  # called instead of the back end when workers start
    cache_folder: Path | None = None  # of this machine and user only, for later runs

    @property
    def is_local(self) -> bool:
        """Whether workers are processes of this machine."""
        return self.backend is None

    @property
    def has_agent_store(self) -> bool:
        """Whether the agent can serve the workers' store."""
        return has_agent_store(self.spec, self.env)


class Resources:
    """Created completely or not at all: if one cannot be created, the others are released.

    Args:
        settings: the agent's settings.
        group: the workers; read, never changed.
        emit: takes run events, for the observers.
        on_found: receives each finding of a watch.

    Raises:
        InputError: a setting cannot work here, or this process may not open enough files.
    """

    def __init__(
        self,
        settings: AgentSettings,
        group: WorkerGroup,
        emit: Callable[[RunEvent], None],
        on_found: Callable[[Found], Coroutine[Any, Any, None]],
    ) -> None:
        self._settings, spec, env = settings, settings.spec, settings.env
        check_open_files(spec)
        with ExitStack() as made:
            self.logs = RunLogs(spec, settings.run_id)
            made.callback(self.logs.close)
            scratch = self.logs.scratch
            self.sockets = ControlSockets(scratch)
            self.pages = NoticePages(scratch)
            self.control_socket = ControlSocket(control_sockets.folder_of(env))
            made.callback(self.pages.close)
            made.callback(self.sockets.close)
            self.error_rules: ErrorRules | None = None
            if spec.restart_policy:
                from aelastic.agent.error_rules import ErrorRules
                from aelastic.rdzv.restart_rules import parse

                self.error_rules = ErrorRules(parse(spec.restart_policy), self.sockets.mark_env(env))
            self.postmortem = Postmortem(self.logs, is_local=settings.is_local, error_rules=self.error_rules)
            self.start_watch = StartWatch(group, partial(self._emit_start, emit), is_local=settings.is_local)
            self.recorder: FlightRecorder | None = None
            if spec.finds_hangs or spec.expect_output:  # triggers the flight recorders of ranks
                from aelastic.diagnose.stacks.collectives import FlightRecorder

                self.recorder = FlightRecorder()
            self.gate: HealthGate | None = None
            if spec.health_check is not None:
                from aelastic.agent.health_gate import HealthGate

                mark_env = self.sockets.mark_env(env)
                self.gate = HealthGate(spec.health_check, mark_env, self.sockets.mark, self.logs.root)
                made.callback(self.gate.close)
            self.process_states = ProcessStates()
            self.progress = Progress(self.logs, self.pages.steps, emit, is_on=spec.progress is not None)
            seen = self.logs.count_matches, self.progress.step_s, partial(self._waiting, group)
            self.watches = Watches(spec, env, scratch, *seen, on_found)
            made.callback(self.watches.close)
            is_bind_all = spec.rdzv is not None and spec.rdzv.bind_all and not spec.rdzv.is_on_loopback
            self.store = StoreHost(self.sockets.mark_env(env), is_bind_all=is_bind_all)
            around = AgentContext(settings.run_id, env, self.store, lambda *news: emit(EndpointChanged(*news)))
            self.link: Link = open_link(spec, settings.node_id, around)
            # Last: these start processes.
            self._fork_server = None if settings.backend else self._open_fork_server(settings, emit)
            if self._fork_server is not None:
                self.store.fork_from(self._fork_server.fork_helper)
            self.backend = settings.backend or LocalWorkers(
                start_method=spec.start_method,
                monitor_interval=spec.monitor_interval,
                mark=self.sockets.mark,
                scratch=scratch,
                fork_server=self._fork_server,
                silence_s=_guard_timeout_s(spec),
            )
            self._made = made.pop_all()  # closes them

    def reached(self, state: RunState) -> Reached:
        """Returns how far the workers of this generation have come."""
        calls = max(self.pages.calls().values(), default=0)
        return Reached(self.progress.reached(), calls or NONE, max(0.0, clock.now() - state.formed_at))

    def _waiting(self, group: WorkerGroup) -> Collection[int]:
        """Returns the local ranks that wait for a drain."""
        return self.pages.waiting(clock.now(), are_ending=group.exits.is_draining)

    def _open_fork_server(self, settings: AgentSettings, emit: Callable[[RunEvent], None]) -> ForkServer | None:
        spec = settings.spec
        if not spec.preload:
            return None
        from aelastic.workers.forkserver.children import function_command
        from aelastic.workers.forkserver.command import parse
        from aelastic.workers.forkserver.fork_server import ForkServer
        from aelastic.workers.forkserver.parked import Memory

        if isinstance(spec.entrypoint, str):
            command = parse(spec.entrypoint, [os.fsdecode(arg) for arg in spec.args])
            if command is None:
                raise InputError(
                    f"preload is given, but {spec.entrypoint!r} is not a Python interpreter with a program to run: "
                    "start python itself, or leave preload out",
                    topic="preload-needs-a-python-program",
                )
        else:
            command = function_command()
        env = common_env(spec, {**settings.env, **self.watches.env}, settings.run_id)
        env, kept_in = self.sockets.mark_env(env), settings.cache_folder

        def on_measured(memory: Memory) -> None:
            emit(ForkServerMeasured(memory.parked, memory.pss_bytes))

        return ForkServer(command, spec.preload, spec.preload_from, env, own_variables(spec), on_measured, kept_in)

    def _emit_start(self, emit: Callable[[RunEvent], None], event: RunEvent) -> None:
        emit(event)
        imports = None if self._fork_server is None else self._fork_server.imports
        if imports is not None and isinstance(event, WorkerReached) and event.phase == "process_group":
            imports.end()

    def starts(self, *, is_new: bool) -> Starts:
        """Returns how workers start now; `is_new`: the node has had none."""
        if self._fork_server is None:
            return Starts.COLD
        if is_new and self._fork_server.is_importing:
            return Starts.PREPARING
        return Starts.WARM if self._fork_server.is_warm else Starts.COLD

    async def prepared(self) -> Starts:
        """Waits until this node has finished preparing; returns how workers start then."""
        if self._fork_server is not None:
            await self._fork_server.wait_decided()
        return self.starts(is_new=False)

    async def open(self) -> None:
        """Creates the run's folders, and the files that watches need in them.

        Raises:
            InputError: they cannot be created.
        """
        await self.logs.open()
        if self._settings.has_agent_store and _loopback_of(self._settings.spec) == "localhost":
            await self.store.find_loopback()
        self.control_socket.open()
        self.watches.open()

    def facts(self) -> AgentFacts:
        """Returns what the agent knows now, for scrapers."""
        from aelastic.observe.exposition import AgentFacts

        silence_max_s, silent_s = self.watches.silence(clock.now())
        return AgentFacts(self.link.coordinates, silence_max_s, silent_s)

    async def finish(self) -> None:
        """Waits until the other nodes have been notified of the end, and the remaining output is on the console."""
        async with anyio.create_task_group() as last:
            last.start_soon(self.link.finish, name="leave")
            last.start_soon(self.logs.finish, name="the rest of the logs")

    def closing(self, observers: Observers) -> AsyncExitStack:
        """Returns a stack that closes all resources, the back end first; each is closed, whatever the others raise."""
        stack = AsyncExitStack()
        stack.callback(self._made.close)
        stack.callback(self.control_socket.close, None)
        stack.push_async_callback(observers.aclose)
        if self.error_rules is not None:
            stack.push_async_callback(self.error_rules.aclose)
        stack.push_async_callback(self.store.aclose)
        stack.push_async_callback(self.backend.aclose)
        return stack


class RunContext:
    """The context that the parts of a run share.

    Args:
        settings: the agent's settings.
        resources: the run's.
        group: the workers; read, never changed.
        tasks: the task group of the run.
        post: takes events, for the group.
        emit: takes run events, for the observers.
    """

    def __init__(
        self,
        settings: AgentSettings,
        resources: Resources,
        group: WorkerGroup,
        tasks: TaskGroup,
        post: Callable[[Event], None],
        emit: Callable[[RunEvent], None],
    ) -> None:
        self.settings, self.resources, self.group = settings, resources, group
        self.tasks, self.post, self.emit = tasks, post, emit


class GenerationContext(RunContext):
    """The context of the workers of one generation, and what is known of them, by local rank."""

    def __init__(self, *of_run: Any) -> None:
        super().__init__(*of_run)
        self.starts: dict[int, WorkerStart] = {}  # how they were started
        self.asked_at: dict[int, float] = {}  # when they were asked to end, if they were
        self.ended: set[int] = set()  # those whose own process has ended


def node_offer(settings: AgentSettings, store: StoreHost, starts: Starts) -> Node:
    """Returns this node's offer, with a port that it holds from now on; `listen_for_workers` opens it."""
    spec, rdzv = settings.spec, settings.spec.rdzv
    address, port = _address_of(spec)
    return Node(
        node_id=settings.node_id,
        host=socket.gethostname(),
        role=spec.role,
        local_world_size=spec.local_world_size,
        master_addr=address,
        master_port=store.open(port, _loopback_of(spec)) if settings.has_agent_store else store.hold(port),
        preferred_rank=None if rdzv is None else rdzv.node_rank,
        starts=starts,
    )


async def listen_for_workers(store: StoreHost, address: str, spec: WorkerSpec) -> None:
    """Opens the port where all workers of a round meet: at this address, or at all addresses if that fails."""
    if store.is_on_loopback:
        return  # it is open already
    # Most jobs have one node, and need none of this.
    from aelastic.rdzv.stores.endpoints import RESOLVE_TIMEOUT_S, Endpoint, local_addresses_of, look_up_limit_s

    within_s = RESOLVE_TIMEOUT_S if spec.rdzv is None else look_up_limit_s(spec.rdzv.lease_s)
    addresses: list[str] = []
    with suppress(AelasticError):
        addresses = await local_addresses_of(Endpoint(address, 0), within_s)
    store.listen_at(addresses)


def _guard_timeout_s(spec: WorkerSpec) -> float | None:
    """Returns how long the agent may be silent before its guard kills the workers; `None`: no limit."""
    if spec.rdzv is None or _has_torchs_handler(spec):
        return None  # without a rendezvous no other round can begin, and torch's handlers have no lease
    return spec.rdzv.guard_timeout_s


def _has_torchs_handler(spec: WorkerSpec) -> bool:
    """Whether one of torch's rendezvous handlers begins the rounds and decides where the workers meet."""
    return spec.rdzv_handler is not None or (spec.rdzv is not None and spec.rdzv.backend not in names())


def _loopback_of(spec: WorkerSpec) -> str:
    """Returns where workers find the store if all are on this host: a loopback address, or `localhost`; else ""."""
    address, _ = _address_of(spec)
    is_on_loopback = is_loopback(address) if spec.rdzv is None else spec.rdzv.is_on_loopback
    return (address or "localhost") if is_on_loopback else ""


def _address_of(spec: WorkerSpec) -> tuple[str, int]:
    """Returns the address and port where the workers meet if this node becomes group rank 0; port 0: any free port."""
    rdzv = spec.rdzv
    if _has_torchs_handler(spec):
        return "", 0  # the handler has that port
    if rdzv is None:
        return spec.master_addr or "localhost", spec.master_port or 0
    if rdzv.backend == "static":
        # Both address and port are those of node rank 0.
        return spec.master_addr or "", (spec.master_port or 0) if rdzv.node_rank == 0 else 0
    return rdzv.local_addr or "", spec.master_port or 0
