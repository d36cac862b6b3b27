"""The units in `deploy/systemd`: checked by systemd, and one run by a real systemd with a password-protected etcd."""

from __future__ import annotations

import shutil
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.launching import PREAMBLE
from kit.servers.etcd_servers import EtcdServer, distro_etcd, etcd
from kit.servers.recipes import ROOT
from kit.servers.systemd import Systemd, systemd
from kit.waiting import wait_for

from aelastic.rdzv.protocol.keys import Key

UNITS = ROOT / "deploy" / "systemd"
UNIT = "training@demo"
PASSWORD = "sesame, open"
SECRET = "a secret of the tests, in one line"
OUTPUT = "/var/log/output"
ENV = """\
PET_NNODES=1
PET_NPROC_PER_NODE=2
PET_RDZV_ENDPOINT={endpoint}
PET_RDZV_CONF=join_timeout=20
TRAINING={training}
"""
TRAINING = """
def save(*_):
    say("saved")
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
say("training", os.getuid(), "NOTIFY_SOCKET" in os.environ, "sesame" in str(os.environ) or "CREDENTIALS_DIRECTORY" in os.environ)
if "fail" in sys.argv:
    sys.exit(7)
rest()
"""


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
@pytest.mark.parametrize("name, unit", [("training.service",) * 2, ("training@.service", "training@demo.service")])
def test_systemd_finds_no_fault_with_a_unit(tmp_path: Path, name: str, unit: str) -> None:
    text = (UNITS / name).read_text()
    assert "/opt/training/venv/bin/python" in text
    (tmp_path / name).write_text(text.replace("/opt/training/venv/bin/python", sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd that requires a user and a password."""
    with etcd(EtcdServer(distro_etcd(), tmp_path_factory.mktemp("etcd") / "data", [])) as server:
        for user in ("root", "training"):
            server.ask("/v3/auth/user/add", {"name": user, "password": PASSWORD})
            server.ask("/v3/auth/user/grant", {"user": user, "role": "root"})
        server.ask("/v3/auth/enable", {})
        yield server


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, guarded: EtcdServer) -> Iterator[Systemd]:
    with systemd(tmp_path_factory.mktemp("machine"), UNITS) as machine:
        machine.write("/etc/passwd", Path("/etc/passwd").read_text() + "training:x:1500:1500::/:/bin/sh\n")
        machine.write("/etc/group", Path("/etc/group").read_text() + "training:x:1500:\n")
        machine.write("/opt/training/train.py", PREAMBLE + TRAINING)
        machine.path("/opt/training/venv").symlink_to(sys.prefix)
        yield machine


@pytest.fixture
def start(machine: Systemd, guarded: EtcdServer) -> Iterator[Start]:
    unit = Start(machine, guarded.endpoint)
    yield unit
    machine.ctl("stop", UNIT)
    machine.ctl("reset-failed", UNIT)


class Start:
    """Starts the unit, and reads its output."""

    def __init__(self, machine: Systemd, endpoint: str) -> None:
        self.machine, self.endpoint = machine, endpoint
        self.count = 0

    def __call__(self, training: str, *settings: str, password: str = PASSWORD) -> subprocess.CompletedProcess[str]:
        self.count += 1
        own = [f"Standard{stream}=truncate:{OUTPUT}" for stream in ("Output", "Error")]
        own.append("ProtectHome=no")  # this machine's Python may be in a home directory
        self.machine.write(f"/units/{UNIT}.service.d/test.conf", "\n".join(["[Service]", *own, *settings, ""]))
        self.machine.write("/etc/aelastic/demo.env", ENV.format(endpoint=self.endpoint, training=training))
        self.machine.write("/etc/aelastic/demo.etcd-password", f"{password}\n", mode=0o600)
        self.machine.write("/etc/aelastic/demo.secret", f"{SECRET}\n", mode=0o600)
        self.machine.ctl("daemon-reload")
        return self.machine.ctl("start", UNIT)

    @property
    def output(self) -> str:
        path = self.machine.path(OUTPUT)
        return path.read_text() if path.exists() else ""


def record_on(server: EtcdServer) -> str:
    token = server.ask("/v3/auth/authenticate", {"name": "training", "password": PASSWORD})["token"]
    found = server.ask("/v3/kv/range", {"key": b64encode(b"/aelastic/demo/coordinator").decode()}, token=token)
    return b64decode(found["kvs"][0]["value"]).decode()


@pytest.mark.all
def test_a_unit_is_started_once_its_workers_run_and_stopped_once_they_have_saved(
    start: Start, guarded: EtcdServer
) -> None:
    done = start("train.py")
    assert done.returncode == 0, start.output + done.stderr
    wait_for("two workers", lambda: start.output.count("training 1500 False False") == 2)
    assert "round 1 | 2 ranks" in start.machine.show(UNIT)["StatusText"]
    assert Key(SECRET.encode(), "demo").id in record_on(guarded), "the data at the endpoint is signed"
    assert start.machine.ctl("stop", UNIT).returncode == 0
    assert start.output.count("saved") == 2
    assert start.machine.show(UNIT)["Result"] == "success"


@pytest.mark.all
def test_systemd_starts_a_failed_job_again_but_not_one_with_a_bad_command_line(start: Start) -> None:
    start("train.py fail")
    wait_for("a restart", lambda: int(start.machine.show(UNIT)["NRestarts"]) >= 1)
    start.machine.ctl("stop", UNIT)
    assert start("--nonsense train.py").returncode != 0
    shown = start.machine.show(UNIT)
    assert (shown["ExecMainStatus"], shown["NRestarts"], shown["ActiveState"]) == ("2", "0", "failed")


@pytest.mark.all
@pytest.mark.parametrize(
    "settings, password, status",
    [
        ([], "mistaken", "2"),
        (["LoadCredential=", "LoadCredential=etcd-password:/etc/aelastic/missing"], PASSWORD, "243"),
    ],
)
def test_without_the_right_secret_nothing_is_started(
    start: Start, settings: list[str], password: str, status: str
) -> None:
    assert start("train.py", "Restart=no", *settings, password=password).returncode != 0
    assert start.machine.show(UNIT)["ExecMainStatus"] == status, start.output
    assert "training 1500" not in start.output and "mistaken" not in start.output
