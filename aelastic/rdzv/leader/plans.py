"""The plan of each node: everything that the leader has decided about it.

A decision changes the plans of the nodes that it concerns.  A node that reconnects gets its whole plan again, so
nothing that it has missed needs a special case.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import assert_never

from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r

ANSWERS_MAX = 64  # of one node; it has fewer requests open at a time


@dataclass(slots=True)
class Plans:
    """Plans by node.

    Args:
        term: the term of the leader that they come from.
        lease_s: the job's lease.
    """

    term: int
    lease_s: float
    _plans: dict[str, m.Plan] = field(default_factory=dict[str, m.Plan])
    # When the notice in a node's plan was decided, and when its cordon was: both contain a remaining time.
    _notice_at: dict[str, float] = field(default_factory=dict[str, float])
    _cordoned_at: dict[str, float] = field(default_factory=dict[str, float])
    _changed: dict[str, None] = field(default_factory=dict[str, None])  # nodes with an unsent plan
    _unread: set[str] = field(default_factory=set[str])  # nodes that may not have read yet which round they are in

    @property
    def empty(self) -> m.Plan:
        """The plan of a node about which nothing is decided: it waits."""
        return m.Plan(self.term, self.lease_s)

    def of(self, node_id: str, now: float) -> m.Plan:
        """Returns a node's plan as it must be sent now."""
        plan = self._plans.get(node_id) or self.empty
        if plan.notice is not None:
            left_s = plan.notice.kill_s - (now - self._notice_at[node_id])
            plan = plan.replace(notice=plan.notice.replace(kill_s=max(0.0, left_s)))
        if plan.cordoned is not None:
            left_s = plan.cordoned.again_s - (now - self._cordoned_at[node_id])
            plan = plan.replace(cordoned=plan.cordoned.replace(again_s=max(0.0, left_s)))
        return plan

    def change(self, node_id: str, decision: m.LeaderMessage, now: float) -> None:
        """Makes a decision part of a node's plan."""
        before = self._plans.get(node_id) or self.empty
        after = changed(before, decision)
        if isinstance(decision, m.Assigned):
            self._unread.add(node_id)
        elif isinstance(decision, m.Interrupted) and node_id not in self._unread:
            after = after.replace(assigned=None)  # it has read of that round
        if after == before:
            return
        self._plans[node_id] = after
        self._changed[node_id] = None
        if isinstance(decision, r.Notice):
            self._notice_at[node_id] = now
        elif isinstance(decision, r.Cordoned):
            self._cordoned_at[node_id] = now

    def on_read(self, node_id: str, asks: Container[str]) -> None:
        """A node has reported: any answer that it does not wait for has been read."""
        plan = self._plans.get(node_id)
        if plan is not None and plan.answers:
            answers = tuple(each for each in plan.answers if each.ask_id in asks)
            self._plans[node_id] = plan.replace(answers=answers)

    def send(self, node_id: str) -> None:
        """Makes sure that a node is sent its plan once more."""
        self._changed[node_id] = None

    def send_again(self, node_id: str, *, is_waiting: bool = False) -> None:
        """A node has a new connection, or has reported on it; one that waits is in no round."""
        plan = self._plans.get(node_id)
        if plan is not None and is_waiting:
            self._plans[node_id] = plan.replace(assigned=None)
        self._changed[node_id] = None
        self._unread.add(node_id)

    def on_sent(self, node_id: str) -> None:
        """A node was sent its whole plan."""
        self._unread.discard(node_id)

    def forget(self, node_id: str) -> None:
        """A node is gone: if it comes back, its report decides what it must do."""
        for book in (self._plans, self._notice_at, self._cordoned_at, self._changed):
            book.pop(node_id, None)
        self._unread.discard(node_id)

    def begin_term(self, term: int) -> None:
        """The leader has a newer term."""
        self.term = term
        self._plans = {node_id: plan.replace(term=term) for node_id, plan in self._plans.items()}

    def take_changed(self) -> list[str]:
        """Returns the nodes whose plans must be sent, in the order in which these have changed."""
        nodes, self._changed = list(self._changed), {}
        return nodes


def changed(plan: m.Plan, decision: m.LeaderMessage) -> m.Plan:  # noqa: C901, PLR0912  one for each
    """Returns a plan with one more decision, and without those that it supersedes."""
    match decision:
        case m.Assigned():  # the round before is over, and so is all waiting for this one
            return m.Plan(plan.term, plan.lease_s, assigned=decision, settled=plan.settled, answers=plan.answers)
        case m.Interrupted(round_) if plan.interrupted is not None and plan.interrupted.round == round_:
            return plan.replace(interrupted=decision)  # its cause is another one after all
        case m.Interrupted(round_):  # the node may not know of it yet: a round may end as soon as it has begun
            begun = plan.assigned if plan.assigned is not None and plan.assigned.round == round_ else None
            return m.Plan(
                plan.term,
                plan.lease_s,
                assigned=begun,
                interrupted=decision,
                starts_ahead=plan.starts_ahead,
                notice=plan.notice,
                answers=plan.answers,
            )
        case m.Ended():
            return plan.replace(ended=decision)
        case m.Settled():
            return plan.replace(settled=decision)
        case m.Waiting():
            return plan.replace(waiting=decision)
        case m.StartAhead(number):
            return plan.replace(starts_ahead=number)
        case m.Look():
            return plan.replace(look=decision)
        case m.Compared():
            return plan.replace(look=None, compared=decision)
        case r.Notice():
            return plan.replace(notice=decision)
        case r.Cordoned():
            return plan.replace(cordoned=decision)
        case r.Answer(ask_id):
            others = [each for each in plan.answers if each.ask_id != ask_id]
            return plan.replace(answers=(*others, decision)[-ANSWERS_MAX:])
        case r.Show() | r.Shown():
            raise AssertionError("these are passed on, and are no part of a plan")
        case _:
            assert_never(decision)
