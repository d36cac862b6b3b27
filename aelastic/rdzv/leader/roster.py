"""Nodes that a leader knows of: what each does, which take part in the round, which were lost.

Bookkeeping without decisions: `coordinator.py` writes and reads it.  The nodes in each phase are kept up to date as
nodes change, so that an event of one node costs the same in a job of two nodes and of four thousand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from aelastic.base.record import Record
from aelastic.rdzv.decisions.cause import Cause, CauseKind, first_of, listed
from aelastic.rdzv.decisions.decision import Decision, DecisionKind
from aelastic.rdzv.leader.coordinator_events import Send
from aelastic.rdzv.leader.drain import Crew
from aelastic.rdzv.leader.job_state import Round, round_of
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.messages import NodePhase
from aelastic.rdzv.protocol.ranks import order_nodes
from aelastic.rdzv.settings import JOIN_TIMEOUT_S, LAST_CALL_TIMEOUT_S, SETTLE_TIME_S, RendezvousSettings

SUCCEEDED = m.Ended(m.Outcome.SUCCEEDED, Decision(DecisionKind.SUCCEEDED, Cause(CauseKind.ALL_SUCCEEDED)))


@dataclass(slots=True)
class Member:
    """A node that is connected, or was a moment ago."""

    node: m.Node
    phase: NodePhase
    is_left_behind: bool = False  # it stops the workers of a round that continued without it; no round waits for it

    @property
    def kind(self) -> tuple[bool, m.Starts]:
        """Whether it waits, and how its workers start."""
        return self.phase is NodePhase.READY, self.node.starts


@dataclass(slots=True)
class Roster:
    """Nodes of a job, as its leader sees them."""

    reported: dict[str, m.Status] = field(default_factory=dict[str, m.Status])  # the last status of each node
    members: dict[str, Member] = field(default_factory=dict[str, Member])  # by node id, in the order of the last change
    # Members that are not left behind, also in that order; how many members wait or not, by how their workers start.
    _of: dict[NodePhase, dict[str, m.Node]] = field(default_factory=lambda: {phase: {} for phase in NodePhase})
    _starts: Counter[tuple[bool, m.Starts]] = field(default_factory=Counter[tuple[bool, m.Starts]])
    # Nodes of the last round by group rank, each with its assignment.
    participants: dict[str, m.Assigned] = field(default_factory=dict[str, m.Assigned])
    agent_of_rank: dict[int, str] = field(
        default_factory=dict[int, str]
    )  # --node-rank to the node that joined with it last
    newest_round: int = 0  # that a node has reported, perhaps of another log: numbers rise for each node
    fence: int = 0  # of the last round, which tells it from another one of the same number
    term: int = 0  # of the leadership that begins rounds; `leader.py` keeps it
    lost_hosts: dict[str, str] = field(default_factory=dict[str, str])  # of the last round: host to reason
    departed: set[int] = field(default_factory=set[int])  # group ranks of the last round that finished and have left
    opted_in: set[str] = field(default_factory=set[str])  # nodes whose workers can leave the last round in place
    broken: set[str] = field(default_factory=set[str])  # members whose connection broke, except nodes left behind

    def put(self, node: m.Node, phase: NodePhase) -> None:
        """Notes what a node does; one that is ready but unfit waits outside."""
        if node.unfit and phase is NodePhase.READY:
            self.leave_behind(node)
            self.lost_hosts[node.host] = f"unfit: {node.unfit}"
            return
        self._replace(Member(node, phase))
        self._of[phase][node.node_id] = node

    def leave_behind(self, node: m.Node) -> bool:
        """Leaves a node behind; returns whether it was a member that was not left behind yet."""
        before = self.members.get(node.node_id)
        self._replace(Member(node, NodePhase.STOPPING, is_left_behind=True))
        return before is not None and not before.is_left_behind

    def leave_all_behind(self, node_ids: Iterable[str]) -> None:
        for node_id in node_ids:
            self.leave_behind(self.members[node_id].node)

    @property
    def is_awaited(self) -> bool:
        """Whether nodes stop their workers, or may come back."""
        return bool(self.stopping or self.broken)

    def on_broken(self, node_id: str) -> bool:
        """The connection of a node broke.  Returns whether that matters to the coordinator."""
        member = self.members.get(node_id)
        if member is None or member.is_left_behind:
            return False
        self.broken.add(node_id)
        return True

    def _replace(self, member: Member) -> None:
        self.remove(member.node.node_id)
        self.members[member.node.node_id] = member
        self._starts[member.kind] += 1

    def note_report(self, status: m.Status) -> None:
        """Notes the status that a node has sent."""
        self.reported[status.node.node_id] = status

    def forget(self, node_id: str) -> Member | None:
        """Forgets a node that is gone; returns what it was."""
        self.reported.pop(node_id, None)
        return self.remove(node_id)

    def remove(self, node_id: str) -> Member | None:
        member = self.members.pop(node_id, None)
        self.broken.discard(node_id)
        if member is not None:
            self._starts[member.kind] -= 1
            self._of[member.phase].pop(node_id, None)
        return member

    def on_connected(self, node: m.Node) -> str | None:
        """A node is connected, and has its --node-rank.  Returns the member that had that rank, if it is another."""
        self.broken.discard(node.node_id)
        if node.preferred_rank is None:
            return None
        old, self.agent_of_rank[node.preferred_rank] = self.agent_of_rank.get(node.preferred_rank), node.node_id
        return old if old != node.node_id and old in self.members else None

    def has_asked(self, node_id: str, ask_id: str) -> bool:
        """Returns whether a node's request is in its status."""
        status = self.reported.get(node_id)
        return status is not None and any(each.ask_id == ask_id for each in status.asks)

    def hosts_without(self, leaving: Collection[str]) -> list[str]:
        """Returns the hosts of the nodes of the round, and of those that wait, except those that leave."""
        return [self.members[i].node.host for i in self._able() if i not in leaving]

    def _able(self) -> list[str]:
        """Returns the nodes of the last round, and those that wait."""
        return list(dict.fromkeys([*self.connected_participants(), *self.ready]))

    def crew(self, round_: int, *, is_closed: bool) -> Crew:
        """Returns the nodes that a request may concern.

        Args:
            round_: the running round; 0 if none runs.
            is_closed: the job is over.
        """
        hosts = {} if is_closed else {node_id: member.node.host for node_id, member in self.members.items()}
        nodes = tuple(self.connected_participants()) if round_ else ()
        return Crew(hosts, nodes, round_, self.term, tuple(self._able()))

    def passed_on(self, query: r.Fetch | r.Fetched, *, is_new: bool) -> list[tuple[str, r.Show | r.Shown | r.Answer]]:
        """Returns what to send about a query, and to whom: to nodes that must show something, or to its asker.

        Args:
            query: a node's query.
            is_new: nodes of the round have yet to find this coordinator.
        """
        if isinstance(query, r.Fetched):
            return [(query.asker, r.Shown(query))] if query.asker in self.members else []
        asked = tuple(self.members) if not query.target else tuple(self.members.keys() & {query.target})
        text = r.STILL_COMING if is_new else "" if asked else f"no node {query.target}"
        answer = r.Answer(query.ask_id, bool(asked), text, asked)
        return [(query.node_id, answer), *((node_id, r.Show(query)) for node_id in asked)]

    @property
    def ready(self) -> Mapping[str, m.Node]:
        """The nodes that wait for the next round; those that wait while a round runs have no part in it."""
        return self._of[NodePhase.READY]

    @property
    def stopping(self) -> Mapping[str, m.Node]:
        """The nodes whose workers must end before the next round begins."""
        return self._of[NodePhase.STOPPING]

    @property
    def busy(self) -> Mapping[str, m.Node]:
        """The nodes whose workers run."""
        return self._of[NodePhase.BUSY]

    @property
    def finished(self) -> Mapping[str, m.Node]:
        """The nodes whose workers have succeeded."""
        return self._of[NodePhase.FINISHED]

    @property
    def are_preparing(self) -> bool:
        """Whether fork servers of waiting nodes still import."""
        return self._starts[True, m.Starts.PREPARING] > 0

    @property
    def prepared(self) -> int:
        """How many nodes wait without preparing."""
        return len(self.ready) - self._starts[True, m.Starts.PREPARING]

    @property
    def start_cold(self) -> bool:
        """Whether workers of any node start cold."""
        return self._starts[True, m.Starts.COLD] > 0 or self._starts[False, m.Starts.COLD] > 0

    def set_starts(self, node_id: str, starts: m.Starts) -> bool:
        """Notes how the workers of a node will start; returns whether the node waits."""
        if node_id not in self.ready:
            return False
        member = self.members[node_id]
        self._starts[member.kind] -= 1
        member.node = self._of[NodePhase.READY][node_id] = member.node.replace(starts=starts)
        self._starts[member.kind] += 1
        return True

    def start_ahead(self, nodes: Iterable[str]) -> list[Send]:
        """Makes nodes prepare whose workers do not wait for the round yet; returns what to send them."""
        waiting = [i for i in nodes if i in self.ready and self.ready[i].starts is not m.Starts.READY]
        for node_id in waiting:
            self.set_starts(node_id, m.Starts.PREPARING)
        return [Send(node_id, m.StartAhead(self.reported[node_id].starts)) for node_id in waiting]

    def note_round(self, round_: int) -> None:
        """A node has reported a round."""
        self.newest_round = max(self.newest_round, round_)

    def next_round(self, last: int) -> int:
        """Returns the number of the next round, above each known one."""
        self.newest_round = max(last, self.newest_round) + 1
        return self.newest_round

    @property
    def has_finished(self) -> bool:
        """Whether a node of the last round has done its work."""
        return bool(self.departed or self.finished)

    def assign(self, number: int, restart_count: int, limits: tuple[int, int], own: str) -> Round:
        """Begins a round of the nodes that are ready: their ranks, and where their workers meet.

        Nodes that are preparing take part in the first round, and in later ones if there are too few without them.

        Args:
            number: of the round.
            restart_count: the count that its workers are given.
            limits: the minimum and the maximum number of nodes.
            own: the node of the leader's agent.
        """
        (min_nodes, max_nodes), ready = limits, self.ready
        if self.participants and self.prepared >= min_nodes:
            ready = {i: node for i, node in ready.items() if node.starts is not m.Starts.PREPARING}
        candidates = {node_id: (node.preferred_rank, node.host) for node_id, node in ready.items()}
        order = order_nodes(candidates, tuple(self.participants), max_nodes)
        nodes = [ready[node_id] for node_id in order]
        round_ = round_of(number, self.term, nodes, own)
        for node in nodes:
            self.put(node, NodePhase.BUSY)
        self.take_round(round_, restart_count)
        self.opted_in = {node.node_id for node in nodes if node.starts is m.Starts.READY}
        return round_

    def take_round(self, round_: Round, restart_count: int, departed: Iterable[int] = ()) -> None:
        """Makes this round the last one."""
        self.participants, self.departed = round_.assigned(restart_count), set(departed)
        self.opted_in, self.lost_hosts, self.fence = set(), {}, round_.fence

    def begin_term(self, term: int) -> None:
        """This leader has a newer term, which its next rounds will have."""
        self.term = term

    def opt_in(self, node_id: str) -> None:
        """The workers of a node can leave the round in place."""
        self.opted_in.add(node_id)

    @property
    def have_all_opted_in(self) -> bool:
        """Whether all workers of the last round can leave it in place, except those of lost nodes, which are gone."""
        connected = self.connected_participants()
        return bool(connected) and self.opted_in.issuperset(connected) and not self.has_finished

    @property
    def can_all_leave(self) -> bool:
        """Whether all workers can leave in place, while the round runs and so has lost no node.  O(1)."""
        return 0 < len(self.opted_in) == len(self.participants) and not self.has_finished

    def note_loss(self, host: str, reason: str) -> None:
        """Notes that a host of the last round was lost before its workers had finished."""
        self.lost_hosts[host] = reason

    def stop_participants(self) -> list[str]:
        """The last round is over.  Returns the nodes that have workers to stop."""
        nodes = self.with_workers
        for node in nodes:
            self.put(node, NodePhase.STOPPING)
        return [node.node_id for node in nodes]

    def give_up_stopping(self) -> list[m.Node]:
        """Leaves behind, and returns, the nodes that fail to stop their workers."""
        nodes = list(self.stopping.values())
        for node in nodes:
            self.leave_behind(node)
            self.lost_hosts[node.host] = "its workers do not stop"
        return nodes

    @property
    def with_workers(self) -> list[m.Node]:
        """Nodes of the last round that have workers, or are stopping them."""
        members = (self.members.get(node_id) for node_id in self.participants)
        return [
            member.node
            for member in members
            if member is not None and member.phase is not NodePhase.READY and not member.is_left_behind
        ]

    def depart(self, node_id: str) -> int:
        """A node that had finished has left.  Returns its group rank."""
        rank = list(self.participants).index(node_id)
        self.departed.add(rank)
        return rank

    def connected_participants(self) -> list[str]:
        return [node_id for node_id in self.participants if node_id in self.members]

    def validate(self, *, is_forming: bool, is_running: bool) -> None:
        failed = self._of[NodePhase.FAILED]
        workers, is_over = self.busy or failed or self.finished, self.stopping or failed
        assert not (is_forming and workers), "before the next round, all workers of the last one are being stopped"
        assert not (is_running and is_over), "a round that is over does not run"
        assert not (is_running and self.ready.keys() & self.participants.keys()), "nodes that run do not wait"
        for phase, nodes in self._of.items():
            tracked = [i for i, each in self.members.items() if each.phase is phase and not each.is_left_behind]
            assert list(nodes) == tracked, "what nodes do is what their members do, apart from those left behind"
            assert all(node is self.members[i].node for i, node in nodes.items()), "a node equals that of its member"
        assert +self._starts == Counter(each.kind for each in self.members.values()), "each start is counted"
        assert self.broken <= self.members.keys(), "a node that is gone does not come back"
        for node_id, member in self.members.items():
            assert member.node.node_id == node_id, "a node is found by its id"
            if member.is_left_behind:
                assert member.phase is NodePhase.STOPPING, "a node that is left behind stops its workers"
            elif member.phase is not NodePhase.READY:
                assert node_id in self.participants, "only nodes that are left behind have workers of another round"


def some_of(names: Collection[str]) -> str:
    """Returns as many names as fit on one line of a log."""
    return listed(first_of(names), len(names)) or "none"


def replaced_by(node: m.Node) -> m.Ended:
    """Returns how an agent ends after another one has joined with its node rank."""
    assert node.preferred_rank is not None, "agents replace each other by it"
    cause = Cause(CauseKind.REPLACED, (node.host,), (node.preferred_rank,))
    return m.Ended(m.Outcome.REPLACED, Decision(DecisionKind.REPLACED, cause))


def joined(hosts: Collection[str]) -> Cause:
    """Returns the cause that nodes on these hosts joined."""
    return Cause.of_hosts(CauseKind.NODES_JOINED, hosts)


def hosts_of(nodes: Mapping[str, m.Node]) -> list[str]:
    return [node.host for node in nodes.values()]


class RoundRules(Record):
    """How many nodes a round needs and takes, and how long it waits for them."""

    min_nodes: int
    max_nodes: int
    last_call_timeout_s: float = LAST_CALL_TIMEOUT_S
    join_timeout_s: float = JOIN_TIMEOUT_S
    settle_time_s: float = SETTLE_TIME_S  # between the first newcomer of a running round and its interruption
    drain_wait_s: float = 0.0  # for nodes that replace those that have left a round in order
    admit_s: float = 0.0  # how long newcomers wait for all ranks to save; 0: they don't
    remote_requests: bool = True  # other nodes may make requests

    @property
    def limits(self) -> tuple[int, int]:
        return self.min_nodes, self.max_nodes

    def spare_text(self, *, has_finished: bool) -> str:
        """Returns what to send a node for which the running round has no place."""
        if has_finished:
            return "standby: another node has finished already; this node joins only if the job restarts"
        return f"all {self.max_nodes} places are taken: this node is a spare, and replaces the next that is lost"

    def gave_up(self, hosts: Sequence[str]) -> str:
        return (
            f"the workers of {some_of(hosts)} have not ended within {self.join_timeout_s:g} s: continuing without them"
        )

    def refusal(self, ask: r.Ask) -> str:
        """Returns why a node's request is refused; empty if it is not.  It may always drain itself, or cancel that."""
        is_own = ask.verb in {r.Verb.DRAIN, r.Verb.CANCEL} and ask.target in {"", ask.node_id}
        return (
            ""
            if self.remote_requests or is_own
            else "the leader's node refuses requests from other nodes (--no-remote-requests)"
        )

    @property
    def least_left(self) -> int:
        """How many nodes a drain must leave for the job to continue; one is enough if it waits for others."""
        return 1 if self.drain_wait_s else self.min_nodes

    def too_few(self, cause: Cause, hosts: Sequence[str]) -> m.Ended | None:
        """Returns how the job ends if too few nodes are left after a drain.  If none is left, nobody needs to know."""
        if not 0 < len(hosts) < self.least_left:
            return None
        return self._too_few(DecisionKind.TOO_FEW_LEFT, cause, hosts)

    def timed_out(self, hosts: Sequence[str], *, is_refill: bool) -> m.Ended:
        within_s = self.drain_wait_s if is_refill else self.join_timeout_s
        return self._too_few(DecisionKind.TOO_FEW_JOINED, joined(hosts), hosts, within_s)

    def _too_few(self, kind: DecisionKind, cause: Cause, hosts: Sequence[str], within_s: float = 0.0) -> m.Ended:
        decision = Decision(kind, cause, len(hosts), self.min_nodes, within_s=within_s, hosts=first_of(hosts))
        return m.Ended(m.Outcome.TIMED_OUT, decision)

    @classmethod
    def of(cls, settings: RendezvousSettings) -> RoundRules:
        times = settings.last_call_timeout_s, settings.join_timeout_s, settings.settle_time_s
        asked = settings.drain_wait_s, settings.admit_s, settings.remote_requests
        return cls(settings.min_nodes, settings.max_nodes, *times, *asked)
