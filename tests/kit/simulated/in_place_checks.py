"""Invariants of recovery in place, checked against a record of its own: who received what, and which processes exist.

The checks read nothing back from the worker groups except what a person can also see: the line that gives the reason
why workers do not continue in place after all, and how a run ended.
"""

from __future__ import annotations

import math
import signal
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aelastic.agent.group import events as g
from aelastic.agent.group.in_place import GRACE_S
from aelastic.observe import run_events as run
from aelastic.rdzv.decisions.cause import CauseKind
from aelastic.rdzv.decisions.wording import text_of
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from kit.simulated.bounds import KILLED_AFTER_S
from kit.simulated.checks import Checks, Round
from kit.simulated.crews import Place, Process
from kit.simulated.insight import Coordination, connection_of, coordination_of

if TYPE_CHECKING:
    from kit.simulated.in_place_agent import InPlaceAgent
    from kit.simulated.supervisor import Agent

# A late worker is killed once its stack has been dumped; timers are late by milliseconds.
LATE_S = 1.0
# A leader's decisions reflect everything it received at least this long ago.
KNOWN_S = 1.0
# Causes that end a round in place if all workers of the job have opted in.
IN_PLACE = {
    CauseKind.FAILURE,
    CauseKind.NODE_LOST,
    CauseKind.NODE_LEFT,
    CauseKind.LEADER_LOST,
    CauseKind.NODES_MISSING,
    CauseKind.NODES_JOINED,
}


@dataclass
class Move:
    """What happened to a node's workers between two rounds."""

    last: int  # the fence of the round before
    kept: int  # processes
    has_lost_all: bool  # without its agent's involvement
    is_lost: bool  # the round continued or ended without it, or its workers had been released
    reason: str  # as its agent logged it
    ended_by: str  # the leader that ended the previous round


@dataclass
class Book:
    """The record of one node."""

    interrupted: m.Interrupted | None = None  # about the round that its workers are in
    ended_by: str = ""  # the leader that sent it
    over: set[int] = field(default_factory=set[int])  # numbers of rounds that its workers' supervisor knows are over
    reason: str = ""  # why its workers do not continue in place
    stops: list[tuple[Process, int]] = field(default_factory=list[tuple[Process, int]])  # caused by one event
    unhealthy: set[int] = field(default_factory=set[int])  # processes found hanging, by `id`
    last: int = -1  # fence of the round that its workers were in
    has_released: bool = False  # its workers may end


class InPlaceChecks(Checks):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.processes: list[Process] = []
        # By the `id` of an event that reports an end: the event (so that its `id` is not reused), the process and the time.
        self.ended_at: dict[int, tuple[g.Event, Process, float]] = {}
        self.moves: defaultdict[int, dict[str, Move]] = defaultdict(dict)  # by fence and node
        self.counts: Counter[str] = Counter()  # of what happened
        self.mixed: Counter[str] = Counter()  # rounds that only some nodes continued in place, by the reason of others
        self._inside: defaultdict[tuple[str, int], list[Process]] = defaultdict(list)  # by node and fence
        self._ends: dict[tuple[str, int], bool] = {}  # by token and round: whether it was announced to end in place
        self._books: defaultdict[str, Book] = defaultdict(Book)  # by node
        self._opted_in: dict[tuple[str, str], tuple[int, float]] = {}  # by token and node: in which round, and when
        self._starts: dict[tuple[str, str], m.Starts] = {}  # by token and node: what it reported about its next workers
        self._failed_at: dict[tuple[str, int], float] = {}  # by token and round: when the first failure was reported
        self._unsure: set[Round] = set()  # a victim was reported first: the agent of the cause was frozen, or is gone
        self._asked_at = -1.0
        self._has_finished: set[tuple[str, int]] = set()  # rounds that a node has reported as finished

    # The leader.

    def leader_receives(self, leader: Coordination, message: m.NodeMessage) -> None:
        token = leader.token
        match message:
            case m.OptedIn(node_id, round_):
                self._opted_in.setdefault((token, node_id), (round_, self._world.now))
                if self._opted_in[token, node_id][0] != round_:
                    self._opted_in[token, node_id] = round_, self._world.now
            case m.Ready(node=node) if not message.is_before(leader.round_of(node.node_id)):
                self._starts[token, node.node_id] = node.starts  # else it starts workers in the round
            case m.Prepared(node_id, starts):
                self._starts[token, node_id] = starts
            case m.Failed(_, round_):
                self._failed_at.setdefault((token, round_), self._world.now)
            case r.Ask():
                self._asked_at = self._world.now
            case m.Succeeded(_, round_):
                self._has_finished.add((token, round_))
            case _:
                pass

    def leader_sends(self, agent: Agent, leader: Coordination, node_id: str, message: Any) -> None:
        super().leader_sends(agent, leader, node_id, message)
        if isinstance(message, m.Interrupted) and not message.went_on:
            self._check_in_place(agent, leader, node_id, message)

    def _check_in_place(self, agent: Agent, leader: Coordination, node_id: str, message: m.Interrupted) -> None:
        """A round ends in place if and only if all workers of the remaining nodes have opted in."""
        round_ = self._round_that_ends(leader, node_id, message.round)
        if round_ is None or message.decision.cause.kind not in IN_PLACE:
            return
        token = leader.token
        is_first = (token, round_.number) not in self._ends
        if self._ends.setdefault((token, round_.number), message.in_place) is not message.in_place:
            self.fail(f"{round_} ends in place for some of its nodes, and not for others")
        if not is_first:
            return
        alive = [each.node_id for each in self.agents if each.node_id in round_.received and each.is_alive]
        known = {each: self._opted_in.get((token, each), (0, 0.0)) for each in alive}
        inside = [each for each in alive if self._books[each].last == round_.fence]
        can_leave = [known[each][0] == round_.number or self._were_ready(token, each) for each in inside]
        agents = [each for each in self.agents if each.node_id in alive]
        is_whole = all(leader.has(each.node_id) and self._is_connected(each, agent) for each in agents)
        if message.in_place and not all(can_leave) and is_whole:
            self.fail(f"{round_} ends in place, and not all of its workers have opted in")
        are_long = all(self._has_long_opted_in(token, each, round_) for each in round_.received)
        is_asked = self._asked_at >= round_.began_at  # by a person, which ends processes
        has_finished = (token, round_.number) in self._has_finished
        have_all_received = (
            len(round_.received) == round_.common[-1]
        )  # else a node was lost before it learned of the round
        is_bound = are_long and have_all_received and is_whole and not is_asked and not has_finished
        if not message.in_place and known and is_bound:
            self.fail(
                f"{round_} does not end in place, and all of its workers have opted in: {text_of(message.decision)} ({known})"
            )

    def _were_ready(self, token: str, node_id: str) -> bool:
        """Whether the workers of a node waited for the round at the safe point, as far as its leader knows."""
        return self._starts.get((token, node_id)) is m.Starts.READY

    def _has_long_opted_in(self, token: str, node_id: str, round_: Round) -> bool:
        """Whether a leader has known for long that a node opted in; if the node is gone, an earlier leader will do."""
        is_alive = any(each.node_id == node_id and each.is_alive for each in self.agents)
        tokens = [token] if is_alive else [each for each, other in self._opted_in if other == node_id]
        known = [self._opted_in.get((each, node_id), (0, 0.0)) for each in tokens]
        by = min(self._world.now - KNOWN_S, self._failed_at.get((token, round_.number), math.inf))
        return any(number == round_.number and at < by for number, at in known)

    def _check_charge(self, round_: Round, restart_count: int) -> None:
        """A person's request ends a round for free, and may be decided before a failure is known."""
        last = self._last_before(round_.number)
        if last is None or (self._asked_at < last.began_at and last not in self._unsure):
            super()._check_charge(round_, restart_count)

    def broke(self, agent: Agent, *, is_silent: bool) -> None:
        """A node whose workers are not in a round loses none of them, though it may have been assigned to a round."""
        super().broke(agent, is_silent=is_silent)
        self.charges.faults[-1].is_certain &= agent.in_round is not None  # type: ignore[attr-defined]

    # The agents: before and after an event of the workers' supervisor.

    def before(self, agent: InPlaceAgent, event: g.Event) -> None:
        book = self._books[agent.node_id]
        match event:
            case m.Interrupted(round_):
                book.over.add(round_)
                if agent.round_of_workers is not None and agent.round_of_workers.round == round_:
                    book.interrupted, book.ended_by = event, self._leader_of(agent)
            case g.Exited() | g.FoundUnhealthy() if id(event) in self.ended_at:
                _, process, at = self.ended_at.pop(id(event))
                is_present = agent.processes.get(process.local_rank) is process
                is_new = event.failure is not None and id(process) not in book.unhealthy
                if isinstance(event, g.FoundUnhealthy):
                    book.unhealthy.add(id(process))
                if is_present and is_new and not process.is_victim:
                    self._fails(agent, process, at)
                elif is_present and is_new:  # an agent that was frozen may see a victim first
                    for each in agent.processes.values():
                        if not each.is_alive and not (each.is_asked or each.is_victim or each.has_succeeded):
                            self._fails(agent, each, each.ended_at)
                    if agent.in_round is not None and not self._round_of[agent.node_id].failures:
                        self._unsure.add(self._round_of[agent.node_id])
            case _:
                pass

    def ends_by_itself(self, agent: InPlaceAgent, process: Process) -> None:
        """A worker's process ends without being asked to; a frozen agent may never report it."""
        if not agent.is_frozen and not process.is_victim:
            self._fails(agent, process, self._world.now)

    def _fails(self, agent: InPlaceAgent, process: Process, at: float) -> None:
        """A worker fails by itself, in a round that is not over for its node."""
        assigned = agent.in_round
        if process.has_failed or assigned is None:
            return
        process.has_failed = True
        self._note_failure(agent, assigned.ranks.first_rank + process.local_rank, at)

    def after(self, agent: InPlaceAgent, event: g.Event, lines: list[run.RunEvent]) -> None:
        book = self._books[agent.node_id]
        for line in lines:
            if isinstance(line, run.NotRecovered):
                book.reason = line.reason
                self.counts[f"not in place: {_kind(line.reason)}"] += 1
            if isinstance(line, run.Recovered):
                self.counts["recovered"] += 1
        stops, book.stops = book.stops, []
        for process, signum in stops:
            self._check_stop(agent, book, process, signum, event)
        if stops:
            agent.in_round = None if all(each.is_asked for each in agent.processes.values()) else agent.in_round

    def stops(self, agent: InPlaceAgent, local_ranks: tuple[int, ...], signum: int) -> None:
        book = self._books[agent.node_id]
        present = [process for rank in local_ranks if (process := agent.processes.get(rank)) is not None]
        book.stops += [(process, signum) for process in present if process.is_alive and not process.is_asked]
        if signum != signal.SIGKILL:
            agent.in_round = None

    def _check_stop(self, agent: InPlaceAgent, book: Book, process: Process, signum: int, event: g.Event) -> None:
        """A worker that has the state is not stopped because another one failed, unless a reason is logged."""
        if process.step < 0 or not process.opts_in or id(process) in book.unhealthy or book.has_released:
            return
        if agent.is_leaving or agent.node_id in self._ended_at or isinstance(event, m.Ended | g.StopRequested):
            return  # for good
        if book.reason or (signum == signal.SIGKILL and self._is_late(process, self._world.now)):
            return
        have_opted_in = all(each.opts_in for each in agent.processes.values())
        if not have_opted_in or any(each.place is Place.STARTING for each in agent.processes.values()):
            return  # it cannot recover in place
        if book.interrupted is not None and not book.interrupted.in_place:
            return  # as its leader decided (`_check_in_place`), or it has no leader
        self.fail(f"{process} has the state, and is stopped after {event}: no reason was logged")

    # The agents' workers.

    def starts_ahead(self, agent: InPlaceAgent) -> None:
        """An agent starts workers before its node is in a round."""
        alive = [process for process in agent.processes.values() if process.is_alive]
        if alive:
            self.fail(f"{agent} starts workers, and {alive} live")
        self.counts["started ahead"] += 1

    def spawns(self, agent: InPlaceAgent, assigned: m.Assigned) -> None:  # type: ignore[override]
        alive = [process for process in agent.processes.values() if process.is_alive]
        if alive:
            self.fail(f"{agent} starts workers, and {alive} live")
        super().spawns(agent, assigned)
        last = self._books[agent.node_id].last
        has_lost_all = all(self._is_lost(process) for process in self._inside[agent.node_id, last])
        self._moves(agent, assigned, kept=0, has_lost_all=has_lost_all)

    def _is_lost(self, process: Process) -> bool:
        """Whether a process ended by itself, hung, or did not leave its round in time."""
        is_late = self._is_late(process, process.ended_at)
        return not process.is_asked or is_late or id(process) in self._books[process.node.node_id].unhealthy

    def _is_late(self, process: Process, at: float) -> bool:
        """Whether it learned long ago, by its node's clock, that its round is over, and has still not left it."""
        over_at, node = process.over_at, process.node
        is_clock_ahead = over_at <= max(node.jumped_at, node.thawed_at) <= at
        return process.over >= 0 and (at - over_at >= GRACE_S * 0.97 or is_clock_ahead)

    def continues(self, agent: InPlaceAgent, assigned: m.Assigned) -> None:
        """Workers receive the order to begin the next round."""
        book = self._books[agent.node_id]
        if assigned.round in book.over:
            self.fail(f"{agent} begins round {assigned.round}, and knows that it is over")
        super().spawns(agent, assigned)
        kept = [each for each in agent.processes.values() if each.is_alive and each.round >= 0]
        self.counts["kept"] += len(kept)
        self._moves(agent, assigned, kept=len(kept), has_lost_all=not kept)

    def _moves(self, agent: InPlaceAgent, assigned: m.Assigned, *, kept: int, has_lost_all: bool) -> None:
        """Either all nodes of a round keep processes, or none does."""
        book = self._books[agent.node_id]
        moves = self.moves[assigned.fence]
        is_lost = book.interrupted is not None and (
            book.interrupted.went_on or book.interrupted.decision.cause.kind not in IN_PLACE
        )
        is_lost |= book.has_released  # its functions have returned and its processes are ending
        moves[agent.node_id] = Move(book.last, kept, has_lost_all, is_lost, book.reason, book.ended_by)
        book.last, book.interrupted, book.reason, book.has_released = assigned.fence, None, "", False
        of_one = [(node, move) for node, move in moves.items() if move.last == moves[agent.node_id].last >= 0]
        if not any(move.kept for _, move in of_one):
            return
        decided_by = {move.ended_by for _, move in of_one if move.kept}
        for node, move in of_one:
            if move.kept or move.has_lost_all or move.is_lost or move.ended_by not in decided_by:
                continue
            if not move.reason or "rounds in a row" in move.reason:  # the leader already knows about those
                self.fail(
                    f"{node} starts other workers for the round {assigned.round}, which {of_one} continue in place"
                )
            self.mixed[_kind(move.reason)] += 1

    def _leader_of(self, agent: Agent) -> str:
        """The leader that it is connected to, even if that has just left; empty without one."""
        end = connection_of(agent)
        leader = None if end is None else coordination_of(end.peer.process)  # type: ignore[arg-type]
        return "" if leader is None else leader.token

    def enters(self, process: Process, assigned: m.Assigned) -> None:
        """A worker enters a round: each rank has one process, and all ranks have left the previous round."""
        crew = process.crew
        ranks = assigned.ranks
        own = (ranks.world_size, ranks.group_world_size, assigned.round, assigned.restart_count)
        if crew.common[:4] != own:
            self.fail(f"{process} enters a round of {own}, and others one of {crew.common}")
        if process.rank in crew.ranks or not 0 <= process.rank < crew.size:
            self.fail(f"{process} enters {assigned.round} as rank {process.rank}, which {crew.ranks} has")
        self._inside[process.node.node_id, assigned.fence].append(process)
        found = [each for each in self.rounds.values() if each.fence == assigned.fence]
        members = {node_id for each in found for node_id in each.received}
        inside = {Place.IN_ROUND, Place.LEAVING, Place.DONE, Place.LOST_STATE}
        for other in self.agents:
            if other.node_id not in members:
                continue
            for each in other.processes.values():  # type: ignore[attr-defined]
                if each.place in inside and each.round < assigned.fence:
                    self.fail(f"{process} begins round {assigned.round}, and {each} is still in one before it")

    def joins(self, agent: InPlaceAgent) -> None:
        """A node is ready for the next round: its workers are gone, or all of them are at the safe point."""
        alive = [process for process in agent.processes.values() if process.is_alive]
        away = [process for process in alive if process.place is not Place.SAFE]
        if away:
            self.fail(f"{agent} is ready, and {away} are not")

    def replaces(self, agent: InPlaceAgent, local_rank: int) -> None:
        process = agent.processes[local_rank]
        if process.is_alive or not process.is_cleared:
            self.fail(f"{agent} replaces {process}, of which something is left")
        self.counts["replaced"] += 1

    def releases(self, agent: InPlaceAgent) -> None:
        """All functions of a node have returned."""
        self.counts["released"] += 1
        self._books[agent.node_id].has_released = True
        busy = [each for each in agent.processes.values() if each.is_alive and each.place is not Place.DONE]
        if busy:
            self.fail(f"{agent} lets its workers go, and {busy} are not done")

    def agent_ends(self, agent: InPlaceAgent, end: str) -> None:
        """An agent that ends leaves no process behind."""
        if end in {"crashed", "gave up"}:
            return
        alive = [process for process in agent.processes.values() if process.is_alive]
        if alive and end != "UNKNOWN":
            self.fail(f"{agent} ends, and leaves {alive} behind")

    # While time passes.

    def look_at_processes(self) -> None:
        """Every process is known to its agent, and none stays in a round that is over."""
        now = self._world.now
        self.processes = [process for process in self.processes if process.is_alive]
        for process in self.processes:
            node = process.node
            if not node.is_alive or node.processes.get(process.local_rank) is not process:
                self.fail(f"{process} lives, and no agent knows of it")
            over_s = now - max(process.over_at, node.thawed_at)
            grace_s = GRACE_S + KILLED_AFTER_S * process.is_asked
            is_late = process.place is Place.LEAVING and over_s > grace_s * 1.02 + LATE_S
            if is_late and not node.is_frozen:
                self.fail(f"{process} was told {over_s:.1f} s ago that its round is over, and has not left it")

    def training_problem(self) -> str:
        """What keeps the newest round from taking steps; empty if nothing does."""
        if self.verdicts:
            return ""
        inside = [each for each in self.processes if each.is_alive and each.node.in_round is not None]
        waiting = [each for each in inside if each.opts_in and not (each.has_shared and each.place is Place.IN_ROUND)]
        if waiting:
            return f"{waiting} do not train: {[each.place for each in waiting]}"
        over = {each.round for each in inside if each.crew.is_over}
        return f"workers are in rounds that are over: {over}" if over else ""

    def check_end(self) -> None:
        """At the end no process is left."""
        if alive := [process for process in self.processes if process.is_alive]:
            self.fail(f"{alive} live, and the job has ended")

    def succeeds(self, agent: InPlaceAgent) -> None:
        """A node reports that it has finished: each function has returned and knows that all others have."""
        for process in agent.processes.values():
            if not process.has_succeeded or (process.opts_in and not process.knows_end):
                self.fail(f"{agent} has finished, and {process} has not returned")


def _kind(reason: str) -> str:
    """A reason without its numbers."""
    return "".join(letter for letter in reason if not letter.isdigit())[:60]
