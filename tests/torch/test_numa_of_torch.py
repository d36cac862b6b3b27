"""CPUs near a GPU match those that torch finds, on any machine."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.effort import examples
from kit.workers.machines import WORKERS, Cpu, Machine, TorchOn, machine, our_cpus

from aelastic.workers import topology
from aelastic.workers.numa import ranges
from aelastic.workers.options import NUMA_BINDINGS

MACHINES = {
    "one node": machine(sockets=1, nodes=1, gpu_nodes=(0, 0)),
    "a GPU whose node the firmware does not tell": machine(sockets=1, nodes=1, gpu_nodes=(-1, 0, -1)),
    "one core": machine(sockets=1, nodes=1, cores=1, threads=1, gpu_nodes=(0,)),
    "a node per socket": machine(nodes=1, gpu_nodes=(0, 0, 1, 1)),
    "two nodes per socket": machine(gpu_nodes=(0, 1, 2, 3)),
    "four nodes per socket": machine(nodes=4, cores=3, gpu_nodes=(7, 6, 5, 4, 3, 2, 1, 0)),
    "siblings with numbers in a row": machine(siblings_are_neighbours=True, gpu_nodes=(3, 3, 3, 0)),
    "no siblings": machine(threads=1, gpu_nodes=(0, 1, 0, 1)),
    "four threads per core": machine(threads=4, gpu_nodes=(2, 2, 2, 0)),
    "cores that cannot be divided evenly": machine(cores=7, gpu_nodes=(1, 1, 0, 1, 1, 1)),
    "more GPUs than cores on one node": machine(cores=2, gpu_nodes=(0, 1, 1, 1)),
    "more GPUs than caches": machine(cores=8, cores_per_cache=4, gpu_nodes=(0, 0, 0, 1, 0, 0)),
    "caches of unlike size": machine(cores=7, cores_per_cache=3, gpu_nodes=(0, 0, 0, 0, 1)),
    "one cache for each core": machine(cores_per_cache=1, gpu_nodes=(0, 0)),
    "no third cache": Machine(tuple(Cpu(n, 0, 0, n, n // 2) for n in range(6)), (0, 0)),
    "CPUs offline": machine(gpu_nodes=(0, 1, 2, 3)).without(1, 5, 17),
    "half of each core allowed": machine(gpu_nodes=(0, 1, 2, 3)).allowing(*range(16)),
    "odd CPUs allowed": machine(cores=6, cores_per_cache=3, gpu_nodes=(0, 0, 1, 3)).allowing(*range(1, 48, 2)),
    "one node allowed": machine(gpu_nodes=(0, 1, 2, 3)).allowing(4, 5, 6, 7),
    "one socket allowed": machine(gpu_nodes=(0, 1, 2, 3)).allowing(*range(8)),
    "a node that spans sockets": Machine(
        tuple(Cpu(n, 0 if n % 4 else 1, n % 2, n, n, n // 4) for n in range(12)), (0, 1, 0)
    ),
    "a node of memory alone": dataclasses.replace(machine(gpu_nodes=(0, 3, 1)), empty_nodes=(4,)),
    "a GPU at a node of memory alone": dataclasses.replace(machine(gpu_nodes=(0, 4)), empty_nodes=(4,)),
    "nodes that are possible and not there": dataclasses.replace(machine(gpu_nodes=(0, 3)), absent_nodes=(4, 5, 6)),
    "a GPU that the kernel does not know": machine(gpu_nodes=(0, None, 1)),
    "no word of sockets": dataclasses.replace(machine(), silent=("physical_package_id",)),
    "no word of siblings": dataclasses.replace(machine(), silent=("thread_siblings_list",)),
    "no word of caches": dataclasses.replace(machine(), silent=("cache",)),
    "no word of nodes": dataclasses.replace(machine(), silent=("node",)),
    "no GPU": machine(gpu_nodes=()),
}
# Here torch fails because of irrelevant NUMA nodes; its answer without them is the reference.
TORCH_STUMBLES = {
    ("one node allowed", "socket"),
    ("one socket allowed", "socket"),
    ("a node of memory alone", "socket"),
    ("a GPU at a node of memory alone", "socket"),
    ("nodes that are possible and not there", "socket"),
}


@pytest.fixture(scope="module")
def binding() -> Any:
    return pytest.importorskip("torch.numa.binding")


@pytest.fixture(scope="module")
def sysfs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Machine], Path]:
    """A machine's /sys, a thousand files, written once for all modes."""
    folder, numbers = tmp_path_factory.mktemp("machines"), itertools.count()
    return functools.cache(lambda given: given.write(folder / str(next(numbers))))


def without_empty_nodes(given: Machine) -> Machine:
    """The same machine, for a torch that must not see NUMA nodes without allowed CPUs."""
    cpus = tuple(cpu for cpu in given.cpus if cpu.number in given.allowed_cpus)
    return dataclasses.replace(given, cpus=cpus, empty_nodes=(), absent_nodes=())


# Each one tests another part of the /sys reader, or of sharing out the CPUs.
QUICK = {
    "one core", "a node per socket", "more GPUs than cores on one node", "caches of unlike size", "no third cache",
    "one node allowed", "no word of nodes",
}  # fmt: skip


@pytest.mark.parametrize("mode", NUMA_BINDINGS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.all) for name in MACHINES]
)
def test_the_cpus_of_each_worker_are_those_that_torch_finds(
    sysfs_of: Callable[[Machine], Path], monkeypatch: pytest.MonkeyPatch, binding: Any, name: str, mode: str
) -> None:
    given = MACHINES[name]
    sysfs = sysfs_of(given)
    torch_on = TorchOn(binding, monkeypatch, given, sysfs)
    theirs = [torch_on.cpus(mode, gpu) for gpu in range(WORKERS)]
    if (name, mode) in TORCH_STUMBLES:
        assert not any(theirs)
        clean = without_empty_nodes(given)
        torch_on = TorchOn(binding, monkeypatch, clean, sysfs_of(clean))
        theirs = [torch_on.cpus(mode, gpu) for gpu in range(WORKERS)]
    assert our_cpus(mode, given, sysfs, monkeypatch) == theirs


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Machines of any shape: cores with several threads, caches across nodes, nodes across sockets."""
    numbers = draw(st.lists(st.integers(0, 40), min_size=1, max_size=16, unique=True))
    few = st.integers(0, draw(st.integers(0, 7)))
    cores = {core: (draw(few), draw(st.integers(0, 1)), draw(few)) for core in range(8)}
    cpus = []
    for number in numbers:
        core = draw(st.integers(0, 7))
        node, socket, cache = cores[core]
        cpus.append(Cpu(number, node, socket, core, core, cache))
    nodes = [cpu.node for cpu in cpus]
    return Machine(
        tuple(cpus),
        gpu_nodes=tuple(draw(st.lists(st.sampled_from([-1, *nodes]), max_size=8))),
        allowed=draw(st.none() | st.frozensets(st.sampled_from(numbers), min_size=1)),
        empty_nodes=tuple(draw(st.lists(st.integers(8, 9), max_size=1))),
        absent_nodes=tuple(draw(st.lists(st.integers(10, 12), max_size=2))),
    )


@pytest.mark.long
@pytest.mark.all  # each example is a thousand files
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(machines())
def test_any_machine_at_all_is_to_us_what_it_is_to_torch(
    monkeypatch: pytest.MonkeyPatch, binding: Any, given: Machine
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sysfs = given.write(Path(folder) / "sys")
        clean = without_empty_nodes(given)
        torch_on = TorchOn(binding, monkeypatch, given, sysfs)
        torch_on_clean = TorchOn(binding, monkeypatch, clean, clean.write(Path(folder) / "clean"))
        for mode in NUMA_BINDINGS:
            ours = our_cpus(mode, given, sysfs, monkeypatch)
            for gpu, cpus in enumerate(ours):
                theirs = torch_on.cpus(mode, gpu)
                assert cpus == (theirs or (torch_on_clean.cpus(mode, gpu) if mode == "socket" else None)), (mode, gpu)


@pytest.mark.parametrize("mode", NUMA_BINDINGS)
def test_this_machine_too_is_to_us_what_it_is_to_torch(
    monkeypatch: pytest.MonkeyPatch, binding: Any, mode: str
) -> None:
    devices = topology.SYSFS / "bus/pci/devices"
    known = sorted(os.listdir(devices)) if devices.exists() else []

    class Here(Machine):
        @property
        def gpus(self) -> list[str]:
            return [address for address in known if address.endswith(".0")][:WORKERS]

    here = Here((), (0,) * len(Here((), ()).gpus), frozenset(os.sched_getaffinity(0)))
    torch_on = TorchOn(binding, monkeypatch, here, topology.SYSFS)
    theirs = [torch_on.cpus(mode, gpu) for gpu in range(WORKERS)]
    assert our_cpus(mode, here, topology.SYSFS, monkeypatch) == theirs


@given(st.sets(st.integers(0, 300)))
def test_ranges_are_read_as_they_were_written(binding: Any, numbers: set[int]) -> None:
    assert ranges(numbers) == binding._get_ranges_str_from_ints(numbers)
    assert binding._get_set_of_int_from_ranges_str(ranges(numbers)) == numbers
