"""Examples that need other programs: a service with FastAPI, a notebook, and Ray tasks."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import urllib.error
import urllib.request
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import pytest
from kit.launching import PREAMBLE, Job
from kit.ports import quiet_port
from kit.servers.recipes import ROOT, python_with
from kit.waiting import wait_for
from kit.workers.examples import EXAMPLES, copy_examples, kill_rank_1

LIMIT_S = 200.0
TRAINING = """
def save(*_):
    say("saved")
    sys.exit(0)


if sys.argv[1:] == ["long"]:  # of two that fail, one may be asked to end before it has
    signal.signal(signal.SIGTERM, save)
say(f"rank {rank} of {os.environ['WORLD_SIZE']}, restart {restart}")
if "fail" in sys.argv and restart == 0:
    sys.exit(7)
if sys.argv[1:] == ["long"]:
    say("rests")
    rest()
if sys.argv[-1].endswith("/seen"):
    wait_for(sys.argv[-1])
"""

pytestmark = pytest.mark.timeout(3 * LIMIT_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the examples, with one more script."""
    copy_examples(tmp_path / "examples")
    folder = tmp_path / "examples"
    (folder / "train.py").write_text(PREAMBLE + TRAINING)
    return folder


class Service:
    """The example, served by uvicorn."""

    def __init__(self, folder: Path) -> None:
        self._at = f"127.0.0.1:{quiet_port()}"
        host, port = self._at.split(":")
        uvicorn = ["-m", "uvicorn", "fastapi_app:app", "--host", host, "--port", port]
        command = [python_with("fastapi", "uvicorn"), *uvicorn]
        self.job = Job(folder / "job", command, {"TRAININGS": ".", "OMP_NUM_THREADS": "1"}, cwd=folder)

    def ask(self, method: str, path: str, **fields: Any) -> tuple[int, Any]:
        data = json.dumps(fields).encode() if fields else None
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://{self._at}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except OSError:
            return 0, None  # it does not listen yet


@pytest.mark.ci
@pytest.mark.all
def test_a_service_refuses_what_cannot_be_starts_jobs_shows_and_stops_them_and_lets_them_save(folder: Path) -> None:
    pages = [(ROOT / place).read_text() for place in ("docs/how-to/fastapi.md", "examples/fastapi_app.py")]
    asked = {wanted for text in pages for wanted in re.findall(r"-d '(\{.*\})'", text)}
    service, job = Service(folder), {"script": "train.py", "workers": 2}
    try:
        wait_for("the service", lambda: service.ask("GET", "/jobs/1")[0] == 404, LIMIT_S)
        for refused, words in (
            ({**job, "script": "../train.py"}, "script: there is no ../train.py in "),
            ({**job, "workers": 0}, "local_world_size is 0: at least 1 worker is needed"),
        ):
            code, answer = service.ask("POST", "/jobs", **refused)
            assert code == 422 and answer["detail"].startswith(words)
        assert service.ask("POST", "/jobs", **job, max_restarts=1, args=["fail"]) == (201, {"job": 1})
        assert service.ask("POST", "/jobs", **job, args=["fail"]) == (201, {"job": 2})
        for number in (3, 4):
            assert service.ask("POST", "/jobs", **job, args=["long"]) == (201, {"job": number})
        wait_for("the first", lambda: service.ask("GET", "/jobs/1")[1]["state"] == "SUCCEEDED", LIMIT_S)
        service.job.wait_line("rank 0 of 2, restart 1")
        wait_for("the end of the second", lambda: service.ask("GET", "/jobs/2")[1]["end"], LIMIT_S)
        failed = service.ask("GET", "/jobs/2")[1]
        assert failed["state"] == "FAILED"
        assert re.search(r"^rank \d failed on .*; cause: exited with code 7", failed["end"])
        wait_for("the third", lambda: service.ask("GET", "/jobs/3")[1]["state"] == "HEALTHY", LIMIT_S)
        assert len(service.ask("GET", "/jobs/3")[1]["workers"]) == 2
        service.job.wait_line("rests", 4, LIMIT_S)  # they can save
        assert service.ask("DELETE", "/jobs/3")[0] == 200
        wait_for("its end", lambda: "SIGTERM" in service.ask("GET", "/jobs/3")[1]["end"], LIMIT_S)
        assert service.job.stdout.count("saved") == 2
        for number, wanted in enumerate(asked, 5):  # as its page and its docstring request
            assert service.ask("POST", "/jobs", **json.loads(wanted)) == (201, {"job": number})
            page = f"/jobs/{number}"
            wait_for("its end", partial(lambda page: service.ask("GET", page)[1]["end"], page), LIMIT_S)
            assert service.ask("GET", page)[1]["state"] == "SUCCEEDED", service.job.story
        service.job.signal(15)
        service.job.wait(LIMIT_S)
        assert service.job.stdout.count("saved") == 4
        ours = partial(glob, f"{service.job.tmp}/aelastic*")  # torch leaves a folder of its own
        wait_for("nothing left", lambda: not service.job.left() and not ours())
    finally:
        service.job.kill_all()


@pytest.mark.ci
@pytest.mark.all
def test_a_job_of_a_service_resumes_from_its_checkpoint_after_a_worker_was_killed(folder: Path) -> None:
    kill_rank_1(folder / "ddp.py", step=128 * 2 + 60)
    service = Service(folder)
    try:
        wait_for("the service", lambda: service.ask("GET", "/jobs/1")[0] == 404, LIMIT_S)
        job = {"script": "ddp.py", "args": ["--epochs", "4"], "workers": 2, "max_restarts": 3}
        assert service.ask("POST", "/jobs", **job) == (201, {"job": 1})
        wait_for("its end", lambda: service.ask("GET", "/jobs/1")[1]["end"], LIMIT_S)
        ended = service.ask("GET", "/jobs/1")[1]
        assert ended["state"] == "SUCCEEDED", (ended, service.job.story)
        done = re.findall(r"starting|resuming|epoch \d(?=:)", service.job.stdout)
        assert done == ["starting", "epoch 1", "epoch 2", "resuming", "epoch 3", "epoch 4"], service.job.story
    finally:
        service.job.kill_all()


@pytest.mark.all
def test_a_service_without_its_folder_shows_which_variable_it_needs() -> None:
    command = [python_with("fastapi"), str(EXAMPLES / "fastapi_app.py")]
    env = {name: value for name, value in os.environ.items() if name != "TRAININGS"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("fastapi_app: set TRAININGS ")


@pytest.mark.all
def test_a_notebook_waits_for_a_job_reads_a_failure_and_stops_a_job(tmp_path: Path) -> None:
    program = f"""
import json, nbformat
from nbclient import NotebookClient

notebook = nbformat.read({str(EXAMPLES / "notebook.ipynb")!r}, 4)
NotebookClient(notebook, timeout=150).execute()
print(json.dumps(["".join(each.get("text", "") for each in cell.get("outputs", ())) for cell in notebook.cells]))
"""
    command = [python_with("nbclient", "ipykernel"), "-c", program]
    # A kernel that sees pytest's variable does not show its children's output.
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    env["HOME"] = str(tmp_path)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout.splitlines()[-1])
    # The kernel may show the workers' output below a later cell.
    assert "rank 1 of 2, restart 1" in "".join(outputs) and "SUCCEEDED\n" in outputs[4], outputs
    assert "FAILED RuntimeError: not the first time" in outputs[6], outputs
    assert "HEALTHY" in outputs[8] and "STOPPED the agent was asked to stop (SIGTERM)" in outputs[9], outputs


@pytest.mark.all
def test_agents_in_tasks_of_ray_train_together_and_restart_workers_as_the_page_starts_them(folder: Path) -> None:
    (shown,) = re.findall(
        r"^\$ python examples/ray_nodes.py (.*)", (ROOT / "docs/how-to/ray.md").read_text(), re.MULTILINE
    )
    options = shlex.split(shown.replace("--workers 8", "--workers 1").replace("/shared/", ""))
    command = [python_with("ray"), str(EXAMPLES / "ray_nodes.py"), *options, "fail", str(folder / "seen")]
    env = {"HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    job = Job(folder / "job", command, env, cwd=folder)
    words = [f"rank {rank} of 2, restart 1" for rank in (0, 1)]
    try:
        # While they run: Ray delivers the output of tasks late, and loses what is pending when the program ends.
        wait_for(
            lambda: f"restarted workers\n{job.story}",
            lambda: all(each in job.stdout for each in words) or job.process.poll() is not None,
            LIMIT_S,
        )
        assert all(each in job.stdout for each in words), job.story
        (folder / "seen").touch()
        assert job.wait(LIMIT_S) == 0, job.story
        assert "ray_nodes: the job has succeeded" in job.stdout
    finally:
        job.kill_all()
