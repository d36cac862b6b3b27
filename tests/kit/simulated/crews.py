"""Simulated workers that recover in place: their processes, and what all ranks of one round do together.

A process does what `aelastic/training/rounds.py` does: it sends `ready`, enters a round when its agent sends `begin`, and
leaves the round when that is over.  The ranks of a round have the state once all of them have formed a group; they take
steps together and return together.  A rank that waits for one that is gone waits until the round is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import TYPE_CHECKING

from aelastic.agent.group import events as g
from aelastic.rdzv.protocol.messages import Assigned
from kit.simulated.world import World

if TYPE_CHECKING:
    from kit.simulated.in_place_agent import InPlaceAgent
    from kit.simulated.in_place_checks import InPlaceChecks

STEP_S = 0.25
TRIES_S = 0.05  # between two attempts to form a group while the network is cut
# How long a rank takes its peer's closed connection for the end of the round (`aelastic/training/consequence.py`).
CUT_BY_PEER_S = 10.0
UNCUT_S = 0.2


class Place(StrEnum):
    """Where a process is."""

    STARTING = auto()  # it imports
    SAFE = auto()  # it has no process group and waits for a round
    IN_ROUND = auto()
    LEAVING = auto()  # it knows that the round is over
    DONE = auto()  # its function has returned; it waits for the others
    LOST_STATE = auto()  # no rank has a whole state; it waits for its agent to end it
    ENDED = auto()


@dataclass(frozen=True)
class Habits:
    """What workers do, and how often something goes wrong with them: chances between 0 and 1."""

    opt_in: float = 1.0  # of a process
    starts_s: float = 0.5  # at most
    begins_late: float = 0.0  # the agent that serves the store looks an address up before it says `begin`
    dies_starting: float = 0.0
    dies_ready: float = 0.0
    dies_forming: float = 0.0
    dies_sharing: float = 0.0
    dies_done: float = 0.0
    dies_leaving: float = 0.0
    sticks: float = 0.0  # it does not leave its round in time
    never_ready: float = 0.0
    tears: float = 0.0  # it is in the middle of an update when the round ends
    has_checkpoint: bool = True


@dataclass(eq=False)
class Crew:
    """The ranks of one round.

    Args:
        common: the part of the assignment that is the same for all of them.
        size: how many ranks there are.
    """

    workplace: Workplace
    fence: int
    common: tuple[object, ...]
    size: int
    ranks: dict[int, Process] = field(default_factory=dict[int, "Process"])
    is_over: bool = False  # a rank has left it, or is gone
    is_done: bool = False
    began_at: float = 0.0

    def enter(self, process: Process) -> None:
        self.ranks[process.rank] = process
        if len(self.ranks) == self.size:
            self.began_at = self._world.now
            self._later(self._world.random.uniform(0.01, 0.1), self._share)

    @property
    def _world(self) -> World:
        return self.workplace.world

    def _later(self, delay_s: float, do: Callable[[], None]) -> None:
        """Does it after a delay, unless a rank has left by then; retries while some cannot reach each other."""

        def done() -> None:
            if self.is_over:
                return
            if self._is_held:
                self._later(TRIES_S, do)
            else:
                do()

        self._world.after(delay_s, done)

    @property
    def _is_held(self) -> bool:
        nodes = {process.node for process in self.ranks.values()}
        hosts = sorted({node.host for node in nodes})
        is_cut = any(self._world.is_cut(one, other) for one in hosts for other in hosts)
        return is_cut or any(node.suspended_at is not None for node in nodes)

    def _share(self) -> None:
        """All ranks have formed their group: those without a state get the newest one."""
        habits, processes = self.workplace.habits, self.ranks.values()
        step = max(process.step for process in processes)
        source = min((process.rank for process in processes if process.step == step >= 0), default=-1)
        if step < 0 and not habits.has_checkpoint and not all(process.is_fresh for process in processes):
            for process in processes:
                process.lose_state()
            return
        for process in processes:
            process.share(max(step, 0), source)
        self._later(STEP_S, self._take_step)

    def _take_step(self) -> None:
        processes = self.ranks.values()
        if all(process.has_shared or not process.opts_in for process in processes):
            for process in processes:
                process.step += 1
            if self.workplace.is_done(self):
                self.is_done = True
                for process in processes:
                    process.later(self._world.random.uniform(0, 0.3), process.finish)
                return
        self._later(STEP_S, self._take_step)

    def on_gone(self, process: Process, *, is_dark: bool) -> None:
        """A rank's process has ended: others fail because of it, unless something ends their round in time."""
        self.is_over = True
        random = self._world.random
        for peer in self.ranks.values():
            is_there = peer is not process and peer.place is Place.IN_ROUND and peer.round == self.fence
            if is_dark or not is_there or self._world.is_cut(process.node.host, peer.node.host):
                continue
            if not peer.opts_in:
                peer.later(random.uniform(0.02, 0.05), peer.lose_peer)
            elif not process.node.is_alive:  # its agent holds no copies of its connections
                peer.later(CUT_BY_PEER_S, peer.lose_peer)
            elif random.random() < 0.1:
                peer.later(UNCUT_S + random.uniform(0, 0.1), peer.lose_peer)


@dataclass(eq=False)
class Process:
    """One process of a worker.

    Args:
        node: its agent.
        number: counts the rank's processes in this generation.
        opts_in: it calls a function decorated with `in_place`.
    """

    node: InPlaceAgent
    generation: int
    local_rank: int
    number: int
    opts_in: bool
    place: Place = Place.STARTING
    round: int = -1  # the fence of its current or last round
    rank: int = -1
    over: int = -1  # the round that it knows is over
    over_at: float = 0.0
    begin: Assigned | None = None
    in_crew: Crew | None = None
    step: int = -1  # the step of its whole state; -1: it has no state
    is_fresh: bool = True
    has_shared: bool = False  # in this round
    knows_end: bool = False
    is_asked: bool = False  # its agent has asked it to end
    is_victim: bool = False
    has_failed: bool = False  # by itself, in a round; recorded
    is_stuck: bool = False
    has_succeeded: bool = False
    ended_at: float = 0.0
    is_cleared: bool = False
    sent_at: float = 0.0  # when its last message arrives
    received_at: float = 0.0  # when the last message to it arrives

    def __repr__(self) -> str:
        return f"{self.node} {self.local_rank}.{self.number}"

    @property
    def is_alive(self) -> bool:
        return self.place is not Place.ENDED

    @property
    def workplace(self) -> Workplace:
        return self.node.workplace

    @property
    def crew(self) -> Crew:
        assert self.in_crew is not None, "it has been in a round"
        return self.in_crew

    def later(self, delay_s: float, do: Callable[[], None]) -> None:
        """Does it after a delay, if the process is alive and in the same place then."""
        place, round_ = self.place, self.round

        def done() -> None:
            if self.place is place and self.round == round_:
                do()

        self.workplace.world.after(delay_s, done)

    def _is(self, chance: float) -> bool:
        return not self.workplace.is_calm and self.workplace.world.random.random() < chance

    def _may_die(self, chance: float, within_s: float) -> None:
        if self._is(chance):
            self.later(self.workplace.world.random.uniform(0, within_s), self.fail)

    # Its life.

    def start(self, assigned: Assigned | None) -> None:
        """Imports its modules, then waits at the safe point; given a round, it takes part in that at once."""
        habits, random = self.workplace.habits, self.workplace.world.random
        self._may_die(habits.dies_starting, habits.starts_s)
        self.is_stuck = self._is(habits.never_ready)
        if self.opts_in:
            self.later(random.uniform(0.01, habits.starts_s), self._arrive)
        elif self.number or assigned is None:
            self.is_stuck = True  # it looks for the other ranks of a round that is over
            if self.workplace.is_calm:
                self.later(habits.starts_s, self.fail)
        else:
            self._enter(assigned)

    def _arrive(self) -> None:
        if not self.is_stuck:
            self._be_ready()

    def _be_ready(self) -> None:
        self.place = Place.SAFE
        self.send(g.Ready(self.generation, self.local_rank, self.number, self.round))
        self._may_die(self.workplace.habits.dies_ready, 0.3)
        if self.begin is not None and self.begin.fence > self.round:
            self._enter(self.begin)

    def _enter(self, assigned: Assigned) -> None:
        self.place, self.round, self.has_shared, self.is_stuck = Place.IN_ROUND, assigned.fence, False, False
        self.rank = assigned.ranks.first_rank + self.local_rank
        if self.over >= self.round:
            self._be_ready()
            return
        self.in_crew = self.workplace.crew_of(self, assigned)
        self.workplace.checks.enters(self, assigned)
        self.in_crew.enter(self)
        self._may_die(self.workplace.habits.dies_forming, 0.1)

    def share(self, step: int, source: int) -> None:
        """Has the state a moment later, unless it learns first that the round is over."""
        self._may_die(self.workplace.habits.dies_sharing, 0.1)
        self.later(self.workplace.world.random.uniform(0, 0.1), lambda: self._have(step, source))

    def _have(self, step: int, source: int) -> None:
        self.step, self.is_fresh, self.has_shared = step, False, True
        self.send(g.Shared(self.generation, self.local_rank, self.number, self.round, step, source))

    def lose_state(self) -> None:
        self.place = Place.LOST_STATE
        self.send(g.StateLost(self.generation, self.local_rank, self.number, self.round))

    def finish(self) -> None:
        """Its function returns."""
        if not self.opts_in:
            self.end(has_succeeded=True)
            return
        self.place = Place.DONE
        self.send(g.Done(self.generation, self.local_rank, self.number, self.round))
        self._may_die(self.workplace.habits.dies_done, 0.3)

    def send(self, event: g.Event) -> None:
        """Sends an event over its socket, in order.  A frozen agent reads it later."""
        if not self.opts_in:
            return
        world = self.workplace.world
        self.sent_at = max(self.sent_at, world.now + world.random.uniform(0, 0.005))
        world.at(self.sent_at, lambda: self.node.receive(self, event))

    # What its agent sends.

    def receive_begin(self, assigned: Assigned) -> None:
        self.begin = assigned
        if self.place is Place.SAFE and assigned.fence > self.round:
            self._enter(assigned)

    def receive_over(self, round_: int) -> None:
        self.over = max(self.over, round_)
        self.over_at = self.workplace.world.now
        if self.place not in {Place.IN_ROUND, Place.DONE} or self.round > self.over:
            return
        habits, random = self.workplace.habits, self.workplace.world.random
        self.place = Place.LEAVING
        self.crew.is_over = True
        if not self.has_shared and self.step < 0:
            self.is_fresh = self.is_fresh and random.random() < 0.5  # it received the state in pieces
        elif self._is(habits.tears):
            self.step = -1
        self.is_stuck = self._is(habits.sticks)
        leaves_s = random.choice((4.99, 5.01, 5.2)) if self.is_stuck and random.random() < 0.3 else 1e9
        self.later(leaves_s if self.is_stuck else random.uniform(0.001, 0.06), self._be_ready)
        self._may_die(habits.dies_leaving, 0.06)

    def receive_end(self) -> None:
        self.knows_end = True
        if self.place is Place.DONE:
            self.later(self.workplace.world.random.uniform(0, 0.05), lambda: self.end(has_succeeded=True))

    def wake_up(self) -> None:
        """Ends a hang of the process."""
        if self.is_stuck and not self.opts_in:
            self.fail()
        elif self.is_stuck and self.place in {Place.STARTING, Place.LEAVING}:
            self.is_stuck = False
            self._be_ready()

    # Its end.

    def fail(self) -> None:
        if self.is_alive:
            self.end()

    def lose_peer(self) -> None:
        self.is_victim = True
        self.end()

    def end(self, *, has_succeeded: bool = False, is_dark: bool = False) -> None:
        """It ends, for any reason."""
        if not self.is_alive:
            return
        was_in_round = self.place in {Place.IN_ROUND, Place.DONE, Place.LEAVING, Place.LOST_STATE}
        self.place, self.has_succeeded, self.ended_at = Place.ENDED, has_succeeded, self.workplace.world.now
        if was_in_round and not has_succeeded:
            self.crew.on_gone(self, is_dark=is_dark)
        self.node.on_end(self)


@dataclass
class Workplace:
    """What all workers of a simulation share."""

    world: World
    checks: InPlaceChecks
    habits: Habits
    works_s: float | None = None  # how long, in one round
    is_calm: bool = False
    is_work_done: bool = False
    # By fence and token: two jobs that do not know of each other may have the same fence.
    crews: dict[tuple[int, str], Crew] = field(default_factory=dict[tuple[int, str], Crew])

    def crew_of(self, process: Process, assigned: Assigned) -> Crew:
        """The crew of the round that its node was last assigned to."""
        round_ = self.checks.round_of(process.node)
        token, ranks = "" if round_ is None else round_.token, assigned.ranks
        meets = assigned.master_addr, assigned.master_port
        common = (ranks.world_size, ranks.group_world_size, assigned.round, assigned.restart_count, *meets)
        return self.crews.setdefault((assigned.fence, token), Crew(self, assigned.fence, common, ranks.world_size))

    def is_done(self, crew: Crew) -> bool:
        is_long = self.works_s is not None and self.world.now - crew.began_at > self.works_s
        return self.is_work_done or (is_long and not self.is_calm)
