"""Deaths of workers, each with its expected verdict, including some that look permanent but heal."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from kit.launching import PREAMBLE, Launcher, ran, run
from kit.waiting import DEADLINE_S

from aelastic import InputError, Supervisor, WorkerSpec
from aelastic.base.host import patterns
from aelastic.base.host.children import wait_ended
from aelastic.base.host.patterns import PatternSearch
from aelastic.cli.verbs.explaining import run_policy
from aelastic.observe.observer import Observer
from aelastic.observe.run_events import Restarting, RunEnded, RunEvent
from aelastic.rdzv.decisions.decision import DecisionKind

PROOF, OFF = DecisionKind.SAME_ERROR, DecisionKind.RESTARTS_SPENT
STEPS = """
first = int(open("saved").read()) if os.path.exists("saved") else 0
for step in range(first, first + 3):
    print("step", step, flush=True)
open("saved", "w").write(str(first + {gain}))
{{}}["lr"]
"""
CALLS = "from aelastic import notice\nfor _ in range({}):\n    notice.due()\n{{}}['lr']\n"
HEALS = "tries = len(open('tries', 'a+').write('x') and open('tries').read())\ntries < 4 and open('away/data')\n"
BY_STEPS = {"max_restarts": 3, "progress": r"step (\d+)"}


@dataclass(frozen=True)
class Death:
    """A worker's code, the number of starts, the exit code and the decision."""

    does: str
    starts: int
    code: int
    decided: DecisionKind
    fields: dict[str, Any] = field(default_factory=dict)  # of the spec


def under(policy: str, max_restarts: int = 2) -> dict[str, Any]:
    return {"restart_policy": policy, "max_restarts": max_restarts}


# One example per path from a death to its verdict: core/test_restart_policy.py covers the rest.
DEATHS = {
    "a key": Death("{}['lr']", 2, 1, PROOF),
    "syntax": Death("exec('a b')", 2, 1, PROOF),
    "an option": Death(
        "import argparse\nargparse.ArgumentParser().parse_args(['--lr'])", 2, 2,
        PROOF,
    ),
    "a value": Death("raise ValueError('empty')", 3, 1, OFF),
    "a code": Death("sys.exit(7)", 3, 7, OFF),
    "a signal": Death("os.kill(os.getpid(), 11)", 3, -11, OFF),
    "exit: own budget": Death("sys.exit(42)", 2, 42, DecisionKind.STOPPED_BY_RULE, under("exit 42: restart 1/1h; exit 42: stop")),
    "exit: ignored": Death(
        "sys.exit(42 if restart < 9 and open('n', 'a').write('x') and os.path.getsize('n') < 4 else 0)", 4, 0,
        DecisionKind.RESTART_FREE, under("exit 42: ignore"),
    ),
    "error": Death("raise RuntimeError('ECC error 3')", 1, 1, DecisionKind.STOPPED_BY_RULE, under("error 'ECC|NVLink': stop")),
    "out of memory": Death("raise MemoryError", 1, 1, DecisionKind.STOPPED_BY_RULE, under("oom: stop")),
    "a delay": Death(
        "sys.exit(3)", 2, 3, DecisionKind.RESTART_BY_RULE, under("*: restart 1/1h after 100ms"),
    ),
    # Failures that heal by themselves don't end the job, however often they happen.
    "it heals": Death(HEALS, 4, 0, DecisionKind.SUCCEEDED, under("same-error any: stop; *: restart", 5)),
    # The same error after a new step is not proof; if nothing reports steps, calls of `due` are progress.
    "after new steps": Death(STEPS.format(gain=1), 4, 1, OFF, BY_STEPS),
    "after the same steps": Death(STEPS.format(gain=0), 2, 1, PROOF, BY_STEPS),
    "after new calls": Death(CALLS.format("restart + 1"), 4, 1, OFF, {"max_restarts": 3}),
    "after the same calls": Death(CALLS.format("2"), 2, 1, PROOF, {"max_restarts": 3}),
}  # fmt: skip


class Decisions(Observer):
    """The decisions of a run, in order."""

    def __init__(self) -> None:
        self.kinds: list[DecisionKind] = []

    def tell(self, event: RunEvent, now: float) -> None:
        if isinstance(event, Restarting | RunEnded) and event.decision is not None:
            self.kinds.append(event.decision.kind)


@dataclass
class End:
    starts: int
    code: int
    decided: list[DecisionKind]


def write_worker(death: Death, folder: Path) -> str:
    folder.mkdir()
    begin = f"{PREAMBLE}\nos.chdir({str(folder)!r})\nopen('starts', 'a').write('x')\n"
    path = folder / "worker.py"
    path.write_text(begin + death.does + "\n")
    return str(path)


async def end_of(death: Death, folder: Path) -> End:
    fields = {"max_restarts": 2, **death.fields}
    decisions = Decisions()
    spec = WorkerSpec(entrypoint=sys.executable, args=(write_worker(death, folder),), **fields)
    result = await Supervisor(spec, observers=[decisions]).run()
    code = result.failures[0].exitcode if result.failures else 0
    return End(len((folder / "starts").read_text()), code, decisions.kinds)


def test_each_death_has_its_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs run concurrently in this process."""
    # The last output of a worker is read and searched, however busy the machine is.
    for limit in ("agent.watches.progress.CATCH_UP_S", "agent.postmortem._READ_TIMEOUT_S", "base.host.patterns.ALL_S"):
        monkeypatch.setattr(f"aelastic.{limit}", DEADLINE_S)

    async def main() -> list[End]:
        return await asyncio.gather(*(end_of(death, tmp_path / name) for name, death in DEATHS.items()))

    ends = dict(zip(DEATHS, run("uvloop", main()), strict=True))
    expected = {name: (death.starts, death.code) for name, death in DEATHS.items()}
    assert {name: (end.starts, end.code) for name, end in ends.items()} == expected
    others = {name: ends[name].decided for name, death in DEATHS.items() if death.decided not in ends[name].decided}
    assert not others


# On the command line.

TWO_RANKS = """
say("rank", rank, os.environ.get("WRAPPED", "-"))
open(f"here{rank}", "w").close()
wait_for(f"here{1 - rank}")
sys.exit(3)
"""


def test_a_command_line_names_a_file_of_rules_and_ranks_that_another_program_starts(launch: Launcher) -> None:
    launch.folder.joinpath("rules").write_text("# ours\nexit 3: stop\n\n*: ignore\n")
    job = launch(
        TWO_RANKS, "--nproc-per-node", "2", "--max-restarts", "2", "--restart-policy", f"@{launch.folder}/rules",
        "--wrap", "env WRAPPED=by_${local_rank}", "--wrap-ranks", "1",
    )  # fmt: skip
    job.assert_ends(3)
    assert sorted(job.lines) == ["rank 0 -", "rank 1 by_1"], "started once"
    assert "; stopped by a rule of --restart-policy (exit 3: stop)" in job.stderr
    assert "--restart-policy: *: ignore restarts workers without limit" in job.stderr


def found_in(text: str, *patterns: str) -> set[str]:
    async def main() -> set[str]:
        search = PatternSearch()
        try:
            return {*await search.found(patterns, text)}
        finally:
            await search.aclose()

    return asyncio.run(main())


ENDLESS = "(a+)+$"  # on this text, it would take years
TEXT = "a" * 60 + "b"


def test_a_pattern_that_takes_too_long_is_not_a_match_and_the_others_are_searched_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit applies to its computing time."""
    monkeypatch.setattr(patterns, "ALL_S", DEADLINE_S)
    assert found_in("caab", "a+b", "b+c") == {"a+b"}
    assert found_in(TEXT, "a+b", ENDLESS, "aab") == {"a+b", "aab"}
    assert (
        f"the pattern '{ENDLESS}' took more than 50 ms" in caplog.text and "is treated as not matching" in caplog.text
    )


def test_what_is_not_searched_for_in_time_is_not_a_match(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All patterns share one limit, so many slow patterns delay a failure's report no more than one."""
    monkeypatch.setattr(patterns, "ALL_S", 0.2)
    found_in(TEXT, *(f"{ENDLESS}{n}" for n in range(400)))
    assert (
        f"the pattern '{ENDLESS}399' could not be searched for and is treated as not matching: not within 0.2 s"
        in caplog.text
    )


async def test_a_search_that_was_cut_short_or_has_died_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "ALL_S", DEADLINE_S)
    search = PatternSearch()
    with anyio.move_on_after(0):
        await search.found(["a", ENDLESS], TEXT)
    assert await search.found(["b"], TEXT) == {"b"}, "and no answer for the previous text"
    assert search._popen is not None
    search._popen.kill()
    await wait_ended(search._popen.pid)
    assert await search.found(["b"], TEXT) == {"b"}
    await search.aclose()


def explained(*options: str | Path) -> str:
    """What `aelastic policy explain` prints."""
    with redirect_stdout(io.StringIO()) as out:
        assert run_policy(["explain", *map(str, options)]) == 0
    return out.getvalue()


def rounds(*options: str | Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(explained(*options, "--json"))["rounds"]
    return found


def test_a_run_that_is_over_is_replayed_under_other_rules(launch: Launcher) -> None:
    job = launch("raise ValueError('odd')\n", "--max-restarts", "3", "--log-dir", "logs")
    assert job.wait() == 1
    logs = job.folder / "logs"
    same = rounds(logs)
    assert [each["now"] == each["decided"] for each in same] == [True] * 4 and same[3]["is_final"]
    other = explained(logs, "--restart-policy", "error ^ValueError: restart 1/1h; *: stop").splitlines()
    assert "worker.py:" in other[1] and other[1].startswith("  cause    ValueError: odd at ")
    assert [line.partition("; ")[2] for line in other if line.startswith("  now")] == [
        "restart 1 of 1 within 1h", "stopped by a rule of --restart-policy (*: stop)",
    ]  # fmt: skip
    assert other[-1] == "the job would have ended here: 2 rounds fewer"
    (log,) = {each.resolve() for each in logs.glob("*/events.jsonl")}  # `latest` is a link
    text = log.read_text()
    log.write_text("garbage\n[1]\n" + text + text.splitlines()[0][:40])  # damaged, and cut off
    assert rounds(logs) == same
    assert len(rounds(log, "--max-restarts", "1")) == 2
    for name, content, words in (
        ("two", text + text.replace(json.loads(text.splitlines()[0])["run_id"], "another"), "these are logs of 2 runs"),
        ("new", text.replace('"schema":1', '"schema":7'), "schema version 7; this aelastic reads version 1"),
        ("empty", "", "no record of a run"),
    ):
        (job.folder / name).write_text(content)
        with pytest.raises(InputError, match=words):
            explained(job.folder / name)
    for wrong in (["--max-restarts", "-1"], ["--restart-policy", "x"]):
        with pytest.raises(InputError):
            explained(logs, *wrong)
    command = [sys.executable, "-m", "aelastic", "policy", "explain"]
    output = ran(*command, str(job.folder / "empty"))
    assert output.returncode == 2 and "no record of a run" in output.stderr and not output.stdout, output
    assert ran(*command).returncode == 2
