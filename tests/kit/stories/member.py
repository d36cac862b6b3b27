"""A member in each of its phases, with its clock: shared by the tests of the member."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aelastic.errors import ProcessFailure
from aelastic.rdzv.leader.job_state import JobState, payload_of
from aelastic.rdzv.leader.plans import changed
from aelastic.rdzv.log import node as log
from aelastic.rdzv.log.cell import Cell
from aelastic.rdzv.log.entries import NO_PAYLOAD, Entry, EntryRef, Payload, first_entry, next_entry
from aelastic.rdzv.log.node import Node
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
TERM = 4  # of the first leader

# The log: the first round, in which three nodes vote; this node is the second of them.
VOTERS = "boss", "me", "other"
FIRST = first_entry(TERM, VOTERS, VOTERS, ("1f",))


def after(parent: Entry, *voters: str, term: int = TERM, payload: Payload = NO_PAYLOAD) -> Entry:
    """The next entry."""
    return next_entry(parent, term, voters, voters, parent.incarnations, payload=payload)


def verdict_after(parent: Entry, verdict: m.Ended | None = SUCCEEDED, payload: Payload = NO_PAYLOAD) -> Entry:
    """The last entry: how the job ended, or a payload that no leader writes."""
    content = payload_of(JobState(verdict=verdict)) if verdict is not None else payload
    return next_entry(parent, TERM, VOTERS, VOTERS, parent.incarnations, is_verdict=True, payload=content)


def leader_at(name: str = "boss", term: int = TERM) -> m.LeaderAt:
    return m.LeaderAt(name, name, ("10.0.0.1",), 4000 + term, f"{name}-{term}")


def stored(name: str = "boss", term: int = TERM, *, renewals: int = 0, committed: Entry | None = None) -> m.StoredCell:
    """The cell as a leader wrote it; an empty `name` means that it has resigned."""
    at = leader_at(name, term) if name else None
    token = "" if at is None else at.token
    found = None if committed is None else committed.log
    return m.StoredCell(Cell("1f", found, term, token, renewals, committed), at)


def campaign(name: str = "other", term: int = TERM + 1, committed: Entry | None = FIRST) -> m.Campaign:
    return m.Campaign(term, None if committed is None else committed.id, leader_at(name, term))


def of_log(
    term: int = TERM, *, is_leading: bool = True, committed: EntryRef | None = FIRST, proposal: Entry | None = None
) -> log.Plan:
    """What a plan says about the log."""
    return log.Plan(term, is_leading, committed, proposal, None)


def assigned(round_: int = 1, restart_count: int = 0) -> m.Assigned:
    return m.Assigned(round_, restart_count, RANKS, "10.0.0.1", 29500, term=TERM)


def interrupted(round_: int = 1, restart_count: int = 1) -> m.Interrupted:
    return m.Interrupted(round_, decided.restart(1, 3, decided.failed(0, "host-x")), restart_count)


class Story:
    """A member and its clock."""

    def __init__(self, *, may_lead: bool = True) -> None:
        self.core = Member("me", TERMS, Search(JOIN_S), may_lead)
        self.now = 100.0
        self.plan = m.Plan(TERM, LEASE_S, of_log(committed=None))  # the leader's, so far

    @property
    def node(self) -> Node:
        """The log as this node stores it, while no leader core of its agent holds it."""
        assert self.core.log is not None
        return self.core.log

    def planned(self, message: Any) -> m.Downward:
        """The leader's message that carries this: a decision arrives as part of the whole plan."""
        is_of_plan = isinstance(message, r.Answer) and message.ask_id in self.core.state.asked
        if isinstance(message, m.Downward) and not is_of_plan:
            if isinstance(message, m.Plan):
                self.plan = message
            return message
        self.plan = changed(self.plan, message).replace(log=self.plan.log)
        return self.plan

    def handle(self, *events: ev.Event) -> list[Any]:
        """The answer to the last of the events."""
        actions: list[Any] = []
        for event in events:
            if isinstance(event, ev.Received) and isinstance(event.message, m.Plan):
                self.plan = event.message
            actions = self.core.handle(event, self.now)
        return actions

    def receive(self, *messages: Any) -> list[Any]:
        return self.handle(*(ev.Received(self.core.conn, self.planned(message)) for message in messages))

    def pass_deadline(self) -> list[Any]:
        assert self.core.deadline is not None
        self.now = max(self.now, self.core.deadline)
        return self.handle(ev.DeadlinePassed())

    def be_silent_until(self, time: float) -> list[Any]:
        """Lets time pass without any messages; returns all actions.

        Reads of the cell while the leader is silent have no result.
        """
        done: list[Any] = []
        while self.core.deadline is not None and self.core.deadline <= time:
            actions = self.pass_deadline()
            if ev.ReadCell() in actions and self.core.phase in {Phase.CONNECTING, Phase.FOLLOWING}:
                self.handle(ev.CellFailed("no answer"))
            done += actions
        self.now = max(self.now, time)
        return done

    def wait(self, seconds: float) -> list[Any]:
        return self.be_silent_until(self.now + seconds)

    def lose_leader(self, close: log.Close = log.Close.ORDERLY) -> list[Any]:
        """The connection ends, by default because the leader's process did."""
        return self.handle(ev.ConnectionLost(self.core.conn, "its connection ended", close))


def member_after(*events: ev.Event) -> Callable[[], Story]:
    """Makes a member that has handled these events."""

    def build() -> Story:
        story = Story()
        story.handle(*events)
        return story

    return build


READY = ev.Submitted(m.Ready(NODE))
# From a leader that does not know the node yet: no round has begun.
WELCOME = m.Plan(TERM, LEASE_S, of_log(committed=None))
RUNS = m.Plan(TERM, LEASE_S, of_log(), assigned())
JOINED = READY, ev.CellAnswered(stored()), ev.Connected(1)
idle, searching = member_after(), member_after(READY)
campaigning = member_after(READY, ev.CellAnswered(None))
connecting, greeting = member_after(*JOINED[:2]), member_after(*JOINED)
following = member_after(*JOINED, ev.Received(1, WELCOME))
busy = member_after(*JOINED, ev.Received(1, WELCOME), ev.Received(1, RUNS))  # in a round, and a voter
over = member_after(*JOINED, ev.Received(1, WELCOME.replace(ended=SUCCEEDED)))


def spare() -> Story:
    """A node that waits outside the round: it has no vote, and knows the entry only by its id."""
    return member_after(*JOINED, ev.Received(1, WELCOME.replace(log=of_log(committed=FIRST.id))))()


def alone(close: log.Close = log.Close.ORDERLY) -> Story:
    """A voter whose leader is gone, and that has asked the endpoint for a new one."""
    story = busy()
    story.lose_leader(close)
    return story
