"""The environment a worker starts with.

The names and their meaning are torchrun's (`torchrun` documents, "Environment Variables",
and what torchrun 2.13 sets beyond them); a test compares key by key.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Template
from typing import Any

from aelastic.ranks import NodeRanks
from aelastic.spec import WorkerSpec


def worker_env(
    spec: WorkerSpec,
    base: Mapping[str, str],
    *,
    run_id: str,
    ranks: NodeRanks,
    local_rank: int,
    restart_count: int,
    master_addr: str,
    master_port: int,
    error_file: str,
) -> dict[str, str]:
    """`base` plus what makes `torch.distributed.init_process_group()` work, for one worker."""
    return {
        **base,
        "RANK": str(ranks.first_rank + local_rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(ranks.group_rank),
        "ROLE_RANK": str(ranks.first_role_rank + local_rank),
        "ROLE_NAME": spec.role,
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
        "GROUP_WORLD_SIZE": str(ranks.group_world_size),
        "ROLE_WORLD_SIZE": str(ranks.role_world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        # Rank 0's init_process_group connects to our store instead of serving one of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def worker_args(args: tuple[Any, ...], local_rank: int) -> tuple[Any, ...]:
    """Puts the local rank where an argument says `${local_rank}`; other `$` stay as they are."""
    return tuple(
        Template(arg).safe_substitute(local_rank=str(local_rank)) if isinstance(arg, str) else arg for arg in args
    )
