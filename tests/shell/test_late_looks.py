"""An agent that was kept from a CPU while something was said or ended: it hears that first, and judges then."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from kit.virtual_clock import on_virtual_time

from aelastic.host.reaping import waited_for
from aelastic.tcpstore import child as children
from aelastic.tcpstore.child import FORKED_CONTROL, StoreProcess, Unanswered
from aelastic.workers import guard as guard_program
from aelastic.workers import guard_process
from aelastic.workers.guard_process import GuardProcess

PID = 2**22 + 1  # more than a kernel gives: it has ended


@pytest.fixture
def ended_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has ended by the time that the wait for it is over."""

    async def wait_ended(_: int) -> None:
        await anyio.sleep_forever()

    for module in (children, guard_process):
        monkeypatch.setattr(module, "wait_ended", wait_ended)


@pytest.fixture
def controls(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """The sockets of children that are started by an exec."""
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
    asked = process.say("get", key="a")
    with controls[0] as theirs:
        for number in (asked - 1, asked):
            theirs.send(json.dumps({"number": number, "value": "b"}).encode())
        assert await process.answer_to(asked, 0.0) == "b"
        with pytest.raises(Unanswered):
            await process.answer_to(process.say("get", key="b"), 0.0)
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
    process.say("serve")
    with late[0], controls[0]:
        assert late[0].recv(100) == b"", "it finds that it is not wanted, and ends"
        assert json.loads(controls[0].recv(100))["do"] == "serve"
        await process.aclose()


@pytest.mark.usefixtures("ended_unseen")
@on_virtual_time
async def test_a_guard_that_has_done_its_work_is_not_taken_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_program, "sweep", lambda *_: pytest.fail("its work is done a second time"))
    killed = SimpleNamespace(pid=PID, poll=lambda: 0, kill=lambda: pytest.fail("killed"))
    monkeypatch.setattr(guard_process, "start_helper", lambda *_, **__: killed)
    guard = GuardProcess("mark", None)
    guard.ensure()
    await guard.aclose()
    waited_for.discard(PID)
