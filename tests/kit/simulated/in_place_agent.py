"""A simulated agent whose workers recover in place: several on its node, each a sequence of processes.

It simulates the shells `agent/run.py`, `agent/generation.py` and `agent/worker_links.py`.
"""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

from aelastic.agent.group import events as g
from aelastic.agent.group.in_place import WorkerStage
from aelastic.agent.run_event_source import RunEventSource
from aelastic.errors import ProcessFailure
from aelastic.rdzv.protocol.messages import Assigned, OptedIn, Prepared, Starts
from aelastic.workers.states import Phase
from kit.simulated.crews import Place, Process, Workplace
from kit.simulated.supervisor import POSTMORTEM_S, VICTIMS, WAYS_TO_FAIL, Agent

FAILS = ("killed", "raised")


class InPlaceAgent(Agent):
    """An agent whose workers belong to a workplace; takes the arguments of `Agent` besides."""

    def __init__(self, workplace: Workplace, *args: Any, opt_in: float, **more: Any) -> None:
        self.workplace, self.checks, self.opt_in = workplace, workplace.checks, opt_in
        self.processes: dict[int, Process] = {}  # by local rank, the present ones
        self.in_round: Assigned | None = None  # as its workers know it: begun, and not known to be over
        self.thawed_at = 0.0
        self._links: dict[int, Process] = {}  # open sockets
        self._joins, self._reported_at = 0, 0.0
        self._source: RunEventSource | None = None
        super().__init__(*args, **more)

    # What it receives.

    def handle(self, event: g.Event) -> None:
        if self._source is None:
            self._source = RunEventSource(self.group)
        self.checks.before(self, event)
        super().handle(event)
        lines = self._source.handle(event, self.now)
        self.checks.after(self, event, lines)

    def thaw(self) -> None:
        self.thawed_at = self.world.now if self.is_frozen else self.thawed_at
        super().thaw()

    def receive(self, process: Process, event: g.Event) -> None:
        """A worker sends an event; anything that arrives after its socket is closed is not read."""

        def deliver() -> None:
            if self._links.get(process.local_rank) is process:
                self.post_to_group(event)

        self.post(process, deliver)

    # What it does.

    def _carry_out(self, action: g.Action) -> None:  # noqa: C901, PLR0912  one case for each action
        match action:
            case g.Join(round_, are_ready):
                self._join(round_, are_ready=are_ready)
            case g.Spawn(generation, assigned):
                self._spawn(generation, assigned)
            case g.ReportPrepared(are_ready):
                self.send(Prepared(self.node_id, Starts.READY if are_ready else self.starts))
            case g.Begin(_, local_ranks, assigned):
                self._begin(local_ranks, assigned)
            case g.Leave(_, local_ranks, round_):
                self.in_round = None
                for rank in local_ranks:
                    if (process := self._links.get(rank)) is not None:
                        self._send_to_worker(process, partial(process.receive_over, round_))
            case g.Replace(generation, local_rank, number):
                self.checks.replaces(self, local_rank)
                started = partial(self._replace, generation, local_rank, number)
                slow_s = self.world.random.choice((0.02, 0.02, 0.3))
                self.world.after(self.world.random.uniform(0, slow_s), partial(self.post, object(), started))
            case g.Release():
                self.checks.releases(self)
                for process in [*self._links.values()]:
                    self._send_to_worker(process, process.receive_end)
            case g.ReportSucceeded():
                self.checks.succeeds(self)
                super()._carry_out(action)
            case g.ReportOptedIn(round_):
                self.send(OptedIn(self.node_id, round_))
            case g.Stop(generation, local_ranks, signum):
                self.checks.stops(self, local_ranks, signum)
                self._stop(generation, local_ranks, signum)
            case _:
                super()._carry_out(action)

    def _join(self, after: int, *, are_ready: bool) -> None:
        """Joins in place, once the store of the last round is gone."""
        self.checks.joins(self)
        self._joins += 1
        number, ready = self._joins, self._ready(after)
        if are_ready:
            ready = ready.replace(node=ready.node.replace(starts=Starts.READY))
        if self.group.phase is not Phase.FORMING:
            self.send(ready)
            return

        def join() -> None:
            if number == self._joins and self.group.phase in {Phase.FORMING, Phase.LEAVING}:
                self.send(ready)

        self.world.after(self.world.random.uniform(0, 0.02), partial(self.post, object(), join))

    def _spawn(self, generation: int, assigned: Assigned | None) -> None:
        """Starts the workers, for a round or ahead of it."""
        if assigned is None:
            self.checks.starts_ahead(self)
        else:
            self.checks.spawns(self, assigned)
        self._work = self.work(self)
        self.holds.begin()
        self.in_round = assigned
        self.alive, self.round_of_workers = generation, assigned
        spawning_s = self.world.random.uniform(0, 0.1)
        self._spawned_at = self.world.now + spawning_s
        self.processes, self._links = {}, {}
        self.world.after(spawning_s, partial(self.post, "workers", partial(self._start_all, generation, assigned)))

    def _start_all(self, generation: int, assigned: Assigned | None) -> None:
        local_ranks = range(self.group.spec.local_world_size)
        for rank in local_ranks:
            self._start(generation, rank, 0, assigned)
        self.post_to_group(g.Spawned(generation, dict.fromkeys(local_ranks, 0)))

    def _start(self, generation: int, local_rank: int, number: int, assigned: Assigned | None) -> None:
        opts_in = self.world.random.random() < self.opt_in
        process = Process(self, generation, local_rank, number, opts_in)
        self.processes[local_rank], self.alive = process, generation
        if opts_in:
            self._links[local_rank] = process
        self.world.note(repr(process), "starts" if opts_in else "starts, and does not opt in")
        self.checks.processes.append(process)
        process.start(assigned)

    def _replace(self, generation: int, local_rank: int, number: int) -> None:
        if self.is_finishing:
            return
        assert self.round_of_workers is not None
        self.post_to_group(g.Replaced(generation, local_rank, 0))
        self._start(generation, local_rank, number, self.round_of_workers)

    def _begin(self, local_ranks: tuple[int, ...], assigned: Assigned) -> None:
        """Sends `begin` a moment later, to the processes that exist now."""
        is_next = assigned is not self.round_of_workers
        if is_next:
            self.checks.continues(self, assigned)
            self.in_round = self.round_of_workers = assigned
        random = self.world.random
        processes = [self._links[rank] for rank in local_ranks if rank in self._links]

        def begin() -> None:
            for process in processes:
                self._send_to_worker(process, partial(process.receive_begin, assigned))

        is_late = is_next and assigned.ranks.group_rank == 0 and random.random() < self.workplace.habits.begins_late
        delay_s = random.uniform(0.2, 6.0) if is_late else random.uniform(0, 0.01)
        self.world.after(delay_s, partial(self.post, object(), begin))

    def _send_to_worker(self, process: Process, deliver: Any) -> None:
        def arrive() -> None:
            if process.is_alive:
                deliver()

        process.received_at = max(process.received_at, self.world.now + 1e-4)
        self.world.at(process.received_at, arrive)

    def _stop(self, generation: int, local_ranks: tuple[int, ...], signum: int) -> None:
        if signum == signal.SIGKILL:
            dump_s = self.world.random.choice((0.0, 0.1, 0.3))
            killed = partial(self._kill, generation, local_ranks)
            self.world.after(dump_s, partial(self.post, object(), killed))
            return
        for rank in local_ranks:
            self._signal(rank, signum)

    def _kill(self, generation: int, local_ranks: tuple[int, ...]) -> None:
        """Kills workers whose stacks were dumped; those that have left their round meanwhile survive."""
        if generation != self.group.generation:
            return
        is_in_place = self.group.phase in {Phase.LEAVING, Phase.FORMING, Phase.RUNNING}
        for rank in local_ranks:
            late = {WorkerStage.LEAVING, WorkerStage.LOST}
            if not is_in_place or self.group.in_place.stage[rank] in late:
                self._signal(rank, signal.SIGKILL)

    def _signal(self, local_rank: int, signum: int) -> None:
        process = self.processes.get(local_rank)
        if process is None or not process.is_alive:
            return
        process.is_asked = True
        if signum == signal.SIGKILL:
            process.end()
        elif process.place is not Place.IN_ROUND or not self._work.ignores_term:
            self.world.after(self.world.random.uniform(0, self._work.stops_within_s), process.end)

    # What its workers do.

    def on_end(self, process: Process) -> None:
        """A process ends; the agent sees it a moment later, and after that sees that nothing is left of it."""
        if not any(each.is_alive for each in self.processes.values()):
            self.alive = 0
        how = "succeeds" if process.has_succeeded else "is asked to end" if process.is_asked else "ends"
        self.world.note(repr(process), how)
        failure = None if process.has_succeeded else self._failure_of(process)
        if failure is not None and not process.is_asked and self.is_alive:
            self.checks.ends_by_itself(self, process)
        random, rank = self.world.random, process.local_rank
        leftover_s = self._work.leaves_something_s
        gone_at = self.world.now

        def see() -> None:
            is_known = process.is_asked or rank in self.group.exits.failed
            event = g.Exited(process.generation, rank, None if is_known else failure, self.now)
            self.checks.ended_at[id(event)] = event, process, gone_at
            # Ends are reported in the order in which they happen.
            self._reported_at = max(self._reported_at, self.world.now + random.uniform(0, POSTMORTEM_S))
            self.world.at(self._reported_at, partial(self.post, "ends", partial(self.post_to_group, event)))
            self.world.at(self._reported_at + leftover_s + 1e-4, partial(self.post, "ends", clear))

        def clear() -> None:
            process.is_cleared = True
            if self._links.get(rank) is process:
                del self._links[rank]
            self.post_to_group(g.Cleared(process.generation, rank))

        self.post(process, see)

    def _failure_of(self, process: Process) -> ProcessFailure:
        random = self.world.random
        exitcode, message = WAYS_TO_FAIL[random.choice(VICTIMS if process.is_victim else FAILS)]
        rank = self.group.workers[process.local_rank].global_rank
        return ProcessFailure.from_elsewhere(self.host, rank, process.local_rank, 1, exitcode, message, "", 0)

    def find_unhealthy(self, process: Process) -> None:
        """A process hangs in its round."""

        def found() -> None:
            if process.is_alive and self.processes.get(process.local_rank) is process:
                event = g.FoundUnhealthy(
                    process.generation, process.local_rank, self._failure_of(process), signal.SIGKILL
                )
                self.checks.ended_at[id(event)] = event, process, self.world.now
                self.post_to_group(event)

        self.post(object(), found)

    def succeed_now(self) -> None:
        """Its workers return once all of them have the state."""

    def _end(self, end: str, how: str) -> None:
        self.checks.agent_ends(self, end)
        self.is_alive = False
        for process in self.processes.values():
            process.end(is_dark=how == "dark")
        self.alive = 0  # also if they were about to start
        super()._end(end, how)
