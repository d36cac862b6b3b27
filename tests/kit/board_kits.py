"""The boards that the conformance suite (`test_boards.py`) runs on: a line for each.

A kit opens a fresh world, and makes boards in it, one for each agent and run id.
"""

from __future__ import annotations

import atexit
import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from aelastic.rdzv.board import Board
from aelastic.rdzv.boards.c10d import C10dBoard
from aelastic.rdzv.boards.etcd import EtcdBoard
from aelastic.rdzv.secret.keys import Key
from aelastic.rdzv.secret.secret_file import SecretFile
from aelastic.rdzv.settings import RendezvousSettings
from kit.ports import quiet_port
from kit.servers.etcd_servers import EtcdServers
from kit.servers.stores import external_store
from kit.shared_board import InProcessBoard, SharedWorld

# A board of an agent of a run id.
MakeBoard = Callable[[str], Board]
# etcd's are whole seconds, and a busy machine must not lose one by being slow.
LEASE_S = 3.0
WITH_SECRET = ", with a secret"


@dataclass(frozen=True)
class Kit:
    """One kind of board.

    Args:
        name: of the test.
        world: opens a fresh world, with the shared etcd servers at hand.
        server: the etcd it needs, or none.
        is_of_one_job: other run ids are refused.
    """

    name: str
    world: Callable[[EtcdServers], MakeBoard]
    server: str = ""
    is_of_one_job: bool = False

    @property
    def forgets(self) -> bool:
        """Whether a leader that does not renew vanishes; else its count of renewals stands still."""
        return bool(self.server)

    @asynccontextmanager
    async def boards(self, servers: EtcdServers) -> AsyncIterator[MakeBoard]:
        """Makes opened boards; all are closed in the end."""
        make = self.world(servers)
        async with AsyncExitStack() as stack:

            def make_one(run_id: str = "job") -> Board:
                board = make(run_id)
                stack.push_async_callback(board.aclose)
                return board

            yield make_one


def _in_process(servers: EtcdServers) -> MakeBoard:
    world = SharedWorld()
    return lambda run_id: InProcessBoard(run_id, world)


class Secret:
    """`SecretFile`, without a file."""

    path = "a file"

    def __init__(self, run_id: str, words: bytes = b"a secret of the tests") -> None:
        self.keys = [Key(words * 2, run_id)]


def secret_of(run_id: str, words: bytes = b"a secret of the tests") -> SecretFile:
    secret: Any = Secret(run_id, words)
    return secret  # type: ignore[no-any-return]


def _etcd(name: str, server: str, *, has_secret: bool = False) -> Kit:
    def world(servers: EtcdServers) -> MakeBoard:
        settings = RendezvousSettings(
            backend=name,
            endpoint=servers.of(server).endpoint,
            config={"lease": str(LEASE_S), "etcd_prefix": f"/test/{uuid.uuid4().hex}"},
        )
        return lambda run_id: EtcdBoard(settings, run_id, secret_of(run_id) if has_secret else None)

    return Kit(f"{name} on {server}{WITH_SECRET if has_secret else ''}", world, server)


def _c10d(servers: EtcdServers) -> MakeBoard:
    """The first agent serves the store."""
    settings = RendezvousSettings(backend="c10d", endpoint=f"localhost:{quiet_port()}")
    return lambda run_id: C10dBoard(settings, run_id, os.environ)


def _c10d_with_secret(servers: EtcdServers) -> MakeBoard:
    settings = RendezvousSettings(backend="c10d", endpoint=f"localhost:{quiet_port()}")
    return lambda run_id: C10dBoard(settings, run_id, os.environ, secret=secret_of(run_id))


@cache
def _store_of_others() -> str:
    """The endpoint of a TCPStore that is no agent's, and lasts as long as we do."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(external_store())


def _c10d_elsewhere(servers: EtcdServers) -> MakeBoard:
    settings = RendezvousSettings(backend="c10d", endpoint=_store_of_others())
    world = uuid.uuid4().hex
    return lambda run_id: C10dBoard(settings, f"{world} {run_id}", os.environ)


KITS = (
    Kit("in-process", _in_process),
    Kit("c10d, served by the first agent", _c10d, is_of_one_job=True),
    Kit("c10d, a store of another program", _c10d_elsewhere),
    Kit(f"c10d{WITH_SECRET}", _c10d_with_secret, is_of_one_job=True),
    _etcd("etcd-v3", "distro", has_secret=True),
    _etcd("etcd-v2", "debian", has_secret=True),
    _etcd("etcd-v3", "debian"),
    _etcd("etcd-v2", "distro"),
)
