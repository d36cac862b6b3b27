"""The board `c10d`: torch's TCPStore at `host:port`, served by the agent that can bind it, or by any other process.

Binding decides, not names alone: of the agents on the host with that address one gets the port and serves the store,
in a child process; the others, there and elsewhere, are its clients.  When the one that serves dies, so does the
store, and the agent that binds the port next serves an empty one.  The coordinator, if it lives, finds that out by its
next `renew`, and writes its record there again.

All that is said about a run id is one key (`encoding.py`), changed by compare-and-set only and never deleted.  So of a
renewal and a candidate, or of two candidates, one comes first, and the epoch rises as long as the store lives.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Mapping

from aelastic.errors import InputError, RendezvousConnectionError, RendezvousStateError
from aelastic.host.listeners import is_loopback, listen, loopback_address
from aelastic.rdzv.board import Board, Candidate, LeaderRecord
from aelastic.rdzv.boards.encoding import KeyState, state_of, text_of, text_without_leader
from aelastic.rdzv.boards.endpoints import Endpoint, RefusedError, local_address_of, useful_elsewhere
from aelastic.rdzv.boards.tcp_store import NoStoreError, OtherJobError, TcpStore, read_timeout_of, run_key
from aelastic.rdzv.settings import C10D_PORT, RendezvousSettings, split_endpoint

_log = logging.getLogger(__name__)

# Only a coordinator and candidates write, rarely.
TRIES_MAX = 20
# No agent of this job finds a board where one of these is raised.
_NO_BOARD = (RefusedError, OtherJobError, NoStoreError)


class C10dBoard(Board):
    """One run id in a TCPStore (torch: `C10dRendezvousBackend`).

    Args:
        settings: `endpoint` is `host:port`, by default this machine; port 0 picks a free one, and tells which.
            `config` knows `is_host` (whether to serve the store; by default, whether the host is this machine) and
            `read_timeout` (60 s: how long the store may be silent).
        run_id: the job's name.
        env: the environment of the child process.

    Raises:
        InputError: a value that cannot work.
    """

    def __init__(self, settings: RendezvousSettings, run_id: str, env: Mapping[str, str]) -> None:
        endpoint = Endpoint(*split_endpoint(settings.endpoint or "localhost", C10D_PORT))
        self._is_host = _switch(settings, "is_host")
        self._is_on_loopback = settings.is_on_loopback and is_loopback(endpoint.host)
        if endpoint.port == 0 and self._is_host is False:
            raise InputError(f"rendezvous endpoint {endpoint} with is_host=false: give the store's port")
        self._store = TcpStore(endpoint, run_id, env, read_timeout_of(settings))
        self._key = run_key(run_id, "leader")
        self._local_address: str | None = None  # of the endpoint, if that is this machine
        self._last = KeyState(b"")  # what we wrote last

    async def open(self) -> None:
        """Serves the store if this agent can, else becomes its client; never waits for another agent to serve it."""
        await self._open(may_serve=True)

    async def read(self) -> LeaderRecord | None:
        return await self._store.insist(self._read)

    async def _read(self) -> LeaderRecord | None:
        await self.open()
        record = (await self._look()).record
        if record is None:
            await self._store.check_run_id()  # an agent that began to serve just now may have set it too late
        return record

    async def campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        return await self._store.insist(lambda: self._campaign(candidate, seen, above))

    async def _campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        await self.open()
        await self._store.check_run_id()  # for the same reason
        state = await self._look()
        if state.record != seen:
            return state.record
        record = LeaderRecord(epoch=max(above, state.epoch) + 1, candidate=candidate, renewals=0)
        state = self._state_of(await self._store.compare_set(self._key, state.text, text_of(record)))
        self._last = state
        return state.record

    async def renew(self, record: LeaderRecord) -> LeaderRecord | None:
        try:
            return await self._store.insist(lambda: self._renew(record))
        except _NO_BOARD:
            return record.renewed()

    async def _renew(self, record: LeaderRecord) -> LeaderRecord | None:
        await self.open()
        state = self._last if record.is_same_term(self._last.record) else await self._look()
        is_ours = await self._change(state, record, lambda now: text_of(now.renewed()))
        return self._last.record if is_ours else None

    async def publish(self, record: LeaderRecord, verdict: str) -> bool:
        await self._open(may_serve=False)
        return await self._change(await self._look(), record, lambda now: text_of(now.replace(verdict=verdict)))

    async def resign(self, record: LeaderRecord) -> None:
        await self._open(may_serve=False)
        await self._change(await self._look(), record, text_without_leader)

    async def aclose(self) -> None:
        await self._store.aclose()

    @property
    def name(self) -> str:
        return f"c10d at {self._store.endpoint}"

    @property
    def own_address(self) -> str:
        if not self._store.is_serving:
            return self._store.own_address
        return useful_elsewhere(self._local_address or "")

    @property
    def endpoint_host(self) -> str:
        is_here = self._store.is_serving or self._local_address is not None
        return self._store.endpoint.host if is_here else ""

    @property
    def pid(self) -> int | None:
        """The child process that speaks to the store, or serves it."""
        return self._store.pid

    async def _open(self, *, may_serve: bool) -> None:
        if self._store.is_connected:
            return
        if self._store.is_about_to_serve:
            await self._store.serve()
            return
        if not self._is_host:
            self._local_address = await local_address_of(self._store.endpoint)
        may_serve &= self._is_host or (self._is_host is None and self._local_address is not None)
        if may_serve and (listener := self._listen()):
            await self._store.serve(listener)
            return
        if self._store.endpoint.port == 0:
            raise InputError(
                f"rendezvous endpoint {self._store.endpoint}: port 0 needs an endpoint host on this machine"
            )
        await self._store.connect()

    def _listen(self) -> socket.socket | None:
        """The port, open; `None` if another process on this machine has it."""
        endpoint = self._store.endpoint
        try:
            listener = listen(endpoint.port, loopback_address(endpoint.host) if self._is_on_loopback else "")
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not self._is_host:
                return None
            raise InputError(
                f"the rendezvous endpoint {endpoint} cannot be served ({os.strerror(error.errno or 0)}): "
                "choose another port" + (", or say is_host=false" if self._is_host else "")
            ) from None
        if endpoint.port == 0:
            self._store.endpoint = Endpoint(endpoint.host, listener.getsockname()[1])
            # The user must give it to the other agents.
            _log.warning("the rendezvous endpoint is %s", self._store.endpoint)
        return listener

    async def _look(self) -> KeyState:
        return self._state_of(await self._store.get(self._key) or b"")

    async def _change(self, state: KeyState, record: LeaderRecord, new_text: Callable[[LeaderRecord], bytes]) -> bool:
        """Replaces our record in the store, if it is still there.

        A store without the key is a new one, since nothing is ever deleted: then this agent was the last leader, and
        goes on.
        """
        for _ in range(TRIES_MAX):
            if state.text and not record.is_same_term(state.record):
                return False
            if not state.text:
                _log.warning(
                    "the TCPStore of %s was restarted and is empty: registering the coordinator again", self.name
                )
            text = new_text(state.record or record)
            state = self._state_of(await self._store.compare_set(self._key, state.text, text))
            if state.text == text:
                self._last = state
                return True
        raise RendezvousConnectionError(f"{self.name}: too many conflicting writes to key {self._key}")

    def _state_of(self, text: bytes) -> KeyState:
        try:
            return state_of(text)
        except ValueError as error:
            raise RendezvousStateError(
                f"key {self._key} at {self._store.endpoint} was not written by an aelastic agent ({error}): "
                "choose another run id, or another endpoint"
            ) from None


def _switch(settings: RendezvousSettings, name: str) -> bool | None:
    text = settings.config.get(name)
    if text is None:
        return None
    # torch takes these.
    if (word := text.lower()) in {"1", "true", "t", "yes", "y"}:
        return True
    if word in {"0", "false", "f", "no", "n"}:
        return False
    raise InputError(f"rendezvous setting {name}={text}: use true or false")
