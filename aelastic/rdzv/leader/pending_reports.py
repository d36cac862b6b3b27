"""Reports and losses of nodes that the leader has not handled yet, because they wait for certainty.

Only the newest status of each node counts: it replaces one that still waits.  Anything from before a node reconnected
is outdated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from aelastic.rdzv.leader.coordinator_events import Broken, Lost, Reported
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r

Event = Reported | Broken | Lost | r.Query


@dataclass(slots=True)
class PendingReports:
    """A queue of events of nodes, in the order in which they came."""

    # Node, event, and when it came; by number, in this order.
    _queue: OrderedDict[int, tuple[str, Event, float]] = field(
        default_factory=OrderedDict[int, tuple[str, Event, float]]
    )
    _numbers_of: dict[str, list[int]] = field(default_factory=dict[str, list[int]])  # of a node's events in the queue
    _number: int = 0  # the last
    # Those in the queue that are the first status of a node's present connection, by node.
    _first_reports: dict[str, Reported] = field(default_factory=dict[str, Reported])

    @property
    def is_empty(self) -> bool:
        return not self._queue

    @property
    def first_reports(self) -> Mapping[str, Reported]:
        """The first statuses of connections that the leader does not know of, by node."""
        return self._first_reports

    def add(self, node_id: str, event: Event, now: float) -> None:
        """Adds a node's report, or what happened to the node.

        The story behind the newest status: the endpoint is slow.  Node A is silent, is lost, and comes back ready, all
        before the endpoint has answered.  Then a round begins and A is notified, A is lost to it, and last comes A's
        first status, from before the notification.  And while an endpoint stays away, the queue would grow with each
        connection.
        """
        if isinstance(event, Reported):
            if event.is_new:
                outdated = [self._drop(number) for number in [*self._numbers_of.get(node_id, ())]]
                failed_at = [_failed_at(each, since) for _, each, since in outdated if _is_of_failure(each, event)]
                event = event.replace(failed_s=now - failed_at[0] if failed_at else None)
                self._first_reports[node_id] = event
            elif self._replace_report(node_id, event, now):
                return
        self._number += 1
        self._queue[self._number] = node_id, event, now
        self._numbers_of.setdefault(node_id, []).append(self._number)

    def _replace_report(self, node_id: str, event: Reported, now: float) -> bool:
        """Replaces a status that still waits with this one; returns whether there was one."""
        for number in self._numbers_of.get(node_id, ()):
            _, earlier, since = self._queue[number]
            if not isinstance(earlier, Reported):
                continue
            if earlier.is_new:  # what came with it is equally old
                waited_s = now - since
                failed_s = None if earlier.failed_s is None else earlier.failed_s + waited_s
                back_s = earlier.back_s + waited_s
                status = event.status.replace(past=_as_first(event.status.past, earlier.status.past, waited_s))
                event = earlier.replace(node=event.node, status=status, back_s=back_s, failed_s=failed_s)
                self._first_reports[node_id] = event
            self._queue[number] = node_id, event, now
            return True
        return False

    def pop(self, now: float) -> Event | None:
        """Returns the next event for the leader, with its age."""
        if not self._queue:
            return None
        node_id, event, since = self._drop(next(iter(self._queue)))
        if isinstance(event, Reported) and event.is_new:
            del self._first_reports[node_id]
        if now == since or isinstance(event, r.Query):
            return event
        return event.replace(age_s=event.age_s + now - since)

    def _drop(self, number: int) -> tuple[str, Event, float]:
        dropped = self._queue.pop(number)
        numbers = self._numbers_of[dropped[0]]
        numbers.remove(number)
        if not numbers:
            del self._numbers_of[dropped[0]]
        return dropped

    def validate(self) -> None:
        numbers_of: dict[str, list[int]] = {}
        for number, (node_id, _, _) in self._queue.items():
            numbers_of.setdefault(node_id, []).append(number)
        assert numbers_of == self._numbers_of, "each event is found by its node"
        first = [node_id for node_id, event, _ in self._queue.values() if isinstance(event, Reported) and event.is_new]
        assert sorted(first) == sorted(self._first_reports), "a node has one first status in the queue at most"


def _as_first(past: m.Past, first: m.Past, waited_s: float) -> m.Past:
    """Returns a node's part with what it knew as it came to this leader, whose welcome has made it forget that."""
    if first.fence != past.fence:
        return past
    alone_s = first.alone_s + waited_s if first.alone_s else past.alone_s
    return past.replace(has_spares=first.has_spares or past.has_spares, alone_s=alone_s)


def _is_of_failure(earlier: Event, report: Reported) -> TypeGuard[Reported]:
    """Returns whether a node had already reported the failure that it reports.

    The story behind it: a node failed, and then its connection broke, so the break did not end the round.
    """
    if not isinstance(earlier, Reported):
        return False
    before, past = earlier.status.past, report.status.past
    return past.failure is not None and (before.failure, before.fence) == (past.failure, past.fence)


def _failed_at(report: Reported, since: float) -> float:
    """Returns when a node failed, according to its first report of that."""
    return since - (report.status.past.failure_age_s if report.failed_s is None else report.failed_s)
