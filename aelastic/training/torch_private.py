"""Every name of torch that is not public and that recovery in place needs, in one place.

torch may rename them in any version.  `missing` names what an installed torch lacks, so that the decorator can do
without recovery instead of failing in the middle of one.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

c10d: Any = distributed_c10d  # most of what is used here is not in its types

Make = Callable[..., Any]

_NAMES = ("_world", "_new_process_group_helper", "rendezvous", "_update_default_pg", "_unregister_all_process_groups")
# What `_world` keeps of each group, besides the number that names the next one.
_MAPS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state")


def missing() -> list[str]:
    """Returns names that this torch lacks, and without which a recovery would fail, or end with a wrong state."""
    names: list[tuple[str, Any, tuple[str, ...]]] = [
        ("torch.distributed.distributed_c10d", c10d, _NAMES),
        ("torch.distributed.distributed_c10d._world", getattr(c10d, "_world", None), (*_MAPS, "group_count")),
        ("torch.distributed.ProcessGroup", dist.ProcessGroup, ("_device_types", "_get_backend")),
        ("torch.Tensor", torch.Tensor, ("_version",)),
        ("torch.nn.Module", torch.nn.Module(), ("_buffers",)),
        ("torch.nn.Module.state_dict", torch.nn.Module().state_dict(), ("_metadata",)),
        ("torch.amp.GradScaler", torch.amp.GradScaler("cpu"), ("_per_optimizer_states",)),
    ]
    return [f"{where}.{name}" for where, owner, private in names for name in private if not hasattr(owner, name)]


@contextmanager
def making_groups(make_group: Callable[[Make], Make], make_store: Callable[[Make], Make]) -> Iterator[None]:
    """Wraps the function that makes each process group, and the one that connects to the store of the first.

    `init_process_group`, `new_group` and device meshes all call these two, under whichever name a script or a
    framework has imported them.
    """
    helper = c10d._new_process_group_helper
    rendezvous = c10d.rendezvous
    c10d._new_process_group_helper = make_group(helper)
    c10d.rendezvous = make_store(rendezvous)
    try:
        yield
    finally:
        c10d._new_process_group_helper = helper
        c10d.rendezvous = rendezvous


def groups() -> list[Any]:
    """Returns the existing process groups."""
    return list(c10d._world.pg_map)


def destroy_groups() -> None:
    """Destroys all process groups, also if making the first of them failed halfway."""
    if dist.is_initialized():
        dist.destroy_process_group()
        return
    # Otherwise the next group's name would differ from that in a process that made none, and both would wait.
    world = c10d._world
    c10d._update_default_pg(None)
    for name in _MAPS:
        getattr(world, name).clear()
    world.group_count = 0
    c10d._unregister_all_process_groups()


def release_from_meshes(old: list[Any]) -> None:
    """Removes old groups from the device meshes that hold them: caches of DTensor keep meshes for good (torch 2.13)."""
    for each in gc.get_objects():
        if type(each) is DeviceMesh:
            registry = getattr(each, "_pg_registry", {})
            for name in [name for name, group in registry.items() if any(group is other for other in old)]:
                del registry[name]


def abort_groups() -> None:
    """Ends the communicators of NCCL, so that a rank leaves its collective.  Not run: it needs several GPUs.

    Groups of gloo are left alone: there, aborting frees nobody (torch 2.13), and cut sockets do.
    """
    for group in groups():
        for device in group._device_types:
            if device.type == "cpu":
                continue
            backend = group._get_backend(device)
            if "gloo" not in type(backend).__name__.lower() and hasattr(backend, "abort"):
                backend.abort()


def device_of(group: Any) -> torch.device:
    """Returns the device for tensors sent in this group: the CPU, if the group supports it."""
    devices = group._device_types
    if any(device.type == "cpu" for device in devices):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, f"a process group for {devices} without a device"
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def version(tensor: torch.Tensor) -> int:
    """Returns a number that rises with each change of the tensor in place, except those by batch normalization."""
    return tensor._version


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns the module's own buffers, to read and to replace."""
    return module._buffers


def register_scaler_update_pre_hook(call: Callable[[], None]) -> Callable[[], None]:
    """Calls this before each `GradScaler.update`, for which torch has no hook; returns a function to undo that."""
    scaler: Any = torch.amp.GradScaler
    update = scaler.update

    @functools.wraps(update)
    def call_then_update(*args: Any, **kwargs: Any) -> None:
        call()
        update(*args, **kwargs)

    def remove() -> None:
        scaler.update = update

    scaler.update = call_then_update
    return remove


def forget_unscaled(scaler: Any) -> None:
    """Does what `GradScaler.update` does after a step, except choosing the next scale; no-op for other objects."""
    states = getattr(scaler, "_per_optimizer_states", None)  # a scaler that is not enabled has none
    if states is not None:
        states.clear()


def metadata_of(state: Any) -> Any:
    """Returns the versions of the modules' formats, which a module's state dict has besides its items."""
    return getattr(state, "_metadata", None)


def set_metadata(state: Any, metadata: Any) -> None:
    state._metadata = metadata


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies tensors in as few calls as possible: `_foreach_copy_` has no public name."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
