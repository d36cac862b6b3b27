"""What always holds in a simulation, by books of its own: what was said, heard and started, and when.

Nothing is read back from the machines under test but what an outsider sees too: which connections there are, and
which processes run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

from aelastic.decisions.cause import CauseKind
from aelastic.decisions.decision import DecisionKind
from aelastic.rdzv.leader_record import LeaderRecord
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from kit.simulated.agent import Agent
from kit.simulated.board import Board
from kit.simulated.charges import Charges
from kit.simulated.insight import (
    DOUBTED,
    TRUSTED,
    Coordination,
    connection_of,
    coordination_of,
    has_connection,
    is_member,
)
from kit.simulated.world import World

LEASE_S = 5.0
# Ends of agents that say nothing about the job.
CUT_OFF = {CauseKind.ENDPOINT_SILENT, CauseKind.NODES_SILENT}
_BEGAN, _FENCE = attrgetter("began_at"), attrgetter("fence")


class BrokenPromiseError(AssertionError):
    """An invariant does not hold."""


class ForgottenError(Exception):
    """The job has ended, and nothing that outlives its agents says so: what goes on is another job.

    It comes from a board that could not be told, that was wiped or died with its host, or that keeps what it is told
    for a lease only while a node was away for longer.
    """


class DeadVotersError(Exception):
    """The job waits for ever: for nodes that could go on as a majority, and died while it had no contact with them."""


@dataclass(eq=False)
class Round:
    """What one coordinator said about one round."""

    number: int
    token: str  # of the leader
    leader_id: str  # its agent
    began_at: float
    common: tuple[Any, ...]  # what all are told alike; the restart count first
    fence: int
    before: Round | None = None  # the last one that a node of it has taken part in
    heard: dict[str, m.Assigned] = field(default_factory=dict)
    # When a worker of it failed by itself, and which: host and rank; those that failed of it are not among them.
    failures: list[tuple[float, str, int]] = field(default_factory=list)
    ended_at: float = 1e9  # its nodes hear that it is over
    named: tuple[str, int] | None = None  # and of whose failure: host and rank
    done: set[str] = field(default_factory=set)  # nodes of it that had finished, and are gone

    @property
    def first(self) -> Round:
        """The one that it goes back to."""
        return self if self.before is None else self.before.first

    def __repr__(self) -> str:
        return f"round {self.number} of {self.leader_id} ({self.token[:4]})"


class Checks:
    def __init__(
        self, world: World, board: Board, lease_s: float, min_nodes: int, max_nodes: int, max_restarts: int
    ) -> None:
        self.lease_s = lease_s
        self._world, self._board = world, board
        self._min_nodes, self._max_nodes, self._max_restarts = min_nodes, max_nodes, max_restarts
        self.agents: list[Agent] = []
        self.rounds: dict[tuple[str, int], Round] = {}
        self.failed_in: set[Round] = set()  # rounds in which a worker failed by itself
        self.charges = Charges(lease_s)
        self.verdicts: list[m.Ended] = []  # as agents have heard them
        self.verdict_at: float | None = None
        self._is_published = False  # the board knew it first
        self._last_said: dict[tuple[str, str], Any] = {}  # token and node
        self._welcomed: set[tuple[str, str]] = set()  # the same: nodes that a coordinator has met
        self._counts: dict[str, int] = {}
        self._round_of: dict[str, Round] = {}  # the last that an agent has started workers of
        self._ended_at: dict[str, float] = {}  # when agents heard how the job ended
        self.renewals = 0
        self._connected: dict[str, set[str]] = {}  # by token: nodes, when the board was asked whether that one leads
        self._beside_since: dict[str, float] = {}  # since when an agent has been able to know of a newer round
        # Two rounds that follow the same one, and since when both run.
        self._forks: dict[tuple[Round, Round], float | None] = {}

    # The coordinators.

    def coordinator_hears(self, leader: Coordination, message: m.NodeMessage) -> None:
        """A node has told its coordinator something."""

    def welcomes(self, leader: Coordination, node_id: str) -> None:
        """A coordinator meets a node."""
        self._welcomed.add((leader.token, node_id))

    def said(self, agent: Agent, leader: Coordination, node_id: str, message: Any) -> None:
        match message:
            case m.Assigned():
                self._check_leadership(agent, leader, message)
                self._on_assigned(agent, leader, node_id, message)
            case m.Interrupted():
                is_told_again = (
                    round_ := self._round_that_ends(leader, node_id, message.round)
                ) and round_.ended_at < 1e9
                kind = message.decision.cause.kind
                # It had ended before: nobody was there to hear it, and now one returns.
                is_told_late = kind is CauseKind.ROUND_ENDED
                is_news = not (is_told_again or is_told_late or message.went_on)
                # A leader that has stood back, or has asked for a newer epoch, begins no round before the answer.
                begins_none = bool(leader.missing) or kind in CUT_OFF or leader.waits_for_board
                if is_news and not begins_none:
                    self._check_leadership(agent, leader, message)
                self._on_end(leader, node_id, message)
            case m.Ended():
                if message.outcome is not m.Outcome.REPLACED:
                    self._check_last_failure(agent, leader, message)
                    self._on_verdict(message)
            case r.Notice(stage=r.Stage.LEAVE):
                pass
            case _:
                return
        self._last_said[leader.token, node_id] = message

    def _check_leadership(self, agent: Agent, leader: Coordination, message: Any) -> None:
        tokens = [record.candidate.token for _, record in self._board.elections]
        if leader.token not in tokens:
            return  # it was elected by the nodes of its round
        made, record = self._board.elections[tokens.index(leader.token)]
        is_confirmed = record.is_by_nodes or leader.is_confirmed_by_nodes
        if is_confirmed and not leader.is_on_board:
            return  # it was, too, or they confirm it while the endpoint is away
        displaced_at, newest = self._board.elections[-1]
        if newest.candidate.token == leader.token or self._board.wiped_at >= made:
            return
        claimant = next(other for other in self.agents if other.node_id == newest.candidate.node_id)
        # Its clock stood still: until its next renewal it may end rounds, and begin one that has lost no node.
        if self._world.now - agent.suspended_until <= LEASE_S:
            if isinstance(message, m.Assigned):
                self._world.after(0.0, lambda: self._check_lost_none(leader, message.round))
            return
        # A middlebox refuses in its name: those that doubt it wait for less than it may be sure of itself.
        doubted_at = self._world.refused_at.get((claimant.host, agent.host), -math.inf)
        doubted_s = self.lease_s * (TRUSTED - DOUBTED) * 1.05
        if displaced_at - doubted_at < LEASE_S and self._world.now - displaced_at <= doubted_s:
            return
        if self._is_just_elected_by_nodes(displaced_at, newest):
            return
        # An agent whose clock jumps may think too soon that renewals stand still; then two decide until the first is told by the
        # board, each for those that are connected to it.
        if displaced_at - claimant.jumped_at > 2 * self.lease_s:
            self.fail(f"{leader.token} decides ({message}), and the board says that {newest.candidate.token} leads")

    def _is_just_elected_by_nodes(self, at: float, record: LeaderRecord) -> bool:
        """Whether the nodes of a round have elected a leader that has just written itself at the only endpoint over another one.

        There two are certain at once: the other trusts the endpoint's last answer until the next.  What holds is that no two
        rounds which they begin run side by side (`look_at_forks`).
        """
        is_of_nodes = record.is_by_nodes or not record.candidate.made_ms
        return is_of_nodes and self._world.now - at <= self.lease_s * TRUSTED * 1.02

    def renewed(self, token: str, connected: set[str]) -> None:
        """The board has said that a coordinator leads, which had connections with these nodes when it asked."""
        self._connected[token] = connected
        self.renewals += 1

    def _check_lost_none(self, leader: Coordination, number: int) -> None:
        token = leader.token
        last, round_ = self.rounds.get((token, number - 1)), self.rounds[token, number]
        if round_.began_at < self._world.now:
            return  # a node that has missed its assignment hears it again
        missing = set(last.heard if last is not None else ()) - round_.heard.keys()
        missing &= self._connected.get(token, missing)  # else it was lost when the board said that this one leads
        lost = [each for each in self.agents if each.node_id in missing and not each.is_leaving]
        if lost:
            self.fail(f"{token} has lost {lost}, and begins round {number} before the board has said that it leads")

    def _on_assigned(self, agent: Agent, leader: Coordination, node_id: str, message: m.Assigned) -> None:
        ranks = message.ranks
        common = (
            message.restart_count,
            message.master_addr,
            message.master_port,
            message.coordinator_rank,
            message.fence,
            ranks.world_size,
            ranks.group_world_size,
        )
        round_ = self.rounds.get((leader.token, message.round))
        if round_ is None:
            round_ = Round(message.round, leader.token, agent.node_id, self._world.now, common, message.fence)
            self.rounds[leader.token, message.round] = round_
            self._on_begun(agent, leader, round_, message)
        if round_.common != common or round_.heard.setdefault(node_id, message) != message:
            self.fail(f"{round_} looks different to different nodes")
        spans = sorted(
            (each.ranks.group_rank, each.ranks.first_rank, each.ranks.local_world_size)
            for each in round_.heard.values()
        )
        at = 0
        for group_rank, first, size in spans:
            if first < at or not 0 <= group_rank < ranks.group_world_size:
                self.fail(f"ranks of {round_} are not unique: {spans}")
            at = first + size
        if len({group_rank for group_rank, _, _ in spans}) < len(spans) or at > ranks.world_size:
            self.fail(f"ranks of {round_} are not unique: {spans}")
        if len(spans) == ranks.group_world_size and sum(size for _, _, size in spans) != ranks.world_size:
            self.fail(f"ranks of {round_} are not 0 to n-1: {spans}")

    def _on_begun(self, agent: Agent, leader: Coordination, round_: Round, message: m.Assigned) -> None:
        if self.verdict_at is not None:
            self._on_begun_again(round_)
        if not self._min_nodes <= message.ranks.group_world_size <= self._max_nodes:
            self.fail(f"{round_} has {message.ranks.group_world_size} nodes")
        if message.restart_count > self._max_restarts:
            self.fail(f"{round_} has restart count {message.restart_count}")
        # A board that was wiped counts from the beginning, where the agents that elect know nothing better.
        elected = self._elected
        rivals = [r for r in self.rounds.values() if r is not round_ and {r.token, round_.token} <= elected]
        if round_.fence in {each.fence for each in rivals}:
            self.fail(f"{round_} has a fencing number that another round has: {round_.fence}")

        def check() -> None:
            self._check_charge(round_, message.restart_count)
            self._check_others(agent, leader, round_)
            self._note_fork(agent, round_)

        self._world.after(0.0, check)  # what is said with it is said in the same breath

    @property
    def _elected(self) -> set[str]:
        """Tokens of those that were elected in the board's present life."""
        return {r.candidate.token for at, r in self._board.elections if at > self._board.wiped_at}

    def _note_fork(self, agent: Agent, round_: Round) -> None:
        """Two coordinators have begun a round of other nodes after the same one."""
        known = [self._round_of[node_id] for node_id in round_.heard if node_id in self._round_of]
        known = [each for each in known if each is not round_]  # whoever is in it already came from another
        round_.before = max(known, default=None, key=_BEGAN)
        self._check_accounted(agent, round_)
        for other in self.rounds.values():
            is_fork = other.token != round_.token and other.before is round_.before
            if is_fork and round_.before and not other.heard.keys() & round_.heard.keys():
                self._forks[other, round_] = None

    def _check_accounted(self, agent: Agent, round_: Round) -> None:
        """Newcomers begin no round beside one that the board knows, of which half of the nodes or more are at work.

        Half may be at work once their coordinator has met one of these nodes (ADR 24); those that it has told to stop do not
        count.  A coordinator that was elected before the board forgot all is certain for a lease, and knows no better.
        """
        record, token = self._board.record, round_.token
        if token not in self._elected or (record and record.candidate.token != token):
            return  # whether one that was displaced still decides is judged elsewhere (`_check_leadership`)
        if record is None or record.seats is None or record.seats.needs_endpoint or round_.before is not None:
            return
        known = record.seats
        has_met = any((token, seat.node_id) in self._welcomed for seat in known.seats)
        at_work = 0
        for other in self._running:
            its = self.round_of(other)
            is_of_known = its is not None and its.fence == known.fence < round_.fence
            at_work += is_of_known and not other.is_frozen and not self._has_told_to_stop(agent, token, other)
        if 2 * at_work >= len(known.seats) + has_met:
            self.fail(f"{round_} begins, and the board knows of {known} at work")

    def _has_told_to_stop(self, coordinator: Agent, token: str, node: Agent) -> bool:
        """Whether a node hears that its round is over, if it has not yet."""
        said = self._last_said.get((token, node.node_id))
        is_let_go = isinstance(said, r.Notice) and said.stage is r.Stage.LEAVE
        is_told = is_let_go or isinstance(said, m.Interrupted | m.Ended)
        return is_told and self._has_connection(node, coordinator)

    def look_at_forks(self, slow_s: float) -> None:
        """Of two rounds that follow the same one, one side ends a lease and a second later.

        Workers may ignore it when they are told to stop; and where nodes do not elect, those that are cut off from the
        board together with their coordinator go on (ADR 5).
        """
        if not self._forks:
            return
        lines = dict[Round, bool]()  # rounds to whether agents that run it, or one after it, are all excused
        for agent in self._running:
            is_excused = agent.is_frozen or (not agent.settings.has_elections and self._board.is_deaf(agent.host))
            round_ = self.round_of(agent)
            while round_ is not None:
                lines[round_] = lines.get(round_, True) and is_excused
                round_ = round_.before
        for fork, since in self._forks.items():
            if any(lines.get(each, True) for each in fork):
                self._forks[fork] = None
            elif since is None:
                self._forks[fork] = self._world.now
            elif self._world.now - since > self.lease_s * 1.02 + 1.0 + slow_s:
                self.fail(f"rounds {fork} follow the same one, and have run side by side since {since:.1f}")

    def _last_before(self, number: int) -> Round | None:
        return max((each for each in self.rounds.values() if each.number < number), key=_BEGAN, default=None)

    def _check_charge(self, round_: Round, restart_count: int) -> None:
        """What was paid for is a worker's own failure, and the first cause: no loss came before it, or a moment after.

        Of two sides the one that was cut off may have begun its last round later: then the other has the higher
        fencing number.  A side of new agents counts from the beginning: then nodes of the other bring a higher number.
        """
        earlier = [each for each in self.rounds.values() if each.number < round_.number]
        if earlier:
            lasts = {max(earlier, key=key) for key in (_BEGAN, _FENCE, attrgetter("number"))}
            objections = [self._objection(round_, restart_count, last) for last in lasts]
            if all(objections):
                self.fail(objections[0])

    def _objection(self, round_: Round, restart_count: int, last: Round) -> str:
        """What is wrong with a restart count, if that was the round before; empty if nothing is."""
        knew_it = [agent for agent in self.agents if agent.node_id in last.heard]
        if restart_count < last.common[0] and not any(agent.is_alive for agent in knew_it):
            return ""  # a side that was cut off has died, with what it had paid
        # Were all that know it away, the count began anew; now one has brought it along.
        heard_of = {agent.node_id for agent in self.agents if agent.is_alive}
        heard_of |= {node_id for token, node_id in self._welcomed if token == round_.token}
        brought = max((count for node_id, count in self._counts.items() if node_id in heard_of), default=0)
        paid = {restart_count - last.common[0], restart_count - max(brought, last.common[0])}
        legal = self.charges.legal(last, round_)
        if last.failures:
            self.charges.judged[legal] += 1
        if paid & legal:
            return ""
        return f"{round_} has restart count {restart_count}; {last} had {last.common[0]}, and failed: {last.failures}"

    def _on_end(self, leader: Coordination, node_id: str, message: m.Interrupted) -> None:
        """Named is a worker that failed by itself, and no victim."""
        round_ = self._round_that_ends(leader, node_id, message.round)
        if round_ is None:
            return
        round_.ended_at = min(round_.ended_at, self._world.now)
        cause = message.decision.cause
        round_.named = (cause.host, cause.ranks[0]) if cause.is_failure else round_.named
        if round_.named is not None:
            self._check_name(leader, round_, round_.named)

    def _round_that_ends(self, leader: Coordination, node_id: str, number: int) -> Round | None:
        """One that this coordinator has begun or inherited, as a node hears of it.

        A node that was cut off may come from a round of the same number that another coordinator had begun.
        """
        own = self._round_of.get(node_id)
        if own is not None and own.number == number:
            return own
        round_ = self.rounds.get((leader.token, number)) or own
        round_ = round_ or self._last_before(number + 1)
        while round_ is not None and round_.number > number:
            round_ = round_.before
        return round_ if round_ is not None and round_.number == number else None

    def _check_name(self, leader: Coordination, round_: Round, named: tuple[str, int]) -> None:
        legal = self.charges.legal_names(round_, leader.node_id, self._world.now)
        if legal is not None and named not in legal:
            self.fail(f"named is {named}, a victim; {round_.failures} had failed in {round_}")

    def _check_last_failure(self, agent: Agent, leader: Coordination, verdict: m.Ended) -> None:
        """The job has failed: the restart that it could not pay would have been charged.

        It is for good, a grace after the failure: where words are late, or a machine was switched off or a connection broke
        without one, a loss may be heard of after that.
        """
        if self.verdict_at is not None or verdict.outcome is not m.Outcome.FAILED:
            return
        last = max(self.rounds.values(), key=_FENCE)
        are_dark = {node_id.partition("#")[0] for node_id in last.heard} & self._world.dark
        is_decided_at_once = len(last.heard) == 1  # a round of one node has no victims
        if (
            is_decided_at_once
            or are_dark
            or self.charges.has_silent_break(last)
            or self.charges.legal_names(last, agent.node_id, self._world.now) is None
        ):
            return
        token = leader.token
        after = replace(last, number=last.number + 1, token=token, leader_id=agent.node_id, began_at=self._world.now)
        self._check_charge(after, self._max_restarts + 1)
        if verdict.cause is not None:
            self._check_name(leader, last, (verdict.cause.host, verdict.cause.rank))

    def _check_others(self, agent: Agent, leader: Coordination, round_: Round) -> None:
        """An agent with a connection to the coordinator has no workers of another round, or was told to stop them."""
        for other in self.agents:
            workers_of = other.round_of_workers
            if not other.alive or workers_of is None or workers_of.round == round_.number:
                continue
            if not self._is_connected(other, agent):
                continue  # it is lost, and will be told when it comes back
            last = self._last_said.get((leader.token, other.node_id))
            is_told = isinstance(last, m.Interrupted | m.Ended | r.Notice) or (
                isinstance(last, m.Assigned) and last.round >= round_.number
            )
            if not is_told and other.group.phase not in {"stopping", "leaving", "forming", "done"}:
                self.fail(f"{round_} begins, and {other} runs workers of round {workers_of.round}: it was not told")

    def _on_begun_again(self, round_: Round) -> None:
        """Closed stays closed, as long as the board can say so."""
        if self._is_forgotten:
            self._give_up(ForgottenError(f"{round_} begins after a verdict that is not on the board"))
        self._world.after(0.0, lambda: self._check_knows_none(round_))

    def _check_knows_none(self, round_: Round) -> None:
        """A round begins after a verdict only where a coordinator reads that another one leads with its next renewal.

        A new agent may have found the endpoint empty, and know nothing of the job: the nodes that know it may have elected
        another coordinator, whose verdict is on the endpoint now.  And one that was suspended, and its clock with it, wakes
        up certain that it leads (`survivors/leadership.py`).
        """
        before = {self._round_of.get(node_id, round_) for node_id in round_.heard}
        is_new = before == {round_} and round_.token in self._elected
        displaced_at, newest = self._board.elections[-1]
        is_displaced = newest.candidate.token != round_.token and self._is_just_elected_by_nodes(displaced_at, newest)
        has_just_woken = newest.candidate.token != round_.token and self._has_just_woken(round_.leader_id)
        if not (is_new and is_displaced) and not has_just_woken:
            self.fail(f"{round_} begins after a verdict: {self.verdicts[0]}")

    def _has_just_woken(self, node_id: str) -> bool:
        """Whether it was suspended, and has not had the time to hear from the board since."""
        since = self._world.now - self.lease_s / 2
        clocks = [each for each in self.charges.faults if each.kind == "clock" and each.node_id == node_id]
        return any(each.since >= since for each in clocks)

    def give_up_if_forgotten(self) -> None:
        if self.verdicts and self._is_forgotten:
            self._give_up(ForgottenError("a verdict is not on the board"))
        leaders = [coordination_of(agent) for agent in self.agents if agent.is_alive]
        missing = {node_id for leader in leaders if leader is not None for node_id in leader.missing}
        if missing and not any(agent.is_alive and agent.node_id in missing for agent in self.agents):
            self._give_up(
                DeadVotersError(f"{sorted(missing)} have died, which may go on for all that is known: the rest waits")
            )

    @property
    def _is_forgotten(self) -> bool:
        usurpers = [agent for agent in self.agents if agent.node_id == self._board.usurper]
        if any(agent.welcomed_at < self._board.usurped_at for agent in usurpers):
            return False  # it is of this job, and has read how it ended
        return not self._is_published or self._board.has_forgotten

    def _is_connected(self, member: Agent, to: Agent) -> bool:
        return is_member(member) and self._has_connection(member, to)

    def _has_connection(self, member: Agent, to: Agent) -> bool:
        """Whether a coordinator has a connection with a node, which may not have welcomed it yet."""
        return member.is_alive and has_connection(member, to)

    # The agents.

    def spawns(self, agent: Agent, assigned: m.Assigned) -> None:
        found = [
            r for r in self.rounds.values() if r.number == assigned.round and r.heard.get(agent.node_id) == assigned
        ]
        if not found:
            self.fail(f"{agent} starts workers of round {assigned.round}, and has no part in it")
        round_ = found[-1]
        last = self._round_of.get(agent.node_id)
        if last is not None and round_.number <= last.number:
            self.fail(f"{agent} goes back from {last} to {round_}")
        if last is not None and assigned.fence <= last.fence:
            self.fail(f"{agent}: the fencing number falls from {last.fence} to {assigned.fence}")
        if assigned.restart_count < self._counts.get(agent.node_id, 0):
            self.fail(f"{agent}: the restart count falls to {assigned.restart_count}")
        # An agent that was frozen may hear of a round and of the end at once, and its supervisor reads the round first.
        if self._ended_at.get(agent.node_id, math.inf) < self._world.now:
            self.fail(f"{agent} starts workers after the verdict")
        self._counts[agent.node_id] = assigned.restart_count
        self._round_of[agent.node_id] = round_

    def worker_failed(self, agent: Agent, rank: int) -> None:
        """A worker fails by itself."""
        of = self._round_of[agent.node_id]
        of.failures.append((self._world.now, agent.host, rank))
        self.failed_in.add(of)

    def workers_gone(self, agent: Agent) -> None:
        """Those that talk to a worker that is gone fail of it, unless they cannot know."""
        of = self._round_of[agent.node_id]
        for peer in self.agents:
            is_peer = peer is not agent and peer.alive and self._round_of.get(peer.node_id) is of
            if is_peer and not self._world.is_cut(agent.host, peer.host):
                self._world.after(self._world.random.uniform(0.02, 0.05), partial(peer.lose_peer, peer.alive))

    def broke(self, agent: Agent, *, is_silent: bool) -> None:
        """A connection of its node breaks; if no agent has the other end any more, it was of no use before.

        Until a node has reconnected, its coordinator may not know of the break before: it notices that when it writes.
        """
        now, end = self._world.now, connection_of(agent)
        is_certain = is_member(agent) and end is not None and end.peer.is_open
        if not is_member(agent):
            self.charges.doubt_breaks(agent.node_id, now)
        self.charges.add(
            "break", now, agent.host, until=now, node_id=agent.node_id, is_certain=is_certain, is_dark=is_silent
        )

    def hangs_up(self, agent: Agent) -> None:
        """A node gives its connection up, since it hears nothing: where messages are late, that takes no fault."""
        if self.charges.late_s:
            self.charges.add("break", self._world.now, agent.host, until=self._world.now, node_id=agent.node_id)

    def ends(self, agent: Agent, *, is_dark: bool = False) -> None:
        """A node crashes, or is asked to leave."""
        now, is_certain = self._world.now, agent.group.phase != "barrier"
        if not is_certain:
            self._round_of[agent.node_id].done.add(agent.node_id)
        self.charges.add(
            "end", now, agent.host, until=now, node_id=agent.node_id, is_certain=is_certain, is_dark=is_dark
        )

    def falls_silent(self, agent: Agent) -> None:
        """It stands still for a while."""
        self.charges.add("silence", self._world.now, agent.host, node_id=agent.node_id)

    def goes_on(self, agent: Agent) -> None:
        self.charges.is_over("silence", self._world.now, agent.host)

    def clock_differs(self, agent: Agent) -> None:
        """It was put ahead, or has stood still."""
        self.charges.add("clock", self._world.now, agent.host, until=self._world.now, node_id=agent.node_id)

    def heard(self, agent: Agent, message: m.CoordinatorMessage) -> None:
        if isinstance(message, m.Ended):
            self._ended_at.setdefault(agent.node_id, self._world.now)
            if message.outcome is not m.Outcome.REPLACED:
                self._on_verdict(message)

    def _on_verdict(self, verdict: m.Ended) -> None:
        if verdict.decision.kind is DecisionKind.OUTCOME_UNKNOWN:
            return  # a side that was cut off for longer than it waits: it claims nothing, and the job may go on elsewhere
        if self.verdict_at is None:
            self.verdict_at, self._is_published = self._world.now, self._board.closed_at is not None
        if verdict not in self.verdicts:
            self.verdicts.append(verdict)
        if len(self.verdicts) > 1:
            if self._is_forgotten:
                self._give_up(ForgottenError(f"{verdict} comes after a verdict that is not on the board"))
            self.fail(f"two verdicts: {self.verdicts}")

    def look_at_rounds(self, slow_s: float) -> None:
        """An agent that can read the board stops its workers a lease and a second after a newer round has begun.

        Its coordinator may have given it up a lease before it could know: until then it heard the coordinator, which
        did not hear it.  A new leader gives it as long again, and so does a board that was wiped, where it begins to look for
        one; and a coordinator learns of one when it asks the board to renew, and then reads who it is.  So do, from it, the nodes
        of a job that was displaced.
        """
        running = {agent.node_id: round_ for agent in self._running if (round_ := self.round_of(agent))}
        rounds = list(running.values())
        newest = self._newest(rounds)
        beside = {node for node, round_ in running.items() if round_ is not newest and self._is_beside(round_, newest)}
        for node_id in self._beside_since.keys() - beside:
            del self._beside_since[node_id]
        if newest is None or not beside:
            return
        board, now = self._board, self._world.now
        within_s = self.lease_s * 1.02 + 1.0 + board.asks_again_s + 2 * slow_s
        for agent in self.agents:
            if agent.node_id not in beside:
                continue
            round_ = running[agent.node_id]
            # A new agent that finds a silent coordinator at the only endpoint knows nothing of its round, and begins one of its own if
            # `min` permits that, while most nodes of that round go on without the endpoint: there is no promise against that.  Of the
            # older round's nodes less than most are no excuse.  They follow their coordinator, which is to displace the new one, for
            # as long as that cannot reach the endpoint.
            are_most = 2 * rounds.count(round_) > len(round_.heard)
            knows_none = newest.first is not round_.first and are_most
            is_deaf = board.is_deaf(agent.host)
            is_led_deaf = is_deaf or board.is_deaf(round_.leader_id.partition("#")[0])
            if agent.is_frozen or (is_deaf and not agent.settings.has_elections) or (is_led_deaf and knows_none):
                self._beside_since.pop(agent.node_id, None)
                continue
            elected_at = max(board.elections[-1][0], board.wiped_at)
            since = self._beside_since.setdefault(agent.node_id, now)
            is_displaced = round_.fence > newest.fence
            is_led_there = is_displaced or round_.leader_id == agent.node_id
            # A renewal later the board is asked to renew, and then who leads: each goes there and back.  A leader whom nodes have
            # elected finds a new job there when its last question has had its time, and displaces it with the renewal after that.
            is_elected_by_nodes = round_.token not in self._elected
            renewals = 2 if knows_none and is_elected_by_nodes else int(is_led_there)
            learns_s = renewals * (self.lease_s / 3 * 1.02 + 4 * slow_s)
            if now - max(since, elected_at) > within_s + learns_s:
                self.fail(f"{agent} has run {round_} beside a newer one for {now - since:.1f} s")

    def _newest(self, rounds: list[Round]) -> Round | None:
        """The one with the highest fence; of two jobs, that of the leader which has displaced the other's on the board.

        A new agent that found the only endpoint empty has begun a job of its own, with the higher fence.  The coordinator that
        the other nodes have elected displaces it there: then their round goes on, and the new agent's ends.
        """
        newest = max(rounds, key=_FENCE, default=None)
        if newest is None or newest.token not in self._elected:
            return newest
        token = self._board.elections[-1][1].candidate.token
        if newest.token == token:
            return newest  # nobody has displaced its leader
        displacing = [each for each in rounds if each.token == token and each.first is not newest.first]
        return max(displacing, key=_FENCE, default=newest)

    def _is_beside(self, round_: Round, newest: Round | None) -> bool:
        """Whether a newer one runs; of two jobs, with a wiped board between, neither can know the other."""
        assert newest is not None
        first, last = sorted((round_.began_at, newest.began_at))
        return round_.fence != newest.fence and not first <= self._board.wiped_at <= last

    @property
    def _running(self) -> list[Agent]:
        return [agent for agent in self.agents if agent.alive and agent.group.phase == "running"]

    # When it is calm.

    def round_of(self, agent: Agent) -> Round | None:
        return self._round_of.get(agent.node_id)

    def disagreement(self) -> str:
        """What keeps those that live from being in one round, or in a place to wait; empty if nothing."""
        living = [agent for agent in self.agents if agent.is_alive]
        if self.verdicts and living:
            deaf = not self._board.is_up  # the board has gone with node0, and the verdict with it
            return "" if deaf else f"{living} have not heard the verdict"
        running = [agent for agent in living if agent.group.phase in {"running", "barrier"}]
        waiting = [agent for agent in living if agent.group.phase in {"joining", "preparing", "forming"}]
        rest = [agent for agent in living if agent not in running and agent not in waiting]
        rounds = {self.round_of(agent) for agent in running}
        if rest:
            return f"{rest} are on their way"
        if len(rounds) > 1:
            return f"there are rounds {rounds}"
        if not running:
            return f"no node runs, {waiting} wait" if living else ""
        (round_,) = rounds
        assert round_ is not None
        size = next(iter(round_.heard.values())).ranks.group_world_size - len(round_.done)
        if len(running) != size:
            return f"{len(running)} of {size} are in {round_}"
        has_finished = any(agent.group.phase == "barrier" for agent in running)  # then newcomers are spares
        if waiting and size < self._max_nodes and not has_finished:
            return f"there is room in {round_}, and {waiting} wait"
        return ""

    def fail(self, what: str) -> NoReturn:
        self._world.note("PROMISE", what)
        self._give_up(BrokenPromiseError(what))

    def _give_up(self, error: Exception) -> NoReturn:
        """Also where it is found in a process, which may catch what is raised there."""
        self._world.fail(error)
        raise error
