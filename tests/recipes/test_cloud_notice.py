"""`deploy/cloud/notice.py` with metadata servers that are stood in for: what they say, and what it makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kit.launching import wait_for
from kit.servers.recipes import ROOT

NOTICE = ROOT / "deploy" / "cloud" / "notice.py"
CLOUDS = ("aws", "google", "azure")


class Metadata(ThreadingHTTPServer):
    """Plays one cloud: `state` says how."""

    daemon_threads = True

    def __init__(self, cloud: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cloud, self.state, self.asked = cloud, "nothing", 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        at = datetime.now(UTC) + timedelta(seconds=100)
        if self.cloud == "aws":
            if (method, path) == ("PUT", "/latest/api/token"):
                return (200, "a token") if headers["x-aws-ec2-metadata-token-ttl-seconds"] else (400, "")
            if headers["x-aws-ec2-metadata-token"] != "a token":
                return 401, ""
            is_told = self.state == "notice" and path == "/latest/meta-data/spot/instance-action"
            told = json.dumps({"action": "terminate", "time": f"{at:%Y-%m-%dT%H:%M:%SZ}"})
            return (200, told) if is_told else (404, "")
        if self.cloud == "google":
            is_right = path == "/computeMetadata/v1/instance/preempted" and headers["metadata-flavor"] == "Google"
            return (200, "TRUE" if self.state == "notice" else "FALSE") if is_right else (403, "")
        is_right = path.startswith("/metadata/scheduledevents?api-version=") and headers["metadata"] == "true"
        event = {"EventId": "1", "EventType": "Preempt", "NotBefore": format_datetime(at, usegmt=True)}
        other = {"EventId": "2", "EventType": "Freeze", "NotBefore": ""}
        events = {"DocumentIncarnation": 1, "Events": [other, event] if self.state == "notice" else [other]}
        return (200, json.dumps(events)) if is_right else (400, "")


class Handler(BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        self.server.asked += 1
        if self.server.state == "slow":
            time.sleep(30)
        code, text = self.server.answer(self.command, self.path, self.headers)
        if self.server.state == "garbage":
            code, text = 200, '{"time": [\0'
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    do_PUT = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=CLOUDS)
def metadata(request: pytest.FixtureRequest) -> Iterator[Metadata]:
    with Metadata(request.param) as server:
        yield server
        server.shutdown()


@pytest.fixture
def said(metadata: Metadata) -> Iterator[list[str]]:
    """The lines of the program, as they come."""
    at, lines = f"127.0.0.1:{metadata.server_port}", list[str]()
    env = {
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{at}", "AZURE_METADATA_ENDPOINT": f"http://{at}",
        "GCE_METADATA_HOST": at, "NOTICE_INTERVAL": "0.05",
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


def test_a_notice_is_said_once_and_when_it_is_withdrawn(metadata: Metadata, said: list[str]) -> None:
    asked_again(metadata)
    assert said == []
    metadata.state, began = "notice", time.monotonic()
    wait_for("the notice", lambda: said)
    took_s = time.monotonic() - began
    asked_again(metadata)
    (line,) = said
    verb, seconds, reason = line.split()
    assert (verb, reason) == ("drain", "spot")
    # A service tells whole seconds, and the program rounds.
    assert 98 - took_s <= int(seconds) <= 100 or (metadata.cloud, seconds) == ("google", "25")
    metadata.state = "nothing"
    wait_for("that it is withdrawn", lambda: said[1:])
    assert said[1] == "cancel\n"


@pytest.mark.parametrize("trouble", ["garbage", "slow"])
def test_a_service_in_trouble_is_asked_again(metadata: Metadata, said: list[str], trouble: str) -> None:
    metadata.state = "notice"
    wait_for("the notice", lambda: said)
    metadata.state = trouble
    before = metadata.asked
    wait_for("it asks", lambda: metadata.asked > before)
    if trouble == "garbage":
        asked_again(metadata)
    metadata.state = "notice"
    asked_again(metadata)
    assert len(said) == 1, "that it cannot be asked calls nothing off"


def test_which_cloud_has_to_be_said() -> None:
    for args in ([], ["ibm"]):
        done = subprocess.run([sys.executable, str(NOTICE), *args], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, "notice.py: say which cloud it is: aws, google, azure\n")
