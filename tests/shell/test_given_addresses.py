"""Addresses that agents tell each other, and those at which they listen."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import pytest
from kit.shared_cell import InProcessCell, SharedWorld

from aelastic.base.host import names
from aelastic.base.host.ports import HeldPort
from aelastic.rdzv.campaigns import Campaigns
from aelastic.rdzv.leader.job_state import Participant
from aelastic.rdzv.protocol import listening
from aelastic.rdzv.protocol.listening import addresses_beside, own_addresses
from aelastic.rdzv.protocol.proofs import Proofs
from aelastic.rdzv.protocol.unauthenticated import UnauthenticatedPeers
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores import endpoints

OWN = "127.0.0.5"


class Cell(InProcessCell):
    """A cell whose connection comes from an address of this host."""

    own_address = endpoint_host = ""


@pytest.mark.parametrize(
    "local_addr, local, way, expected",
    [
        ("node1", ["10.0.0.1", "fd00::1"], "10.9.0.1", ["node1", "10.0.0.1", "fd00::1"]),
        ("node1", [], "10.9.0.1", ["node1", "10.9.0.1"]),
        ("node1", [], "127.0.0.1", ["node1"]),
        ("node1", [], "", ["node1"]),
        ("10.0.0.1", ["10.0.0.1"], "10.9.0.1", ["10.0.0.1"]),
        (None, [], "10.9.0.1", ["10.9.0.1"]),
    ],
)
def test_beside_the_name_of_this_host_others_get_its_addresses(
    local_addr: str | None, local: list[str], way: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cell, "own_address", way)
    cell = Cell("job", SharedWorld())
    settings = RendezvousSettings("etcd", "etcd:2379", 1, 3, local_addr=local_addr)
    own = own_addresses(settings, cell)
    assert [*own, *addresses_beside(own, local, cell)] == expected


@pytest.mark.parametrize(
    "address, peer_address, resolved, listens",
    [
        (OWN, "", [], {OWN}),
        ("node1", "127.0.0.6", [OWN], {OWN, "127.0.0.6"}),
        ("node1", "127.0.0.6", ["192.0.2.1"], {"all"}),
        ("node1", "127.0.0.6", ["127.0.1.1"], {"all"}),
        ("node1", "127.0.0.6", [], {"all"}),
    ],
)
async def test_votes_are_requested_where_the_others_know_this_node(
    address: str, peer_address: str, resolved: Sequence[str], listens: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is looked up outside the loop; if there is no useful answer, the port listens at all addresses."""

    async def look_up(host: str, _: float) -> list[names.Address]:
        if host == address and not resolved:
            raise names.NoAnswerError("no answer")
        return [names.Address(socket.AF_INET, (each, 0)) for each in resolved or [host]]

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("a name was looked up on the loop")

    def listen_addresses(addresses: Sequence[str]) -> list[str]:
        return list(addresses) if addresses == [OWN] else known(addresses)  # the same as another host's

    known = endpoints.listen_addresses
    monkeypatch.setattr(listening, "listen_addresses", listen_addresses)
    monkeypatch.setattr(names, "look_up", look_up)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    port = HeldPort()
    campaigns = Campaigns(port, UnauthenticatedPeers(3), Proofs(None), 5.0, lambda *_: None)
    participants = [Participant(f"n{i}", f"n{i}", f"host{i}", "", 1, address, 1, peer_address) for i in range(3)]
    campaigns.listen_at(participants, "n1")
    port.listen_at(await campaigns._addresses())
    found = {str(each.getsockname()[0]) for each in port.listeners}
    port.close()
    assert found == listens or (listens == {"all"} and found <= {"::", "0.0.0.0"})
