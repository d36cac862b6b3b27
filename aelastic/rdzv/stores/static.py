"""The stores `static`: node rank 0 leads, and announces it in the store that its agent serves for the workers.

Nobody is elected: the command lines number the nodes.  Node 0 keeps the cell in its own memory, and copies it
into each round's new TCPStore at `--master-addr:--master-port`.  The other nodes connect to these one after another.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from aelastic.base.host.ports import LOOPBACKS, is_loopback
from aelastic.errors import RendezvousConnectionError
from aelastic.rdzv.settings import RendezvousSettings, split_endpoint
from aelastic.rdzv.stores.c10d import C10dStore
from aelastic.rdzv.stores.endpoints import Endpoint, first_of, listen_addresses, local_addresses_of, useful_elsewhere
from aelastic.rdzv.stores.store import Store
from aelastic.rdzv.stores.tcp_store import SERVED_FOR, printable, run_key
from aelastic.workers.tcpstore.host import StoreHost

_log = logging.getLogger(__name__)


def static_store(settings: RendezvousSettings, run_id: str, env: Mapping[str, str], host: StoreHost) -> Store:
    """Returns the cell of one run id, as one node sees it (torch: `StaticTCPRendezvous`).

    Args:
        settings: `endpoint` is the master's `host:port`; `node_rank` is this node's.  `config` accepts `read_timeout`
            (60 s: how long the store may be silent).
        run_id: the job's name.
        env: the environment of the child process, on nodes other than 0.
        host: serves the workers' store on this node; it must be running.

    Raises:
        InputError: a value cannot work.
    """
    return MasterStore(settings, run_id, host) if settings.node_rank == 0 else ReaderStore(settings, run_id, env)


class MasterStore(Store):
    """The cell, on node 0."""

    def __init__(self, settings: RendezvousSettings, run_id: str, host: StoreHost) -> None:
        self._endpoint = Endpoint(*split_endpoint(settings.endpoint))
        self._is_on_loopback = settings.is_on_loopback and is_loopback(self._endpoint.host)
        self._run_id, self._host = run_id, host
        self._local_addresses: list[str] = []  # of the endpoint
        self._is_open = False
        self._text = b""

    async def open(self) -> None:
        if self._is_open:
            return
        endpoint, host = self._endpoint, self._host
        try:
            self._local_addresses = await local_addresses_of(endpoint)
        except RendezvousConnectionError as error:
            _log.warning("%s; only the other nodes need it", error)
        if not self._is_on_loopback:
            host.hold(endpoint.port)
            addresses = listen_addresses(self._local_addresses)
            host.listen_at([*addresses, *LOOPBACKS] if addresses else [])
        host.preset(SERVED_FOR, printable(self._run_id))
        host.open(endpoint.port, endpoint.host if self._is_on_loopback else "")
        self._is_open = True

    async def get(self) -> bytes:
        await self.open()
        return self._text

    async def compare_set(self, expected: bytes, new: bytes) -> bytes:
        if self._text == expected:
            self._text = new
            self._host.preset(run_key(self._run_id, "leader"), new.decode())
        return self._text

    async def aclose(self) -> None:
        """Does nothing: the host belongs to the agent."""

    @property
    def name(self) -> str:
        return f"static at {self._endpoint}"

    @property
    def own_address(self) -> str:
        return useful_elsewhere(first_of(self._local_addresses) or "")

    @property
    def endpoint_host(self) -> str:
        return self._endpoint.host

    @property
    def is_served_here(self) -> bool:
        return True


class ReaderStore(C10dStore):
    """The cell, as other nodes see it: they never change it, so none of them replaces node 0."""

    def __init__(self, settings: RendezvousSettings, run_id: str, env: Mapping[str, str]) -> None:
        super().__init__(settings, run_id, env, may_serve=lambda: False)

    async def compare_set(self, expected: bytes, new: bytes) -> bytes:  # noqa: ARG002
        return await self.get()
