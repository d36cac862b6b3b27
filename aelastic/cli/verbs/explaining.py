"""`aelastic policy explain`: replays a run's event logs to show what rules would have decided; and `aelastic why LOGS`.

Each end of a round is shown with the decision of that time, and the decision of the rules; nothing is started.  Logs
don't record how often workers polled for notices; if a job has reported no steps, a round of 60 s counts as progress.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from aelastic.agent.error_rules import ErrorRules
from aelastic.cli.manual.parsing import parser_of
from aelastic.diagnose.failures.failure import SHARED_FIELDS, ProcessFailure, epoch_s
from aelastic.errors import InputError
from aelastic.observe.run_events import Recovered
from aelastic.observe.run_state import GenerationEnd
from aelastic.observe.status import describe_ends
from aelastic.observe.ui.commands import write_text
from aelastic.observe.ui.progress_line import ProgressLine
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.as_json import from_json, to_json
from aelastic.rdzv.decisions.cause import Cause, CauseKind
from aelastic.rdzv.decisions.decision import Decision
from aelastic.rdzv.ledger import NONE, Ledger, Reached
from aelastic.rdzv.restart_policy import End, RestartPolicy, cause_of
from aelastic.rdzv.restart_rules import Rule, parse
from aelastic.settings import read_policy
from aelastic.tools.timeline.chain import as_json, chains_of
from aelastic.tools.timeline.files import read_all
from aelastic.tools.timeline.reader import Entry, Log, offsets_of, recovered_in

Json = dict[str, Any]


class RecordedEnd(NamedTuple):
    """The end of a round, as in a record."""

    reason: str
    decision: Decision | None
    at: float
    has_failed: bool
    stimulus: str  # "" in logs of older versions


class Round:
    """One round of a run, from all of its logs."""

    def __init__(self, number: int, began: float) -> None:
        self.number, self.began, self.ended = number, began, 0.0
        self.generation, self.started = number, None  # type: int, float | None
        self.reason, self.is_over, self.step = "", False, NONE
        self.decision: Decision | None = None  # None in logs of older versions
        self.stimulus = ""  # of its end
        self._has_failed = False  # for these
        self._last_steps: dict[str, int] = {}  # by node
        self._ends: dict[bool, RecordedEnd] = {}  # the first records of a restart, and of the job's end
        self._recovered: Recovered | None = None  # of the next round, as one node reports its workers
        self._is_left_in_place = False
        self.failures: dict[int, ProcessFailure] = {}  # by rank
        self.hosts: set[str] = set()

    def take(self, entry: Entry) -> None:
        """Reads a record about the round.

        Raises:
            ValueError: the record is damaged.
        """
        record, at = entry.fields, entry.wall
        match entry.kind:
            case "workers_started":
                self.generation, self.started = entry.number("generation"), self.started or at
            case "worker_ended" if record.get("failure"):
                self.failures.setdefault(entry.number("rank"), _failure_in(record["failure"]))
            case "progressed":
                step = entry.number("step")
                self.step = max(self.step, step)
                self._last_steps[entry.text("node")] = step
            case "restarting" | "job_ended" | "run_ended" as event:
                if record.get("failure"):
                    failure = _failure_in(record["failure"])
                    self.failures.setdefault(failure.rank, failure)
                if reason := entry.text("reason"):
                    has_failed = entry.text("cause") == "failure" or record.get("failure") is not None
                    decision, stimulus = from_json(record.get("decision")), entry.text("stimulus")
                    end = RecordedEnd(reason, decision, at, has_failed, stimulus)
                    self._ends.setdefault(event != "restarting", end)
                self._is_left_in_place |= event == "restarting" and record.get("in_place") is True
            case "not_recovered":
                self._is_left_in_place = False
            case _:
                pass
        self.hosts.add(entry.text("host"))

    def on_recovered(self, entry: Entry) -> None:
        """Notes that the next round continues in place, with a state that this one has made.

        Raises:
            ValueError: the record is damaged.
        """
        recovered = recovered_in(entry)
        self.step = max(self.step, recovered.step)
        self._last_steps[entry.text("node")] = recovered.step
        self._recovered = self._recovered or recovered

    def settle(self, *, is_last: bool) -> None:
        """Chooses the round's end once all is read: a node without later rounds also records the job's end for it."""
        if self._ends:
            end = self._ends.get(is_last) or self._ends[not is_last]
            self.reason, self.decision, self.ended, self._has_failed, self.stimulus = end
            self.is_over = is_last and True in self._ends

    @property
    def cause(self) -> Cause:
        """The first cause, as recorded; for logs of older versions, a failure or a cause that costs nothing."""
        if self.decision is not None:
            return self.decision.cause
        if self._has_failed and self.failures:
            return cause_of(next(iter(self.failures.values())))
        return Cause(CauseKind.TORCH, detail=self.reason)

    @property
    def failure(self) -> ProcessFailure | None:
        """The failure that is the cause, if it is one and a log contains it."""
        cause = self.cause
        return self.failures.get(cause.ranks[0]) if cause.is_failure and cause.ranks else None

    def end(self, again: float | None) -> GenerationEnd:
        """Returns the end as a live agent would report it; `again`: when workers ran again."""
        failure = self.failure or next(iter(self.failures.values()), None)
        step = max(self._last_steps.values(), default=None)
        known = (self.reason, failure, step, again, self.decision, self.number)
        in_place, recovered = self._is_left_in_place, self._recovered
        return GenerationEnd(self.generation, self.began, self.ended, "end", *known, in_place, recovered)


def _failure_in(record: Json) -> ProcessFailure:
    """Returns the failure in a record.

    Raises:
        ValueError: a field is missing.
    """
    known = {name: record[name] for name in SHARED_FIELDS if record.get(name) is not None}
    known.pop("matched_rules", None)  # these are of the run's own rules
    known["timestamp"] = epoch_s(record.get("timestamp_s"))
    try:
        return ProcessFailure.from_elsewhere(**known)
    except TypeError as error:
        raise ValueError(str(error)) from None


def run_policy(argv: Sequence[str]) -> int:
    """Replays a run under other rules; returns the exit code.

    Raises:
        InputError: the logs, or the rules, cannot be read.
    """
    args = parser_of("policy").parse_args(argv)
    try:
        text = read_policy(args.restart_policy)
        rules = parse(text) if text else None
    except ValueError as error:  # a `RuleError` is one
        raise InputError(f"--restart-policy {args.restart_policy}: {error}") from None
    rounds, budget = _rounds_in(_read_logs(args.events))
    rounds = [each for each in rounds if each.reason]
    if rules is not None:
        asyncio.run(_compare(rounds, rules))
    policy = RestartPolicy(budget if args.max_restarts is None else args.max_restarts, rules)
    decided = list(_decisions(policy, rounds))
    write_text(json.dumps({"code": "ok", "rounds": decided}, indent=2) if args.json else as_text(decided, len(rounds)))
    return 0


def read_ends(path: Path) -> list[Json]:
    """Returns why each generation of a run ended, the latest first, from its event log or a folder of them.

    Raises:
        InputError: there is no record of one run.
    """
    logs = _read_logs([path])
    rounds, _ = _rounds_in(logs)
    chains = chains_of(logs, offsets_of(logs)[0])
    starts = [each.started for each in rounds[1:]]
    ended = [(each, again) for each, again in zip(rounds, [*starts, None], strict=False) if each.reason]
    now = datetime.now(UTC)
    found = describe_ends([each.end(again) for each, again in ended], now.timestamp(), now)
    for end, (round_, _) in zip(reversed(found), ended, strict=True):
        end["chain"] = as_json(chains.get(round_.stimulus, []))
    return found


class Rounds:
    """The rounds of a run, from the records of all of its logs."""

    def __init__(self) -> None:
        self.budget = 0  # of restarts
        self.found: dict[int, Round] = {}
        self._of_generation: dict[tuple[str, int], int] = {}  # by node, because each counts its own

    def take(self, entry: Entry) -> None:
        """Reads a record.

        Raises:
            ValueError: the record is damaged.
        """
        if entry.kind == "run_began":
            self.budget = entry.number("max_restarts")
        if entry.fields.get("round") is None:
            return
        number, generation = entry.number("round"), (entry.text("node"), entry.number("generation"))
        if entry.kind == "workers_started":
            self._of_generation[generation] = number
        if entry.kind == "recovered" and (before := max((each for each in self.found if each < number), default=0)):
            self.found[before].on_recovered(entry)
        if entry.kind == "progressed":  # the last step may be recorded after the next round has formed
            number = self._of_generation.get(generation, number)
        if number:
            self.found.setdefault(number, Round(number, entry.wall)).take(entry)


def _read_logs(paths: Sequence[Path]) -> list[Log]:
    """Returns the logs of a run.

    Raises:
        InputError: there is no record, or there are records of several runs.
    """
    with ProgressLine() as progress:
        logs = read_all(paths, progress.show)
    runs = dict.fromkeys(entry.text("run_id") for log in logs for entry in log.entries)
    if len(runs) > 1:
        raise InputError(f"these are logs of {len(runs)} runs: name those of one: {', '.join(list(runs)[:5])}")
    if not runs:
        raise InputError(f"{', '.join(map(str, paths))}: no record of a run")
    return [log for log in logs if log.entries]


def _rounds_in(logs: Sequence[Log]) -> tuple[list[Round], int]:
    """Returns the rounds of a run, and its restart budget."""
    rounds = Rounds()
    for entry in (entry for log in logs for entry in log.entries):
        with suppress(ValueError):  # skip the record; keep the rest
            rounds.take(entry)
    found = [each for _, each in sorted(rounds.found.items())]
    for each in found:
        each.settle(is_last=each is found[-1])
    return found, rounds.budget


async def _compare(rounds: Sequence[Round], rules: Sequence[Rule]) -> None:
    """Finds the rules whose patterns match the failures, as the nodes of a run do."""
    error_rules = ErrorRules(rules)
    try:
        for each in rounds:
            if (failure := each.failure) is not None:
                each.failures[failure.rank] = await error_rules.matched_by(failure)
    finally:
        await error_rules.aclose()


def _decisions(policy: RestartPolicy, rounds: Sequence[Round]) -> Iterator[Json]:
    ledger, count = Ledger(), 0
    for each in rounds:
        cause, failure = each.cause, each.failure
        reached = Reached(each.step, NONE, max(0.0, each.ended - each.began))
        hosts = len(each.hosts)
        end = End(cause, failure, count, ledger, reached, now=each.ended, nodes=hosts, hosts=hosts)
        is_success = each.is_over and failure is None and not cause.is_loss
        decision = None if is_success else policy.decide(end)
        yield {
            "round": each.number,
            "after_s": round(reached.life_s, 3),
            "step": None if each.step == NONE else each.step,
            "cause": failure.headline if failure else wording.text_of(cause),
            "decided": each.reason,
            "was": to_json(each.decision),
            "now": each.reason if decision is None else wording.text_of(decision),
            "is_same": decision is None or decision == each.decision,
            "is_final": decision is None or decision.is_final,
            "decision": to_json(each.decision if decision is None else decision),
        }
        if decision is None:
            return
        if decision.is_final:
            return
        ledger, count = policy.after(end, decision), count + decision.is_charged


def as_text(decided: Sequence[Json], count: int) -> str:
    """Returns the text for people; `count`: the number of rounds."""
    lines = []
    for each in decided:
        step = "" if each["step"] is None else f", at step {each['step']}"
        lines += [f"round {each['round']} ended after {each['after_s']:.2f} s{step}", f"  cause    {each['cause']}"]
        lines.append(f"  decided  {each['decided']}")
        lines.append(f"  now      {'the same' if each['is_same'] else each['now']}")
    rest = count - len(decided)
    if rest:
        lines.append(f"the job would have ended here: {rest} round{'s' * (rest > 1)} fewer")
    return "\n".join(lines) or "no round has ended"
