"""The workers' store with a fake child: what happens if it dies, is refused or receives nothing."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from kit.virtual_clock import on_virtual_time

from aelastic.base.host.children import waited_for
from aelastic.base.host.names import Address, NoAnswerError
from aelastic.workers.tcpstore import child as children
from aelastic.workers.tcpstore import host as hosts
from aelastic.workers.tcpstore.child import LAST, Death, Fork, StoreProcess
from aelastic.workers.tcpstore.host import LONG_LIFE_S, NAME_TIMEOUT_S, PAUSE_MAX_S, STARTS_MAX, StoreHost
from aelastic.workers.tcpstore.server import next_command, pieces_of


class Child:
    """A `StoreProcess` that is refused, dies or lives, as the test decides for each start."""

    def __init__(self, *fates: OSError | Death | float) -> None:
        self.fates = list(fates)  # an error or a death; otherwise how many seconds it lives after it has begun to serve
        self.started_at: list[float] = []
        self.sent: list[str] = []
        self.is_running = False
        self.fork: Fork | None = None

    async def start(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.started_at.append(anyio.current_time())
        if isinstance(fate := self.fates[0], OSError):
            del self.fates[0]
            raise fate
        self.is_running = True

    def send(self, do: str, *_: int, **__: Any) -> int:
        self.sent.append(do)
        return len(self.sent)

    async def receive(self) -> None:
        fate = self.fates.pop(0)
        assert not isinstance(fate, OSError)
        await anyio.sleep(0 if isinstance(fate, Death) else fate)
        self.is_running = False
        raise fate if isinstance(fate, Death) else Death(1, has_worked=True, is_hopeless=False)

    async def aclose(self) -> None:
        self.is_running = False


async def served(child: Child | None, seconds: float, fork: Fork | None = None) -> StoreHost:
    """A host that serves for `seconds`."""
    host = StoreHost({})
    if child is not None:
        host._process = child  # type: ignore[assignment]
    if fork is not None:
        host.fork_from(fork)
    host._wait_needed = anyio.lowlevel.checkpoint  # type: ignore[method-assign]  # a worker needs it at once
    host.open(0)
    host.listen_at(["127.0.0.1"])
    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(host.run)
            host.serve()
    return host


REFUSED = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@on_virtual_time
async def test_a_store_that_the_host_refuses_is_started_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    child = Child(REFUSED, REFUSED, 1000.0)
    host = await served(child, 100.0)
    assert child.started_at == pytest.approx([0.1, 0.1 + 0.2, 0.3 + 0.4])
    assert child.sent[-1] == "serve"
    why = "this process cannot open more files: raise the limit (ulimit -n)"
    assert caplog.messages == [f"the workers' store cannot be started ({why}); starting another"] * 2
    await host.aclose()


@on_virtual_time
async def test_a_store_that_dies_again_and_again_is_given_up_and_its_port_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    child = Child(*[0.0] * 100)
    host = await served(child, 1000.0)
    pauses = [after - before for before, after in zip(child.started_at, child.started_at[1:], strict=False)]
    assert len(child.started_at) == STARTS_MAX
    assert pauses == pytest.approx([min(0.1 * 2**losses, PAUSE_MAX_S) for losses in range(1, STARTS_MAX)])
    assert not host._listeners
    assert "no store is served until the next round: 10 starts have failed" in caplog.messages[-1]
    # The next round has a store of its own again.
    child.fates = [1000.0]
    host.open(0)
    host.listen_at(["127.0.0.1"])
    with anyio.move_on_after(10.0):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(host.run)
            host.serve()
    assert len(child.started_at) == STARTS_MAX + 1
    await host.aclose()


@on_virtual_time
@pytest.mark.parametrize(
    "code, starts, text",
    [
        (1, 1, f"the workers' store cannot be served (exit code 1): check that {sys.executable} can import torch"),
        (-9, 2, "the process that serves the workers' store was killed (SIGKILL); starting another"),
    ],
)
async def test_a_store_that_cannot_start_is_given_up_and_one_that_was_killed_before_it_served_is_not(
    caplog: pytest.LogCaptureFixture, code: int, starts: int, text: str
) -> None:
    child = Child(Death(code, has_worked=False, is_hopeless=True), 1000.0)
    host = await served(child, 100.0)
    assert (len(child.started_at), caplog.messages, bool(host._listeners)) == (starts, [text], starts > 1)
    await host.aclose()


@on_virtual_time
async def test_a_store_that_dies_after_a_long_life_is_replaced_at_once(caplog: pytest.LogCaptureFixture) -> None:
    child = Child(*[LONG_LIFE_S] * 30)
    host = await served(child, 20 * LONG_LIFE_S)
    assert len(child.started_at) > STARTS_MAX
    assert "given up" not in caplog.text and host._listeners
    await host.aclose()


def gone(code: int = 1) -> Any:
    """A process that has ended: its end of the socket is closed."""
    return SimpleNamespace(pid=0, kill=lambda: None, poll=lambda: code)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of children started with exec, each of which is gone at once."""

    async def at_once(_: int) -> None:
        await anyio.lowlevel.checkpoint()

    def start_helper(command: list[str], **_: Any) -> Any:
        started.append(command)
        return gone()

    started = list[list[str]]()
    monkeypatch.setattr(children, "wait_ended", at_once)
    monkeypatch.setattr(children, "start_helper", start_helper)
    return started


@on_virtual_time
async def test_a_forked_store_starts_at_once() -> None:
    async def fork(*_: object) -> Any:
        raise NotImplementedError

    child = Child(LONG_LIFE_S, 1000.0)
    await (await served(child, 2 * LONG_LIFE_S, fork)).aclose()
    assert child.started_at == pytest.approx([0.0, LONG_LIFE_S + 0.2])


@on_virtual_time
async def test_where_no_process_can_be_forked_or_one_fails_the_store_starts_the_quick_way(
    commands: list[list[str]],
) -> None:
    forked = [None, gone()]

    async def fork(*_: object) -> Any:
        await anyio.lowlevel.checkpoint()
        return forked.pop(0)

    process = StoreProcess({}, "served nothing", fork=fork)
    await process.start()
    assert commands.pop()[-1] == "quick"
    await process.aclose()
    await process.start()
    with pytest.raises(Death) as death:
        await process.receive()
    assert not death.value.is_hopeless and not commands
    await process.start()
    assert commands[0][-1] == "quick"
    await process.aclose()


@on_virtual_time
async def test_a_fork_that_was_killed_before_it_served_is_followed_by_another_and_one_that_failed_is_not(
    commands: list[list[str]],
) -> None:
    codes = [-9, -9, 1]

    async def fork(*_: object) -> Any:
        await anyio.lowlevel.checkpoint()
        return gone(codes.pop(0))

    await (await served(None, 10.0, fork)).aclose()
    assert not codes, "each was forked"
    assert [command[-1] for command in commands] == ["quick", "careful"]


async def unread(monkeypatch: pytest.MonkeyPatch) -> tuple[StoreProcess, socket.socket]:
    """A process that reads no commands by itself, and its end of the control socket."""
    theirs: list[socket.socket] = []

    def start_helper(command: list[str], **options: Any) -> Any:
        theirs.append(socket.socket(fileno=os.dup(options["pass_fds"][0])))
        return SimpleNamespace(pid=0, kill=lambda: pytest.fail("killed"))

    monkeypatch.setattr(children, "start_helper", start_helper)
    process = StoreProcess({}, "served nothing")
    await process.start()
    waited_for.discard(0)
    return process, theirs[0]


@on_virtual_time
async def test_commands_that_the_socket_does_not_take_are_sent_as_soon_as_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process, theirs = await unread(monkeypatch)
    assert process._control is not None
    process._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.create_server(("", 0)) as listener:
        process.send("serve", listener.fileno(), keys={})
        while not process._unsent:
            process.send("set", key="k" * 100, value="v")
        process.send("drop")  # pending commands are void
        process.send("serve", listener.fileno(), keys={"last": "one"})
    assert [json.loads(b"".join(pieces)[1:])["do"] for pieces, _ in process._unsent] == ["drop", "serve"] or len(
        process._unsent
    ) == 1
    theirs.setblocking(False)
    received = []
    while True:
        try:
            command, listeners, *_ = socket.recv_fds(theirs, 1 << 16, 1)
        except BlockingIOError:
            break
        received.append(json.loads(command.removeprefix(LAST)))
        for each in listeners:
            os.close(each)
        theirs.send(LAST + json.dumps({"number": received[-1]["number"]}).encode())
        await process.receive()
    assert received[-1] == {"do": "serve", "number": process._sent, "keys": {"last": "one"}}
    assert not process._unsent
    process._control.close()
    theirs.close()


async def test_a_command_and_an_answer_that_no_socket_takes_at_once_go_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if others void it after the child has received a part."""
    process, theirs = await unread(monkeypatch)
    large = "v" * 2_000_000
    process.send("set", key="k", value=large)
    process.send("set", key="k", value="void")
    process.send("drop")

    def serve() -> list[dict[str, Any]]:
        theirs.setblocking(True)
        received = []
        for _ in range(2):
            received.append(json.loads(next_command(theirs)[0]))
            for piece in pieces_of(json.dumps({"number": received[-1]["number"], "value": large}).encode()):
                theirs.send(piece)
        return received

    async with anyio.create_task_group() as tasks:
        received: list[dict[str, Any]] = []

        async def served_there() -> None:
            received.extend(await anyio.to_thread.run_sync(serve))

        tasks.start_soon(served_there)
        answers = [await process.receive() for _ in range(2)]
    assert [each["do"] for each in received] == ["set", "drop"] and received[0]["value"] == large
    assert [each.value for each in answers] == [large, large]
    assert process._control is not None
    process._control.close()
    theirs.close()


async def test_a_name_server_that_says_nothing_of_localhost_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look_up(host: str, within_s: float) -> list[Address]:
        raise NoAnswerError(f"no answer for {host} within {within_s:g} s")

    monkeypatch.setattr(hosts, "look_up", look_up)
    host = StoreHost({})
    await host.find_loopback()
    assert host.open(0, "localhost") and host._listeners[0].getsockname()[0] == "127.0.0.1"
    await host.aclose()


async def test_the_port_that_others_forward_to_is_where_most_clients_of_localhost_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look_up(host: str, within_s: float) -> list[Address]:
        assert (host, within_s) == ("localhost", NAME_TIMEOUT_S)
        return [Address(socket.AF_INET, ("127.0.0.2", 0)), Address(socket.AF_INET, ("127.0.0.1", 0))]

    monkeypatch.setattr(hosts, "look_up", look_up)
    host = StoreHost({})
    await host.find_loopback()
    assert host.open(0, "localhost") and host._listeners[0].getsockname()[0] == "127.0.0.2"
    await host.aclose()
