"""The board `static`: node rank 0 coordinates, and writes so to the store that its agent serves for the workers.

There is no election: the command lines say which node is which.  Node 0's board is its own memory; the other nodes
read preset keys of torch's TCPStore at `--master-addr:--master-port`, which is a new one for each round; so they
connect again and again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from aelastic.errors import RendezvousConnectionError
from aelastic.host.sockets import LOOPBACKS
from aelastic.rdzv.board import Candidate, LeaderRecord
from aelastic.rdzv.boards.encoding import KeyState, text_of
from aelastic.rdzv.boards.endpoints import Endpoint, local_addresses_of, told_elsewhere
from aelastic.rdzv.boards.key_board import OneStoreBoard
from aelastic.rdzv.boards.tcp_store import SERVED_FOR, printable
from aelastic.rdzv.secret.seals import claimed
from aelastic.rdzv.secret.secret_file import SecretFile
from aelastic.rdzv.settings import RendezvousSettings, split_endpoint
from aelastic.tcpstore.host import StoreHost

_log = logging.getLogger(__name__)


class StaticBoard(OneStoreBoard):
    """One run id, as one node sees it (torch: `StaticTCPRendezvous`).

    Args:
        settings: `endpoint` is the master's `host:port`; `node_rank` is this node's.
            `config` knows `read_timeout` (60 s: how long the store may be silent).
        run_id: the job's name.
        env: the environment of the child process, on other nodes than 0.
        host: serves the workers' store on this node; it must be running.
        secret: of the job, if it has one.

    Raises:
        InputError: a value that cannot work.
    """

    def __init__(
        self,
        settings: RendezvousSettings,
        run_id: str,
        env: Mapping[str, str],
        host: StoreHost,
        secret: SecretFile | None = None,
    ) -> None:
        super().__init__(Endpoint(*split_endpoint(settings.endpoint)), settings, run_id, env, secret)
        self._is_master = settings.node_rank == 0
        self._run_id = run_id
        self._host = host
        self._is_open = False  # node 0's part
        self._text = b""  # node 0's part: what the key holds

    async def _reach(self, *, may_serve: bool) -> None:  # noqa: ARG002  node 0 serves, and no other node
        endpoint = self._store.endpoint
        if not self._is_master and not self._store.is_connected:
            self._local_addresses = await local_addresses_of(endpoint, self._look_up_s)
            await self._store.connect()
        if self._is_open or not self._is_master:
            return
        try:
            self._local_addresses = await local_addresses_of(endpoint)
        except RendezvousConnectionError as error:
            _log.warning("%s; only the other nodes need it", error)
        if not self._is_on_loopback:
            self._host.hold(endpoint.port)
            told = told_elsewhere(self._local_addresses)
            self._host.listen_at([*told, *LOOPBACKS] if told else [])
        self._host.preset(SERVED_FOR, printable(self._run_id))
        self._host.open(endpoint.port, endpoint.host if self._is_on_loopback else "")
        self._is_open = True

    async def _read(self) -> LeaderRecord | None:
        if self._is_master:
            return await super()._read()
        await self.open()
        state = await self._look()
        if state.is_foreign:
            raise RendezvousConnectionError(f"{self._where} was not written with this agent's secret")
        if state.record is None:
            await self._check_run_id()
        # The other nodes see no count of renewals: no node can take node 0's place.
        return None if state.record is None else state.record.replace(renewals=None)

    async def campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        return await (super().campaign(candidate, seen, above) if self._is_master else self.read())

    async def renew(self, record: LeaderRecord) -> LeaderRecord | None:
        if not self._is_master or not record.is_same_term((await self._look()).record):
            return None
        # The other nodes do not look at the count: what they read need not change.
        renewed = record.renewed()
        self._text = text_of(renewed)
        return renewed

    async def _change(self, state: KeyState, record: LeaderRecord, new_text: Callable[[LeaderRecord], bytes]) -> bool:
        return self._is_master and await super()._change(state, record, new_text)

    async def _get(self) -> bytes:
        if self._is_master:
            return self._writing.sign(self._text) if self._text else b""
        return await super()._get()

    async def _compare_set(self, expected: bytes, text: bytes) -> bytes:  # noqa: ARG002  nothing else writes it
        self._text = claimed(text)  # proved anew with each secret
        self._host.preset(self._key, text.decode())
        return text

    async def _check_run_id(self) -> None:
        if not self._is_master:
            await super()._check_run_id()

    @property
    def _is_here(self) -> bool:
        return self._is_master
