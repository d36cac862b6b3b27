"""`deploy/docker/Dockerfile` without docker: its steps are carried out, and its first process is PID 1 of a namespace.

Containers here (see `kit.servers.images`) have no network of their own and no memory limits; their root is read-only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from kit.launching import PREAMBLE
from kit.ports import quiet_port
from kit.servers.images import Container, Image
from kit.servers.recipes import ROOT

pytestmark = [pytest.mark.all, pytest.mark.timeout(300)]

LOOKS_AROUND = """
def can_write(folder):
    try:
        open(f"{folder}/x{rank}", "w").close()
    except OSError as error:
        return error.strerror
    return "yes"


capabilities = [line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapEff", "CapBnd"))]
say(f"user {os.getuid()} {os.getgid()} {os.getgroups()}, agent {os.getppid()}, capabilities {capabilities[0]}")
for folder in ("/", "/workspace", "/opt/venv", "/var/tmp", "/dev", "/tmp"):
    say(folder, can_write(folder))
"""
LEAVES_ORPHANS = """
def zombies():
    states = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            states.append(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[:2])
        except OSError:
            pass  # it has ended
    return ["Z", "1"] in states


for _ in range(20):
    subprocess.run(["sh", "-c", "sh -c 'exit 0' & exec true"])
while zombies():
    time.sleep(0.01)
say("no zombie")
open(f"/tmp/done{rank}", "w").close()
wait_for(f"/tmp/done{1 - rank}")  # or the first to fail would end the other
"""
SAVES = """
def save(*_):
    open(f"/tmp/checkpoint{rank}", "w").close()
    say("saved")
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
say("training")
rest()
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Its base has this environment's torch and other packages."""
    base = str(Path(anyio.__file__).parents[1])
    image = Image(tmp_path_factory.mktemp("image"))
    image.build(ROOT / "deploy" / "docker" / "Dockerfile", PYTHONPATH=base)
    (packages,) = (image.folder / "files/opt/venv/lib").glob("python*/site-packages")
    assert list(packages.glob("aelastic-*.dist-info")) and not list(packages.glob("torch"))
    (packages / "base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    return image


@pytest.fixture
def container(image: Image, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Container]:
    """A container with two workers that run the code in the fixture's parameter."""
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "train.py").write_text(PREAMBLE + request.param)
    container = image.run(tmp_path / "workspace", "--standalone", "--nproc-per-node", "2", "train.py")
    yield container
    container.kill_all()


@pytest.mark.parametrize("container", [LOOKS_AROUND + LEAVES_ORPHANS + "sys.exit(7)"], indirect=True)
def test_workers_are_an_ordinary_users_write_to_tmp_only_and_the_agent_reaps_orphans_as_pid_1(
    container: Container,
) -> None:
    assert container.wait() == 7, container.story
    assert container.lines.count("user 1000 1000 [], agent 1, capabilities 0000000000000000") == 2, container.story
    refused = [f"{folder} Read-only file system" for folder in ("/", "/workspace", "/opt/venv", "/var/tmp", "/dev")]
    for line in (*refused, "/tmp yes", "no zombie"):
        assert container.lines.count(line) == 2, container.story


@pytest.mark.parametrize("container", [SAVES], indirect=True)
def test_a_stop_lets_workers_save_and_ends_the_container_with_the_signals_code(
    container: Container, image: Image
) -> None:
    container.wait_line("training", 2)
    os.kill(container.first, signal.Signals[image.stop_signal])
    assert container.wait() == 128 + signal.Signals[image.stop_signal], container.story
    assert container.lines.count("saved") == 2 and not container.left()


def test_containers_with_one_secret_meet_and_one_that_others_can_read_is_refused(image: Image, tmp_path: Path) -> None:

    def workspace(name: str, mode: int = 0o400) -> Path:
        folder = tmp_path / name / "workspace"
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(PREAMBLE + "say('rank', os.environ['RANK'])")
        secret = folder / "secret"
        secret.write_text("a secret of the tests, in one line")
        secret.chmod(mode)
        os.chown(secret, 1000, 1000)
        return folder

    where = f"127.0.0.1:{quiet_port()}"
    options = f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint {where} --rdzv-id job train.py".split()
    image.env["AELASTIC_SECRET_FILE"] = "/workspace/secret"
    containers = [image.run(workspace(name), *options) for name in "ab"]
    try:
        for container in containers:
            assert container.wait() == 0, container.story
        assert sorted(line for each in containers for line in each.lines) == ["rank 0", "rank 1"]
        containers.append(image.run(workspace("c", 0o444), *options))
        assert containers[-1].wait() == 2 and "chmod 600 /workspace/secret" in containers[-1].story
    finally:
        del image.env["AELASTIC_SECRET_FILE"]
        for container in containers:
            container.kill_all()
