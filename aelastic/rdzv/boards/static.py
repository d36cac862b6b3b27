"""The board `static`: node rank 0 coordinates, and writes so to the store that its agent serves for the workers.

There is no election: the command lines say which node is which.  Node 0's board is its own memory; the other nodes
read preset keys of torch's TCPStore at `--master-addr:--master-port`, which is a new one for each round; so they
connect again and again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from aelastic.errors import RendezvousConnectionError, RendezvousStateError
from aelastic.host.listeners import LOOPBACKS, is_loopback
from aelastic.rdzv.board import Board, Candidate, LeaderRecord
from aelastic.rdzv.boards.encoding import state_of, text_of, text_without_leader
from aelastic.rdzv.boards.endpoints import Endpoint, first_of, local_addresses_of, told_elsewhere, useful_elsewhere
from aelastic.rdzv.boards.tcp_store import SERVED_FOR, TcpStore, printable, run_key
from aelastic.rdzv.boards.writing import Writing
from aelastic.rdzv.secret.secret_file import SecretFile
from aelastic.rdzv.settings import RendezvousSettings, split_endpoint
from aelastic.tcpstore.host import StoreHost

_log = logging.getLogger(__name__)


class StaticBoard(Board):
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
        self._writing = Writing(secret, settings.lease_s)
        self._endpoint = Endpoint(*split_endpoint(settings.endpoint))
        self._is_master = settings.node_rank == 0
        self._is_on_loopback = settings.is_on_loopback and is_loopback(self._endpoint.host)
        self._run_id = run_id
        self._host = host
        self._is_open = False  # node 0's part
        self._store = TcpStore(self._endpoint, run_id, env, settings.read_timeout_s)
        self._key = run_key(run_id, "leader")
        self._local_address: str | None = None  # of the endpoint, if that is this machine
        self._text = b""  # node 0's part: what the key holds

    async def open(self) -> None:
        if not self._is_master:
            await self._connect()
            return
        if self._is_open:
            return
        local: list[str] = []
        try:
            local = await local_addresses_of(self._endpoint)
        except RendezvousConnectionError as error:
            _log.warning("%s; only the other nodes need it", error)
        self._local_address = first_of(local)
        if not self._is_on_loopback:
            self._host.hold(self._endpoint.port)
            told = told_elsewhere(local)
            self._host.listen_at([*told, *LOOPBACKS] if told else [])
        self._host.preset(SERVED_FOR, printable(self._run_id))
        self._host.open(self._endpoint.port, self._endpoint.host if self._is_on_loopback else "")
        self._is_open = True

    async def _connect(self) -> None:
        if not self._store.is_connected:
            self._local_address = first_of(await local_addresses_of(self._endpoint))
            await self._store.connect()

    async def read(self) -> LeaderRecord | None:
        if self._is_master:
            return state_of(self._text).record
        text = await self._store.insist(self._get)  # a new round is a new store
        where = f"key {self._key} at {self._endpoint}"
        if (verified := self._writing.verify(text, where)) is None:
            raise RendezvousConnectionError(f"{where} was not written with this agent's secret")
        try:
            record = state_of(verified).record
        except ValueError as error:
            raise RendezvousStateError(
                f"{where} was not written by an aelastic agent ({error}): choose another run id"
            ) from None
        # The other nodes see no count of renewals: no node can take node 0's place.
        return None if record is None else record.replace(renewals=None)

    async def _get(self) -> bytes:
        await self._connect()
        text = await self._store.get(self._key)
        if text is None:
            await self._store.check_run_id()  # an agent that began to serve just now may have set it too late
        return text or b""

    async def campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        if not self._is_master:
            return await self.read()
        state = state_of(self._text)
        if state.record != seen:
            return state.record
        await self.open()
        return self._write(text_of(LeaderRecord(candidate.epoch_after(above, state.epoch), candidate, renewals=0)))

    async def renew(self, record: LeaderRecord) -> LeaderRecord | None:
        if not self._is_ours(record):
            return None
        # The other nodes do not look at the count: what they read need not change.
        renewed = record.renewed()
        self._text = text_of(renewed)
        return renewed

    async def publish(self, record: LeaderRecord, verdict: str) -> bool:
        if self._is_ours(record):
            self._write(text_of(record.replace(verdict=verdict)))
            return True
        return False

    async def resign(self, record: LeaderRecord) -> None:
        if self._is_ours(record):
            self._write(text_without_leader(record))

    async def aclose(self) -> None:
        await self._store.aclose()

    @property
    def name(self) -> str:
        return f"static at {self._endpoint}"

    @property
    def own_address(self) -> str:
        if not self._is_master:
            return self._store.own_address
        return useful_elsewhere(self._local_address or "")

    @property
    def endpoint_host(self) -> str:
        return self._endpoint.host if self._is_master or self._local_address is not None else ""

    def _is_ours(self, record: LeaderRecord) -> bool:
        return self._is_master and record.is_same_term(state_of(self._text).record)

    def _write(self, text: bytes) -> LeaderRecord | None:
        self._text = text
        self._host.preset(self._key, self._writing.sign(text).decode())
        return state_of(text).record
