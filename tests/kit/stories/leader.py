"""Stories of the leader as text: what comes over connections, from the board and from the clock, and what it does then.

As in `coordinator.py`, with these differences.  `a'` is the connection that node a had before its present one.  While
time passes all connected nodes that are not `silent` say that they live, and the board renews the record unless it is
`down`; heartbeats and renewals are not shown then.  After `->` come the states of the coordinator and of the leadership,
if the event has changed them.  `alone=a`: a coordinates, and another agent could.  Nodes
`elect` by majority, and one that `knows` has heard of the verdict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.leader_record import LeaderRecord
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import from_text
from kit.stories import coordinator, files
from kit.stories.files import Story, options_of
from kit.stories.leader_terms import CANDIDATE, EPOCH, FAILURE, RENEWED, Term, hello, node, reclaimed, running

FOLDER = files.FOLDER / "leader"
HIDDEN = ev.Renew, m.Heartbeat  # while time passes

OTHERS: dict[str, Callable[[], ev.Event]] = {
    "the board renews": lambda: RENEWED,
    "the board does not answer": lambda: ev.RenewFailed("no answer"),
    "the board has another leader": lambda: ev.Renewed(None),
    "the board has another leader's verdict": lambda: ev.Published(False),
    "the board has no newer epoch": lambda: ev.Reclaimed(None),
    "the board has its old record, renewed 7 times": lambda: ev.Reclaimed(LeaderRecord(EPOCH, CANDIDATE, 7)),
    "the board has epoch 10": lambda: reclaimed(10),
    "the board has epoch 1001": lambda: reclaimed(1001),
    "the board renews, 5 times by now": lambda: ev.Renewed(LeaderRecord(EPOCH, CANDIDATE, 5)),
    "the board knew nothing, and has a rival of epoch 1000": lambda: ev.Renewed(
        LeaderRecord(EPOCH, CANDIDATE), is_assumed=True, rival_epoch=1000
    ),
    "the board takes the verdict": lambda: ev.Published(True),
    "the board does not take the verdict": ev.PublishFailed,
    "this agent leaves": ev.Resigned,
    "a timer fires": ev.DeadlinePassed,
}


def begun(rules: dict[str, str]) -> Term:
    low, high = map(int, rules["nodes"].split(":"))
    timeouts = {f"{key}_timeout_s": float(rules[key]) for key in ("join", "last_call") if key in rules}
    counts = {"max_restarts": int(rules.get("restarts", 3)), "renewals": int(rules.get("renewals", 0))}
    others: dict[str, Any] = {**counts, **timeouts}
    if "running" in rules:
        term = running(rules["running"], nodes=(low, high), **others)
    else:
        term = Term((low, high), has_fixed_ranks="fixed" in rules, **others)
    if "alone" in rules:
        term.coordinator.own_node_id, term.leader.is_replaceable = rules["alone"], True
    return term


class Told:
    """A story as it is told: a term, and which connections its nodes have had."""

    def __init__(self, story: Story) -> None:
        self.rules = options_of(story.rules)
        self.term = begun(self.rules)
        self.conns: dict[str, list[int]] = {name: [conn] for name, conn in self.term.conns.items()}

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
        core, phase = self.term.coordinator, self.term.leader.phase
        return f"{core.phase} {core.round}, {phase}"

    def answer(self, line: str) -> list[Any]:
        """What follows from a line; of several nodes, from all that they do."""
        term = self.term
        if passed := re.fullmatch(r"([\d.]+) s pass(?:, (\w+) silent)?(, the board is down)?", line):
            silent, is_down = passed[2] or "", passed[3]
            actions = term.live_until(term.now + float(passed[1]), *silent, is_board_up=not is_down)
            return [each for each in actions if not isinstance(getattr(each, "message", each), HIDDEN)]
        if slept := re.fullmatch(r"([\d.]+) s are slept", line):
            term.now += float(slept[1])
            return []
        if line == "the deadline passes":
            return term.pass_deadline()
        if line == "a renewal is due":
            term.pass_time_until_renewal()
            return []
        if line.endswith(" elect"):  # by majority, the nodes of the last round
            seats = tuple(m.Seat(name, f"host-{name}", "10.0.0.1", 7) for name in line.split()[:-1])
            term.leader.sessions.electorate.is_on = True
            term.leader.sessions.electorate.rounds[1] = m.Seats(1, 1, "secret", seats)
            return []
        if line in OTHERS:
            return term.tell(OTHERS[line]())
        names, verb, rest = re.fullmatch(
            r"((?:\w'* )+?)(joins|opens|is alive|is ready|fails|succeeds|leaves|hangs up|says hello|closes|is reset|knows"
            r"|sends garbage)(.*)",
            line,
        ).groups()  # type: ignore[union-attr]
        options = dict(re.findall(r"(\w+)(?:=(\S+))?", rest))
        return [action for name in names.split() for action in self.does(name, verb, options)]

    def does(self, name: str, verb: str, options: dict[str, str]) -> list[Any]:
        term, rank = self.term, int(options["node_rank"]) if "node_rank" in options else None
        if verb in {"opens", "joins"}:
            conn = term.open(name)
            self.conns.setdefault(name, []).append(conn)
        else:
            conn = self.conns[name.rstrip("'")][-1 - name.count("'")]
        of, greeting = options.get("as", name.rstrip("'")), self.greeting(name.rstrip("'"), rank, options)
        said: dict[str, Any] = {
            "joins": greeting, "says hello": greeting, "is alive": m.Alive(), "hangs up": m.HungUp(),
            "knows": m.Alive(1, EPOCH),
        }  # fmt: skip
        submitted: dict[str, Any] = {
            "is ready": m.Ready(node(of, rank)), "fails": m.Failed(of, int(options.get("round", 1)), FAILURE),
            "succeeds": m.Succeeded(of, 1), "leaves": m.Left(of, "SIGTERM"),
        }  # fmt: skip
        if verb in submitted:
            if of not in term.reports.of:
                term.reports.connects(node(of, rank), m.Past(m.Standing.READY))
            return term.tell(ev.Received(conn, term.reports.said(submitted[verb])))
        if verb in said:
            if verb in {"joins", "says hello"}:
                term.reports.connects(greeting.status.node, greeting.status.past)
            return term.tell(ev.Received(conn, said[verb]))
        match verb:
            case "closes" | "is reset":
                term.conns = {each: its for each, its in term.conns.items() if its != conn}
                return term.tell(ev.Closed(conn, verb == "is reset"))
            case "sends garbage":
                return term.tell(ev.Garbled(conn, "no message of ours", "other_protocol" in options))
            case _:
                assert verb == "opens"
                return []

    def greeting(self, name: str, rank: int | None, options: dict[str, str]) -> m.Hello:
        past, group = m.Past(m.Standing.READY), options.get("of", self.rules.get("running", "ab"))
        if (standing := next((each for each in m.Standing if each.value in options), None)) is not None:
            round_, restarts = int(options.get("round", 1)), int(options.get("restarts", 0))
            past = m.Past(standing, round_, restarts, group.index(name), len(group), epoch=EPOCH)
            if standing is m.Standing.FAILED:
                past = past.replace(failure=FAILURE, failure_age_s=float(options["failed"] or 0.01))
            if "alone_s" in options:
                past = past.replace(ended="no contact", alone_s=float(options["alone_s"]))
        return hello(name, rank, terms=self.term.terms, past=past, seen_epoch=int(options.get("seen", 0)))

    def done(self, actions: list[Any]) -> Iterator[str]:
        """Each action in the order of the first; what is said, with the nodes that hear it."""
        names = {conn: name + "'" * back for name, of in self.conns.items() for back, conn in enumerate(of[::-1])}
        told: list[tuple[str, int, int]] = []  # what is done, with which connection, if with one, and its group rank
        for action in actions:
            conn = action.conn if isinstance(action, ev.Say | ev.Drop) else 0
            before = max((i for i, each in enumerate(told) if each[1] == conn), default=-1)
            if isinstance(action, ev.Drop) and before >= 0:
                told[before] = told[before][0] + "; dropped", conn, 0
            else:
                ranks = getattr(getattr(action, "message", None), "ranks", None)
                told.append((words(action), conn, 0 if ranks is None else ranks.group_rank))
        for what in dict.fromkeys(each[0] for each in told):
            hearing = sorted((rank, i, conn) for i, (text, conn, rank) in enumerate(told) if text == what)
            heard_by = " ".join(names[conn] for _, _, conn in hearing if conn)
            yield f"{heard_by}: {what}" if heard_by else what


def words(action: Any) -> str:  # noqa: C901, PLR0912  a case for each action
    part: Any = getattr(action, "message", None)
    if isinstance(part, str):  # of a plan, without a message of its own
        return part
    match action:
        case ev.Drop():
            return "dropped"
        case ev.Renew():
            return "asks for a renewal"
        case ev.Reclaim(above, stand_back_s):
            return f"asks for an epoch above {above}" + ", and stands back" * (stand_back_s > 0)
        case ev.Publish(verdict):
            return f"publishes: {coordinator.words(from_text(verdict))}"
        case ev.StepDown(reason):
            return f"steps down: {reason}"
        case ev.Say(_, m.Refused(reason, is_final)):
            return f"refused{' for good' * is_final}: {reason}"
        case ev.Say(_, m.Goodbye(reason, is_gone)):
            return f"goodbye{', it is gone' * is_gone}: {reason}"
        case ev.Say(_, m.Heartbeat(renewals, has_spares)):
            return f"heartbeat {renewals}{', nodes wait' * has_spares}"
        case ev.Say(_, m.Probe() | m.GivenUp() as message):
            return {m.Probe: "probe", m.GivenUp: "given up"}[type(message)]
        case ev.Say(_, m.Seats(_, round_, _, seats, _, closing)):
            how = f", closing: {closing.verdict.outcome}" if closing else ""
            return f"seats of round {round_}: {' '.join(seat.node_id for seat in seats)}{how}"
        case ev.Say(_, message):
            return coordinator.words(message)
        case _:
            raise AssertionError(action)


def told(story: Story) -> list[str]:
    return list(Told(story).lines(story))
