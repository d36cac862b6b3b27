"""`deploy/cloud`: `start.sh` and `notice.py` with fake metadata servers; checks of the shell scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kit.launching import PREAMBLE, Job
from kit.ports import quiet_port
from kit.servers.metadata import LEFT, Metadata
from kit.servers.recipes import ROOT, python_with
from kit.waiting import wait_for

from aelastic.errors import EXIT_TRY_AGAIN

START = ROOT / "deploy" / "cloud" / "start.sh"
VARIABLES = {"aws": "AWS_EC2_METADATA_SERVICE_ENDPOINT", "google": "GCE_METADATA_HOST"}
TRAINING = """
def save(*_):
    say("saved")
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
say(*sys.argv[1:], os.environ["WORLD_SIZE"])
"""


def instance_of(cloud: str) -> Metadata:
    endpoint = f"127.0.0.1:{quiet_port()}"
    tags = {"endpoint": endpoint, "nodes": "1", "command": "train.py a b", "run-id": "my-job", "workers": "2"}
    return Metadata(cloud, tags)


@contextmanager
def started(metadata: Metadata, folder: Path, worker: str = "") -> Iterator[Job]:
    (folder / "train.py").write_text(PREAMBLE + TRAINING + worker)
    (folder / "venv").symlink_to(sys.prefix)
    shutil.copy(START.parent / "notice.py", folder)
    nowhere = f"127.0.0.1:{quiet_port()}"
    with metadata.served():
        addresses = {cloud: metadata.at if cloud == metadata.cloud else nowhere for cloud in VARIABLES}
        addresses["aws"] = f"http://{addresses['aws']}"
        env = {VARIABLES[cloud]: address for cloud, address in addresses.items()} | {"NOTICE_INTERVAL": "0.1"}
        job = Job(folder / "job", [str(START)], {**env, "TRAINING_FOLDER": str(folder)})
        try:
            yield job
        finally:
            job.kill_all()


@pytest.mark.all
@pytest.mark.parametrize("cloud, worker, code", [("google", "", 0), ("aws", "sys.exit(7)", 7)])
def test_an_instance_trains_as_its_tags_say_and_ends_with_its_workers_code(
    cloud: str, worker: str, code: int, tmp_path: Path
) -> None:
    metadata = instance_of(cloud)
    metadata.tags["restarts"] = "0"
    with started(metadata, tmp_path, worker) as job:
        assert job.wait() == code, job.story
        assert code or job.lines.count("a b 2") == 2, job.story
        job.wait_nothing_left()


@pytest.mark.all
@pytest.mark.parametrize("cloud", VARIABLES)
def test_workers_save_when_the_instance_is_going_away(cloud: str, tmp_path: Path) -> None:
    metadata = instance_of(cloud)
    with started(metadata, tmp_path, "rest()") as job:
        job.wait_line("a b 2", 2)
        metadata.state = "notice"
        assert job.wait() == EXIT_TRY_AGAIN, job.story
        assert job.lines.count("saved") == 2
        assert "(spot, by the notice command)" in job.stderr
        job.wait_nothing_left()


@pytest.mark.parametrize("cloud, name", [("aws", "endpoint"), ("google", "run-id")])
def test_what_is_missing_is_named(cloud: str, name: str, tmp_path: Path) -> None:
    metadata = instance_of(cloud)
    del metadata.tags[name]
    with started(metadata, tmp_path) as job:
        assert job.wait() == 2
        assert job.stderr == (
            f"start.sh: this instance has no tag or attribute training-{name}, see docs/how-to/cloud.md\n"
        )


def test_elsewhere_it_says_that_it_is_for_clouds(tmp_path: Path) -> None:
    metadata = instance_of("none")
    with started(metadata, tmp_path) as job:
        assert job.wait() == 2
        assert "answers: this is no instance of AWS or Google Cloud" in job.stderr


def test_shellcheck_finds_no_fault_with_the_scripts() -> None:
    shellcheck = Path(python_with("shellcheck")).parent / "shellcheck"
    scripts = [str(path) for path in (ROOT / "deploy").glob("*/*") if path.read_bytes().startswith(b"#!/bin/bash")]
    assert len(scripts) >= 2
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout


# Notices.

NOTICE = ROOT / "deploy" / "cloud" / "notice.py"
CLOUDS = ("aws", "google", "azure")


@pytest.fixture
def metadata(request: pytest.FixtureRequest) -> Iterator[Metadata]:
    server = Metadata(request.param)
    with server.served():
        yield server


@pytest.fixture
def printed(metadata: Metadata) -> Iterator[list[str]]:
    """The program's lines as they arrive."""
    lines = list[str]()
    env = {
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{metadata.at}", "GCE_METADATA_HOST": metadata.at,
        "AZURE_METADATA_ENDPOINT": f"http://{metadata.at}", "NOTICE_INTERVAL": "0.05",
    }  # fmt: skip
    command = [sys.executable, str(NOTICE), metadata.cloud]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reading = threading.Thread(target=lambda out: lines.extend(iter(out.readline, "")), args=[process.stdout])
        reading.start()
        yield lines
        assert process.poll() is None, "it runs as long as the job"
        process.kill()
        reading.join()


def asked_again(metadata: Metadata) -> None:
    before = metadata.asked
    wait_for("it asks again", lambda: metadata.asked > before + 3)


@pytest.mark.parametrize("metadata", CLOUDS, indirect=True)
def test_a_notice_is_reported_once_also_by_a_service_in_trouble_and_when_it_is_withdrawn(
    metadata: Metadata, printed: list[str]
) -> None:
    asked_again(metadata)
    assert printed == []
    metadata.state = "notice"
    wait_for("the notice", lambda: printed)
    for state in ("notice", "garbage", "notice"):
        metadata.state = state
        asked_again(metadata)
    (line,) = printed
    verb, seconds, reason = line.split()
    assert (verb, reason) == ("drain", "spot")
    if metadata.cloud == "google":  # it announces no time
        assert seconds == "25"
    else:  # part of the hour has passed, and no test takes half an hour
        assert LEFT.total_seconds() / 2 < int(seconds) <= LEFT.total_seconds()
    metadata.state = "nothing"
    wait_for("that it is withdrawn", lambda: printed[1:])
    assert printed[1] == "cancel\n"


@pytest.mark.all
@pytest.mark.parametrize("metadata", ["aws"], indirect=True)  # one function queries all of them
def test_a_service_that_does_not_answer_is_asked_again(metadata: Metadata, printed: list[str]) -> None:
    metadata.state = "notice"
    wait_for("the notice", lambda: printed)
    metadata.state, before = "slow", metadata.asked
    wait_for("it asks", lambda: metadata.asked > before)
    metadata.state = "notice"
    asked_again(metadata)
    assert len(printed) == 1, "a failed query cancels nothing"


@pytest.mark.parametrize("args", [[], ["ibm"]])
def test_the_cloud_must_be_named(args: list[str]) -> None:
    done = subprocess.run([sys.executable, str(NOTICE), *args], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "notice.py: say which cloud it is: aws, google, azure\n")
