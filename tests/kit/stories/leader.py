"""Stories of the leader as text: what arrives over connections, from the endpoint and from the clock, and its reaction.

As in `coordinator.py`, with these differences.  `a'` is the connection that node a had before its present one.  While
time passes, all connected nodes that are not `silent` send heartbeats, which are not shown.  After `->` come the states
of the coordinator and of the leader, if the event changed them, with the entry that is not committed yet.

The endpoint and voters answer at once, unless the endpoint `fails` or `is silent`, or a node `is mute` about the log.
A story with `cell` also shows the requests to the endpoint.

With `voting=abc` all nodes of the round vote, and the first node's agent leads.  With `kept=abc` the first node's agent
was the leader and has ended: the agent of the second node, or of the node `by`, campaigns.  `alone=a`: a leads, and
another agent could.  An `unbegun` leader has not read the cell yet, like one that campaigns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from aelastic.rdzv.leader import leader_events as ev
from aelastic.rdzv.log.entries import id_of
from aelastic.rdzv.log.node import Close
from aelastic.rdzv.protocol import messages as m
from kit.stories import coordinator, files
from kit.stories.files import Story, options_of
from kit.stories.leader_terms import FAILURE, TERM, Term, busy, campaigning, leader_at, running, voting

FOLDER = files.FOLDER / "leader"

CLOSES = {"closes": Close.ORDERLY, "is reset": Close.ABORTED}
OTHERS: dict[str, Callable[[], ev.Event]] = {
    "this agent leaves": ev.Resigned,
    "a timer fires": ev.DeadlinePassed,
}


def begun(rules: dict[str, str]) -> Term:
    low, high = map(int, rules["nodes"].split(":"))
    timeouts = {f"{key}_timeout_s": float(rules[key]) for key in ("join", "last_call") if key in rules}
    others: dict[str, Any] = {"max_restarts": int(rules.get("restarts", 3)), **timeouts}
    if "alone" in rules:
        others |= {"own": rules["alone"], "is_replaceable": True}
    if "voting" in rules:
        return voting(rules["voting"], nodes=(low, high), **others)
    if "running" in rules:
        return running(rules["running"], nodes=(low, high), **others)
    if "kept" in rules:
        return campaigning(rules["kept"], by=rules.get("by", ""), nodes=(low, high), **others)
    return Term((low, high), has_fixed_ranks="fixed" in rules, is_begun="unbegun" not in rules, **others)


class Playing:
    """A story in progress: a term, and the connections that its nodes have had."""

    def __init__(self, story: Story) -> None:
        self.rules = options_of(story.rules)
        self.term = begun(self.rules)
        self.conns: dict[str, list[int]] = {name: [conn] for name, conn in self.term.conns.items()}
        self.term.shows_cell = "cell" in self.rules

    def lines(self, story: Story) -> Iterator[str]:
        for full in story.lines:
            line, before = full.partition(" -> ")[0], self.state
            if line.startswith("#"):
                yield line
            elif not line.startswith("  "):
                actions = self.answer(line)
                yield line + f" -> {self.state}" * (self.state != before)
                yield from (f"  {what}" for what in self.done(actions))

    @property
    def state(self) -> str:
        core, leader = self.term.coordinator, self.term.leader
        pending = leader.log.proposal
        waits = "" if pending is None else f", entry {pending.number} is not committed"
        return f"{core.phase} {core.round}, {leader.phase}{waits}"

    def answer(self, line: str) -> list[Any]:
        """The result of a line; for several nodes, of everything that they do."""
        term = self.term
        if passed := re.fullmatch(r"([\d.]+) s pass(?:, (\w+) silent)?", line):
            actions = term.live_until(term.now + float(passed[1]), *(passed[2] or ""))
            return [each for each in actions if not isinstance(getattr(each, "message", each), m.Heartbeat)]
        if slept := re.fullmatch(r"([\d.]+) s are slept", line):
            term.now += float(slept[1])
            return []
        if line == "the leader begins":
            return term.begin()
        if line == "the deadline passes":
            return term.pass_deadline()
        if line in OTHERS:
            return term.handle(OTHERS[line]())
        if found := re.fullmatch(r"the endpoint (.*)", line):
            return self.endpoint(found[1])
        if found := re.fullmatch(r"(\w) (?:asks for a vote in term (\d+)|asks who leads)", line):
            at = leader_at(found[1], f"token of {found[1]}")
            return term.handle(
                ev.Campaigned(1, m.Campaign(int(found[2] or 0), id_of(term.leader.log.node.committed), at))
            )
        if found := re.fullmatch(r"\w declines in term (\d+)(?:, it follows (\w))?", line):
            return term.handle(ev.Declined(int(found[1]), f"token of {found[2]}" if found[2] else ""))
        names, verb, rest = re.fullmatch(
            r"((?:\w'* )+?)(joins|opens|is alive|is ready|fails|succeeds|leaves|hangs up|says hello|closes|is reset"
            r"|sends garbage|is mute|answers)(.*)",
            line,
        ).groups()  # type: ignore[union-attr]
        options = dict(re.findall(r"(\w+)(?:=(\S+))?", rest))
        return [action for name in names.split() for action in self.does(name, verb, options)]

    def endpoint(self, what: str) -> list[Any]:
        """Sets how the endpoint behaves from now on."""
        term = self.term
        match what.split():
            case ["fails"]:
                term.has_cell = False
            case ["is", "silent"]:
                term.is_cell_silent = True
            case ["answers"]:
                term.has_cell = True
                return term.break_silence()
            case ["forgets"]:
                term.stored = None
            case ["has", name, "in", "term", number]:  # which has locked it, and works
                assert term.stored is not None
                at = leader_at(name, f"token of {name}")
                cell = term.stored.cell.replace(leader=at.token, term=int(number), renewals=0)
                term.stored = m.StoredCell(cell, at)
            case _:
                raise AssertionError(what)
        return []

    def does(self, name: str, verb: str, options: dict[str, str]) -> list[Any]:
        term, rank = self.term, int(options["node_rank"]) if "node_rank" in options else None
        if verb in {"is mute", "answers"}:
            return term.silence(name) if verb == "is mute" else term.speak(name)
        if verb in {"opens", "joins"}:
            conn = term.open(name)
            self.conns.setdefault(name, []).append(conn)
        else:
            conn = self.conns[name.rstrip("'")][-1 - name.count("'")]
        of = options.get("as", name.rstrip("'"))
        submitted: dict[str, Any] = {
            "is ready": m.Ready(term.node(of, rank)), "fails": m.Failed(of, int(options.get("round", 1)), FAILURE),
            "succeeds": m.Succeeded(of, 1), "leaves": m.Left(of, "SIGTERM"),
        }  # fmt: skip
        if verb in submitted:
            if of not in term.reports.of:
                term.reports.connects(term.node(of, rank), m.Past(m.NodePhase.READY))
            return term.handle(ev.Received(conn, term.reports.status_after(submitted[verb])))
        match verb:
            case "joins" | "says hello":
                greeting = self.greeting(name.rstrip("'"), rank, options)
                term.reports.known.add(of)
                term.reports.of[of] = greeting.status
                return term.handle(ev.Received(conn, greeting))
            case "is alive" | "hangs up":
                return term.handle(ev.Received(conn, m.Alive() if verb == "is alive" else m.HungUp()))
            case "closes" | "is reset":
                term.conns = {each: its for each, its in term.conns.items() if its != conn}
                return term.handle(ev.Closed(conn, CLOSES[verb]))
            case "sends garbage":
                return term.handle(ev.Garbled(conn, "no message of ours", "other_protocol" in options))
            case _:
                assert verb == "opens"
                return []

    def greeting(self, name: str, rank: int | None, options: dict[str, str]) -> m.Hello:
        past = m.Past(m.NodePhase.READY)
        if (phase := next((each for each in m.NodePhase if each.value in options), None)) is not None:
            past = busy(int(options.get("round", 1)), int(options.get("term", TERM))).replace(phase=phase)
            if phase is m.NodePhase.FAILED:
                past = past.replace(failure=FAILURE, failure_age_s=float(options["failed"] or 0.01))
        return self.term.greeting(name, rank, past=past)

    def done(self, actions: list[Any]) -> Iterator[str]:
        """Each action, ordered by first occurrence; for messages, with the nodes that receive them."""
        names = {conn: name + "'" * back for name, of in self.conns.items() for back, conn in enumerate(of[::-1])}
        parts: list[tuple[str, int, int]] = []  # what is done, the connection if any, and its group rank
        for action in actions:
            conn = action.conn if isinstance(action, ev.SendTo | ev.Drop) else 0
            before = max((i for i, each in enumerate(parts) if each[1] == conn), default=-1)
            if isinstance(action, ev.Drop) and before >= 0:
                parts[before] = f"{parts[before][0]}; {words(action)}", conn, 0
            else:
                ranks = getattr(getattr(action, "message", None), "ranks", None)
                parts.append((words(action), conn, 0 if ranks is None else ranks.group_rank))
        for what in dict.fromkeys(each[0] for each in parts):
            receivers = sorted((rank, i, conn) for i, (text, conn, rank) in enumerate(parts) if text == what)
            received_by = " ".join(names[conn] for _, _, conn in receivers if conn)
            yield f"{received_by}: {what}" if received_by else what


def words(action: Any) -> str:  # noqa: C901, PLR0912  a case for each action
    part: Any = getattr(action, "message", None)
    if isinstance(part, str):  # a part of a plan without a message of its own
        return part
    match action:
        case ev.Drop(_, in_order):
            return "closed" if in_order else "reset"
        case ev.ReadCell():
            return "the cell is read"
        case ev.WriteCell(stored):
            return f"the cell is written: {cell_text(stored)}"
        case ev.AskVotes(participants, campaign):
            return f"{' '.join(each.node_id for each in participants)}: asked to vote in term {campaign.term}"
        case ev.PassOn():
            return "the campaign is answered by this agent's member"
        case ev.Answer(_, m.Declined(term, reason, leader)):
            known = "" if leader is None else f", {leader.node_id} leads"
            return f"the campaign is declined in term {term}{known}: {reason}"
        case ev.StepDown(reason, _, stand_back_s):
            return f"steps down: {reason}" + f", and stands back for {stand_back_s:g} s" * (stand_back_s > 0)
        case ev.SendTo(_, m.Refused(reason, is_final)):
            return f"refused{' for good' * is_final}: {reason}"
        case ev.SendTo(_, m.Goodbye(reason, is_gone)):
            return f"goodbye{', it is gone' * is_gone}: {reason}"
        case ev.SendTo(_, m.Heartbeat(has_spares, _)):
            return f"heartbeat{', nodes wait' * has_spares}"
        case ev.SendTo(_, m.Probe() | m.GivenUp() as message):
            return {m.Probe: "probe", m.GivenUp: "given up"}[type(message)]
        case ev.SendTo(_, message):
            return coordinator.words(message)
        case _:
            raise AssertionError(action)


def cell_text(stored: m.StoredCell) -> str:
    cell = stored.cell
    known = "" if cell.committed is None else f", entry {cell.committed.number} is committed"
    accepted = "" if cell.accepted is None else f", entry {cell.accepted.entry.number} accepted"
    return f"term {cell.term}, incarnation {cell.incarnation}{known}{accepted}"


def played(story: Story) -> list[str]:
    return list(Playing(story).lines(story))
