"""A simulated supervisor, on a loop in virtual time: it drives the real worker group and the real rendezvous.

The workers are simulated.  It talks to the rendezvous like the real supervisor: with `send`, `deliver` and `finish`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio

from aelastic.agent.group import events as g
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.base.loop.mailbox import Mailbox
from aelastic.errors import InputError, ProcessFailure, RendezvousError
from aelastic.rdzv.protocol.messages import (
    Assigned,
    Compared,
    Failed,
    LeaderMessage,
    Left,
    Look,
    Node,
    NodeMessage,
    Prepared,
    Ready,
    Settled,
    Starts,
    Succeeded,
    Waiting,
)
from aelastic.rdzv.protocol.requests import Answer, Cordoned, Notice, Show, Shown
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.spec import WorkerSpec
from kit.simulated.endpoint import Endpoint
from kit.simulated.insight import ObservedLink
from kit.simulated.process import Clock, SimulatedProcess
from kit.simulated.training import Holds, Rank, Training
from kit.simulated.world import FIN, World

if TYPE_CHECKING:
    from kit.simulated.checks import Checks


@dataclass(frozen=True)
class Work:
    """What the workers of one generation do.  Times count from their start; `None` means never."""

    fails_after_s: float | None = None
    fails_of: str = "killed"  # a key of `WAYS_TO_FAIL`
    succeeds_after_s: float | None = None
    ignores_term: bool = False
    stops_within_s: float = 0.5
    leaves_something_s: float = 0.05


# How long it takes to find out why a worker ended.
POSTMORTEM_S = 0.03

# Exit code and message.
WAYS_TO_FAIL = {
    "killed": (-9, "Signal 9 (SIGKILL) received by PID 77"),
    "raised": (1, "ValueError: batch is empty"),
    "lost its peer": (1, "RuntimeError: [gloo] Connection closed by peer"),
    "lost its peer, and says so in its own words": (1, "RuntimeError: step 17 failed"),
}
VICTIMS = ("lost its peer", "lost its peer", "lost its peer, and says so in its own words")


class Agent(SimulatedProcess):
    """One agent, from its start to its end.

    Args:
        world: where it lives.
        endpoint: the endpoint that it uses.
        watcher: observes what it does.
        settings: the user's settings.
        max_restarts: of the job.
        host: its machine.
        number: distinguishes it from other agents of this machine.
        work: what the workers of its next generation do.
        clock: its machine's clock.
        prepares_s: how long its fork server imports; 0 without a fork server.
        workers: how many workers its node has.
    """

    def __init__(
        self,
        world: World,
        endpoint: Endpoint,
        watcher: Checks,
        settings: RendezvousSettings,
        max_restarts: int,
        host: str,
        number: int,
        work: Callable[[Agent], Work],
        clock: Clock,
        prepares_s: float = 0.0,
        workers: int = 1,
    ) -> None:
        super().__init__(world, host, clock)
        self.watcher, self.settings = watcher, settings
        self.node_id, self.work = f"{host}#{number}", work
        spec = WorkerSpec(
            entrypoint="x", local_world_size=workers, shutdown_timeout_s=8.0, exit_barrier_timeout_s=100.0
        )
        self.group = WorkerGroup(spec)
        self.link: ObservedLink | None = None  # until it has begun
        self.holds = Holds(self, self.send)
        self.training: Training | None = None
        self.answers: list[Answer] = []
        self.waiting_texts: list[str] = []  # what it waits for
        self.is_finishing = False
        self.welcomed_at = 1e9
        self.is_leaving = False  # as it was asked to
        self.ended = ""  # how
        self.starts = Starts.PREPARING if prepares_s else Starts.COLD
        self.alive = 0  # the generation of its worker, if that runs
        self.round_of_workers: Assigned | None = None
        self._mailbox: Mailbox[g.Event] = Mailbox()  # of the worker group
        self._endpoint, self._policy = endpoint, RestartPolicy(max_restarts)
        self._spawned_at = 0.0  # of the world, the last
        self.world.after(0.0, partial(self.post, self, self._launch))
        if prepares_s:
            self.world.after(prepares_s, lambda: self.post("fork server", self._prepare))

    def __repr__(self) -> str:
        return self.node_id

    @property
    def coordinates(self) -> bool:
        return self.is_alive and self.link is not None and self.link.coordinates

    # Its program.

    def _launch(self) -> None:
        self.loop.start(self._run(), self._over)

    async def _run(self) -> None:
        cell = self._endpoint.reached_by(self)
        self.link = link = ObservedLink(cell, self.settings, "job", self.node_id, self._policy)
        link.agent = self
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.run, self._deliver)
            await self._supervise()
            self.is_finishing = True
            await link.finish()
            tasks.cancel_scope.cancel()

    async def _supervise(self) -> None:
        """Runs the worker group until its part is over."""
        self._mailbox.post(g.Start())
        while not self.group.is_done:
            due = self.group.deadline
            event = await self._mailbox.next(due) or g.DeadlinePassed()
            self.handle(event)
            left = self.group.deadline
            is_stuck = isinstance(event, g.DeadlinePassed) and left is not None and left == due
            assert not is_stuck, "a deadline that has passed stays armed"

    def handle(self, event: g.Event) -> None:
        """Passes an event to the worker group."""
        for action in self.group.handle(event, self.now):
            self._carry_out(action)

    def _over(self, main: asyncio.Task[None]) -> None:
        if not self.is_alive:
            return  # it was killed before
        error = None if main.cancelled() else main.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is None:
            self.world.note(self.node_id, f"ends: {self.group.state.name}, {self.group.reason}")
            self._end(self.group.state.name, FIN)
        elif isinstance(error, RendezvousError | InputError):
            self.world.note(self.node_id, f"gives up: {error}")
            self._end("gave up", FIN)
        else:
            self.world.fail(error)

    def crash(self, how: str) -> None:
        """SIGKILL, after which the kernel tidies up; or, `dark`, the machine is off."""
        self.world.note(self.node_id, f"crashes ({how})")
        self.watcher.ends(self, is_dark=how == "dark")
        if how == "dark":
            self.world.dark.add(self.host)
        self._end("crashed", how)

    def freeze(self) -> None:
        super().freeze()
        self.watcher.falls_silent(self)

    def suspend(self) -> None:
        super().suspend()
        self.watcher.falls_silent(self)

    def thaw(self) -> None:
        if self.suspended_at is not None:
            self.watcher.clock_differs(self)
        self.watcher.goes_on(self)
        super().thaw()

    def jump(self, ahead_s: float) -> None:
        self.watcher.clock_differs(self)
        super().jump(ahead_s)

    def _end(self, end: str, how: str) -> None:
        self.is_alive, self.ended = False, end
        if self.alive and how != "dark":  # the kernel closes their connections
            self.watcher.workers_gone(self)
        self.alive = 0
        super().end(how)

    def ask_to_leave(self) -> None:
        self.is_leaving = True
        self.watcher.ends(self)
        self.post("signal", lambda: self.post_to_group(g.StopRequested()))

    # The supervisor.

    def _carry_out(self, action: g.Action) -> None:
        match action:
            case g.Join(round_):
                assert not self.alive, "ready, and workers run"
                self.send(self._ready(round_))
            case g.Spawn(generation, assigned):
                assert assigned is not None, "no worker opts in to recovery in place, so none starts ahead"
                self._spawn(generation, assigned)
            case g.ReportFailed(round_, failure, at):
                self.send(Failed(self.node_id, round_, failure, self.now - at))
            case g.ReportSucceeded(round_):
                self.send(Succeeded(self.node_id, round_))
            case g.ReportLeft(reason):
                self.send(Left(self.node_id, reason))
            case g.Stop(generation, local_ranks, signum):
                if local_ranks and (signum == signal.SIGKILL or not self._work.ignores_term):
                    stops_in_s = self.world.random.uniform(0, self._work.stops_within_s)
                    self.world.after(stops_in_s, partial(self.worker_exits, generation))
            case g.Finish():
                pass

    def _ready(self, after: int) -> Ready:
        workers = self.group.spec.local_world_size
        node = Node(self.node_id, self.host, "", workers, "", 29500, self.settings.node_rank)
        is_late = self.starts is Starts.PREPARING and self.group.generation > 0
        return Ready(node.replace(starts=Starts.COLD if is_late else self.starts), after=after)

    def _prepare(self) -> None:
        self.starts = Starts.WARM
        self.send(Prepared(self.node_id, self.starts))

    def send(self, message: NodeMessage) -> None:
        """Submits a message to the leader."""

        def submit() -> None:
            if self.link is not None and not self.is_finishing:
                self.link.send(message)

        self.do(submit)

    def _deliver(self, message: LeaderMessage) -> None:
        self.watcher.receives(self, message)
        if isinstance(message, Settled):
            return
        if isinstance(message, Waiting):
            self.waiting_texts.append(message.text)
        elif isinstance(message, Notice):
            self.holds.on_notice(message)
        elif isinstance(message, Answer):
            self.answers.append(message)
        elif isinstance(message, Cordoned):  # it waits; for longer than any story here
            self.waiting_texts.append(message.reason)
        else:
            assert not isinstance(message, Show | Shown | Look | Compared), "nobody here asks for that"
            self.post_to_group(message)

    # Workers.

    def _spawn(self, generation: int, assigned: Assigned) -> None:
        assert not self.alive, "two generations alive at once"
        self.watcher.spawns(self, assigned)
        work = self._work = self.work(self)
        self.alive, self.round_of_workers = generation, assigned
        self._train(generation, assigned)
        spawning_s = self.world.random.uniform(0, 0.1)
        self._spawned_at = self.world.now + spawning_s
        self._mail_later(spawning_s, g.Spawned(generation, {0: 0}))
        if work.fails_after_s is not None:
            self.world.after(0.1 + work.fails_after_s, partial(self._fail, generation, work.fails_of))
        elif work.succeeds_after_s is not None:
            self.world.after(0.1 + work.succeeds_after_s, partial(self.worker_exits, generation, is_done=True))

    def _train(self, generation: int, assigned: Assigned) -> None:
        """Its worker takes steps together with those of other nodes, if the simulation includes training."""
        self.holds.begin()
        if self.world.step_s is None:
            return
        ranks, step_s = assigned.ranks, self.world.random.uniform(*self.world.step_s)
        self.training = self.world.trainings.setdefault(assigned.fence, Training(self.world, ranks.world_size))
        self.training.join(ranks.first_rank, Rank(self, generation, step_s))

    @property
    def can_leave_in_place(self) -> bool:
        """Whether its workers can leave their round and keep their processes."""
        return self.group.in_place.can_leave

    def leaves_in_order(self) -> None:
        """It was drained."""
        self.is_leaving = True
        self.watcher.ends(self)
        self.post_to_group(g.StopRequested(reason="drained", is_drained=True))

    def post_to_group(self, event: g.Event) -> None:
        """Something happens to its workers."""
        self.do(lambda: self._mailbox.post(event))

    def _mail_later(self, delay_s: float, event: g.Event) -> None:
        self.world.after(delay_s, lambda: self.post("workers", lambda: self.post_to_group(event)))

    def _failure(self, why: str) -> ProcessFailure:
        exitcode, message = WAYS_TO_FAIL[why]
        rank = self.group.workers[0].global_rank
        return ProcessFailure.from_elsewhere(self.host, rank, 0, 1, exitcode, message, "", 0)

    def _fail(self, generation: int, why: str) -> None:
        if self.alive == generation:
            self.watcher.worker_failed(self, self.group.workers[0].global_rank)
            self.worker_exits(generation, self._failure(why))

    def lose_peer(self, generation: int) -> None:
        """A worker of another node that this one talks to is gone."""
        self.worker_exits(generation, self._failure(self.world.random.choice(VICTIMS)))

    def worker_exits(self, generation: int, failure: ProcessFailure | None = None, *, is_done: bool = False) -> None:
        if self.alive != generation:
            return
        leftover_s = self._work.leaves_something_s
        if not is_done:
            self.watcher.workers_gone(self)
        self.alive = 0

        def notice() -> None:
            exited = g.Exited(generation, 0, failure, self.now)
            spawning_s = max(0.0, self._spawned_at - self.world.now)  # ends are seen once all have begun
            self._mail_later(spawning_s + self.world.random.uniform(0, POSTMORTEM_S), exited)
            self._mail_later(spawning_s + POSTMORTEM_S + leftover_s, g.Cleared(generation, 0))

        self.post(object(), notice)  # a frozen agent looks when it thaws

    @property
    def has_spawned(self) -> bool:
        """Whether the worker of this generation has begun."""
        return self.world.now >= self._spawned_at

    def fail_now(self, why: str = "killed") -> None:
        """A worker fails."""
        assert self.alive and self.has_spawned, "a worker that has not begun knows no other, and has no victims"
        self._fail(self.alive, why)

    def succeed_now(self) -> None:
        if self.alive:
            self.worker_exits(self.alive, is_done=True)
