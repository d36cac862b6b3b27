"""An agent's control socket, with a stand-in for the job."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from kit.launching import on_both_loops, run
from kit.waiting import DEADLINE_S

from aelastic.agent.channels import ControlSocket
from aelastic.agent.requests import user_names
from aelastic.agent.requests.answers import serve
from aelastic.agent.requests.queries import Queries
from aelastic.agent.requests.user_names import UserNames
from aelastic.base.host import control_sockets
from aelastic.observe.observer import Observers
from aelastic.rdzv.protocol import requests as r


class Job:
    """The part of a job that a control socket uses."""

    def __init__(self) -> None:
        self.users = UserNames()
        self.reasons: list[str] = []

    def status(self) -> dict[str, Any]:
        return {"phase": "running"}

    async def own_ends(self) -> list[Any]:
        raise LookupError("nobody\nexpected this")

    async def ask(self, verb: r.Verb, reason: str, **_: Any) -> r.Answer:
        self.reasons.append(reason)
        return r.Answer("1", True, f"{verb}: done")


@asynccontextmanager
async def opened(folder: Path, job: Job) -> AsyncIterator[Callable[[bytes], Any]]:
    """A control socket; yields a function that sends bytes to it and returns the answer."""
    control_socket = ControlSocket(folder)
    control_socket.open()
    (name,) = control_sockets.names_in(folder)

    def ask(data: bytes) -> bytes:
        conn, answer = control_sockets.connect(folder, name, DEADLINE_S), b""
        assert conn is not None
        with conn:
            conn.sendall(data)
            while received := conn.recv(1 << 16):
                answer += received
        return answer

    observers = Observers([])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(control_socket.run, lambda conn: serve(conn, cast(Queries, job), observers))
        yield lambda data: asyncio.to_thread(ask, data)
        tasks.cancel_scope.cancel()
    control_socket.close(None)


@on_both_loops
def test_a_request_that_fails_in_the_agent_ends_its_own_connection_with_one_line(
    loop: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with opened(tmp_path / "doors", Job()) as ask:
            for _ in range(3):
                assert await ask(b'{"verb": "why"}\n') == b"", "no answer with a code"
            assert json.loads(await ask(b'{"verb": "here"}\n'))["phase"] == "running"

    run(loop, main())
    (line,) = caplog.messages
    assert line.startswith(
        "aborted a connection to the control socket: LookupError: nobody expected this (test_control_sockets.py:"
    )


@on_both_loops
def test_an_answer_longer_than_any_buffer_arrives_whole(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {"phase": "x" * (8 << 20)}
    monkeypatch.setattr(Job, "status", lambda _: long)

    async def main() -> None:
        async with opened(tmp_path / "doors", Job()) as ask:
            assert json.loads(await ask(b'{"verb": "here"}\n'))["phase"] == long["phase"]

    run(loop, main())


async def test_a_user_whose_name_no_server_says_is_a_number_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, asked = threading.Event(), list[int]()

    def never(user: int) -> Any:
        assert threading.current_thread().daemon, "neither the loop nor the interpreter waits for it at exit"
        asked.append(user)
        assert answers.wait(DEADLINE_S)
        return SimpleNamespace(pw_name="somebody")

    monkeypatch.setattr(pwd, "getpwuid", never)
    monkeypatch.setattr(user_names, "WITHIN_S", 0.05)
    job = Job()
    async with opened(tmp_path / "doors", job) as ask:
        for _ in range(3):
            assert b'"ok"' in await ask(b'{"verb": "restart", "reason": "new data"}\n')
        assert b'"ok"' in await ask(b'{"verb": "here"}\n')
        assert job.reasons == [f"by {os.getuid()}: new data"] * 3 and asked == [os.getuid()], "one thread hangs"
        answers.set()
        monkeypatch.setattr(user_names, "WITHIN_S", DEADLINE_S)
        while job.reasons[-1] != "by somebody":  # the thread that hung may not have ended yet
            assert b'"ok"' in await ask(b'{"verb": "restart"}\n')
