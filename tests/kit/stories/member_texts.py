"""Stories of a member as text: what the supervisor, the board, connections and the clock tell it, and what it does.

As in `texts.py`.  A story begins in a phase of `kit.stories.member`.  A record of the board is `boss 4`: the coordinator's
node and epoch; in `nodes elect boss 100` it comes from the other nodes.  `5 s are slept`: the process was stopped.  While
`5 s pass` the coordinator says nothing, or its heartbeats (`hearing 7`), what is due is done, and the board does not answer
a member that checks it; `cut off`: it does, with so many renewals, or `rising` ones, no connection can be opened, and only
what is delivered is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from aelastic.rdzv.leader_record import LeaderRecord
from aelastic.rdzv.member import member_events as ev
from aelastic.rdzv.member.member_events import Phase
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import to_text
from kit import decided
from kit.stories import coordinator, files, member, texts
from kit.stories.files import Story, options_of
from kit.stories.member import FAILURE, LEASE_S, NODE, SUCCEEDED

FOLDER = files.FOLDER / "member"
SEATS = tuple(m.Seat(each, f"host-{each}", "10.0.0.1", 7) for each in ("boss", "me", "other"))
OUTDATED = "this agent read an outdated record of the leader; retrying"


class Told(texts.Told):
    """A story as it is told."""

    def __init__(self, story: Story) -> None:
        phase, rules = story.rules.split()[0], options_of(story.rules)
        renewals = int(rules["renewals"]) if "renewals" in rules else None
        self.story: member.Story = member.member(renewals) if renewals is not None else getattr(member, phase)()
        self.core, self.attempt_until = self.story.core, 0.0
        if renewals is not None and phase == "busy":
            self.story.hear(member.assigned(), m.Heartbeat(renewals))
        self.core.search.timeout_s = float(rules.get("join", self.core.search.timeout_s))
        self.core.leader.lease_s = float(rules.get("lease", LEASE_S))
        self.core.search.hint = rules.get("hint", "")

    def parts(self) -> Iterator[str]:
        yield self.core.phase
        yield past(self.core.state.past.replace(group_world_size=0))

    @property
    def now(self) -> float:
        return self.story.now

    @now.setter
    def now(self, now: float) -> None:
        self.story.now = now

    def tell(self, line: str) -> list[Any]:
        if passed := re.fullmatch(r"([\d.]+) s pass(.*)", line):
            return self.passes(self.now + float(passed[1]), passed[2].strip(", "))
        if line == "heartbeats come until the board is read":
            while ev.ReadBoard() not in self.pass_deadline():
                self.story.hear(m.Heartbeat(0))
            return [ev.ReadBoard()]
        return self.story.tell(self.event(line))

    def passes(self, until: float, how: str) -> list[Any]:
        story, done = self.story, list[Any]()
        while self.core.deadline is not None and self.core.deadline <= until:
            if how.startswith("hearing"):
                story.hear(m.Heartbeat(int(how.split()[1])))
            actions = self.pass_deadline()
            if how.startswith("cut off"):
                count = how.removeprefix("cut off").strip()
                rising = 7 + int((story.now - 100.0) * 3 / LEASE_S)
                actions += self.is_cut_off(actions, rising if count == "rising" else int(count) if count else None)
            elif self.core.phase is Phase.MEMBER and ev.ReadBoard() in actions:
                story.tell(ev.BoardFailed("no answer"))
            done += actions
        story.now = max(story.now, until)
        return [each for each in done if isinstance(each, ev.Deliver)] if how.startswith("cut off") else done

    def is_cut_off(self, actions: list[Any], renewals: int | None) -> list[Any]:
        """The board shows the leader, and an attempt to connect to it comes to nothing after a while; what follows."""
        done: list[Any] = []
        if self.core.phase is Phase.CONNECTING and self.story.now >= self.attempt_until:
            done = actions = self.story.tell(ev.ConnectFailed(self.core.conn, False, "timed out"))
        while ev.ReadBoard() in actions:
            actions = self.story.tell(ev.BoardRead(member.record(renewals=renewals)))
            done += actions
        if any(isinstance(each, ev.Connect) for each in done):
            self.attempt_until = self.story.now + 2.5
        return done

    def event(self, line: str) -> ev.Event:  # noqa: C901, PLR0912  a case for each
        options = options_of(line)
        conn, round_ = int(options.get("conn", self.core.conn)), int(options.get("round") or 1)
        match line.split():
            case ["a", "timer", "fires"]:
                return ev.DeadlinePassed()
            case ["leadership", "is", "lost"]:
                return ev.LeadershipLost()
            case ["the", "board", "does", *_]:
                return ev.BoardFailed("no answer")
            case ["the", "board", "has", "no", *_]:
                return ev.NotEligible()
            case ["the", "board", "has", "nothing"]:
                return ev.BoardRead(None)
            case ["nodes", "elect", name, epoch]:
                return ev.BoardRead(member.record(int(epoch), node_id=name).replace(is_by_nodes=True))
            case ["the", "board", "has", name, epoch, *_]:
                renewals = int(options["renewals"]) if "renewals" in options else None
                verdict = to_text(SUCCEEDED) if "verdict" in options else ""
                seats = tuple(seat for seat in SEATS if seat.node_id in options.get("round_of", "").split("+"))
                later = m.Seats(int(epoch) * 1_000 + 2, 2, "secret", seats) if seats else None
                record = member.record(int(epoch), node_id=name, renewals=renewals, verdict=verdict, seats=later)
                return ev.BoardRead(record)
            case ["is", "connected", *_]:
                return ev.Connected(conn)
            case ["is", "refused" | "timed" as how, *_]:
                return ev.ConnectFailed(
                    conn, how == "refused", "refused" if how == "refused" else "timed out", "here" in options
                )
            case ["is", "closed" | "reset" as how, *_]:
                return ev.ConnectionLost(conn, "its connection ended", how == "reset")
            case ["hears", *_]:
                return ev.Received(conn, self.story.planned(self.heard(line, options, round_)))
            case ["says", what, *_]:
                said: dict[str, Any] = {
                    "ready": m.Ready(NODE), "failed": m.Failed("me", round_, FAILURE, float(options.get("age", 0))),
                    "succeeded": m.Succeeded("me", round_), "left": m.Left("me", "SIGTERM"),
                    "prepared": m.Prepared("me", m.Starts.WARM),
                }  # fmt: skip
                return ev.Submitted(said[what])
            case _:
                raise AssertionError(line)

    def heard(self, line: str, options: dict[str, str], round_: int) -> Any:
        match line.split():
            case [_, "heartbeat", renewals, *_]:
                return m.Heartbeat(int(renewals), "spares" in options)
            case [_, "welcome", epoch, *_]:
                return m.Plan(int(epoch), LEASE_S)
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
                    "seats": m.Seats(4_001, 1, "secret", SEATS),
                }  # fmt: skip
                return others[what]
            case _:
                raise AssertionError(line)

    def words(self, action: ev.Action) -> str:  # noqa: C901  a case for each
        match action:
            case ev.ReadBoard():
                return "reads the board"
            case ev.Campaign(seen, above):
                return f"campaigns above {above}" + (f", against {of(seen)}" if seen else "")
            case ev.Lead(record, is_heir):
                return f"leads {of(record)}" + ", as heir" * is_heir
            case ev.Connect(conn, record):
                return f"connects to {of(record)} ({conn})"
            case ev.Disconnect():
                return "hangs up"
            case ev.GiveUp(reason, is_refused):
                return f"gives up{', refused' * is_refused}: {reason}"
            case ev.Send(m.Hello() as hello):
                ended = f", and {', '.join(hello.kept.ended)} has ended" if hello.kept.ended else ""
                return f"sends hello to {hello.token}, seen epoch {hello.seen_epoch}: {status(hello.status)}{ended}"
            case ev.Send(m.Status() as sent):
                return f"sends status: {status(sent)}"
            case ev.Send(message):
                return f"sends {type(message).__name__.lower()}"
            case ev.Deliver(m.Assigned(round_, restart_count)):
                return f"delivers round {round_}, restarts {restart_count}"
            case ev.Deliver(message):
                return f"delivers {coordinator.words(message)}"


def status(of: m.Status) -> str:
    starts = f", {of.node.starts}" * (of.node.starts is not m.Starts.COLD)
    left = f", left: {of.left.reason}" if of.left is not None else ""
    return f"{past(of.past)}{starts}{left}"


def past(of: m.Past) -> str:
    place = f"rank {of.group_rank} of {of.group_world_size}, coordinator {of.coordinator_rank}"
    return ", ".join([
        of.standing + f" {of.round}" * bool(of.round), *[place] * bool(of.group_world_size),
        *[f"restarts {of.restart_count}"] * bool(of.restart_count),
        *["has failed" + f" {of.failure_age_s:g} s ago" * bool(of.failure_age_s)] * (of.failure is not None),
        *["charged"] * of.is_charged, *["ended for free"] * bool(of.ended), *["spares wait"] * of.has_spares,
        *[f"alone for {of.alone_s:g} s"] * bool(of.alone_s),
    ])  # fmt: skip


def of(record: LeaderRecord) -> str:
    count = "" if record.renewals is None else f" renewals={record.renewals}"
    return f"{record.candidate.node_id} {record.epoch}{count}"


def told(story: Story) -> list[str]:
    return list(Told(story).lines(story))
