"""Many jobs at once, and one job restarted many times: no port is used twice, nothing accumulates."""

from __future__ import annotations

import re

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, LOOPS, Job, Launcher

pytestmark = pytest.mark.usefixtures("warm_stores")

LAUNCHES = 20


@pytest.mark.all
def test_twenty_jobs_at_once_have_a_port_each_and_leave_nothing(launch: Launcher) -> None:
    together = launch.folder / "together"
    together.mkdir()
    # Each connects, then keeps its port until all are there.
    worker = f"""
    import socket, time, os
    port = int(os.environ["MASTER_PORT"])
    with socket.create_connection((os.environ["MASTER_ADDR"], port), timeout={LAUNCH_TIMEOUT_S}):
        open({str(together)!r} + f"/{{os.getpid()}}", "w").close()
        while len(os.listdir({str(together)!r})) < {LAUNCHES}:
            time.sleep(0.1)
    os.write(1, f"{{port}}\\n".encode())
    """
    jobs: list[Job] = []
    for number in range(LAUNCHES):
        launch.write(f"{number}/worker.py", worker, preamble="")
        jobs.append(launch.command("worker.py", loop=LOOPS[number % 2], name=str(number)))
    for job in jobs:
        assert job.wait(LAUNCH_TIMEOUT_S) == 0, job.story
        assert not job.stderr, job.stderr
    ports = [job.lines for job in jobs]
    assert all(len(lines) == 1 for lines in ports)
    assert len({lines[0] for lines in ports}) == LAUNCHES
    for job in jobs:
        job.assert_nothing_left()


@pytest.mark.parametrize("loop, restarts", [("uvloop", 30), pytest.param("asyncio", 200, marks=pytest.mark.all)])
def test_hundreds_of_restarts_in_a_row_leave_the_agent_as_it_was(launch: Launcher, loop: str, restarts: int) -> None:
    worker = launch.write(
        "job/worker.sh",
        f"""\
        n=$TORCHELASTIC_RESTART_COUNT
        case $n in
            10|{restarts - 10})
                set -- /proc/$PPID/fd/*
                echo "restart $n descriptors $# $(grep Threads: /proc/$PPID/status)"
                grep VmRSS: /proc/$PPID/status
        esac
        [ "$n" -eq {restarts} ] || exit 1
        """,
        preamble="",
    )
    job = launch.command("--no-python", "--max-restarts", str(restarts), "sh", str(worker), loop=loop)
    assert job.wait(LAUNCH_TIMEOUT_S) == 0, job.story
    early, early_kib, late, late_kib = job.lines
    assert early.startswith("restart 10 ") and late.startswith(f"restart {restarts - 10} ")
    # Two samples of a running program differ by one or two; a leak grows with each restart.
    for then, now in zip(numbers(early), numbers(late), strict=True):
        assert now - then < 10, (early, late)
    assert kib(late_kib) - kib(early_kib) < 8 * 1024
    assert len(re.findall(r"^aelastic: W rank 0 failed", job.stderr, re.MULTILINE)) == restarts
    assert not re.search("in use|bug|Traceback", job.stderr)
    job.assert_nothing_left()


def numbers(line: str) -> list[int]:
    """Numbers of open descriptors and threads."""
    return [int(number) for number in re.findall(r"\d+", line)[1:]]


def kib(line: str) -> int:
    return int(line.split()[1])
