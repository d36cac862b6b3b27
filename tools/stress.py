"""Runs tests many times on a busy machine, and counts how often they fail.

    python tools/stress.py TIMES [options and tests of pytest]

A busy loop keeps each core occupied.  The tests have so low a priority that each of their processes gets a twentieth of
a core beside such a loop: a nice value of 13 weighs 56, one of 0 weighs 1024 (sched(7)).  Their deadlines are longer
(`TEST_DEADLINE_S`): a deadline shows where a test hangs, not that a machine is slow.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
NICE = 13
DEADLINE_S = 600
SPIN = "while True: pass"
# Words of a failed test in pytest's short summary.
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@contextmanager
def busy_cores() -> Iterator[None]:
    """Each core has something to compute all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_once(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = ["nice", "-n", str(NICE), sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    env = {**os.environ, "TEST_DEADLINE_S": str(DEADLINE_S)}
    limit = [f"--timeout={2 * DEADLINE_S}"]
    return subprocess.run(
        [*command, *limit, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


def main(argv: Sequence[str]) -> int:
    if not argv or not argv[0].isdigit():
        print(
            "stress: say how often and what: make stress N=20 ARGS='tests/process/test_logs.py -k bars'",
            file=sys.stderr,
        )
        return 2
    times, arguments = int(argv[0]), argv[1:]
    failures, failed_runs = Counter[str](), 0
    with busy_cores():
        for number in range(1, times + 1):
            began = time.monotonic()
            done = run_once(arguments)
            last = (done.stdout.strip().splitlines() or [""])[-1]
            print(f"{number:>3} of {times}: {time.monotonic() - began:5.0f} s  {last}", flush=True)
            if done.returncode != 0:
                failed_runs += 1
                failures.update(FAILED.findall(done.stdout) or [f"pytest ended with code {done.returncode}"])
                (ROOT / "build").mkdir(exist_ok=True)
                (ROOT / "build" / f"stress-{number}.log").write_text(done.stdout + done.stderr)
    for test, count in failures.most_common():
        print(f"failed {count} of {times} times: {test}")
    print(f"{failed_runs} of {times} runs failed" + ("; their output: build/stress-*.log" if failed_runs else ""))
    return 1 if failed_runs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
