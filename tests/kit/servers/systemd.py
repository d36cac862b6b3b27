"""A real systemd for tests: PID 1 of namespaces, on an overlay of this machine's files, in its own control group.

It has only the test's units, no journal, and this machine's network.  This requires root, and cgroup2 mounted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kit.faults import netns
from kit.servers.images import PARTS, ROOT_OF, Container, overlay
from kit.servers.recipes import ROOT
from kit.waiting import wait_for

COMMAND_LIMIT_S = 60.0
SYSTEMD = "/usr/lib/systemd/systemd"
# `$3`: the control group.  The namespace of control groups begins there.
BOOT = (
    'echo $$ >"$3/cgroup.procs" && exec unshare --cgroup --mount --pid --uts --ipc --fork --kill-child sh -c \''
    + ROOT_OF.replace("'", "'\\''")
    + """
chmod 755 "$1/root"
mount -t cgroup2 cgroup2 "$1/sys/fs/cgroup"
mkdir "$1/dev/shm"
mount -t tmpfs tmpfs "$1/run"
mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"
mount --make-rshared "$1"
exec chroot "$1" env -i "PATH=$PATH" container=test SYSTEMD_UNIT_PATH=/units "$4" --system --show-status=no
' sh "$1" "$2" - "$4"
"""
)


class Systemd:
    """A running systemd."""

    def __init__(self, first: Container) -> None:
        self._first = first

    def path(self, path: str) -> Path:
        """The path of one of its files, from outside."""
        return Path(f"/proc/{self._first.first}/root{path}")

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = ["nsenter", f"--target={self._first.first}", "--all", "--root", "systemctl", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)

    def show(self, unit: str) -> dict[str, str]:
        lines = self.ctl("show", unit).stdout.splitlines()
        return {name: value for name, _, value in (line.partition("=") for line in lines)}

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Writes one of its files."""
        place = self.path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)


def why_not() -> str:
    """Why systemd cannot run here; empty if it can."""
    missing = [path for path in (SYSTEMD, "/usr/bin/systemctl") if not os.path.exists(path)]
    if missing or not _cgroups():
        return f"there is no {' and no '.join(missing) or 'cgroup2'} here"
    if ROOT.is_relative_to("/tmp"):
        return "the project lies in /tmp, of which a unit has its own (PrivateTmp)"
    return netns.why_not()


def _cgroups() -> str:
    """Where cgroup2 is mounted."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return next((place for _, place, kind, *_ in mounts if kind == "cgroup2"), "")


def _remove(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:  # processes that were killed are still there
        return False
    return True


@contextmanager
def systemd(folder: Path, units: Path) -> Iterator[Systemd]:
    """Boots a systemd with a folder of units, and ends it with everything that it runs."""
    if reason := why_not():
        pytest.skip(reason)
    for name in PARTS:
        (folder / name).mkdir(parents=True)
    there = folder / "files" / "units"
    shutil.copytree(units, there)
    for name in ("default", "sysinit", "basic", "shutdown"):
        (there / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    cgroup = Path(_cgroups(), f"test-{uuid.uuid4()}")
    cgroup.mkdir()
    command = ["sh", "-c", BOOT, "sh", *overlay(folder), str(cgroup), SYSTEMD]
    first = Container(folder / "systemd", command, {})
    try:
        machine = Systemd(first)
        wait_for("systemd", lambda: machine.ctl("is-system-running").stdout.strip() in {"running", "degraded"})
        yield machine
    finally:
        first.kill_all()
        first.process.wait()
        for group in sorted(cgroup.glob("**/"), reverse=True):
            wait_for(f"{group} is empty", partial(_remove, group))
