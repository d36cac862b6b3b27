"""What a user can set about the workers' processes: apart from the rules, which most jobs need not import."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

# Which CPUs near its device a worker gets (torch: `torch.numa.binding.AffinityMode`).
NumaBinding: TypeAlias = Literal["node", "socket", "exclusive", "core-complex"]
NUMA_BINDINGS: tuple[str, ...] = get_args(NumaBinding)
