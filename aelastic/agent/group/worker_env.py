"""The environment a worker starts with.

The names and their meaning are torchrun's (its documentation, "Environment Variables",
and the variables that torchrun 2.15 sets in addition); a test compares key by key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Template
from typing import Any

from aelastic.errors import InputError
from aelastic.rdzv.protocol.messages import Assigned
from aelastic.spec import WorkerSpec
from aelastic.training.notice.page import PAGE_VARIABLE

CONTROL_SOCKET_VARIABLE = "TORCH_WORKER_SERVER_SOCKET"
# Ours: grows with each round, so that a script can reject writes of a worker of an earlier round.
FENCE_VARIABLE = "AELASTIC_ROUND"
# Where to find the job's secret: `--secret-file`, and the folder of systemd's credentials (systemd.exec(5)).
SECRET_VARIABLE, CREDENTIALS_VARIABLE = "AELASTIC_SECRET_FILE", "CREDENTIALS_DIRECTORY"
# torch's: seconds that a worker may spend in uninterruptible sleep; unset, 0 or less: no limit.
STUCK_VARIABLE = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
# systemd's, for the service itself (`sd_notify(3)`, `sd_watchdog_enabled(3)`).
SYSTEMD_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
# AMD's HIP uses the first one if it is set and not empty, otherwise the second, like CUDA.
_DEVICES_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
# Variables that differ from worker to worker, or from one start to the next.
OWN_VARIABLES = frozenset(
    {
        "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_USE_AGENT_STORE", FENCE_VARIABLE, CONTROL_SOCKET_VARIABLE,
        PAGE_VARIABLE,
    }
)  # fmt: skip

# Those of them that workers do not have if they start ahead of their round: they cannot meet before they are in it.
MEETING_VARIABLES = frozenset({"MASTER_ADDR", "MASTER_PORT"})


def worker_env(
    spec: WorkerSpec,
    base: Mapping[str, str],
    assigned: Assigned,
    local_rank: int,
    *,
    run_id: str,
    control_socket: str,
    notice_page: str | None,
    has_agent_store: bool,
) -> dict[str, str]:
    """Returns `base` plus the variables that `torch.distributed.init_process_group()` needs, for one worker."""
    ranks = assigned.ranks
    return {
        **base,
        **_same_for_all(spec, base, run_id),
        "RANK": str(ranks.first_rank + local_rank),
        **_local_rank_env(spec, base, local_rank),
        **({} if notice_page is None else {PAGE_VARIABLE: notice_page}),
        "GROUP_RANK": str(ranks.group_rank),
        "ROLE_RANK": str(ranks.first_role_rank + local_rank),
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
        "GROUP_WORLD_SIZE": str(ranks.group_world_size),
        "ROLE_WORLD_SIZE": str(ranks.role_world_size),
        "MASTER_ADDR": assigned.master_addr,
        "MASTER_PORT": str(assigned.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(assigned.restart_count),
        FENCE_VARIABLE: str(assigned.fence),
        # Whether rank 0's init_process_group connects to our store instead of serving its own.
        "TORCHELASTIC_USE_AGENT_STORE": str(has_agent_store),
        # torchrun leaves this one to its users; without it, `worker_main` serves nothing.
        CONTROL_SOCKET_VARIABLE: control_socket,
    }


def own_variables(spec: WorkerSpec) -> frozenset[str]:
    """Returns the variables that differ from worker to worker, or from one start to the next."""
    return OWN_VARIABLES | {*_DEVICES_VARIABLES} if spec.virtual_local_rank else OWN_VARIABLES


def common_env(spec: WorkerSpec, base: Mapping[str, str], run_id: str) -> dict[str, str]:
    """Returns the part of the environment that all workers of this node share, in every round."""
    own = own_variables(spec)
    return {name: value for name, value in {**base, **_same_for_all(spec, base, run_id)}.items() if name not in own}


def _same_for_all(spec: WorkerSpec, base: Mapping[str, str], run_id: str) -> dict[str, str]:
    return {
        "ROLE_NAME": spec.role,
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def check_devices(spec: WorkerSpec, base: Mapping[str, str]) -> None:
    """Rejects a setting that gives each worker its own device if there are too few devices.

    Raises:
        InputError: `HIP_VISIBLE_DEVICES` or `CUDA_VISIBLE_DEVICES` names fewer devices than there are workers.
    """
    variable, visible = _visible_devices(base)
    if not spec.virtual_local_rank or visible is None:
        return
    count = len(visible.split(","))
    if count < spec.local_world_size:
        raise InputError(
            f"{variable}={visible!r} has no device for local rank {count}, and virtual_local_rank gives each "
            "worker its own: start fewer workers, or list more devices"
        )


def _visible_devices(base: Mapping[str, str]) -> tuple[str, str | None]:
    """Returns the variable that lists the visible devices, and its value."""
    hip, cuda = _DEVICES_VARIABLES
    return (hip, base[hip]) if base.get(hip) else (cuda, base.get(cuda))


def _local_rank_env(spec: WorkerSpec, base: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Returns the variables that choose a worker's device: its number among the visible ones, and these."""
    if not spec.virtual_local_rank:
        return {"LOCAL_RANK": str(local_rank)}
    hip, cuda = _DEVICES_VARIABLES
    variable, visible = _visible_devices(base)
    own = str(local_rank) if visible is None else visible.split(",")[local_rank].strip()
    return {"LOCAL_RANK": "0", cuda: own, **({hip: own} if variable == hip else {})}


def has_agent_store(spec: WorkerSpec, base: Mapping[str, str]) -> bool:
    """Whether the agent serves the workers' store; otherwise rank 0 does, and can do so at any `tcp://` address.

    As in torchrun, a variable turns it off, except if the port was given in advance.
    """
    is_static = spec.master_port is not None if spec.rdzv is None else spec.rdzv.backend == "static"
    return is_static or base.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"


def worker_args(args: Sequence[Any], local_rank: int) -> tuple[Any, ...]:
    """Replaces `${local_rank}` in arguments by the local rank; leaves any other `$` alone."""
    return tuple(
        Template(arg).safe_substitute(local_rank=str(local_rank)) if isinstance(arg, str) else arg for arg in args
    )
