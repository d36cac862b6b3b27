"""Runs the tests as `make` does: rings with processes in front, those without beside them at low priority.

    python tools/run_tests.py [--without-processes] [PATH …] [options of pytest]

As many pytest processes as there are cores run tests with processes, and as many the others.  Thousands of tests that
take milliseconds each are dealt out beforehand: handing them out one by one, as pytest-xdist does, costs an eighth of
their time.  The end shows what each ring took, and which is over its budget.  `build/durations.json` has each test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from kit.effort import EFFORT  # noqa: E402  found from here on
from kit.rings import DURATIONS, RINGS, SHARE, ring_of, table, write_durations  # noqa: E402

BUILD = ROOT / "build"
NOTHING_COLLECTED = 5  # pytest's exit code
LOW_PRIORITY = 5  # a third of what others get: on a busy machine they come to an end as well


@dataclass(frozen=True)
class Part:
    """One run of pytest.

    Args:
        name: of its files in `build/`.
        paths: of the tests.
        nice: how much it gives way to others.
        share: which of the tests of its paths it runs, as `1/2`; nothing if pytest-xdist hands all of them out.
        folder: where its tests have their folders.
    """

    name: str
    paths: tuple[str, ...]
    nice: int = 0
    share: str = ""
    folder: str = field(default_factory=partial(tempfile.mkdtemp, prefix="tests-"))

    @property
    def output(self) -> Path:
        return BUILD / f"tests-{self.name}.log"

    @property
    def durations(self) -> Path:
        return BUILD / f"tests-{self.name}.json"

    def start(self, options: Sequence[str], *, is_shown: bool) -> subprocess.Popen[bytes]:
        """Starts pytest.

        Args:
            options: of pytest.
            is_shown: whether its output appears as it comes; otherwise it goes to a file.
        """
        self.durations.unlink(missing_ok=True)
        workers = ["-n", "0"] if self.share else ["-n", "auto", "--dist", "worksteal"]
        command = [sys.executable, "-m", "pytest", *workers, *self.paths, *options]
        command += ["--basetemp", self.folder]  # two runs that share one remove each other's
        env = {**os.environ, DURATIONS: str(self.durations), SHARE: self.share}
        with self.output.open("wb") as file:
            return subprocess.Popen(
                ["nice", "-n", str(self.nice), *command], cwd=ROOT, env=env, stdout=None if is_shown else file
            )

    def seconds(self) -> dict[str, float]:
        """What each test took; nothing if pytest has not come to its end."""
        try:
            took: dict[str, float] = json.loads(self.durations.read_text())
        except (OSError, ValueError):
            return {}
        return took


def parts_of(paths: Sequence[str], *, with_processes: bool) -> list[Part]:
    """What runs side by side.  The first is shown as it runs."""
    chosen = list(paths) or [f"tests/{ring.name}" for ring in RINGS]
    quiet_rings = {ring.name for ring in RINGS if not ring.has_processes}
    is_quiet = {path: ring_of((ROOT / path.partition("::")[0]).resolve()) in quiet_rings for path in chosen}
    quiet = tuple(path for path in chosen if is_quiet[path])
    others = tuple(path for path in chosen if not is_quiet[path])
    if not quiet:
        return [Part("with-processes", others)]
    if not with_processes or not others:
        return shares(quiet)
    return [Part("with-processes", others), *shares(quiet, LOW_PRIORITY)]


def shares(paths: tuple[str, ...], nice: int = 0) -> list[Part]:
    """One run of pytest for each core, each with its share of the tests."""
    count = os.cpu_count() or 1
    names = [f"{number}/{count}" for number in range(1, count + 1)]
    return [Part(f"without-processes-{number}", paths, nice, share) for number, share in enumerate(names, 1)]


def run(parts: Sequence[Part], options: Sequence[str]) -> list[int]:
    """The exit codes of all parts; output of those that were not shown comes at the end."""
    BUILD.mkdir(exist_ok=True)
    running = [part.start(options, is_shown=part is parts[0]) for part in parts]
    try:
        codes = [process.wait() for process in running]
    finally:
        for process in running:
            process.terminate()
    for part in parts[1:]:
        print(part.output.read_text(errors="replace"), flush=True)
    return codes


def main(argv: Sequence[str]) -> int:
    with_processes = "--without-processes" not in argv
    words = [word for word in argv if word != "--without-processes"]
    paths = [word for word in words if word.startswith("tests/") and (ROOT / word.partition("::")[0]).exists()]
    options = [word for word in words if word not in paths]
    began = time.monotonic()
    parts = parts_of(paths, with_processes=with_processes)
    codes = run(parts, options)
    wall_s = time.monotonic() - began
    seconds = {nodeid: took for part in parts for nodeid, took in part.seconds().items()}
    write_durations(BUILD / "durations.json", seconds)
    is_make_test = EFFORT == "quick" and with_processes and words == ["-m", "not all"]
    for line in table(seconds, is_judged=is_make_test):
        print(line)
    print(f"{len(seconds)} tests in {wall_s:.0f} s; each one's duration: build/durations.json")
    failed = [code for code in codes if code not in {0, NOTHING_COLLECTED}]
    if failed:
        print(f"files of these tests: {', '.join(part.folder for part in parts)}")
        return failed[0]
    for part in parts:
        shutil.rmtree(part.folder, ignore_errors=True)
    return 0 if seconds else NOTHING_COLLECTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
