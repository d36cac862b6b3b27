"""How a run ended, for scrapers that rarely look: a server that lingers, a file that stays."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from kit.backends import FakeBackend, Plan, StoreStandIn
from kit.launching import Job, Launcher, on_each_loop, run
from kit.metrics_text import values
from kit.this_process import python, until
from kit.virtual_clock import on_virtual_time
from kit.waiting import wait_for

from aelastic import InputError, Supervisor, WorkerExit, WorkerSpec
from aelastic.observe.export.textfile import MetricsTextfile
from aelastic.observe.health.address import HEALTH_PORT_VARIABLE

pytestmark = pytest.mark.usefixtures("warm_stores")

ANY_PORT = {HEALTH_PORT_VARIABLE: "0"}
FAILS = "say('start')\nsys.exit(3)"
LINGERS = r"the run is over: waiting up to \S+ s for a request of (http://\S+)/metrics"
# Longer than any test waits.
FOREVER = "3600"


def lingering(job: Job) -> str:
    found = wait_for(f"it lingers:\n{job.story}", lambda: re.search(LINGERS, job.stderr))
    return str(found.group(1))


def read(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return values(answer.read().decode())


@on_each_loop
def test_a_failed_job_is_there_until_a_scrape_has_seen_it(launch: Launcher, loop: str) -> None:
    options = "--linger", FOREVER, "--rdzv-id", "job-7", "--rdzv-backend", "c10d"
    job = launch(FAILS, *options, loop=loop, env=ANY_PORT)
    url = lingering(job)
    with urllib.request.urlopen(f"{url}/livez", timeout=30) as answer:  # not a scrape
        assert answer.status == 200
    metrics = read(url)
    assert (
        metrics['aelastic_run_ended{run_id="job-7",state="FAILED"}'] == metrics['aelastic_state{state="FAILED"}'] == 1
    )
    assert metrics['aelastic_phase{phase="done"}'] == metrics['aelastic_worker_exits_total{outcome="failed"}'] == 1
    assert job.wait() == 3, job.story
    with pytest.raises(OSError, match="refused"):
        read(url)
    job.assert_nothing_left()


@pytest.mark.parametrize("signum, worker, code", [(signal.SIGINT, FAILS, 3), (signal.SIGTERM, "say('start')", 0)])
def test_a_signal_ends_the_wait_at_once_and_changes_no_exit_code(
    launch: Launcher, signum: signal.Signals, worker: str, code: int
) -> None:
    job = launch(worker, "--linger", FOREVER, env=ANY_PORT)
    lingering(job)
    job.process.send_signal(signum)
    assert job.wait() == code, job.story
    job.assert_nothing_left()


LATE = """
import os, signal
from aelastic.cli import main

def conclude(*args, conclude=main._conclude):
    for signum in signal.SIGTERM, signal.SIGUSR1:
        os.kill(os.getpid(), signum)
    return conclude(*args)

main._conclude = conclude
"""


def test_a_signal_that_comes_when_the_job_is_over_changes_no_exit_code(launch: Launcher) -> None:
    job = launch(FAILS, "--on-signal", "USR1=drain:9", wrapper=LATE)  # like kubelet's SIGTERM after a preStop
    assert job.wait() == 3, job.story


def test_without_a_scrape_the_wait_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aelastic.agent.resources.StoreHost", StoreStandIn)
    spec = WorkerSpec(entrypoint="train.py", max_restarts=0, linger_s=0.2, env=ANY_PORT)
    assert run("asyncio", Supervisor(spec, backend=FakeBackend([Plan(0, WorkerExit(3))])).run()).is_failed()
    assert re.search(LINGERS, caplog.text)


def test_a_job_that_is_stopped_does_not_linger(launch: Launcher) -> None:
    job = launch("say('start')\nrest()", "--linger", FOREVER, env=ANY_PORT)
    job.wait_line("start")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM, job.story
    assert not re.search(LINGERS, job.stderr)


def test_without_a_server_linger_says_that_it_has_no_effect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aelastic.agent.resources.StoreHost", StoreStandIn)
    spec = WorkerSpec(entrypoint="train.py", linger_s=float(FOREVER), env={})
    run("asyncio", Supervisor(spec, backend=FakeBackend([Plan(0)])).run())
    assert f"linger has no effect, since {HEALTH_PORT_VARIABLE} is not set" in caplog.text


async def _cancel_while_lingering(supervisor: Supervisor) -> None:
    running = asyncio.create_task(supervisor.run())
    await until(lambda: supervisor._health and getattr(supervisor._health, "_has_ended", False))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@on_each_loop
def test_a_program_that_cancels_the_run_ends_the_wait(loop: str) -> None:
    run(loop, _cancel_while_lingering(Supervisor(python("", linger_s=float(FOREVER), env=ANY_PORT))))


# The file.


def test_a_file_for_node_exporter_has_the_end_of_the_run(launch: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "gpu.prom"
    path.parent.mkdir()
    options = "--metrics-textfile", str(path), "--rdzv-id", "job-7", "--rdzv-backend", "c10d", "--max-restarts", "1"
    job = launch("say('start')\nwait_for('go')\nsys.exit(3)", *options)
    job.wait_line("start")
    common = 'run_id="job-7",textfile="gpu.prom"'
    at_first = values(path.read_text())
    assert at_first[f'aelastic_state{{state="INIT",{common}}}'] == 1, "written before anything is started"
    job.go()
    assert job.wait() == 3, job.story
    metrics = values(path.read_text())
    assert metrics['aelastic_run_ended{run_id="job-7",state="FAILED",textfile="gpu.prom"}'] == 1
    assert metrics[f'aelastic_restarts_total{{cause="failure",{common}}}'] == 1
    assert list(path.parent.iterdir()) == [path], "a new file replaces the old one each time"


def test_the_file_is_written_while_the_job_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("aelastic.observe.export.textfile.WRITE_INTERVAL_S", 0.05)
    path, go = tmp_path / "a.prom", tmp_path / "go"

    async def main() -> None:
        code = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
        running = asyncio.create_task(Supervisor(python(code, metrics_textfile=path, run_id="x")).run())
        await until(lambda: path.exists() and values(path.read_text()).get(_state("HEALTHY")))
        go.touch()
        await running

    def _state(name: str) -> str:
        return f'aelastic_state{{state="{name}",run_id="x",textfile="a.prom"}}'

    run("asyncio", main())
    assert values(path.read_text())[_state("SUCCEEDED")] == 1


def test_a_file_that_cannot_be_is_refused_and_nothing_is_started(tmp_path: Path) -> None:
    backend, path = FakeBackend([Plan(0)]), tmp_path / "no" / "a.prom"
    spec = WorkerSpec(entrypoint="train.py", metrics_textfile=path)
    with pytest.raises(InputError, match=r"cannot be written \(No such file or directory\): choose another path"):
        run("asyncio", Supervisor(spec, backend=backend).run())
    assert backend.starts == []


def test_a_disk_that_hangs_holds_up_the_end_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hangs, write, begun, written = threading.Event(), MetricsTextfile._replace, list[int](), list[int]()

    def replace(self: MetricsTextfile, number: int, text: bytes) -> None:
        begun.append(number)
        if number > 1:
            hangs.wait(60)
        write(self, number, text)
        written.append(number)

    monkeypatch.setattr(MetricsTextfile, "_replace", replace)
    monkeypatch.setattr(MetricsTextfile, "close_timeout_s", 0.2)
    path = tmp_path / "a.prom"
    result: Any = run("asyncio", Supervisor(python("", metrics_textfile=path)).run())
    assert result.state.name == "SUCCEEDED"
    assert "MetricsTextfile did not finish within 0.2 s" in caplog.text
    hangs.set()
    wait_for("the thread to end", lambda: written == begun)  # a write that has not begun in time does not begin


@on_virtual_time
async def test_a_folder_that_is_lost_is_reported_once_and_the_job_continues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aelastic.agent.resources.StoreHost", StoreStandIn)
    path = tmp_path / "metrics" / "a.prom"
    path.parent.mkdir()
    spec = WorkerSpec(entrypoint="train.py", metrics_textfile=path)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(Supervisor(spec, backend=FakeBackend([Plan(100)])).run())
        await asyncio.sleep(50)
        path.unlink()
        path.parent.rmdir()
    assert not running.result().is_failed()
    assert caplog.text.count("cannot be written (No such file or directory); the job continues") == 1
