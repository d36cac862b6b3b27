"""The ledger of all rounds, and the nodes whose hosts it cordons.

Cordoned nodes stay with the job, but do not take part in rounds while there are enough others.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.cause import Cause, CauseKind
from aelastic.rdzv.leader.coordinator_events import Send
from aelastic.rdzv.leader.roster import Roster
from aelastic.rdzv.ledger import Ledger
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r


@dataclass(slots=True)
class Cordons:
    """The cordons of one job."""

    ledger: Ledger = field(default_factory=Ledger)  # of all rounds before the last, on this leader's clock
    number: int = 0  # how often a node was cordoned or uncordoned
    # By node id: those that were kept out of a round because their hosts are cordoned.
    _nodes: dict[str, m.Node] = field(default_factory=dict[str, m.Node])

    def remember(self, ledger: Ledger) -> None:
        """Keeps the ledger as it is at the end of the last round."""
        self.ledger = ledger

    def take(self, roster: Roster, now: float, *, keep: int) -> list[Send]:
        """Keeps cordoned nodes that are ready out of the round, as long as `keep` others are left."""
        absent, sends = self.ledger.absent(now), []
        self._nodes = {node_id: node for node_id, node in self._nodes.items() if node_id in roster.members}
        for node in [*roster.ready.values()] if absent else []:
            if (found := absent.get(node.host)) is not None and len(roster.ready) > keep:
                self._nodes[node.node_id] = node
                roster.put(node.replace(unfit=f"cordoned: {found.why}"), m.NodePhase.READY)
                again_s = max(0.0, found.at + found.for_s - now)
                sends.append(Send(node.node_id, self._cordoned(found.why, again_s)))
        return sends

    def _cordoned(self, why: str, again_s: float) -> r.Cordoned:
        self.number += 1
        return r.Cordoned(why, again_s, self.number)

    def call_back(self, roster: Roster, least: int, leaving: Container[str]) -> None:
        """Uses cordoned nodes after all if there are too few without them, but not those that leave."""
        if self._nodes and len(roster.ready) + len(roster.stopping) < least:
            nodes, self._nodes = self._nodes, {}
            for node_id, node in nodes.items():
                is_here = node_id in roster.members and roster.members[node_id].is_left_behind
                if is_here and node_id not in leaving:
                    roster.put(node, m.NodePhase.READY)

    def ask(self, ask: r.Ask, roster: Roster, limits: tuple[int, int], now: float) -> tuple[list[Send], Cause | None]:
        """Cordons or uncordons a host.  Returns the answers, and why a round with its nodes ends.

        Args:
            ask: the request.
            roster: the nodes.
            limits: the minimum and the maximum number of nodes in a round.
            now: the time.
        """
        nodes = {i: each.node for i, each in roster.members.items() if ask.target in {i, each.node.host}}
        ledger, hosts = self.ledger, {node.host for node in nodes.values()} or {ask.target}
        (host,) = hosts if len(hosts) == 1 else {""}
        least, most = limits
        if most == 1:
            return [Send(ask.node_id, r.Answer(ask.ask_id, False, r.ONE_NODE))], None
        known, why = {each.host for each in ledger.excluded}, ask.reason or "on request"
        if not host or not (nodes or host in known):
            return [Send(ask.node_id, r.Answer(ask.ask_id, False, f"no node {ask.target}"))], None
        if ask.verb is r.Verb.UNCORDON:
            self.ledger, answer = ledger.include(host), f"{host} is uncordoned"
            cordoned = self._nodes.keys() & nodes.keys()  # those of them that are still with the job
            sends = [Send(node_id, self._cordoned("", 0.0)) for node_id in sorted(cordoned)]
            return [Send(ask.node_id, r.Answer(ask.ask_id, True, answer)), *sends], None
        if is_new := host not in ledger.absent(now):
            self.ledger = ledger.exclude(host, why, now)
        absent = self.ledger.absent(now)
        cause = Cause(CauseKind.HOST_CORDONED, (host,), within_s=absent[host].for_s, detail=why)
        answer = wording.text_of(cause)
        runs = nodes.keys() & set(roster.connected_participants())
        if is_kept := sum(each.node.host not in absent for each in roster.members.values()) < least:
            answer += "; there are too few now, so it stays"
        ends_round = is_new and runs and not is_kept
        return [Send(ask.node_id, r.Answer(ask.ask_id, True, answer))], cause if ends_round else None
