"""Fake processes, on their agent's side: their messages and actions count, however late the agent looks."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

import anyio
import anyio.lowlevel
import pytest
from kit.virtual_clock import on_virtual_time

from aelastic.base.host import children as children_of_agent
from aelastic.base.host import proc_table
from aelastic.base.host.children import waited_for
from aelastic.base.host.proc_table import Process
from aelastic.workers import guard as guard_program
from aelastic.workers import guard_process
from aelastic.workers.forkserver import fork_server, parked, server_process
from aelastic.workers.forkserver.command import PythonCommand
from aelastic.workers.forkserver.fork_server import ForkServer
from aelastic.workers.forkserver.parked import NoAnswerError, Parked
from aelastic.workers.guard_process import GuardProcess
from aelastic.workers.tcpstore import child as children
from aelastic.workers.tcpstore.child import FORKED_CONTROL, LAST, StoreProcess, Unanswered

PID = 2**22 + 1  # above the kernel's maximum: it has ended


@pytest.fixture
def ended_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes have ended, but waiting for their end never reports it."""

    async def wait_ended(_: int) -> None:
        await anyio.sleep_forever()

    for module in (children, guard_process):
        monkeypatch.setattr(module, "wait_ended", wait_ended)


@pytest.fixture
def controls(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """The sockets of children that are started with exec."""
    found: list[socket.socket] = []

    def start_helper(_: list[str], **options: Any) -> Any:
        found.append(socket.socket(fileno=os.dup(options["pass_fds"][0])))
        return SimpleNamespace(pid=PID, kill=lambda: None, poll=lambda: 0)

    monkeypatch.setattr(children, "start_helper", start_helper)
    return found


@pytest.mark.usefixtures("ended_unseen")
@on_virtual_time
async def test_an_answer_of_the_store_that_is_there_is_in_time(
    controls: list[socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    process = StoreProcess({}, "served nothing")
    await process.start()
    asked = process.send("get", key="a")
    with controls[0] as theirs:
        for number in (asked - 1, asked):
            theirs.send(LAST + json.dumps({"number": number, "value": "b"}).encode())
        assert await process.answer_to(asked, 0.0) == "b"
        with pytest.raises(Unanswered):
            await process.answer_to(process.send("get", key="b"), 0.0)
        await process.aclose()
    assert "survived SIGKILL" not in caplog.text


@pytest.mark.usefixtures("ended_unseen")
@on_virtual_time
async def test_a_store_that_is_forked_after_all_serves_beside_no_other(controls: list[socket.socket]) -> None:
    late: list[socket.socket] = []

    async def fork(_: object, fds: Mapping[int, int]) -> None:
        await anyio.lowlevel.checkpoint()
        late.append(socket.socket(fileno=os.dup(fds[FORKED_CONTROL])))

    process = StoreProcess({}, "served nothing", fork=fork)
    await process.start()
    process.send("serve")
    with late[0], controls[0]:
        assert late[0].recv(100) == b"", "it learns that it is not needed, and exits"
        assert json.loads(controls[0].recv(100).removeprefix(LAST))["do"] == "serve"
        await process.aclose()


@pytest.mark.usefixtures("ended_unseen")
@on_virtual_time
async def test_a_guard_that_has_done_its_work_is_not_taken_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_program, "sweep", lambda *_: pytest.fail("its work is done a second time"))
    killed = SimpleNamespace(pid=PID, poll=lambda: 0, kill=lambda: pytest.fail("killed"))
    monkeypatch.setattr(guard_process, "start_program", lambda *_, **__: killed)
    guard = GuardProcess("mark", None)
    guard.ensure()
    await guard.aclose()
    waited_for.discard(PID)


# Fork servers.

COMMAND = PythonCommand("python", (), "script", "train.py", ("train.py",))


@pytest.fixture
def ends() -> Iterator[tuple[Parked, socket.socket]]:
    """A forked process that has announced itself, and its end of the gate."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        theirs.setblocking(False)
        send(theirs, parked=PID)
        yield Parked(ours, forked_by=PID + 1), theirs
    waited_for.discard(PID)


def send(gate: socket.socket, **words: Any) -> None:
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
async def test_what_a_process_sent_before_the_agent_looked_is_received(
    ends: tuple[Parked, socket.socket], monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    process, theirs = ends
    looks = 0

    def look(_: int) -> Process | None:
        nonlocal looks
        looks += 1
        if state != "S" or looks == parked.SLEEPS_MAX:  # while the agent waited for a CPU
            send(theirs, ready=True)
        return in_state(state)

    monkeypatch.setattr(proc_table, "process", look)
    await process.prepare(COMMAND, {})
    assert looks


@pytest.mark.parametrize("state, looks_max", [("", 1), ("T", 1), ("S", parked.SLEEPS_MAX), ("R", parked.LOOKS_MAX)])
@on_virtual_time
async def test_a_process_that_sends_nothing_is_given_up_after_a_limited_number_of_looks(
    ends: tuple[Parked, socket.socket], monkeypatch: pytest.MonkeyPatch, state: str, looks_max: int
) -> None:
    process, _ = ends
    looks = []

    def look(pid: int) -> Process | None:
        looks.append(pid)
        return in_state(state)

    monkeypatch.setattr(proc_table, "process", look)
    with pytest.raises(NoAnswerError, match="a parked process does not answer"):
        await process.prepare(COMMAND, {})
    assert looks == [PID] * looks_max


@on_virtual_time
async def test_the_word_to_run_is_given_last_and_only_to_one_that_takes_it(
    ends: tuple[Parked, socket.socket],
) -> None:
    process, theirs = ends
    send(theirs, ready=True)
    await process.prepare(COMMAND, {"A": "b"})
    assert request_at(theirs)["env"] == {"A": "b"}
    with pytest.raises(BlockingIOError):
        theirs.recv(64)
    theirs.close()
    with pytest.raises(BrokenPipeError):
        process.launch(COMMAND, {})


@pytest.fixture
def unkillable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Makes processes unkillable, as in a frozen cgroup; yields the kills."""
    killed: list[str] = []

    async def wait_ended(_: int) -> None:
        await anyio.sleep_forever()

    def start_helper(*_: object, **options: Any) -> Any:
        control.append(os.dup(options["pass_fds"][0]))
        popen = SimpleNamespace(pid=PID, poll=lambda: None, kill=lambda: killed.append("fork server"))
        popen.wait = lambda: pytest.fail("nothing may wait without a limit")
        return popen

    control: list[int] = []
    monkeypatch.setattr(children_of_agent, "wait_ended", wait_ended)
    monkeypatch.setattr(server_process, "wait_ended", wait_ended)
    monkeypatch.setattr(server_process, "start_helper", start_helper)
    monkeypatch.setattr(proc_table, "kill", lambda _: killed.append("parked"))
    monkeypatch.setattr(proc_table, "process", lambda _: in_state("D"))
    yield killed
    for fd in control:
        os.close(fd)


@on_virtual_time
async def test_a_forked_process_that_survives_sigkill_is_left_behind(
    ends: tuple[Parked, socket.socket], unkillable: list[str]
) -> None:
    process, _ = ends
    began = anyio.current_time()
    await process.end()
    assert unkillable == ["parked"]
    assert anyio.current_time() - began == children_of_agent.KILL_TIMEOUT_S


@on_virtual_time
async def test_a_fork_server_that_survives_sigkill_is_left_behind(unkillable: list[str]) -> None:
    server = ForkServer(COMMAND, ("json",), "--preload", {}, frozenset(), lambda _: None, None)
    began = anyio.current_time()
    await server.aclose()
    assert "fork server" in unkillable
    assert anyio.current_time() - began == server_process.END_TIMEOUT_S + children_of_agent.KILL_TIMEOUT_S


@on_virtual_time
async def test_a_fork_server_that_cannot_be_started_is_reported_and_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError("no more processes")

    monkeypatch.setattr(server_process, "start_helper", refuse)
    measured: list[object] = []
    begin: Any = None
    server = ForkServer(COMMAND, ("json",), "PET_PRELOAD", {}, frozenset(), measured.append, None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        assert await server.fork([], begin) == {}
        await anyio.sleep(2 * fork_server.MEASURE_DELAY_S)
        tasks.cancel_scope.cancel()
    await server.aclose()
    (message,) = [message for message in caplog.messages if "cannot be started: no more processes" in message]
    assert message.startswith("PET_PRELOAD: ")
    assert not measured
