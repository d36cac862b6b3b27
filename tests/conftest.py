"""Fixtures of the tests with real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from kit.etcd_boards import Closing
from kit.etcd_servers import EtcdServers
from kit.launching import Launcher

from aelastic.rdzv.board import Board
from aelastic.rdzv.boards.etcd_v3_calls import EtcdV3Calls


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=0, help="how many seeds test_simulation.py runs")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    """Starts jobs; none of them outlives its test."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def etcds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    """Real etcd servers for tests that do not harm them; each runs from when it is first asked for."""
    servers = EtcdServers(tmp_path_factory.mktemp("etcd"))
    yield servers
    servers.close()


@pytest.fixture
def kind_to_etcd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is asked that ends an old etcd server if whoever asks goes away (`etcd_v3_calls.py`)."""
    call, asked = EtcdV3Calls.call, list[Any]()

    async def call_and_note(self: EtcdV3Calls, path: str, message: dict[str, Any], *args: Any, **keywords: Any) -> Any:
        if path == "kv/txn":
            asked.append([*message.get("success", []), *message.get("failure", [])])
        return await call(self, path, message, *args, **keywords)

    monkeypatch.setattr(EtcdV3Calls, "call", call_and_note)
    yield
    only_reading = [each for each in asked if all("request_range" in operation for operation in each)]
    assert not only_reading


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    """One of this test's own."""
    name: str = request.node.name
    return name


@pytest.fixture
async def closing() -> AsyncIterator[Closing]:
    """Boards given to it are closed in the end."""
    async with AsyncExitStack() as stack:

        def close(board: Board) -> Board:
            stack.push_async_callback(board.aclose)
            return board

        yield close
