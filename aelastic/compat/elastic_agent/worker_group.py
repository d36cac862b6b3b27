"""The values that torch's agent takes, and those that describe its workers: `WorkerSpec`, `WorkerGroup`, `Worker`.

Names, order and defaults of the fields are torch's (`torch.distributed.elastic.agent.server`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aelastic.errors import InputError
from aelastic.workers.states import Worker, WorkerState


@dataclass
class WorkerSpec:
    """What torch's agent runs (torch: `WorkerSpec`); `aelastic.WorkerSpec` is the supervisor's, and has more fields.

    Args:
        rdzv_handler: a `RendezvousHandler` of torch's kind; `None` is a single node.
        fn: the entrypoint, by its older name.

    Raises:
        InputError: a value that cannot work.
    """

    role: str
    local_world_size: int
    rdzv_handler: Any = None
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        self.entrypoint = self.fn or self.entrypoint
        if not self.entrypoint:
            raise InputError("entrypoint is empty: name a program or pass a function")
        if self.local_world_size < 1:
            raise InputError(f"local_world_size is {self.local_world_size}: at least 1 worker is needed")
        if self.monitor_interval <= 0:
            raise InputError(f"monitor_interval is {self.monitor_interval}: use seconds above 0")

    def get_entrypoint_name(self) -> str:
        """The function's qualified name, or the program's path."""
        return self.entrypoint if isinstance(self.entrypoint, str) else getattr(self.entrypoint, "__qualname__", "")


class WorkerGroup:
    """The workers of this node, as they were last started (torch: `WorkerGroup`)."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank) for local_rank in range(spec.local_world_size)]
        self.store = None  # the store is the workers', not the agent's
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT
        self.restart_count = 0

    def begin(self, envs: Sequence[Mapping[str, str]]) -> None:
        """Takes the numbers of a round from the environments of the workers, which are by local rank."""
        first = envs[0]
        self.group_rank, self.group_world_size = int(first["GROUP_RANK"]), int(first["GROUP_WORLD_SIZE"])
        self.master_addr, self.master_port = first["MASTER_ADDR"], int(first["MASTER_PORT"])
        self.restart_count = int(first["TORCHELASTIC_RESTART_COUNT"])
        names = ("RANK", "ROLE_RANK", "WORLD_SIZE", "ROLE_WORLD_SIZE")
        self.workers = [Worker(rank, *(int(env[name]) for name in names)) for rank, env in enumerate(envs)]

    def started(self, ids: Mapping[int, Any]) -> None:
        """Takes the pids, by local rank."""
        self.workers = [worker.replace(id=ids.get(worker.local_rank)) for worker in self.workers]
        self.state = WorkerState.HEALTHY
