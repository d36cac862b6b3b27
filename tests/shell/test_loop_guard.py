"""The guard that keeps tests from blocking loops finds every blocking call, and nothing else."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pwd
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import loop_guard
from kit.loop_guard import BlockedLoopError

import aelastic

OURS = str(Path(aelastic.__file__).with_name("made_up.py"))
CALLS = """
def call(function, *args, **keywords):
    return function(*args, **keywords)
"""
NAMES: dict[str, Any] = {}
exec(compile(CALLS, OURS, "exec"), NAMES)
from_aelastic: Callable[..., Any] = NAMES["call"]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    loop_guard.found.clear()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.socket() as listener, socket.socket() as client:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            yield client, server


def is_refused(function: Callable[..., Any], *args: Any, **keywords: Any) -> bool:
    try:
        from_aelastic(function, *args, **keywords)
    except BlockedLoopError:
        loop_guard.found.clear()
        return True
    return False


async def test_what_may_block_the_loop_raises(tmp_path: Path, ends: tuple[socket.socket, socket.socket]) -> None:
    fifo, lock = tmp_path / "fifo", os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    os.mkfifo(fifo)
    reader, writer = os.pipe()
    client, _ = ends
    calls: list[tuple[Any, ...]] = [
        (time.sleep, 0.1), (os.waitpid, -1, 0), (subprocess.run, ["true"]), (select.select, [reader], [], []),
        (select.poll().poll, 100), (client.recv, 1), (socket.create_connection, ("127.0.0.1", 1)),
        (socket.getaddrinfo, "node0", 80), (socket.gethostbyname, "node0"), (pwd.getpwuid, 0),
        (fcntl.flock, lock, fcntl.LOCK_EX), (open, fifo), (os.open, fifo, os.O_RDONLY), (os.read, reader, 1),
        (os.fsync, lock), (threading.Event().wait,), (threading.main_thread().join,),
    ]  # fmt: skip
    refused = {call[0].__qualname__: is_refused(*call) for call in calls}
    assert refused == dict.fromkeys(refused, True)
    for fd in (lock, reader, writer):
        os.close(fd)


async def test_what_does_not_block_is_let_through(tmp_path: Path, ends: tuple[socket.socket, socket.socket]) -> None:
    client, server = ends
    client.setblocking(False)
    server.sendall(b"x")
    reader, writer = os.pipe()
    os.write(writer, b"x")
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    with pytest.raises(ChildProcessError):
        from_aelastic(os.waitpid, 1, os.WNOHANG)
    calls: list[tuple[Any, ...]] = [
        (client.recv, 1), (os.read, reader, 1), (os.write, writer, b"x"), (fcntl.flock, lock, fcntl.LOCK_EX | fcntl.LOCK_NB),
        (select.select, [reader], [], [], 0), (select.poll().poll, 0), (socket.getaddrinfo, "127.0.0.1", 80),
    ]  # fmt: skip
    for call in calls:
        assert not is_refused(*call), call
    from_aelastic(open, tmp_path / "lock").close()
    for fd in (lock, reader, writer):
        os.close(fd)


async def test_a_thread_may_wait_and_so_may_a_test() -> None:
    time.sleep(0)  # noqa: ASYNC251
    await asyncio.to_thread(from_aelastic, time.sleep, 0)


def test_without_a_loop_a_program_may_wait() -> None:
    from_aelastic(time.sleep, 0)


async def test_an_error_that_is_suppressed_is_found_anyway() -> None:
    with pytest.raises(BlockedLoopError):
        from_aelastic(time.sleep, 0)
    (found,) = loop_guard.found
    assert found.startswith("time.sleep in the thread of a loop:") and OURS in found
