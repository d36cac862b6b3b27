"""`--progress` with real workers: an unmodified script's steps arrive everywhere, without side effects."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
from kit.launching import Launcher
from kit.servers.trainer import trainer
from kit.verbs import json_of
from kit.waiting import wait_for

from aelastic.observe.health.address import HEALTH_PORT_VARIABLE

pytestmark = pytest.mark.usefixtures("warm_stores")

PATTERN = r"step (\d+)/(\d+)"
# Rank 0 reports a step, and continues once the test has seen it arrive.
STEPS = """
if rank == 0:
    say("step", "1/4")
    wait_for("posted")
    say("step", "2/4")
wait_for("go")
if rank == 0:
    say("step 4/4")
"""
# In the agent: it looks and posts often, with limits that a busy machine does not reach.
EAGER = """
from aelastic.agent.watches import progress
from aelastic.observe.export import trainer
progress.LOOK_INTERVAL_S = trainer.INTERVAL_S = 0.1
progress.CATCH_UP_S = trainer.REQUEST_TIMEOUT_S = trainer.LAST_TIMEOUT_S = trainer.TrainerStatus.close_timeout_s = 60.0
"""
# Each attempt prints its steps at once, the last one in an unfinished progress bar, and fails.
FAILS = """
first = 10 * restart
for step in range(first, first + 45):
    print(f"step {step + 1}/100", flush=True)
print(f"\\rstep {first + 46}/100", end="", flush=True)
raise ValueError("odd")
"""
TROUBLE = r"progress cannot be posted to the Trainer \(.*\); the job continues"


def test_an_unmodified_script_has_progress_everywhere(launch: Launcher, tmp_path: Path) -> None:
    with trainer(tmp_path) as server:
        env = {**server.env, HEALTH_PORT_VARIABLE: "0"}
        options = "--nproc-per-node", "2", "--progress", PATTERN, "--log-dir", str(tmp_path / "logs"), "--tee", "3"
        job = launch(STEPS, *options, env=env, wrapper=EAGER)
        wait_for("a status", lambda: server.statuses or server.refused)
        server.token.write_text("renewed")  # read again
        (job.folder / "posted").touch()
        wait_for("a status with a pace", lambda: len(server.statuses) > 1 or server.refused)
        (url,) = re.findall(r"health checks are answered at (http://\S+)", job.stderr)
        with urllib.request.urlopen(f"{url}/status", timeout=30) as answer:
            progress = json.loads(answer.read())["progress"]
        assert (progress["rank"], progress["step"], progress["total"]) == (0, 2, 4)
        assert progress["steps_per_s"] > 0 and progress["remaining_s"] > 0
        job.go()
        job.assert_ends()
        assert not server.refused
        assert server.statuses[0]["progressPercentage"] == 25
        last = server.statuses[-1]
        assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
        assert {"name": "total_steps", "value": "4"} in last["metrics"]
    (log,) = tmp_path.glob("logs/latest/events.jsonl")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [(each["step"], each["is_last"]) for each in records if each["event"] == "progressed"]
    assert (steps[0], steps[-1]) == ((1, False), (4, True))


def test_the_step_that_was_printed_last_is_the_step_of_each_end(launch: Launcher, tmp_path: Path) -> None:
    patient = "from aelastic.agent.watches import progress\nprogress.CATCH_UP_S = 60.0\n"
    options = "--progress", PATTERN, "--max-restarts", "1", "--log-dir", str(tmp_path / "logs")
    job = launch(FAILS, *options, wrapper=patient)
    assert job.wait() == 1
    for of in ((), (str(tmp_path / "logs"),)):
        assert [each["step"] for each in json_of(job.folder, "why", *of, "-n", "9")["why"]] == [56, 46], job.story


@pytest.mark.parametrize(
    "trouble",
    [
        "wrong token",
        "slow",
        *(
            pytest.param(each, marks=pytest.mark.all)
            for each in ("another's certificate", "no token", "not there", "5xx")
        ),
    ],
)
def test_no_trouble_of_the_trainer_disturbs_the_job(launch: Launcher, tmp_path: Path, trouble: str) -> None:
    with trainer(tmp_path) as server:
        env = server.env
        match trouble:
            case "wrong token":
                (tmp_path / "stale").write_text("another pod's")
                env["KUBEFLOW_TRAINER_SERVER_TOKEN"], reason = (
                    str(tmp_path / "stale"),
                    "answered 403 Forbidden: Forbidden",
                )
            case "no token":
                env["KUBEFLOW_TRAINER_SERVER_TOKEN"], reason = str(tmp_path / "none"), "No such file"
            case "not there":
                env["KUBEFLOW_TRAINER_SERVER_URL"], reason = "https://127.0.0.1:1/status", "Connection refused"
            case "another's certificate":
                url = env["KUBEFLOW_TRAINER_SERVER_URL"]
                env["KUBEFLOW_TRAINER_SERVER_URL"], reason = url.replace("localhost", "127.0.0.1"), "CERTIFICATE_VERIFY"
            case "5xx":
                server.answer, reason = 500, "answered 500 Internal Server Error: Internal error"
            case _:
                server.go.clear()
                reason = ""
        # Only with a slow server does the agent wait for its last post, and then give up.
        last_s = 0.3 if trouble == "slow" else 60.0
        limits = f"trainer.LAST_TIMEOUT_S = trainer.LAST_TIMEOUT_OF_FAILING_S = {last_s}\n"
        worker = "say('step 1/2')\nwait_for('go')\nsay('step 2/2')"
        job = launch(worker, "--progress", PATTERN, env=env, wrapper=EAGER + limits)
        if trouble == "slow":
            wait_for("it is asked", server.asked.is_set)
        else:
            wait_for("a warning", lambda: re.search(TROUBLE, job.stderr))
        job.go()
        job.assert_ends()
        warnings = re.findall(TROUBLE, job.stderr)
        assert len(warnings) == bool(reason) and all(reason in each for each in warnings), job.stderr
        assert not server.statuses or trouble == "slow"
