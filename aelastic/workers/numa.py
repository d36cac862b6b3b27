"""Which CPUs a worker may run on, so that it stays near its GPU.

Worker n uses GPU n, and its CPUs are chosen from those of that GPU's NUMA node, as in `torch.numa.binding`:
wherever that has an answer, this has the same.  This also works where torch fails because of irrelevant NUMA
nodes: those without CPUs, without CPUs for us, or that are possible but do not exist.

The machine's layout is an argument; `topology.py` reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from aelastic.errors import InputError
from aelastic.workers.options import NumaBinding


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A machine's CPUs and GPUs, as far as they are known.

    Args:
        allowed: the CPUs that we may run on.
        node_cpus: the CPUs of each NUMA node, allowed or not.
        gpu_nodes: the NUMA node of each GPU, by its number; `None` if the kernel does not report it.
        socket_of: the socket of each allowed CPU.
        core_of: the core of each allowed CPU, named by its lowest CPU.
        cache_of: the last cache of each allowed CPU, named by the lowest CPU that shares it.
    """

    allowed: frozenset[int]
    node_cpus: Mapping[int, frozenset[int]]
    gpu_nodes: Sequence[int | None]
    socket_of: Mapping[int, int]
    core_of: Mapping[int, int]
    cache_of: Mapping[int, int]


def cpus_of_worker(mode: NumaBinding, machine: Topology, local_rank: int) -> frozenset[int]:
    """Returns the CPUs that one worker may run on, at least one.

    Raises:
        InputError: there is no such GPU, or no CPU near it that we may use, or too few.
    """
    try:
        match mode:
            case "node":
                return _cpus_near(machine, _node_of(machine, local_rank))
            case "socket":
                return _cpus_of_socket(machine, _node_of(machine, local_rank))
            case "exclusive":
                return _share_of_cores(machine, local_rank)
            case "core-complex":
                return _cpus_of_cache(machine, local_rank)
            case _:
                assert_never(mode)
    except _UnknownError as error:
        raise InputError(f"numa_binding is {mode!r}, but {error}") from None


def ranges(numbers: Collection[int]) -> str:
    """Formats numbers like the kernel's lists of CPUs, such as `0-3,8`."""
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = spans[-1][0], number
        else:
            spans.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


class _UnknownError(Exception):
    """Why there is no answer, and what to do."""


def _cpus_of_socket(machine: Topology, node: int) -> frozenset[int]:
    """Returns the CPUs of every NUMA node of the socket; a node's lowest allowed CPU determines its socket."""
    near = _cpus_near(machine, node)
    socket = _known(machine.socket_of, min(near), "socket")
    others = (cpus & machine.allowed for cpus in machine.node_cpus.values())
    return near.union(*(cpus for cpus in others if cpus and _known(machine.socket_of, min(cpus), "socket") == socket))


def _share_of_cores(machine: Topology, gpu: int) -> frozenset[int]:
    """Returns whole cores of the NUMA node, divided among its GPUs; any remainder goes to the first GPUs, one each."""
    node = _node_of(machine, gpu)
    gpus = _gpus_of(machine, node)
    cores = [cpus for _, cpus in sorted(_grouped(_cpus_near(machine, node), machine.core_of, "core").items())]
    if len(cores) < len(gpus):
        raise _UnknownError(
            f"NUMA node {node} has {len(gpus)} GPUs and {len(cores)} allowed cores: use node or socket, "
            "or widen the agent's CPU affinity"
        )
    each, rest = divmod(len(cores), len(gpus))
    place = gpus.index(gpu)
    first = place * each + min(place, rest)
    return frozenset().union(*cores[first : first + each + (place < rest)])


def _cpus_of_cache(machine: Topology, gpu: int) -> frozenset[int]:
    """Returns the CPUs that share one last-level cache: GPUs of a NUMA node take turns, beginning with the largest."""
    node = _node_of(machine, gpu)
    caches = _grouped(_cpus_near(machine, node), machine.cache_of, "last cache")
    largest_first = sorted(caches.items(), key=lambda cache: (-len(cache[1]), cache[0]))
    _, cpus = largest_first[_gpus_of(machine, node).index(gpu) % len(largest_first)]
    return frozenset(cpus)


def _node_of(machine: Topology, gpu: int) -> int:
    count = len(machine.gpu_nodes)
    if not count:
        raise _UnknownError("torch sees no GPU: check the driver and CUDA_VISIBLE_DEVICES, or leave it out")
    if gpu >= count:
        raise _UnknownError(
            f"torch sees {count} GPUs, so local rank {gpu} has none: start at most {count} workers, or leave it out"
        )
    if (node := machine.gpu_nodes[gpu]) is None:
        raise _UnknownError(f"the kernel does not report the NUMA node of GPU {gpu}: leave it out")
    return node


def _gpus_of(machine: Topology, node: int) -> list[int]:
    return [gpu for gpu in range(len(machine.gpu_nodes)) if _node_of(machine, gpu) == node]


def _cpus_near(machine: Topology, node: int) -> frozenset[int]:
    if not (cpus := machine.node_cpus.get(node, frozenset())):
        raise _UnknownError(f"the kernel lists no CPUs of NUMA node {node}: leave it out")
    if not (allowed := cpus & machine.allowed):
        raise _UnknownError(
            f"the agent may not use any CPU of NUMA node {node} ({ranges(cpus)}), only {ranges(machine.allowed)}: "
            "widen its CPU affinity, or leave it out"
        )
    return allowed


def _grouped(cpus: frozenset[int], group_of: Mapping[int, int], what: str) -> dict[int, set[int]]:
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(_known(group_of, cpu, what), set()).add(cpu)
    return groups


def _known(of: Mapping[int, int], cpu: int, what: str) -> int:
    if cpu not in of:
        raise _UnknownError(f"the kernel does not report the {what} of CPU {cpu}: use node, or leave it out")
    return of[cpu]
