"""The stores that the conformance suite of cells (`test_cells.py`) runs on, one line each.

A kit opens a fresh world and makes cells in it, one for each agent and run id.
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

from aelastic.rdzv.protocol.keys import Key
from aelastic.rdzv.protocol.secret_file import SecretFile
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.c10d import C10dStore
from aelastic.rdzv.stores.endpoint_cell import EndpointCell
from aelastic.rdzv.stores.etcd import etcd_store
from kit.agents import LONG_LEASE_S
from kit.ports import quiet_port
from kit.servers.etcd_servers import EtcdServers
from kit.servers.stores import external_store
from kit.shared_cell import InProcessCell, SharedWorld

# Returns one agent's cell for a run id.
MakeCell = Callable[[str], EndpointCell]


@dataclass(frozen=True)
class Kit:
    """One kind of store.

    Args:
        name: the name of the test.
        world: opens a fresh world, given the shared etcd servers and the lease in seconds.
        server: the etcd it needs, if any.
        is_of_one_job: it refuses other run ids.
        is_quick: `make test` also runs the suite on it: one kit for each implementation.
    """

    name: str
    world: Callable[[EtcdServers, float], MakeCell]
    server: str = ""
    is_of_one_job: bool = False
    is_quick: bool = False

    @asynccontextmanager
    async def cells(self, servers: EtcdServers, lease_s: float = LONG_LEASE_S) -> AsyncIterator[MakeCell]:
        """Makes cells, and closes them all at the end."""
        make = self.world(servers, lease_s)
        async with AsyncExitStack() as stack:

            def make_one(run_id: str = "job") -> EndpointCell:
                cell = make(run_id)
                stack.push_async_callback(cell.aclose)
                return cell

            yield make_one


def cell_at(settings: RendezvousSettings, run_id: str, secret: SecretFile | None = None) -> EndpointCell:
    is_tcp_store = settings.backend == "c10d"
    store = C10dStore(settings, run_id, os.environ) if is_tcp_store else etcd_store(settings, run_id)
    return EndpointCell(store, secret, settings.lease_s)


def settings_at(backend: str, endpoint: str = "", lease_s: float = LONG_LEASE_S) -> RendezvousSettings:
    """The settings of a fresh world; by default at a local endpoint that the first agent serves."""
    config = {"lease": str(lease_s), "etcd_prefix": f"/test/{uuid.uuid4().hex}"}
    return RendezvousSettings(backend, endpoint or f"localhost:{quiet_port()}", config=config)


class Secret:
    """A `SecretFile` without a file."""

    path = "a file"

    def __init__(self, run_id: str, words: bytes = b"a secret of the tests") -> None:
        self.keys = [Key(words * 2, run_id)]


def secret_of(run_id: str, words: bytes = b"a secret of the tests") -> SecretFile:
    secret: Any = Secret(run_id, words)
    return secret  # type: ignore[no-any-return]


def _in_process(servers: EtcdServers, lease_s: float) -> MakeCell:
    world = SharedWorld()
    return lambda run_id: InProcessCell(run_id, world)


def _of(backend: str, server: str = "", *, has_secret: bool = False) -> Callable[[EtcdServers, float], MakeCell]:
    def world(servers: EtcdServers, lease_s: float) -> MakeCell:
        settings = settings_at(backend, servers.of(server).endpoint if server else "", lease_s)
        return lambda run_id: cell_at(settings, run_id, secret_of(run_id) if has_secret else None)

    return world


# Held here as well as by `atexit`, which a forked child of `multiprocessing` clears since Python 3.13.
_until_exit = ExitStack()
atexit.register(_until_exit.close)


@cache
def _store_of_others() -> str:
    """The endpoint of a TCPStore that does not belong to an agent and lasts as long as this process."""
    return _until_exit.enter_context(external_store())


def _elsewhere(servers: EtcdServers, lease_s: float) -> MakeCell:
    settings, world = settings_at("c10d", _store_of_others(), lease_s), uuid.uuid4().hex
    return lambda run_id: cell_at(settings, f"{world} {run_id}")


KITS = (
    Kit("in-process", _in_process, is_quick=True),
    Kit("c10d, served by the first agent", _of("c10d"), is_of_one_job=True, is_quick=True),
    Kit("c10d, a store of another program", _elsewhere),
    Kit("c10d, with a secret", _of("c10d", has_secret=True), is_of_one_job=True),
    Kit("etcd-v3 on distro, with a secret", _of("etcd-v3", "distro", has_secret=True), "distro", is_quick=True),
    Kit("etcd-v2 on debian, with a secret", _of("etcd-v2", "debian", has_secret=True), "debian"),
    Kit("etcd-v3 on debian", _of("etcd-v3", "debian"), "debian"),
    Kit("etcd-v2 on distro", _of("etcd-v2", "distro"), "distro", is_quick=True),
)
