"""CPUs near a GPU: refusals and their reasons, and shares that never overlap."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from kit.workers.machines import Machine, machine, our_cpus

from aelastic import InputError
from aelastic.workers import topology
from aelastic.workers.numa import cpus_of_worker


@pytest.mark.parametrize(
    "given, mode, local_rank, words",
    [
        (machine(cores=1, gpu_nodes=()), "node", 0, "torch sees no GPU"),
        (machine(cores=1), "node", 2, "torch sees 2 GPUs, so local rank 2 has none"),
        (machine(cores=1, gpu_nodes=(None,)), "node", 0, "the NUMA node of GPU 0"),
        (machine().allowing(0, 1), "socket", 1, "may not use any CPU of NUMA node 1 (4-7,20-23), only 0-1"),
        (machine(cores=1, gpu_nodes=(9,)), "node", 0, "no CPUs of NUMA node 9"),
        (machine(cores=1, gpu_nodes=(0, 0)), "exclusive", 0, "has 2 GPUs and 1 allowed cores: use node or socket"),
        (dataclasses.replace(machine(cores=1), silent=("cache",)), "core-complex", 0, "the last cache of CPU"),
        (dataclasses.replace(machine(cores=1), silent=("physical_package_id",)), "socket", 0, "the socket of CPU 0"),
        (dataclasses.replace(machine(cores=1), silent=("thread_siblings_list",)), "exclusive", 0, "the core of CPU"),
    ],
)
def test_no_answer_comes_with_the_reason_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Machine, mode: Any, local_rank: int, words: str
) -> None:
    monkeypatch.setattr(topology, "SYSFS", given.write(tmp_path))
    read = topology.read_topology(given.allowed_cpus, given.gpus)
    with pytest.raises(InputError) as caught:
        cpus_of_worker(mode, read, local_rank)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"numa_binding is '{mode}', but ") and ": " in str(caught.value)


def test_exclusive_shares_of_a_node_are_whole_cores_and_never_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = machine(sockets=1, nodes=1, cores=7, gpu_nodes=(0, 0, 0))
    first, *others = our_cpus("exclusive", given, given.write(tmp_path), monkeypatch)[:3]
    assert first == frozenset({0, 1, 2, 7, 8, 9})  # the first one gets one more core
    assert others == [frozenset({3, 4, 10, 11}), frozenset({5, 6, 12, 13})]
    shares = [first, *others]
    assert not any(one & two for one, two in itertools.combinations(shares, 2) if one and two)
