"""The layout of this machine, according to its kernel and torch: CPUs, caches, NUMA nodes, GPUs.

Called once per run, and only if workers must be bound to CPUs.  CPUs and NUMA nodes are read from sysfs
(`Documentation/ABI/stable/sysfs-devices-node`, `.../sysfs-devices-system-cpu`); the numbers of the GPUs come
from torch in a short-lived process: the agent itself never imports it, and never opens a GPU.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio

from aelastic.base.host.files import text_of
from aelastic.base.host.programs import ProgramError, output_of
from aelastic.base.loop.threads import run_sync
from aelastic.errors import InputError
from aelastic.workers.numa import Topology, cpus_of_worker, ranges
from aelastic.workers.options import NumaBinding

_log = logging.getLogger(__name__)

SYSFS = Path("/sys")

# `import torch` takes seconds, and a minute from a cold network file system; a GPU may be slow to answer.
_ASK_TIMEOUT_S = 300.0
_OUTPUT_BYTES_MAX = 1 << 20

# The address of a GPU on the PCI bus, as in sysfs; `?` for an accelerator whose address torch does not report.
_ASK_FOR_GPUS = """\
import torch
kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
devices = None if kind is None else torch.get_device_module(kind)
for number in range(0 if devices is None else devices.device_count()):
    gpu = devices.get_device_properties(number)
    try:
        print(f"GPU {gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
    except AttributeError:
        print("GPU ?")
"""


async def cpus_of_workers(
    mode: NumaBinding, local_world_size: int, environ: Mapping[str, str], *, falls_back: bool = False
) -> dict[int, frozenset[int]]:
    """Returns the CPUs that each worker may run on, by local rank; a worker without an entry runs where the agent does.

    The allowed CPUs are those of the calling thread, which starts the workers.

    If cancelled, it leaves no process behind.

    Args:
        mode: how to choose them.
        local_world_size: how many workers there are.
        environ: that of the process which lists the GPUs.
        falls_back: only warn about a worker whose CPUs cannot be determined.

    Raises:
        InputError: the CPUs of a worker cannot be determined.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    found: dict[int, frozenset[int]] = {}
    with _warning_only(falls_back, "no worker is bound to CPUs"):
        gpus = await _gpu_addresses(environ)
        machine = await run_sync(read_topology, allowed, gpus)
        for rank in range(local_world_size):
            with _warning_only(falls_back, f"local rank {rank} is not bound to CPUs"):
                found[rank] = cpus_of_worker(mode, machine, rank)
                _log.info("local rank %d runs on CPUs %s", rank, ranges(found[rank]))
    return found


@contextmanager
def _warning_only(falls_back: bool, how: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        if not falls_back:
            raise
        _log.warning("%s: %s", how, error)


def read_topology(allowed: frozenset[int], gpus: Sequence[str]) -> Topology:
    """Returns the layout of this machine, with GPUs at these PCI addresses; omits facts whose file is missing."""
    cores = {cpu: _cpu_list(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in allowed}
    caches = {cpu: _sharing_last_cache(cpu) for cpu in allowed}
    sockets = {cpu: _number(f"devices/system/cpu/cpu{cpu}/topology/physical_package_id") for cpu in allowed}
    nodes = _cpu_list("devices/system/node/possible")
    return Topology(
        allowed=allowed,
        node_cpus={node: _cpu_list(f"devices/system/node/node{node}/cpulist") for node in nodes},
        gpu_nodes=[_node_of(address) for address in gpus],
        socket_of={cpu: socket for cpu, socket in sockets.items() if socket is not None},
        core_of={cpu: min(siblings) for cpu, siblings in cores.items() if siblings},
        cache_of={cpu: min(sharing) for cpu, sharing in caches.items() if sharing},
    )


def _node_of(gpu: str) -> int | None:
    node = _number(f"bus/pci/devices/{gpu}/numa_node")
    return None if node is None else max(node, 0)  # -1: not reported, mostly because there is only one node


def _sharing_last_cache(cpu: int) -> frozenset[int]:
    """Returns the CPUs that share the highest-level data cache of this CPU."""
    folder = f"devices/system/cpu/cpu{cpu}/cache"
    highest, sharing = -1, frozenset[int]()
    for index in sorted(path.name for path in (SYSFS / folder).glob("index[0-9]*")):
        level = _number(f"{folder}/{index}/level")
        if _text(f"{folder}/{index}/type") in {"Unified", "Data"} and level is not None and level > highest:
            highest, sharing = level, _cpu_list(f"{folder}/{index}/shared_cpu_list")
    return sharing


def _cpu_list(path: str) -> frozenset[int]:
    """Returns the numbers in a list such as `0-3,8`; none if the file does not exist."""
    spans = (span.partition("-") for span in _text(path).split(",") if span)
    return frozenset(number for first, _, last in spans for number in range(int(first), int(last or first) + 1))


def _number(path: str) -> int | None:
    text = _text(path)
    return int(text) if text else None


def _text(path: str) -> str:
    return text_of(SYSFS / path).strip()


async def _gpu_addresses(environ: Mapping[str, str]) -> list[str]:
    """Returns the PCI addresses of the GPUs that workers would see, in torch's order."""
    # -P: do not import a torch.py or random.py beside the script.
    command = [sys.executable, "-P", "-c", _ASK_FOR_GPUS]
    reason = ""
    with anyio.move_on_after(_ASK_TIMEOUT_S) as waited:
        try:
            code, output, complained = await output_of(command, environ, bytes_max=_OUTPUT_BYTES_MAX)
        except ProgramError as error:
            reason = f"it {error}"
        else:
            if code == 0:
                return [line.split()[1] for line in output.splitlines() if line.startswith("GPU ")]
            reason = complained.strip().rpartition("\n")[2].strip() or "no reason given"
    if waited.cancelled_caught:
        raise InputError(f"numa_binding is given, but torch did not answer in {_ASK_TIMEOUT_S:g} s: leave it out")
    raise InputError(f"numa_binding is given, but torch cannot tell where the GPUs are ({reason}): leave it out")
