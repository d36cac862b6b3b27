"""`deploy/cloud/notice.py` with metadata servers that are stood in for: what they say, and what it makes of it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from kit.launching import wait_for
from kit.servers.metadata import Metadata
from kit.servers.recipes import ROOT

NOTICE = ROOT / "deploy" / "cloud" / "notice.py"
CLOUDS = ("aws", "google", "azure")


@pytest.fixture
def metadata(request: pytest.FixtureRequest) -> Iterator[Metadata]:
    server = Metadata(request.param)
    with server.served():
        yield server


@pytest.fixture
def said(metadata: Metadata) -> Iterator[list[str]]:
    """The lines of the program, as they come."""
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
def test_a_notice_is_said_once_also_by_a_service_in_trouble_and_when_it_is_withdrawn(
    metadata: Metadata, said: list[str]
) -> None:
    asked_again(metadata)
    assert said == []
    metadata.state, began = "notice", time.monotonic()
    wait_for("the notice", lambda: said)
    took_s = time.monotonic() - began
    for state in ("notice", "garbage", "notice"):
        metadata.state = state
        asked_again(metadata)
    (line,) = said
    verb, seconds, reason = line.split()
    assert (verb, reason) == ("drain", "spot")
    # A service tells whole seconds, and the program rounds.
    assert 98 - took_s <= int(seconds) <= 100 or (metadata.cloud, seconds) == ("google", "25")
    metadata.state = "nothing"
    wait_for("that it is withdrawn", lambda: said[1:])
    assert said[1] == "cancel\n"


@pytest.mark.all
@pytest.mark.parametrize("metadata", ["aws"], indirect=True)  # all are asked by one function
def test_a_service_that_does_not_answer_is_asked_again(metadata: Metadata, said: list[str]) -> None:
    metadata.state = "notice"
    wait_for("the notice", lambda: said)
    metadata.state, before = "slow", metadata.asked
    wait_for("it asks", lambda: metadata.asked > before)
    metadata.state = "notice"
    asked_again(metadata)
    assert len(said) == 1, "that it cannot be asked calls nothing off"


@pytest.mark.parametrize("args", [[], ["ibm"]])
def test_which_cloud_has_to_be_said(args: list[str]) -> None:
    done = subprocess.run([sys.executable, str(NOTICE), *args], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "notice.py: say which cloud it is: aws, google, azure\n")
