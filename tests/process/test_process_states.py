"""Live processes that don't run: real ones, in each state that the kernel reports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from kit.waiting import wait_for

from aelastic.base.host import proc_table
from aelastic.base.host.process_states import SETTLED_S, ProcessStates

SLEEPS = "import time; time.sleep(600)"
# Its main thread ends, and another one stays.
ZOMBIE = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
# clone(2) with CLONE_VFORK: the parent waits for its child, unreachable for signals.
UNINTERRUPTIBLE = """
import ctypes, os, platform, signal, time
number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
if ctypes.CDLL(None).syscall(number, 0x4000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    time.sleep(600)
"""
# Its tracer is a process next to it.
TRACED = """
import ctypes, os, signal, time
if pid := os.fork():
    print(pid, flush=True)
    time.sleep(600)
os.setsid()
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
ctypes.CDLL(None).ptrace(0, 0, 0, 0)
os.kill(os.getpid(), signal.SIGSTOP)
"""
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts programs that lead their sessions, like workers."""
    started: list[subprocess.Popen[str]] = []

    def start_one(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code]
        started.append(subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start_one
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def letter(pid: int) -> str:
    found = proc_table.process(pid)
    return "" if found is None else found.state


def test_a_process_that_sleeps_or_has_gone_has_nothing_to_tell(start: Start) -> None:
    process = start(SLEEPS)
    pids = {0: process.pid, 1: os.getpid(), 2: None, 3: "a pod"}  # the second leads no session
    assert ProcessStates().look(pids, 0.0) == {}
    process.kill()
    process.wait()
    assert ProcessStates().look(pids, 0.0) == {}


def test_a_stopped_process_is_reported_at_once_until_it_continues(start: Start) -> None:
    process, states = start(SLEEPS), ProcessStates()
    os.kill(process.pid, signal.SIGSTOP)
    wait_for("it is stopped", lambda: letter(process.pid) == "T")
    assert states.look({3: process.pid}, 0.0) == {3: "stopped"} and not states.may_be_new
    os.kill(process.pid, signal.SIGCONT)
    wait_for("it continues", lambda: letter(process.pid) != "T")
    assert states.look({3: process.pid}, 0.0) == {}


def test_a_traced_process_is_not_one_that_a_signal_has_stopped(start: Start) -> None:
    tracer = start(TRACED)
    assert tracer.stdout is not None
    pid = int(tracer.stdout.readline())
    wait_for("it is traced", lambda: letter(pid) == "t")
    assert ProcessStates().look({0: pid}, 0.0) == {0: "traced"}


@pytest.mark.parametrize("code, state, word", [(ZOMBIE, "Z", "zombie"), (UNINTERRUPTIBLE, "D", "uninterruptible")])
def test_what_every_process_is_for_moments_is_reported_once_it_has_lasted(
    start: Start, code: str, state: str, word: str
) -> None:
    process, states = start(code), ProcessStates()
    wait_for(f"its state is {state}", lambda: letter(process.pid) == state)
    assert states.look({0: process.pid}, 0.0) == {} and states.may_be_new
    assert states.look({0: process.pid}, SETTLED_S) == {0: word}
    assert ProcessStates().look({0: process.pid}, SETTLED_S) == {}, "another object has not seen it before"
