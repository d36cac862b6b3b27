"""Runs the tests on other versions of Python and torch: `make matrix`.

For each combination: an environment below build/matrix, the rings, a line of the table, and the environment
goes again.  What was printed stays, in build/matrix/NAME.log.  An interpreter comes from PATH, from pyenv or, where
neither has it and this is root with debootstrap installed, from Debian.  What cannot be had is told in the table.

    make matrix                          all of them; a torch for CUDA takes 5 GB of disk meanwhile
    make matrix ARGS='3.11-torch2.15'    those whose name begins so
    make matrix ARGS='3.11-torch2.15 --rings core,torch --keep'
    make matrix ARGS='3.11-torch2.15 --rings torch --pytest=-mall'   recovery in place, and more
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sources import ROOT

HERE = ROOT / "build" / "matrix"
RINGS = ("core", "property", "simulation", "shell", "process", "nodes", "torch", "docs")
# Of what a torch for CUDA requires, these are not needed to import it on a machine without a GPU.
NOT_NEEDED = {"triton", "cuda-bindings"}
PYTEST = ("-m", "pytest", "-q", "-n", "4", "--dist", "worksteal", "-m", "not all")
# Debian's release, by the Python that it has.
DEBIAN = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}
DEBIAN_PACKAGES = "python3,python3-venv,ca-certificates,iproute2,procps,openssl"
# debootstrap's own recipe for each of them; an older debootstrap lacks the names of newer releases.
DEBIAN_SCRIPT = "sid"
# Runs a command in a Debian that sees this folder at the same path.
IN_DEBIAN = """\
set -e
debian=$1 here=$2
shift 2
mkdir -p "$debian$here"
mount -t proc proc "$debian/proc"
mount --rbind /sys "$debian/sys"
mount --rbind /dev "$debian/dev"
mount --bind "$here" "$debian$here"
mount --bind /etc/ssl "$debian/etc/ssl"
cp /etc/resolv.conf /etc/hosts "$debian/etc/"
exec chroot "$debian" env -C "$here" PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@"
"""


class CannotBeHadError(Exception):
    """Why a combination was not run."""


@dataclass(frozen=True)
class Combination:
    python: str
    torch: str

    @property
    def name(self) -> str:
        return f"{self.python}-torch{self.torch}"


COMBINATIONS = (
    Combination("3.11", "2.8.0"),
    Combination("3.11", "2.13.0"),
    Combination("3.11", "2.14.1"),
    Combination("3.11", "2.15.0"),
    Combination("3.12", "2.15.0"),
    Combination("3.13", "2.15.0"),
    Combination("3.14", "2.15.0"),
)


@dataclass(frozen=True)
class Interpreter:
    """How to start one: the words before each command, and its path."""

    prefix: tuple[str, ...]
    path: str

    def run(self, log: Path, *command: str, env: dict[str, str] | None = None) -> int:
        with log.open("a") as file:
            file.write(f"$ {' '.join(command)}\n")
            file.flush()
            words = ["nice", "-n", "10", *self.prefix, *command]
            clean = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
            done = subprocess.run(
                words, cwd=ROOT, env={**clean, **(env or {})}, stdout=file, stderr=subprocess.STDOUT, check=False
            )
        return done.returncode


def find_interpreter(version: str) -> Interpreter:
    """Where a Python of this version is.

    Raises:
        CannotBeHadError: nowhere.
    """
    for path in _candidates(version):
        asked = subprocess.run([path, "-c", "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"],
                               capture_output=True, text=True, check=False)  # fmt: skip
        if asked.returncode == 0 and asked.stdout.strip() == version:
            return Interpreter((), path)
    return _debian(version)


def _candidates(version: str) -> Iterator[str]:
    if (found := shutil.which(f"python{version}")) is not None:
        yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from (str(path) for path in sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}")))


def _debian(version: str) -> Interpreter:
    release = DEBIAN.get(version)
    if release is None:
        raise CannotBeHadError(f"no python{version} on PATH or in pyenv, and in no release of Debian")
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise CannotBeHadError(
            f"no python{version} on PATH or in pyenv; Debian {release} has it: install debootstrap, and be root"
        )
    debian, log = HERE / f"debian-{release}", HERE / f"debian-{release}.log"
    if not (debian / "usr/bin/python3").exists():
        options = ("--variant=minbase", f"--include={DEBIAN_PACKAGES}")
        if Interpreter((), "").run(log, "debootstrap", *options, release, str(debian), _mirror(), DEBIAN_SCRIPT) != 0:
            raise CannotBeHadError(f"debootstrap of Debian {release} failed: see {log.relative_to(ROOT)}")
    prefix = ("unshare", "--mount", "--propagation", "private", "sh", "-c", IN_DEBIAN, "sh", str(debian), str(ROOT))
    return Interpreter(prefix, "/usr/bin/python3")


def _mirror() -> str:
    """The mirror of Debian that apt uses on this machine; "" leaves the choice to debootstrap."""
    command = ("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian")
    if shutil.which(command[0]) is None:
        return ""
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return next(iter(asked.stdout.split()), "")


def install(combination: Combination, interpreter: Interpreter, folder: Path, log: Path) -> Interpreter:
    """Makes the environment; gives its interpreter.

    Raises:
        CannotBeHadError: something cannot be installed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    python = str(folder / "bin" / "python")
    inside = Interpreter(interpreter.prefix, python)

    def pip(*words: str) -> None:
        if words and inside.run(log, python, "-m", "pip", "install", "--disable-pip-version-check", *words) != 0:
            raise CannotBeHadError(f"{' '.join(words)[:80]} cannot be installed: see {log.relative_to(ROOT)}")

    if interpreter.run(log, interpreter.path, "-m", "venv", str(folder)) != 0:
        raise CannotBeHadError(f"no virtual environment: see {log.relative_to(ROOT)}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pip("--no-deps", f"torch=={combination.torch}")
    pip(*_needed_by_torch(folder))
    without_torch = [each for each in project["project"]["dependencies"] if not each.startswith("torch")]
    pip(*without_torch, *project["dependency-groups"]["test"], "numpy")
    pip("--no-deps", "--editable", ".")
    return inside


def _needed_by_torch(folder: Path) -> list[str]:
    (site,) = folder.glob("lib/python*/site-packages")
    (torch,) = importlib.metadata.distributions(name="torch", path=[str(site)])
    required = [each for each in torch.requires or () if "extra ==" not in each]
    return [each for each in required if re.split(r"[^\w-]", each)[0] not in NOT_NEEDED]


@dataclass
class Result:
    """The numbers of one combination's tests."""

    passed: int = 0
    skipped: int = 0
    failed: int = 0
    failures: tuple[str, ...] = ()

    def add(self, report: Path) -> None:
        for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314  pytest has just written it
            if case.find("failure") is not None or case.find("error") is not None:
                self.failed += 1
                self.failures += (f"{case.get('classname')}::{case.get('name')}",)
            elif case.find("skipped") is not None:
                self.skipped += 1
            else:
                self.passed += 1


def run_rings(python: Interpreter, name: str, rings: Sequence[str], log: Path, more: Sequence[str]) -> Result:
    result = Result()
    for ring in rings:
        report = HERE / f"{name}-{ring}.xml"
        report.unlink(missing_ok=True)
        command = [*PYTEST, f"tests/{ring}", f"--junitxml={report}"]
        code = python.run(log, python.path, *command, *more)
        if report.exists():
            result.add(report)
            report.unlink()
        elif code:
            result.failed += 1
            result.failures += (f"tests/{ring} did not run: exit code {code}",)
    return result


def line_of(
    combination: Combination, rings: Sequence[str], more: Sequence[str], *, keeps: bool
) -> tuple[str, bool | None]:
    """The combination's line of the table, and whether its tests passed; `None` if it was not run."""
    HERE.mkdir(parents=True, exist_ok=True)
    folder, log = HERE / combination.name, HERE / f"{combination.name}.log"
    log.unlink(missing_ok=True)
    began, rings = time.monotonic(), [ring for ring in RINGS if ring in rings]
    try:
        interpreter = find_interpreter(combination.python)
        python = install(combination, interpreter, folder, log)
        asked = ["import sys; print(sys.version.split()[0])", "import torch; print(torch.__version__)"]
        versions = [_said(python, code) for code in asked]
        result = run_rings(python, combination.name, rings, log, more)
    except CannotBeHadError as reason:
        return f"| {combination.python} | {combination.torch} | not run: {reason} | | | | |", None
    finally:
        if not keeps:
            shutil.rmtree(folder, ignore_errors=True)
    for failure in result.failures:
        print(f"{combination.name}: FAILED {failure}", flush=True)
    minutes = (time.monotonic() - began) / 60
    what = "all" if tuple(rings) == RINGS else ", ".join(rings)
    day = dt.datetime.now(tz=dt.UTC).date()
    numbers = f"{result.passed} | {result.failed} | {result.skipped}"
    return f"| {' | '.join(versions)} | {what} | {numbers} | {day}, {minutes:.0f} min |", not result.failed


def _said(python: Interpreter, code: str) -> str:
    done = subprocess.run([*python.prefix, python.path, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CannotBeHadError(f"it cannot be imported here ({last})")
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the tests on other versions of Python and torch.")
    parser.add_argument("names", nargs="*", help=f"beginnings of: {', '.join(each.name for each in COMBINATIONS)}")
    parser.add_argument("--rings", default=",".join(RINGS), help="those to run")
    parser.add_argument("--keep", action="store_true", help="keep the environments, some GB each")
    parser.add_argument("--pytest", default="", help="more words for pytest")
    given = parser.parse_args()
    chosen = [each for each in COMBINATIONS if not given.names or each.name.startswith(tuple(given.names))]
    lines = ["| Python | torch | rings | passed | failed | skipped | when |", "|---|---|---|---|---|---|---|"]
    found: list[bool | None] = []
    for combination in chosen:
        print(f"{combination.name}: see build/matrix/{combination.name}.log", flush=True)
        line, is_fine = line_of(combination, given.rings.split(","), given.pytest.split(), keeps=given.keep)
        found.append(is_fine)
        lines.append(line)
        print(line, flush=True)
    print("\n" + "\n".join(lines))
    return 0 if True in found and False not in found else 1


if __name__ == "__main__":
    sys.exit(main())
