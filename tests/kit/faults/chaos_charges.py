"""Compares the charges of a job under fire, from its agents' event logs, with the rule in `kit.faults.charging`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from aelastic.rdzv.decisions.cause import CauseKind
from kit.faults.chaos import LEASE_S, Battlefield, Fault
from kit.faults.charging import EITHER, KILLED_LEAD_S, Loss, legal_charges

# How late agents on a busy machine notice events.
LATE_S = 0.25
HEARTBEAT_S = LEASE_S / 3 + LATE_S
# Faults that lose no node.  If etcd returns within a lease, the leader stays.
HARMLESS = ("worker_killed", "worker_raises", "etcd_restarted")
# Only these leave no doubt about which failure was reported first.
IN_ORDER = ("worker_killed", "worker_raises", "agent_killed")


@dataclass(frozen=True)
class Done:
    """A fault that was injected at a node and undone, on the monotonic clock."""

    fault: Fault
    index: int
    since: float
    until: float


@dataclass
class Round:
    """A round as its agents logged it."""

    number: int
    restarts: int
    began_at: float  # when the first of them knew of it
    ranks: dict[int, int] = field(default_factory=dict[int, int])  # by node
    named: set[int] = field(default_factory=set[int])  # ranks whose failure ended it
    ended_at: float = math.inf  # when an agent first logged that it ends for free

    def charges(self, after: Round, done: Sequence[Done], failures: Sequence[float]) -> frozenset[int]:
        """What its end may cost, given the round after it."""
        here = [each for each in done if each.since < after.began_at and self.began_at < each.until + 2 * LEASE_S]
        if any(each.fault.name == "all_reset" for each in here):
            return EITHER  # workers seem to fail by themselves, and connections of agents break
        losses = [loss for each in here for loss in self._losses(each, after)]
        return legal_charges(failures, losses, ended_at=self.ended_at, slack_s=LATE_S)

    def _losses(self, done: Done, after: Round) -> Iterator[Loss]:
        since, name = done.since - HEARTBEAT_S, done.fault.name
        is_gone = done.index in self.ranks.keys() - after.ranks.keys()
        match name:
            case _ if name in HARMLESS:
                return
            case "agent_killed" | "agent_terminated" if done.since < self.began_at - LATE_S:
                return
            case "agent_killed":
                yield Loss(since, done.since, done.index in self.ranks)
            case "agent_terminated":  # it may have reported its worker's failure first; then that is not a victim's
                yield Loss(since, done.since + LATE_S)
            case "agent_stopped" | "cut_off" | "mute":
                is_lost = is_gone and done.until > after.began_at
                resend_s = 0.0 if name == "agent_stopped" else 1.0
                if is_lost or done.until - done.since + HEARTBEAT_S + resend_s > LEASE_S:
                    yield Loss(since, done.since if is_lost else math.inf, is_lost, done.until + LEASE_S)
            case _:
                yield Loss(since, explains_until=done.until + LEASE_S)


def rounds_of(there: Battlefield) -> list[Round]:
    rounds = dict[int, Round]()
    for agent, index in zip(there.team.agents, there.places, strict=True):
        for event in _events(agent.folder):
            at, round_ = event["monotonic_ns"] / 1e9, rounds.get(event["round"])
            if event["event"] == "round_formed":
                restarts = event["restart_count"]
                round_ = rounds.setdefault(event["round"], Round(event["round"], restarts, at))
                assert round_.restarts == restarts, f"round {round_} has two restart counts\n{there.team.story}"
                round_.began_at = min(round_.began_at, at)
                round_.ranks[index] = event["first_rank"]
            elif event["event"] == "restarting" and round_ is not None:
                cause = event["decision"]["cause"]
                named = cause["kind"] == CauseKind.FAILURE
                round_.named |= {*cause["ranks"]} if named else set()
                round_.ended_at = round_.ended_at if named else min(round_.ended_at, at)
    return [rounds[number] for number in sorted(rounds)]


def _events(folder: Any) -> Iterator[dict[str, Any]]:
    for path in folder.glob("logs/*/events.jsonl"):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):  # the last line of an agent that was killed may be incomplete
                yield json.loads(line)


def check_charges(there: Battlefield, done: Sequence[Done], since: float, what: str) -> None:
    """Checks that each round that ended since some time has the cost of the rule, and names the right workers."""
    for round_, after in pairwise(rounds_of(there)):
        if after.began_at < since:
            continue
        failed = [(at, index) for at, index in there.failed if index in round_.ranks]
        failed = [(at, index) for at, index in failed if round_.began_at < at < after.began_at]
        legal, charged = round_.charges(after, done, [at for at, _ in failed]), after.restarts - round_.restarts
        rounds = f"{what}: {charged}, not of {sorted(legal)}; {round_}, then {after}"
        problem = f"{rounds}; failed: {failed}; done: {done}\n{there.team.story}"
        assert charged in legal, problem
        if all(each.fault.name in IN_ORDER for each in done):
            first = min((at for at, _ in failed), default=0.0) + KILLED_LEAD_S + LATE_S
            assert round_.named <= {round_.ranks[index] for at, index in failed if at <= first}, problem
