"""The agent's side of a forked process: it is judged by what it has said and done, never by how late the agent looks."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from kit.virtual_clock import on_virtual_time

from aelastic.forkserver import parked
from aelastic.forkserver.command import PythonCommand
from aelastic.forkserver.parked import NoAnswerError, Parked
from aelastic.host import proc_table
from aelastic.host.proc_table import Process
from aelastic.host.reaping import waited_for

PID = 2**22 + 1  # more than a kernel gives
COMMAND = PythonCommand("python", (), "script", "train.py", ("train.py",))


@pytest.fixture
def ends() -> Iterator[tuple[Parked, socket.socket]]:
    """A forked process that has announced itself, and its end of the gate."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        theirs.setblocking(False)
        say(theirs, parked=PID)
        yield Parked(ours, forked_by=PID + 1), theirs
    waited_for.discard(PID)


def say(gate: socket.socket, **words: Any) -> None:
    gate.send(json.dumps(words).encode())


def request_at(gate: socket.socket) -> dict[str, Any]:
    _, fds, *_ = socket.recv_fds(gate, 64, 8)
    with open(fds[0]) as file:
        file.seek(0)
        request: dict[str, Any] = json.load(file)
        return request


def in_state(state: str) -> Process | None:
    return Process(PID, [state.encode(), b"1", b"1", b"1"]) if state else None


@pytest.mark.parametrize("state", ["", "Z", "S", "T"])
@on_virtual_time
async def test_what_a_process_said_before_the_agent_looked_is_heard(
    ends: tuple[Parked, socket.socket], monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    process, theirs = ends
    looks = 0

    def look(_: int) -> Process | None:
        nonlocal looks
        looks += 1
        if state != "S" or looks == parked.SLEEPS_MAX:  # while the agent was kept from a CPU
            say(theirs, ready=True)
        return in_state(state)

    monkeypatch.setattr(proc_table, "process", look)
    await process.prepare(COMMAND, {})
    assert looks


@pytest.mark.parametrize("state, looks_max", [("", 1), ("T", 1), ("S", parked.SLEEPS_MAX), ("R", parked.LOOKS_MAX)])
@on_virtual_time
async def test_a_process_that_says_nothing_is_given_up_after_so_many_looks(
    ends: tuple[Parked, socket.socket], monkeypatch: pytest.MonkeyPatch, state: str, looks_max: int
) -> None:
    process, _ = ends
    looks = []

    def look(pid: int) -> Process | None:
        looks.append(pid)
        return in_state(state)

    monkeypatch.setattr(proc_table, "process", look)
    with pytest.raises(NoAnswerError, match="a forked process does not answer"):
        await process.prepare(COMMAND, {})
    assert looks == [PID] * looks_max


@on_virtual_time
async def test_the_word_to_run_is_given_last_and_only_to_one_that_takes_it(
    ends: tuple[Parked, socket.socket],
) -> None:
    process, theirs = ends
    say(theirs, ready=True)
    await process.prepare(COMMAND, {"A": "b"})
    assert request_at(theirs)["env"] == {"A": "b"}
    with pytest.raises(BlockingIOError):
        theirs.recv(64)
    theirs.close()
    with pytest.raises(BrokenPipeError):
        process.launch(COMMAND, {})
