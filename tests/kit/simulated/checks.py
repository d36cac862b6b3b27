"""Invariants of a simulation, checked against a record of its own: what was sent, received and started, and when.

The checks read nothing back from the cores under test except what an outsider can also see: which connections exist
and which processes run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

from aelastic.rdzv.log.entries import Entry, EntryId, id_of, order
from aelastic.rdzv.log.node import Node
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from kit.faults.charging import EITHER
from kit.simulated.charges import Charges
from kit.simulated.endpoint import Endpoint
from kit.simulated.insight import (
    Coordination,
    connection_of,
    coordination_of,
    has_connection,
    is_member,
    name_of,
)
from kit.simulated.supervisor import Agent
from kit.simulated.world import World

LEASE_S = 5.0
_BEGAN, _FENCE = attrgetter("began_at"), attrgetter("fence")


class BrokenPromiseError(AssertionError):
    """An invariant does not hold."""


class ForgottenError(Exception):
    """The job has ended, but nothing that outlives its agents records it, so whatever continues is another job.

    Raised when the endpoint never received the verdict, was wiped or died with its host, or keeps the verdict for only a
    lease and a node was away longer.
    """


class DeadVotersError(Exception):
    """The job waits forever: the remaining voters of the last entry are too few, with no proof that the others ended."""


@dataclass(eq=False)
class Round:
    """One round, as one leader announced it."""

    number: int
    token: str  # of the leader
    leader_id: str  # its agent
    began_at: float
    common: tuple[Any, ...]  # the same for all nodes; the restart count comes first
    fence: int
    log: str | None
    before: Round | None = None  # the latest earlier round that one of its nodes took part in
    received: dict[str, m.Assigned] = field(default_factory=dict)
    # Each worker that failed by itself: when, host and rank. Victims of such a failure are not included.
    failures: list[tuple[float, str, int]] = field(default_factory=list)
    has_late_failure: bool = (
        False  # a worker failed when its leader had proposed an entry: perhaps that of the next round
    )
    ended_at: float = 1e9  # when its nodes learn that it is over
    named: tuple[str, int] | None = None  # the worker whose failure ended it: host and rank
    done: set[str] = field(default_factory=set)  # its nodes that finished and are gone

    @property
    def first(self) -> Round:
        """The earliest round that it continues."""
        return self if self.before is None else self.before.first

    def __repr__(self) -> str:
        return f"round {self.number} of {self.leader_id} ({self.token[:4]})"


class Checks:
    def __init__(
        self, world: World, endpoint: Endpoint, lease_s: float, min_nodes: int, max_nodes: int, max_restarts: int
    ) -> None:
        self.lease_s = lease_s
        self._world, self._endpoint = world, endpoint
        self._min_nodes, self._max_nodes, self._max_restarts = min_nodes, max_nodes, max_restarts
        self.agents: list[Agent] = []
        self.rounds: dict[int, Round] = {}  # by fence
        self._entries: dict[tuple[str, int], EntryId] = {}  # committed, by log and number
        self._kept: dict[Agent, Node] = {}  # what each agent last stored of the log
        self._candidate: Coordination | None = None  # the one that stepped down last
        self._last_of: dict[str, int] = {}  # by log: the number of its verdict
        self.failed_in: set[Round] = set()  # rounds in which a worker failed by itself
        self.charges = Charges(lease_s)
        self.verdicts: list[m.Ended] = []  # as agents received them
        self.verdict_at: float | None = None
        self._last_sent: dict[tuple[str, str], Any] = {}  # token and node
        self._welcomed: set[tuple[str, str]] = set()  # the same: nodes that a leader has welcomed
        self._counts: dict[str, int] = {}
        self._round_of: dict[str, Round] = {}  # the last round whose workers an agent has started
        self._ended_at: dict[str, float] = {}  # when agents learned how the job ended
        self._beside_since: dict[str, float] = {}  # since when an agent could have known of a newer round

    # The leaders.

    def leader_receives(self, leader: Coordination, message: m.NodeMessage) -> None:
        """A leader receives a message from a node."""

    def welcomes(self, leader: Coordination, node_id: str) -> None:
        """A leader welcomes a node."""
        self._welcomed.add((leader.token, node_id))

    def leader_sends(self, agent: Agent, leader: Coordination, node_id: str, message: Any) -> None:
        match message:
            case m.Assigned():
                self._on_assigned(agent, leader, node_id, message)
            case m.Interrupted():
                self._on_end(leader, node_id, message)
            case m.Ended():
                if message.outcome is not m.Outcome.REPLACED:
                    self._check_last_failure(agent, leader, message)
                    self._on_verdict(message)
            case r.Notice(stage=r.Stage.LEAVE):
                pass
            case _:
                return
        self._last_sent[leader.token, node_id] = message

    # What nodes store of the log.

    def keeps(self, agent: Agent, node: Node | None) -> None:
        """Each position of a log has one committed entry, and none follows the verdict."""
        if node is None or node.committed is None:
            return
        self._kept[agent] = node
        entry_id = id_of(node.committed)
        assert entry_id is not None
        log, number = entry_id.log, entry_id.number
        known = self._entries.setdefault((log, number), entry_id)
        if not isinstance(node.committed, Entry) and order(entry_id) < order(known):
            return  # it has not learned yet which entry a recovery put there instead
        if known != entry_id:  # a recovery: an entry that only ended nodes knew whole is lost
            if others := [each for each in self.agents if each is not agent and self._has_come_to(each, entry_id)]:
                self.fail(f"{agent} knows that {entry_id} is committed, and {others} know that {known} is")
            self._entries[log, number] = entry_id
        if isinstance(node.committed, Entry) and node.committed.is_verdict:
            self._last_of.setdefault(log, number)
        if number > self._last_of.get(log, number):
            self.fail(f"{agent} knows that {entry_id} is committed, after the verdict")

    def _has_come_to(self, agent: Agent, entry_id: EntryId) -> bool:
        """Whether a living agent has the whole entry at that position of the log, or a later one."""
        kept = self._kept.get(agent)
        committed = None if kept is None else kept.committed
        if not agent.is_alive or not isinstance(committed, Entry):
            return False
        return committed.log == entry_id.log and committed.number >= entry_id.number

    def steps_down(self, agent: Agent, leader: Coordination) -> None:
        """An agent stops leading, or was not elected."""
        self._candidate = leader

    # What leaders send.

    def _on_assigned(self, agent: Agent, leader: Coordination, node_id: str, message: m.Assigned) -> None:
        ranks = message.ranks
        common = (
            message.restart_count,
            message.master_addr,
            message.master_port,
            message.fence,
            ranks.world_size,
            ranks.group_world_size,
        )
        round_ = self.rounds.get(message.fence)
        if round_ is None:
            log = leader.log_name
            round_ = Round(message.round, leader.token, agent.node_id, self._world.now, common, message.fence, log)
            self.rounds[message.fence] = round_
            self._on_begun(agent, leader, round_, message)
        if round_.common != common or round_.received.setdefault(node_id, message) != message:
            self.fail(f"{round_} looks different to different nodes")
        spans = sorted(
            (each.ranks.group_rank, each.ranks.first_rank, each.ranks.local_world_size)
            for each in round_.received.values()
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

        def check() -> None:
            self._check_charge(round_, message.restart_count)
            check_others()
            known = [self._round_of[node_id] for node_id in round_.received if node_id in self._round_of]
            known = [each for each in known if each is not round_]  # a node already in it came from another round
            round_.before = max(known, default=None, key=_BEGAN)

        def check_others() -> None:
            if leader.has_stepped_down:
                return
            if leader.awaits_quorum or leader.has_proposed:  # what a node has reported meanwhile is answered later
                self._world.after(0.01, check_others)
            else:
                self._check_others(agent, leader, round_)

        self._world.after(0.0, check)  # after the messages that the leader sends at the same moment

    def _last_before(self, number: int) -> Round | None:
        return max((each for each in self.rounds.values() if each.number < number), key=_BEGAN, default=None)

    def _check_charge(self, round_: Round, restart_count: int) -> None:
        """Only a worker's own failure is charged, and only as the first cause: no loss came before or right after it.

        If the job was split, the side that was cut off may have begun its last round later; then the other side has the
        higher fencing number. A side of new agents counts from zero; then nodes of the other side bring a higher count.
        """
        earlier = [each for each in self.rounds.values() if each.number < round_.number]
        if earlier:
            lasts = {max(earlier, key=key) for key in (_BEGAN, _FENCE, attrgetter("number"))}
            objections = [self._objection(round_, restart_count, last) for last in lasts]
            if all(objections):
                self.fail(objections[0])

    def _objection(self, round_: Round, restart_count: int, last: Round) -> str:
        """What is wrong with a restart count, assuming `last` was the previous round; empty if nothing is."""
        if last.log != round_.log:
            return ""  # another job, as far as its agents know
        knew_it = [agent for agent in self.agents if agent.node_id in last.received]
        if restart_count < last.common[0] and not any(agent.is_alive for agent in knew_it):
            return ""  # a side that was cut off has died, and its charges with it
        # If every agent that knew the count was away, it restarted from zero; now one of them has brought it back.
        reachable = {agent.node_id for agent in self.agents if agent.is_alive}
        reachable |= {node_id for token, node_id in self._welcomed if token == round_.token}
        brought = max((count for node_id, count in self._counts.items() if node_id in reachable), default=0)
        paid = {restart_count - last.common[0], restart_count - max(brought, last.common[0])}
        legal = self.charges.legal(last, round_)
        if last.failures:
            self.charges.judged[legal] += 1
        if paid & legal or (paid & EITHER and self._has_lost_one_meanwhile(round_)):
            return ""
        return f"{round_} has restart count {restart_count}; {last} had {last.common[0]}, and failed: {last.failures}"

    def _has_lost_one_meanwhile(self, round_: Round) -> bool:
        """Whether a node of a round ended before the round was agreed on: its charge was already decided."""
        agent = next(each for each in self.agents if each.node_id == round_.leader_id)
        server = None if agent.link is None else agent.link._server
        participants = () if server is None else server.leader.coordinator.roster.participants
        return any(each.kind == "end" and each.node_id in participants for each in self.charges.faults)

    def _on_end(self, leader: Coordination, node_id: str, message: m.Interrupted) -> None:
        """The end of a round names a worker that failed by itself, not a victim."""
        round_ = self._round_that_ends(leader, node_id, message.round)
        if round_ is None:
            return
        round_.ended_at = min(round_.ended_at, self._world.now)
        cause = message.decision.cause
        round_.named = (cause.host, cause.ranks[0]) if cause.is_failure else round_.named
        if round_.named is not None:
            self._check_name(leader, round_, round_.named)

    def _round_that_ends(self, leader: Coordination, node_id: str, number: int) -> Round | None:
        """The round that ends, begun or inherited by this leader, as the node knows it.

        A node that was cut off may come from a round of the same number that another leader began.
        """
        own = self._round_of.get(node_id)
        if own is not None and own.number == number:
            return own
        round_ = own or self._last_before(number + 1)
        while round_ is not None and round_.number > number:
            round_ = round_.before
        return round_ if round_ is not None and round_.number == number else None

    def _check_name(self, leader: Coordination, round_: Round, named: tuple[str, int]) -> None:
        legal = self.charges.legal_names(round_, leader.node_id, self._world.now)
        if legal is not None and named not in legal:
            self.fail(f"named is {named}, a victim; {round_.failures} had failed in {round_}")

    def _check_last_failure(self, agent: Agent, leader: Coordination, verdict: m.Ended) -> None:
        """When the job fails, the restart that it could not afford would have been charged.

        The verdict is final one grace period after the failure. If messages are late, a machine was switched off or a
        connection broke silently, a loss may become known only after that.
        """
        if self.verdict_at is not None or verdict.outcome is not m.Outcome.FAILED:
            return
        # A log that was lost may have had higher terms, by a clock that is ahead.
        last = max((each for each in self.rounds.values() if each.log == leader.log_name), key=_FENCE, default=None)
        if last is None:
            return  # the leader has only read of that round
        are_dark = {node_id.partition("#")[0] for node_id in last.received} & self._world.dark
        is_decided_at_once = len(last.received) == 1  # a round of one node has no victims
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
        """An agent connected to the leader runs no workers of another round, unless it was ordered to stop them."""
        for other in self.agents:
            workers_of = other.round_of_workers
            if not other.alive or workers_of is None or workers_of.round >= round_.number:
                continue
            if not self._is_connected(other, agent):
                continue  # it is lost, and will be notified when it reconnects
            last = self._last_sent.get((leader.token, other.node_id))
            is_notified = isinstance(last, m.Interrupted | m.Ended | r.Notice) or (
                isinstance(last, m.Assigned) and last.round >= round_.number
            )
            if not is_notified and other.group.phase not in {"stopping", "leaving", "forming", "done"}:
                self.fail(f"{round_} begins, and {other} runs workers of round {workers_of.round}: it was not told")

    def _on_begun_again(self, round_: Round) -> None:
        """A closed job stays closed for as long as the endpoint remembers it."""
        if self._is_forgotten:
            self._give_up(ForgottenError(f"{round_} begins after a verdict that is not in the cell"))
        self.fail(f"{round_} begins after a verdict: {self.verdicts[0]}")

    def give_up_if_forgotten(self) -> None:
        if self.verdicts and self._is_forgotten:
            self._give_up(ForgottenError("a verdict is not in the cell"))
        living = {name_of(agent) for agent in self.agents if agent.is_alive}
        missing = set[str]() if self._candidate is None else self._candidate.lacks(living)
        if missing:
            self._give_up(DeadVotersError(f"{sorted(missing)} have died, and may live for all that is known"))

    @property
    def _is_forgotten(self) -> bool:
        return self._endpoint.closed_at is None or self._endpoint.has_forgotten

    def _is_connected(self, member: Agent, to: Agent) -> bool:
        return is_member(member) and self._has_connection(member, to)

    def _has_connection(self, member: Agent, to: Agent) -> bool:
        """Whether a node has a connection to a leader, which may not have welcomed it yet."""
        return member.is_alive and has_connection(member, to)

    # The agents.

    def spawns(self, agent: Agent, assigned: m.Assigned) -> None:
        found = [
            r for r in self.rounds.values() if r.number == assigned.round and r.received.get(agent.node_id) == assigned
        ]
        if not found:
            self.fail(f"{agent} starts workers of round {assigned.round}, and has no part in it")
        round_ = found[-1]
        last = self._round_of.get(agent.node_id)
        if last is not None and round_.number <= last.number:
            self.fail(f"{agent} goes back from {last} to {round_}")
        if last is not None and assigned.fence <= last.fence:
            self.fail(f"{agent}: the fencing number falls from {last.fence} to {assigned.fence}")
        is_of_other_log = last is not None and last.log != round_.log  # another job, as far as its agents know
        if assigned.restart_count < self._counts.get(agent.node_id, 0) and not is_of_other_log:
            self.fail(f"{agent}: the restart count falls to {assigned.restart_count}")
        # An agent that was frozen may receive a round and the verdict at once; its supervisor reads the round first.
        if self._ended_at.get(agent.node_id, math.inf) < self._world.now:
            self.fail(f"{agent} starts workers after the verdict")
        self._counts[agent.node_id] = assigned.restart_count
        self._round_of[agent.node_id] = round_

    def worker_failed(self, agent: Agent, rank: int) -> None:
        """A worker fails by itself."""
        self._note_failure(agent, rank, self._world.now)

    def _note_failure(self, agent: Agent, rank: int, at: float) -> None:
        of = self._round_of[agent.node_id]
        of.failures.append((max(at, of.began_at), agent.host, rank))
        of.has_late_failure |= any(each.has_proposed for each in self._leaders)
        self.failed_in.add(of)

    def workers_gone(self, agent: Agent) -> None:
        """Workers that talk to one that is gone fail because of it, unless they cannot know."""
        of = self._round_of[agent.node_id]
        for peer in self.agents:
            is_peer = peer is not agent and peer.alive and self._round_of.get(peer.node_id) is of
            if is_peer and not self._world.is_cut(agent.host, peer.host):
                self._world.after(self._world.random.uniform(0.02, 0.05), partial(peer.lose_peer, peer.alive))

    def broke(self, agent: Agent, *, is_silent: bool) -> None:
        """A connection of an agent's node breaks; if no agent holds the other end any more, it was already useless.

        Until a node has reconnected, its leader may not know of its previous break: it notices when it writes.
        """
        now, end = self._world.now, connection_of(agent)
        is_certain = is_member(agent) and end is not None and end.peer.is_open
        if not is_member(agent):
            self.charges.doubt_breaks(agent.node_id, now)
        self.charges.add(
            "break", now, agent.host, until=now, node_id=agent.node_id, is_certain=is_certain, is_dark=is_silent
        )

    def hangs_up(self, agent: Agent) -> None:
        """A node drops its connection because nothing arrives; if messages are late, this needs no fault."""
        if self.charges.late_s:
            self.charges.add("break", self._world.now, agent.host, until=self._world.now, node_id=agent.node_id)

    def ends(self, agent: Agent, *, is_dark: bool = False) -> None:
        """A node crashes or is asked to leave."""
        now, is_certain = self._world.now, agent.group.phase != "barrier"
        if not is_certain:
            self._round_of[agent.node_id].done.add(agent.node_id)
        self.charges.add(
            "end", now, agent.host, until=now, node_id=agent.node_id, is_certain=is_certain, is_dark=is_dark
        )

    def falls_silent(self, agent: Agent) -> None:
        """An agent freezes for a while."""
        self.charges.add("silence", self._world.now, agent.host, node_id=agent.node_id)

    def goes_on(self, agent: Agent) -> None:
        self.charges.is_over("silence", self._world.now, agent.host)

    def clock_differs(self, agent: Agent) -> None:
        """An agent's clock was put ahead or stood still."""
        self.charges.add("clock", self._world.now, agent.host, until=self._world.now, node_id=agent.node_id)

    def receives(self, agent: Agent, message: m.LeaderMessage) -> None:
        if isinstance(message, m.Ended):
            self._ended_at.setdefault(agent.node_id, self._world.now)
            if message.outcome is not m.Outcome.REPLACED:
                self._on_verdict(message)

    def _on_verdict(self, verdict: m.Ended) -> None:
        if self.verdict_at is None:
            self.verdict_at = self._world.now
        if verdict not in self.verdicts:
            self.verdicts.append(verdict)
        if len(self.verdicts) > 1:
            if self._is_forgotten:
                self._give_up(ForgottenError(f"{verdict} comes after a verdict that is not on the endpoint"))
            self.fail(f"two verdicts: {self.verdicts}")

    def look_at_rounds(self, slow_s: float) -> None:
        """An agent stops its workers within a lease and a second of the start of a newer round.

        Its leader may have given it up a lease before it could know: the leader's messages still reached it, while its own
        were lost.
        """
        running = {agent.node_id: round_ for agent in self._running if (round_ := self.round_of(agent))}
        newest = max(running.values(), key=_FENCE, default=None)
        beside = {node_id for node_id, round_ in running.items() if round_ is not newest}
        for node_id in self._beside_since.keys() - beside:
            del self._beside_since[node_id]
        if newest is None or not beside:
            return
        endpoint, now = self._endpoint, self._world.now
        within_s = self.lease_s * 1.02 + 1.0 + 2 * slow_s
        for agent in self.agents:
            if agent.node_id not in beside:
                continue
            round_ = running[agent.node_id]
            # If the endpoint lost its data and the job began again there, agents find out from the endpoint. Where only
            # the store votes, nodes that are all connected to their leader continue without it.
            goes_on = endpoint.is_deaf(self._host_of_leader(agent) if agent.settings.has_elections else agent.host)
            if agent.is_frozen or goes_on:
                self._beside_since.pop(agent.node_id, None)
                continue
            since = self._beside_since.setdefault(agent.node_id, now)
            if now - since > within_s:
                self.fail(f"{agent} has run {round_} beside {newest}, which is newer, for {now - since:.1f} s")

    def _host_of_leader(self, agent: Agent) -> str:
        leader = agent.link._member.leader if agent.link is not None else None
        hosts = {each.node_id: each.host for each in self.agents}
        return agent.host if leader is None else hosts[leader.node_id]

    @property
    def _leaders(self) -> list[Coordination]:
        found = [coordination_of(agent) for agent in self.agents if agent.is_alive]
        return [each for each in found if each is not None]

    @property
    def _running(self) -> list[Agent]:
        return [agent for agent in self.agents if agent.alive and agent.group.phase == "running"]

    # Once faults have stopped.

    def round_of(self, agent: Agent) -> Round | None:
        return self._round_of.get(agent.node_id)

    def disagreement(self) -> str:
        """What keeps the living agents from being in one round or waiting for one; empty if nothing does."""
        living = [agent for agent in self.agents if agent.is_alive]
        if self.verdicts and living:
            deaf = not self._endpoint.is_up  # the endpoint is gone with node0, and so is the verdict
            return "" if deaf else f"{living} have not received the verdict"
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
        size = next(iter(round_.received.values())).ranks.group_world_size - len(round_.done)
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
        """Records the error in the world as well: a simulated process may catch what is raised inside it."""
        self._world.fail(error)
        raise error
