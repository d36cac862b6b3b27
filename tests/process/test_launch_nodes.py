"""Launches of several agents in one job: here each is a thread; it could be a process on its own node."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from kit.launching import LAUNCH_TIMEOUT_S
from kit.ports import quiet_port
from kit.stories import launches as stories

from aelastic import LaunchConfig, elastic_launch

pytestmark = pytest.mark.usefixtures("warm_stores")

# Role and workers of each agent: mixed roles and unequal local world sizes, also within a role.
AGENTS = (("trainer", 2), ("ps", 1), ("trainer", 3))


def launch_all(backend: str, endpoint: str) -> dict[int, Any]:
    """The results of all agents' launches: the workers' environments by global rank."""
    given: dict[int, Any] = {}

    def run(node: int, role: str, workers: int) -> None:
        more = {"rank": node} if backend.endswith("static") else {}
        config = LaunchConfig(
            min_nodes=3, max_nodes=3, nproc_per_node=workers, run_id="several", role=role, rdzv_backend=backend,
            rdzv_endpoint=endpoint, rdzv_configs=more, max_restarts=0, start_method="spawn",
        )  # fmt: skip
        try:
            values = elastic_launch(config, stories.ranks)()
        except Exception as error:  # noqa: BLE001  shown by the test
            given[node] = error
        else:
            given[node] = {rank: dict(zip(stories.KNOWN_RANKS, value, strict=True)) for rank, value in values.items()}

    threads = [threading.Thread(target=run, args=(node, *agent)) for node, agent in enumerate(AGENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LAUNCH_TIMEOUT_S)
    return given


@contextmanager
def registered_handler() -> Iterator[None]:
    """Registers a back end with torch, as in torchelastic's documentation."""
    rendezvous = pytest.importorskip("torch.distributed.elastic.rendezvous")
    registry = pytest.importorskip("torch.distributed.elastic.rendezvous.registry")

    def create(parameters: Any) -> Any:
        handler = registry._create_c10d_handler(parameters)
        handler._backend_name = "of-a-program"
        return handler

    rendezvous.rendezvous_handler_registry.register("of-a-program", create)
    try:
        yield
    finally:
        del rendezvous.rendezvous_handler_registry._registry["of-a-program"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["c10d", "static", pytest.param("of-a-program", marks=pytest.mark.all)])
def test_several_roles_and_unequal_nodes_have_the_documented_ranks(backend: str) -> None:
    with registered_handler() if backend == "of-a-program" else nullcontext():
        given = launch_all(backend, f"127.0.0.1:{quiet_port()}")
    failed = [value for value in given.values() if isinstance(value, Exception)]
    assert not failed and set(given) == {0, 1, 2}
    workers = {rank: variables for values in given.values() for rank, variables in values.items()}
    assert sorted(workers) == list(range(6))
    for node, (role, local_world_size) in enumerate(AGENTS):
        of_node = given[node]
        ranks = sorted(of_node)
        assert ranks == list(range(ranks[0], ranks[0] + local_world_size)), "a node's ranks are consecutive"
        for local_rank, rank in enumerate(ranks):
            variables = of_node[rank]
            assert (variables["RANK"], variables["LOCAL_RANK"], variables["ROLE_NAME"]) == (
                str(rank),
                str(local_rank),
                role,
            )
            assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("6", str(local_world_size))
            assert (variables["GROUP_WORLD_SIZE"], variables["ROLE_WORLD_SIZE"]) == (
                "3",
                {"trainer": "5", "ps": "1"}[role],
            )
        assert len({variables["GROUP_RANK"] for variables in of_node.values()}) == 1
    assert {variables["GROUP_RANK"] for variables in workers.values()} == {"0", "1", "2"}
    if backend == "static":
        assert [next(iter(given[node].values()))["GROUP_RANK"] for node in range(3)] == ["0", "1", "2"]
    for role, size in (("trainer", 5), ("ps", 1)):
        role_ranks = [
            int(variables["ROLE_RANK"]) for _, variables in sorted(workers.items()) if variables["ROLE_NAME"] == role
        ]
        assert role_ranks == list(range(size)), "ranks within a role are in the order of global ranks"
