"""Names of rendezvous back ends, and their implementations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kit.shared_cell import InProcessStore, SharedWorld

from aelastic.agent.link import open_link
from aelastic.errors import InputError
from aelastic.rdzv import registry
from aelastic.rdzv.agent_link import AgentLink
from aelastic.rdzv.registry import InProcessLink
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.torch_handler_link import TorchHandlerLink
from aelastic.spec import WorkerSpec
from aelastic.workers.tcpstore.host import StoreHost
from aelastic.workers.tcpstore.template import StoreTemplate

AROUND = registry.AgentContext(run_id="job", env={}, store=None)
OURS = ["c10d", "etcd", "etcd-v2", "etcd-v3", "static"]


def spec(backend: str, endpoint: str = "node0:29400", **others: Any) -> WorkerSpec:
    settings = RendezvousSettings(backend=backend, endpoint=endpoint, max_nodes=2, **others)
    return WorkerSpec(entrypoint="true", run_id="job", rdzv=settings)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes registrations after the test."""
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))


def test_our_names_are_known() -> None:
    assert registry.names() == OURS


@pytest.mark.parametrize("name", ["c10d", "etcd", "etcd-v2", "etcd-v3"])
async def test_each_of_our_names_opens_a_line_and_reaches_for_nothing_yet(name: str) -> None:
    assert isinstance(open_link(spec(name), "n1", AROUND), AgentLink)


async def test_with_several_endpoints_the_workers_store_is_forked_as_the_children_for_these_are() -> None:
    around = AROUND.replace(store=StoreHost({}))
    open_link(spec("c10d", "n0:1,n1:1,n2:1"), "n1", around)
    fork = around.store._process.fork
    assert isinstance(fork.__self__, StoreTemplate)


def test_one_node_without_a_rendezvous_needs_none() -> None:
    assert isinstance(open_link(WorkerSpec(entrypoint="true"), "n1", AROUND), InProcessLink)


@pytest.mark.usefixtures("names")
async def test_a_store_of_your_own_is_opened_by_its_name() -> None:
    asked = []

    def factory(settings: RendezvousSettings, around: registry.AgentContext) -> Any:
        asked.append((settings.endpoint, around.run_id))
        return InProcessStore(around.run_id, SharedWorld())

    registry.register("zookeeper", factory)
    assert "zookeeper" in registry.names()
    assert isinstance(open_link(spec("zookeeper", "zk://a/b"), "n1", AROUND), AgentLink)
    assert asked == [("zk://a/b", "job")]


@pytest.mark.usefixtures("names")
def test_a_name_is_given_once() -> None:
    registry.register("zookeeper", lambda settings, around: None)  # type: ignore[arg-type,return-value]
    for name in (*OURS, "zookeeper"):
        with pytest.raises(InputError, match=f"rendezvous back end {name} exists already: choose another name"):
            registry.register(name, lambda settings, around: None)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("name", ["torch:c10d", "torch:etcd"])
async def test_torchs_own_are_found_by_their_long_names(name: str) -> None:
    assert isinstance(open_link(spec(name), "n1", AROUND), TorchHandlerLink)


@pytest.mark.parametrize("name", ["zookeeper", "torch:zookeeper", "", "C10D"])
def test_an_unknown_name_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(
        InputError, match=f"rendezvous back end '{name}' is not known to torch either: use one of c10d, "
    ):
        open_link(spec(name), "n1", AROUND)


async def test_a_handler_that_is_given_is_taken_whatever_it_is() -> None:
    handler = SimpleNamespace(next_rendezvous=None)
    link = open_link(WorkerSpec(entrypoint="true", rdzv_handler=handler), "n1", AROUND)
    assert isinstance(link, TorchHandlerLink)
