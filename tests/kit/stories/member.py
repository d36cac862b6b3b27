"""A member in each of its phases, and the clock that it is told: what the tests of it share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aelastic.errors import ProcessFailure
from aelastic.rdzv.coordinator.plans import changed
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.member import Member
from aelastic.rdzv.member.member_events import Phase
from aelastic.rdzv.member.search import Search
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.ranks import NodeRanks
from kit import decided

LEASE_S = 6.0
JOIN_S = 60.0
TERMS = m.Terms("job", 1, 3, 3, LEASE_S)
NODE = m.Node("me", "host-me", "default", 2, "", 29500)
FAILURE = ProcessFailure.from_elsewhere("host-me", 2, 0, 77, 1, "ValueError: batch is empty", "", 1000)
RANKS = NodeRanks(
    group_rank=1,
    group_world_size=3,
    first_rank=2,
    world_size=6,
    first_role_rank=2,
    role_world_size=6,
    local_world_size=2,
)
SUCCEEDED = m.Ended(m.Outcome.SUCCEEDED, decided.SUCCEEDED)


def record(
    epoch: int = 4, *, node_id: str = "boss", renewals: int | None = None, verdict: str = "", token: str = "",
    seats: m.Seats | None = None,
) -> LeaderRecord:  # fmt: skip
    candidate = Candidate(node_id, ("10.0.0.1",), 4000 + epoch, token or f"{node_id}-{epoch}")
    return LeaderRecord(epoch, candidate, renewals, verdict, seats=seats)


def assigned(round_: int = 1, restart_count: int = 0) -> m.Assigned:
    return m.Assigned(round_, restart_count, RANKS, "10.0.0.1", 29500, 0)


def interrupted(round_: int = 1, restart_count: int = 1) -> m.Interrupted:
    return m.Interrupted(round_, decided.restart(1, 3, decided.failed(0, "host-x")), restart_count)


class Story:
    """A member, and the clock it is told."""

    def __init__(self) -> None:
        self.core = Member("me", TERMS, Search(JOIN_S))
        self.now = 100.0
        self.plan = m.Plan(4, LEASE_S)  # the leader's, so far

    def planned(self, message: Any) -> m.Downward:
        """What the leader sends for it to be heard: a decision comes as a part of the whole plan."""
        is_of_plan = isinstance(message, r.Answer) and message.ask_id in self.core.state.asked
        if isinstance(message, m.Downward) and not is_of_plan:
            if isinstance(message, m.Plan):
                self.plan = message
            return message
        self.plan = changed(self.plan, message)
        return self.plan

    def tell(self, *events: ev.Event) -> list[Any]:
        """What the last of the events is answered with."""
        actions: list[Any] = []
        for event in events:
            actions = self.core.handle(event, self.now)
        return actions

    def hear(self, *messages: Any) -> list[Any]:
        return self.tell(*(ev.Received(self.core.conn, self.planned(message)) for message in messages))

    def pass_deadline(self) -> list[Any]:
        assert self.core.deadline is not None
        self.now = max(self.now, self.core.deadline)
        return self.tell(ev.DeadlinePassed())

    def be_silent_until(self, time: float) -> list[Any]:
        """Lets time pass, and the coordinator say nothing; all that is done.

        That the board is read, because the coordinator is late, comes to nothing.
        """
        done: list[Any] = []
        while self.core.deadline is not None and self.core.deadline <= time:
            actions = self.pass_deadline()
            if self.core.phase is Phase.MEMBER and ev.ReadBoard() in actions:
                actions.remove(ev.ReadBoard())
                self.tell(ev.BoardFailed("no answer"))
            done += actions
        self.now = max(self.now, time)
        return done


def after(*events: ev.Event) -> Callable[[], Story]:
    def build() -> Story:
        story = Story()
        story.tell(*events)
        for each in events:
            if isinstance(each, ev.Received) and isinstance(each.message, m.Plan):
                story.plan = each.message
        return story

    return build


READ = ev.Submitted(m.Ready(NODE))
WELCOME = m.Plan(4, LEASE_S)
JOINED = READ, ev.BoardRead(record()), ev.Connected(1), ev.Received(1, WELCOME)
idle, reading = after(), after(READ)
campaigning, pausing = after(READ, ev.BoardRead(None)), after(READ, ev.BoardFailed("no answer"))
connecting, greeting = after(*JOINED[:2]), after(*JOINED[:3])
busy = after(*JOINED, ev.Received(1, WELCOME.replace(assigned=assigned())))
over = after(*JOINED, ev.Received(1, WELCOME.replace(ended=SUCCEEDED)))


def member(renewals: int | None = None) -> Story:
    return after(READ, ev.BoardRead(record(renewals=renewals)), *JOINED[2:])()
