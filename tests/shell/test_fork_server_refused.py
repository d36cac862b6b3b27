"""A fork server that the host does not let start: all workers start cold."""

from __future__ import annotations

from typing import Any, NoReturn

import anyio
import pytest
from kit.virtual_clock import on_virtual_time

from aelastic.forkserver import fork_server, server_process
from aelastic.forkserver.command import PythonCommand
from aelastic.forkserver.fork_server import ForkServer


@on_virtual_time
async def test_a_fork_server_that_cannot_be_started_is_said_and_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError("no more processes")

    monkeypatch.setattr(server_process, "start_helper", refuse)
    told: list[object] = []
    begin: Any = None
    command = PythonCommand("python", (), "script", "train.py", ("train.py",))
    server = ForkServer(command, ("json",), "PET_PRELOAD", {}, frozenset(), told.append, None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        assert await server.fork([], begin) == {}
        await anyio.sleep(2 * fork_server.MEASURE_DELAY_S)
        tasks.cancel_scope.cancel()
    await server.aclose()
    (message,) = [message for message in caplog.messages if "cannot be started: no more processes" in message]
    assert message.startswith("PET_PRELOAD: ")
    assert not told
