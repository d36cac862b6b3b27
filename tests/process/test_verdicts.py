"""Deaths of workers, each with the verdict that is expected; and those that look as if they would never heal, and do."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from kit.launching import Job, Launcher, ran, run

from aelastic import Supervisor, WorkerSpec
from aelastic.host import patterns

SAYS = "say('start', restart)\n"
PROOF = "twice without progress: restarting will not help (--restart-policy)"
OFF = "; all 2 restarts are used up"
# What the worker does; the policy (empty: the default); how often it is started; the exit code; what is said.  One of
# each way from a death to its verdict: the core decides the others alike (core/test_restart_policy.py).
DEATHS = [
    ("a key", "{}['lr']", "", 2, 1, PROOF),
    ("syntax", "exec('a b')", "", 2, 1, PROOF),
    ("an option", "import argparse\nargparse.ArgumentParser().parse_args(['--lr'])", "", 2, 2,
     "usage error: worker.py: error: unrecognized arguments: --lr"),
    ("a value", "raise ValueError('empty')", "", 3, 1, OFF),
    ("a code", "sys.exit(7)", "", 3, 7, OFF),
    ("a signal", "os.kill(os.getpid(), 11)", "", 3, 139, OFF),
    ("exit: own budget", "sys.exit(42)", "exit 42: restart 1/1h; exit 42: stop", 2, 42, "; exit 42: stop"),
    ("exit: ignored", "sys.exit(42 if restart < 9 and open('n', 'a').write('x') and os.path.getsize('n') < 6 else 0)",
     "exit 42: ignore", 6, 0, "; this restart costs none (exit 42: ignore)"),
    ("error", "raise RuntimeError('ECC error 3')", "error 'ECC|NVLink': stop", 1, 1, "error 'ECC|NVLink': stop"),
    ("out of memory", "raise MemoryError", "oom: stop", 1, 1, "; oom: stop"),
    ("from a file", "sys.exit(3)", "@", 1, 3, "; exit 3: stop (--restart-policy)"),
    ("a delay", "sys.exit(3)", "*: restart 1/1h after 100ms", 2, 3, "restart 1 of 1 within 1h, after 0.1 s"),
]  # fmt: skip


@pytest.mark.parametrize("does, policy, starts, code, words", [pytest.param(*rest, id=name) for name, *rest in DEATHS])
def test_a_death_has_its_verdict(launch: Launcher, does: str, policy: str, starts: int, code: int, words: str) -> None:
    if policy == "@":
        launch.folder.joinpath("rules").write_text("# ours\nexit 3: stop\n\n*: restart\n")
        policy = f"@{launch.folder}/rules"
    options = ("--restart-policy", policy) if policy else ()
    job = launch(SAYS + does + "\n", "--max-restarts", "2", *options)
    assert job.wait() in {code, 128 - code}, job.story
    assert len(job.wait_line("start")) == starts, job.story
    assert words in job.stderr, job.story


def test_what_heals_by_itself_is_not_stopped_however_often_it_comes(launch: Launcher) -> None:
    heals = "tries = len(open('tries', 'a+').write('x') and open('tries').read())\ntries < 5 and open('away/data')\n"
    job = launch(SAYS + heals, "--max-restarts=5", "--restart-policy", "same-error any: stop; *: restart")
    assert job.wait() == 0, job.story
    assert len(job.wait_line("start")) == 5


STEPS = """
first = int(open("saved").read()) if os.path.exists("saved") else 0
for step in range(first, first + 3):
    print("step", step, flush=True)
open("saved", "w").write(str(first + {gain}))
{{}}["lr"]
"""


# In the agent: what was written last is searched, however busy the machine is.
PATIENT = "from aelastic.agent import watches\nwatches.CATCH_UP_S = 20.0\n"


@pytest.mark.parametrize("gain, starts", [(1, 4), (0, 2)])
def test_the_same_error_after_a_step_that_is_new_is_no_proof(launch: Launcher, gain: int, starts: int) -> None:
    options = "--max-restarts", "3", "--progress", r"step (\d+)"
    job = launch(SAYS + STEPS.format(gain=gain), *options, wrapper=PATIENT)
    assert job.wait() == 1
    assert len(job.wait_line("start")) == starts, job.story


@pytest.mark.parametrize("calls, starts", [("restart + 1", 4), ("2", 2)])
def test_calls_of_due_are_progress_where_nothing_tells_steps(launch: Launcher, calls: str, starts: int) -> None:
    script = f"from aelastic import notice\nfor _ in range({calls}):\n    notice.due()\n{{}}['lr']\n"
    job = launch(SAYS + script, "--max-restarts", "3")
    assert job.wait() == 1
    assert len(job.wait_line("start")) == starts, job.story


def test_rules_that_never_end_a_job_are_said(launch: Launcher) -> None:
    job = launch(SAYS, "--restart-policy", "exit 3: stop; *: ignore")
    assert job.wait() == 0 and "--restart-policy: *: ignore starts workers again without end" in job.stderr


def test_a_pattern_that_takes_too_long_is_no_match(caplog: pytest.LogCaptureFixture) -> None:
    assert patterns.is_found("a+b", "caab") and not patterns.is_found("a+b", "caa")
    began = time.monotonic()
    assert not patterns.is_found("(a+)+$", "a" * 60 + "b")
    assert time.monotonic() - began < 20 and "counts as no match" in caplog.text


def test_in_a_program_rules_are_a_field() -> None:
    command = ("-c", "raise SystemExit(42)")
    spec = WorkerSpec(entrypoint=sys.executable, args=command, max_restarts=3, restart_policy="exit 42: stop")
    result = run("asyncio", Supervisor(spec).run())
    assert result.failures[0].exitcode == 42


def test_some_ranks_are_started_by_another_program(launch: Launcher) -> None:
    job = launch(
        "say('rank', rank, os.environ.get('WRAPPED', '-'))\n", "--nproc-per-node", "2",
        "--wrap", "env WRAPPED=by_${local_rank}", "--wrap-ranks", "1",
    )  # fmt: skip
    assert job.wait() == 0, job.story
    assert sorted(job.lines) == ["rank 0 -", "rank 1 by_1"]


def explained(job: Job, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aelastic", "policy", "explain", *options]
    return ran(*command, cwd=job.folder)


def test_a_run_that_is_over_is_replayed_under_other_rules(launch: Launcher) -> None:
    job = launch("raise ValueError('odd')\n", "--max-restarts", "3", "--log-dir", "logs")
    assert job.wait() == 1
    same = json.loads(explained(job, "logs", "--json").stdout)["rounds"]
    assert [each["now"] == each["decided"] for each in same] == [True] * 4 and same[3]["is_final"]
    other = explained(job, "logs", "--restart-policy", "error ^ValueError: restart 1/1h; *: stop").stdout.splitlines()
    assert "worker.py:" in other[1] and other[1].startswith("  cause    ValueError: odd at ")
    assert [line.partition("; ")[2] for line in other if line.startswith("  now")] == [
        "restart 1 of 1 within 1h", "*: stop (--restart-policy)",
    ]  # fmt: skip
    assert other[-1] == "the job would have ended here: 2 rounds fewer"
    (log,) = {each.resolve() for each in (job.folder / "logs").glob("*/events.jsonl")}  # `latest` is a link
    text = log.read_text()
    log.write_text("garbage\n[1]\n" + text + text.splitlines()[0][:40])  # damaged, and cut off
    assert json.loads(explained(job, "logs", "--json").stdout)["rounds"] == same
    assert len(json.loads(explained(job, str(log), "--json", "--max-restarts", "1").stdout)["rounds"]) == 2
    for name, content, words in (
        ("two", text + text.replace(json.loads(text.splitlines()[0])["run_id"], "another"), "these are logs of 2 runs"),
        ("new", text.replace('"schema":1', '"schema":7'), "schema version 7; this aelastic reads version 1"),
        ("empty", "", "no record of a run"),
    ):
        (job.folder / name).write_text(content)
        said = explained(job, name)
        assert said.returncode == 2 and words in said.stderr and not said.stdout, said
    assert explained(job, "logs", "--max-restarts", "-1").returncode == 2
    assert explained(job, "logs", "--restart-policy", "x").returncode == explained(job).returncode == 2
