"""Stories of a restart policy as text: how workers fail, round by round, and the resulting decision.

The first line is `restarts` and `rules`, with `_` for a space.  Each line is the failure that ends a round: `raised` (an
error of the script, at `line`) or `killed` (with `signal`), and the progress of the round: `lives` in seconds, `step` (or
`unknown`).  Several identical failures in a row are one line with `times`.  Below that comes the last decision: its text,
its cost, and how another decision would have been reached.
"""

from __future__ import annotations

import ast
from typing import Any

from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.decision import Decision
from aelastic.rdzv.ledger import UNKNOWN, Ledger, Reached
from aelastic.rdzv.restart_policy import End, RestartPolicy, cause_of
from aelastic.rdzv.restart_rules import parse
from kit.stories import coordinator, files
from kit.stories.files import Story, options_of

FOLDER = files.FOLDER / "decisions"
TYPO = "KeyError: 'lr'"


def raised(message: str = TYPO, line: int = 40, before: str = "", **more: Any) -> ProcessFailure:
    """A failure by an exception raised in the user's script, called through a library's code."""
    frames = [f'  File "/job/train.py", line {line}, in <module>', '  File "/venv/site-packages/x.py", line 7, in f']
    text = "\n".join([*([before, ""] if before else []), "Traceback (most recent call last):", *frames, message])
    return ProcessFailure.from_elsewhere("h", 3, 0, 77, more.pop("exitcode", 1), message, text, 1000, **more)


class Playing:
    """A job's rounds under a policy."""

    def __init__(self, rules: str) -> None:
        options = options_of(rules)
        text = options.get("rules", "").replace("_", " ")
        self.policy = RestartPolicy(int(options["restarts"]), parse(text) if text else None, text)
        self.ledger, self.charged, self.now = Ledger(), 0, 0.0
        self.last: Decision | None = None

    def handle(self, line: str) -> Decision:
        options = options_of(line)
        for _ in range(int(options.get("times", 1))):
            assert self.last is None or not self.last.is_final, "the job is over"
            self.decide(failure_of(line), reached_by(options))
        assert self.last is not None
        return self.last

    def decide(self, failure: ProcessFailure, reached: Reached) -> None:
        reported = coordinator.as_reported(failure, self.policy)
        end = End(cause_of(reported), reported, self.charged, self.ledger, reached, now=self.now)
        self.last = self.policy.decide(end)
        self.ledger = self.policy.after(end, self.last)
        self.charged += self.last.is_charged
        self.now += reached.life_s


def failure_of(line: str) -> ProcessFailure:
    """Parses a line: a kind, fields of a failure as Python literals, and the progress of the round."""
    kind, *words = line.split()
    given = {key: value.replace("_", " ") for key, _, value in (word.partition("=") for word in words)}
    fields = {key: _value(value) for key, value in given.items() if key not in {"times", "lives", "step", "signal"}}
    if kind == "raised":
        return raised(**fields)
    assert kind == "killed", line
    return coordinator.failure("a", -int(given.get("signal", 11))).replace(**fields)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def reached_by(options: dict[str, str]) -> Reached:
    step = options.get("step", "")
    reached = Reached(life_s=float(options.get("lives", 1)))
    if not step:
        return reached
    return reached.replace(step=UNKNOWN if step == "unknown" else int(step))


def words(decision: Decision) -> list[str]:
    texts = [wording.text_of(decision)]
    if decision.is_final:
        return [*texts, f"ends the job; instead: {wording.instead_of(decision) or 'nothing'}"]
    costs = "costs a restart" if decision.is_charged else "costs none"
    if decision.place >= 0:
        costs = f"costs one of rule {decision.place} in {decision.within_s:g} s"
    waits = f", waits {decision.delay_s:g} s" if decision.delay_s else ""
    return [*texts, costs + waits]


def played(story: Story) -> list[str]:
    job, lines = Playing(story.rules), list[str]()
    for line in story.lines:
        if not line.startswith("  "):
            lines += [line, *(f"  {each}" for each in words(job.handle(line)))]
    return lines
