"""A Dockerfile's image and its containers, without docker: its steps run in a copy of this machine's files.

`FROM` is this machine, as an overlay of its root: `COPY` and `RUN` write to a folder of the test.  A container has its own
namespaces for mounts and processes, that overlay as its read-only root, a /tmp in memory, the image's user, and no
capabilities.  This requires root.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pytest

from kit.faults import netns
from kit.launching import Job
from kit.servers.recipes import ROOT
from kit.waiting import wait_for

STEP_LIMIT_S = 250.0
# `$1`: a mount point; `$2`: options of the overlay.  Root's home, which may hold Python, may be closed to other users.
ROOT_OF = """set -e
mount --make-rprivate /
flock "${1%/*}" mount -t overlay overlay -o "$2" "$1" # two at once take each other's work folder away
mount -t proc proc "$1/proc"
mount --bind "$1/proc/sys" "$1/proc/sys" # this machine's settings: a systemd would change them
mount -o remount,bind,ro "$1/proc/sys"
mount --rbind /sys "$1/sys"
mount -t tmpfs tmpfs "$1/dev"
for device in null zero full random urandom; do touch "$1/dev/$device"; mount --bind "/dev/$device" "$1/dev/$device"; done
ln -s /proc/self/fd "$1/dev/fd"
"""
# A /tmp in memory; the project, whose packages the container uses, may lie in this machine's /tmp.
TMP = f"""mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"
project={shlex.quote(str(ROOT))}
case "$project" in /tmp/*) mkdir -p "$1$project" && mount --bind "$project" "$1$project" ;; esac
"""
# The overlay's folders, for `ROOT_OF`.
PARTS = ("files", "work", "root")
BUILD = ROOT_OF + 'chmod 755 "$1/root"; exec chroot "$1" sh -ec "$3"'
RUN = (
    ROOT_OF
    + """
mount -o remount,ro "$1/dev"
"""
    + TMP
    + """
mkdir "$1/tmp/workspace" # what `-v` brings
cp -a "$3/." "$1/tmp/workspace"
mount --bind "$1/tmp/workspace" "$1$4"
mount -o remount,bind,ro "$1$4"
mount -o remount,ro "$1"
root=$1 at=$4 user=$5
shift 5
exec setpriv --no-new-privs chroot --userspec="$user" --groups= "$root" sh -c 'cd "$1" && shift && exec "$@"' sh "$at" "$@"
"""
)


def overlay(folder: Path) -> list[str]:
    """The arguments of `ROOT_OF`: this machine's root, with writes redirected to `files`."""
    files, work, root = (str(folder / name) for name in PARTS)
    return [root, f"lowerdir=/,upperdir={files},workdir={work}"]


@dataclass
class Image:
    """The result of a Dockerfile's steps.

    Args:
        folder: a folder of the test; the image's files are in its `files`.
    """

    folder: Path
    env: dict[str, str] = field(
        default_factory=lambda: {"PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"}
    )
    user: str = "0:0"
    workdir: str = "/"
    stop_signal: str = "SIGTERM"
    entrypoint: list[str] = field(default_factory=list)

    def build(self, dockerfile: Path, **variables: str) -> None:
        """Runs all steps.

        Args:
            variables: variables that the steps need on this machine, besides the image's own.
        """
        if why_not := netns.why_not():
            pytest.skip(why_not)
        for name in PARTS:
            (self.folder / name).mkdir()
        self._ignored = dockerfile.with_name("Dockerfile.dockerignore").read_text().split()
        text = dockerfile.read_text().replace("\\\n", "")
        for line in text.splitlines():
            word, _, rest = line.partition(" ")
            if word and not word.startswith("#"):
                self._step(word, rest, variables)

    def _step(self, word: str, rest: str, variables: dict[str, str]) -> None:
        match word:
            case "FROM" | "ARG" | "CMD":
                pass
            case "COPY":
                source, target = rest.split()
                assert source == "."
                self._copy(self.folder / "files" / target.lstrip("/"))
            case "RUN":
                env = {**os.environ, **self.env, **variables}
                command = ["unshare", "--mount", "sh", "-c", BUILD, "sh", *overlay(self.folder), rest]
                done = subprocess.run(
                    command, env=env, capture_output=True, text=True, timeout=STEP_LIMIT_S, check=False
                )
                assert done.returncode == 0, f"{rest}: {done.stdout}{done.stderr}"
            case "ENV":
                for each in shlex.split(rest):
                    name, _, value = each.partition("=")
                    self.env[name] = value.replace("$PATH", self.env["PATH"])
            case "WORKDIR":
                self.workdir = rest
            case "USER":
                self.user = rest
            case "STOPSIGNAL":
                self.stop_signal = rest
            case "ENTRYPOINT":
                self.entrypoint = json.loads(rest)
            case _:
                pytest.fail(f"what is {word}?")

    def _copy(self, target: Path) -> None:
        """Copies the context without ignored files, which are selected by the name of the file or its folder."""
        kept = [pattern.removeprefix("!") for pattern in self._ignored if pattern.startswith("!")]
        # Other tests may remove folders meanwhile; `os.walk` skips those.
        for path in sorted(Path(folder, name) for folder, _, names in os.walk(ROOT) for name in names):
            name = str(path.relative_to(ROOT))
            if path.is_file() and any(fnmatch(name, each) or name.startswith(f"{each}/") for each in kept):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (target / name).write_bytes(path.read_bytes())

    def run(self, workspace: Path, *arguments: str) -> Container:
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", RUN, "sh"]
        places = [*overlay(self.folder), str(workspace), self.workdir, self.user]
        env = ["env", "-u", "TMPDIR", *(f"{name}={value}" for name, value in self.env.items())]
        command = [*namespaces, *places, *env, *self.entrypoint, *arguments]
        return Container(workspace.parent / f"{workspace.name}.job", command, {})


class Container(Job):
    """A job whose agent is PID 1 of a namespace."""

    @property
    def first(self) -> int:
        """The pid of the agent's process on this machine."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        (child,) = wait_for("the container's first process", lambda: children.read_text().split())
        return int(child)
