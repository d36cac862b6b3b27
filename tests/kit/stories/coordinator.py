"""Stories of the coordinator core as text: events, and how it reacts to each.

A story has a title, the rules, then one event per line; several nodes that do the same share a line.  After `->` comes
the state, if the event changed it, and below that each message with the nodes that get it (assignments in the order of
group ranks).  `running=abc` begins in the first round of these nodes.

With `resumed=abc` a new leader continues a round of these nodes from the log, by default round 7: `count` restarts were
charged, the node of group rank `led` was the leader's, the nodes `gone` have ended, and the nodes `departed` had finished.
`taken_over=abc`: all of them have reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

from aelastic.diagnose.failures.places import Place
from aelastic.errors import ProcessFailure
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.leader.coordinator import Coordinator
from aelastic.rdzv.leader.coordinator_events import Broken, DeadlinePassed, Event, Lost, Phase, Send
from aelastic.rdzv.leader.job_state import JobState, round_of
from aelastic.rdzv.leader.roster import RoundRules
from aelastic.rdzv.leader.waiting_text import waiting_texts
from aelastic.rdzv.ledger import Reached
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.restart_rules import error_patterns, parse
from aelastic.rdzv.settings import LAST_CALL_TIMEOUT_S
from kit.decided import joined
from kit.numbered import restored
from kit.reports import Reports
from kit.stories.files import Story, options_of


def node(name: str, rank: int | None = None) -> m.Node:
    return m.Node(name, f"host-{name}", "default", 1, f"addr-{name}", 29500, rank)


def failure(name: str, exitcode: int = -11, message: str = "Signal 11 (SIGSEGV)") -> ProcessFailure:
    """A failure that by default is not a victim's, so nodes learn of it at once."""
    return ProcessFailure.from_elsewhere(f"host-{name}", 0, 0, 77, exitcode, message, "", 1000)


def as_reported(failure: ProcessFailure, policy: RestartPolicy) -> ProcessFailure:
    """The failure as its node reports it, after finding the rules that it matches."""
    places = error_patterns(policy.rules or ())
    found = {place for pattern in places if re.search(pattern, failure.headline) for place in places[pattern]}
    return failure.replace(matched_rules=tuple(sorted(found)))


def begun(rules: dict[str, str], reports: Reports, now: float) -> Coordinator:
    low, high = map(int, rules["nodes"].split(":"))
    text = rules.get("policy", "").replace("_", " ")
    policy = RestartPolicy(int(rules.get("restarts", 3)), parse(text) if text else None, text)
    round_rules = RoundRules(low, high, drain_wait_s=float(rules.get("drain_wait", 0)))
    core = Coordinator(round_rules, policy, rules.get("own", ""))
    core.roster.begin_term(int(rules.get("term", 0)))
    sends: list[Send] = []
    for name in rules.get("running", ""):
        sends += core.handle(reports.ready(node(name).replace(starts=starts_in(rules))), now)
    if core.phase is Phase.FORMING and "running" in rules:
        sends += core.handle(DeadlinePassed(), now + LAST_CALL_TIMEOUT_S)
    if names := rules.get("resumed", "") + rules.get("taken_over", ""):
        core.resume(kept(names, rules), rules.get("gone", ""), now)
        for name in names:
            reports.connects(node(name), m.Past(m.NodePhase.BUSY, core.round, int(rules.get("of_term", 0))))
    for name in rules.get("taken_over", ""):
        sends += core.handle(reports.connects(node(name), reports.of[name].past), now)
    for send in sends:
        reports.receives(send.node_id, send.message)
    assert (core.phase is Phase.RUNNING) == bool({"running", "taken_over"} & rules.keys())
    return core


def kept(names: str, rules: dict[str, str]) -> JobState:
    """What the log stores about a round of these nodes."""
    leader = names[int(rules["led"])] if "led" in rules else ""
    number, term = int(rules.get("round", 7)), int(rules.get("of_term", 0))
    round_ = round_of(number, term, [node(name) for name in names], leader)
    departed = tuple(names.index(name) for name in rules.get("departed", ""))
    return JobState(round_, int(rules.get("count", 0)), departed=departed)


def played(story: Story) -> list[str]:
    """A story's lines with the core's present results; comments stay in place."""
    rules = options_of(story.rules)
    now = 100.0
    reports = Reports()
    core = begun(rules, reports, now)
    lines: list[str] = []
    now += LAST_CALL_TIMEOUT_S * ("running" in rules)
    for full in story.lines:
        line, before = full.partition(" -> ")[0], (state_of(core, 0.0), core.deadline)
        if line.startswith("  "):
            continue
        if line.startswith("#"):
            lines.append(line)
            continue
        sends: list[Send] = []
        if wait := re.fullmatch(r"([\d.]+) s pass", line):
            now += float(wait[1])
        elif line == "the deadline passes":
            assert core.deadline is not None, "nothing is due"
            now = core.deadline
            sends = handle(core, DeadlinePassed(), now)
        elif line == "what do nodes read?":
            sends = waiting_texts(core, now)
        else:
            for event in events(line, core, reports):
                is_changed = (state_of(core, 0.0), core.deadline) != before
                assert not sends and not is_changed, (
                    f"of the events in {line!r} an earlier one has an effect: part them"
                )
                sends = [each for each in handle(core, event, now) if is_news(each, reports)]
        decisions = [send.node_id for send in sends if not isinstance(send.message, BESIDES)]
        assert len(set(decisions)) == len(decisions), (line, sends, "one decision for one node at a time")
        for send in sends:
            reports.receives(send.node_id, send.message)
        has_changed = (state_of(core, 0.0), core.deadline) != before
        lines += [line + f" -> {state_of(core, now)}" * has_changed, *(f"  {what}" for what in lines_of(sends))]
    return [restored(line) for line in lines]


def handle(core: Coordinator, event: Event, now: float) -> list[Send]:
    """Handles an event; the state for the log may change only with a new version, or no leader would propose it."""
    before, version = core.state(now), core.version
    sends = core.handle(event, now)
    assert core.version > version or core.state(now) == before, f"the log is not told what {event} changes"
    return sends


def is_news(send: Send, reports: Reports) -> bool:
    """Whether a message is news to a node: a new leader tells the nodes of a continuing round which round that is."""
    status = reports.of.get(send.node_id)
    return not (isinstance(send.message, m.Assigned) and status is not None and send.message.fence <= status.past.fence)


# What a node may receive together with a decision.
BESIDES = m.Waiting | m.StartAhead | m.Settled | m.Look | m.Compared | r.Answer | r.Cordoned | r.Notice


def state_of(core: Coordinator, now: float) -> str:
    left = "" if core.deadline is None else f", due in {core.deadline - now:g} s"
    return f"{core.phase}, round {core.round}, restarts {core.forming.restart_count}{left}"


def events(line: str, core: Coordinator, reports: Reports) -> Iterator[Event]:  # noqa: C901, PLR0912  a case for each verb
    """The events of a line: names of nodes, a verb, and options."""
    round_ = core.round
    if line == "a timer fires":
        yield DeadlinePassed()
        return
    line, _, reason = line.partition(": ")
    names, verb, rest = re.fullmatch(
        r"([\w ]+?) (is ready|is prepared|opts in|joins|returns|fails|succeeds|leaves|is lost|breaks off"
        r"|cordons|uncordons|drains|hangs|saw|repeats|has read)(.*)",
        line,
    ).groups()  # type: ignore[union-attr]
    options = dict(re.findall(r"(\w+)(?:=(\S+))?", rest))
    number = {key: int(value) for key, value in options.items() if re.fullmatch(r"-?\d+", value)}
    rank = number.get("node_rank")
    for name in names.split():
        match verb:
            case "is ready":
                given = node(name, rank).replace(starts=starts_in(options), unfit=options.get("unfit", ""))
                yield reports.ready(given, reached_in(options), number.get("after"))
            case "is prepared":
                yield reports.prepared(name, starts_in(options))
            case "repeats":
                yield reports.repeats(name) if name in reports.earlier else reports.updated(name)
            case "has read":  # the last message to it
                yield reports.updated(name)
            case "opts in":
                yield reports.opted_in(name, number.get("round", round_))
            case "joins":
                yield reports.connects(node(name, rank), m.Past(m.NodePhase.READY))
            case "returns":
                given = node(name, rank).replace(unfit=options.get("unfit", ""))
                yield reports.connects(given, past(name, options, number))
            case "fails":
                cause = FAILURES[options.get("how") or "killed"](name)
                cause = cause.replace(is_final=True, exitcode=-9) if "final" in options else cause
                reported = as_reported(cause, core.policy), float(options.get("age") or 0), reached_in(options)
                yield reports.failed(name, number.get("round", round_), *reported)
            case "succeeds":
                yield reports.succeeded(name, number.get("round", round_))
            case "leaves":
                yield reports.left(name, reason)
                reports.goes(name)
            case "is lost":
                yield Lost(name, reason, float(options.get("age") or 0))
                reports.goes(name)
            case "breaks off":
                yield Broken(name)
            case "hangs":
                of = number.get("round", round_)
                question = m.Hangs(name, of, "no output for 60 s", 60.0, True, "last" in options)
                yield reports.hangs(name, question)
            case "saw":
                places = m.Saw(name, number.get("round", round_), (place(name, reads="reads" in options),))
                yield reports.saw(name, places)
            case "cordons" | "uncordons":
                asked = r.Verb.CORDON if verb == "cordons" else r.Verb.UNCORDON
                yield reports.asked(name, r.Ask(name, f"ask {next(ASKS)}", asked, rest.strip(), 0.0, reason))
            case "drains":  # on a person's request
                ask = r.Ask(name, f"ask {next(ASKS)}", r.Verb.DRAIN, rest.strip(), 60.0, reason, spares_job=True)
                yield reports.asked(name, ask)


ASKS = count()


def typo(name: str) -> ProcessFailure:
    """An error of the user's script."""
    text = 'Traceback (most recent call last):\n  File "/job/train.py", line 40, in <module>\nKeyError: 1'
    return failure(name, 1, "KeyError: 1").replace(traceback=text)


def place(name: str, *, reads: bool) -> Place:
    """Where a node's rank is: in a collective, or elsewhere."""
    found = Place("abc".find(name), "a host of its choice", 7, "train.py:9", "all_reduce (train.py:9)", "all_reduce")
    return found.replace(at="data.py:3", call="read (data.py:3)", collective="", state="D") if reads else found


def reached_in(options: dict[str, str]) -> Reached | None:
    return Reached(step=int(options["step"])) if "step" in options else Reached() if "reached" in options else None


FAILURES: dict[str, Any] = {
    "typo": typo,
    "killed": failure,
    "raised": partial(failure, exitcode=1, message="ValueError: batch is empty"),
    "aborted": partial(failure, exitcode=-6, message="Signal 6 (SIGABRT)"),
    "reset": partial(failure, exitcode=1, message="RuntimeError: Connection reset by peer"),
}


def starts_in(options: dict[str, str]) -> m.Starts:
    return next((each for each in m.Starts if each.value in options), m.Starts.COLD)


def past(name: str, options: dict[str, str], number: dict[str, int]) -> m.Past:
    phase = next(each for each in m.NodePhase if each.value in options)
    has_failed = phase is m.NodePhase.FAILED or "after_failure" in options
    cause = FAILURES[options.get("how") or "killed"](name) if has_failed and "unreported" not in options else None
    ages = float(options.get("failed_ago") or 0), "spares" in options, float(options.get("alone") or 0)
    ended = joined("host-x").cause if "ended" in options else None
    base = phase, number["round"], number.get("term", 0), cause, *ages, ended, "charged" in options
    return m.Past(*base, has_opted_in="opted" in options)


def lines_of(sends: list[Send]) -> list[str]:
    """Each message with the nodes that get it, ordered by first occurrence."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for send in sends:
        place = send.message.ranks.group_rank if isinstance(send.message, m.Assigned) else 0
        groups.setdefault(words(send.message), []).append((place, send.node_id))
    return [
        f"{' '.join(name for _, name in sorted(to, key=lambda each: each[0]))}: {what}" for what, to in groups.items()
    ]


def words(message: Any) -> str:  # noqa: C901  a case for each message
    match message:
        case m.Assigned():
            begun = f"assigned round {message.round} of {message.ranks.group_world_size}"
            return f"{begun}, restarts {message.restart_count}, master {message.master_addr}"
        case m.Interrupted():
            how = " in place" * message.in_place
            known = f"interrupted round {message.round}{how}, restarts {message.restart_count}"
            return f"{known}: {wording.text_of(message.decision)}"
        case m.Ended():
            cause = f" (cause: rank {message.cause.rank} on {message.cause.host})" if message.cause else ""
            return f"ended {message.outcome}: {wording.text_of(message.decision)}{cause}"
        case m.Waiting():
            return f"waiting: {message.full}"
        case m.StartAhead():
            return "start ahead"
        case m.Settled():
            return f"settled: {wording.settled(message.round, message.decision)}"
        case m.Look():
            return f"look what workers of round {message.round} do: {message.reason}"
        case m.Compared():
            stopped = f", stopped: {' '.join(map(str, message.outliers))}" * (
                message.is_stopped and bool(message.outliers)
            )
            return f"compared round {message.round}{stopped}: {message.text}"
        case r.Answer():
            return f"{'answer' if message.is_applied else 'refused'}: {message.text}"
        case r.Notice():
            return f"notice: {message.stage}: {wording.text_of(message.cause or '')}"
        case r.Cordoned():
            return f"cordoned for {message.again_s:g} s: {message.reason}" if message.again_s else "uncordoned"
        case _:
            raise AssertionError(message)
