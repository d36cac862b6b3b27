"""One run of an agent: one mailbox, one deadline.

Carries out the worker group's actions and posts events to it, without deciding anything.  Each action that takes time
is a task that ends by posting its event.
"""

from __future__ import annotations

import os
import signal
import socket
import traceback
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, assert_never

import anyio
from anyio.abc import TaskGroup

from aelastic.agent.generation import Generation, can_start_ahead
from aelastic.agent.group import events as ev
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.agent.resources import AgentSettings, DrainRequest, GenerationContext, Resources, RunContext, node_offer
from aelastic.agent.run_event_source import RunEventSource, introduction
from aelastic.base.host import proc_table
from aelastic.base.loop import clock
from aelastic.base.loop.mailbox import Mailbox
from aelastic.errors import AelasticError, RendezvousTimeoutError
from aelastic.observe.observer import Observers
from aelastic.observe.run_events import EndpointChanged, RunEnded, RunEvent, StacksTaken, Waited
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.workers.states import Phase, WorkerState

if TYPE_CHECKING:
    from aelastic.agent.health_gate import HealthGate
    from aelastic.agent.requests.notices import Notices
    from aelastic.agent.requests.queries import Queries
    from aelastic.agent.watches.watch import Found
    from aelastic.result import RunResult

# A second job with the same name joins the first one.
SPARE_HINT = "; if this is to be a job of its own, give it another --rdzv-id"


class Run:
    """Runs the workers of one node until the job is over.

    Args:
        settings: the agent's settings.
        group: the workers; only this run changes it.
        mailbox: events for the group.
        observers: receive the run's events.
        asked: this node's requests of the job; signal handlers, which are not in a task, post them here.

    Raises:
        InputError: a setting cannot work here.
    """

    def __init__(
        self,
        settings: AgentSettings,
        group: WorkerGroup,
        mailbox: Mailbox[ev.Event],
        observers: Observers,
        asked: Mailbox[DrainRequest],
    ) -> None:
        self._settings = settings
        self._group = group
        self._mailbox = mailbox
        self._observers = observers
        self._event_source = RunEventSource(group)
        self.resources = Resources(settings, group, self._emit, self._on_found)
        # If there are several: why each is missing, or "", and since when.
        self._endpoints: dict[str, tuple[str, float]] = {}
        self._asked = asked
        self._generation: Generation | None = None
        self._tasks: TaskGroup | None = None
        self._given_up_for: AelasticError | None = None
        self._ready: m.Ready | None = None  # the last one of this node
        self._queries: Queries | None = None  # until they are needed: the modules take time to import
        self._cordoned = anyio.CancelScope()
        self._error: BaseException | None = None  # of the run, if it ends with one
        self._result: RunResult | None = None  # of the run otherwise

    async def open(self) -> None:
        """Creates the run's folders, and writes an event log there if they are kept.

        Raises:
            InputError: they cannot be created.
        """
        await self.resources.open()
        if (folder := self.resources.logs.kept) is not None:
            from aelastic.observe.event_log import FILE_NAME, EventLog

            self._observers.add(EventLog(folder / FILE_NAME))
        self._observers.add(self.resources.start_watch)

    @property
    def result(self) -> RunResult:
        """How the run ended; raises its error if it ended with one."""
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    @property
    def queries(self) -> Queries:
        """Handles queries and requests between this node and the job; created when first needed."""
        if self._queries is None:
            from aelastic.agent.requests.queries import Queries

            self._queries = Queries(self._settings, self.resources, self._observers.state, self.collect_stacks)
        return self._queries

    async def _serve(self, conn: socket.socket) -> None:
        from aelastic.agent.requests.answers import serve

        await serve(conn, self.queries, self._observers)

    async def collect_stacks(self, why: str) -> StacksTaken:
        if self._tasks is None or self._generation is None:
            return StacksTaken(self._group.generation, why, {}, "")
        return await self._generation.stuck.collect(why)

    @cached_property
    def notices(self) -> Notices:
        """Handles announced interruptions of this node; created with the first one."""
        from aelastic.agent.requests.notices import Notices

        assert self._tasks is not None  # no notice comes while nothing runs
        post, emit = self._mailbox.post, self._emit
        notices = Notices(RunContext(self._settings, self.resources, self._group, self._tasks, post, emit))
        self._tasks.start_soon(notices.run, name="notices")
        return notices

    async def _receive_requests(self) -> None:
        while True:
            if (asked := await self._asked.next(None)) is not None:
                self.notices.ask(asked)

    def send_signal(self, signum: int) -> None:
        """Forwards a signal to live workers, except those that it would end."""
        for each in self._group.workers:
            is_handled = not self._settings.is_local or proc_table.handles(each.id, signum)
            if each.local_rank in self._group.exits.alive and is_handled:
                self.resources.backend.stop(each.local_rank, signum)

    async def _on_found(self, found: Found) -> None:
        if self._current.is_held and found.by in {"hang", "output"}:
            return  # a peer has failed, and the workers wait for it
        await self._current.stuck.comparisons.on_found(found)

    async def run(self, done: anyio.Event) -> None:
        """Runs to the end, and closes everything.  Cancelling the caller does not cancel it.

        Args:
            done: is set at the end.
        """
        with anyio.CancelScope(shield=True):
            resources = self.resources
            try:
                settings, host = self._settings, socket.gethostname()
                names = {"run_id": settings.run_id, "node_id": settings.node_id, "host": host}
                self._emit(introduction(settings.spec, **names, pid=os.getpid()))
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(resources.backend.run, name="backend")
                    tasks.start_soon(resources.logs.run, name="logs")
                    tasks.start_soon(resources.store.run, name="store")
                    tasks.start_soon(self._run_link, name="rendezvous")
                    tasks.start_soon(self._observers.run, name="observers")
                    tasks.start_soon(resources.watches.run, name="watches")
                    tasks.start_soon(resources.progress.run, name="progress")
                    tasks.start_soon(self._receive_requests, name="requests")
                    tasks.start_soon(resources.control_socket.run, self._serve, name="control socket")
                    if settings.spec.notice_file is not None or settings.spec.notice_command is not None:
                        from aelastic.agent.requests.notice_sources import NoticeSources

                        env = resources.sockets.mark_env(settings.env)  # no process of a source outlives this agent
                        sources = NoticeSources(settings.spec, env, self._asked.post)
                        tasks.start_soon(sources.run, name="notice sources")
                    await self._run_group(tasks)
                    tasks.cancel_scope.cancel()
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._tasks = None
                if self._generation is not None:
                    self._generation.close()
                try:
                    await self._close()
                finally:
                    done.set()

    async def _run_group(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._mailbox.post(ev.Start())
        while not self._group.is_done:
            event = await self._mailbox.next(self._group.deadline) or ev.DeadlinePassed()
            now = clock.now()
            for action in self._group.handle(event, now):
                self._carry_out(action, tasks)
            if self._generation is not None:
                self._generation.on_change()
            for run_event in self._event_source.handle(event, now):
                self._observers.tell(run_event, now)
        await self.resources.finish()
        await self.resources.progress.end()

    def _carry_out(self, action: ev.Action, tasks: TaskGroup) -> None:  # noqa: C901, PLR0912  one case for each action
        resources, node_id = self.resources, self._settings.node_id
        match action:
            case ev.Join():
                self._join(tasks, action)
            case ev.Spawn(number):
                context = GenerationContext(
                    self._settings, resources, self._group, tasks, self._mailbox.post, self._emit
                )
                if self._generation is not None:
                    self._generation.close()
                self._generation = Generation(context, action, self._give_up)
                tasks.start_soon(self._generation.run, name=f"spawn {number}")
            case ev.CancelSpawn():
                self._current.cancel()
            case ev.Begin():
                tasks.start_soon(self._current.begin, action, name="begin")
            case ev.Leave():
                self._current.leave(action)
            case ev.Replace(_, local_rank):
                tasks.start_soon(self._current.replace, action, name=f"replace {local_rank}")
            case ev.Release():
                self._current.release()
            case ev.ReportOptedIn(round_):
                resources.link.send(m.OptedIn(node_id, round_))
                self._current.on_opted_in()
            case ev.ReportPrepared(are_ready):
                starts = m.Starts.READY if are_ready else resources.starts(is_new=False)
                resources.link.send(m.Prepared(node_id, starts))
            case ev.ReportFailed(round_, failure, at):
                age_s, reached = clock.now() - at, resources.reached(self._observers.state)
                resources.link.send(m.Failed(node_id, round_, failure.for_others(), age_s, reached))
            case ev.ReportSucceeded(round_):
                resources.link.send(m.Succeeded(node_id, round_))
            case ev.ReportLeft(reason):
                resources.link.send(m.Left(node_id, reason))
            case ev.Stop(_, local_ranks, signum):
                generation = self._current
                if signum == signal.SIGKILL and generation.stuck.stack_dumps.claim_dump(local_ranks):
                    tasks.start_soon(generation.dump_and_stop, action, name="kill")
                else:
                    generation.stop(local_ranks, signum)
                    if not self._group.exits.is_saving:  # workers that save have until the deadline
                        generation.grace.stopping()
            case ev.Finish():
                pass  # the loop sees that the group is done
            case _:
                assert_never(action)

    def _join(self, tasks: TaskGroup, join: ev.Join) -> None:
        resources, is_new = self.resources, self._generation is None
        starts = m.Starts.READY if join.are_ready else resources.starts(is_new=is_new)
        reached = None if is_new else resources.reached(self._observers.state)
        self._ready = ready = m.Ready(node_offer(self._settings, resources.store, starts), reached, join.round)
        if resources.gate is not None:
            tasks.start_soon(self._join_when_fit, resources.gate, ready, name="health gate")
            return
        if self._group.phase is Phase.FORMING:
            tasks.start_soon(self._join_in_place, ready, name="join")
            return
        resources.link.send(ready)
        if starts is m.Starts.PREPARING:
            tasks.start_soon(self._report_prepared, name="prepared")

    async def _join_in_place(self, ready: m.Ready) -> None:
        """Joins once the last round's store is gone: workers that wait connect to the next round's store at once."""
        await self.resources.store.wait_dropped()
        if self._is_last_word(ready):
            self.resources.link.send(ready)

    def _is_last_word(self, ready: m.Ready) -> bool:
        """Whether this node still waits for a round, and this is its latest message about it.

        The story behind it: workers wait at the safe point, and the node is found unfit.  They are lost, others start,
        and the node is found fit.  It is in a round when the first check, repeated, would report it ready again.
        """
        phase = self._group.phase
        is_waiting = phase in {Phase.JOINING, Phase.PREPARING, Phase.FORMING}
        is_waiting |= phase is Phase.LEAVING and self._group.in_place.has_joined
        return is_waiting and ready is self._ready

    @property
    def _pids_of_workers(self) -> set[int]:
        """The pids of the workers that are alive."""
        group = self._group
        return {each.id for each in group.workers if each.local_rank in group.exits.alive and isinstance(each.id, int)}

    async def _join_when_fit(self, gate: HealthGate, ready: m.Ready) -> None:
        """Keeps this node out of the job until it is fit; the others continue without it."""
        from aelastic.rdzv.settings import JOIN_TIMEOUT_S  # most jobs have no gate

        rdzv, began = self._settings.spec.rdzv, clock.now()
        limit_s = JOIN_TIMEOUT_S if rdzv is None else rdzv.join_timeout_s
        if self._group.phase is Phase.FORMING:
            await self.resources.store.wait_dropped()
        while reason := await gate.look(self._pids_of_workers):
            if not self._is_last_word(ready):
                return None
            is_alone = rdzv is None or self._generation is None  # nobody notifies it of the end of the job
            if is_alone and clock.now() - began >= limit_s:
                return self._give_up(RendezvousTimeoutError(f"this node is unfit, for {limit_s:g} s now: {reason}"))
            if self._generation is not None:
                self.resources.link.send(ready.replace(node=ready.node.replace(unfit=reason)))
            text = f"{reason}; it takes part in no round, and is looked at again in {(pause_s := gate.pause_s()):.0f} s"
            self._emit(Waited(f"this node is unfit: {text}"))
            await anyio.sleep(pause_s)
        if not self._is_last_word(ready):
            return None
        self.resources.link.send(ready)
        if ready.node.starts is m.Starts.PREPARING:
            await self._report_prepared()
        return None

    async def _wait_while_cordoned(self, cordoned: r.Cordoned) -> None:
        """Waits while this node is cordoned; after that it is ready again."""
        ready, hours = self._ready, cordoned.again_s / 3600
        if cordoned.again_s:
            why = f"this node is cordoned for {hours:.3g} h ({cordoned.reason}); the others continue without it"
            self._emit(Waited(why))
        with anyio.CancelScope() as self._cordoned:
            await anyio.sleep(cordoned.again_s)
            if ready is not None and self._is_last_word(ready):
                self.resources.link.send(ready)

    @property
    def _can_start_ahead(self) -> bool:
        """Whether workers may start before a round includes this node, or already wait for one."""
        return self._group.phase is not Phase.JOINING or can_start_ahead(self._settings)

    async def _report_prepared(self) -> None:
        starts = await self.resources.prepared()
        if self._group.phase is Phase.JOINING:  # else this is reported once the workers are ready
            self.resources.link.send(m.Prepared(self._settings.node_id, starts))

    @property
    def _current(self) -> Generation:
        assert self._generation is not None  # nothing is cancelled or stopped before the first
        return self._generation

    async def _run_link(self) -> None:
        try:
            await self.resources.link.run(self._deliver)
        except BaseExceptionGroup as group:
            self._give_up(first_of(group))
        except AelasticError as error:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Makes this agent leave, and end with the error.  The workers do not know of it: they may still save."""
        if not isinstance(error, AelasticError):
            raise error
        self._given_up_for = error
        self._mailbox.post(ev.StopRequested(reason=str(error)))

    def _deliver(self, message: m.LeaderMessage) -> None:  # noqa: C901, PLR0912  one case for each message
        if isinstance(message, m.Waiting):
            more = "" if message.kind is m.WaitKind.ENDPOINT else self._missing_endpoints()
            if message.kind is m.WaitKind.SPARE and self._generation is None:  # the user may expect a new job
                more += SPARE_HINT
            self._emit(Waited(message.text + more, message.missing))
        elif isinstance(message, m.Settled):
            self._emit(Waited(wording.settled(message.round, message.decision)))
        elif isinstance(message, r.Cordoned):
            self._cordoned.cancel()
            if self._tasks is not None:
                self._tasks.start_soon(self._wait_while_cordoned, message, name="cordoned")
        elif isinstance(message, r.Notice | r.Answer):
            self.notices.on_received(message)
            if isinstance(message, r.Answer) and self._queries is not None:  # else nobody waits for it
                self._queries.on_received(message)
        elif isinstance(message, r.Shown):
            self.queries.on_received(message.fetched)
        elif isinstance(message, r.Show):
            if self._tasks is not None:
                self._tasks.start_soon(self.queries.show, message.fetch, name="shows")
        elif isinstance(message, m.StartAhead) and not self._can_start_ahead:
            if self._tasks is not None:
                self._tasks.start_soon(self._report_prepared, name="prepared")
        elif not isinstance(message, m.Look | m.Compared):
            self._mailbox.post(message)
        elif self._tasks is not None and self._generation is not None:  # without workers it is meaningless
            self._tasks.start_soon(self._generation.stuck.comparisons.on_received, message, name="hang comparison")

    async def _close(self) -> None:
        async with self.resources.closing(self._observers):
            self._emit(self._ending())
            self.resources.control_socket.close(self._left())

    def _ending(self) -> RunEnded:
        group, error = self._group, self._error
        if error is not None:
            error = first_of(error) if isinstance(error, BaseExceptionGroup) else error
            return _crashed(error)
        try:
            self._result = self._make_result()
        except AelasticError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001  `result` raises it, once the observers have the last event
            self._error = error
            return _crashed(error)
        cause = None if group.verdict is None else group.verdict.cause
        failures = {} if self._result is None else self._result.failures
        error_text = "" if self._error is None else _traceback_of(self._error)
        if self._given_up_for is not None:
            return RunEnded(group.state, str(self._given_up_for), cause, failures, error_text)
        decision = None if group.verdict is None else group.verdict.decision
        return RunEnded(group.state, wording.text_of(group.reason), cause, failures, error_text, decision)

    def _left(self) -> dict[str, Any] | None:
        """Returns the description of this run that stays readable."""
        group = self._group
        if group.state is WorkerState.SUCCEEDED and len(self._observers.state.ends) == 1:
            # Nothing else is to report, and the modules that describe a run take 40 ms to import.
            began, time = self._observers.state.began, datetime.now(UTC).isoformat(timespec="milliseconds")
            run = {"run_id": self._settings.run_id, "entrypoint": "" if began is None else began.entrypoint}
            reason = wording.text_of(group.reason)
            return {"time": time, "run": run, "state": group.state.value, "reason": reason, "why": []}
        try:
            status = self.queries.status()
            return {**status, "why": self.queries.why()}
        except Exception:  # noqa: BLE001  how the run ended is also reported elsewhere
            return None

    def _make_result(self) -> RunResult:
        from aelastic.agent.outcome import result_of

        if self._given_up_for is not None:
            raise self._given_up_for
        is_function = callable(self._settings.spec.entrypoint)
        returned = self._generation.return_values if is_function and self._generation is not None else {}
        stacks = {} if self._generation is None else self._generation.stacks_of_killed()
        return result_of(self._group, returned, stacks, self.resources.backend.describe)

    def _emit(self, run_event: RunEvent) -> None:
        now = clock.now()
        if isinstance(run_event, EndpointChanged):
            self._endpoints[run_event.endpoint] = run_event.trouble, now
        self._observers.tell(run_event, now)

    def _missing_endpoints(self) -> str:
        """Returns the part of a line about waiting that names missing endpoints."""
        missing = [
            f"{endpoint} ({trouble}, for {clock.now() - since:.0f} s)"
            for endpoint, (trouble, since) in sorted(self._endpoints.items())
            if trouble
        ]
        return f"; rendezvous endpoints missing: {', '.join(missing)}" if missing else ""


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the cause in an exception group of task groups: everything that followed from it is cancelled tasks."""
    causes = [first_of(each) if isinstance(each, BaseExceptionGroup) else each for each in group.exceptions]
    return next((cause for cause in causes if isinstance(cause, AelasticError)), causes[0])


def _crashed(error: BaseException) -> RunEnded:
    return RunEnded(WorkerState.UNKNOWN, f"{type(error).__name__}: {error}", traceback=_traceback_of(error))


def _traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
