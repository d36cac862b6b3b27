"""The store of several endpoints, without TCPStores: how it handles endpoints that come up one after the other."""

from __future__ import annotations

import re

import anyio
import pytest
from kit.servers.etcd_cells import A

from aelastic.errors import InputError, RendezvousConnectionError
from aelastic.rdzv.protocol.codec import to_text
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.c10d import C10dStore
from aelastic.rdzv.stores.endpoints import REFUSED, RefusedError
from aelastic.rdzv.stores.quorum import QuorumStore

SETTINGS = RendezvousSettings("c10d", "127.0.0.1:1,127.0.0.2:1,127.0.0.3:1", 3, 3)


class Part:
    """An endpoint that comes up at a given time; until then it refuses connections, unless an agent serves it."""

    is_served_here = False
    own_address = endpoint_host = ""

    def __init__(self, is_up: anyio.Event, *, is_ours: bool) -> None:
        self._is_up, self._is_ours = is_up, is_ours
        self._text = b""

    async def get_once(self) -> bytes:
        if self._is_ours:
            await self._is_up.wait()
        elif not self._is_up.is_set():
            raise RefusedError("cannot connect to the rendezvous endpoint n0:1: Connection refused", reason=REFUSED)
        return self._text

    async def compare_set_once(self, expected: bytes, text: bytes) -> bytes:
        if self._text == expected:
            self._text = text
        return self._text

    async def aclose(self) -> None:
        pass


async def test_endpoints_that_came_up_with_our_own_are_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    is_up, refused = anyio.Event(), set()

    def on_endpoint(name: str, why: str) -> None:
        refused.add(name if why == REFUSED else "")
        if len(refused) == 2:
            is_up.set()

    store = QuorumStore(SETTINGS, "job", {}, on_endpoint)
    monkeypatch.setattr(store, "_parts", [Part(is_up, is_ours=number == 0) for number in range(3)])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.run)
        with anyio.fail_after(20):
            assert await store.get() == b""
        tasks.cancel_scope.cancel()


async def test_without_one_that_came_up_the_first_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    store = QuorumStore(SETTINGS, "job", {})
    monkeypatch.setattr(store, "_parts", [Part(anyio.Event(), is_ours=False) for _ in range(3)])
    names = [f"127.0.0.{number}:1 (connection refused)" for number in (1, 2, 3)]
    missing = re.escape(f"3 of 3 rendezvous endpoints are missing, and 2 are needed: {', '.join(names)}")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.run)
        with pytest.raises(RendezvousConnectionError, match=missing):
            await store.get()
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    "names, config, expected",
    [
        ("n0:1,n1:1,n0:1", {}, "rendezvous endpoint n0:1 is in the list twice: list each host once"),
        ("n0:1,,n1:1", {}, "rendezvous endpoint '': use HOST:PORT"),
        ("n0:1,n1:1,n2:1", {"is_host": "true"}, "is_host=true is for a single endpoint"),
        ("localhost:0", {"is_host": "perhaps"}, "is_host=perhaps: use true or false"),
        ("localhost:0", {"is_host": "no"}, "is_host=false: give the store"),
    ],
)
def test_what_cannot_be_is_refused(names: str, config: dict[str, str], expected: str) -> None:
    store, nodes = QuorumStore if "," in names else C10dStore, len(names.split(","))
    with pytest.raises(InputError, match=expected):
        store(RendezvousSettings("c10d", names, nodes, nodes, config=config), "job", {})


def test_an_even_number_works_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    QuorumStore(RendezvousSettings("c10d", "n0:1,n1:1", 3, 3), "job", {})
    assert caplog.messages == ["2 rendezvous endpoints survive the loss of 0, no more than 1 do: use an odd number"]


def test_an_agent_that_finds_what_one_with_a_single_endpoint_has_written_gets_both() -> None:
    store = QuorumStore(SETTINGS, "job", {})
    own, other = SETTINGS.endpoint, "127.0.0.2:1"
    expected = f"this agent has the rendezvous endpoints {own}, another agent of this run has {other}: use the same list on every node"
    with pytest.raises(InputError, match=f"^{expected}$"):
        store._cell_of(to_text(A).encode(), other)
