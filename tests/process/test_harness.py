"""What tests rely on: everything that a job starts is known, and nothing outlives its test, however the test ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kit.launching import Job, Launcher, alive
from kit.rings import TESTS
from kit.waiting import wait_for

DETACHES = """
if daemonize() is not None:
    os.execve(sys.executable, [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], {})
say("is there")
"""


def start(launch: Launcher, code: str) -> Job:
    """Starts a program of its own, as an agent would end processes that detach themselves."""
    script = launch.write("alone/program.py", code)
    job = Job(script.parent, [sys.executable, script], {})
    launch.jobs.append(job)
    return job


def test_a_process_that_detaches_itself_and_clears_its_environment_belongs_to_its_job(launch: Launcher) -> None:
    job = start(launch, DETACHES)
    assert job.wait() == 0, job.story
    (daemon,) = job.left()
    assert not job.process.is_over
    os.kill(daemon, signal.SIGKILL)
    wait_for("the keeper's end", lambda: job.process.poll() is not None and job.process.is_over)
    job.assert_nothing_left()


def test_what_is_left_of_a_job_is_killed_with_its_test(launch: Launcher) -> None:
    job = start(launch, DETACHES)
    assert job.wait() == 0, job.story
    (daemon,) = job.left()
    job.kill_all()
    assert not alive(daemon)


STARTS_A_JOB = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from kit.launching import Job
from kit.waiting import wait_for

job = Job(Path(sys.argv[2]), [sys.executable, "-c", "import os, time; os.fork() or os.setsid(); time.sleep(600)"], {})
wait_for("two processes", lambda: len(job.left()) == 2)
print(job.tmp, *job.left(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_jobs_end_with_the_process_that_runs_the_tests_however_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS_A_JOB, str(TESTS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    words = done.stdout.split()
    assert len(words) == 3, done.stderr
    tmp, pids = words[0], [int(word) for word in words[1:]]
    wait_for("both gone", lambda: not any(map(alive, pids)))
    os.rmdir(tmp)  # the process that would have done it was killed


@pytest.mark.parametrize("is_cold", [False, True])
def test_an_agent_ends_as_a_shell_sees_it(launch: Launcher, is_cold: bool) -> None:
    launch.is_cold = is_cold
    job = launch("say('up')\nrest()")
    job.wait_line("up")
    job.signal(signal.SIGINT)
    job.assert_ends(-signal.SIGINT)
