"""Signs that a session writes, observed on real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from kit.waiting import wait_for

from aelastic.base.host import proc_table
from aelastic.base.host.session_activity import Activity, SessionActivity

SLEEPS = "print(flush=True); time.sleep(600)"


@contextmanager
def session(code: str) -> Iterator[Callable[[], Activity]]:
    """Runs Python code in its own session; returns a function that observes it, once the code has written a line."""
    program = f"import os, socket, struct, subprocess, sys, threading, time\n{code}"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            activity = SessionActivity()
            yield lambda: activity.look([process.pid])[process.pid]
        finally:
            for member in proc_table.session_members({process.pid}):
                proc_table.kill(member.pid)


def test_a_session_that_sleeps_writes_and_computes_nothing() -> None:
    with session(SLEEPS) as look:
        wait_for("it sleeps", lambda: look() == look() and not look().waits_for_cpu)
        first, *others = [look() for _ in range(20)]
    assert others == [first] * 19
    assert not (first.waits_for_disk or first.waits_for_cpu)


def test_what_a_child_writes_is_the_sessions() -> None:
    writer = (
        "import time\nwith open('/dev/null', 'wb', 0) as out:\n    while 1: out.write(bytes(100)); time.sleep(0.01)"
    )
    with session(f"subprocess.Popen([sys.executable, '-c', {writer!r}])\n{SLEEPS}") as look:
        before = look().written
        assert before is not None
        wait_for("more is written", lambda: (look().written or 0) > before + 500)


def test_threads_that_wake_each_other_up_write_nothing() -> None:
    wakes = "fd = os.eventfd(0)\nprint(flush=True)\nwhile 1: os.eventfd_write(fd, 1); time.sleep(0.001)"
    with session(wakes) as look:
        first = look()
        wait_for("it has computed", lambda: look().cpu_s > first.cpu_s)
        assert look().written == first.written


def test_a_thread_that_computes_is_seen_to_wait_for_a_cpu_or_to_run() -> None:
    with session("print(flush=True)\nwhile 1: pass") as look:
        first = look()
        wait_for(
            "it has computed, and that is seen beside it", lambda: (n := look()).cpu_s > first.cpu_s and n.waits_for_cpu
        )


# `close(2)` of a socket with unsent data: an interruptible sleep, like that of a file in FUSE.
LINGERS = """
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
client.setblocking(False)
try:
    while True:
        client.send(bytes(1 << 16))
except BlockingIOError:
    pass
client.setblocking(True)
client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 600))
print(flush=True)
os.close(client.detach())
"""


# Another thread may compute meanwhile.
COMPUTES = """
def compute():
    while True:
        pass

threading.Thread(target=compute).start()
"""


@pytest.mark.parametrize("beside", ["", COMPUTES])
def test_a_thread_that_waits_in_close_waits_for_a_disk(beside: str) -> None:
    with session(beside + LINGERS) as look:
        wait_for("it is seen", lambda: look().waits_for_disk)


def test_a_session_that_is_gone_is_left_out() -> None:
    activity = SessionActivity()
    with subprocess.Popen([sys.executable, "-c", ""], start_new_session=True) as process:
        process.wait()
    assert activity.look([process.pid]) == {}
