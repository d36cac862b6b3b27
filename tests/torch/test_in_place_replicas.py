"""HSDP: a rank dies while the others are before and after an update, and the state is kept.

On the 2 x 2 mesh, ranks 0 and 2 hold one shard, ranks 1 and 3 the other.  Rank 3 dies, so ranks 0, 1 and 2 must have a
step in common.
"""

from __future__ import annotations

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Launcher
from kit.workers.in_place_training import course, start

pytestmark = [pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S), pytest.mark.all]

FAULT_AT = 6

SCRIPT = """
import select

import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aelastic import in_place

STEPS, FAULT_AT = 12, 6
torch.set_num_threads(1)
barrier = dist.barrier
is_fault = False  # whether this is the step of the fault


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_death():
    # Of rank 3.
    wait_for("process-3")
    with open("process-3") as file:
        try:
            end = os.pidfd_open(int(file.read()))
        except ProcessLookupError:
            return  # its agent has waited for it already
    select.select([end], [], [])
    os.close(end)


def note(name):
    with open(f"{name}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{name}.part", name)


def before_update(rank):
    pass


def vote(rank):
    barrier()


def vote_of_rank():
    if is_fault:
        vote(int(os.environ["RANK"]))
    else:
        barrier()


dist.barrier = vote_of_rank


@in_place
def train(round):
    global is_fault
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    for layer in model[0], model[3]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    start = round.share(model, optimizer, scheduler, replicas=mesh["replicate"].get_group())
    say("shared", os.environ["TORCHELASTIC_RESTART_COUNT"], rank, os.getpid(), start)
    for step in round.steps(start, STEPS):
        is_fault = is_first_round() and step == FAULT_AT
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        x = torch.randn(16, 32, generator=generator)
        loss = nn.functional.mse_loss(model(x), x[:, :1])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if is_fault:
            before_update(rank)
        optimizer.step()
        scheduler.step()
        round.commit(step + 1)
        if is_fault and rank == 1:
            note("committed")
    weights = sum(each.full_tensor().double().sum() for each in model.parameters()).item()
    if rank == 0:
        statistics = sum(each.double().sum() for each in model.buffers()).item()
        say("end", f"loss {loss.item():.15f} weights {weights:.15f} statistics {statistics:.15f}")
    del model, optimizer
    dist.destroy_process_group()


def is_first_round():
    return os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


if is_first_round() and rank == 3:
    note("process-3")
"""

# Rank 1 has its gradients first.  Without a vote, it would update, and lose its step.
ONE_HAS_VOTED = """
def before_update(rank):
    if rank == 3:
        while not (os.path.exists("voting") or os.path.exists("committed")):
            time.sleep(0.01)
        die()
    elif rank in {0, 2}:
        wait_for_death()
        dist.all_reduce(torch.ones(1))  # never ends: these ranks do not have their gradients


def vote(rank):
    note("voting")
    barrier()
"""

# Rank 1 passes the vote, and has no older step.  The others are cut, although all have voted.
ONE_HAS_PASSED = """
def vote(rank):
    barrier()
    if rank == 3:
        while not os.path.exists("committed"):
            time.sleep(0.01)
        die()
    elif rank in {0, 2}:
        wait_for_death()
        barrier()
"""


def script(case: str) -> str:
    return SCRIPT + case + "\n\ntrain()\n"


@pytest.mark.parametrize(
    "case, step",
    [pytest.param(ONE_HAS_VOTED, FAULT_AT, marks=pytest.mark.ci), (ONE_HAS_PASSED, FAULT_AT + 1)],
    ids=["one has voted", "one has passed"],
)
def test_the_survivors_of_a_loss_between_two_updates_have_a_step_in_common(
    launch: Launcher, case: str, step: int
) -> None:
    undisturbed = course(start(launch, script("def is_first_round(): return False\n"), name="undisturbed"))
    job = start(launch, script(case))
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {0, 1, 2}, step), job.story
    assert found.end == undisturbed.end, job.story
