"""What this node offers to the rendezvous: its workers, and where the workers of the job may meet."""

from __future__ import annotations

import socket
from contextlib import suppress

from aelastic.agent.resources import AgentSettings
from aelastic.errors import AelasticError
from aelastic.host.listeners import is_loopback
from aelastic.rdzv.protocol.messages import Node, Starts
from aelastic.rdzv.registry import names
from aelastic.spec import WorkerSpec
from aelastic.tcpstore.host import StoreHost


def node_offer(settings: AgentSettings, store: StoreHost, starts: Starts) -> Node:
    """This node, with a port of its own that is held from now on; `listen_for_workers` opens it."""
    spec, rdzv = settings.spec, settings.spec.rdzv
    address, port = _address_of(spec)
    is_on_loopback = is_loopback(address) if rdzv is None else rdzv.is_on_loopback
    loopback = (address or "localhost") if is_on_loopback else ""
    return Node(
        node_id=settings.node_id,
        host=socket.gethostname(),
        role=spec.role,
        local_world_size=spec.local_world_size,
        master_addr=address,
        master_port=store.open(port, loopback) if settings.has_agent_store else store.hold(port),
        preferred_rank=None if rdzv is None else rdzv.node_rank,
        starts=starts,
    )


async def listen_for_workers(store: StoreHost, address: str) -> None:
    """Opens the port where all workers of a round are told to come: at this address, or, if that cannot be, at all."""
    if store.is_on_loopback:
        return  # it is open
    from aelastic.rdzv.boards.endpoints import Endpoint, local_addresses_of  # most jobs are of one node

    addresses: list[str] = []
    with suppress(AelasticError):
        addresses = await local_addresses_of(Endpoint(address, 0))
    store.listen_at(addresses)


def _address_of(spec: WorkerSpec) -> tuple[str, int]:
    """The address and port for the workers to meet at, if this node becomes group rank 0; port 0 is a free one."""
    rdzv = spec.rdzv
    if spec.rdzv_handler is not None or (rdzv is not None and rdzv.backend not in names()):
        return "", 0  # torch's handler says where the workers meet, and has that port
    if rdzv is None:
        return spec.master_addr or "localhost", spec.master_port or 0
    if rdzv.backend == "static":
        # The address is that of node rank 0, and so is the port.
        return spec.master_addr or "", (spec.master_port or 0) if rdzv.node_rank == 0 else 0
    return rdzv.local_addr or "", spec.master_port or 0
