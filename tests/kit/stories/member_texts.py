"""Stories of a member as text: events from the supervisor, the cell, connections and the clock, and its reaction.

As in `texts.py`.  A story begins in a phase of `kit.stories.member`.  `boss 4` is an agent that leads, or wants to, and its
term; this node is the second of three voters.  `5 s are slept`: the process was stopped.  While `5 s pass`, the leader
sends nothing, or heartbeats only (`hearing`), the member acts when its timers are due, and the endpoint does not answer a
node that has a connection.  `cut off`: the endpoint answers nobody, no connection can be opened, no vote arrives, and only
what is delivered is shown; `cell rising`: the endpoint answers, and the leader renews the cell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from aelastic.rdzv.log.entries import first_entry
from aelastic.rdzv.log.node import Close, Node
from aelastic.rdzv.log.node import Status as LogStatus
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.member_events import Phase
from aelastic.rdzv.protocol import messages as m
from kit import decided
from kit.stories import coordinator, files, member, texts
from kit.stories.files import Story, options_of
from kit.stories.member import FAILURE, FIRST, LEASE_S, NODE, SUCCEEDED, TERM, VOTERS

FOLDER = files.FOLDER / "member"
OUTDATED = "this agent read an outdated record of the leader; retrying"
SECOND = member.after(FIRST, *VOTERS)
ELSEWHERE = first_entry(9, "xy", "xy", ("2f",))  # an entry of another log
CANDIDACY_S = 1.5  # until a candidate without votes gives up


class Playing(texts.Playing):
    """A story in progress."""

    def __init__(self, story: Story) -> None:
        phase, rules = story.rules.split()[0], options_of(story.rules)
        self.story: member.Story = getattr(member, phase)()
        self.core, self.attempt_until, self.candidate_until = self.story.core, math.inf, math.inf
        self.core.search.timeout_s = float(rules.get("join", self.core.search.timeout_s))
        self.core.search.hint = rules.get("hint", "")
        self.core.may_lead = "may_not_lead" not in rules

    def parts(self) -> Iterator[str]:
        yield self.core.phase
        yield past(self.core.state.past)

    @property
    def now(self) -> float:
        return self.story.now

    @now.setter
    def now(self, now: float) -> None:
        self.story.now = now

    def handle(self, line: str) -> list[Any]:
        if passed := re.fullmatch(r"([\d.]+) s pass(.*)", line):
            return self.passes(self.now + float(passed[1]), passed[2].strip(", "))
        return self.story.handle(self.event(line))

    def passes(self, until: float, how: str) -> list[Any]:
        story, done = self.story, list[Any]()
        if how.startswith("cut off"):
            return [each for each in self.is_cut_off(until, how) if isinstance(each, ev.Deliver)]
        while self.core.deadline is not None and self.core.deadline <= until:
            if how == "hearing" and self.core.phase is Phase.FOLLOWING:
                story.receive(m.Heartbeat())
                if self.core.deadline > until:
                    break
            actions = self.pass_deadline()
            if ev.ReadCell() in actions and self.core.phase in {Phase.FOLLOWING, Phase.CONNECTING}:
                story.handle(ev.CellFailed("no answer"))
            done += actions
        story.now = max(story.now, until)
        return done

    def is_cut_off(self, until: float, how: str) -> list[Any]:
        """Lets time pass while nothing arrives, or only the cell's answers; returns the result."""
        story, done, actions = self.story, list[Any](), list[Any]()
        while True:
            if ev.ReadCell() in actions:
                rising = member.stored(renewals=int((story.now - 100.0) * 3 / LEASE_S))
                actions = story.handle(ev.CellAnswered(rising) if "rising" in how else ev.CellFailed("no answer"))
            elif any(isinstance(each, ev.Connect) for each in actions):
                self.attempt_until, actions = story.now + 2.5, []
            elif any(isinstance(each, ev.Campaign) for each in actions):
                self.candidate_until, actions = story.now + CANDIDACY_S, []
            else:
                due = [self.core.deadline or math.inf, self.attempt_until, self.candidate_until]
                if min(due) > until:
                    story.now = max(story.now, until)
                    return done
                actions = self.next_when_cut_off(due)
            done += actions

    def next_when_cut_off(self, due: list[float]) -> list[Any]:
        if min(due) == due[0]:
            return self.pass_deadline()
        self.story.now = max(self.story.now, min(due))
        if min(due) == due[1]:
            self.attempt_until = math.inf
            return self.story.handle(ev.ConnectFailed(self.core.conn, False, "timed out"))
        self.candidate_until = math.inf
        return self.story.handle(
            ev.LeadershipLost(Node("me", TERM + 1, committed=FIRST), "me-5", "too few nodes voted")
        )

    def event(self, line: str) -> ev.Event:  # noqa: C901, PLR0912  a case for each
        options = options_of(line)
        conn, round_ = int(options.get("conn", self.core.conn)), int(options.get("round") or 1)
        match line.split():
            case ["a", "timer", "fires"]:
                return ev.DeadlinePassed()
            case ["it", "leads", term]:
                return ev.Leading(member.leader_at("me", int(term)), int(term))
            case ["its", "leadership", "is", "lost", *_]:
                node = Node("me", TERM + 1, voted_for="me", committed=FIRST if "log" in options else None)
                back_s = float(options.get("stand_back", 0))
                return ev.LeadershipLost(node, f"me-{TERM + 1}", "too few nodes voted for this one", back_s)
            case ["the", "cell", "does", *_]:
                return ev.CellFailed("no answer")
            case ["the", "cell", "is", "empty"]:
                return ev.CellAnswered(None)
            case ["the", "cell", "has", name, term, *_]:
                log = ELSEWHERE if "of_another_job" in options else FIRST
                committed = member.verdict_after(log) if "verdict" in options else log if "log" in options else None
                who, renewals = "" if name == "nobody" else name, int(options.get("renewals") or 0)
                return ev.CellAnswered(member.stored(who, int(term), renewals=renewals, committed=committed))
            case [name, "campaigns", "in", term, *_]:
                known = ELSEWHERE if "of_another_job" in options else FIRST
                return ev.Campaigned(7, member.campaign(name, int(term), known))
            case ["a", "voter", "follows", name, term]:
                return ev.Declined(int(term), member.leader_at(name, int(term)))
            case ["a", "voter", "knows", "of", term]:
                return ev.Declined(int(term), None)
            case ["is", "connected", *_]:
                return ev.Connected(conn)
            case ["is", "refused" | "timed" as how, *_]:
                reason = "refused" if how == "refused" else "timed out"
                return ev.ConnectFailed(conn, how == "refused", reason)
            case ["is", "closed" | "reset" as how, *_]:
                close = Close.ORDERLY if how == "closed" else Close.ABORTED
                return ev.ConnectionLost(conn, "its connection ended", close)
            case ["hears", *_]:
                return ev.Received(conn, self.story.planned(self.message_of(line, options, round_)))
            case ["says", what, *_]:
                submitted: dict[str, Any] = {
                    "ready": m.Ready(NODE), "failed": m.Failed("me", round_, FAILURE, float(options.get("age", 0))),
                    "succeeded": m.Succeeded("me", round_), "left": m.Left("me", "SIGTERM"),
                    "prepared": m.Prepared("me", m.Starts.WARM),
                }  # fmt: skip
                return ev.Submitted(submitted[what])
            case _:
                raise AssertionError(line)

    def message_of(self, line: str, options: dict[str, str], round_: int) -> Any:
        match line.split():
            case [_, "heartbeat", *_]:
                return m.Heartbeat("spares" in options)
            case [_, "welcome" | "candidate" as how, term, *_]:
                log = ELSEWHERE if "of_another_job" in options else FIRST
                known = member.of_log(int(term), is_leading=how == "welcome", committed=log)
                return m.Plan(int(term), LEASE_S, known)
            case [_, "proposal", *_]:
                return self.story.plan.replace(log=member.of_log(self.story.plan.term, proposal=SECOND))
            case [_, "round", number, *_]:
                return member.assigned(int(number), int(options.get("restarts", 0)))
            case [_, "interrupted", *_]:
                restarts = int(options.get("restarts", 1))
                return m.Interrupted(round_, decided.joined("host-x"), restarts, went_on="went_on" in options)
            case [_, "refused", *_]:
                return m.Refused("--nnodes is 2:3 here" if "final" in options else OUTDATED, "final" in options)
            case [_, "goodbye", *_]:
                return m.Goodbye("another agent leads the job now", "gone" in options)
            case [_, what, *_]:
                others: dict[str, Any] = {
                    "probe": m.Probe(), "given": m.GivenUp(), "succeeded": SUCCEEDED, "waiting": m.Waiting("for others"),
                }  # fmt: skip
                return others[what]
            case _:
                raise AssertionError(line)

    def words(self, action: ev.Action) -> str:  # noqa: C901, PLR0912  a case for each
        match action:
            case ev.ReadCell():
                return "reads the cell"
            case ev.AskWhoLeads():
                return "asks voters who leads"
            case ev.Campaign() as campaign:
                return f"campaigns{campaigns(campaign)}"
            case ev.Answer(_, None):
                return "gives its vote"
            case ev.Answer(_, m.Declined(term, reason, leader)):
                return f"declines in {term}: {reason}" + (f", {of(leader)}" if leader is not None else "")
            case ev.Connect(conn, leader):
                return f"connects to {of(leader)} ({conn})"
            case ev.Disconnect():
                return "hangs up"
            case ev.GiveUp(reason, is_refused):
                return f"gives up{', refused' * is_refused}: {reason}"
            case ev.Send(m.Hello() as hello):
                name = "" if hello.name == "me" else f" as {hello.name}"
                return f"sends hello to {hello.token}{name}: {status(hello.status)}"
            case ev.Send(m.Status() as sent):
                return f"sends status: {status(sent)}"
            case ev.Send(message):
                return f"sends {type(message).__name__.lower()}"
            case ev.Deliver(m.Assigned(round_, restart_count)):
                return f"delivers round {round_}, restarts {restart_count}"
            case ev.Deliver(message):
                return f"delivers {coordinator.words(message)}"
            case _:
                raise AssertionError(action)


def campaigns(campaign: ev.Campaign) -> str:
    """How a candidate begins."""
    gone = f", {', '.join(campaign.gone)} gone" if campaign.gone else ""
    before = f", after job {campaign.job_before}" if campaign.job_before else ""
    return f" above {campaign.highest}{', having listened' * campaign.has_listened}{gone}{before}"


def status(of: m.Status) -> str:
    starts = f", {of.node.starts}" * (of.node.starts is not m.Starts.COLD)
    left = f", left: {of.left.reason}" if of.left is not None else ""
    return f"{past(of.past)}{starts}{left}{log_of(of.log)}"


def log_of(known: LogStatus | None) -> str:
    """What a node reports about the log."""
    if known is None:
        return ", leads"
    accepted = ", accepts a proposal" if known.accepted is not None else ""
    ended = f", {', '.join(each.name for each in known.ended)} has ended" if known.ended else ""
    return f", votes in {known.term}{accepted}{ended}"


def past(of: m.Past) -> str:
    return ", ".join([
        of.phase + f" {of.round}" * bool(of.round),
        *["has failed" + f" {of.failure_age_s:g} s ago" * bool(of.failure_age_s)] * (of.failure is not None),
        *["charged"] * of.is_charged, *["ended for free"] * bool(of.ended), *["spares wait"] * of.has_spares,
        *[f"alone for {of.alone_s:g} s"] * bool(of.alone_s),
    ])  # fmt: skip


def of(leader: m.LeaderAt) -> str:
    return f"{leader.node_id} {leader.port - 4000}"


def played(story: Story) -> list[str]:
    return list(Playing(story).lines(story))
