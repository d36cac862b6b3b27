"""The tests' fork server: a fork exits like an interpreter, receives signals, and outlives nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.effort import IS_COLD
from kit.launching import alive, ran
from kit.waiting import DEADLINE_S, wait_for
from kit.warm.interpreters import Warm

pytestmark = pytest.mark.skipif(IS_COLD, reason="nothing is warm in this run")

RAISED = """\
Traceback (most recent call last):
  File "<string>", line 1, in <module>
    raise ValueError('x')
ValueError: x
"""
if sys.version_info < (3, 13):  # these versions show no source lines of code that is not in a file
    RAISED = RAISED.replace("    raise ValueError('x')\n", "")
# Not `print`: it may write the newline separately, and another process writes to the same pipe.
SLEEPS = r"import os, time; os.write(1, b'%d\n' % os.getpid()); time.sleep(600)"


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    warm = Warm("store")  # the smaller of the two
    yield warm.python
    warm.close()


@pytest.mark.parametrize(
    "argv, stdin, code, out, err",
    [
        (["-c", "import sys; print(sys.argv, sys.stdin.read()); sys.exit(3)", "a"], "in", 3, "['-c', 'a'] in\n", ""),
        (["-u", "-c", "raise ValueError('x')"], "", 1, "", RAISED),
        (["-c", "import os; os.kill(os.getpid(), 11)"], "", -11, "", ""),
        (["-c", "import atexit; atexit.register(print, 'last')"], "", 0, "last\n", ""),
        (["-m", "json.tool"], "[]", 0, "[]\n", ""),
        (["-V"], "", 0, f"Python {sys.version.split()[0]}\n", ""),  # not forked
    ],
)  # fmt: skip
def test_a_fork_ends_as_an_interpreter_does(
    python: str, argv: list[str], stdin: str, code: int, out: str, err: str
) -> None:
    for program in (python, sys.executable):
        ended = ran(program, *argv, input=stdin)
        assert (ended.returncode, ended.stdout) == (code, out)
        assert err in {"…", ended.stderr}


def test_signals_reach_it_and_it_does_not_outlive_its_client(python: str) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen([python, "-c", SLEEPS], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            fork = int(process.stdout.readline())
            process.send_signal(signum)
            assert process.wait(DEADLINE_S) == -signum
            assert signum == signal.SIGKILL or not alive(fork)
        wait_for("the fork is gone", lambda: not alive(fork))  # noqa: B023


def test_nothing_outlives_a_killed_test_run() -> None:
    code = (
        f"import os, sys, subprocess; sys.path.append({str(Path(__file__).parents[1])!r}); from kit.warm.interpreters import Warm\n"
        f"warm = Warm('store'); subprocess.Popen([warm.python, '-c', {SLEEPS!r}]); os.write(1, b'%d\\n' % warm._server.pid)\n"
        "import time; time.sleep(600)"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert run.stdout is not None
    with run.stdout:
        pids = [int(run.stdout.readline()) for _ in range(2)]
    run.kill()
    run.wait(DEADLINE_S)
    wait_for("both are gone", lambda: not any(map(alive, pids)))
