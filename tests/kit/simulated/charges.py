"""What the end of a simulated round may cost: faults at their true times, as losses for the rule in `kit.faults.charging`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from kit.faults.charging import EITHER, KILLED_LEAD_S, Loss, legal_charges
from kit.simulated.endpoint import ENDPOINT
from kit.simulated.world import RESEND_MAX_S

# How long messages and timers take when none is late.
SLACK_S = 0.05
# Clocks differ by one percent.
DRIFT = 1.03
# A node that reports a failure again adds its age, by a clock that differs from others by at most two percent.  Victims
# fail at least 20 ms after the cause, so after this time the order of failures is uncertain.
ORDERED_S = 1.0


@dataclass(eq=False)
class Fault:
    """Something that happened to a node, to its connections or to its clock.

    Args:
        kind: `end` of its agent, `break` of its connection, `silence` of a node or of a path through the network, or
            `clock` if its clock was put ahead or stood still.
        since: when it began; `until`: when it was over.
        host: where it happened.
        to: for a path, the other end.
        node_id: the agent.
        is_certain: the round that the node takes part in has lost it.
        is_dark: no kernel reports it; for a connection, not before one of its ends writes.
    """

    kind: str
    since: float
    until: float = math.inf
    host: str = ""
    to: str = ""
    node_id: str = ""
    is_certain: bool = False
    is_dark: bool = False

    def was_at(self, time: float) -> bool:
        return self.since <= time <= self.until


@dataclass
class Charges:
    """The record of faults, and what the end of a round may cost according to it.

    Args:
        lease_s: silence after which a node is lost.
        late_s: the longest delay of a message.
    """

    lease_s: float
    late_s: float = 0.0
    faults: list[Fault] = field(default_factory=list[Fault])
    judged: Counter[frozenset[int]] = field(
        default_factory=Counter[frozenset[int]]
    )  # ends with failures, by their legal charges

    @property
    def slack_s(self) -> float:
        return SLACK_S + self.late_s

    @property
    def _heartbeat_s(self) -> float:
        return self.lease_s / 3 * DRIFT + self.slack_s

    def add(self, kind: str, since: float, host: str, to: str = "", **more: Any) -> None:
        self.faults.append(Fault(kind, since, host=host, to=to, **more))

    def is_over(self, kind: str, now: float, host: str, to: str = "") -> None:
        for fault in self.faults:
            if (fault.kind, fault.host, fault.to) == (kind, host, to):
                fault.until = min(fault.until, now)

    def doubt_breaks(self, node_id: str, now: float) -> None:
        """The leader may not know of this node's last breaks yet: it notices them when it writes."""
        for fault in self.faults:
            if (fault.kind, fault.node_id) == ("break", node_id) and now - fault.since <= self._heartbeat_s:
                fault.is_certain = False

    def legal(self, last: Any, next_: Any) -> frozenset[int]:
        """What the end of round `last` may cost, given the round that follows it."""
        failures = [at for at, _, _ in last.failures if at < next_.began_at]
        faults = [fault for fault in self.faults if self._concerns(fault, last, next_)]
        if last.has_late_failure:
            return EITHER  # the next round may have been decided already
        if any(fault.kind == "clock" for fault in faults):
            return EITHER
        if len(last.received) < last.common[-1]:
            return EITHER  # one of its nodes was lost before it was notified
        still = [fault for fault in faults if fault.kind == "silence" and not fault.to]
        if any(fault.host == host and fault.was_at(at) for fault in still for at, host, _ in last.failures):
            return EITHER  # a frozen agent dates a failure by when it thaws
        tellers = {_host(each) for each in last.received.keys() & next_.received.keys()}
        if last.token != next_.token and not tellers & {host for _, host, _ in last.failures} and failures:
            return EITHER  # nodes that failed are gone, and so is the leader that they reported to
        losses = [loss for fault in faults for loss in self._losses(fault, faults, last, next_)]
        is_led_on = last.token == next_.token or any(
            fault.kind == "end" and fault.node_id == last.leader_id for fault in faults
        )
        if not is_led_on:
            losses.append(Loss())  # another agent leads, and nodes that do not find it in time are lost
        has_lost_any = bool(last.received.keys() - next_.received.keys())
        if has_lost_any and self._heartbeat_s + self.late_s >= self.lease_s:
            losses.append(Loss())  # its welcome was late, and so was the first heartbeat, which follows it
        if not failures and last.token != next_.token and last.named is not None:
            return EITHER  # the old leader had named a failure, though it may have learned of a loss after that
        if not failures and any(_is_gone(fault, last, next_) for fault in faults if fault.until <= next_.began_at):
            return EITHER  # a node that is reachable again has not reported yet that it stopped its workers
        ended_at = math.inf if last.named is not None else last.ended_at
        return legal_charges(failures, losses, ended_at=ended_at, slack_s=self.slack_s)

    def legal_names(self, last: Any, leader_id: str, now: float) -> set[tuple[str, int]] | None:
        """Which worker may be named if a failure ended a round, as host and rank; `None` if that is uncertain."""
        here = replace(last, leader_id=leader_id, began_at=now)
        is_uncertain = any(
            fault.kind not in {"end", "break"} and self._concerns(fault, last, here) for fault in self.faults
        )
        if (
            is_uncertain
            or self.late_s
            or any(self._is_unheard(fault, last) for fault in self.faults if self._concerns(fault, last, here))
        ):
            return None
        first = min((at for at, _, _ in last.failures), default=now)
        if now - first > ORDERED_S:
            return None
        return {(host, rank) for at, host, rank in last.failures if at <= first + KILLED_LEAD_S + self.slack_s}

    def _is_unheard(self, end: Fault, last: Any) -> bool:
        """Whether an agent ended unnoticed, before it could report what it knew: to others it falls silent."""
        if end.kind != "end":
            return False
        # It had not reconnected yet, or was switched off while it examined a worker that had just failed.
        breaks = [each for each in self.faults if each.kind == "break" and each.node_id == end.node_id]
        failures = [at for at, host, _ in last.failures if host == end.host and end.is_dark]
        if any(0 <= end.since - at <= self.slack_s for at in [each.since for each in breaks] + failures):
            return True
        # Or it did not know that its connection had broken: it notices when it writes, at the next heartbeat at the latest.
        return any(each.is_dark and 0 <= end.since - each.since <= self._heartbeat_s for each in breaks)

    def has_silent_break(self, last: Any) -> bool:
        """Whether a connection broke since the round's first failure, unnoticed by either end until it writes."""
        first = min((at for at, _, _ in last.failures), default=math.inf) - self.slack_s
        breaks = [fault for fault in self.faults if fault.kind == "break" and fault.is_dark]
        return any(fault.node_id in last.received and fault.since >= first for fault in breaks)

    def _concerns(self, fault: Fault, last: Any, next_: Any) -> bool:
        """Whether a fault may have affected the end of a round."""
        lingers_s = {"silence": RESEND_MAX_S, "clock": self.lease_s, "end": 2 * self.lease_s}.get(
            fault.kind, 0.0
        ) + self.slack_s
        if fault.since > next_.began_at or fault.until + lingers_s < last.began_at:
            return False
        leaders = {_host(last.leader_id), _host(next_.leader_id)}
        nodes = {_host(node_id) for node_id in last.received} | leaders
        if fault.to:
            ends = {fault.host, fault.to}
            return bool(ends & leaders and ends <= nodes) or (ENDPOINT in ends and last.token != next_.token)
        return fault.node_id in last.received or fault.node_id in {last.leader_id, next_.leader_id}

    def _losses(self, fault: Fault, faults: list[Fault], last: Any, next_: Any) -> list[Loss]:
        since, node_id = fault.since - self._heartbeat_s, fault.node_id
        is_before_end = fault.since <= last.ended_at
        match fault.kind:
            case "end":
                silences = [each for each in faults if each.kind == "silence" and fault.host in {each.host, each.to}]
                has_contact = not any(each.since <= fault.since <= each.until + RESEND_MAX_S for each in silences)
                is_own = any(
                    host == fault.host for _, host, _ in last.failures
                )  # its failure may have been reported before
                # The leader learns only a lease later that a host was switched off.
                known_at = fault.since + self.lease_s * fault.is_dark
                goes_on_at = self._goes_on_at(last.leader_id, known_at)
                if goes_on_at > known_at:  # it restarts the lease
                    known_at = goes_on_at + self.lease_s * fault.is_dark
                is_first = all(known_at < at for at, _, _ in last.failures)
                # A leader that is lost after it reported the failure takes with it what only it knew.
                is_kept = last.token == next_.token or node_id == last.leader_id or is_first
                is_noticed = node_id in last.received and node_id not in next_.received
                # If a leader that reported the failure is switched off, others may notice only when they write to it,
                # long after that.
                is_late = fault.is_dark and node_id == last.leader_id and last.named is not None
                is_certain = fault.is_certain and is_noticed and has_contact and is_kept and not is_own and not is_late
                # A leader that survived would have answered the failure: its successor does not know that the old one
                # was unsure of its term.
                is_unanswered = node_id == last.leader_id and last.token != next_.token and last.named is None
                # A frozen leader dates a report from another node by when it thaws.
                is_report = node_id != last.leader_id
                reported_at = self._goes_on_at(last.leader_id, fault.since) if is_report else fault.since
                return [Loss(-math.inf if is_unanswered else since, reported_at + self.late_s, is_certain)]
            case "break":
                # A frozen leader dates failures in the meantime by when it learns of them, long after the break.
                still = [each for each in faults if each.kind == "silence" and each.host == _host(last.leader_id)]
                is_late = any(each.was_at(at) for each in still for at, _, _ in last.failures)
                # So does a leader that learns of one late because the path from the failing node is cut.
                to = _host(last.leader_id)
                cuts = [each for each in faults if each.kind == "silence" and each.to == to]
                is_late |= any(each.was_at(at) for each in cuts for at, host, _ in last.failures if host == each.host)
                # If the leader is replaced before it has answered, the next one never learns of a break that is over.
                is_kept = last.token == next_.token
                # A break before the round began may have ended the previous round.
                is_of_round = node_id in last.received and fault.since >= last.began_at and is_before_end
                # While the endpoint is silent nothing is decided, and the node may return before the break has an effect.
                is_undecided = any(each.kind == "endpoint" and each.was_at(fault.since) for each in self.faults)
                is_certain = fault.is_certain and is_of_round and not is_late and is_kept and not is_undecided
                near = Loss(fault.since, fault.since + self.late_s, is_certain, fault.since)
                return [near, Loss(since, explains_until=fault.since + self._heartbeat_s)]
            case "reset":
                return [Loss(since, explains_until=fault.until + self._heartbeat_s)]
            case _ if self._is_short(fault):
                return []
            case _:
                # A spare may have replaced a node that fell silent after the end.
                is_gone = _is_gone(fault, last, next_) and is_before_end
                is_lost = is_gone and fault.until > next_.began_at and last.token == next_.token
                until = fault.since + self.slack_s if is_lost else math.inf
                return [Loss(since, until, is_lost, fault.until + RESEND_MAX_S + self.lease_s)]

    def _goes_on_at(self, node_id: str, time: float) -> float:
        """When a node that is frozen at some time thaws; that time itself if the node is not frozen."""
        silences = [fault for fault in self.faults if fault.kind == "silence" and fault.node_id == node_id]
        return max((fault.until for fault in silences if fault.was_at(time)), default=time)

    def _is_short(self, fault: Fault) -> bool:
        """Whether a silence is too short to lose a node: a message arrives in time again."""
        resend_s = RESEND_MAX_S if fault.to else 0.0
        return fault.until - fault.since + self._heartbeat_s + resend_s < self.lease_s


def _is_gone(fault: Fault, last: Any, next_: Any) -> bool:
    """Whether a node that fell silent has no part in the next round."""
    gone = last.received.keys() - next_.received.keys()
    ways = {(_host(each), _host(last.leader_id)) for each in gone}
    return fault.kind == "silence" and (fault.node_id in gone or (fault.host, fault.to) in ways)


def _host(node_id: str) -> str:
    return node_id.partition("#")[0]
