"""Machines for tests of NUMA binding: what the kernel would show under /sys, and a torch that has GPUs."""

from __future__ import annotations

import dataclasses
import inspect
import os
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aelastic import InputError
from aelastic.workers import topology
from aelastic.workers.numa import cpus_of_worker, ranges

# More workers than any of the machines has CPUs.
WORKERS = 10


@dataclass(frozen=True)
class Cpu:
    """A CPU with its kernel number, and what it belongs to; a cache is `None` if the CPU lacks that level."""

    number: int
    node: int
    socket: int
    core: int
    second_cache: int
    third_cache: int | None = None


@dataclass(frozen=True)
class Machine:
    """A machine invented by a test.

    Args:
        allowed: the CPUs that we may run on; all if `None`.
        gpu_nodes: each GPU's node according to the kernel; `None` if it does not know.
        empty_nodes: NUMA nodes without CPUs.
        absent_nodes: possible NUMA nodes that are absent.
        silent: names of files that the kernel does not have.
    """

    cpus: tuple[Cpu, ...]
    gpu_nodes: tuple[int | None, ...]
    allowed: frozenset[int] | None = None
    empty_nodes: tuple[int, ...] = ()
    absent_nodes: tuple[int, ...] = ()
    silent: tuple[str, ...] = ()

    @property
    def allowed_cpus(self) -> frozenset[int]:
        return frozenset(cpu.number for cpu in self.cpus) if self.allowed is None else self.allowed

    @property
    def gpus(self) -> list[str]:
        return [f"0001:{number + 16:02x}:00.0" for number in range(len(self.gpu_nodes))]

    def allowing(self, *numbers: int) -> Machine:
        return dataclasses.replace(self, allowed=frozenset(numbers))

    def without(self, *numbers: int) -> Machine:
        """The machine with these CPUs offline."""
        return dataclasses.replace(self, cpus=tuple(cpu for cpu in self.cpus if cpu.number not in numbers))

    def write(self, sysfs: Path) -> Path:
        """Writes its /sys."""
        nodes = {cpu.node for cpu in self.cpus} | {*self.empty_nodes}
        files = {"devices/system/node/possible": ranges(nodes | {*self.absent_nodes})}
        for node in nodes:
            files[f"devices/system/node/node{node}/cpulist"] = self._numbers(node=node)
        for cpu in self.cpus:
            folder = f"devices/system/cpu/cpu{cpu.number}"
            files[f"{folder}/topology/physical_package_id"] = str(cpu.socket)
            files[f"{folder}/topology/thread_siblings_list"] = self._numbers(core=cpu.core)
            files[f"{folder}/cache/uevent"] = ""
            caches = [(1, "Data", {"core": cpu.core}), (1, "Instruction", {"core": cpu.core})]
            caches += [(2, "Unified", {"second_cache": cpu.second_cache})]
            caches += [(3, "Unified", {"third_cache": cpu.third_cache})] if cpu.third_cache is not None else []
            # An instruction cache above all others, which must be ignored.
            caches += [(4, "Instruction", {"socket": cpu.socket})]
            for index, (level, kind, sharing) in enumerate(caches):
                files[f"{folder}/cache/index{index}/level"] = str(level)
                files[f"{folder}/cache/index{index}/type"] = kind
                files[f"{folder}/cache/index{index}/shared_cpu_list"] = self._numbers(**sharing)
        for address, numa_node in zip(self.gpus, self.gpu_nodes, strict=True):
            if numa_node is not None:
                files[f"bus/pci/devices/{address}/numa_node"] = str(numa_node)
        readable = {sysfs / path: text for path, text in files.items() if not set(path.split("/")) & set(self.silent)}
        for parent in {file.parent for file in readable}:
            parent.mkdir(parents=True, exist_ok=True)
        for file, text in readable.items():
            file.write_text(text + "\n")
        return sysfs

    def _numbers(self, **of: Any) -> str:
        return ranges([cpu.number for cpu in self.cpus if all(getattr(cpu, key) == each for key, each in of.items())])


def machine(
    *,
    sockets: int = 2,
    nodes: int = 2,
    cores: int = 4,
    threads: int = 2,
    cores_per_cache: int = 2,
    gpu_nodes: Sequence[int | None] = (0, 1),
    siblings_are_neighbours: bool = False,
) -> Machine:
    """A machine with `nodes` NUMA nodes per socket and `cores` cores per node."""
    all_cores = sockets * nodes * cores
    cpus = [
        Cpu(
            number=core * threads + thread if siblings_are_neighbours else thread * all_cores + core,
            node=core // cores,
            socket=core // cores // nodes,
            core=core,
            second_cache=core,
            # The last one of a node may be smaller than the others.
            third_cache=core // cores * cores + core % cores // cores_per_cache,
        )
        for core in range(all_cores)
        for thread in range(threads)
    ]
    return Machine(tuple(cpus), tuple(gpu_nodes))


class TorchOn:
    """torch's own functions, on a machine whose /sys is a folder."""

    def __init__(self, binding: Any, monkeypatch: Any, machine: Machine, sysfs: Path) -> None:
        self._binding, self._monkeypatch = binding, monkeypatch
        self._machine, self._sysfs = machine, sysfs

    def cpus(self, mode: str, gpu: int) -> frozenset[int] | None:
        """The CPUs that a worker is bound to; `None` if torch fails."""
        options = self._binding.NumaOptions(affinity_mode=self._binding.AffinityMode(mode))
        with self._monkeypatch.context() as patched:
            # Only names of that module: other modules still read the real files.
            patched.setattr(self._binding, "open", self._open, raising=False)
            system = types.SimpleNamespace(
                path=os.path,
                listdir=lambda path: os.listdir(self._there(path)),
                sched_getaffinity=lambda _: set(self._machine.allowed_cpus),
            )
            patched.setattr(self._binding, "os", system)
            torch = types.SimpleNamespace(cuda=self, accelerator=self, get_device_module=lambda _: self)
            patched.setattr(self._binding, "torch", torch)
            patched.setattr(self._binding, "shutil", types.SimpleNamespace(which=lambda name: name))
            find = self._binding._get_validated_logical_cpus_to_bind_to
            # The name until torch 2.13, which knew only CUDA.
            index = "gpu_index" if "gpu_index" in inspect.signature(find).parameters else "device_index"
            try:
                return frozenset(find(numa_options=options, **{index: gpu}))
            except Exception:  # noqa: BLE001  of many kinds
                return None

    # What the binding asks of torch.

    def is_available(self) -> bool:
        return bool(self._machine.gpu_nodes)

    def current_accelerator(self) -> str:
        return "cuda"

    def device_count(self) -> int:
        return len(self._machine.gpu_nodes)

    def get_device_properties(self, number: int) -> Any:
        if not 0 <= number < self.device_count():
            raise AssertionError("Invalid device id")
        domain, bus, device = self._machine.gpus[number].partition(".")[0].split(":")
        return types.SimpleNamespace(
            pci_domain_id=int(domain, 16), pci_bus_id=int(bus, 16), pci_device_id=int(device, 16)
        )

    # What the binding asks of the system.

    def _open(self, path: str) -> Any:
        return open(self._there(path))

    def _there(self, path: str) -> str:
        return str(self._sysfs) + path.removeprefix("/sys")


FAKE_TORCH = """\
print("a word of greeting")  # importing the real one may be as talkative


class xpu:
    @staticmethod
    def device_count():
        return len(GPUS)

    @staticmethod
    def get_device_properties(number):
        class gpu:
            if GPUS[number] != "?":
                pci_domain_id, pci_bus_id, pci_device_id = (int(part, 16) for part in GPUS[number][:-2].split(":"))
        return gpu


class accelerator:
    @staticmethod
    def is_available():
        return bool(GPUS)

    @staticmethod
    def current_accelerator():
        return "xpu"


def get_device_module(kind):
    return {"xpu": xpu}[kind]
"""


def write_torch(folder: Path, gpus: Sequence[str], before: str = "") -> str:
    """Writes a torch that sees these GPUs, for PYTHONPATH."""
    folder.mkdir()
    (folder / "torch.py").write_text(f"GPUS = {list(gpus)}\n{before}\n{FAKE_TORCH}")
    return str(folder)


def our_cpus(mode: Any, given: Machine, sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> list[frozenset[int] | None]:
    """The CPUs of each worker; `None` without an answer."""
    with monkeypatch.context() as patched:
        patched.setattr(topology, "SYSFS", sysfs)
        read = topology.read_topology(given.allowed_cpus, given.gpus)
    found: list[frozenset[int] | None] = []
    for local_rank in range(WORKERS):
        try:
            found.append(cpus_of_worker(mode, read, local_rank))
        except InputError:
            found.append(None)
    return found
