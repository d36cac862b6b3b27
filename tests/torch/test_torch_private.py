"""Private names of torch: whether this torch has each of them, and what a worker does without one.

Any version may rename them; `make matrix` runs this with every supported version.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.launching import LAUNCH_TIMEOUT_S, Launcher, ran
from kit.workers.in_place_training import course, script, start
from torch import distributed as dist
from torch.distributed import distributed_c10d

from aelastic.training import torch_private

pytestmark = pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S)

# One process has two groups, a mesh, and one of each object whose private attributes are used.
USES_ALL = """
import gc, weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from aelastic.training import torch_private

made, stores = [], []


def making(make):
    def make_group(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[-1]

    return make_group


def connecting(rendezvous):
    def make_store(*args, **kwargs):
        for each in rendezvous(*args, **kwargs):
            stores.append(each)
            yield each

    return make_store


def form():
    with torch_private.making_groups(making, connecting):
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        dist.new_group([0])
        return init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))


assert torch_private.missing() == []

# Groups: each way to make one is noticed, and they can be destroyed, also if only half of one was made.
mesh = form()
groups = torch_private.groups()
assert stores and {id(group) for group, _ in made} >= {id(group) for group in groups}, (made, groups)
assert {id(mesh.get_group(name)) for name in mesh.mesh_dim_names} <= {id(group) for group in groups}
assert torch_private.device_of(groups[0]) == torch.device("cpu")
torch_private.abort_groups()  # leaves those of gloo alone
dist.all_reduce(torch.ones(1))
name = dist.group.WORLD.group_name
refs = [weakref.ref(group) for group, _ in made]
torch_private.destroy_groups()
assert torch_private.groups() == []
torch_private.release_from_meshes([group for group, _ in made])
groups.clear()
made.clear()
gc.collect()
assert not [ref for ref in refs if ref() is not None], "a mesh still holds a group"

honest = dist.distributed_c10d._update_default_pg


def fail(group):
    raise RuntimeError("a rank was lost meanwhile")


dist.distributed_c10d._update_default_pg = fail
try:
    form()
except RuntimeError:
    pass
dist.distributed_c10d._update_default_pg = honest
assert not dist.is_initialized()
torch_private.destroy_groups()
form()
assert dist.group.WORLD.group_name == name, "a replacement's has the same name"
torch_private.destroy_groups()

# Objects that hold the state.
tensor = torch.zeros(2)
before = torch_private.version(tensor)
tensor.add_(1)
assert torch_private.version(tensor) > before
torch_private.copy_all([tensor], [torch.ones(2)])
assert tensor.tolist() == [1, 1]

model = nn.BatchNorm1d(2)
assert set(torch_private.buffers_of(model)) == {"running_mean", "running_var", "num_batches_tracked"}
metadata = torch_private.metadata_of(model.state_dict())
assert metadata[""] == {"version": 2}, metadata
plain = type(model.state_dict())()
torch_private.set_metadata(plain, metadata)
assert torch_private.metadata_of(plain) is metadata

scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters())
scaler.scale(model(torch.randn(4, 2)).sum()).backward()
scaler.unscale_(optimizer)
torch_private.forget_unscaled(scaler)
scaler.unscale_(optimizer)  # raises if it has noted that it has done so
print("all")
"""


def test_this_torch_has_all_names_and_they_do_what_we_need(launch: Launcher) -> None:
    done = ran(launch.warm.python, launch.write("uses_all.py", USES_ALL))
    assert (done.returncode, done.stdout) == (0, "all\n"), done.stderr


@pytest.mark.parametrize("owner, name", [
    (distributed_c10d, "_update_default_pg"),
    (type(distributed_c10d._world), "pg_map"),
    (dist.ProcessGroup, "_device_types"),
    (torch.amp.GradScaler, "_per_optimizer_states"),
])  # fmt: skip
def test_a_name_that_a_torch_does_not_have_is_missing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    if hasattr(owner, name):
        monkeypatch.delattr(owner, name)
    else:  # only objects have it
        monkeypatch.setattr(owner, "__init__", lambda *_: None)
    assert [each.rpartition(".")[2] for each in torch_private.missing()] == [name]


@pytest.mark.all
@pytest.mark.ci
def test_where_one_is_missing_all_processes_are_new(launch: Launcher, undisturbed: str) -> None:
    case = """
from aelastic.training import torch_private

torch_private.missing = lambda: ["torch.distributed.distributed_c10d._world"]


def share(round):
    return 0  # all ranks have the same collectives
"""
    job = start(launch, script(case))
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.end) == (1, set(), undisturbed), job.story
    assert "has no torch.distributed.distributed_c10d._world: failures restart all workers" in job.stderr
    assert "in place" not in job.stderr
