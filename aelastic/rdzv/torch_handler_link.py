"""Any torch `RendezvousHandler` as this agent's rendezvous, so that the node can join a job of torchrun agents.

This node uses a handler as torchelastic's agent does (`SimpleElasticAgent`), with the same code of torch: nodes agree
on ranks and on the exit barrier through the store that the handler provides.  torch is imported here in a thread, and
only in this mode.

The interface of torch's handlers sets these limits:

- There are no notifications.  The handler is polled for newcomers and restarting nodes each `monitor_interval`; a node
  that died is noticed when the workers of other nodes fail.
- Each agent has its own restart budget, so `TORCHELASTIC_RESTART_COUNT` differs between nodes.
- How other nodes ended is not known: there is no verdict, and no first failure from elsewhere.
- torch's store ends with the process that serves it.

Where torch allows it, we do better than torchrun.  A node that has finished still watches, and restarts if others do.
An unreachable rendezvous does not stop workers.  The workers' store is emptied between rounds.  Only the job's end
closes the rendezvous: a node that is stopped, late or alone does not.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup

from aelastic.base.loop import clock
from aelastic.base.loop.mailbox import Mailbox
from aelastic.diagnose.failures.places import compare
from aelastic.errors import AelasticError, InputError, RendezvousError, RendezvousTimeoutError
from aelastic.rdzv.decisions.cause import Cause, CauseKind
from aelastic.rdzv.decisions.decision import Decision, DecisionKind, next_round
from aelastic.rdzv.ledger import Ledger, most_of
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.restart_policy import End, RestartPolicy, cause_of
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.torch_handler_thread import CallThread, HandlerCalls, HandlerExit, NotAdmitted

_log = logging.getLogger(__name__)

# Selects a torch handler if we have a back end of the same name.
PREFIX = "torch:"
# Handlers that torch itself registers (`rendezvous/registry.py`), and the entry points with which packages add theirs.
_OF_TORCH = frozenset({"c10d", "etcd", "etcd-v2", "static"})
_ENTRY_POINTS = "torchrun.handlers"
# The default in torchrun's `LaunchConfig`.
_LEGACY_TIMEOUT_S = 900
# Closing is a courtesy to nodes that come late; if it takes longer than this, the rendezvous is likely gone.
CLOSE_TIMEOUT_S = 10.0
# The node that serves the store leaves a moment after the last node has reached the barrier.
BARRIER_INTERVAL_S = 0.02


# Which handler.


def handler_opener(name: str, settings: RendezvousSettings, run_id: str) -> Callable[[], Any]:
    """Returns a function that makes the handler that torchrun would, by its name in torch's registry.

    Args:
        name: with or without `torch:` in front.

    Raises:
        InputError: torch has no handler of that name.
    """
    from importlib.metadata import entry_points  # takes 20 ms that only this mode needs

    backend, names = name.removeprefix(PREFIX), _OF_TORCH | {entry.name for entry in entry_points(group=_ENTRY_POINTS)}
    # The program that uses us may have registered its own handler; then it has imported torch.
    torchs = sys.modules.get("torch.distributed.elastic.rendezvous.api")
    known = sorted(names | set(getattr(getattr(torchs, "rendezvous_handler_registry", None), "_registry", {})))
    if backend not in known:
        raise InputError(f"rendezvous back end {name!r} is not known to torch either: use one of {', '.join(known)}")
    return partial(_open_handler, backend, settings, run_id)


def _open_handler(backend: str, settings: RendezvousSettings, run_id: str) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    config: dict[str, Any] = {"timeout": _LEGACY_TIMEOUT_S, **settings.config}
    if backend == "static":
        config["rank"] = settings.node_rank or 0
    parameters = RendezvousParameters(
        backend=backend,
        endpoint=settings.endpoint,
        run_id=run_id,
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        local_addr=settings.local_addr,
        **config,
    )
    return get_rendezvous_handler(parameters)


# The link.


class TorchHandlerLink:
    """A torch handler in the role of the leader that the supervisor expects.

    Args:
        open_handler: makes the handler, or returns the user's own; called once, in the thread that makes all calls.
        policy: what follows from failures of this node's workers.
        monitor_interval_s: the interval between two looks for nodes that wait.
        exit_barrier_timeout_s: how long a node that has finished waits for the others.
        master_addr, master_port: instead of the address that the handler names.
        local_addr: this node's address, for a handler that leaves `MASTER_ADDR` to its agent.
    """

    coordinates, agreed = False, None  # there is no leader: the handlers meet on a store

    def __init__(
        self,
        open_handler: Callable[[], Any],
        policy: RestartPolicy,
        *,
        monitor_interval_s: float,
        exit_barrier_timeout_s: float,
        master_addr: str | None = None,
        master_port: int | None = None,
        local_addr: str | None = None,
    ) -> None:
        self._policy = policy
        self._monitor_interval_s, self._exit_barrier_timeout_s = monitor_interval_s, exit_barrier_timeout_s
        self._ledger, self._joins_at = Ledger(), 0.0
        self._calls = HandlerCalls(open_handler, master_addr, master_port, local_addr)
        self._thread = CallThread(self._calls.forget)
        self._mailbox: Mailbox[m.NodeMessage] = Mailbox()
        # What this node does until the next message: join and watch, or wait for the others to finish.
        self._activity = anyio.CancelScope()
        self._round = 0
        self._is_on = False  # the workers of that round run on this node, or have succeeded
        self._restart_count = 0
        self._why_over: m.Failed | m.Succeeded | None = None  # how the last round ended on this node, if it has
        self._hangs: m.Hangs | None = None  # the question to this node's own workers
        self._is_job_over = False
        self._is_reachable = True
        self._closing = anyio.Lock()

    def send(self, message: m.NodeMessage) -> None:
        self._mailbox.post(message)

    async def run(self, deliver: Callable[[m.LeaderMessage], None]) -> None:
        """Does what torchelastic's agent would.  If cancelled, it leaves a blocking call to its thread.

        Raises:
            InputError: the handler cannot be made from the user's settings.
            RendezvousError: the rendezvous did not admit this node; the class of the error tells why.
        """
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    self._on_received(await self._mailbox.next(None), tasks, deliver)
        finally:
            with anyio.CancelScope(shield=True):
                await self.aclose()

    def _on_received(
        self, message: m.NodeMessage | None, tasks: TaskGroup, deliver: Callable[[m.LeaderMessage], None]
    ) -> None:
        match message:
            case m.Ready(node) if not node.unfit:
                self._begin(tasks, self._take_part, node, deliver)
            case m.Failed() as failed if self._is_current(failed.round):
                self._on_failed(failed, deliver)
            case m.Succeeded() as succeeded if self._is_current(succeeded.round):
                self._why_over = succeeded
                self._begin(tasks, self._wait_for_others, self._round, deliver)
            case m.Hangs(is_last=False) if self._is_current(message.round):  # other nodes cannot be asked
                self._hangs = message
                deliver(m.Look(message.round, message.reason))
            case m.Saw(_, round_, places) if self._hangs is not None and self._is_current(round_):
                found = compare(places, self._hangs.waited_s)
                deliver(m.Compared(round_, found.text, found.outliers, self._hangs.is_stopped, self._hangs.waited_s))
                self._hangs = None
            case r.Ask(_, ask_id):
                text = "a rendezvous of torch's has nobody who could agree on a step: use one of aelastic's back ends"
                deliver(r.Answer(ask_id, False, text))
            case r.Fetch(node_id, ask_id):
                deliver(r.Answer(ask_id, True, "", (node_id,)))
                deliver(r.Show(message))
            case r.Fetched():
                deliver(r.Shown(message))
            case m.Left():
                self._is_on = False
                self._activity.cancel()
            case _:
                pass  # it is about a round that is over, or does not apply here

    async def finish(self) -> None:
        """Does nothing: there is nothing to hand over while `run` runs.  At its end, `aclose` closes the rendezvous."""

    def cut_short(self) -> None:
        """Does nothing: `finish` does not wait."""

    async def aclose(self) -> None:
        """Closes the rendezvous if the job is over, and ends the thread.  Takes seconds at most."""
        async with self._closing:  # a second call waits: `stop` would end the shutdown of the first
            if self._is_job_over:
                self._is_job_over = False  # a second call has nothing to close
                with anyio.move_on_after(CLOSE_TIMEOUT_S):
                    try:
                        await self._thread.call(self._calls.shutdown)
                    except AelasticError as error:
                        _log.info("the rendezvous was not closed: %s", error)
            await self._thread.stop()

    def _begin(self, tasks: TaskGroup, activity: Callable[..., Awaitable[None]], *args: Any) -> None:
        self._activity.cancel()
        self._activity = scope = anyio.CancelScope()

        async def run() -> None:
            with scope:
                await activity(*args)

        tasks.start_soon(run, name="torch rendezvous")

    def _is_current(self, round_: int) -> bool:
        return self._is_on and round_ == self._round

    async def _take_part(self, node: m.Node, deliver: Callable[[m.LeaderMessage], None]) -> None:
        """Joins the next round, then watches until it is over."""
        self._is_on = False
        await anyio.sleep_until(self._joins_at)
        try:
            assigned = await self._thread.call(self._calls.next_round, node, self._round + 1, self._restart_count)
        except NotAdmitted as error:
            deliver(_succeeded(CauseKind.TORCH, f"the job ended without this node: {error}"))
            return
        except RendezvousError as error:
            deliver(self._without_a_round(error))
            return
        self._round = round_ = assigned.round
        self._is_on, self._why_over = True, None
        deliver(assigned)
        while not await self._interrupts(round_, deliver):  # noqa: ASYNC110  torch has no notifications
            await anyio.sleep(self._monitor_interval_s)

    def _without_a_round(self, error: RendezvousError) -> m.Ended:
        """Returns how the job ends if there is no next round.

        The result of our own workers matters more than the loss of the others, which mostly follows from it.
        """
        match self._why_over:
            case m.Succeeded():
                return _succeeded(CauseKind.ALL_SUCCEEDED, f"every worker of this node had succeeded; then {error}")
            case m.Failed(_, _, failure) if not isinstance(error, RendezvousTimeoutError):
                decision = Decision(DecisionKind.NO_NEW_ROUND, cause_of(failure), error=str(error))
                return m.Ended(m.Outcome.FAILED, decision, failure)
            case _ if isinstance(error, RendezvousTimeoutError):
                cause = Cause(CauseKind.TORCH, detail=str(error))
                return m.Ended(m.Outcome.TIMED_OUT, Decision(DecisionKind.NO_NEW_ROUND, cause))
            case _:
                raise error

    def _on_failed(self, failed: m.Failed, deliver: Callable[[m.LeaderMessage], None]) -> None:
        self._is_on, self._why_over = False, failed
        self._activity.cancel()
        cause, reached = cause_of(failed.failure), most_of(failed.reached)
        end = End(cause, failed.failure, self._restart_count, self._ledger, reached, now=clock.now())
        decision = self._policy.decide(end)
        if decision.is_final:
            self._is_job_over = True
            deliver(m.Ended(m.Outcome.FAILED, decision, failed.failure))
            return
        self._ledger = self._policy.after(end, decision)
        self._restart_count += decision.is_charged
        self._joins_at = clock.now() + decision.delay_s
        deliver(m.Interrupted(self._round, decision, self._restart_count))

    async def _interrupts(self, round_: int, deliver: Callable[[m.LeaderMessage], None]) -> bool:
        """Returns whether the round is over, as it is once others wait for the next: newcomers or restarting nodes."""
        try:
            count = await self._thread.call(self._calls.num_nodes_waiting)
        except HandlerExit:
            raise
        except RendezvousError as error:
            count = 0
            if self._is_reachable:
                _log.warning("torch's rendezvous does not answer; the workers continue: %s", error)
            self._is_reachable = False
        else:
            self._is_reachable = True
        if count > 0 and self._is_current(round_):
            self._is_on = False
            cause = Cause(CauseKind.NODES_WAITING, count=count)
            deliver(m.Interrupted(round_, next_round(cause), self._restart_count))
        return not self._is_current(round_)

    async def _wait_for_others(self, round_: int, deliver: Callable[[m.LeaderMessage], None]) -> None:
        """Waits at torch's exit barrier, and still watches for newcomers."""
        timeout_s = self._exit_barrier_timeout_s
        reason = f"every worker of this node succeeded; other nodes did not finish within {timeout_s:g} s of them"
        with anyio.move_on_after(timeout_s):
            try:
                key = await self._thread.call(self._calls.enter_barrier)
                while not await self._thread.call(self._calls.has_come, key):
                    if await self._interrupts(round_, deliver):
                        return
                    await anyio.sleep(min(self._monitor_interval_s, BARRIER_INTERVAL_S))
            except RendezvousError as error:
                # Usually the node that served the store has left the barrier before this one read the key.
                reason = f"every worker of this node succeeded; other nodes cannot be waited for any more: {error}"
            else:
                reason, self._is_job_over = "", True
        if self._is_current(round_):
            deliver(_succeeded(CauseKind.ALL_SUCCEEDED, reason))


def _succeeded(kind: CauseKind, detail: str) -> m.Ended:
    return m.Ended(m.Outcome.SUCCEEDED, Decision(DecisionKind.SUCCEEDED, Cause(kind, detail=detail)))
