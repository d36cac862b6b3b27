"""The store `c10d`: torch's TCPStore at `host:port`, served by the agent that can bind it, or by any other process.

Binding decides, not names alone: one of the agents on the host with that address gets the port and serves the store, in
a child process.  All others, there and elsewhere, are its clients.  When the serving agent dies, the store is lost, and
the agent that binds the port next serves an empty one.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence

from aelastic.base.host.ports import LOOPBACKS, is_at_all, is_loopback, listen, listen_at, loopback_address
from aelastic.errors import InputError, RendezvousConnectionError
from aelastic.rdzv.settings import C10D_PORT, RendezvousSettings, split_endpoint
from aelastic.rdzv.stores.endpoints import (
    Endpoint,
    first_of,
    listen_addresses,
    local_addresses_of,
    look_up_limit_s,
    other_hosts_of,
    useful_elsewhere,
)
from aelastic.rdzv.stores.register_cells import cell_from_bytes
from aelastic.rdzv.stores.store import Store
from aelastic.rdzv.stores.tcp_store import TcpStore, run_key
from aelastic.workers.tcpstore.child import Fork

_log = logging.getLogger(__name__)

# How many connections to each of several stores there may be.  With one store, agents have votes, and thousands of them
# may ask it at the same moment.
LINES = 4


class C10dStore(Store):
    """The cell of one run id in a TCPStore (torch: `C10dRendezvousBackend`).

    Args:
        settings: `endpoint` is `host:port`, by default this machine; port 0 picks a free one, and logs which.  `config`
            accepts `is_host` (whether to serve the store; by default, whether the host is this machine) and
            `read_timeout` (60 s: how long the store may be silent).
        run_id: the job's name.
        env: the environment of the child process.
        is_one_of_many: serve only at a loopback address: another agent here may serve the same port of another address.
        may_serve: whether this agent should serve the store if it can; evaluated each time.
        fork: see `StoreProcess`.

    Raises:
        InputError: a value cannot work.
    """

    def __init__(
        self,
        settings: RendezvousSettings,
        run_id: str,
        env: Mapping[str, str],
        *,
        is_one_of_many: bool = False,
        may_serve: Callable[[], bool] = lambda: True,
        fork: Fork | None = None,
    ) -> None:
        endpoint = Endpoint(*split_endpoint(settings.endpoint or "localhost", C10D_PORT))
        self._backend = settings.backend
        self._is_on_loopback = settings.is_on_loopback and is_loopback(endpoint.host)
        self._look_up_s = look_up_limit_s(settings.lease_s)
        lines = LINES if is_one_of_many else 1
        self._client = TcpStore(endpoint, run_id, env, settings.read_timeout_s, fork, self._look_up_s, lines)
        self._key = run_key(run_id, "leader")
        self._local_addresses: list[str] = []  # of the endpoint, if it is this machine
        self._is_host = _switch(settings, "is_host")
        self._is_one_of_many, self._may_serve = is_one_of_many, may_serve
        if is_one_of_many and self._is_host:  # otherwise it would serve another host's endpoint, and be several of them
            raise InputError(
                "rendezvous setting is_host=true is for a single endpoint: leave it out, each host finds its own",
                topic="the-agents-have-different-endpoints",
            )
        if endpoint.port == 0 and self._is_host is False:
            raise InputError(f"rendezvous endpoint {endpoint} with is_host=false: give the store's port")
        self._has_looked_around = False
        self._is_bind_all, self._has_others = settings.bind_all, settings.max_nodes > 1

    async def open(self) -> None:
        """Serves the store if this agent can, otherwise connects to it; never waits for another agent to serve it."""
        await self._reach(may_serve=True)

    async def get(self) -> bytes:
        return self._own(await self._client.insist(self.get_once))

    async def compare_set(self, expected: bytes, new: bytes) -> bytes:
        return self._own(await self._client.insist(lambda: self.compare_set_once(expected, new)))

    # As above, but without a second attempt after a lost connection: with several endpoints, there are others to ask.

    async def get_once(self) -> bytes:
        await self._reach(may_serve=True)
        text = await self._client.get(self._key) or b""
        if not text:  # the agent that serves another job's store may have marked it too late
            await self._client.check_run_id()
        return text

    async def compare_set_once(self, expected: bytes, new: bytes) -> bytes:
        await self._reach(may_serve=False)
        if not expected:
            await self._client.check_run_id()
        return await self._client.compare_set(self._key, expected, new)

    def _own(self, text: bytes) -> bytes:
        """Returns the text; raises if agents with several endpoints have written it."""
        try:
            others = cell_from_bytes(text)[1]
        except ValueError:
            return text
        raise other_list([str(self._client.endpoint)], others)

    async def aclose(self) -> None:
        await self._client.aclose()

    @property
    def name(self) -> str:
        return f"{self._backend} at {self._client.endpoint}"

    @property
    def where(self) -> str:
        return f"key {self._key} at {self._client.endpoint}"

    @property
    def own_address(self) -> str:
        if self._client.is_serving:
            return useful_elsewhere(self._local_address or "")
        return self._client.own_address

    @property
    def endpoint_host(self) -> str:
        is_here = self._client.is_serving or self._local_address is not None
        return self._client.endpoint.host if is_here else ""

    @property
    def is_served_here(self) -> bool:
        """Whether this agent serves the store, or is about to."""
        return self._client.is_serving or self._client.is_about_to_serve

    @property
    def _local_address(self) -> str | None:
        return first_of(self._local_addresses)

    async def _reach(self, *, may_serve: bool) -> None:
        if self._client.is_connected:
            return
        if self._client.is_about_to_serve:
            await self._client.serve()
            return
        try:
            self._local_addresses = await local_addresses_of(self._client.endpoint, self._look_up_s)
        except RendezvousConnectionError:
            if not self._is_host:
                raise
        may_serve &= self._is_host or (self._is_host is None and self._local_address is not None)
        may_serve = may_serve and self._may_serve()
        if may_serve and not self._is_host and not self._has_looked_around:
            await self._look_around()
        if may_serve and (listeners := self._listen()):
            await self._client.serve(listeners)
            return
        if self._client.endpoint.port == 0:
            raise InputError(
                f"rendezvous endpoint {self._client.endpoint}: port 0 is for an endpoint on this host: use a fixed port"
            )
        await self._client.connect()

    async def _look_around(self) -> None:
        """Warns of a name that belongs to several hosts: the agent of each would serve its own store."""
        others = await other_hosts_of(self._client.endpoint, self._look_up_s)
        self._has_looked_around = True
        if others:
            _log.warning(
                "the rendezvous endpoint %s is this host and others (%s), whose agents would form separate jobs: list "
                "one endpoint for each host, separated by commas",
                self._client.endpoint, ", ".join(others), extra={"topic": "the-endpoint-name-belongs-to-several-hosts"},
            )  # fmt: skip

    def _listen(self) -> list[socket.socket] | None:
        """Returns the port, open; `None` if another process on this machine has it."""
        endpoint, local = self._client.endpoint, self._local_address or ""
        try:
            if self._is_on_loopback:
                listeners = [listen(endpoint.port, loopback_address(endpoint.host))]
            elif self._is_one_of_many and is_loopback(local):
                listeners = [listen(endpoint.port, local)]
            else:
                addresses = [] if self._is_bind_all else listen_addresses(self._local_addresses)
                listeners = listen_at(endpoint.port, [*addresses, *LOOPBACKS] if addresses else [])
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not self._is_host:
                return None
            raise InputError(
                f"the rendezvous endpoint {endpoint} cannot be served ({os.strerror(error.errno or 0)}): "
                "choose another port" + (", or set is_host=false" if self._is_host else ""),
                topic="the-endpoint-cannot-be-served",
            ) from None
        if is_at_all(listeners[0]) and self._has_others and not self._is_bind_all:
            where = f"it is {local} here" if local else "it is not an address of this host"
            _log.info("the rendezvous endpoint %s listens at all addresses of this host: %s", endpoint, where)
        if endpoint.port == 0:
            self._client.endpoint = Endpoint(endpoint.host, listeners[0].getsockname()[1])
            # The user must give it to the other agents.
            _log.warning("the rendezvous endpoint is %s", self._client.endpoint)
        return listeners


def other_list(own: Sequence[str], others: Sequence[str]) -> InputError:
    """Returns the error for agents of one run that have different endpoints: each list alone would be a job."""
    return InputError(
        f"this agent has the rendezvous endpoints {','.join(own)}, another agent of this run has {','.join(others)}: "
        "use the same list on every node",
        topic="the-agents-have-different-endpoints",
    )


def _switch(settings: RendezvousSettings, name: str) -> bool | None:
    text = settings.config.get(name)
    if text is None:
        return None
    # torch accepts these.
    if (word := text.lower()) in {"1", "true", "t", "yes", "y"}:
        return True
    if word in {"0", "false", "f", "no", "n"}:
        return False
    raise InputError(f"rendezvous setting {name}={text}: use true or false")
