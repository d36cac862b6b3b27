"""Stories of a drain as text: what nodes request, where they hold, what they have saved, and what they receive.

As in `texts.py`.  The first line names the nodes of round 7, and options: `term`, `idle` if no round runs, `least` for
the number of nodes that the job needs, and a `rule` by which a drain ends the job.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from aelastic.rdzv.decisions import wording
from aelastic.rdzv.leader.drain import Crew, Drain
from aelastic.rdzv.protocol.requests import Answer, Ask, Frozen, Notice, Saved, Verb
from kit.stories import files, texts
from kit.stories.files import Story, options_of

FOLDER = files.FOLDER / "drains"


class Playing(texts.Playing):
    """A round of nodes, on hosts of the same names."""

    core: Drain[tuple[str, Any]]

    def __init__(self, rules: str) -> None:
        options, (self.nodes, *_) = options_of(rules), rules.split()
        self.least, self.rule = int(options.get("least", 1)), options.get("rule", "")
        self.term, self.participants = int(options.get("term", 5)), "" if "idle" in options else self.nodes
        self.core = Drain(lambda node_id, message: (node_id, message))
        self.now, self.asks = 100.0, count()

    def crew(self) -> Crew:
        hosts = {each: f"host-{each}" for each in self.nodes}
        return Crew(hosts, tuple(self.participants), 7, self.term, tuple(self.nodes), self.least, self.rule)

    def parts(self) -> Iterator[str]:
        core = self.core
        yield core.phase
        yield f"leaving: {' '.join(core.leaving) or 'none'}"
        yield f"aim: {core.aim.verb} by {core.aim.end_at:g}" if core.aim else "no aim"
        outcome = "" if core.outcome is None else wording.text_of(core.outcome)
        yield f"is over: {outcome}" if core.is_over else "is not over"
        yield f"verdict {core.verdict.outcome}" if core.verdict else "no verdict"

    def handle(self, line: str) -> list[Any]:
        answers = self.answers(line)
        self.core.validate()
        together: dict[Any, list[str]] = {}
        for node_id, message in answers:
            together.setdefault(message, []).append(node_id)
        return [(" ".join(names), message) for message, names in together.items()]

    def answers(self, line: str) -> list[Any]:
        if line == "the round ends":
            self.core.on_round_over()
            return []
        if line == "nodes are let go":
            return self.core.let_go(self.nodes, self.now)
        if line == "a timer fires":
            return self.core.handle(None, self.crew, self.now)
        names, verb, *_ = line.split()
        return [each for name in names for each in self.does(name, verb, line)]

    def does(self, name: str, verb: str, line: str) -> list[Any]:
        options = options_of(line)
        notice_id = int(options.get("notice", self.core.notice_id))
        if verb == "goes":
            self.core.on_gone(name)
            self.nodes, self.participants = (each.replace(name, "") for each in (self.nodes, self.participants))
            return []
        request: Ask | Frozen | Saved
        match verb:
            case "holds":
                calls = int(options["at"])
                request = Frozen(
                    name, notice_id, calls, int(calls > 0), int(options.get("save", 0)), "opted-in" in line
                )
            case "saved":
                request = Saved(name, notice_id)
            case _:
                within_s, target = float(options.get("in", 60)), options.get("of", "")
                ask_id, others = (
                    options.get("id", f"ask {next(self.asks)}"),
                    (int(options.get("round", 0)), "at_save" in options, "spare" in options),
                )
                request = Ask(name, ask_id, Verb(line.split()[2]), target, within_s, "spot", *others)
        return self.core.handle(request, self.crew, self.now)

    def words(self, action: Any) -> str:
        names, message = action
        match message:
            case Answer(_, is_applied, text):
                return f"{names}: {'answer' if is_applied else 'refused'}: {text}"
            case Notice(notice_id, _, stage, save_at, is_signalled, kill_s, cause):
                reason = wording.text_of(cause or "")
                at = (
                    f" at {save_at}" * bool(save_at)
                    + ", signalled" * is_signalled
                    + f", killed in {kill_s:g} s" * bool(kill_s)
                )
                return f"{names}: {stage} {notice_id}{at}{f' ({reason})' * bool(reason)}"
            case _:
                raise AssertionError(action)


def played(story: Story) -> list[str]:
    return list(Playing(story.rules).lines(story))
