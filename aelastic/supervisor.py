"""The supervisor: runs the workers of this node until the job is over.

The agent's interface for programs; the run itself is in `agent.run`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from aelastic.agent.calls import check, check_observers
from aelastic.agent.group.events import Event, StopRequested
from aelastic.agent.group.worker_env import CREDENTIALS_VARIABLE, SECRET_VARIABLE, SYSTEMD_VARIABLES, check_devices
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.agent.resources import AgentSettings, DrainRequest
from aelastic.agent.run import Run, first_of
from aelastic.base.host.shortages import shortage_of
from aelastic.base.loop.mailbox import Mailbox
from aelastic.base.loop.threads import keep_one
from aelastic.errors import HostError, RequestError
from aelastic.observe.health.address import HEALTH_PORT_VARIABLE
from aelastic.observe.observer import LogLines, Observer, Observers, events_of
from aelastic.observe.run_events import RunEvent, StacksTaken
from aelastic.rdzv.protocol import requests as r
from aelastic.spec import WorkerSpec
from aelastic.workers.backend import WorkerBackend
from aelastic.workers.requirements import check_program, check_torch
from aelastic.workers.states import Worker, WorkerState

if TYPE_CHECKING:
    from aelastic.health_check_server import HealthCheckServer, HealthCheckServerFactory
    from aelastic.observe.exposition import Exposition
    from aelastic.observe.health.foreign_server import ForeignServer
    from aelastic.observe.health.server import HealthServer
    from aelastic.observe.torch_events import TorchEvents
    from aelastic.rdzv.lent_handler import LentHandler
    from aelastic.result import RunResult

_log = logging.getLogger(__name__)

# A program that imports these may have registered handlers with them.
_LISTENED_TO = ("torch.distributed.elastic.events", "torch.distributed.elastic.metrics.api")

# The surrounding program decides whether and where our messages appear; the command line does so.
logging.getLogger("aelastic").addHandler(logging.NullHandler())


class Supervisor:
    """Runs the workers of this node until the job ends (torch: `LocalElasticAgent`).

    It runs on the caller's event loop and leaves the process alone: it installs no signal handlers, does not change
    `os.environ`, and sets no event-loop policy.  A supervisor runs once; any number of supervisors can run at the same
    time.

    Args:
        spec: what to run.
        backend: starts and stops the workers; `None` runs them as processes of this machine.
        observers: receive the run events.
        health_check_server: a torch `HealthCheckServer`, or a factory for one, to use instead of aelastic's own.  The
            supervisor starts and stops it.

    Raises:
        InputError: an argument is invalid.  Each method raises it as well.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        backend: WorkerBackend | None = None,
        observers: Sequence[Observer] = (),
        health_check_server: HealthCheckServer | HealthCheckServerFactory | None = None,
    ) -> None:
        check(spec=spec, backend=backend, health_check_server=health_check_server)
        check_observers(observers)
        self.spec = spec
        given_id = spec.rdzv_handler.get_run_id() if spec.rdzv_handler is not None else spec.run_id
        env = dict(os.environ) if spec.env is None else dict(spec.env)
        # Workers must not learn the path of the secret's file from us.
        env.pop(SECRET_VARIABLE, None)
        path = spec.rdzv.secret_path if spec.rdzv is not None else None
        if path is not None and os.path.dirname(path) == env.get(CREDENTIALS_VARIABLE):
            del env[CREDENTIALS_VARIABLE]
        # The port belongs to this agent: an agent that a worker starts must not use it as well.
        self._health_port = env.pop(HEALTH_PORT_VARIABLE, "")
        if SYSTEMD_VARIABLES[0] in env:  # a worker that used them would notify systemd in the agent's name
            for name in SYSTEMD_VARIABLES:
                env.pop(name, None)
        self._lent: LentHandler | None = None
        if spec.rdzv_handler is not None:
            from aelastic.rdzv.lent_handler import lent

            self._lent = lent(spec.rdzv_handler)
            spec = replace(spec, rdzv_handler=self._lent)
        node_id = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        self._settings = AgentSettings(spec, given_id or _random_run_id(), node_id, env, backend)
        self._group = WorkerGroup(spec)
        self._mailbox: Mailbox[Event] = Mailbox()
        self._asked: Mailbox[DrainRequest] = Mailbox()
        self._observers = Observers([LogLines(spec.shutdown_timeout_s), *observers])
        self._given_health = health_check_server
        self._health: HealthServer | ForeignServer | None = None  # only if something may query it
        self._exposition: Exposition | None = None  # as above
        self._torch_events: TorchEvents | None = None  # only if something may listen
        self._finding_cpus: anyio.CancelScope | None = None
        self._has_run = False
        self._run: Run | None = None

    @property
    def state(self) -> WorkerState:
        """The state of this node's workers (torch: `WorkerGroup.state`)."""
        return self._group.state

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers of the current generation."""
        return self._group.workers

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Asks the run to stop: workers get the signal, and SIGKILL after `shutdown_timeout_s`.

        A second call kills them at once.  Never blocks; safe to call in a signal handler of the loop.

        Args:
            signum: the signal for the workers.
        """
        check(signum=signum)
        self._mailbox.post(StopRequested(signum))
        if self._finding_cpus is not None:
            self._finding_cpus.cancel()
        if self._run is not None and (self._group.verdict is not None or self._group.is_done):
            self._run.resources.link.cut_short()  # do not wait for agents that do not know how the job ended
        if self._run is not None and self._group.is_done:
            self._run.resources.logs.cut_short()  # nor for the console
            self._observers.give_up()

    def drain(self, deadline_s: float, reason: str = "") -> None:
        """Announces that this node will go away: all ranks of the job save at one step, then the node leaves in order.

        Ranks save through `aelastic.notice`.  The other nodes continue without this one, and no restart is charged.
        Afterwards `RunResult.is_drained` is true.  With several calls, the earliest deadline holds.  Never blocks; safe
        to call in a signal handler of the loop.

        Args:
            deadline_s: seconds until the node goes away.
            reason: text for the log.
        """
        check(deadline_s=deadline_s, reason=reason)
        self._asked.post(DrainRequest(deadline_s, reason))

    def cancel_drain(self) -> None:
        """Cancels a drain: ranks that have saved and are waiting continue where they were."""
        self._asked.post(DrainRequest(None))

    async def status(self) -> list[dict[str, Any]]:
        """Returns the status of each node of the job, one dict per node, with the fields of `/status`.

        Nodes that do not answer within some seconds are left out; before the run, the list is empty.
        """
        if self._run is None:
            return []
        import json

        shown = await self._run.queries.fetch(r.What.STATUS)
        return [json.loads(text) for text in shown.found.values()]

    async def restart(self, reason: str = "", *, at_save_s: float | None = None) -> None:
        """Restarts the workers on all nodes; no restart is charged.

        Args:
            reason: text for the log.
            at_save_s: wait until all ranks have saved at one step (`aelastic.notice`), but at most this many seconds;
                `None` restarts at once.

        Raises:
            RequestError: the job is not running, or the leader refused the request or did not answer.
        """
        await self._ask(r.Verb.RESTART, reason, at_save_s)

    async def stop_job(self, reason: str = "", *, at_save_s: float | None = None) -> None:
        """Ends the job on all nodes.

        Afterwards `RunResult.is_stopped` is true, and after a save `is_drained` as well.  Arguments and errors are
        those of `restart`.
        """
        await self._ask(r.Verb.STOP, reason, at_save_s)

    def events(self) -> AsyncIterator[RunEvent]:
        """Yields the run events from now until the end of the run."""
        return events_of(self._observers)

    async def _ask(self, verb: r.Verb, reason: str, at_save_s: float | None) -> None:
        check(reason=reason, at_save_s=at_save_s)
        if self._run is None or self._group.is_done:
            raise RequestError("the job is not running: the run has not begun, or has ended")
        fields = {"deadline_s": at_save_s or 0.0, "at_save": at_save_s is not None}
        answer = await self._run.queries.ask(verb, reason, **fields)
        if answer is None:
            raise RequestError("no answer from the leader; the request may or may not be carried out")
        if not answer.is_applied:
            raise RequestError(answer.text)

    def send_signal(self, signum: int) -> None:
        """Passes a signal on to those workers of this node that have a handler for it; the job continues."""
        check(signum=signum)
        if self._run is not None:
            self._run.send_signal(signum)

    async def collect_stacks(self, why: str = "asked") -> StacksTaken:
        """Collects the Python stacks of all workers of the job, without disturbing them.

        Takes at most 6 s, usually less than 0.1 s.  Each node writes the stacks of its own workers, and its observers
        get a `Compared` event.  The result names this node's folder and, for each worker, the source of its
        stack, or why it has none.  Concurrent calls share one collection.  Before the workers start and after they have
        ended, the result is empty.  Cancelling a call does not affect the others.

        Args:
            why: the reason, written with the stacks.
        """
        check(why=why)
        return StacksTaken(0, why, {}, "") if self._run is None else await self._run.collect_stacks(why)

    async def run(self) -> RunResult:
        """Runs the job to its end, and returns the result.

        If cancelled, it stops the workers as `stop` does, waits until all of them are gone, and only then raises the
        cancellation.  If cancelled again meanwhile, it kills the workers.

        Raises:
            InputError: the spec cannot be carried out on this host, for example because a port is in use or the log
                folder is not writable.
            RendezvousTimeoutError: too few nodes joined in time.
            RendezvousError: the agents could not agree on a round, or lost the endpoint.
            HostError: the host is out of processes, threads, file descriptors or disk space.
            UnkillableWorkerError: a worker survived SIGKILL; the host needs attention.
            InternalError: a bug in aelastic.
        """
        if self._has_run:
            raise RuntimeError("a Supervisor runs once: make another for another run")
        self._has_run = True
        check_devices(self.spec, self._settings.env)
        if self._settings.is_local:
            check_program(self.spec.entrypoint, self._settings.env, self.spec.args)
            if self._settings.has_agent_store:
                check_torch()
        try:
            return await self._run_lent()
        finally:
            if self._lent is not None:
                self._lent.give_back()

    async def _run_lent(self) -> RunResult:
        try:
            await keep_one()  # before a worker, which may start threads up to the limit
            async with self._open_caches():
                await self._open_torch_events()
                self._run = await self._open()
                return await self._watch_over(self._run)
        except (OSError, RuntimeError, MemoryError) as error:
            if shortage := shortage_of(error):
                raise HostError(
                    f"the agent cannot continue: {shortage}", topic="the-host-is-out-of-processes-or-memory"
                ) from error
            raise

    @asynccontextmanager
    async def _open_caches(self) -> AsyncIterator[None]:
        """Makes workers keep compiled code in the cache folder, if one is set."""
        if self.spec.cache_dir is None or not self._settings.is_local:
            yield
            return
        from aelastic.workers.caches import open_cache

        with closing(await open_cache(self.spec.cache_dir)) as caches:
            env = {**self._settings.env, **caches.env(self._settings.env)}
            self._settings = self._settings.replace(env=env, cache_folder=caches.folder)
            yield

    async def _open_torch_events(self) -> None:
        """Imports the module that notifies torchelastic's listeners of the run, if there may be any."""
        if self.spec.event_log_handler == "null" and not any(name in sys.modules for name in _LISTENED_TO):
            return
        from aelastic.observe.torch_events import TorchEvents

        torch_events = TorchEvents(self._settings.spec, self._settings.run_id)
        await torch_events.open()
        self._torch_events = torch_events
        self._observers.add(torch_events)

    async def _open(self) -> Run:
        """Creates what the run needs, before anything is started."""
        run: Run | None = None
        try:
            await self._open_health()
            await self._open_exports()
            if self.spec.numa_binding is not None:
                from aelastic.workers.topology import cpus_of_workers

                with anyio.CancelScope() as self._finding_cpus:  # this takes seconds, and `stop` need not wait for it
                    cpus = await cpus_of_workers(
                        self.spec.numa_binding,
                        self.spec.local_world_size,
                        self._settings.env,
                        falls_back=self.spec.numa_fall_back,
                    )
                    self._settings = self._settings.replace(cpus=cpus)
                self._finding_cpus = None
            run = Run(self._settings, self._group, self._mailbox, self._observers, self._asked)
            await run.open()
        except BaseException as error:
            if self._torch_events is not None:
                await self._torch_events.fail(error)
            if run is not None:
                with anyio.CancelScope(shield=True):
                    await run.resources.closing(self._observers).aclose()
            elif self._health is not None:
                self._health.close()
            raise
        return run

    async def _watch_over(self, run: Run) -> RunResult:
        """Waits for the end of the run.  A cancellation does not reach the run: it becomes a request to stop."""
        cancelled: BaseException | None = None
        done = anyio.Event()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run.run, done, name="supervisor")
                while not done.is_set():
                    try:
                        # Once cancelled, only asyncio's own `cancel` gets through, which is a second request.
                        with anyio.CancelScope(shield=cancelled is not None):
                            await done.wait()
                    except anyio.get_cancelled_exc_class() as error:
                        cancelled = error
                        self.stop()
        except BaseExceptionGroup as group:
            raise first_of(group) from None
        if cancelled is not None:
            raise cancelled
        return run.result

    async def _open_health(self) -> None:
        """Listens for queries about this agent's health, if enabled."""
        if not self._health_port and self._given_health is None:
            if self.spec.linger_s:
                _log.warning(
                    "linger has no effect, since %s is not set and there is nothing to scrape", HEALTH_PORT_VARIABLE
                )
            return
        from aelastic.observe.health.server import open_health

        self._health = await open_health(
            self._health_port, self._given_health, self.collect_stacks, self._expose, self.spec.linger_s
        )
        if self._health is not None:
            self._observers.add(self._health)

    def _expose(self) -> Exposition:
        """Returns the status and metrics of the run, shared by all that show them; receives events before these do."""
        if self._exposition is None:
            from aelastic.observe.exposition import AgentFacts, Exposition

            def look() -> AgentFacts:
                return AgentFacts() if self._run is None else self._run.resources.facts()

            async def catch_up() -> None:
                if self._run is not None:
                    await self._run.resources.progress.look_now()

            self._exposition = Exposition(is_local=self._settings.is_local, look=look, catch_up=catch_up)
            self._observers.add(self._exposition)
        return self._exposition

    async def _open_exports(self) -> None:
        """Starts to write metrics to a file, and to send run events to services that the environment names."""
        env = self._settings.env
        if self.spec.metrics_textfile is not None:
            from aelastic.observe.export.textfile import MetricsTextfile

            textfile = MetricsTextfile(self.spec.metrics_textfile, self._settings.run_id, self._expose())
            await textfile.open()
            self._observers.add(textfile)
        may_report_steps = self.spec.progress is not None or self.spec.recovery == "in-place"
        if may_report_steps and "KUBEFLOW_TRAINER_SERVER_URL" in env:
            from aelastic.observe.export.trainer import TrainerStatus, status_server

            if (server := status_server(env)) is not None:
                self._observers.add(TrainerStatus(server))
        if any(name.startswith("OTEL_EXPORTER_OTLP_") for name in env):
            from aelastic.observe.export.otel import traces_of

            if (traces := traces_of(env)) is not None:
                self._observers.add(traces)


def _random_run_id() -> str:
    """Returns a random UUID, as in torchrun, without the 6 ms that `import uuid` adds to every start."""
    digits = os.urandom(16).hex()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"
